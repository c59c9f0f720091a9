"""Writes the golden plans anew: PYTHONPATH=src python tests/golden/write.py, then read what has changed."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "cases"))

from plan_cases import PAIRS, answered  # noqa: E402

from hostward.plan.render import render  # noqa: E402

for model, machine, gpus, host_gib in PAIRS:
    text = render(answered(model, machine, gpus, host_gib))
    (HERE / f"plan-{model}-{gpus}x{machine}.txt").write_text(text)
