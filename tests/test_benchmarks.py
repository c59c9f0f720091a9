"""Programs in benchmarks/: each finds what it imports, and what can be measured without a GPU is."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_its_imports_are_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    assert importlib.import_module(name).__doc__


def test_enqueueing_is_measured_without_a_gpu(tmp_path: Path) -> None:
    words = ["--off-device", "--buckets", "4", "--turns", "1", "--json", str(tmp_path / "enqueue.json")]
    ran = subprocess.run([sys.executable, str(FOLDER / "enqueue.py"), *words], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    result = json.loads((tmp_path / "enqueue.json").read_text())
    assert {row["mix"] for row in result["steps"]} == {"device", "host", "streamed"}
