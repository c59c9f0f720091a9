"""Run the command line.

Nothing heavy is imported before a command needs it, so that `hostward --help` is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hostward.errors import ExitCode


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. See `hostward.cli.app`."""
    try:
        from hostward.cli.app import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("hostward"):
            raise
        print(
            f"error: the command line needs {error.name}, which is not installed\n  fix: pip install 'hostward[train]'",
            file=sys.stderr,
        )
        return ExitCode.ERROR
    return run(arguments)


__all__ = ["main"]
