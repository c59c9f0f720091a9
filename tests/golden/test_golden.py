"""Bits, plans and files are those of the commit that wrote the golden files; `make.py` beside this says how."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_cases import (
    ACCUMULATION,
    DIGESTS,
    DTYPES,
    PLACEMENTS,
    PLAN,
    PLAN_COMMAND,
    REPORT,
    RESUMED,
    RESUMED_STEPS,
    SAVED_STEPS,
    STEPS,
    Model,
    adamw,
    checkpoint_folder,
    digests,
    read_json,
    train,
    trained,
)

from hostward import checkpoint
from hostward.cli import main
from hostward.plan import plan_file
from hostward.report.schema import read_report


def assert_close(found: Any, expected: Any, where: str = "") -> None:
    """Equal, but for the last digits of floats, which another libm may round in its own way."""
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key in expected.keys() - {"label"}:  # words for a reader
            assert_close(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for n, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_close(one, other, f"{where}[{n}]")
    elif isinstance(expected, float):
        assert math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-12), where
    else:
        assert found == expected, where


@pytest.mark.parametrize("accumulation", ACCUMULATION)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_training_has_the_golden_bits(placement: str, dtype: str, accumulation: str) -> None:
    assert trained(placement, dtype, accumulation) == read_json(DIGESTS)[f"{dtype}, {accumulation}"]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checkpoint_of_an_earlier_commit_resumes_with_the_same_bits(
    tmp_path: Path, dtype: str, placement: str
) -> None:
    """Two fractions and no placement of the saving run: what is loaded and the next steps agree in every bit."""
    expected = read_json(RESUMED)[dtype]
    folder = shutil.copytree(checkpoint_folder(dtype), tmp_path / "saved")
    path = checkpoint.latest(folder)
    assert path is not None
    checkpoint.verify(path)
    assert checkpoint.read_plain(path)["step"] == SAVED_STEPS
    model = Model(DTYPES[dtype])
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer = adamw(model, **PLACEMENTS[placement])
    checkpoint.restore(path, model, optimizer)
    assert digests(model, optimizer) == expected["saved"]
    assert train(model, optimizer, range(STEPS, STEPS + RESUMED_STEPS), 1) == expected["grad_norms"]
    assert digests(model, optimizer) == expected["resumed"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checkpoint_is_saved_in_the_same_bytes(tmp_path: Path, dtype: str) -> None:
    """Tensors and plain values; the table of contents is a pickle of torch's, which another torch writes otherwise."""
    model = Model(DTYPES[dtype])
    optimizer = adamw(model, offload_fraction=0.5)
    train(model, optimizer, range(SAVED_STEPS), 1)
    parts = checkpoint.parts_of(model, optimizer)
    plain = {"optimizer": parts.optimizer, "step": SAVED_STEPS}
    path = checkpoint.save(tmp_path, SAVED_STEPS, tensors=parts.tensors, plain=plain)
    golden = checkpoint_folder(dtype) / path.name
    assert sorted(p.name for p in path.iterdir()) == sorted(p.name for p in golden.iterdir())
    assert checkpoint.tensor_index(path) == checkpoint.tensor_index(golden)
    for name in ("plain.json", "__0_0.distcp"):
        assert (path / name).read_bytes() == (golden / name).read_bytes(), name


def test_a_plan_is_made_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a trace of the recipe's model, so that tracing, memory model, time model and search all count."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main([*PLAN_COMMAND, "--json", str(tmp_path / "plan.json")]) == 0
    assert_close(read_json(tmp_path / "plan.json"), read_json(PLAN))


def test_a_plan_file_reads_and_is_written_back_as_it_was(tmp_path: Path) -> None:
    plan = plan_file.load(PLAN)
    assert {b.placement.value for b in plan.buckets} == {"device", "streamed", "host"}
    plan_file.save(plan, tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_text() == PLAN.read_text()


def test_a_run_report_reads_and_is_written_back_as_it_was(tmp_path: Path) -> None:
    report = read_report(REPORT.parent)
    assert len(report.steps()) == 3
    report.write(tmp_path / REPORT.name)
    assert read_json(tmp_path / REPORT.name) == read_json(REPORT)
