"""Run a save or load on several ranks; each detects within a minute that another one failed, died or hangs.

The work is cut into steps. Every rank runs a step on its own thread and meanwhile reports to the others, several times
a second, whether it is busy, done or failed. A rank that ends closes its connections, which its neighbours see at once;
a rank whose machine is lost is detected after `ANSWER_S`. No rank starts the next step alone.

Ranks communicate over Gloo, in their own process group: collectives of training run concurrently, and no GPU is used.
"""

from __future__ import annotations

import io
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from hostward.distributed.rank_failures import Failure, raised_by_all
from hostward.errors import CheckpointError, HostwardError

T = TypeVar("T")

ARRIVE_S = 600.0
"""Ranks must start a save or a load within this time of each other, or within their process group's timeout, if that
is less.
"""
ANSWER_S = 30.0
"""From then on each rank must report within this time, or within the timeout."""
CONNECT_S = 6.0
"""Ranks that have all come connect within this time; Gloo waits up to five times as long for one that dies meanwhile
(30.0 s, measured with torch 2.13), so that a fifth of the process group's timeout is the most.
"""
CONNECT_EACH_S = 0.1
"""And this much longer for each of them: every rank connects to all others, and reads their addresses first."""
ROUND_S = 0.2
_FAREWELL_S = 5.0
_INTACT = "the last complete checkpoint is as it was"
_BUSY, _DONE, _FAILED = 0, 1, 2


class StoppedError(CheckpointError):
    """Report that the save was cancelled, by its caller or because another part of it failed."""


class Stop:
    """Ask a running save or load to end early."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def ask(self) -> None:
        self._event.set()

    def asked(self) -> bool:
        return self._event.is_set()

    def check(self) -> None:
        """Raise StoppedError if the end was asked for."""
        if self._event.is_set():
            raise StoppedError("stopped half way", why="the save was cancelled, here or on another rank")


class _Step(Generic[T]):
    """Run a step on its own thread, never on the main one.

    Python interrupts the main thread alone, and torch's zip writer aborts the process if it is interrupted between a
    file's last piece and its end.
    """

    def __init__(self, body: Callable[[], T]) -> None:
        self._body = body
        self._future: Future[T] = Future()

    def start(self) -> None:
        threading.Thread(target=self._run, name="hostward checkpoint step").start()

    def _run(self) -> None:
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            self._future.set_result(self._body())
        except BaseException as error:  # noqa: BLE001 - `value` raises it
            self._future.set_exception(error)

    def end(self) -> None:
        """Wait until the step has ended; a step that has not begun is cancelled.

        `start` may have been interrupted anywhere.
        """
        if not self._future.cancel():
            wait([self._future])

    def wait(self, limit_s: float | None = None) -> int:
        wait([self._future], limit_s)
        return _BUSY if not self._future.done() else _DONE if self.error is None else _FAILED

    @property
    def error(self) -> BaseException | None:
        """Return the error of a step that failed, else None."""
        return self._future.exception() if self._future.done() else None

    @property
    def value(self) -> T:
        return self._future.result()


def patience_s(group: dist.ProcessGroup) -> float:
    """Return the timeout of a process group, in seconds."""
    backends = [group._get_backend(device) for device in group._device_types]
    return min(float(backend.options._timeout.total_seconds()) for backend in backends)


class Ranks:
    """Represent the processes of a group, or this process alone.

    Args:
        group: a process group of any kind; all of its processes make this object. None: one process.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size = 0, 1
        self._gloo: Any = None
        self._reported = _BUSY
        """What the other ranks have been told of this one's step."""
        self._arrive_s, self._answer_s = ARRIVE_S, ANSWER_S
        if group is None:
            return
        most_s = patience_s(group)
        self._arrive_s, self._answer_s = min(ARRIVE_S, most_s), min(ANSWER_S, most_s)
        members = dist.get_process_group_ranks(group)
        self.rank, self.size = members.index(dist.get_rank()), len(members)
        if self.size > 1:
            self._gloo = self._connected(group, min(CONNECT_S + CONNECT_EACH_S * self.size, most_s / 5))

    def _connected(self, group: dist.ProcessGroup, limit_s: float) -> dist.ProcessGroupGloo:
        """Wait for all ranks, and connect them.

        Raises:
            CheckpointError: a rank ended or did not answer meanwhile.
        """
        names = [""] * self.size
        try:
            # Gathered, not broadcast: the ranks connect as soon as the last one has come, and not before.
            dist.all_gather_object(names, secrets.token_hex(8), group=group)
            # Not `new_group`: it takes part of all processes, or a name that the store has had before.
            store = PrefixStore(f"hostward/{names[0]}", _get_default_store())
            return dist.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=limit_s))
        except RuntimeError as error:
            raise CheckpointError(
                "cannot connect the ranks that save or load together",
                why=f"another rank ended or did not answer meanwhile ({str(error).splitlines()[0]})",
                fix=f"see the output of the other ranks; {_INTACT}",
            ) from error

    @property
    def first(self) -> bool:
        """Return whether this is rank 0, which does the work that is done once."""
        return self.rank == 0

    def close(self) -> None:
        """Close the connections between the ranks."""
        self._gloo = None

    def together(self, what: str, body: Callable[[], T], stop: Stop, *, arriving: bool = False) -> list[T]:
        """Run `body` on every rank and return its results by rank, which are pickled in between.

        Args:
            what: the fact for error texts if this fails.
            stop: is asked for the end if another rank fails; a long `body` checks it.
            arriving: ranks may start this step at different times.

        Raises:
            CheckpointError, MemoryLimitError: a rank failed; the same on all of them. A rank that was interrupted
                raises the interrupt.
        """
        step = _Step(body)
        self._reported = _BUSY
        try:
            step.start()
            if self._gloo is None:
                return [step.value]
            self._until_done(what, step, arriving)
            return [cast(T, value) for value in self._exchange(what, step.value)]
        except BaseException as error:
            stop.ask()
            step.end()
            if self._gloo is not None and not isinstance(error, HostwardError):
                self._say_failed(error)
            raise

    def _until_done(self, what: str, step: _Step[Any], arriving: bool) -> None:
        limit_s = self._arrive_s if arriving else self._answer_s
        while True:
            own = self._reported = step.wait(ROUND_S)
            found = self._gather(what, torch.tensor([own]), limit_s)
            limit_s = self._answer_s
            states = [int(state) for state in found]
            if _FAILED in states:
                causes = self._exchange(what, Failure.of(step.error) if step.error is not None else None)
                if step.error is not None and not isinstance(step.error, Exception):
                    raise step.error
                told = [(f"rank {rank}", cause) for rank, cause in enumerate(causes)]
                error = raised_by_all(told, what=what, fix=_INTACT, kind=CheckpointError)
                error.everywhere = False  # each rank prints it: the first may be killed while it cleans up
                raise error from step.error
            if _BUSY not in states:
                return

    def _say_failed(self, error: BaseException) -> None:
        """Report an error to ranks that are still in this step; if this fails, they run into their timeout.

        Ranks to which this one has reported that it is done may be past the step: what they gather next has another
        size, for which Gloo aborts a process. They find this rank's connections closed.
        """
        if self._reported != _BUSY:
            return
        try:
            self._gather("", torch.tensor([_FAILED]), _FAREWELL_S)
            self._exchange("", Failure.of(error), _FAREWELL_S)
        except HostwardError:
            return

    def _exchange(self, what: str, value: object, limit_s: float | None = None) -> list[Any]:
        limit_s = self._answer_s if limit_s is None else limit_s
        stream = io.BytesIO()
        pickle.dump(value, stream)
        own = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)
        lengths = [int(length) for length in self._gather(what, torch.tensor([len(own)]), limit_s)]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(own)] = own
        parts = self._gather(what, padded, limit_s)
        # Written by a process of this very run a moment ago.
        return [pickle.loads(part[:n].numpy().tobytes()) for part, n in zip(parts, lengths, strict=True)]

    def _gather(self, what: str, own: torch.Tensor, limit_s: float) -> Sequence[torch.Tensor]:
        """Gather one tensor from each rank.

        Raises:
            CheckpointError: a rank has ended or did not answer.
        """
        found = [torch.empty_like(own) for _ in range(self.size)]
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=limit_s)  # else the limit of connecting
        start_s = time.monotonic()
        try:
            self._gloo.allgather([found], [own], options).wait(timedelta(seconds=limit_s))
        except RuntimeError as error:
            waited_s = time.monotonic() - start_s
            raise CheckpointError(
                what or "the error was not reported to the other ranks",
                why=f"another rank ended or did not answer for {waited_s:.0f} s ({str(error).splitlines()[0]})",
                fix=f"see the output of the other ranks; {_INTACT}",
            ) from error
        return found
