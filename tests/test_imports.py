"""What an import loads: nothing heavy before it is needed, and no torch for what only plans."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import house
import pytest

import hostward

ROOT = Path(hostward.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

TORCH_FREE_ROOMS = ("errors", "core", "files", "config", "schedule", "plan")

HEAVY = ("torch", "transformers", "pyarrow", "triton", "typer", "rich", "safetensors")


def top_name(path: Path) -> str:
    """The name in house.FLOORS."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


TORCH_FREE = [p for p in FILES if top_name(p) in TORCH_FREE_ROOMS]


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("path", TORCH_FREE, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_up_to_lowering_never_import_torch(path: Path) -> None:
    names = house.imports_in(ast.parse(path.read_text()), ["hostward", *path.relative_to(ROOT).parts[:-1]])
    assert [name for name in names if name.split(".")[0] == "torch"] == []


def test_importing_hostward_and_all_that_plans_loads_nothing_heavy() -> None:
    names = ["hostward", *(".".join(("hostward", *p.relative_to(ROOT).with_suffix("").parts)) for p in TORCH_FREE)]
    code = f"import sys, {', '.join(names)}; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert run_python(code) == "[]"


def test_the_optimizer_loads_torch_and_no_training_library() -> None:
    heavy = tuple(name for name in HEAVY if name not in ("torch", "triton"))
    code = (
        "import sys, hostward; hostward.AdamW; "
        f"print('torch' in sys.modules, [m for m in {heavy!r} if m in sys.modules])"
    )
    assert run_python(code) == "True []"


def test_an_unknown_attribute_of_the_package_is_named() -> None:
    with pytest.raises(AttributeError, match="module 'hostward' has no attribute 'AdamX'"):
        _ = hostward.AdamX
