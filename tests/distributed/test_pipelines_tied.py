"""`hostward train` with pipeline stages of a model whose embedding is its output layer: the first stage and the last
have one weight, whose gradient is whole once both of theirs are added up.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pipeline_cases import scales_of
from sharded_cases import digest, snapshot
from train_cases import LLAMA, gradients, norm_of_given_gradients, small
from world import World

from hostward.config.schema import Config
from hostward.trainer import loop, setup
from hostward.trainer.memory_check import names_on_rank
from hostward.trainer.process_group import Ranks

TIED = "model.embed_tokens.weight"
HOST = ["optimizer.optimizer_cpu_offload=True", "optimizer.optimizer_offload_fraction=1.0"]
STREAMED = ["optimizer.offload_optimizer_states=True"]
HALF = [HOST[0], "optimizer.optimizer_offload_fraction=0.5"]
AWAY = ["model.cpu_offloading=True", "model.cpu_offloading_weights=True", "model.cpu_offloading_activations=False"]
PLACED = {
    "host": HOST,
    "streamed": STREAMED,
    "mixed": [*HALF, *STREAMED],
    "serial": [*HALF, "optimizer.overlap_cpu_optimizer_d2h_h2d=False"],
    "weights leave": [*HOST, *AWAY, "model.cpu_offloading_num_layers=1"],
}
STAGES = "model.pipeline_model_parallel_size=2"
HALF_BATCH, BATCH, TWICE = (f"train.global_batch_size={n}" for n in (2, 4, 8))
"""As many microbatches as two stages are, on one rank each, or two; and as four are: as in `test_pipelines.py`."""
PAIR = ["model.num_layers=4", STAGES, HALF_BATCH]
"""A stage on each of two ranks."""
FOUR = ["model.num_layers=8", "model.pipeline_model_parallel_size=4", BATCH]
"""A stage on each of four ranks: two have no part of the weight."""
TWO = ["model.num_layers=4", STAGES, BATCH]
"""Two stages, on two ranks each."""
TURNS = "model.virtual_pipeline_model_parallel_size=2"
BF16 = "model.params_dtype=bf16"
LAYOUTS = {
    "two": PAIR,
    "four": FOUR,
    "four, in turns": [*FOUR, TURNS, TWICE, BF16],
    "divided": [*TWO, BF16],
    "divided, in turns": [*TWO, TURNS, "ddp.data_parallel_sharding_strategy=optim_grads_params"],
    "copies, in turns": [*TWO, TURNS, "ddp.use_distributed_optimizer=False"],
    "matrices": [
        *TWO,
        "model.tensor_model_parallel_size=2",
        "model.sequence_parallel=true",
        HALF_BATCH,
    ],
}


def config_of(words: list[str]) -> Config:
    """Of one process that trains what these words train on several."""
    return small(*[word for word in words if "parallel" not in word], recipe=LLAMA)


@pytest.fixture(scope="module")
def trained(pair: World, world: World) -> Any:
    """Runs by their words, on four ranks where `four`, otherwise on two."""

    @functools.cache
    def run(*words: str, four: bool = False) -> list[Any]:
        return (world if four else pair).run("train_cases.train", words=list(words), recipe=LLAMA)

    return run


def require_same_ends(ranks: list[Any]) -> None:
    """Of the tied weight, itself and its state, on the ranks of the first stage and on those of the last."""
    of_ranks = [{name: bits for name, bits in rank["bits"].items() if TIED in name} for rank in ranks]
    ends = [of for of in of_ranks if of]
    half = len(ends) // 2
    assert ends[:half] == ends[half:]
    assert all(len(of) > 3 for of in ends)
    assert half


def joined(ranks: list[Any]) -> dict[str, str]:
    """Bits of all stages, each of one rank."""
    require_same_ends(ranks)
    return {name: bits for rank in ranks for name, bits in rank["bits"].items()}


AT = {
    "two": ("host", "weights leave"),
    "four, in turns": ("mixed", "serial"),
    "divided": ("serial",),
    "divided, in turns": ("host",),
    "copies, in turns": ("streamed",),  # the host steps no copies
    "matrices": ("mixed",),
}
"""Placements of a layout: each at a stage of its own and at a divided one."""


@pytest.mark.parametrize("layout", AT)
def test_both_ends_step_one_weight_with_the_same_bits_at_every_placement(trained: Any, layout: str) -> None:
    """Losses, norms, weights and state, clipped. Seen red: gradients of the ends not added up; on the first end alone;
    both leaving in backward, as they are made or when the last one ends.
    """
    words, four = LAYOUTS[layout], layout != "two"
    expected = trained(*words, four=four)
    require_same_ends(expected)
    for placed in AT[layout]:
        found = trained(*words, *PLACED[placed], four=four)
        for mine, reference in zip(found, expected, strict=True):
            assert mine["told"] == reference["told"] == expected[0]["told"], placed
            assert mine["bits"] == reference["bits"], placed
            assert mine["offloaded_bytes"] > 0


@pytest.mark.parametrize("layout", ["four", "divided, in turns", "matrices"])
def test_a_step_has_the_gradients_and_the_norm_of_one_process(trained: Any, world: World, layout: str) -> None:
    """And the weights that it begins with, bit for bit; of given gradients the norm too, unless matrices are divided.
    Seen red: the weight counted in the norm on both ends; gradients of the ends not added up.
    """
    words = [word for word in LAYOUTS[layout] if word != BF16]
    expected = gradients(config_of(words), LLAMA)
    found = world.run("train_cases.gradients_of", words=words, recipe=LLAMA)
    for rank in found:
        assert rank["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        for name, gradient in rank["gradients"].items():
            np.testing.assert_allclose(gradient, expected["gradients"][name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert {*found[0]["gradients"], *found[1]["gradients"], *found[2]["gradients"], *found[3]["gradients"]} == {
        *expected["gradients"]
    }
    assert TIED in found[0]["gradients"]
    assert TIED in found[-1]["gradients"]

    run = setup.prepare(LLAMA, config_of(words))
    whole = {name: digest(p) for name, p in run.model.named_parameters()}
    initial = world.run("train_cases.initial", words=words, recipe=LLAMA)
    assert {name: bits for rank in initial for name, bits in rank.items()} == whole
    assert initial[0][TIED] == initial[-1][TIED] == whole[TIED]
    norms = world.run("train_cases.norm_of_given", words=words, recipe=LLAMA)
    expected_norm = norm_of_given_gradients(run)
    assert len(set(norms)) == 1
    assert float.fromhex(norms[0]) == pytest.approx(float.fromhex(expected_norm), rel=1e-6)
    if layout != "matrices":
        assert norms[0] == expected_norm
    one = setup.prepare(LLAMA, config_of(words))
    loop.train(one)
    told = trained(*words, four=True)[0]["told"]
    assert told[1][0] == pytest.approx(one.grad_norms[0], rel=1e-6)
    assert told[1] == pytest.approx(one.grad_norms, rel=1e-4)
    assert told[0] == pytest.approx(one.losses, rel=1e-5)


def test_the_weight_is_one_parameter_of_the_model_and_takes_memory_on_both_ends(world: World) -> None:
    """Seen red: counted on both ends; weighed on the first alone."""
    names, parameters, _ = zip(*world.run("pipeline_cases.place", words=FOUR, recipe=LLAMA), strict=True)
    others = [[name for name in of if ".layers." not in name] for of in names]
    assert others == [[TIED], [], [], [TIED, "model.norm.weight"]]
    whole = setup.prepare(LLAMA, config_of(FOUR)).model
    assert set(parameters) == {sum(p.numel() for p in whole.parameters())}
    for rank, of in enumerate(names):
        assert {*names_on_rank([n for n, _ in whole.named_parameters()], Ranks(rank=rank, size=4, stages=4), 1)} == {
            *of
        }


FP16 = [*FOUR, "model.params_dtype=fp16", "train.train_iters=6"]


@pytest.mark.parametrize("placed", ["mixed", "serial"])
def test_an_overflow_lowers_the_scale_of_all(world: World, placed: str) -> None:
    """As in one process. Seen red: ends not added up; their sum taken before the step where no others are, so that the
    scaler sees what it must not (serial).
    """
    words = [*FP16, *PLACED[placed]]
    expected = scales_of(setup.prepare(LLAMA, config_of(words)), 6)
    found = world.run("pipeline_cases.scaled", words=words, recipe=LLAMA, until=6)
    require_same_ends(found)
    for rank in found:
        assert rank["scales"] == expected["scales"]
        assert rank["skipped"] == expected["skipped"]
        assert 2 in rank["skipped"]
        assert len(rank["skipped"]) < 6


def test_a_saved_pipeline_goes_on_and_every_layout_loads_it(trained: Any, tmp_path: Path) -> None:
    """Bit for bit on two stages, from a save beside training; then by two stages in turns on two ranks each, and what
    these save by one process. Seen red: the name of the weight twice in the saved groups.
    """
    first, second = tmp_path / "first", tmp_path / "second"
    placed = [*HALF, "train.train_iters=3"]
    straight = trained(*TWO, *placed)
    beside = ["checkpoint.async_save=True", "checkpoint.async_save_mode=snapshot"]
    trained(*TWO, *placed, *beside, f"checkpoint.save={first}", "train.train_iters=2")
    resumed = trained(*TWO, *placed, f"checkpoint.save={first}", f"checkpoint.load={first}")
    for before, after in zip(straight, resumed, strict=True):
        assert after["bits"] == before["bits"]
        assert after["told"][0] == before["told"][0][2:]
    words = [*TWO, TURNS, *HOST, "train.train_iters=3"]
    require_same_ends(trained(*words, f"checkpoint.load={first}", f"checkpoint.save={second}", four=True))
    for folder in (first, second):
        run = setup.prepare(
            LLAMA, small(TWO[0], BATCH, f"checkpoint.load={folder}", "train.train_iters=4", recipe=LLAMA)
        )
        assert run.iteration == 3
        assert snapshot(run.model, run.optimizer) == joined(straight)


def test_stages_load_what_one_process_saved(trained: Any, tmp_path: Path) -> None:
    whole = setup.prepare(LLAMA, small(*PAIR[::2], "train.train_iters=2", f"checkpoint.save={tmp_path}", recipe=LLAMA))
    loop.train(whole)
    found = trained(*PAIR, *STREAMED, "train.train_iters=2", f"checkpoint.load={tmp_path}")
    assert joined(found) == snapshot(whole.model, whole.optimizer)


def test_a_gradient_of_one_stage_alone_is_not_stepped(pair: World) -> None:
    """Nor added up twice. Seen red: each of these checks left out."""
    alone = "ModelError: the gradient of 'weight' is that of one stage alone"
    twice = "ModelError: a backward after the gradient of 'weight' was added up over stages"
    (said,) = {tuple(of) for of in pair.run("pipeline_cases.tied_misused")}
    assert said == (
        *[alone, twice, "no error", "no error"] * 2,
        "ModelError: tied='wait' is no parameter of this optimizer",
        "ConfigError: tied=... without stages=...",
        "ConfigError: gradients=\"host\" with 'weight', which two stages of a pipeline have",
    )
