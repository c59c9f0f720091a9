"""Copy losses and norms from the device and read them one iteration late, so that no iteration waits for the host."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Numbers:
    """Loss, gradient norm and skip flag of one iteration."""

    iteration: int
    loss: float
    grad_norm: float
    skipped: bool


@dataclass(frozen=True, slots=True)
class _Place:
    """Landing buffer of three numbers: float32 [3] on the host, and the event after the copy; None on a CPU."""

    values: torch.Tensor
    copied: torch.cuda.Event | None


class Readback:
    """Returns numbers in the order in which they were sent.

    Args:
        device: the device that computes them.
        late: how many of the newest iterations may still be in flight; None: 1 on a CUDA device, 0 elsewhere.
    """

    def __init__(self, device: torch.device, *, late: int | None = None) -> None:
        self._device = device
        self._late = (1 if device.type == "cuda" else 0) if late is None else late
        self._sent: deque[tuple[int, _Place]] = deque()
        self._unused: list[_Place] = []

    def send(self, iteration: int, loss: torch.Tensor, grad_norm: torch.Tensor, skip: torch.Tensor) -> None:
        """Enqueue copies of one element each, float32, float32 and int32, on the current stream."""
        place = self._unused.pop() if self._unused else self._new_place()
        row = torch.cat([loss.view(1), grad_norm.view(1), skip.view(1).float()])
        place.values.copy_(row, non_blocking=True)
        if place.copied is not None:
            place.copied.record()
        self._sent.append((iteration, place))

    def arrived(self, *, everything: bool = False) -> list[Numbers]:
        """Return numbers not returned before: all but the newest `late`, or all.

        Waits for these copies only.
        """
        found = []
        while len(self._sent) > (0 if everything else self._late):
            iteration, place = self._sent.popleft()
            if place.copied is not None:
                place.copied.synchronize()
            loss, grad_norm, skip = place.values.tolist()
            found.append(Numbers(iteration, loss, grad_norm, bool(skip)))
            self._unused.append(place)
        return found

    def _new_place(self) -> _Place:
        cuda = self._device.type == "cuda"
        return _Place(
            torch.empty(3, dtype=torch.float32, pin_memory=cuda),
            # Blocking: a spinning thread takes a core from the CPU optimizer step.
            torch.cuda.Event(blocking=True) if cuda else None,  # type: ignore[no-untyped-call]
        )
