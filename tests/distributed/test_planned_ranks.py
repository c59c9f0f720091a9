"""Training by a plan on several ranks: the bits of training without one, and the bytes that the plan tells.

Seen red: buckets cut by each rank for itself, a root's buckets placed by their numbers instead of their layers,
gradients that are reduced in float32 counted in the dtype of the weights.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned_cases import LAYERS, choice_of, net_inventory, net_plan, plan, workload
from train_cases import BATCH, LLAMA, MOE, QWEN3, SIZES, SMALL
from world import World, commands

from hostward.core.inventory import SPLIT_ELEMENTS
from hostward.core.placement import Placement, stepped_early
from hostward.plan.decisions import LEAVES, Choice, Keep
from hostward.plan.memory_model import LOAD
from hostward.plan.plan_file import PlanFile
from hostward.plan.rank_partition import required_of

SIZE = 4
"""Ranks of `world`."""
ONE = "train.global_batch_size=2"
"""A microbatch on each of two ranks."""
BF16, IN_FP32 = "model.params_dtype=bf16", "ddp.grad_reduce_in_fp32=True"
STAY = (Keep.KEEP, Keep.KEEP)

LONG = ("model.seq_length=512", "model.ffn_hidden_size=1024")
"""What the MLP saves is large enough to leave."""
EVEN = {
    "embedding in parts": (QWEN3, (BF16, "model.vocab_size=8192"), STAY, {}),
    "the root owns the embedding": (LLAMA, ("model.vocab_size=8192", *LONG), (Keep.OFFLOAD, Keep.KEEP), {}),
    "recomputed": (QWEN3, (BF16,), (Keep.RECOMPUTE, Keep.RECOMPUTE), {}),
    "recomputed in part and as a whole": (
        QWEN3,
        (BF16, "model.num_layers=5", *LONG),
        (Keep.ELEMENTWISE_OFFLOAD, Keep.OFFLOAD, Keep.RECOMPUTE, Keep.RECOMPUTE, Keep.KEEP),
        {},
    ),
    "the same of layers that are whole one at a time": (
        LLAMA,
        (BF16, "model.num_layers=4", "ddp.data_parallel_sharding_strategy=optim_grads_params", *LONG),
        (Keep.ELEMENTWISE_OFFLOAD, Keep.ELEMENTWISE, Keep.RECOMPUTE, Keep.KEEP),
        {"gradients_on_host": True},
    ),
    "norms again, sums on the host": (QWEN3, (BF16,), (Keep.ELEMENTWISE,) * 2, {"gradients_on_host": True}),
    "reduced in float32": (QWEN3, (BF16, IN_FP32, ONE), STAY, {}),
    "reduced in float32, sums on the host": (QWEN3, (BF16, IN_FP32), STAY, {"gradients_on_host": True}),
    "one microbatch, fp32": (MOE, (ONE,), STAY, {"staging_bytes": 1}),
}
UNEVEN = {
    "odd sizes": (QWEN3, (BF16, "model.vocab_size=4099", "model.ffn_hidden_size=97"), STAY, {}),
    "a rank without experts": (MOE, (BF16, "model.num_moe_experts=3", "model.moe_router_topk=2"), STAY, {}),
}


@pytest.fixture(scope="module")
def net_alone(world: World) -> list[Any]:
    """Training of the network of `planned_cases` without a plan."""
    return world.run("planned_cases.net_by_plan", plan=None)


@pytest.fixture(scope="module")
def trained(pair: World, world: World) -> Any:
    """Runs by their words and the text of their plan, with two microbatches on each of two ranks unless these say
    otherwise, or on so many.
    """

    @functools.cache
    def run(recipe: str, words: tuple[str, ...], text: str | None = None, ranks: int = 2) -> list[Any]:
        on = world if ranks == SIZE else pair
        return on.run("train_cases.train", words=[BATCH, *words], recipe=recipe, plan=text)

    return run


@pytest.mark.parametrize("case", [*EVEN, *UNEVEN])
def test_a_run_by_a_plan_has_the_bits_of_one_without_and_the_bytes_of_the_plan(trained: Any, case: str) -> None:
    recipe, words, keeps, options = (EVEN | UNEVEN)[case]
    size = SIZE if case == "a rank without experts" else 2
    of = workload((BATCH, *words), recipe, size)
    made = plan(of, choice_of(of, keeps, **options))
    needs = required_of(of)(of, made.choice(of)).phase(LOAD)
    planned = dict.fromkeys(Placement, 0)
    for row in made.buckets:
        planned[row.placement] += row.numel
    counts = {
        where: 8
        * sum(
            len(b.ranges) for b, row in zip(of.inventory.buckets, made.buckets, strict=True) if row.placement is where
        )
        for where in Placement
    }
    ranks, without = trained(recipe, words, made.to_json(), ranks=size), trained(recipe, words, ranks=size)
    for rank, (found, expected) in enumerate(zip(ranks, without, strict=True)):
        assert found["told"] == expected["told"]
        assert found["bits"] == expected["bits"]
        assert (found["left_bytes"] > 0) == any(keep in LEAVES for keep in keeps)
        state = found["state"]
        assert state["asked"] == made.asked_fraction
        if rank == 0 or case in EVEN:
            assert state["elements"] == planned
            assert state["host_bytes"] == needs.host["optimizer state"] - counts[Placement.HOST]
            assert state["device_bytes"] == needs.device["optimizer state"] - counts[Placement.DEVICE]
            assert state["landing_bytes"] + ranks[0]["state"]["partial_bytes"] == needs.host["gradients"]
            assert state["placed"] == ranks[0]["state"]["placed"]
        else:
            assert set(state["placed"]) <= set(ranks[0]["state"]["placed"])
            for where, elements in state["elements"].items():
                assert elements <= planned[where] + SPLIT_ELEMENTS * len(of.inventory.buckets)


@pytest.mark.parametrize(("case", "share"), [("recomputed", 0.3), ("recomputed", 0.6), ("odd sizes", 0.7)])
def test_what_a_plan_steps_during_backward_is_what_it_has_counted(trained: Any, case: str, share: float) -> None:
    """The root's layer norm is used first, and comes late in the plan. Seen red: chosen anew, in order of use."""
    recipe, words, keeps, options = (EVEN | UNEVEN)[case]
    of = replace(workload((BATCH, *words), recipe, 2), step_early=share)
    buckets = of.inventory.buckets
    everywhere = (Placement.HOST,) * len(buckets)
    made = plan(of, replace(choice_of(of, keeps, **options), placements=everywhere))
    needs = required_of(of)(of, made.choice(of)).phase(LOAD)
    twins = stepped_early(buckets, everywhere, share)
    assert 0 < len(twins) < len(buckets)
    records = sum(8 * len(b.ranges) for b in buckets) + sum(56 + 8 * len(buckets[b].ranges) for b in twins)
    ranks, without = trained(recipe, words, made.to_json()), trained(recipe, words)
    assert ranks[0]["state"]["host_bytes"] == needs.host["optimizer state"] - records
    for found, expected in zip(ranks, without, strict=True):
        assert found["told"] == expected["told"]
        assert found["bits"] == expected["bits"]


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_weights_leave_by_a_plan(trained: Any, strategy: str) -> None:
    plainly = (BF16, "model.num_layers=4")
    words = (*plainly, f"ddp.data_parallel_sharding_strategy={strategy}")
    of = workload((BATCH, *words), QWEN3, 2)
    names = [layer.name for layer in of.repeated]
    placements = tuple(Placement.HOST if b.layer in names else Placement.STREAMED for b in of.inventory.buckets)
    made = plan(of, Choice(placements, (Keep.KEEP,) * 4, frozenset(names[:3])))
    assert [row.weights for row in made.layers] == ["host"] * 3 + ["device"]
    for found, expected in zip(trained(QWEN3, words, made.to_json()), trained(QWEN3, plainly), strict=True):
        assert found["told"] == expected["told"]
        assert found["bits"] == expected["bits"]
        assert found["weights"]["offloaded"] > found["weights"]["here"]
        assert found["weights"]["on_demand"] == found["weights"]["held"] == 0


def test_what_the_root_owns_is_placed_by_its_name(trained: Any) -> None:
    """It is used first, and stands in the plan where the model has it."""
    recipe, words, keeps, _ = EVEN["the root owns the embedding"]
    of = workload((BATCH, *words), recipe, 2)
    made = plan(of, choice_of(of, keeps))
    rows = sorted((row.layer, row.placement.value) for row in made.buckets)
    assert made.buckets[-1].layer == "model.norm"
    for found in trained(recipe, words, made.to_json(), ranks=2):
        assert found["state"]["layers"] == ["model.embed_tokens", "model.norm", *LAYERS]
        assert found["state"]["placed"] == rows


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_a_loop_of_ones_own_by_a_plan_whose_root_owns_embedding_and_head(
    world: World, net_alone: list[Any], turn: int
) -> None:
    """Uneven parts, one of them empty on the last rank, and a scale that only the first has."""
    made = net_plan(SIZE, turn)
    ranks = world.run("planned_cases.net_by_plan", plan=made.to_json())
    rows = sorted((row.layer, row.placement.value) for row in made.buckets)
    assert ranks[0]["state"]["placed"] == rows
    assert ranks[0]["state"]["layers"][:3] == ["", "embed", "head"]
    for found, reference in zip(ranks, net_alone, strict=True):
        assert found["norms"] == reference["norms"] == ranks[0]["norms"]
        assert found["bits"] == reference["bits"]
        assert found["attached_bytes"] > 0
        assert set(found["state"]["placed"]) <= set(rows)
        assert len(set(found["state"]["placed"])) > 3
        assert reference["state"]["elements"][Placement.DEVICE] == sum(found["state"]["elements"].values())


@pytest.mark.parametrize("what", ["AdamW", "attach"])
@pytest.mark.parametrize(
    ("mesh", "ranks", "told"),
    [
        ("all", 2, "the plan shards the model among 2 GPUs, and here it is 4"),
        ("all", 1, "the plan shards the model among 1 GPUs, and here it is 4"),
        ("whole", 4, "the plan shards the model among 4 GPUs, and here it is 1"),
        ("hybrid", 2, "the plan shards the model among 2 GPUs, and here it is 4"),
        ("hybrid", 4, "the plan divides parameters by rows among 4 GPUs, and parameter 'scale' is divided otherwise"),
    ],
)
def test_a_plan_for_other_ranks_is_refused(world: World, mesh: str, ranks: int, told: str, what: str) -> None:
    for found in world.run("planned_cases.net_refused", mesh=mesh, plan=net_plan(ranks).to_json(), what=what):
        assert found.startswith(f"ConfigError: {told}")


def test_a_plan_for_layers_that_are_whole_one_at_a_time_is_refused_where_they_stay_whole(world: World) -> None:
    made = net_plan(SIZE)
    text = replace(made, workload=replace(made.workload, resharded=True)).to_json()
    told = "ConfigError: the plan is for layers that are unsharded only while they run"
    for found in world.run("planned_cases.net_refused", mesh="all", plan=text, what="attach", resharded=False):
        assert found.startswith(told)
    for found in world.run("planned_cases.net_refused", mesh="all", plan=text, what="attach"):
        assert found == "no error"


def test_a_division_by_columns_is_refused(world: World) -> None:
    for found in world.run("planned_cases.columns_refused", plan=net_plan(SIZE).to_json()):
        assert "and parameter '0.weight' is divided otherwise\n  why: it is (Shard(dim=1),)" in found


def changed(text: str, **rows: Any) -> str:
    """A plan whose first bucket or layer was edited."""
    content = json.loads(text)
    for part, values in rows.items():
        content[part][0] |= values
    return json.dumps(content)


OTHER_DIVISIONS = {
    "model.tensor_model_parallel_size=2": "--plan with model.tensor_model_parallel_size=2",
    "model.pipeline_model_parallel_size=2": "--plan with model.pipeline_model_parallel_size=2",
    "ddp.use_distributed_optimizer=False": "--plan for 4 GPUs with ddp.use_distributed_optimizer=false",
}


@pytest.mark.parametrize("word", OTHER_DIVISIONS)
def test_other_divisions_are_refused_by_name(world: World, word: str) -> None:
    made = plan(of := workload((), QWEN3, SIZE), replace(choice_of(of, STAY), placements=device(of)))
    words = [word, "model.params_dtype=bf16"]
    for found in world.run("planned_cases.refused", words=words, recipe=QWEN3, plan=made.to_json()):
        assert "NotBuiltError: " in found
        assert OTHER_DIVISIONS[word] in found


def device(of: Any) -> tuple[Placement, ...]:
    return (Placement.DEVICE,) * len(of.inventory.buckets)


def test_plans_that_cannot_be_carried_out_are_refused_on_every_rank(world: World) -> None:
    of, pair = workload((), QWEN3, SIZE), workload((), QWEN3, 2)
    resharded = replace(of, resharded=True)
    made = plan(of, replace(choice_of(of, STAY), placements=device(of))).to_json()
    cases = {
        plan(pair, choice_of(pair, STAY)).to_json(): "the plan shards the model among 2 GPUs, and here it is 4",
        changed(made, buckets={"bucket": "0000.other"}): "the plan is of another model",
        plan(
            resharded, choice_of(resharded, STAY)
        ).to_json(): "the plan is for layers that are unsharded only while they",
    }
    for text, told in cases.items():
        for found in world.run("planned_cases.refused", words=[], recipe=QWEN3, plan=text):
            assert told in found
    for found in world.run("planned_cases.refused", words=["model.num_layers=3"], recipe=QWEN3, plan=made):
        assert "the plan is of another model" in found


def test_two_processes_train_by_a_plan_of_the_command(tmp_path: Path) -> None:
    pytest.importorskip("scipy", reason="planning needs SciPy")
    from hostward.cli import main

    words = [*SMALL, *SIZES[MOE], BF16]
    recipe = ["--recipe", MOE]
    assert (
        main(["plan", *recipe, *words, "--gpus", "2", "--place", "*=host", "--json", str(tmp_path / "plan.json")]) == 0
    )
    made = PlanFile.from_json((tmp_path / "plan.json").read_text())
    assert made.workload.ranks == 2
    losses = []
    for given in ([], ["--plan", "plan.json"]):
        command = ["train", *recipe, *words, *given, "--json", "report.json"]
        ended = commands(*command, folder=tmp_path)
        assert [rank.code for rank in ended] == [0, 0], [rank.err for rank in ended]
        report = json.loads((tmp_path / "report.json").read_text())
        losses.append((report["losses"], report["grad_norms"]))
    assert losses[0] == losses[1]
    assert report["placed_fraction"] == 1.0


def test_the_parts_of_a_network_are_those_of_its_first_rank() -> None:
    """Seven elements of a head of ten rows and 33 columns less, were elements divided instead of rows."""
    numels = {p.name: p.numel for p in net_inventory(SIZE).parameters}
    assert numels["head.weight"] == 3 * 33
    assert numels["scale"] == 1
