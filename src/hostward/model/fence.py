"""The fence makes any code that reads or writes a weight wait for the weight's new value.

Between `step()` and the completion of its copies a weight in device memory is old. A module's forward waits by hooks.
All other code reaches a weight through its Parameter object. So while the fence is up, the object's class is a subclass
whose `__torch_function__` first makes the current stream wait for the weight, and then calls the requested function.
The class belongs to the object, not to a thread or a context: every thread, every mode and operations on lists see it.
Within forward the class is the plain one again, so layers cost nothing and compiled code sees the class that it was
compiled for (docs/decisions/0022-the-fence.md).
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from types import FrameType
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch.autograd.graph import get_gradient_edge

from hostward.model.transforms import untransformed

without_functions = torch._C.DisableTorchFunctionSubclass
"""Context in which the calling thread sees fenced weights as plain ones, for our own code that waits by itself."""

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def unfenced(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Decorate a function of ours so that it sees fenced weights as plain ones."""

    @functools.wraps(function)
    def plainly(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        with without_functions():
            return function(*args, **kwargs)

    return plainly


class Reader(Protocol):
    """Make streams wait for weights that fenced code reads."""

    def read(self, parameters: Sequence[torch.Tensor]) -> None:
        """Make the current stream wait for these weights before the caller reads or writes them."""

    def exposed(self, parameter: torch.Tensor, alias: torch.Tensor | None) -> None:
        """Note that the caller can now write a weight without the weight's version counter.

        `alias`: the tensor through which it can, with its own counter; None: the caller has an address.
        """


class _Side(Enum):
    """State of one reader's fence of one parameter."""

    DOWN = "down"
    """The weight is there, and what is done with it is not reported."""
    WATCHED = "watched"
    """The weight is there, and ways to write it unnoticed are reported to the reader."""
    UP = "up"
    """The weight may be old: reading it waits, and such ways are reported as well."""


class Entry:
    """One reader's fence of one parameter."""

    __slots__ = ("record", "side")

    def __init__(self, record: _Record) -> None:
        self.record = record
        self.side = _Side.DOWN


class _Record:
    """Record the fences of one parameter, whose class is the plain one where all are down.

    `weak`: hold the parameter weakly, because it may be freed before its fence. Other fences hold it strongly, because
    torch does not swap a tensor that has weak references (`nn.Module.to` of sharded parameters swaps).
    """

    __slots__ = ("fenced", "key", "parameter", "plain", "readers")

    def __init__(self, parameter: torch.Tensor, *, weak: bool) -> None:
        key = self.key = id(parameter)
        self.parameter: Callable[[], torch.Tensor | None] = lambda: parameter
        if weak:
            self.parameter = weakref.ref(parameter, lambda _: _RECORDS.pop(key, None))
        self.plain = _plain_class(parameter)
        self.fenced = _fenced_class(self.plain)
        self.readers: dict[Entry, Reader] = {}

    def all_down(self) -> bool:
        down = _Side.DOWN
        for entry in self.readers:  # noqa: SIM110 - faster than `all`, and every layer of every step comes here
            if entry.side is not down:
                return False
        return True


_RECORDS: dict[int, _Record] = {}
"""Records by id of the parameter."""


class Fence:
    """Fence the parameters of one reader; the fence is down at first, and again after `close`.

    A parameter may have several fences; each is raised and lowered separately.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], reader: Reader, *, weak: bool = False) -> None:
        self._entries: dict[int, Entry] = {}
        for parameter in parameters:
            record = _RECORDS.get(id(parameter))
            if record is None:
                record = _RECORDS[id(parameter)] = _Record(parameter, weak=weak)
            entry = self._entries[id(parameter)] = Entry(record)
            record.readers[entry] = reader
        self.close: Callable[[], None] = weakref.finalize(self, _close, list(self._entries.values()))
        """Lower the fence for good; this also happens when the fence is garbage-collected."""

    def entries(self, parameters: Iterable[torch.Tensor] | None = None) -> Sequence[Entry]:
        """Return the arguments of `up` and `down` for all parameters, or for the given ones."""
        if parameters is None:
            return list(self._entries.values())
        return [self._entries[id(p)] for p in parameters if id(p) in self._entries]


def up(entries: Sequence[Entry]) -> None:
    """Raise a fence on these entries."""
    side = _Side.UP
    for entry in entries:
        entry.side = side
        record = entry.record
        parameter = record.parameter()
        if parameter is not None:
            parameter.__class__ = record.fenced


def down(entries: Sequence[Entry], *, watched: bool = False) -> None:
    """Lower a fence on these entries; `watched`: it still reports what can be written unnoticed, and waits for nothing.

    Their weights are there.
    """
    side = _Side.WATCHED if watched else _Side.DOWN
    for entry in entries:
        entry.side = side
        record = entry.record
        if record.all_down():
            parameter = record.parameter()
            if parameter is not None:
                parameter.__class__ = record.plain


def _close(entries: Sequence[Entry]) -> None:
    down(entries)
    for entry in entries:
        record = entry.record
        record.readers.pop(entry, None)
        if not record.readers and _RECORDS.get(record.key) is record:
            del _RECORDS[record.key]


# ---------------------------------------------------------------- functions of a weight


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
        torch.autograd.backward,
    }
) - {None}  # fmt: skip
"""Functions that read no element of the weight; the training loop's `zero_grad`, `p.grad`, `p.shape` must not wait."""

_ALIASES = {torch.Tensor.data.__get__}  # type: ignore[attr-defined]
"""Functions that return a tensor which shares the weight's memory, but not its version counter."""
_ADDRESSES = _of_tensor(
    "data_ptr const_data_ptr mutable_data_ptr untyped_storage storage _typed_storage numpy __array__ __dlpack__ "
    "share_memory_",
    accessors=(),
) | _of_tensor("__cuda_array_interface__", accessors=("__get__",)) - {None}
"""Functions that return an address, or memory that is written without torch."""


def _function(
    cls: type, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Implement `__torch_function__` of fenced weights."""
    kwargs = {} if kwargs is None else kwargs
    if func is torch.autograd.grad:
        return _gradients(*args, **kwargs)
    if func in _METADATA:
        with without_functions():
            return func(*args, **kwargs)
    found = list(_fenced((*args, *kwargs.values())))
    let_arrive(found)
    if all(kind is FencedParameter for kind in types):
        with without_functions():
            result = func(*args, **kwargs)
    else:
        # Other tensor subclasses take part, and have to see plain weights.
        with _plain(found):
            result = func(*args, **kwargs)
    if func is torch.Tensor.detach and _in_new_parameter(sys._getframe(1)):
        result.__class__ = type(args[0])  # `Parameter(weight)` requires the class of its argument
    if func in _ALIASES or func in _ADDRESSES:
        _expose(found, result if func in _ALIASES else None)
    return result


def _gradients(outputs: Sequence[Any], inputs: Sequence[Any], **options: Any) -> Any:
    """Call `torch.autograd.grad`, with the edges of fenced weights instead of these.

    So nothing is switched off for its backward, in which hooks and recomputed layers read other weights.
    """
    with without_functions():
        wanted = [type(each) is FencedParameter and each.requires_grad for each in inputs]
        edges = [get_gradient_edge(each) if edge else each for each, edge in zip(inputs, wanted, strict=True)]
    if any(type(each) in _FENCED for each in (*outputs, *edges)):
        with without_functions():
            return torch.autograd.grad(outputs, inputs, **options)
    materialize = options.pop("materialize_grads", False)
    found: Sequence[Any] = torch.autograd.grad(outputs, edges, **options)
    if not materialize:
        return found
    zeros = functools.partial(torch.zeros_like, requires_grad=bool(options.get("create_graph")))
    return tuple(zeros(each) if grad is None else grad for each, grad in zip(inputs, found, strict=True))


def _in_new_parameter(frame: FrameType | None) -> bool:
    """Return whether `torch.nn.Parameter(...)` is the caller, past the frames that keep the compiler out."""
    for _ in range(4):
        if frame is None:
            return False
        if frame.f_code is torch.nn.Parameter.__new__.__code__:
            return True
        frame = frame.f_back
    return False


def let_arrive(parameters: Sequence[torch.Tensor]) -> None:
    """Make the current stream wait for these weights, which it may read and write afterwards."""
    asked: dict[int, tuple[Reader, list[torch.Tensor]]] = {}
    for parameter in parameters:
        record = _RECORDS.get(id(parameter))
        if record is None:  # made by `type(weight)(...)`: no fence is registered for it
            parameter.__class__ = _plain_class(parameter)
            continue
        for entry, reader in record.readers.items():
            if entry.side is not _Side.WATCHED:
                asked.setdefault(id(reader), (reader, []))[1].append(parameter)
    for reader, wanted in asked.values():
        reader.read(wanted)


def readers_of(parameter: torch.Tensor) -> Sequence[Reader]:
    """Return the readers of all fences of a parameter, up or down."""
    record = _RECORDS.get(id(parameter))
    return () if record is None else tuple(record.readers.values())


def _hand_out(parameter: torch.Tensor) -> None:
    """Note that the caller gets the tensor which stores the weight, and may write the weight through it."""
    let_arrive([parameter])
    _expose([parameter], None)


@untransformed
def _expose(parameters: Sequence[torch.Tensor], alias: torch.Tensor | None) -> None:
    for parameter in parameters:
        record = _RECORDS.get(id(parameter))
        if record is None:
            continue
        for entry, reader in record.readers.items():
            if alias is not None or entry.side is not _Side.WATCHED:  # within forward kernels take addresses, to read
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
    """Give fenced weights their plain class inside the block."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters

    def __enter__(self) -> None:
        for parameter in self._parameters:
            parameter.__class__ = _plain_class(parameter)

    def __exit__(self, *_: object) -> None:
        for parameter in self._parameters:
            record = _RECORDS.get(id(parameter))
            if record is not None and not record.all_down():
                parameter.__class__ = record.fenced


# Operations on a Parameter that torch runs in Python or on raw memory, without calling `__torch_function__`.


def _as_plain(self: torch.Tensor, name: str, *args: Any) -> Any:
    let_arrive([self])
    with _plain([self]):
        return getattr(self, name)(*args)


class FencedParameter(torch.nn.Parameter):
    """Be a Parameter whose fence is up: any use first waits for its new value."""

    __torch_function__: Any = classmethod(_disable_dynamo(_function))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _as_plain(self, "__deepcopy__", memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _as_plain(self, "__reduce_ex__", protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        text: str = _as_plain(self, "__repr__")
        return text


_FENCED: dict[type, type] = {FencedParameter: torch.nn.Parameter}
"""Fenced classes and the plain classes that they replace."""


def _plain_class(parameter: torch.Tensor) -> type:
    return _FENCED.get(type(parameter), type(parameter))


@functools.cache
def _fenced_class(plain: type) -> type:
    """Return the fenced class of Parameter, or of FSDP2's DTensor of one."""
    if plain is torch.nn.Parameter:
        return FencedParameter
    from hostward.distributed.fsdp2 import fenced_class

    made = fenced_class(plain, classmethod(_disable_dynamo(_function)), _hand_out, _as_plain)
    _FENCED[made] = plain
    return made


def plain_type(tensor: torch.Tensor) -> type:
    """Return `type(tensor)`; for a fenced weight, the class that it has without the fence."""
    kind = type(tensor)
    return _FENCED.get(kind, kind)
