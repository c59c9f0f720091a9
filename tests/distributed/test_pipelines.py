"""`hostward train` with pipeline stages: what one process has, in every bit where each stage is one process."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pipeline_cases import scales_of
from sharded_cases import digest, snapshot
from train_cases import MOE, QWEN3, SIZES, SMALL, gradients, norm_of_given_gradients, small
from world import World, commands

from hostward.config.schema import Config
from hostward.trainer import loop, setup

HOST = ["optimizer.optimizer_cpu_offload=True", "optimizer.optimizer_offload_fraction=1.0"]
HALF = [HOST[0], "optimizer.optimizer_offload_fraction=0.5", "optimizer.offload_optimizer_states=True"]
STREAMED = ["optimizer.offload_optimizer_states=True"]
STAGES = "model.pipeline_model_parallel_size=2"
HALF_BATCH, BATCH, TWICE = (f"train.global_batch_size={n}" for n in (2, 4, 8))
"""As many microbatches as stages: of two on one rank each; of two on two each, or four; twice as many, with which alone
stages that take turns alternate between forward and backward on every rank.
"""
PAIR = ["model.num_layers=2", STAGES, HALF_BATCH]
"""A stage on each of two ranks."""
FOUR = ["model.num_layers=4", "model.pipeline_model_parallel_size=4", TWICE]
"""A stage on each of four ranks."""
EIGHT = ["model.num_layers=8", "model.pipeline_model_parallel_size=4", BATCH]
TWO = ["model.num_layers=4", STAGES, BATCH]
"""Two stages on four ranks, over the two ranks of each of which FSDP2 divides it."""
LONGER = ["model.num_layers=4", *PAIR[1:]]
TURNS = "model.virtual_pipeline_model_parallel_size=2"
SHARED = "model.tensor_model_parallel_size=2"
SEQUENCES = [SHARED, "model.sequence_parallel=true"]
LONG = ["model.num_layers=8", *PAIR[1:]]
RESHARDED = "ddp.data_parallel_sharding_strategy=optim_grads_params"


def away(layers: int, *, activations: bool = False) -> list[str]:
    """Weights of so many layers of each rank leave, which the host steps, with what they save or without."""
    kept = [] if activations else ["model.cpu_offloading_activations=False"]
    what = [*HOST, "model.cpu_offloading=True", "model.cpu_offloading_weights=True", *kept]
    return [*what, f"model.cpu_offloading_num_layers={layers}"]


@pytest.fixture(scope="module")
def trained(pair: World, world: World) -> Any:
    """Runs by their words, on four ranks where `four`, otherwise on two."""

    @functools.cache
    def run(*words: str, recipe: str = QWEN3, four: bool = False, **options: Any) -> list[Any]:
        ranks = world if four else pair
        return ranks.run("train_cases.train", words=list(words), recipe=recipe, **options)

    return run


@functools.cache
def alone(*words: str, recipe: str = QWEN3) -> dict[str, Any]:
    run = setup.prepare(recipe, config_of(words, recipe))
    loop.train(run)
    return {"told": (run.losses, run.grad_norms, run.skipped), "bits": snapshot(run.model, run.optimizer)}


def config_of(words: tuple[str, ...] | list[str], recipe: str) -> Config:
    """Of one process that trains what these words train on several."""
    return small(*[word for word in words if "parallel" not in word], recipe=recipe)


def joined(ranks: list[Any]) -> dict[str, str]:
    """Bits of all stages, which have no parameter in common, where each is on one rank."""
    found: dict[str, str] = {}
    for rank in ranks:
        assert found.keys().isdisjoint(rank["bits"])
        found |= rank["bits"]
    return found


BITS = {
    "four stages, experts, half on the host": (MOE, FOUR, HALF),
    "sums on the host, in float32": (QWEN3, [*PAIR, "model.params_dtype=bf16"], [*HOST, "optimizer.gradients=host"]),
    "fp16": (QWEN3, [*PAIR, "model.params_dtype=fp16"], HALF),
    "activations leave, layers run again": (
        QWEN3,
        LONGER,
        [
            *[*STREAMED, "model.cpu_offloading=True", "model.cpu_offloading_num_layers=1"],
            *["model.recompute_granularity=full", "model.recompute_method=block", "model.recompute_num_layers=1"],
        ],
    ),
    "stages take turns, parts leave": (
        MOE,
        [*LONGER, TURNS, BATCH, "model.params_dtype=bf16"],
        [
            *["model.fine_grained_activation_offloading=True", "model.offload_modules=[expert_fc1,moe_act]"],
            *["model.min_offloaded_tensor_size=64", *HOST],
        ],
    ),
    "weights leave": (QWEN3, [*LONG, "model.params_dtype=fp16"], away(3)),
    "weights and activations leave": (QWEN3, LONGER, away(1, activations=True)),
    "weights leave, stages take turns, layers run again": (
        MOE,
        [*LONG, TURNS, "model.params_dtype=bf16"],
        [
            *away(3),
            "model.recompute_granularity=full",
            "model.recompute_method=uniform",
            "model.recompute_num_layers=1",
        ],
    ),
}


@pytest.mark.parametrize("case", BITS)
def test_a_pipeline_has_the_bits_of_one_process_at_every_placement(trained: Any, case: str) -> None:
    """Losses, norms, weights and state, clipped, with once or twice as many microbatches as stages."""
    recipe, words, placed = BITS[case]
    options: dict[str, Any] = {"four": "four stages" in case}
    if "activations leave" in case:
        options["min_bytes"] = 0
    found, expected = trained(*words, *placed, recipe=recipe, **options), alone(*words, recipe=recipe)
    assert [rank["told"] for rank in found] == [expected["told"]] * len(found)
    assert joined(found) == expected["bits"]
    assert all(rank["offloaded_bytes"] > 0 for rank in found)
    assert all((rank["left_bytes"] > 0) == ("activations" in case or "parts" in case) for rank in found)
    assert all((rank["weights"].get("fetched", 0) > 0) == ("weights" in case) for rank in found)


FP16 = ["model.params_dtype=fp16", "train.train_iters=6"]


@pytest.mark.parametrize(
    ("ranks", "stages", "placed"),
    [
        ("pair", PAIR, ()),
        ("world", [*EIGHT, TURNS], ("optimizer.overlap_cpu_optimizer_d2h_h2d=False", *HALF[:2])),
    ],
    ids=["two", "four in turns, half on the host"],
)
def test_an_overflow_on_one_stage_lowers_the_scale_of_all(
    request: pytest.FixtureRequest, ranks: str, stages: list[str], placed: Any
) -> None:
    """As in one process, whether gradients have left when the scaler looks at them, or not. Seen red on four ranks: a
    scaler of each stage by itself, which two ranks do not show.
    """
    words = [*stages, *FP16, *placed]
    expected = scales_of(setup.prepare(QWEN3, config_of(words, QWEN3)), 6)
    found = request.getfixturevalue(ranks).run("pipeline_cases.scaled", words=words, until=6)
    for rank in found:
        assert rank["scales"] == expected["scales"]
        assert rank["skipped"] == expected["skipped"]
        assert 2 in rank["skipped"]
        assert len(rank["skipped"]) < 6
    assert joined(found) == expected["bits"]


def test_the_scale_of_all_stages_is_saved_and_goes_on(pair: World, tmp_path: Path) -> None:
    words = [*PAIR, *FP16, *HOST]
    straight = pair.run("pipeline_cases.scaled", words=words, until=6)
    before = pair.run("pipeline_cases.scaled", words=[*words, f"checkpoint.save={tmp_path}"], until=4, save=True)
    after = pair.run("pipeline_cases.scaled", words=[*words, f"checkpoint.load={tmp_path}"], until=6)
    for first, second, whole in zip(before, after, straight, strict=True):
        assert [*first["scales"], *second["scales"][1:]] == whole["scales"] == straight[0]["scales"]
        assert second["scales"][0] == first["scales"][-1]
        assert second["bits"] == whole["bits"]
    alone = setup.prepare(QWEN3, config_of([*words, f"checkpoint.load={tmp_path}"], QWEN3))
    assert alone.scaler is not None
    assert (alone.scaler.get_scale(), alone.scaler.state_dict()["_growth_tracker"]) == before[0]["scales"][-1]


# -------------------------------------------------------------------- stages that several ranks share

LAYOUTS = {
    "divided": (QWEN3, TWO),
    "copies": (QWEN3, [*TWO, "ddp.use_distributed_optimizer=False"]),
    "experts": (MOE, [*TWO, "model.expert_model_parallel_size=2"]),
    "stages take turns": (MOE, [*TWO, TURNS, TWICE]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stages_over_ranks_train_on_the_batch_of_one_process(world: World, layout: str) -> None:
    """Weights begin with its bits, gradients are its gradients, and given gradients have its norm, bit for bit."""
    recipe, words = LAYOUTS[layout]
    expected = gradients(config_of(words, recipe), recipe)
    found = world.run("train_cases.gradients_of", words=words, recipe=recipe)
    for rank in found:
        assert rank["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        for name, gradient in rank["gradients"].items():
            np.testing.assert_allclose(gradient, expected["gradients"][name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert {*found[0]["gradients"], *found[2]["gradients"]} == {*expected["gradients"]}
    assert found[0]["gradients"].keys() == found[1]["gradients"].keys()

    run = setup.prepare(recipe, config_of(words, recipe))
    whole = {name: digest(p) for name, p in run.model.named_parameters()}
    initial = world.run("train_cases.initial", words=words, recipe=recipe)
    assert {**initial[0], **initial[2]} == {**initial[1], **initial[3]} == whole
    assert world.run("train_cases.norm_of_given", words=words, recipe=recipe) == [norm_of_given_gradients(run)] * 4


@pytest.mark.parametrize(
    ("layout", "placed"),
    [("divided", HALF), ("copies", STREAMED), ("experts", HOST), ("stages take turns", HALF)],
    ids=list(LAYOUTS),
)
def test_stages_over_ranks_have_the_same_bits_at_every_placement(trained: Any, layout: str, placed: list[str]) -> None:
    recipe, words = LAYOUTS[layout]
    bf16 = "model.params_dtype=bf16"
    expected = trained(*words, bf16, recipe=recipe, four=True)
    for mine, reference in zip(trained(*words, bf16, *placed, recipe=recipe, four=True), expected, strict=True):
        assert mine["told"] == reference["told"] == expected[0]["told"]
        assert mine["bits"] == reference["bits"]
        assert mine["offloaded_bytes"] > 0
        assert mine["microbatches"] == (4 if "turns" in layout else 2)


GATHERED = {
    "experts": ("experts", [*STREAMED, RESHARDED]),
    "stages take turns": ("stages take turns", [*HOST, RESHARDED]),
    "weights leave, stages take turns": ("four layers each, in turns", [*away(3), RESHARDED]),
    "weights leave, whole in a step": ("four layers each, in turns", away(3)),
}
LAYERS = ["model.num_layers=8", STAGES, BATCH]
WORDS = {**LAYOUTS, "four layers each, in turns": (MOE, [*LAYERS, TURNS])}


@pytest.mark.parametrize("case", GATHERED)
def test_layers_that_are_whole_one_at_a_time_and_weights_away_change_no_bit(trained: Any, case: str) -> None:
    layout, placed = GATHERED[case]
    recipe, words = WORDS[layout]
    words = [*words, "model.params_dtype=bf16"]
    expected = trained(*words, recipe=recipe, four=True)
    for mine, reference in zip(trained(*words, *placed, recipe=recipe, four=True), expected, strict=True):
        assert mine["told"] == reference["told"]
        assert mine["bits"] == reference["bits"]
        assert mine["offloaded_bytes"] > 0
        assert (mine["weights"].get("fetched", 0) > 0) == ("weights" in case)


EXPERTS = [*LAYERS, "model.expert_model_parallel_size=2"]
DIVIDED = {
    "in turns": (QWEN3, [*LAYERS, TURNS]),
    "experts by themselves": (MOE, EXPERTS),
}


@pytest.mark.parametrize("case", DIVIDED)
def test_layers_are_divided_between_passes_of_microbatches(world: World, case: str) -> None:
    """Nothing of a stage is whole, or on its way, when another microbatch goes forward."""
    recipe, words = DIVIDED[case]
    for rank in world.run("pipeline_cases.between_passes", words=[*words, RESHARDED], recipe=recipe):
        assert rank["groups"] > 3
        assert rank["whole"] == 0
    for rank in world.run("pipeline_cases.between_passes", words=words, recipe=recipe):
        assert rank["whole"] > rank["passes"] // 2


AWAY = {
    "of one rank": (QWEN3, LONG),
    "of one rank, in turns": (QWEN3, [*LONG, TURNS]),
    "divided": (QWEN3, [*LAYERS, RESHARDED]),
    "experts by themselves, in turns": (MOE, [*EXPERTS, RESHARDED, TURNS]),
}


@pytest.mark.parametrize("case", AWAY)
def test_weights_of_a_stage_are_here_as_its_passes_come_and_foreseen_from_the_second_step_on(
    pair: World, world: World, case: str
) -> None:
    """Of the three of a rank's four layers that leave: between passes what the next one begins with is here, the first
    layer, or of divided ones the parts of two gathers.
    """
    recipe, words = AWAY[case]
    ranks = pair if "of one rank" in case else world
    for rank in ranks.run("pipeline_cases.between_passes", words=[*words, *away(3)], recipe=recipe):
        first, second = rank["after"]
        assert 3 * rank["here"] == (2 if "divided" in case else 1) * second["offloaded"]
        assert second["on_demand"] == first["on_demand"]
        assert second["held"] == 0
        # A pass fetches each layer of its stage once.
        of_passes = rank["passes"] // 2 * second["offloaded"]
        assert second["fetched"] - first["fetched"] <= (of_passes // 2 if "turns" in case else of_passes)


MATRICES = {
    "sequences, stages take turns": (QWEN3, [*TWO, TURNS, HALF_BATCH, *SEQUENCES]),
    "experts": (
        MOE,
        [*TWO, HALF_BATCH, *SEQUENCES, "model.expert_model_parallel_size=2", "model.moe_aux_loss_coeff=1"],
    ),
}
"""Two stages, whose two ranks share each matrix."""


@pytest.mark.parametrize("layout", MATRICES)
def test_stages_of_ranks_that_share_matrices_train_as_one_process(trained: Any, world: World, layout: str) -> None:
    recipe, words = MATRICES[layout]
    expected = gradients(config_of(words, recipe), recipe)
    found = world.run("train_cases.gradients_of", words=words, recipe=recipe)
    for rank in found:
        assert rank["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        for name, gradient in rank["gradients"].items():
            np.testing.assert_allclose(gradient, expected["gradients"][name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert {*found[0]["gradients"], *found[2]["gradients"]} == {*expected["gradients"]}
    assert found[0]["gradients"].keys() == found[1]["gradients"].keys()

    reference = trained(*words, recipe=recipe, four=True)
    assert reference[0]["told"][1] == pytest.approx(alone(*words, recipe=recipe)["told"][1], rel=1e-4)
    for rank, other in zip(trained(*words, *HALF, recipe=recipe, four=True), reference, strict=True):
        assert rank["told"] == other["told"] == reference[0]["told"]
        assert rank["bits"] == other["bits"]
        assert rank["offloaded_bytes"] > 0
        assert rank["microbatches"] == 2


def test_gradients_leave_while_the_last_backward_makes_others(world: World) -> None:
    words = [*TWO, *HOST]
    for rank in world.run("pipeline_cases.leaving", words=words):
        assert rank == {"last": True, "before": False, "microbatches": True}


def test_a_rank_has_its_layers_alone(world: World) -> None:
    names, parameters, places = zip(*world.run("pipeline_cases.place", words=FOUR, recipe=MOE), strict=True)
    assert [{name.split(".")[2] for name in of if ".layers." in name} for of in names] == [{"0"}, {"1"}, {"2"}, {"3"}]
    others = [[name for name in of if ".layers." not in name] for of in names]
    assert others == [["model.embed_tokens.weight"], [], [], ["model.norm.weight", "lm_head.weight"]]
    model = setup.prepare(MOE, config_of(FOUR, MOE)).model
    assert set(parameters) == {sum(p.numel() for p in model.parameters())}
    assert set(places) == {(0, 1)}


def test_an_error_within_a_stage_keeps_its_type(pair: World) -> None:
    assert pair.run("pipeline_cases.failing") == ["MemoryLimitError: the host is full"] * 2


# -------------------------------------------------------------------- checkpoints


def test_a_saved_pipeline_goes_on_and_every_layout_loads_it(trained: Any, tmp_path: Path) -> None:
    """Bit for bit on two stages, from a save beside training; then by four stages in turns on two pairs of ranks, and
    what these save by one process.
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
    loads = f"checkpoint.load={first}"
    trained(*TWO, TURNS, *HOST, "train.train_iters=3", loads, f"checkpoint.save={second}", four=True)
    for folder in (first, second):
        words = (TWO[0], BATCH, f"checkpoint.load={folder}", "train.train_iters=4")
        run = setup.prepare(QWEN3, small(*words, recipe=QWEN3))
        assert run.iteration == 3
        assert snapshot(run.model, run.optimizer) == joined(straight)


def test_stages_load_what_one_process_saved(trained: Any, tmp_path: Path) -> None:
    before, whole = ["train.train_iters=2", f"checkpoint.save={tmp_path}"], (PAIR[0], HALF_BATCH)
    saved = alone(*whole, *before)
    load = f"checkpoint.load={tmp_path}"
    assert joined(trained(*PAIR, *STREAMED, "train.train_iters=2", load)) == saved["bits"]
    found = trained(*PAIR, *STREAMED, "train.train_iters=3", load)
    assert joined(found) == alone(*whole, "train.train_iters=3", load)["bits"]


@pytest.mark.parametrize(
    ("words", "layers", "later"),
    [(LONGER, 1, HOST), ([*LAYERS, TURNS, RESHARDED], 3, away(3))],
    ids=["one rank, here again", "divided"],
)
def test_stages_whose_weights_leave_are_saved_and_go_on(
    trained: Any, tmp_path: Path, words: list[str], layers: int, later: list[str]
) -> None:
    """Bit for bit, from a save beside training, with weights here and with weights that leave."""
    run = functools.partial(trained, four=RESHARDED in words)
    straight = run(*words, *HOST, "train.train_iters=3")
    save = [f"checkpoint.save={tmp_path}", "checkpoint.async_save=True", "checkpoint.async_save_mode=snapshot"]
    run(*words, *away(layers), *save, "train.train_iters=2")
    resumed = run(*words, *later, f"checkpoint.load={tmp_path}", "train.train_iters=3")
    for before, after in zip(straight, resumed, strict=True):
        assert after["bits"] == before["bits"]
        assert after["told"][0] == before["told"][0][2:]


# -------------------------------------------------------------------- the command


def test_a_pipeline_is_trained_and_the_first_rank_reports(tmp_path: Path) -> None:
    words = ["--recipe", MOE, *SMALL, *SIZES[MOE], "model.pipeline_model_parallel_size=2"]
    ended = commands("train", *words, *HALF, "logger.log_interval=1", "--json", "report.json", folder=tmp_path)
    assert [rank.code for rank in ended] == [0, 0], [rank.err for rank in ended]
    assert [rank.out.count("loss, first and last") for rank in ended] == [1, 0]
    content = json.loads((tmp_path / "report.json").read_text())
    expected = setup.prepare(MOE, small())
    loop.train(expected)
    assert content["losses"] == expected.losses
    assert content["grad_norms"] == expected.grad_norms
    assert content["model_parameters"] == expected.model_parameters
    assert [row["rank"] for row in content["ranks"]["ranks"]] == [0, 1]
