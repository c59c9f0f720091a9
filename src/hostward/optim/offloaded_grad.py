"""Put a stand-in into `.grad` for a gradient that is offloaded. Any use of the stand-in raises a typed error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NoReturn

import torch

from hostward.errors import AsleepError, ModelError


class Where(StrEnum):
    """Names what became of a gradient that is no longer in `.grad`."""

    TAKEN = "taken"
    """The optimizer has it and will step with it."""
    USED = "used"
    """A step was made with it; the next backward starts a new gradient."""
    LOST = "lost"
    """Its backward pass did not end."""
    ASLEEP = "asleep"
    """It is on the host until `AdamW.wake`, which puts it back."""


_TOLD = {
    Where.TAKEN: "the optimizer took it during backward, and its bytes may be on the host by now",
    Where.USED: "the last step used it up",
    Where.LOST: "the backward pass that made it was interrupted",
    Where.ASLEEP: "sleep() has moved it to the host, and freed its device memory",
}
_FIXES = {
    Where.TAKEN: "clip by max_grad_norm of the optimizer, in a loop of accelerate by accelerator.clip_grad_norm_("
    "model.parameters(), ...), and read optimizer.grad_norm; to look at gradients, give overlap=False (to offload() or "
    "offloading() as well), or leave optimizer.accumulate(last=True) or Lightning's OffloadCallback out (of a model in "
    "DistributedDataParallel: give the optimizer module=model)",
    Where.USED: "read gradients before step(), drop them by optimizer.zero_grad(), or give AdamW overlap=False",
    Where.LOST: "call optimizer.zero_grad() and run the microbatches again",
    Where.ASLEEP: "call optimizer.wake() first",
}


_UNSCALING = "_amp_foreach_non_finite_check_and_unscale_"
_ZEROING = "zero_", "_foreach_zero_"
_FIX_OF_ZEROING = "drop it instead: optimizer.zero_grad(), or model.zero_grad() without set_to_none=False"


Unscaled = Callable[[torch.Tensor, torch.Tensor, torch.dtype], None]
"""Takes (found_inf, inverse scale) that a gradient scaler passed for offloaded gradients of one dtype."""


class Fate:
    """Holds what became of the gradients that one step takes, or would have taken."""

    now: Where = Where.TAKEN


class OffloadedGrad(torch.Tensor):
    """Stands in `.grad` for an offloaded gradient: it has the gradient's shape, dtype and device, and no bytes."""

    parameter_name: str
    made_for: torch.dtype
    """`dtype`, which is slow to read from a subclass of tensors."""
    fate: Fate
    unscaled: Unscaled

    @staticmethod
    def __new__(
        cls,
        name: str,
        like: torch.Tensor,
        dtype: torch.dtype,
        fate: Fate,
        unscaled: Unscaled,
    ) -> OffloadedGrad:
        made: OffloadedGrad = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=dtype, device=like.device)
        made.parameter_name, made.made_for, made.fate, made.unscaled = name, dtype, fate, unscaled
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        moved = [a for a in _flat(args) if isinstance(a, OffloadedGrad)]
        name = func.overloadpacket.__name__
        if name == _UNSCALING and all(m.fate.now in (Where.TAKEN, Where.USED) for m in moved):
            _unscale(func, args, [m for m in moved if m.fate.now is Where.TAKEN])
            return None
        if name in _ZEROING and all(m.fate.now in (Where.USED, Where.LOST) for m in moved):
            if name == "zero_":
                return args[0]
            for gradient in args[0]:
                if not isinstance(gradient, OffloadedGrad):
                    gradient.zero_()
            return None
        if name == "_to_copy" and moved[0].fate.now is Where.USED:
            return moved[0]._like(kwargs or {})
        raise moved[0].error(name)

    def _like(self, options: Mapping[str, Any]) -> OffloadedGrad:
        """Return a stand-in with the options of `module.to(...)`, which casts gradients along with weights.

        There is no gradient to cast, and casting the stand-in does no harm.
        """
        made: OffloadedGrad = torch.Tensor._make_wrapper_subclass(
            type(self),
            self.shape,
            dtype=options.get("dtype") or self.dtype,
            device=options.get("device") or self.device,
        )
        made.parameter_name, made.made_for = self.parameter_name, options.get("dtype") or self.dtype
        made.fate, made.unscaled = self.fate, self.unscaled
        return made

    def error(self, use: str) -> ModelError:
        """Return the error for a use of the stand-in."""
        error = AsleepError if self.fate.now is Where.ASLEEP else ModelError
        return error(
            f"the gradient of parameter {self.parameter_name!r} is not in .grad any more ({use})",
            why=_TOLD[self.fate.now],
            fix=_FIX_OF_ZEROING if use in _ZEROING and self.fate.now is Where.TAKEN else _FIXES[self.fate.now],
        )

    # Methods that torch runs in Python or on raw memory, without going through the dispatcher.

    def share_memory_(self) -> NoReturn:
        raise self.error("share_memory_")

    def numpy(self, **_: object) -> NoReturn:
        raise self.error("numpy")

    def tolist(self) -> NoReturn:
        raise self.error("tolist")

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise self.error("__array__")

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise self.error("pickle")

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"OffloadedGrad({self.parameter_name!r}, {self.fate.now.value}, {tuple(self.shape)}, {self.dtype})"


def _unscale(func: Any, args: Sequence[Any], taken: Sequence[OffloadedGrad]) -> None:
    """Look for infinities and apply a scaler's factor: for gradients that are `taken` the norm does both, a little
    later, and for all of their dtype with them.

    A parameter whose gradient was used has none in this step.
    """
    if taken:
        taken[0].unscaled(args[1], args[2], taken[0].made_for)
        return
    here = [gradient for gradient in args[0] if not isinstance(gradient, OffloadedGrad)]
    if here:
        func(here, args[1], args[2])


def _flat(args: Sequence[Any]) -> list[Any]:
    return [item for a in args for item in (a if isinstance(a, (list, tuple)) else [a])]


def raise_lost(name: str) -> NoReturn:
    """Raises ModelError because the backward that made the gradient did not end."""
    raise ModelError(f"the gradient of parameter {name!r} is incomplete", why=_TOLD[Where.LOST], fix=_FIXES[Where.LOST])
