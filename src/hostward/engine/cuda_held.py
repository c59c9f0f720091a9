"""Streams of somebody else that wait for events of ours, and the compute lane, which then waits for what they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hostward.schedule import Lane

from .backend import Event, Held
from .commands import Command, CommandList, Streams, Verb
from .cuda_lanes import INDEX
from .cuda_timing import UNTIMED
from .cuda_work import is_timed

if TYPE_CHECKING:
    from .cuda import CudaBackend


def hold(backend: CudaBackend, stream: torch.Stream, waits: Sequence[Event], timed: Held = UNTIMED) -> None:
    """As `Backend.hold`, between two events. Raises DeviceError."""
    others = Streams(1, backend.context)
    others.set(0, stream.cuda_stream)  # type: ignore[attr-defined]
    before, after = (Command(Verb.RECORD, 0, event) for event in timed)
    commands = [Command(Verb.WAIT, 0, backend.handle_of(event)) for event in waits]
    CommandList([before, *commands, after], backend.driver).issue(others)


def hold_timed(backend: CudaBackend, stream: torch.Stream, waits: Sequence[Event]) -> Held | None:
    """As `Backend.hold_timed`. Raises DeviceError."""
    timed = backend.timings.take(backend.turn) if is_timed(backend) else UNTIMED
    hold(backend, stream, waits, timed)
    return None if timed is UNTIMED else timed


def wait_behind(backend: CudaBackend, name: str, held: Held, event: torch.Event | None) -> None:
    """As `Backend.wait_behind`. Raises DeviceError."""
    if event is None or not is_timed(backend):
        return
    backend.follow_compute()
    timed = backend.timings.take(backend.turn)
    lane = INDEX[Lane.COMPUTE]
    before, after = (Command(Verb.RECORD, lane, each) for each in timed)
    wait = Command(Verb.WAIT, lane, event.cuda_event)  # type: ignore[attr-defined]
    # In one call: of a lane that has nothing to do, the host's time between two calls would count.
    CommandList([before, wait, after], backend.driver).issue(backend.streams)
    # When this is over, so is the hold: what was waited for comes behind it.
    backend.timings.note(backend.turn, name, Lane.COMPUTE, 0, timed, held=held)
