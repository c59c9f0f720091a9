"""One norm for all ranks: that of one process, bit for bit, and one decision to skip."""

from __future__ import annotations

import pytest
from sharded_cases import given
from world import World

MESHES = {"alone": {"mesh": "alone"}, "two": {"mesh": "pairs"}, "four": {"mesh": "four"}, "hybrid": {"mesh": "hybrid"}}


@pytest.mark.parametrize("mix", ["device", "mixed"])
@pytest.mark.parametrize("mesh", MESHES)
def test_norm_and_steps_of_given_gradients_are_those_of_one_process(world: World, mesh: str, mix: str) -> None:
    expected = given("device")
    found = world.run("sharded_cases.given", mix=mix, network=MESHES[mesh])
    assert found == [expected] * 4


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(world: World) -> None:
    expected = given("device", bad=1)
    found = world.run("sharded_cases.given", mix="mixed", network={}, bad=1)
    assert [skipped for _, skipped, _ in found[0]["told"]] == [False, True, False]
    assert set(found[0]["counts"].values()) == {2}  # of parts without elements too
    assert found == [expected] * 4
