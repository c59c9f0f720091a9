"""Who is who among the ranks of a run, and what they make of each other's numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from workload_cases import chosen, llama

from hostward import recipes
from hostward.config.overrides import apply_overrides
from hostward.config.schema import Config, options
from hostward.distributed.rank_failures import Failure, raised_by_all
from hostward.errors import CheckpointError, ConfigError, DataError, MemoryLimitError
from hostward.kernels.cpu.affinity import CpuFacts
from hostward.plan.budgets import Budgets
from hostward.plan.cost_model import Costs, speeds_of
from hostward.plan.hardware_profile import profile
from hostward.plan.memory_model import required
from hostward.plan.plan_file import PlanFile, plan_of
from hostward.plan.search import Candidate
from hostward.report.schema import NodeRow, RankRow
from hostward.trainer import memory_check
from hostward.trainer.models import named_shapes
from hostward.trainer.process_group import Ranks
from hostward.trainer.report import division, nodes, stragglers
from hostward.trainer.setup import OWN, differing, what_runs

ROW = RankRow(0, "a", "cpu", 100, 60, None, data_s=0.001, host_step_s=0.1, transfer_s=0.05)


def test_without_a_launcher_there_is_one_rank() -> None:
    assert Ranks.of({}) == Ranks(0, 1, 0, 1)
    variables = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert Ranks.of(variables) == Ranks(5, 8, 1, 4)


def test_neighbours_share_samples() -> None:
    found = [(r.data_rank, r.data_size) for r in (Ranks(i, 4, sharing=2) for i in range(4))]
    assert found == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_stages_have_neighbouring_ranks_and_each_the_whole_batch() -> None:
    config = apply_overrides(recipes.load("qwen3_moe_tiny_pretrain_config"), ["model.pipeline_model_parallel_size=2"])
    found = [Ranks(i, 4).placed(config) for i in range(4)]
    assert [(r.stage, r.data_rank, r.data_size) for r in found] == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
    assert all(r.divided for r in found)
    assert not Ranks(0, 2).placed(config).divided
    assert Ranks(0, 1).of_model(7) == 7


DIVIDED = "weights, gradients and state sharded over"
STRATEGY = "ddp.data_parallel_sharding_strategy=optim_grads"
WHOLE = f"a layer unsharded from its forward to its backward ({STRATEGY})"
MATRICES_TOO = "matrices first among 2 neighbours"
STAGES, SEVERAL, MATRICES = (
    f"model.{what}_model_parallel_size=2" for what in ("pipeline", "virtual_pipeline", "tensor")
)


@pytest.mark.parametrize(
    ("words", "ranks", "told"),
    [
        ([], 1, None),
        ([], 2, f"{DIVIDED} 2 ranks; {WHOLE}"),
        (
            [f"{STRATEGY}_params", "model.expert_model_parallel_size=2"],
            4,
            f"{DIVIDED} 4 ranks; experts first among 2; a layer unsharded only while it runs ({STRATEGY}_params)",
        ),
        (
            ["ddp.use_distributed_optimizer=False"],
            2,
            "all weights, gradients and state on each of 2 ranks (ddp.use_distributed_optimizer=false)",
        ),
        ([STAGES], 2, "layers in 2 stages"),
        (
            [STAGES, SEVERAL, MATRICES],
            8,
            f"layers in 2 stages of 2 parts each; {DIVIDED} 4 ranks of each; {MATRICES_TOO}; {WHOLE}",
        ),
    ],
)
def test_a_report_says_what_of_the_model_each_rank_has(words: list[str], ranks: int, told: str | None) -> None:
    config = apply_overrides(recipes.load("qwen3_moe_tiny_pretrain_config"), words)
    assert division(config, Ranks(0, ranks).placed(config)) == told


@pytest.mark.parametrize(("stages", "rounds"), [(1, None), (2, None), (2, 2), (4, 1)])
def test_each_rank_is_weighed_for_its_stages(stages: int, rounds: int | None) -> None:
    config = recipes.load("qwen3_moe_tiny_pretrain_config")
    config.model.virtual_pipeline_model_parallel_size = rounds
    sizes = {name: math.prod(shape) for name, shape in named_shapes(config, 300).items()}
    layer = sum(size for name, size in sizes.items() if ".layers.0." in name)
    expected = [4 // stages * layer] * stages
    expected[0] += sizes["model.embed_tokens.weight"]
    expected[-1] += sizes["model.norm.weight"] + sizes["lm_head.weight"]
    ranks = [replace(Ranks(i, stages), stages=stages) for i in range(stages)]
    found = [memory_check.require_memory(config, torch.device("cpu"), 300, rank).parameters for rank in ranks]
    assert found == expected
    assert sum(found) == sum(sizes.values())


@pytest.mark.parametrize("wrong", [{"RANK": "1"}, {"WORLD_SIZE": "0"}, {"RANK": "-1"}, {"LOCAL_RANK": "one"}])
def test_what_is_no_rank_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Ranks.of(wrong)


@pytest.mark.parametrize(
    ("local_size", "cpus", "quota", "threads"),
    [(1, 16, None, None), (4, 16, None, 4), (4, 16, 6.5, 1), (8, 4, None, 1)],
)
def test_threads_are_shared_by_the_ranks_of_a_node(
    local_size: int, cpus: int, quota: float | None, threads: int | None
) -> None:
    assert Ranks(local_size=local_size).torch_threads(CpuFacts(cpus, quota)) == threads


def test_one_process_agrees_with_itself() -> None:
    assert Ranks().agreed(lambda: 3) == 3
    with pytest.raises(DataError) as caught:
        Ranks().agreed(_fails)
    assert not caught.value.everywhere


def _fails() -> int:
    raise DataError("no data")


FULL = Failure.of(MemoryLimitError("full", why="why", fix="fix"))


def test_the_first_error_is_told_and_the_others_counted() -> None:
    error = raised_by_all([("rank 0", None), ("rank 1", FULL), ("rank 3", Failure.of(DataError("no data")))])
    assert isinstance(error, MemoryLimitError)
    assert error.what == "rank 1 and 1 more: full"
    assert (error.why, error.fix, error.everywhere) == ("why", "fix", True)


def test_what_ranks_of_a_mesh_have_agreed_on_names_its_rank_once() -> None:
    of_mesh = Failure.of(raised_by_all([("rank 2", None), ("rank 3", FULL)]))
    error = raised_by_all([("rank 0", None), ("rank 1", None), ("rank 2", of_mesh), ("rank 3", of_mesh)])
    assert error.what == "rank 3: full"


def test_an_error_of_one_rank_says_what_all_cannot_do() -> None:
    error = raised_by_all([("rank 1", FULL)], what="cannot save", kind=CheckpointError)
    assert isinstance(error, MemoryLimitError)
    assert (error.what, error.why, error.fix) == ("cannot save", "rank 1: full; why", "fix")
    for other in (DataError("no data"), RuntimeError("no data")):
        error = raised_by_all([("rank 1", Failure.of(other))], what="cannot save", fix="again", kind=CheckpointError)
        assert type(error) is CheckpointError
        assert error.why.endswith("no data")
        assert (error.fix, error.everywhere) == ("again", True)
    same = Failure.of(CheckpointError("cannot save", why="a full disk"))
    assert raised_by_all([("rank 2", same)], what="cannot save").why == "rank 2: a full disk"


def test_t67_what_ranks_do_otherwise_is_named() -> None:
    mine = {"--recipe": "a", "train.train_iters": "4", "torch": "2.13"}
    told = [("rank 0", mine), ("rank 1", {**mine, "torch": "2.11"}), ("rank 2", {**mine, "torch": "2.12", "new": "1"})]
    error = differing(told)
    assert error.why == "torch is 2.13 on rank 0, 2.11 on rank 1 (and 1 more); new is None on rank 0, 1 on rank 2"
    assert error.everywhere


def test_options_of_one_process_alone_are_no_difference() -> None:
    config, other = Config(), Config()
    other.train.num_threads, other.dataset.path, other.logger.log_interval = 3, "/elsewhere", 1
    assert what_runs("a", config, "cpu", None) == what_runs("a", other, "cpu", None)
    other.optimizer.lr = 1.0
    assert what_runs("a", config, "cpu", None) != what_runs("a", other, "cpu", None)
    assert what_runs("a", config, "cpu", None) != what_runs("a", config, "cpu", Path("run/iter_0000002"))
    assert set(options()) >= OWN


def test_another_plan_is_a_difference() -> None:
    workload = llama(layers=2, hidden=64, ffn=128, heads=2, kv_heads=2, vocab=100, sequence=16)
    choice = chosen(workload)
    found = Candidate(choice, required(workload, choice), Costs(workload, speeds_of(profile("h200"))))
    plan = plan_of(workload, profile("h200"), 1, Budgets(), found)
    alike = what_runs("a", Config(), "cpu", None, plan)
    assert alike == what_runs("a", Config(), "cpu", None, PlanFile.from_json(plan.to_json()))
    for other in (None, replace(plan, staging_bytes=1)):
        assert {k for k, v in what_runs("a", Config(), "cpu", None, other).items() if alike[k] != v} == {"--plan"}


def test_sums_by_node() -> None:
    rows = [ROW, replace(ROW, rank=1, node="b", host_bytes=7), replace(ROW, rank=2, pinned_bytes=1)]
    assert nodes(rows) == (NodeRow("a", 2, 200, 61), NodeRow("b", 1, 7, 60))


def test_who_takes_much_longer_than_the_median_is_named() -> None:
    rows = [replace(ROW, rank=i) for i in range(4)]
    assert stragglers(rows, iteration_s=1.0) == ()
    slow = [*rows[:3], replace(ROW, rank=3, node="b", host_step_s=0.2)]
    (told,) = stragglers(slow, iteration_s=1.0)
    assert told == "rank 3 on b: its CPU optimizer step takes 0.2 s per iteration, 0.1 s on the median rank"
    assert stragglers([*rows[:3], replace(ROW, host_step_s=0.12)], iteration_s=1.0) == ()  # not much longer
    assert stragglers(slow, iteration_s=10.0) == ()  # not long enough to matter
    assert stragglers([replace(ROW, host_step_s=None, transfer_s=None)], iteration_s=1.0) == ()
