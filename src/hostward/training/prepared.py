"""accelerate's preparation of an optimizer, which moves the state to the device and back unless it is kept from it."""

from __future__ import annotations

import sys
from types import FrameType


class Unmoved:
    """In a state dict: the state that the optimizer has, wherever it lies. No dict, list or tensor, so nobody moves it.

    Args:
        optimizer: whose state it stands for.
    """

    __slots__ = ("_optimizer",)

    def __init__(self, optimizer: object) -> None:
        self._optimizer = optimizer

    def is_of(self, optimizer: object) -> bool:
        return self._optimizer is optimizer


def is_being_wrapped(optimizer: object) -> bool:
    """Whether accelerate is making its wrapper of the optimizer at this moment.

    `AcceleratedOptimizer.__init__` takes the state, moves every tensor in dicts and lists to the device and loads it
    back; it can be told so for no single optimizer. No other reader may be given something else than tensors in dicts
    (torch.distributed.checkpoint fills the dicts that it is given, and no other mappings), so the caller decides.
    """
    accelerate = sys.modules.get("accelerate.optimizer")
    made = getattr(accelerate, "AcceleratedOptimizer", None)
    code = getattr(getattr(made, "__init__", None), "__code__", None)
    frame: FrameType | None = None if code is None else sys._getframe(1)
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("optimizer") is optimizer:
            return True
        frame = frame.f_back
    return False
