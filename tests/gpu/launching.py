"""Start the programs of this folder that are for several ranks, and leave none of their processes behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def launched(program: str, ranks: int, folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """torchrun of a program, which gets `folder` and the words. Its ranks write there; at the end none is left."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with (folder / "log").open("wb") as log:
        path = str(Path(__file__).with_name(program))
        launcher = subprocess.Popen([*command, path, str(folder), *words], stdout=log, stderr=log)
    try:
        yield launcher
    finally:
        launcher.terminate()  # it ends its ranks
        launcher.wait()


def found_in(folder: Path) -> list[Any]:
    """What each rank has written so far."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


def said_in(folder: Path) -> str:
    """Beginning and end of what the launcher and its ranks said."""
    told = (folder / "log").read_text()
    return told if len(told) < 6000 else told[:2000] + told[-4000:]
