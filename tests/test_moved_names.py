"""Modules that documentation named before they moved can be imported by their old names, with a warning."""

from __future__ import annotations

import importlib
import sys
import warnings

import pytest

import hostward


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("hostward.run_report", "hostward.report.schema", "read_report"),
        ("hostward.training.scaling", "hostward.optim.sharded", "StagesScaler"),
    ],
)
def test_an_old_name_gives_the_same_object_and_warns(
    old: str, new: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [m for m in sys.modules if m == old or m == "hostward.training"]:
        monkeypatch.delitem(sys.modules, module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = importlib.import_module(old)
    assert any(str(w.message).startswith(f"{old} is {new} now") for w in caught)
    assert {w.category for w in caught} == {DeprecationWarning}
    assert getattr(found, name) is getattr(importlib.import_module(new), name)


def test_a_name_that_never_was_stays_unknown() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"hostward\.training_runs"):
        importlib.import_module("hostward.training_runs")
    assert not hasattr(hostward, "training_runs")


def test_the_public_names_of_convert_stay() -> None:
    convert = importlib.import_module("hostward.convert")
    assert convert.to_torch_adamw is hostward.convert.to_torch_adamw
