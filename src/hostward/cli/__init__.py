"""Run the command line.

Nothing heavy is imported before a command needs it, so that `hostward --help` is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hostward.errors import ExitCode, install


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. See `hostward.cli.app`."""
    try:
        from hostward.cli.app import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("hostward"):
            raise
        what = f"the command line needs the package {error.name}, which is not installed"
        print(f"error: {what}\n  fix: {install('train')}", file=sys.stderr)
        return ExitCode.ERROR
    return run(arguments)


__all__ = ["main"]
