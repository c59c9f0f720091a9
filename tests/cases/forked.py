"""Processes that find what training imports already there, which takes ten seconds otherwise: forked from one process
that has imported it, and that is started when the first of them is.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

IMPORTED = [
    "peft",
    "rich.console",
    "rich.table",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "hostward.cli.app",
    "hostward.distributed.expert_parallel",
    "hostward.distributed.tensor_parallel",
    "hostward.recipes",
    "hostward.trainer.loop",
    "hostward.trainer.report",
    "hostward.trainer.setup",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.trainer",
    "typer._adapters",  # imported when a command has options, and takes long
]
"""What is missing on a machine is passed over."""


def forkserver() -> ForkServerContext:
    """What starts these processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def call(function: Callable[..., None], *arguments: Any, limit_s: float) -> None:
    """Call a function of a module in a process of its own. Raises RuntimeError if it fails there, or takes longer."""
    process = forkserver().Process(target=_called, args=(function, *arguments))
    process.start()
    process.join(limit_s)
    process.kill()
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"{function.__name__} ended with {process.exitcode}")


def _called(function: Callable[..., None], *arguments: Any) -> None:
    leave_what_is_imported()
    function(*arguments)


def leave_what_is_imported() -> None:
    """A collection of garbage in this process looks at none of it: it would copy all pages that processes share."""
    gc.freeze()


class Started:
    """`python *command`, with "-c" or "-m" first, as far as tests use `subprocess.Popen`; its stderr is a pipe."""

    def __init__(self, command: Sequence[str], *, folder: Path, environment: Mapping[str, str]) -> None:
        context = forkserver()
        ends = [context.Pipe(duplex=False) for _ in range(2)]
        theirs = [end for _, end in ends]
        self._process = context.Process(target=_run, args=(list(command), str(folder), dict(environment), *theirs))
        self._process.start()
        self.stdout, self.stderr = (os.fdopen(os.dup(mine.fileno()), encoding="utf-8") for mine, _ in ends)
        for end in [end for both in ends for end in both]:
            end.close()
        self.pid = self._process.pid or 0

    def send_signal(self, number: int) -> None:
        """Nothing if it has ended."""
        if self._process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self, limit_s: float) -> tuple[int, str]:
        """Its exit code, negative if a signal ended it, and the rest of its stderr. Raises TimeoutError."""
        self._process.join(limit_s)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} goes on after {limit_s} s")
        return self._process.exitcode, self.stderr.read()

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        """It is killed if it has not ended."""
        self._process.kill()
        self._process.join()
        self.stdout.close()
        self.stderr.close()


def _run(command: list[str], folder: str, environment: dict[str, str], out: Connection, err: Connection) -> None:
    leave_what_is_imported()
    os.chdir(folder)
    os.environ.clear()
    os.environ |= environment
    for number, end in ((1, out), (2, err)):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    how, what, *words = command
    sys.argv = [what, *words]
    try:
        if how == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(what, {"__name__": "__main__"})
    except KeyboardInterrupt:  # as the interpreter ends of it
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
