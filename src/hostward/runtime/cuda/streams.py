"""Make the streams of a CUDA device's lanes, and divide copies over two streams alternately (decision 13)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hostward.core.units import MIB
from hostward.runtime.cuda.commands import Command, CommandList, DriverTable, Streams, Verb
from hostward.runtime.cuda.driver import current_context
from hostward.schedule.ops import Lane

LANES = tuple(Lane)
INDEX = {lane: i for i, lane in enumerate(LANES)}
SECOND = {Lane.H2D: len(LANES), Lane.D2H: len(LANES) + 1}
"""Second stream of each copy lane, by index. Long copies are divided over both streams alternately."""
STREAMS = len(LANES) + len(SECOND)
PIECE_BYTES = 64 * MIB
"""Copies of other code wait for at most one such piece: 1.2 ms of PCIe time."""


class LaneStreams:
    """Owns the streams of all lanes but compute, which is the caller's current stream; made once.

    `side`: streams by lane. `seconds`: second streams by copy lane. `table`: all of them, for commands. `fetches`: a
    stream of no lane, for reads concurrent with training. `context`: the driver's context to which they belong.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self.side = {lane: _stream(device) for lane in LANES if lane is not Lane.COMPUTE}
            self.seconds = {lane: _stream(device) for lane in SECOND}
            self.fetches = _stream(device)
            self.context = current_context()
        self.table = Streams(STREAMS, self.context)
        for lane, stream in self.side.items():
            self.table.set(INDEX[lane], stream.cuda_stream)
        for copies, stream in self.seconds.items():
            self.table.set(SECOND[copies], stream.cuda_stream)

    def all(self) -> list[torch.cuda.Stream]:
        return [*self.side.values(), *self.seconds.values(), self.fetches]


def _stream(device: torch.device) -> torch.cuda.Stream:
    made: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return made


def copy_commands(lane: Lane, sizes: Sequence[int], turned: int) -> tuple[list[Command], list[tuple[int, int, int]]]:
    """Return commands that copy in pieces on the lane's two streams alternately, each after the piece before.

    They begin and end on the lane itself. Addresses are left to be written.

    Args:
        sizes: bytes of each copy.
        turned: an event for the waits between the two streams.

    Returns:
        The commands, and for each COPY among them: its index, the index of its copy, its first byte in that copy.
    """
    home, second = INDEX[lane], SECOND.get(lane, INDEX[lane])
    commands: list[Command] = []
    copies: list[tuple[int, int, int]] = []
    here, filled_bytes = home, 0

    def turn() -> None:
        nonlocal here, filled_bytes
        there = second if here == home else home
        commands.extend((Command(Verb.RECORD, here, turned), Command(Verb.WAIT, there, turned)))
        here, filled_bytes = there, 0

    for i, nbytes in enumerate(sizes):
        for first in range(0, max(nbytes, 1), PIECE_BYTES):
            piece_bytes = min(PIECE_BYTES, nbytes - first)
            if filled_bytes + piece_bytes > PIECE_BYTES and second != home:
                turn()
            filled_bytes += piece_bytes
            copies.append((len(commands), i, first))
            commands.append(Command(Verb.COPY, here, 0, 0, piece_bytes))
    if here != home:
        turn()
    return commands, copies


# The compute lane is the stream that is current when a work is issued.


class ComputeLane:
    """Follows the caller from stream to stream; the new stream waits for the old one, so that the lane stays one queue.

    A capture is not followed: a graph waits for nothing outside of it, and its replay is ordered by the caller. After
    the capture the lane continues after the last stream outside of it.

    Args:
        streams: table in which the lane's stream is set. index: the lane's index there. handle: its first stream.
        turned: an event for these waits only.
    """

    def __init__(self, streams: Streams, index: int, handle: int, turned: int, driver: DriverTable) -> None:
        self._streams = streams
        self._index = index
        # Streams are looked up when a list is issued, so these serve every change.
        self._record = CommandList([Command(Verb.RECORD, index, turned)], driver)
        self._wait = CommandList([Command(Verb.WAIT, index, turned)], driver)
        self._outside = handle
        self.now = handle
        """Handle of the lane's stream."""
        streams.set(index, handle)

    def is_at(self, handle: int) -> bool:
        """Return whether the lane is at this stream already, which may since have begun a capture."""
        return handle == self.now == self._outside

    def go_to(self, handle: int, *, capturing: bool) -> None:
        """Move the lane to the stream `handle`, which is current now. Raises DeviceError."""
        if not capturing and handle != self._outside:
            self._set(self._outside)
            self._record.issue(self._streams)
            self._outside = handle
            self._set(handle)
            self._wait.issue(self._streams)
        self._set(handle)

    def _set(self, handle: int) -> None:
        self.now = handle
        self._streams.set(self._index, handle)
