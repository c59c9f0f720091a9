"""The fence: code that reads or writes a weight gets the weight's new value, whoever runs it and wherever it does.

Between `step()` and the end of its copies a weight in device memory is old. A module's forward waits for it by hooks.
Everything else reaches a weight through its Parameter object; so while the fence is up the object's class is a subclass
whose `__torch_function__` first lets the weight arrive, on the stream that is current, and then does what was asked.
The class belongs to the object, not to a thread or a context: it is seen by every thread, under every mode, and by
operations of lists. Within forward the class is the plain one again, so layers cost nothing and compiled code sees
what it was compiled for (docs/decisions/0022-the-fence.md).
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch._compile import _disable_dynamo

without_functions = torch._C.DisableTorchFunctionSubclass
"""A context in which fenced weights are plain ones to the thread that enters it: for code of ours that knows when to
wait.
"""

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def unfenced(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Run a function of ours in that context."""

    @functools.wraps(function)
    def plainly(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        with without_functions():
            return function(*args, **kwargs)

    return plainly


class Reader(Protocol):
    """Who lets weights arrive."""

    def read(self, parameters: Sequence[torch.Tensor]) -> None:
        """The caller is about to read or write these, on the stream that is current."""

    def exposed(self, parameter: torch.Tensor, alias: torch.Tensor | None) -> None:
        """The caller holds memory of a weight now that it can write without the weight's version counter. `alias`: the
        tensor through which, with a counter of its own; None: an address.
        """


class _Record:
    """A parameter that fences stand before.

    `weak`: the fence belongs to the parameter, which may go before it. Others hold it, for torch refuses to swap a
    tensor that has weak references (`nn.Module.to` of sharded parameters does).
    """

    __slots__ = ("fenced", "key", "parameter", "plain", "readers", "up")

    def __init__(self, parameter: torch.Tensor, *, weak: bool) -> None:
        key = self.key = id(parameter)
        self.parameter: Callable[[], torch.Tensor | None] = lambda: parameter
        if weak:
            self.parameter = weakref.ref(parameter, lambda _: _RECORDS.pop(key, None))
        self.plain = _plain_class(parameter)
        self.fenced = _fenced_class(self.plain)
        self.readers: dict[int, Reader] = {}
        self.up = 0
        """Bits of the fences that are up: the class is the plain one when none is."""


_RECORDS: dict[int, _Record] = {}
"""By identity of the parameter."""


class Fence:
    """One reader's fence before its parameters: down when it is made, and again after `close`.

    Several fences may stand before one parameter; each is raised and lowered by itself.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], reader: Reader, *, weak: bool = False) -> None:
        self._entries: dict[int, tuple[_Record, int]] = {}
        for parameter in parameters:
            record = _RECORDS.get(id(parameter))
            if record is None:
                record = _RECORDS[id(parameter)] = _Record(parameter, weak=weak)
            bit = next(bit for bit in _bits() if bit not in record.readers)
            record.readers[bit] = reader
            self._entries[id(parameter)] = record, bit
        self.close: Callable[[], None] = weakref.finalize(self, _close, list(self._entries.values()))
        """Lower it for good. Happens by itself when the fence is collected."""

    def entries(self, parameters: Iterable[torch.Tensor] | None = None) -> Sequence[tuple[_Record, int]]:
        """What `up` and `down` take: all, or those of some parameters."""
        if parameters is None:
            return list(self._entries.values())
        return [self._entries[id(p)] for p in parameters if id(p) in self._entries]


def up(entries: Sequence[tuple[_Record, int]]) -> None:
    """Raise a fence before some of its parameters."""
    for record, bit in entries:
        record.up |= bit
        parameter = record.parameter()
        if parameter is not None:
            parameter.__class__ = record.fenced


def down(entries: Sequence[tuple[_Record, int]]) -> None:
    """Lower it."""
    for record, bit in entries:
        record.up &= ~bit
        parameter = record.parameter()
        if not record.up and parameter is not None:
            parameter.__class__ = record.plain


def _bits() -> Iterator[int]:
    bit = 1
    while True:
        yield bit
        bit <<= 1


def _close(entries: Sequence[tuple[_Record, int]]) -> None:
    down(entries)
    for record, bit in entries:
        record.readers.pop(bit, None)
        if not record.readers and _RECORDS.get(record.key) is record:
            del _RECORDS[record.key]


# ---------------------------------------------------------------- what is asked of a weight


def _of_tensor(names: str, *, accessors: Sequence[str]) -> set[Any]:
    found = {getattr(torch.Tensor, name, None) for name in names.split()}
    return {getattr(each, accessor, None) for each in found for accessor in accessors} if accessors else found


_METADATA = (
    _of_tensor(
        "grad _grad shape dtype device requires_grad is_leaf grad_fn _version layout ndim names is_cuda is_cpu "
        "is_sparse is_sparse_csr is_quantized is_meta is_mkldnn is_nested is_xpu is_mps is_mtia is_ipu is_maia "
        "is_vulkan is_xla itemsize nbytes name output_nr retains_grad _base _backward_hooks volatile grad_dtype "
        "_post_accumulate_grad_hooks",
        accessors=("__get__", "__set__", "__delete__"),
    )
    | _of_tensor(
        "size dim numel nelement stride storage_offset element_size is_contiguous is_floating_point is_complex "
        "is_signed is_inference get_device has_names ndimension requires_grad_ register_hook retain_grad __len__ "
        "__hash__ is_shared register_post_accumulate_grad_hook is_conj is_neg is_same_size dim_order _is_view "
        "_use_count __dir__ new_empty new_zeros new_ones new_full new_tensor new_empty_strided",
        accessors=(),
    )
    | {
        torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like,
        torch.randint_like, torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor, torch.result_type,
        torch.autograd.grad, torch.autograd.backward,
    }
) - {None}  # fmt: skip
"""What reads no element of the weight itself: the loop's own `zero_grad`, `p.grad` and `p.shape` must not wait."""

_ALIASES = {torch.Tensor.data.__get__}  # type: ignore[attr-defined]
"""What returns a tensor that shares the weight's memory, and not its version counter."""
_ADDRESSES = _of_tensor(
    "data_ptr const_data_ptr mutable_data_ptr untyped_storage storage _typed_storage numpy __array__ __dlpack__ "
    "share_memory_",
    accessors=(),
) | _of_tensor("__cuda_array_interface__", accessors=("__get__",)) - {None}
"""What returns an address, or memory that is written without torch."""


def _function(
    cls: type, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """The `__torch_function__` of fenced weights."""
    kwargs = {} if kwargs is None else kwargs
    if func in _METADATA:
        with without_functions():
            return func(*args, **kwargs)
    found = list(_fenced((*args, *kwargs.values())))
    let_arrive(found)
    if all(kind is FencedParameter for kind in types):
        with without_functions():
            result = func(*args, **kwargs)
    else:
        # Other classes have a say in this, too: to them these are plain weights.
        with _plain(found):
            result = func(*args, **kwargs)
    if func is torch.Tensor.detach and _in_new_parameter(sys._getframe(1)):
        result.__class__ = type(args[0])  # `Parameter(weight)` wants one of the class that it was given
    if func in _ALIASES or func in _ADDRESSES:
        _expose(found, result if func in _ALIASES else None)
    return result


def _in_new_parameter(frame: FrameType | None) -> bool:
    """Whether `torch.nn.Parameter(...)` has called, past the frames that keep the compiler out."""
    for _ in range(4):
        if frame is None:
            return False
        if frame.f_code is torch.nn.Parameter.__new__.__code__:
            return True
        frame = frame.f_back
    return False


def let_arrive(parameters: Sequence[torch.Tensor]) -> None:
    """Whoever knows of these weights lets them arrive: the current stream may read and write them from here on."""
    asked: dict[int, tuple[Reader, list[torch.Tensor]]] = {}
    for parameter in parameters:
        record = _RECORDS.get(id(parameter))
        if record is None:  # made by `type(weight)(...)`: a weight of nobody
            parameter.__class__ = _plain_class(parameter)
            continue
        for reader in record.readers.values():
            asked.setdefault(id(reader), (reader, []))[1].append(parameter)
    for reader, wanted in asked.values():
        reader.read(wanted)


def _hand_out(parameter: torch.Tensor) -> None:
    """The caller gets the tensor that the weight lies in, and may write it by way of that."""
    let_arrive([parameter])
    _expose([parameter], None)


def _expose(parameters: Sequence[torch.Tensor], alias: torch.Tensor | None) -> None:
    for parameter in parameters:
        record = _RECORDS.get(id(parameter))
        for reader in () if record is None else tuple(record.readers.values()):
            reader.exposed(parameter, alias)


def _fenced(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if type(value) in _FENCED:
                yield value
        elif isinstance(value, (list, tuple, set, frozenset)):
            yield from _fenced(value)
        elif isinstance(value, Mapping):
            yield from _fenced(value.values())


class _plain:  # noqa: N801
    """These fenced weights have their plain class inside the block."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters

    def __enter__(self) -> None:
        for parameter in self._parameters:
            parameter.__class__ = _plain_class(parameter)

    def __exit__(self, *_: object) -> None:
        for parameter in self._parameters:
            record = _RECORDS.get(id(parameter))
            if record is not None and record.up:
                parameter.__class__ = record.fenced


# What torch does in Python or on raw memory with a Parameter, without asking `__torch_function__` first.


def _as_plain(self: torch.Tensor, name: str, *args: Any) -> Any:
    let_arrive([self])
    with _plain([self]):
        return getattr(self, name)(*args)


class FencedParameter(torch.nn.Parameter):
    """A Parameter whose fence is up: any use lets its new value arrive first."""

    __torch_function__: Any = classmethod(_disable_dynamo(_function))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _as_plain(self, "__deepcopy__", memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _as_plain(self, "__reduce_ex__", protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        text: str = _as_plain(self, "__repr__")
        return text


_FENCED: dict[type, type] = {FencedParameter: torch.nn.Parameter}
"""Fenced classes, and the plain ones that they stand for."""


def _plain_class(parameter: torch.Tensor) -> type:
    return _FENCED.get(type(parameter), type(parameter))


@functools.cache
def _fenced_class(plain: type) -> type:
    """The fenced class of Parameter, or of the DTensor that FSDP2 makes of one."""
    if plain is torch.nn.Parameter:
        return FencedParameter
    from hostward.distributed.fsdp2 import fenced_class

    made = fenced_class(plain, classmethod(_disable_dynamo(_function)), _hand_out, _as_plain)
    _FENCED[made] = plain
    return made


def plain_type(tensor: torch.Tensor) -> type:
    """`type(tensor)`, of a fenced weight the class that it has without the fence."""
    kind = type(tensor)
    return _FENCED.get(kind, kind)
