"""Streams of somebody else that wait for events of ours, and the compute lane, which then waits for what they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def hold(backend: CudaBackend, stream: torch.Stream, waits: Sequence[Event]) -> Held | None:
    """As `Backend.hold`. Nothing but the waits is enqueued where nobody looks. Raises DeviceError."""
    others = Streams(1, backend.context)
    others.set(0, stream.cuda_stream)  # type: ignore[attr-defined]
    commands = [Command(Verb.WAIT, 0, backend.handle_of(event)) for event in waits]
    timed = backend.timings.take(backend.turn) if is_timed(backend) else UNTIMED
    if timed is UNTIMED:
        CommandList(commands, backend.driver).issue(others)
        return None
    before, after = (Command(Verb.RECORD, 0, event) for event in timed)
    CommandList([before, *commands, after], backend.driver).issue(others)
    return timed


def wait_behind(backend: CudaBackend, name: str, held: Held, wait: Callable[[], None]) -> None:
    """As `Backend.wait_behind`. Raises DeviceError."""
    backend.follow_compute()
    timed = backend.timings.take(backend.turn) if is_timed(backend) else UNTIMED
    before, after = (Command(Verb.RECORD, INDEX[Lane.COMPUTE], event) for event in timed)
    CommandList([before], backend.driver).issue(backend.streams)
    with backend.current(Lane.COMPUTE):
        wait()
    CommandList([after], backend.driver).issue(backend.streams)
    # When this is over, so is the hold: what was waited for comes behind it.
    backend.timings.note(backend.turn, name, Lane.COMPUTE, 0, timed, held=held)
