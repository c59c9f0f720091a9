"""The house: the shape of the source tree, read by scripts/house.py."""

from __future__ import annotations

import ast
import functools
import json
import sys
from pathlib import Path

import house
import pytest

MAX_ROOT_MODULES = 8
MAX_FUNCTION_LINES = 80


@functools.cache
def figures() -> house.Figures:
    """Counted when the first test asks: each process of pytest imports this file."""
    return house.figures_of(house.SOURCE, house.TESTS)


@functools.cache
def modules() -> dict[str, house.Module]:
    return house.read_modules(house.SOURCE)


def test_every_module_has_a_place_in_the_order() -> None:
    assert {module.room for module in modules().values()} - {"__init__"} <= set(house.LEVELS)


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert figures().module_circles == []


def test_no_circle_of_packages() -> None:
    assert figures().package_circles == []


def test_imports_go_downwards() -> None:
    assert figures().upward_imports == []


def test_no_private_name_of_another_module_is_used() -> None:
    assert figures().private_reaches == []


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    assert figures().named_like_the_standard_library == []


def test_few_modules_lie_in_the_root() -> None:
    assert len(figures().root_modules) <= MAX_ROOT_MODULES


def test_functions_stay_small() -> None:
    longer = {name: n for name, n in house.function_lengths(modules()).items() if n > MAX_FUNCTION_LINES}
    assert longer == {}


def test_no_exception_outlives_its_reason() -> None:
    texts = " ".join(module.text for module in modules().values())
    assert [name for name in house.ALLOWED if name not in texts] == []


def test_figures_are_printed_and_are_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    counted = figures()
    monkeypatch.setattr(house, "figures_of", lambda *of: {(house.SOURCE, house.TESTS): counted}[of])  # counted once
    monkeypatch.setattr(sys, "argv", ["house.py"])
    house.main()
    assert f"modules: {counted.modules}" in capsys.readouterr().out.splitlines()
    monkeypatch.setattr(sys, "argv", ["house.py", "--json"])
    house.main()
    printed = json.loads(capsys.readouterr().out)
    assert (printed["modules"], printed["lines"]) == (counted.modules, counted.lines)


# The readers themselves, on small trees.


def tree_of(folder: Path, **texts: str) -> dict[str, house.Module]:
    """Modules of a package `hostward`; `plan__search="..."` is the file plan/search.py."""
    for name, text in texts.items():
        path = folder / "hostward" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return house.read_modules(folder / "hostward")


def test_the_import_reader_sees_every_form() -> None:
    source = (
        "import a.b\nfrom . import c\nfrom .d import e\nfrom .. import errors\nfrom ..plan import Plan\n"
        "def f():\n    from hostward.cli import main\n    import torch.nn\n"
    )
    assert house.imports_in(ast.parse(source), ["hostward", "engine"]) == {
        "a.b",
        "hostward.engine.c",
        "hostward.engine.d.e",
        "hostward.errors",
        "hostward.plan.Plan",
        "hostward.cli.main",
        "torch.nn",
    }


def test_circles_are_found_through_functions_and_types(tmp_path: Path) -> None:
    modules = tree_of(
        tmp_path,
        core__a="from hostward.plan import b",
        plan__b="def f():\n    from hostward.core.c import x",
        core__c="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import hostward.core.a",
        core__d="from hostward.core.a import x\nfrom hostward import __version__",
    )
    assert house.circles(house.import_graph(modules)) == [["hostward.core.a", "hostward.core.c", "hostward.plan.b"]]
    assert house.circles(house.package_graph(modules)) == [["core", "plan"]]
    assert house.upward_imports(modules) == [("hostward.core.a", "hostward.plan.b")]


@pytest.mark.parametrize(
    "reach",
    ["other._x", "self.other._x", "getattr(other, '_x')", "from a import _x", "from a._b import c", "other._x = 1"],
)
def test_a_private_reach_is_found(reach: str) -> None:
    assert [line for line, _ in house.private_reaches(ast.parse(reach))] == [1]


def test_reaches_of_tests_are_those_into_what_modules_define(tmp_path: Path) -> None:
    modules = tree_of(tmp_path, errors="class A:\n    def __init__(self): self._x = 1\n")
    (tmp_path / "test_a.py").write_text("assert a._x == b._of_another_library\nassert a._x.y\n")
    (tmp_path / "hostward" / "errors.py").unlink()
    assert house.reaches_of_tests(modules, tmp_path) == ["test_a.py:1: a._x", "test_a.py:2: a._x"]


@pytest.mark.parametrize(
    "own",
    [
        "self._x",
        "cls._x()",
        "super()._x()",
        "class A:\n    def __init__(self): self._x = 1\ndef f(a): return a._x",
        "other.__dict__",
        "tensor._version",
        "torch._C._anything.within",
        "from torch._C._distributed_c10d import PrefixStore",
        "hasattr(self, '_x')",
    ],
)
def test_what_is_ones_own_or_allowed_is_no_reach(own: str) -> None:
    assert house.private_reaches(ast.parse(own)) == []


def test_function_lengths_tell_classes_and_nested_functions_apart(tmp_path: Path) -> None:
    first = "class A:\n    def f(self):\n        def g():\n            pass\n        return g\n"
    second = "class B:\n    def f(self): ...\n"
    assert house.function_lengths(tree_of(tmp_path, errors=first + second)) == {
        "hostward.errors:A.f": 4,
        "hostward.errors:A.f.g": 2,
        "hostward.errors:B.f": 1,
    }


@pytest.mark.parametrize(
    ("docstring", "fragment"),
    [
        ("That has been issued.", True),
        ("Whether what a plan says fits.", True),
        ("A bucket whose bytes are in host memory.", True),
        ("Hooks of layers.", True),
        ("Lock the run's output folders (rank 0 only).", False),
        ("The caller waits for copies.", False),
        ("A bucket has a phase that tells where its bytes are.", False),
    ],
)
def test_fragments_are_told_from_sentences(docstring: str, fragment: bool) -> None:
    assert house.opens_with_fragment(docstring) is fragment
