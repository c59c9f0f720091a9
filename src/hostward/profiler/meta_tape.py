"""Record what a forward and backward allocates, operation by operation, on the meta device, where data is not computed.

A *meta tape* records every storage that operations make, when it is made and when it is freed. Autograd runs as usual,
so what it saves, and when it frees it, is observed rather than modelled. Differences between the meta device and a CUDA
device are corrected here: attention, sums of gradients, and values that Python reads. On another device the tape
records what really runs.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_META = torch.device("meta")
_ATEN: Any = torch.ops.aten


@dataclass(slots=True)
class Block:
    """Describe a storage: its bytes, the operation that made it, and the first one that ran without it."""

    nbytes: int
    made: int
    gone: int | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """Hold an operation's work: matrix operations (a multiplication and an addition are two), or memory traffic.

    Traffic is the bytes of device memory that all other operations read and write.
    """

    flops: float = 0.0
    traffic_bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.traffic_bytes + other.traffic_bytes)


Made = dict[Any, Sequence[tuple[torch.Size, tuple[int, ...], torch.dtype]]]
"""Sizes, strides and dtypes of the new memory that operations return, by operation and arguments; none if any of it is
that of an argument.
"""


class MetaTape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record operations and storages while entered.

    Args:
        device: device whose storages count.
        outside: tensors whose storages do not count: weights, buffers, inputs.
        label: returns the owner of an operation.
        made: what operations returned on other tapes of the meta device, where torch finds that out in Python, slowly.
    """

    def __init__(
        self,
        device: torch.device,
        outside: Sequence[torch.Tensor],
        label: Callable[[], str | None],
        made: Made | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._label = device, label
        self._made: Made = {} if made is None else made
        self.attention = Attention(self)
        """Mode to enter where attention may run; again in backward, since modes do not last into it."""
        self._experts = 1
        self._unshared_uses = _uses(torch.empty(1, device=_META))
        """Uses counted for a storage that one tensor has: the tensor's own, and that of the object which Python made to
        ask.
        """
        self.outside = {t.untyped_storage()._cdata for t in outside}
        self._held = [t.untyped_storage() for t in outside]
        self.blocks: list[Block] = []
        self.block_of: dict[int, Block] = {}
        """Live blocks by the address of the storage's object."""
        self.work: list[tuple[str | None, Work]] = []
        """Work by operation, with its owner."""

    @property
    def position(self) -> int:
        """Return the number of the next operation."""
        return len(self.work)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = self._special(func, args)
        if out is None:
            out = self._computed(func, args, kwargs)
        for tensor in _tensors(out):
            self._see(tensor)
        self.work.append((self._label(), _work_of(func, args, out)))
        return out

    def _computed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operation returns: on the meta device, new memory like that of the same one before."""
        if func.is_view or self._device != _META:
            return func(*args, **kwargs)
        try:
            key = func, _described(args), _described(tuple(kwargs.items()))
            known = self._made.get(key)
        except TypeError:
            return func(*args, **kwargs)
        if known:
            found = [torch.empty_strided(size, stride, dtype=dtype, device=_META) for size, stride, dtype in known]
            return found[0] if len(found) == 1 else tuple(found)
        out = func(*args, **kwargs)
        self._made.setdefault(key, _as_new(args, out))
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.block_of or key in self.outside or tensor.device != self._device:
            return
        block = self.block_of[key] = Block(storage.nbytes(), self.position)
        self.blocks.append(block)
        weakref.finalize(storage, self._gone, key, block).atexit = False

    def _gone(self, key: int, block: Block) -> None:
        block.gone = self.position
        self.block_of.pop(key, None)

    def note(self, work: Work) -> None:
        """Replace the work of the last operation."""
        self.work[-1] = (self._label(), work)

    def block(self, tensor: torch.Tensor) -> Block | None:
        """Return the block of a tensor's storage; None for storages that do not count."""
        return self.block_of.get(tensor.untyped_storage()._cdata)

    def _special(self, func: Any, args: Sequence[Any]) -> Any:
        """Return the result of an operation that the meta device does otherwise than a CUDA device; None for all
        others.
        """
        if func is _ATEN._local_scalar_dense.default and args[0].device == _META and args[0].dtype is torch.bool:
            # Models check for packing and masks; the answer is that there are none.
            return True
        if func is _ATEN.nonzero.default and args[0].device == _META:
            return self._chosen(args[0])
        if func is _ATEN.bincount.default and args[0].device == _META:
            # Number of chosen experts: at most as many as there are.
            return torch.empty(args[2] if len(args) > 2 else 0, dtype=torch.int64, device=_META)
        if func is _ATEN._grouped_mm.default and args[0].device == _META:
            return _grouped_out(*args[:3])
        if func is not _ATEN.add.Tensor or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
            return None
        # Autograd accumulates in place where nothing else holds the first gradient; in a dispatch mode it never does.
        first, second = args
        alike = isinstance(second, torch.Tensor) and first.shape == second.shape and first.dtype is second.dtype
        unshared = _uses(first) <= self._unshared_uses
        return first.add_(second) if alike and unshared else None

    def _chosen(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the true positions of an experts' mask, with tokens spread evenly.

        [experts + 1]: experts that have tokens, and one entry for none; [choices, tokens]: the choices of one expert.
        """
        if mask.dim() == 1:
            self._experts = max(1, mask.shape[0] - 1)
            return torch.arange(self._experts, device="cpu").unsqueeze(1)
        rows = max(1, mask.numel() // self._experts)
        return torch.empty(rows, mask.dim(), dtype=torch.int64, device=_META)


def _described(value: Any) -> Any:
    """Return what the result of an operation depends on. Raises TypeError for an argument of another device."""
    if isinstance(value, torch.Tensor):
        if value.device != _META or value.layout is not torch.strided:
            raise TypeError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    return type(value), value  # 1 and 1.0 and True are equal


def _as_new(args: Sequence[Any], out: Any) -> Sequence[tuple[torch.Size, tuple[int, ...], torch.dtype]]:
    """Return sizes, strides and dtypes of what is returned; nothing if any of it is not new memory of its own."""
    tensors = [out] if isinstance(out, torch.Tensor) else out
    if not isinstance(tensors, (list, tuple)) or not all(isinstance(t, torch.Tensor) for t in tensors):
        return ()
    storages = [t.untyped_storage() for t in tensors]
    given = {t.untyped_storage()._cdata for t in _tensors(args)}
    dense = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=_META) for t in tensors]
    new = len({s._cdata for s in storages} - given) == len(tensors) and all(t.device == _META for t in tensors)
    if not new or any(d.untyped_storage().nbytes() != s.nbytes() for d, s in zip(dense, storages, strict=True)):
        return ()
    return [(t.shape, t.stride(), t.dtype) for t in tensors]


def _uses(tensor: torch.Tensor) -> int:
    """Return the number of objects that hold the tensor's storage."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _tensors(out: Any) -> Iterator[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        yield out
    elif isinstance(out, (tuple, list)):
        for item in out:
            yield from _tensors(item)


# ---------------------------------------------------------------- work


def _work_of(func: Any, args: Sequence[Any], out: Any) -> Work:
    packet = func.overloadpacket
    if packet in _PRODUCTS:
        return Work(flops=_PRODUCTS[packet](args))
    if not func.is_view and isinstance(out, (torch.Tensor, tuple, list)) and packet not in _FREE:
        given = sum(_nbytes(item) for a in args for item in _tensors(a))
        made = sum(_nbytes(item) for item in _tensors(out))
        return Work(traffic_bytes=given + made)
    return Work()


def _nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes touched by reading all elements: an expanded tensor is read once."""
    sizes = [n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(sizes) * tensor.element_size() if tensor.numel() else 0


def _mm(args: Sequence[Any]) -> float:
    return float(2 * args[0].shape[0] * args[0].shape[1] * args[1].shape[1])


def _bmm(args: Sequence[Any]) -> float:
    return float(2 * math.prod(args[0].shape) * args[1].shape[2])


def _grouped(args: Sequence[Any]) -> float:
    """Return rows by experts: each row meets one matrix; in the gradient of matrices, rows are summed over."""
    a, b = args[0], args[1]
    if a.dim() == 2 and b.dim() == 2:
        return float(2 * a.shape[0] * a.shape[1] * b.shape[1])
    return float(2 * a.shape[-2] * a.shape[-1] * b.shape[-1])


def _grouped_out(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
    """Return the output, in any dtype: on the meta device torch supports bf16 alone.

    Args:
        ends: of the groups, [groups].
    """
    if a.dim() == 2 and b.dim() == 2 and ends is not None:
        return a.new_empty(ends.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(*a.shape[:-1], b.shape[-1])


_PRODUCTS: Mapping[Any, Callable[[Sequence[Any]], float]] = {
    _ATEN.mm: _mm,
    _ATEN.addmm: lambda args: _mm(args[1:]),
    _ATEN.bmm: _bmm,
    _ATEN.baddbmm: lambda args: _bmm(args[1:]),
    _ATEN._grouped_mm: _grouped,
}
_FREE = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.detach, _ATEN._unsafe_view}


# ---------------------------------------------------------------- attention


class Attention(TorchFunctionMode):
    """Run attention as the flash and cuDNN kernels do; on the meta device torch would decompose it."""

    def __init__(self, tape: MetaTape) -> None:
        super().__init__()
        self._tape = weakref.proxy(tape)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention and args[0].device == _META:
            query, key, value = args[:3]
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            out = _FusedAttention.apply(query, key, value, mask)  # type: ignore[no-untyped-call]
            causal = bool(kwargs.get("is_causal", args[5] if len(args) > 5 else False))
            # With a causal mask the kernels compute only the unmasked half.
            products = 2.0 * math.prod(query.shape[:3]) * key.shape[2] * (query.shape[3] + value.shape[3])
            self._tape.note(Work(flops=products / 2 if causal else products))
            return out
        return func(*args, **kwargs)


class _FusedAttention(torch.autograd.Function):
    """Save the inputs, the output and the log-sum-exp; backward accumulates the queries' gradient in fp32.

    query: [batch, heads, tokens, size]; key and value may have fewer heads. mask: None, or what the kernels add to the
    scores; one of booleans is written out in the dtype of the query, for each call.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        batch, heads, tokens, size = query.shape
        if mask is not None and mask.dtype is torch.bool:
            mask = query.new_empty(mask.shape)
        if mask is None and value.shape[-1] == size:
            out = torch.empty_like(query)  # the flash kernel's has the layout of the query
        else:
            out = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
        sums = query.new_empty(batch, heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums, *(() if mask is None else (mask,)))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        query, key, value, _, sums = ctx.saved_tensors[:5]
        workspace = query.new_empty(query.shape, dtype=torch.float32), torch.empty_like(sums)
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del workspace
        return *gradients, None
