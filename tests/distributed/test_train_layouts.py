"""`hostward train` with experts and matrices divided over ranks: gradients, norms and bits."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from train_cases import BATCH, LLAMA, MOE, QWEN3, gradients, norm_of_given_gradients, small
from world import World

from hostward.trainer import loop, setup

HOST = ["optimizer.optimizer_cpu_offload=True", "optimizer.optimizer_offload_fraction=1.0"]
STREAMED = ["optimizer.offload_optimizer_states=True"]


@pytest.fixture(scope="module")
def trained(pair: World, world: World) -> Any:
    """Runs by their words, on four ranks where `four`, otherwise on two."""

    @functools.cache
    def run(*words: str, recipe: str = MOE, four: bool) -> list[Any]:
        return (world if four else pair).run("train_cases.train", words=list(words), recipe=recipe)

    return run


# -------------------------------------------------------------------- experts divided over ranks

TWO, FOUR = "model.expert_model_parallel_size=2", "model.expert_model_parallel_size=4"


@pytest.mark.parametrize("experts", [TWO, FOUR])
def test_experts_over_ranks_give_the_gradients_of_one_process(world: World, experts: str) -> None:
    expected = gradients(small(BATCH))
    for found in world.run("train_cases.gradients_of", words=[experts, BATCH]):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        for name, gradient in expected["gradients"].items():
            np.testing.assert_allclose(found["gradients"][name], gradient, rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_rank_whose_experts_get_no_tokens_takes_part(world: World, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a" * 100)  # all tokens go to the same two experts of a layer
    words = ["model.seq_length=1", "model.num_moe_experts=16", f"dataset.path={tmp_path / 'text'}"]
    words += ["dataset.format=text", "train.global_batch_size=4"]
    expected = gradients(small(*words))
    ranks = world.run("train_cases.gradients_of", words=[*words, FOUR])
    assert not all(found["had_tokens"] for found in ranks)
    for found in ranks:
        for name, gradient in expected["gradients"].items():
            np.testing.assert_allclose(found["gradients"][name], gradient, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("experts", [TWO, FOUR])
def test_the_norm_with_experts_over_ranks_is_that_of_one_process_in_every_bit(world: World, experts: str) -> None:
    expected = norm_of_given_gradients(setup.prepare(MOE, small()))
    assert world.run("train_cases.norm_of_given", words=[experts]) == [expected] * 4


@pytest.mark.parametrize(("batch", "experts", "placed"), [(8, TWO, HOST), (4, FOUR, STREAMED)], ids=["two", "four"])
def test_experts_over_ranks_have_the_same_bits_at_every_placement(
    trained: Any, experts: str, placed: list[str], batch: int
) -> None:
    words = (experts, f"train.global_batch_size={batch}")
    for found, expected in zip(trained(*words, *placed, four=True), trained(*words, four=True), strict=True):
        assert found["told"] == expected["told"]
        assert found["bits"] == expected["bits"]
        assert found["offloaded_bytes"] > 0


# -------------------------------------------------------------------- matrices divided over ranks

SHARED = "model.tensor_model_parallel_size=2"


SEQUENCES = (SHARED, "model.sequence_parallel=true")
ONE = "train.global_batch_size=2"
"""A microbatch in each of two groups of ranks that share matrices, two in one such group."""
BALANCED = "model.moe_aux_loss_coeff=1"
"""A loss of what routers say of all tokens of a microbatch that is not lost beside the other."""
MATRICES = {
    "tied, sequences": (LLAMA, SEQUENCES),
    "dense": (QWEN3, (SHARED,)),
    "sequences": (QWEN3, SEQUENCES),
    "all experts on every rank": (MOE, (*SEQUENCES, BALANCED)),
    "experts on the ranks that share matrices": (MOE, (*SEQUENCES, TWO, BALANCED)),
    "experts on more ranks": (MOE, (*SEQUENCES, FOUR, BALANCED)),
    "experts on fewer ranks": (
        MOE,
        ("model.num_query_groups=4", "model.tensor_model_parallel_size=4", SEQUENCES[1], TWO, BALANCED),
    ),
}


ON_TWO = ("dense", "sequences")


@pytest.mark.parametrize("case", MATRICES)
def test_matrices_over_ranks_give_the_gradients_of_one_process(pair: World, world: World, case: str) -> None:
    """Two or all ranks share matrices, and groups of them the batch."""
    recipe, words = MATRICES[case]
    words = (*words, BATCH if FOUR in words else ONE)
    expected = gradients(small(*[word for word in words if "parallel" not in word], recipe=recipe), recipe)
    ranks = pair if case in ON_TWO else world
    for found in ranks.run("train_cases.gradients_of", words=list(words), recipe=recipe):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert found["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            np.testing.assert_allclose(found["gradients"][name], gradient, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("recipe", "shared", "microbatches", "placed", "four"),
    [
        (QWEN3, (SHARED, ONE), 2, HOST, False),
        (QWEN3, (*SEQUENCES, "train.global_batch_size=1"), 1, STREAMED, False),
        (MOE, (*SEQUENCES, ONE), 2, HOST, False),
        (MOE, (*SEQUENCES, TWO, ONE), 1, STREAMED, True),
    ],
    ids=["dense", "sequences", "all experts on every rank", "experts on the ranks that share matrices"],
)
def test_matrices_over_ranks_have_the_same_bits_at_every_placement(
    trained: Any, recipe: str, shared: tuple[str, ...], microbatches: int, placed: list[str], four: bool
) -> None:
    expected = trained(*shared, recipe=recipe, four=four)
    for mine, reference in zip(trained(*shared, *placed, recipe=recipe, four=four), expected, strict=True):
        assert mine["told"] == reference["told"] == expected[0]["told"]
        assert mine["bits"] == reference["bits"]
        assert mine["offloaded_bytes"] > 0
        assert mine["microbatches"] == microbatches


@pytest.mark.parametrize(
    ("recipe", "words", "four"),
    [(QWEN3, (SHARED, ONE), False), (MOE, (*SEQUENCES, ONE), False), (MOE, (*SEQUENCES, FOUR, BATCH), True)],
)
def test_norms_count_what_ranks_share_once(trained: Any, recipe: str, words: tuple[str, ...], four: bool) -> None:
    run = setup.prepare(recipe, small(words[-1], recipe=recipe))
    loop.train(run)
    for found in trained(*words, recipe=recipe, four=four):
        assert found["told"][1] == pytest.approx(run.grad_norms, rel=1e-5)
        assert found["told"][0] == pytest.approx(run.losses, rel=1e-5)
