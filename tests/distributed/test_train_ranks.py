"""`hostward train` on several ranks: the batch, the weights and the bits are those of one."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sharded_cases import digest
from train_cases import BATCH, LLAMA, MOE, QWEN3, SIZES, SMALL, gradients, small
from world import World, torchrun_forked

from hostward.config.schema import Config
from hostward.trainer import loop, setup
from hostward.trainer.run import Run

HOST = ["optimizer.optimizer_cpu_offload=True", "optimizer.optimizer_offload_fraction=1.0"]
STREAMED = ["optimizer.offload_optimizer_states=True"]
BF16 = ["model.params_dtype=bf16"]
RESHARDED = "ddp.data_parallel_sharding_strategy=optim_grads_params"
FOUR = "model.num_layers=4"
AWAY = (*HOST, "model.cpu_offloading=True", "model.cpu_offloading_num_layers=3", "model.cpu_offloading_weights=True")
WEIGHTS = (*AWAY, "model.cpu_offloading_activations=False")
IN_FP32 = "ddp.grad_reduce_in_fp32=True"
ONE = "train.global_batch_size=2"
"""A microbatch on each of two ranks, or in each of two groups of ranks."""
EXPERTS = "model.expert_model_parallel_size=2"


@pytest.fixture(scope="module")
def trained(pair: World, world: World) -> Any:
    """Runs by their words, with two microbatches on each of two ranks unless these say otherwise. `four`: on four, for
    groups of two that share matrices or experts.
    """

    @functools.cache
    def run(*words: str, recipe: str = MOE, four: bool = False, **options: Any) -> list[Any]:
        ranks = world if four else pair
        return ranks.run("train_cases.train", words=[BATCH, *words], recipe=recipe, **options)

    return run


@functools.cache
def alone_at_first() -> Run:
    """The run that most are compared with."""
    return alone(small(BATCH))


def alone(config: Config, recipe: str = MOE) -> Run:
    run = setup.prepare(recipe, config)
    loop.train(run)
    return run


@pytest.mark.parametrize("words", [(), ("ddp.use_distributed_optimizer=False",)], ids=["divided", "copies"])
def test_two_ranks_train_on_the_batch_of_one(trained: Any, words: tuple[str, ...]) -> None:
    run = alone_at_first()
    for rank in trained(*words):
        losses, norms, skipped = rank["told"]
        assert losses == pytest.approx(run.losses, rel=1e-5)
        assert norms == pytest.approx(run.grad_norms, rel=1e-4)
        assert not skipped
        assert rank["microbatches"] == 2
        assert rank["told"] == trained(*words)[0]["told"]


@pytest.mark.parametrize("recipe", [MOE, LLAMA])
def test_weights_begin_with_the_bits_of_one_process(pair: World, recipe: str) -> None:
    run = setup.prepare(recipe, small(*BF16, recipe=recipe))
    expected = {name: digest(p) for name, p in run.model.named_parameters()}
    for found in pair.run("train_cases.initial", words=BF16, recipe=recipe):
        assert found == expected


LEAVING = (*HOST, "model.cpu_offloading=True", "model.cpu_offloading_num_layers=1")

AGAIN = ("model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1")
CASES = {
    "on the host": ((), tuple(HOST)),
    "half on the host": ((), (HOST[0], "optimizer.optimizer_offload_fraction=0.5")),
    "streamed": ((), tuple(STREAMED)),
    "bf16, sums in float32": (tuple(BF16), tuple(HOST)),
    "bf16, sums on the host": (tuple(BF16), (*HOST, "optimizer.gradients=host")),
    "bf16, reduced in float32": ((*BF16, IN_FP32, ONE), tuple(HOST)),
    "bf16, reduced in float32, sums on the host": ((*BF16, IN_FP32), (*HOST, "optimizer.gradients=host")),
    "copies": (("ddp.use_distributed_optimizer=False",), tuple(STREAMED)),
    "resharded": ((RESHARDED,), tuple(HOST)),
    "resharded, reduced in float32": ((*BF16, IN_FP32, RESHARDED, ONE), tuple(HOST)),
    "weights leave": ((FOUR,), WEIGHTS),
    "weights leave, one microbatch": ((FOUR, *BF16, ONE), WEIGHTS),
    "weights leave, resharded": ((FOUR, RESHARDED, *BF16), WEIGHTS),
    "weights and activations leave, resharded": ((FOUR, RESHARDED), AWAY),
    "weights leave, recomputed": ((FOUR, RESHARDED, *AGAIN), WEIGHTS),
    "weights leave, experts": ((FOUR, RESHARDED, "model.expert_model_parallel_size=2"), WEIGHTS),
    "weights leave, matrices": (
        (
            FOUR,
            RESHARDED,
            "model.tensor_model_parallel_size=2",
            "model.sequence_parallel=True",
            ONE,
        ),
        WEIGHTS,
    ),
    "activations leave": ((), LEAVING),
    "activations leave, experts, resharded": (
        (RESHARDED, "model.expert_model_parallel_size=2"),
        LEAVING,
    ),
    "activations leave, matrices and experts, resharded": (
        (
            RESHARDED,
            "model.tensor_model_parallel_size=2",
            "model.sequence_parallel=True",
            "model.expert_model_parallel_size=2",
            ONE,
        ),
        LEAVING,
    ),
}


IN_TWO_DIMENSIONS = (
    "weights leave, experts",
    "weights leave, matrices",
    "activations leave, matrices and experts, resharded",
)


@pytest.mark.parametrize("case", CASES)
def test_every_placement_gives_the_same_bits(trained: Any, case: str) -> None:
    """Which are those of layers that stay whole, and of activations that are kept: so runs share what they are compared
    with.
    """
    words, placed = CASES[case]
    plainly = [word for word in words if word not in (RESHARDED, *AGAIN)]
    # All that layers save leaves: experts and routers, however small, are not among it.
    options = {"min_bytes": 0} if "activations leave" in case else {}
    four = case in IN_TWO_DIMENSIONS
    for found, expected in zip(
        trained(*words, *placed, four=four, **options), trained(*plainly, four=four), strict=True
    ):
        assert found["told"] == expected["told"]
        assert found["bits"] == expected["bits"]
        assert found["offloaded_bytes"] > 0
        assert expected["offloaded_bytes"] == 0
        if "activations leave" in case:
            assert found["left_bytes"] > 0
        if "weights leave" in case:
            assert found["weights"]["offloaded"] > found["weights"]["here"]
            assert found["weights"]["on_demand"] == 0
            assert found["weights"]["held"] == 0


def test_layers_that_are_whole_one_at_a_time_have_the_bits_of_layers_that_stay_whole(trained: Any) -> None:
    words = (IN_FP32, *BF16)
    for found, expected in zip(trained(RESHARDED, *words), trained(*words), strict=True):
        assert found["told"] == expected["told"]
        assert found["bits"] == expected["bits"]


@pytest.mark.parametrize(
    ("batch", "words"), [(2, ()), (4, ("ddp.use_distributed_optimizer=False",))], ids=["divided", "copies"]
)
def test_gradients_reduced_in_float32_are_the_mean_of_those_of_bf16(
    pair: World, batch: int, words: tuple[str, ...]
) -> None:
    """As one process adds up those of the same microbatches in float32."""
    size = f"train.global_batch_size={batch}"
    expected = gradients(small(*BF16, size))["gradients"]
    for found in pair.run("train_cases.gradients_of", words=[*BF16, IN_FP32, size, *words]):
        for name, gradient in expected.items():
            assert found["gradients"][name].dtype == np.float32
            np.testing.assert_allclose(found["gradients"][name], gradient, rtol=1e-5, atol=1e-8, err_msg=name)


@pytest.mark.parametrize("mode", ["snapshot", "stream"])
def test_a_run_whose_weights_leave_is_saved_and_goes_on(trained: Any, mode: str, tmp_path: Path) -> None:
    """Bit for bit, from a save beside training: with weights that stay, and with weights that leave."""
    placed = (FOUR, RESHARDED, *WEIGHTS)
    straight = trained(FOUR, *HOST, "train.train_iters=3")
    save = (f"checkpoint.save={tmp_path}", "checkpoint.async_save=True", f"checkpoint.async_save_mode={mode}")
    trained(*placed, *save, "train.train_iters=2")
    load = f"checkpoint.load={tmp_path}"
    resumed = trained(*((FOUR, *HOST) if mode == "snapshot" else placed), load, "train.train_iters=3")
    for found, expected in zip(resumed, straight, strict=True):
        assert found["bits"] == expected["bits"]
        assert found["told"][0] == expected["told"][0][2:]


def test_the_report_has_sums_by_node_and_names_a_straggler(world: World) -> None:
    for rank in world.run("train_cases.train", words=[BATCH, *HOST], slow=2):
        report = rank["ranks"]
        (node,) = report.nodes
        assert node.ranks == 4
        assert node.host_bytes == sum(row.host_bytes for row in report.ranks) > 0
        assert node.pinned_bytes == sum(row.pinned_bytes for row in report.ranks) > 0
        assert [row.rank for row in report.ranks] == [0, 1, 2, 3]
        (told,) = [text for text in report.stragglers if "reading samples" in text]
        assert told.startswith("rank 2 on ")


def test_every_rank_raises_the_error_of_the_one_that_fails(pair: World) -> None:
    for told, everywhere in pair.run("train_cases.one_fails"):
        assert told.startswith("MemoryLimitError: rank 1 on ")
        assert "no page can be locked\n  why: the limit is 0\n  fix: ulimit -l unlimited" in told
        assert everywhere


# -------------------------------------------------------------------- what a report stacks


@pytest.mark.parametrize(
    "words",
    [BF16, (RESHARDED, EXPERTS), HOST, STREAMED, ("ddp.use_distributed_optimizer=False",)],
    ids=["bf16", "experts", "host", "streamed", "copies"],
)
def test_owners_that_a_report_stacks_are_no_more_than_what_is_there(pair: World, words: tuple[str, ...]) -> None:
    """Seen red: gradients of all ranks counted on each of them, both in `.grad` and where they have left it."""
    whole = alone_at_first()
    for rank in pair.run("train_cases.stacked", words=[BATCH, *words]):
        assert set(rank["moments"]) == {"forward", "backward", "step"}
        assert all(owners <= there for owners, there in zip(rank["owners"], rank["measured"], strict=True))
        assert 0 < max(rank["gradients"]) <= rank["most_gradients"]
        assert rank["parameters"] == (whole.model_parameters, whole.trained_parameters)


def test_trained_parameters_of_stages_are_those_of_the_model(pair: World) -> None:
    words = ("model.pipeline_model_parallel_size=2", BATCH)
    for recipe in (QWEN3, LLAMA):
        whole = setup.prepare(recipe, small(recipe=recipe))
        for rank in pair.run("train_cases.stacked", words=list(words), recipe=recipe):
            assert rank["parameters"] == (whole.model_parameters, whole.trained_parameters)


# -------------------------------------------------------------------- torchrun

ROOT = Path(__file__).resolve().parents[2]


def test_torchrun_starts_a_run_anew_that_goes_on_by_itself(tmp_path: Path) -> None:
    """The guide's line for it, with a rank that fails once."""
    guide = (ROOT / "docs/training/scaling-out.md").read_text()
    line = next(line for line in guide.splitlines() if line.startswith("    torchrun ") and "--max-restarts" in line)
    words = line.split()[1:]
    assert "--max-restarts=2" in words
    assert [words.count(f"checkpoint.{what}=restarted") for what in ("save", "load")] == [1, 1]
    at = words.index("-m")
    assert words[at : at + 2] == ["-m", "hostward"]
    words[at : at + 2] = [str(ROOT / "tests/distributed/failing_rank.py")]
    words += [*SMALL, *SIZES[MOE], *HOST, "train.train_iters=8", "logger.log_interval=1", "--json", "report.json"]
    done = torchrun_forked(*words, folder=tmp_path)
    assert done.code == 0, done.err
    assert "no checkpoint in restarted yet: the run starts at iteration 0" in done.err
    assert "rank 1: error: the disk of this rank is gone" in done.err
    assert done.err.count("resumed restarted/iter_0000004 at iteration 4") == 1
    assert "Gloo connectFullMesh failed" not in done.err
    assert done.out.count("loss, first and last") == 1
    assert "2 ranks, by node" in done.out
    assert "each rank has" in done.out
    content = json.loads((tmp_path / "report.json").read_text())
    assert (content["first_iteration"], len(content["ranks"]["ranks"])) == (4, 2)
    assert content["division"].startswith(
        "weights, gradients and state sharded over 2 ranks; a layer unsharded from its"
    )
    expected = alone(small(*HOST, "train.train_iters=8")).losses
    assert content["losses"] == pytest.approx(expected[4:], rel=1e-5)


LAYOUTS = {
    "data": (MOE, ()),
    "data, moments in FP8": (MOE, ("optimizer.exp_avg_dtype=fp8", "optimizer.exp_avg_sq_dtype=fp8")),
    "matrices": (LLAMA, ("model.tensor_model_parallel_size=2",)),
    "matrices and experts": (
        MOE,
        (
            "model.tensor_model_parallel_size=2",
            "model.sequence_parallel=true",
            "model.expert_model_parallel_size=2",
            ONE,
        ),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_saved_run_goes_on_bit_for_bit(trained: Any, tmp_path: Path, layout: str) -> None:
    recipe, words = LAYOUTS[layout]
    words = (*words, *HOST, "train.train_iters=3")
    run = functools.partial(trained, recipe=recipe, four="experts" in layout)
    straight = run(*words)
    saved = f"checkpoint.save={tmp_path}"
    run(*words, saved, "train.train_iters=2")
    resumed = run(*words, saved, f"checkpoint.load={tmp_path}")
    for before, after in zip(straight, resumed, strict=True):
        assert after["bits"] == before["bits"]
        assert after["told"][0] == before["told"][0][2:]
    batch = ONE if "experts" in layout else BATCH
    config = small(batch, f"checkpoint.load={tmp_path}", "train.train_iters=5", recipe=recipe)
    assert setup.prepare(recipe, config).iteration == 3
