"""State of sharded parameters: sharded as they are, whole in a distributed checkpoint, exact in both."""

from __future__ import annotations

from pathlib import Path

import pytest
from sharded_cases import given
from world import World


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_state_goes_on_bit_for_bit_at_another_placement(world: World, dtype: str) -> None:
    for expected, found in world.run("sharded_cases.resumed", mix="mixed", other="host", dtype=dtype):
        assert found == expected


@pytest.mark.parametrize("mesh", ["four", "pairs", "alone", "hybrid"])
def test_a_distributed_checkpoint_loads_at_any_number_of_ranks(world: World, tmp_path: Path, mesh: str) -> None:
    folder = str(tmp_path / "saved")
    world.run("sharded_cases.given", mix="mixed", steps=(0, 1), network={"mesh": "four"}, save=folder)
    found = world.run("sharded_cases.given", mix="host", steps=(2,), network={"mesh": mesh}, load=folder)
    expected = given("device")
    assert [rank["bits"] for rank in found] == [expected["bits"]] * 4
    assert [rank["told"] for rank in found] == [expected["told"][2:]] * 4


@pytest.mark.parametrize("mesh", ["four", "hybrid"])
def test_a_state_of_one_process_loads_into_shards(world: World, mesh: str) -> None:
    for found in world.run("sharded_cases.loaded_whole", mesh=mesh):
        assert set(found.values()) == {""}
