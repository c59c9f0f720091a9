"""What the command line writes to stderr."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("rank", "lines"),
    [("0", ["it is so", "warning: mind it"]), ("1", ["rank 1: warning: mind it"])],
)
def test_lines_of_the_log_say_their_kind(rank: str, lines: list[str]) -> None:
    """Seen red: a warning that reads like any other line."""
    code = (
        "import logging; from hostward.cli import main; main(['recipes']); log = logging.getLogger('hostward'); "
        "log.info('%s is so', 'it'); log.warning('mind it')"
    )
    environment = {**os.environ, "RANK": rank, "WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.splitlines() == lines
