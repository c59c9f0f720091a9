"""What cannot be met over FSDP2 is an error of ours on every rank, before anything is trained."""

from __future__ import annotations

import platform
from types import SimpleNamespace

import pytest
from world import World

from hostward.distributed import fsdp2
from hostward.errors import ModelError

REFUSED = {
    "both_offload": "ConfigError: FSDP2's CPUOffloadPolicy together with hostward.AdamW",
    "sharded_afterwards": "ModelError: parameter 'scale' was sharded after the optimizer was made",
    "sharded_moments_rounded_to_fp8": "CheckpointError: exp_avg of 'embed.weight' is sharded",
    "asleep_after_an_error_in_backward": "ModelError: parameter 'scale' is unsharded: a forward or backward of FSDP2",
    "half_sharded": "ModelError: parameter 'scale' is not sharded by FSDP2",
    "without_the_module": "ModelError: parameter 'scale' is a DTensor of no known FSDP2 module",
    "two_meshes": "ModelError: parameters are sharded on several device meshes",
    "tensor_parallel_of_a_part": "ModelError: parameters are sharded on several device meshes, of different ranks",
    "tensor_parallel_alone": "ModelError: parameter 'blocks.0.up.weight' is a DTensor of no known FSDP2 module",
    "clipped_after_they_left": "ModelError: the gradient of parameter 'scale' is not in .grad any more",
    "state_of_another_mesh": "CheckpointError: the saved state of parameter 'scale' is divided over ranks in another",
    "weights_away_beside_their_policy": "ConfigError: FSDP2's CPUOffloadPolicy together with weights=",
    "moved": "ModelError: move() of a sharded model: weight 'scale'",
    "replaced_by_loading": "ModelError: load_state_dict(assign=True) of a model with offloaded weights",
    "weights_away_of_matrices": "ModelError: weight 'blocks.0.up.weight' is a DTensor of no known FSDP2 module",
    "weights_away_and_stepped_here": f"ConfigError: rank 0 on {platform.node()} and 3 more: weight 'blocks.0.",
    "a_gradient_not_reduced": "ModelError: parameter 'scale' has a gradient that is a DTensor, not placed as",
    "a_gradient_without_ranks": "ModelError: parameter 'scale' has a gradient that is a Tensor, not placed as",
    "planned": "ModelError: the model is sharded by FSDP2",
    "a_checkpoint_of_one_process": "CheckpointError: cannot save 'scale'",
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_on_every_rank(world: World, what: str) -> None:
    for told in world.run("refusals.told", what=what):
        assert told.startswith(REFUSED[what])
        assert "  fix: " in told


@pytest.mark.parametrize(
    ("what", "mesh", "ranks", "first", "then"),
    [
        ("stepped on the device", "all", [0, 1, 2], "ConfigError: rank 0{} and 2 more: weight 'blocks.0.three'", ""),
        ("modules", "all", [2], "ConfigError: rank 2{}: no layer has a module 'upp'", "did you mean up"),
        ("modules", "hybrid", [2], "ConfigError: rank 2{}: no layer has a module 'upp'", "did you mean up"),
        ("host memory", "hybrid", [1, 3], "MemoryLimitError: rank 1{} and 1 more: the host is full", "free memory"),
    ],
)
def test_what_one_rank_refuses_all_do_and_nothing_stays(
    world: World, what: str, mesh: str, ranks: list[int], first: str, then: str
) -> None:
    """Seen red: the others went on, attached."""
    for rank in world.run("refusals.refused_by_some", what=what, mesh=mesh, ranks=ranks):
        assert rank["told"].startswith(first.format(f" on {platform.node()}"))
        assert then in rank["told"]
        assert rank["after"] == rank["before"]


def test_a_torch_whose_fsdp2_is_built_in_another_way_is_named() -> None:
    with pytest.raises(ModelError, match=r"FSDP2 of torch .* is not known.*\n.*no wait_for_unshard, post_backward"):
        fsdp2.require_known_fsdp(SimpleNamespace(unshard=None))
