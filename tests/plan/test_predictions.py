"""Predicted bytes, and seconds of several GPUs, against those measured: every result in benchmarks/results that tells
enough.

Seen red: gathered weights left out, or kept through backward; experts' products at the rate of others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hostward.plan.hardware_profile import profile
from hostward.plan.workload import Way
from hostward.profiler import workload

pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DEVICE_ERROR, HOST_ERROR, MIN_STAGING_BUFFERS = 0.002, 0.002, 12


@pytest.fixture(scope="module")
def programs() -> Iterator[None]:
    """They import one another as scripts do."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def runs_once() -> Iterator[None]:
    """A trace runs a short model that has each kind of layer twice: that of 12 layers has the same runs as that of 48,
    which are made once for each length here.
    """
    traced: Any = workload._Traced
    run, known = traced._runs, {}

    def runs(self: Any, way: Way) -> Any:
        model = self._short[0]
        weights = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters())
        key = (way, self._size, model.config.to_json_string(), weights)
        if key not in known:
            known[key] = run(self, way)
        return known[key]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(traced, "_runs", runs)
        yield


@pytest.fixture(scope="module")
def rows(programs: None, runs_once: None) -> list[Any]:
    import predictions

    return [row for path in sorted((BENCHMARKS / "results").glob("*.json")) for row in predictions.rows_of(path)]


def in_one_memory(row: Any) -> bool:
    """Of a version, before e8290648, in which what FSDP2 had reduced of a layer stayed in one memory as long as any of
    it was needed: of layers that are partly stepped on the host that was the peak, or took the room of slots.
    """
    before = row.file < "2026-11-26" or row.file.startswith("2026-11-26-scaling-four-")
    return row.gpus > 1 and before and "-threads-" not in row.file and not row.row.startswith("0:")


FORMATS = "2026-11-29-scaling-two-24-layers-formats"
ON_FOUR = "2026-11-29-scaling-four-whole-formats-h200"
TWO_HOSTS = [(kind, again) for kind in ("free", "paced") for again in ("", "-second")]
ON_FOUR_SECOND = "2026-11-29-scaling-four-whole-formats-second-h200"


def test_predicted_bytes_are_those_that_were_measured(rows: list[Any]) -> None:
    """Within 0.2 %. Seen red: of several GPUs up to 4.3 % too high, with a layer's whole gradient from the beginning of
    its backward, and its part of it before it was reduced.
    """
    assert len({(row.row, row.tokens) for row in rows}) >= MIN_STAGING_BUFFERS
    assert sum(row.gpus > 1 for row in rows) >= MIN_STAGING_BUFFERS
    # One row of a GPU is far off, for a reason that is not known: fewer slots were taken than there was room for by the
    # model. So are those with moments in FP8: once they took a slot more than the model has room for, once one less.
    near = {"2026-11-22-scaling-one-of-two-8k.json": 0.03, "2026-11-26-scaling-one-of-four-8k.json": 0.03}
    near |= {row.file: 0.005 for row in rows if "step-everybody" in row.file}
    # Plans of few tokens: one or two slots fewer were taken.
    near |= {
        f"2026-11-30-{name}-2k-h200.json": 0.02 for name in ("early-steps-rate-before-backward", "own-profile-state")
    }
    usual = [row for row in rows if not in_one_memory(row)]
    assert [row for row in usual if abs(row.device_error) > near.get(row.file, DEVICE_ERROR)] == []
    assert all(abs(row.host_error or 0.0) < HOST_ERROR for row in rows)
    assert sum(row.host_error is not None for row in rows) >= MIN_STAGING_BUFFERS


def test_those_of_an_older_version_are_not_far_off(rows: list[Any]) -> None:
    older = [row for row in rows if in_one_memory(row)]
    whole = ("2026-11-24-scaling-two-24-layers-8k", "2026-11-26-scaling-four-whole.")  # one at a time, many layers
    assert len(older) == 88
    assert all(abs(row.device_error) < (0.12 if row.file.startswith(whole) else 0.02) for row in older)


@pytest.mark.usefixtures("programs", "runs_once")
def test_seconds_of_runs_and_of_several_gpus_are_near_those_that_were_measured() -> None:
    import prediction_times

    files = [path for kind in ("scaling", "recipe") for path in sorted((BENCHMARKS / "results").glob(f"*{kind}*.json"))]
    found = [row for row in prediction_times.rows_of(files, profile("h200")) if row.gpus > 1 or "recipe" in row.file]
    assert len(found) >= MIN_STAGING_BUFFERS
    # One host became slower in the middle of its run; one row of another run of that day is 11 % off.
    near = {"2026-11-23-scaling-two-8k-balanced": 0.22, "2026-11-23-scaling-two-16k-balanced": 0.12}
    # Two H100 beside hosts whose memory gave 147 and 165 GB/s; the profile is that of an H200's host, with 224.
    near |= {"2026-11-25-scaling-two-h100-held": 0.24, "2026-11-25-scaling-two-h100-whole": 0.18}
    # Two H200 beside a host whose memory gave 177 to 194 GB/s with all ranks' copies and steps.
    near |= {f"2026-11-30-scaling-two-16-layers-{kind}-writes{again}-h200": 0.16 for kind, again in TWO_HOSTS}
    near |= {ON_FOUR: 0.11}
    # Torch's allocator gave memory back in every iteration of these.
    retried = "2026-11-23-recipe-30b-a3b-24-layers-two-h200"
    near |= {retried: 0.19, f"{retried}-retries": 0.24, f"{retried}-expandable": 0.32}
    near |= {f"{retried}-host-gradients": 0.12}
    # All FP8 moments streamed; and with 42 % of them stepped by the CPU, on a host that read, modified and wrote 5 G
    # parameters/s just then, where the other rows of that file have 6 to 8.
    near |= {f"{FORMATS}-h200": 0.13}
    slow = [row for row in found if row.file == f"{FORMATS}-h200" and "fp8-moments-bf16" in row.row]
    assert len(slow) == 1
    assert all(abs(row.error) < near.get(row.file, 0.1) for row in found if row not in slow)
    assert sum("recipe" in row.file for row in found) == 10


@pytest.mark.usefixtures("programs", "runs_once")
def test_seconds_of_plans_are_near_those_that_were_measured() -> None:
    """Seen red: up to 26 % too fast, with rates of the CPU and the link that were put together from other rows."""
    import prediction_times

    kinds = ("own-profile", "mixed-treatments", "free-writes-8k", "free-writes-4k", "early-steps-rate-before")
    files = [path for kind in kinds for path in sorted((BENCHMARKS / "results").glob(f"2026-11-30-{kind}*.json"))]
    found = prediction_times.rows_of(files, profile("h200"))
    # On one host, which stepped 3.2 to 3.5 G parameters/s on the CPU beside copies.
    slower = {"2026-11-30-free-writes-4k-h200", "2026-11-30-early-steps-rate-before-backward-2k-h200"}
    assert len(found) == 19
    assert all(abs(row.error) < (0.12 if row.file in slower else 0.1) for row in found)


@pytest.mark.usefixtures("programs", "runs_once")
def test_seconds_of_each_format_follow_from_rates_that_its_row_measured() -> None:
    """Seen red: 11 to 26 % too fast, while the CPU step was predicted by its bytes, and measured as it is."""
    import prediction_times

    files = [BENCHMARKS / "results" / f"{name}.json" for name in (f"{FORMATS}-own-rates-h200", ON_FOUR, ON_FOUR_SECOND)]
    found = prediction_times.rows_of(files, profile("h200"), own_rates=True)
    # From forward to the next these two took half a second more than all others of their run; their steps vary.
    slowed = [row for row in found if row.file == ON_FOUR and ("all-bf16" in row.row or "bf16-moments" in row.row)]
    assert (len(found), len(slowed)) == (12, 2)
    assert all(abs(row.error) < 0.065 for row in found if row not in slowed)
    assert all(-0.19 < row.error < 0 for row in slowed)
