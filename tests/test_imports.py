"""The shape of the source tree: imports go one way, nothing heavy is loaded early, functions stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hostward

ROOT = Path(hostward.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Packages from the ground up: a module imports only from its own row and those above it.
FLOORS = (
    ("errors",),
    ("core", "files", "config"),
    ("kernels",),
    ("schedule",),
    ("plan",),
    ("runtime",),
    ("distributed",),
    ("model",),
    ("optim",),
    ("weights",),
    ("activations",),
    ("attachment", "profiler", "checkpoint"),
    ("recipes", "machine", "report"),
    ("trainer", "doctor"),
    ("cli",),
    ("__main__",),
)
LEVELS = {name: level for level, row in enumerate(FLOORS) for name in row}
FACE_LEVEL = LEVELS["attachment"]
"""`hostward` itself: it leads to hostward.AdamW."""

TORCH_FREE_ROOMS = ("errors", "core", "files", "config", "schedule", "plan")

MAX_FUNCTION_LINES = 90  # of StepExecutor.__init__, until it is redesigned

HEAVY = ("torch", "transformers", "omegaconf", "pyarrow", "triton", "typer", "rich", "safetensors")


def top_name(path: Path) -> str:
    """The name in FLOORS."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


TORCH_FREE = [p for p in FILES if top_name(p) in TORCH_FREE_ROOMS]


def imported_modules(path: Path) -> set[str]:
    return imports_in(path.read_text(), ["hostward", *path.relative_to(ROOT).parts[:-1]])


def imports_in(source: str, package: list[str]) -> set[str]:
    """Dotted names imported anywhere in a module of `package`, functions included; `from a import b` counts as a.b."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{stem}.{alias.name}" for alias in node.names}
    return found


def level_of_import(dotted: str) -> int | None:
    """The level of a hostward module; None for other packages."""
    first, _, rest = dotted.partition(".")
    if first != "hostward":
        return None
    return LEVELS.get(rest.partition(".")[0], 0 if rest == "__version__" else FACE_LEVEL)


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_every_module_has_a_place_in_the_order() -> None:
    assert {top_name(path) for path in FILES} - {"__init__"} <= set(LEVELS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    own = FACE_LEVEL if path == ROOT / "__init__.py" else LEVELS[top_name(path)]
    levels = {name: level_of_import(name) for name in imported_modules(path)}
    assert [name for name, level in levels.items() if level is not None and level > own] == []


@pytest.mark.parametrize("path", TORCH_FREE, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_up_to_lowering_never_import_torch(path: Path) -> None:
    assert [name for name in imported_modules(path) if name.split(".")[0] == "torch"] == []


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


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    lengths = {f.name: (f.end_lineno or f.lineno) - f.lineno + 1 for f in functions}
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def test_the_import_reader_sees_every_form() -> None:
    source = (
        "import a.b\nfrom . import c\nfrom .d import e\nfrom .. import errors\nfrom ..plan import Plan\n"
        "def f():\n    from hostward.cli import main\n    import torch.nn\n"
    )
    assert imports_in(source, ["hostward", "engine"]) == {
        "a.b",
        "hostward.engine.c",
        "hostward.engine.d.e",
        "hostward.errors",
        "hostward.plan.Plan",
        "hostward.cli.main",
        "torch.nn",
    }
    assert [level_of_import(name) for name in ("torch", "hostward.errors", "hostward.AdamW", "hostward")] == [
        None,
        0,
        FACE_LEVEL,
        FACE_LEVEL,
    ]
