"""Predicted bytes against those measured on a GPU: every result in benchmarks/results that tells enough."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DEVICE_ERROR, HOST_ERROR, FEWEST = 0.03, 0.02, 12


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Any]]:
    # The programs there import one another as scripts do.
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import predictions

        yield [row for path in sorted((BENCHMARKS / "results").glob("*.json")) for row in predictions.rows_of(path)]
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_predicted_bytes_are_those_that_were_measured(rows: list[Any]) -> None:
    assert len({(row.row, row.tokens) for row in rows}) >= FEWEST
    off = [row for row in rows if abs(row.device_error) > DEVICE_ERROR or abs(row.host_error or 0.0) > HOST_ERROR]
    assert not off
    assert sum(row.host_error is not None for row in rows) >= FEWEST


def test_most_of_them_are_far_closer(rows: list[Any]) -> None:
    assert all(abs(row.device_error) < 0.002 for row in rows)
    assert all(abs(row.host_error or 0.0) < 0.002 for row in rows)
