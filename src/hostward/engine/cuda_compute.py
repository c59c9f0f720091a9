"""The stream that the compute lane is: whichever is current when something is issued."""

from __future__ import annotations

from .commands import Command, CommandList, DriverTable, Streams, Verb


class ComputeLane:
    """Follows the caller from stream to stream, so that the lane stays one queue: the new one waits for the old one.

    Not so into a capture: a graph waits for nothing outside of it, and whoever replays it says behind what. Once the
    capture is over the lane goes on behind the last stream that was outside.

    Args:
        streams: where the lane's stream is set. index: the lane's place there. handle: its first stream.
        turned: an event for these waits alone.
    """

    def __init__(self, streams: Streams, index: int, handle: int, turned: int, driver: DriverTable) -> None:
        self._streams = streams
        self._index = index
        # Streams are looked up when a list is issued, so these serve every change.
        self._record = CommandList([Command(Verb.RECORD, index, turned)], driver)
        self._wait = CommandList([Command(Verb.WAIT, index, turned)], driver)
        self._outside = handle
        self.now = handle
        """The lane's stream."""
        streams.set(index, handle)

    def is_at(self, handle: int) -> bool:
        """Whether there is nothing to do for this stream. In the capture of a stream that was current before there is
        not, either.
        """
        return handle == self.now == self._outside

    def go_to(self, handle: int, *, capturing: bool) -> None:
        """`handle` is current now. Raises DeviceError."""
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
