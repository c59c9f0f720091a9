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


EIGHTH = {"exp_avg": torch.uint8, "exp_avg_sq": torch.uint8}


@pytest.mark.parametrize("moments", [EIGHTH, {"exp_avg_sq": torch.uint8}], ids=["both", "second"])
def test_fp8_moments_are_the_same_at_every_number_of_ranks(
    pair: World, tmp_path: Path, moments: dict[str, torch.dtype]
) -> None:
    """Of matrices; vectors have bf16 ones, for ranks cut them anywhere: one of 128 elements, of 10, and of 1."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "state_dtypes": moments, "blocks": True}
    expected = given("device", **options)
    for mix in ("device", "mixed"):
        found = pair.run("sharded_cases.given", mix=mix, network={"mesh": "all"}, **options)
        assert [each["bits"] for each in found] == [expected["bits"]] * 2
    half = dict.fromkeys(moments, torch.bfloat16)
    other = given("device", **{**options, "state_dtypes": half})
    differ = {name.split()[-1] for name, bits in other["bits"].items() if bits != expected["bits"][name]}
    assert {"blocks.0.up.weight", "embed.weight"} <= differ
    assert all(name.endswith(("weight", "three")) and "norm" not in name for name in differ)


@pytest.mark.filterwarnings("ignore")  # of torch, about one process
def test_fp8_moments_go_on_at_another_number_of_ranks_or_are_refused(pair: World, world: World, tmp_path: Path) -> None:
    """By a distributed checkpoint: of one process on two, and of two on four. Blocks are those of the parameter."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "state_dtypes": EIGHTH, "blocks": True}
    expected = given("device", **options)
    alone, two = str(tmp_path / "alone"), str(tmp_path / "two")
    given("mixed", steps=(0,), save=alone, **options)
    pair.run("sharded_cases.given", mix="mixed", network={"mesh": "all"}, steps=(1,), load=alone, save=two, **options)
    found = world.run("sharded_cases.given", network={"mesh": "all"}, steps=(2,), load=two, **options)
    assert [each["bits"] for each in found] == [expected["bits"]] * 4
    with pytest.raises(Exception, match=r"(?s)moments of '.*(weight|three)' in FP8.*does not begin with a block"):
        pair.run("sharded_cases.given", network={"mesh": "all"}, state_dtypes=EIGHTH)


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
