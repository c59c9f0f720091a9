"""Flat parts of parameters: one norm, and so one step, however many ranks the parameters are cut among.

Seen red: chunks counted from a part's own start; the sums of shared chunks added by every rank, or by none; chunks of
one group of ranks reduced over another one.
"""

from __future__ import annotations

from typing import Any

import pytest
from flat_cases import BORDER, CHUNK, DENSE, cut, joined, stepped
from world import World

WAYS: dict[str, dict[str, Any]] = {
    "pair": {"ways": "all"},
    "world": {"ways": "all", "mix": "halves"},
    "pair, gradients on the host": {"ways": "all", "mix": "halves", "gradients": "host"},
    "world, groups of their own": {"ways": "pairs", "mix": "mixed", "order": "random"},
}


@pytest.mark.parametrize("how", WAYS)
def test_norms_and_steps_are_those_of_one_process(request: pytest.FixtureRequest, how: str) -> None:
    ranks: World = request.getfixturevalue(how.partition(",")[0])
    expected = stepped("one with pairs" if WAYS[how]["ways"] == "pairs" else "one")
    found = ranks.run("flat_cases.stepped", **WAYS[how])
    assert expected["norms"][0] == 1.0
    assert expected["skipped"] == [False, False, True, False]
    for rank in found:
        assert rank["norms"] == expected["norms"]
        assert rank["skipped"] == expected["skipped"]
    assert joined(piece for rank in found for piece in rank["pieces"]) == joined(expected["pieces"])


def test_without_being_told_the_norm_depends_on_the_cut(pair: World) -> None:
    """The control: gradients that tell apart by which borders chunks are counted."""
    for rank in pair.run("flat_cases.stepped", ways="all", told=False):
        assert rank["norms"][0] == 1.0 + 2.0**-23
    for ranks in (2, 4):
        assert any(
            0 < part.start - BORDER * CHUNK < CHUNK
            for rank in range(ranks)
            for part in cut(DENSE, ranks, rank).values()
        )


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([{"a": ("w", 0, 60, 100)}, {"b": ("w", 50, 100, 100)}], "elements [50, 60) of 'w' are in two parts"),
        ([{"a": ("w", 0, 100, 100)}, {"a": ("w", 0, 100, 100)}], "elements [0, 100) of 'w' are in two parts"),
        ([{"a": ("w", 0, 40, 100)}, {"b": ("w", 50, 100, 100)}], "elements [40, 50) of 'w' are in no part"),
        ([{"a": ("w", 0, 40, 100)}, {}], "elements [40, 100) of 'w' are in no part"),
        ([{"a": ("w", 0, 50, 100)}, {"b": ("w", 50, 90, 90)}], "'w' has 100 elements on process 0, and 90 on 1"),
    ],
)
def test_parts_that_make_no_whole_are_refused_on_all_ranks(pair: World, parts: list[Any], why: str) -> None:
    for raised in pair.run("flat_cases.refused", parts=parts):
        assert raised.startswith("ModelError")
        assert why in raised
