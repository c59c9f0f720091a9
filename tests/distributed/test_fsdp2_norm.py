"""One norm for all ranks: that of one process, bit for bit, and one decision to skip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_cases import given
from world import World

MESHES = {"one": ("pair", "alone"), "two": ("pair", "all"), "four": ("world", "all"), "hybrid": ("world", "hybrid")}


@pytest.mark.parametrize("mix", ["device", "mixed"])
@pytest.mark.parametrize("case", MESHES)
def test_norm_and_steps_of_given_gradients_are_those_of_one_process(
    request: pytest.FixtureRequest, case: str, mix: str
) -> None:
    ranks, mesh = MESHES[case]
    stepped: World = request.getfixturevalue(ranks)
    found = stepped.run("sharded_cases.given", mix=mix, network={"mesh": mesh})
    assert found == [given("device")] * stepped.size


def test_state_in_bf16_is_rounded_alike_at_every_number_of_ranks_and_placement(
    request: pytest.FixtureRequest,
) -> None:
    """Also where a shard begins within a bucket's elements, and in the replica of a shard."""
    parts = ("exp_avg", "exp_avg_sq", "main_param")
    options: dict[str, Any] = {"dtype": torch.bfloat16, "state_dtypes": dict.fromkeys(parts, torch.bfloat16)}
    expected = given("device", **options)
    assert expected["bits"] != given("device", dtype=torch.bfloat16)["bits"]
    for case, mix in (("two", "mixed"), ("hybrid", "device")):
        ranks, mesh = MESHES[case]
        stepped: World = request.getfixturevalue(ranks)
        found = stepped.run("sharded_cases.given", mix=mix, network={"mesh": mesh}, **options)
        assert found == [expected] * stepped.size


def test_fp8_moments_are_the_same_at_every_number_of_ranks_or_refused(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Blocks are those of the parameter, so a distributed checkpoint of two ranks goes on on four."""
    eighth = {"exp_avg": torch.uint8, "exp_avg_sq": torch.uint8}
    options: dict[str, Any] = {"dtype": torch.bfloat16, "state_dtypes": eighth, "blocks": True}
    expected = given("device", **options)
    pair, world = (request.getfixturevalue(name) for name in ("pair", "world"))
    saved = {"steps": (0, 1), "save": str(tmp_path), **options}
    pair.run("sharded_cases.given", mix="mixed", network={"mesh": "all"}, **saved)
    found = world.run("sharded_cases.given", network={"mesh": "all"}, steps=(2,), load=str(tmp_path), **options)
    assert [each["bits"] for each in found] == [expected["bits"]] * 4
    with pytest.raises(Exception, match=r"(?s)moments of '.*' in FP8.*does not begin with a block"):
        pair.run("sharded_cases.given", network={"mesh": "all"}, state_dtypes=eighth)


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(world: World) -> None:
    expected = given("device", bad=1)
    found = world.run("sharded_cases.given", mix="mixed", network={}, bad=1)
    assert [skipped for _, skipped, _ in found[0]["told"]] == [False, True, False]
    assert set(found[0]["counts"].values()) == {2}  # of parts without elements too
    assert found == [expected] * 4


@pytest.mark.parametrize("context", [True, False], ids=["taken in backward", "taken at the step"])
def test_a_gradient_scaler_sees_the_same_on_every_rank(pair: World, context: bool) -> None:
    expected = pair.run("sharded_cases.scaled", context=False)
    found = pair.run("sharded_cases.scaled", mix="mixed", context=context)
    assert found == expected
    assert [skipped for _, skipped, _ in found[0]["told"]] == [False, True, False, False]
    assert [scale for _, _, scale in found[0]["told"]] == [1024.0, 512.0, 512.0, 1024.0]
    assert len({str(rank["told"]) for rank in found}) == 1
