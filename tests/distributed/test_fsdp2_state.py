"""State of sharded parameters: sharded as they are, whole in a distributed checkpoint, exact in both."""

from __future__ import annotations

import pytest
import torch
from sharded_cases import given
from world import World


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_state_goes_on_bit_for_bit_at_another_placement(pair: World, dtype: str) -> None:
    for expected, found in pair.run("sharded_cases.resumed", mix="mixed", other="host", dtype=dtype):
        assert found == expected


@pytest.fixture(scope="module")
def saved(world: World, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A distributed checkpoint of four ranks, after two steps."""
    folder = str(tmp_path_factory.mktemp("state") / "saved")
    world.run("sharded_cases.given", mix="mixed", steps=(0, 1), network={}, save=folder)
    return folder


@pytest.mark.parametrize(("ranks", "mesh"), [("world", "all"), ("world", "hybrid"), ("pair", "all"), ("pair", "alone")])
def test_a_distributed_checkpoint_loads_at_any_number_of_ranks(
    saved: str, request: pytest.FixtureRequest, ranks: str, mesh: str
) -> None:
    loads: World = request.getfixturevalue(ranks)
    found = loads.run("sharded_cases.given", mix="host", steps=(2,), network={"mesh": mesh}, load=saved)
    expected = given("device")
    assert [rank["bits"] for rank in found] == [expected["bits"]] * loads.size
    assert [rank["told"] for rank in found] == [expected["told"][2:]] * loads.size


@pytest.mark.parametrize("broadcast", [False, True])
def test_a_whole_state_that_torch_rounds_is_refused(pair: World, broadcast: bool) -> None:
    """What trainers save as `FULL_STATE_DICT`. Seen red: all of these loaded."""
    half, main = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.bfloat16), {"main_param": torch.bfloat16}
    formats = {"fp32": {}, "half": half, "main": main}
    for found in pair.run("sharded_cases.loaded_in_formats", saved=formats, wanted=formats, broadcast=broadcast):
        refused = {pair for pair, why in found.items() if why}
        assert refused == {"fp32 into half", "fp32 into main", "half into main", "main into half"}
        assert "this optimizer stores it in bfloat16" in found["fp32 into half"]
        assert "keeps main weights in bfloat16" in found["fp32 into main"]


def test_a_state_of_one_process_loads_into_shards(world: World) -> None:
    for found in world.run("sharded_cases.loaded_whole", mesh="hybrid"):
        assert set(found.values()) == {""}
