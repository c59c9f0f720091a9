"""`hostward train` where weights are to leave: the device never holds all of them, and the run keeps its bits.

Seen red: a model that is built on the device; weights drawn on another generator; a checkpoint's weights that are not
loaded before the optimizer is made, or its state that is not; a GPU that is asked for room for all weights;
`verify` that promises too little; a folder of weights taken for one of a tokenizer.
"""

from __future__ import annotations

import bisect
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import SMALL, different, offloaded, saved
from run_fixtures import Cli

from hostward import recipes
from hostward.config.overrides import apply_overrides
from hostward.config.schema import Config
from hostward.core.host_limits import Rates
from hostward.core.placement import Placement, place_fraction
from hostward.core.units import GIB
from hostward.errors import MemoryLimitError
from hostward.model.fence import unfenced
from hostward.optim.adamw import AdamW
from hostward.plan import plan_file
from hostward.plan.budgets import Budgets
from hostward.plan.cost_model import Costs, measured, speeds_of
from hostward.plan.decisions import Choice, Keep
from hostward.plan.hardware_profile import profile
from hostward.plan.memory_model import LOAD, required
from hostward.plan.search import Candidate, best_share
from hostward.plan.step_time import predict
from hostward.report.schema import Estimate
from hostward.trainer import setup
from hostward.trainer.deferred_init import weights_to_offload
from hostward.trainer.memory_check import MemoryEstimate, asked_choice, fix_for_plan, require_fit, require_memory
from hostward.trainer.models import build_model, on_meta, transformers_config
from hostward.trainer.parallel import Held
from hostward.trainer.process_group import Ranks
from hostward.trainer.workload import recipe_workload
from hostward.weights.deferred_init import is_away

TINY = "qwen3_moe_tiny_pretrain_config"
COMMON = ["model.num_layers=3", "model.params_dtype=bf16", "model.experts_implementation=eager"]
LEAVING = [
    "model.cpu_offloading=True",
    "model.cpu_offloading_num_layers=2",
    "model.cpu_offloading_weights=True",
    "model.cpu_offloading_activations=False",
    *offloaded(1),
]


def configured(*words: str) -> Config:
    return apply_overrides(recipes.load(TINY), [*SMALL, *COMMON, *words])


@pytest.fixture
def before_optimizer(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """By run, the bytes of each weight on the device when the optimizer is about to be made."""
    found: list[dict[str, int]] = []
    real = setup.make_optimizer

    @unfenced
    def looked(held: Held, *rest: Any) -> Any:
        model = held.model
        found.append({name: p.untyped_storage().nbytes() for name, p in model.named_parameters()})
        assert all(is_away(p) for p in model.parameters() if not p.untyped_storage().nbytes())
        return real(held, *rest)

    monkeypatch.setattr(setup, "make_optimizer", looked)
    return found


def require_two_layers_away(held: dict[str, int]) -> None:
    away = {name for name, nbytes in held.items() if not nbytes}
    assert away == {name for name in held if ".layers.0." in name or ".layers.1." in name}
    assert away


def written_plan(path: Path, config: Config) -> Path:
    """All stepped on the host, weights of the first two layers there as well."""
    work = recipe_workload(config)
    names = frozenset(layer.name for layer in work.repeated[:2])
    choice = Choice((Placement.HOST,) * len(work.inventory.buckets), (Keep.KEEP,) * 3, names)
    needs = required(work, choice)
    candidate = Candidate(choice, needs, Costs(work, speeds_of(profile("h200"))))
    plan_file.save(plan_file.plan_of(work, profile("h200"), 1, Budgets(), candidate), path)
    return path


@pytest.mark.parametrize("told_by", ["options", "a plan"])
def test_drawn_weights_have_the_bits_of_a_run_on_the_device(
    train: Cli, tmp_path: Path, before_optimizer: list[dict[str, int]], told_by: str
) -> None:
    common = [*COMMON, "train.train_iters=2"]
    plain = train(*common, f"checkpoint.save={tmp_path / 'plain'}").report
    words: list[object] = list(LEAVING)
    if told_by == "a plan":
        words = ["--plan", written_plan(tmp_path / "plan.json", configured())]
    away = train(*common, *words, f"checkpoint.save={tmp_path / 'away'}").report
    assert (away["losses"], away["grad_norms"]) == (plain["losses"], plain["grad_norms"])
    assert different(saved(tmp_path / "away")[0], saved(tmp_path / "plain")[0]) == []
    assert min(before_optimizer[0].values()) > 0
    require_two_layers_away(before_optimizer[1])
    weights = away["activations"]["weights"]
    assert away["activations"]["words"] == ""  # all that layers save stays
    assert weights["words"].startswith(f"weights: {weights['offloaded_bytes']:,} bytes on the host")
    part = away["offload"]["parts"]["weights of layers"]
    # At least once for forward and once for backward; without what the host step made of the other weights.
    assert 2 * weights["offloaded_bytes"] <= part["transfer_bytes"]["h2d"] < away["offload"]["transfer_bytes"]["h2d"]
    assert part["exposed_s"] is None
    assert list(away["offload"]["parts"]) == ["weights of layers"]


def test_a_plan_that_is_refused_says_how_to_make_one_for_what_is_free() -> None:
    """Seen red: all that was free named, of which the process itself and libraries need some."""
    free = Budgets(device_bytes=72 * GIB + 5, host_bytes=50 * GIB)
    asked = "hostward plan with the same options and"
    one, four = fix_for_plan(free, Ranks()), fix_for_plan(free, Ranks(size=8, local_size=4))
    device_mib, several_mib, host_mib = 70 * 1024, int(70 * 1024 / 1.055), 45 * 1024
    assert (
        one == f"{asked} --device-memory {device_mib}MiB --host-memory {host_mib}MiB --json FILE; --force starts anyway"
    )
    words = f"--gpus 8 --device-memory {several_mib}MiB --host-memory {4 * host_mib}MiB --json FILE"
    assert four == f"{asked} {words}; --force starts anyway"


def test_weights_of_a_folder_have_the_same_bits(
    train: Cli, tmp_path: Path, before_optimizer: list[dict[str, int]]
) -> None:
    model = build_model(configured(), vocab_size=320, device="cpu", dtype=torch.bfloat16, seed=9)
    model.save_pretrained(tmp_path / "folder")  # type: ignore[operator]
    sizes = ("num_layers", "hidden_size", "ffn_hidden_size", "num_moe_experts", "moe_ffn_hidden_size",
             "moe_router_topk", "num_attention_heads", "num_query_groups", "kv_channels", "rotary_base",
             "layernorm_epsilon", "vocab_size", "moe_aux_loss_coeff")  # fmt: skip
    usual = Config()
    unset = [f"model.{name}={_typed(getattr(usual.model, name))}" for name in sizes]
    words = [*COMMON, *unset, f"model.hf_model_path={tmp_path / 'folder'}", "train.train_iters=2"]
    losses = [train(*words, *more).report["losses"] for more in ([], LEAVING)]
    assert losses[0] == losses[1]
    require_two_layers_away(before_optimizer[1])


def _typed(value: object) -> str:
    return "null" if value is None else str(value)


@pytest.mark.parametrize("how", ["resumed", "finetuned", "without the state"])
def test_a_run_goes_on_from_a_checkpoint(
    train: Cli, tmp_path: Path, before_optimizer: list[dict[str, int]], how: str
) -> None:
    half = tmp_path / "half"
    train(*COMMON, "train.train_iters=2", f"checkpoint.save={half}")
    more = {
        "resumed": [],
        "finetuned": ["checkpoint.finetune=True"],
        "without the state": ["checkpoint.load_optim=False"],
    }
    common = [*COMMON, "train.train_iters=4", f"checkpoint.load={half}", *more[how]]
    plain = train(*common, f"checkpoint.save={tmp_path / 'plain'}").report
    away = train(*common, *LEAVING, f"checkpoint.save={tmp_path / 'away'}").report
    for key in ("losses", "grad_norms", "first_iteration", "last_iteration"):
        assert away[key] == plain[key]
    assert different(saved(tmp_path / "away")[0], saved(tmp_path / "plain")[0]) == []
    require_two_layers_away(before_optimizer[-1])


def test_the_load_phase_counts_what_is_there(before_optimizer: list[dict[str, int]]) -> None:
    run = setup.prepare(TINY, configured(*LEAVING))
    work = recipe_workload(run.config)
    names = frozenset(layer.name for layer in work.repeated[:2])
    choice = Choice((Placement.HOST,) * len(work.inventory.buckets), (Keep.KEEP,) * 3, names)
    told = required(work, choice).phase(LOAD)
    leaving = [layer.weight_bytes for layer in work.repeated[:2]]
    (held,) = before_optimizer
    assert told.device["weights"] == sum(held.values()) + max(leaving)
    settled = required(work, replace(choice, offloaded_weights=frozenset())).phase(LOAD)
    assert told.host["weights"] == settled.host["weights"] + sum(leaving)
    assert told.pinned["weights"] == settled.pinned["weights"]
    assert settled.device["weights"] == work.weight_bytes


def free_bytes(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """A GPU of which so much is free, as far as it is asked for that."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, 2 * free))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")


def test_a_gpu_with_less_room_than_weights_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    wide = ["model.num_layers=12", "model.cpu_offloading_num_layers=11", "model.recompute_granularity=full",
            "model.recompute_method=uniform", "model.recompute_num_layers=1", "optimizer.gradients=host"]  # fmt: skip
    plain = configured(*wide[:1], *wide[2:], *offloaded(1))
    config = configured(*LEAVING, *wide)
    waiting = weights_to_offload(config, None, 257, torch.bfloat16, Ranks())
    assert waiting is not None
    assert weights_to_offload(plain, None, 257, torch.bfloat16, Ranks()) is None
    work = recipe_workload(config, vocab_size=257)
    assert waiting.weight_bytes == sum(layer.weight_bytes for layer in work.repeated[:11])
    choices = [
        Choice((Placement.HOST,) * len(work.inventory.buckets), (Keep.RECOMPUTE,) * 12, names, True)
        for names in (frozenset(layer.name for layer in work.repeated[:11]), frozenset[str]())
    ]
    away, there = (required(work, choice).device_peak_bytes for choice in choices)
    assert away < there
    free_bytes(monkeypatch, away)
    require_memory(config, device, 257, Ranks(), waiting.weight_bytes)
    assert require_fit(TINY, config, device, 257, None, Ranks()).predicted is not None
    with pytest.raises(MemoryLimitError, match="more device memory"):
        require_fit(TINY, plain, device, 257, None, Ranks())
    free_bytes(monkeypatch, work.weight_bytes - 1)
    require_memory(config, device, 257, Ranks(), waiting.weight_bytes)
    with pytest.raises(MemoryLimitError, match="bytes of device memory"):
        require_memory(plain, device, 257, Ranks())


def test_a_stage_is_weighed_without_what_leaves_of_its_own_layers(tmp_path: Path) -> None:
    """The fourth layer has no experts. Seen red: the first layers of the model on every stage."""
    described = transformers_config(configured("model.num_layers=8").model, vocab_size=257)
    described.mlp_only_layers = [3]
    described.save_pretrained(tmp_path)
    sizes = dict.fromkeys(range(8), 0)
    for name, p in on_meta(described, torch.bfloat16).named_parameters():
        if ".layers." in name:
            sizes[int(name.split(".")[2])] += 2 * p.numel()
    assert sizes[3] != sizes[2]
    stages = [f"model.hf_model_path={tmp_path}", "model.pipeline_model_parallel_size=2"]
    turns = "model.virtual_pipeline_model_parallel_size=2"
    for words, held in ((stages, [[0, 1, 2], [4, 5, 6]]), ([*stages, turns], [[0, 1, 4], [2, 3, 6]])):
        config = configured(*LEAVING, *words, "model.cpu_offloading_num_layers=3")
        for rank, layers in enumerate(held):
            expected = sum(sizes[layer] for layer in layers)
            for of_stage in (1, 2):
                ranks = replace(Ranks(of_stage * rank, 2 * of_stage), stages=2, divided=of_stage > 1)
                waiting = weights_to_offload(config, None, 257, torch.bfloat16, ranks)
                assert waiting is not None
                assert waiting.weight_bytes == -(-expected // of_stage)


def test_a_stage_whose_weights_leave_needs_room_for_them_until_they_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are added up on the host here, so a step needs less than that. Seen red: weighed for a step alone."""
    words = ["model.num_layers=8", "model.pipeline_model_parallel_size=2", "model.cpu_offloading_num_layers=3"]
    config, device = configured(*LEAVING, *words, "optimizer.gradients=host"), torch.device("cuda")
    rank = replace(Ranks(0, 2), stages=2)
    waiting = weights_to_offload(config, None, 257, torch.bfloat16, rank)
    assert waiting is not None
    weights = require_memory(config, torch.device("cpu"), 257, rank).weight_bytes
    free_bytes(monkeypatch, weights)
    require_memory(config, device, 257, rank, waiting.weight_bytes)
    free_bytes(monkeypatch, weights - 1)
    with pytest.raises(MemoryLimitError, match="bytes of device memory") as told:
        require_memory(config, device, 257, rank, waiting.weight_bytes)
    assert "are on the device until training starts" in str(told.value)
    assert "load" in str(told.value)


def least_bytes(monkeypatch: pytest.MonkeyPatch, config: Config, ranks: Ranks, away_bytes: int) -> int:
    """Of device memory, so that weights, gradients and state are not refused."""

    def taken(free: int) -> bool:
        free_bytes(monkeypatch, free)
        try:
            require_memory(config, torch.device("cuda"), 257, ranks, away_bytes)
        except MemoryLimitError:
            return False
        return True

    return bisect.bisect_left(range(GIB), True, key=taken)


def test_with_ranks_a_share_of_what_leaves_is_counted_and_whole_layers_that_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen red: all that leaves instead of a rank's share; all layers whole where one is at a time."""
    config = configured(*LEAVING, "train.global_batch_size=2", "train.micro_batch_size=1")
    alone, ranks = Ranks(), Ranks(0, 2, 0, 2, divided=True)
    whole, found = (weights_to_offload(config, None, 257, torch.bfloat16, r) for r in (alone, ranks))
    assert whole is not None
    assert found is not None
    assert (found.layers, found.weight_bytes) == (whole.layers, -(-whole.weight_bytes // 2))
    stays = least_bytes(monkeypatch, config, ranks, 0)
    assert stays - least_bytes(monkeypatch, config, ranks, found.weight_bytes) == found.weight_bytes
    resharded = least_bytes(monkeypatch, config, replace(ranks, resharded=True), 0)
    assert stays - resharded == recipe_workload(config, vocab_size=257).weight_bytes


def test_other_plans_are_told_beside_a_run_that_was_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy", reason="planning needs SciPy")
    device = torch.device("cuda")
    free_bytes(monkeypatch, 8 * GIB)
    config = configured(*offloaded(1), "model.num_layers=12", "model.hidden_size=512")

    def weighed(rank: int = 0) -> MemoryEstimate:
        ranks = Ranks(rank, 2, rank, 2, divided=True)
        return require_fit(TINY, config, device, 257, None, ranks)

    found = weighed()
    assert found.predicted is not None
    assert len(found.frontier) > 2
    sizes, times = ([getattr(p, name) for p in found.frontier] for name in ("device_bytes", "step_s"))
    assert sizes == sorted(sizes)
    assert times == sorted(times, reverse=True)
    assert sizes[0] <= found.predicted.device_peak_bytes
    assert weighed(1).frontier == (), "the first rank reports"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert weighed().frontier == ()


def test_copies_of_a_model_are_weighed_with_their_own_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: those of all ranks, which add up in float32 where one alone does not."""
    free_bytes(monkeypatch, 8 * GIB)
    config = configured("train.global_batch_size=2", "train.micro_batch_size=1", "ddp.use_distributed_optimizer=False")
    weighed = require_fit(TINY, config, torch.device("cuda"), 257, None, Ranks(0, 2, 0, 2))
    assert weighed.frontier == (), "nothing of copies can be offloaded"
    found = weighed.predicted
    alone = recipe_workload(configured("train.global_batch_size=1", "train.micro_batch_size=1"), vocab_size=257)
    choice = Choice((Placement.DEVICE,) * len(alone.inventory.buckets), (Keep.KEEP,) * len(alone.repeated))
    assert found is not None
    assert found.device_peak_bytes == required(alone, choice).device_peak_bytes
    config.ddp.grad_reduce_in_fp32 = True
    wider = require_fit(TINY, config, torch.device("cuda"), 257, None, Ranks(0, 2, 0, 2)).predicted
    assert wider is not None
    assert wider.device_peak_bytes > found.device_peak_bytes
    free_bytes(monkeypatch, found.device_peak_bytes - 1)
    with pytest.raises(MemoryLimitError, match=r"ddp\.use_distributed_optimizer=true shards"):
        require_fit(TINY, config, torch.device("cuda"), 257, None, Ranks(0, 2, 0, 2))


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (("model.tensor_model_parallel_size=2", "model.sequence_parallel=true"), Ranks(0, 2, 0, 2, 2, 1, True)),
        (("model.pipeline_model_parallel_size=2",), Ranks(0, 2, 0, 2, 1, 2)),
        (("model.expert_model_parallel_size=2",), Ranks(0, 2, 0, 2, 1, 1, True)),
    ],
)
def test_what_other_layouts_need_without_activations_is_refused_with_the_table(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], ranks: Ranks
) -> None:
    """Seen red: gathered weights left out."""
    config, device = configured(*offloaded(0.5), *words), torch.device("cuda")
    free_bytes(monkeypatch, 8 * GIB)
    least = require_memory(config, device, 257, ranks)
    here = least.weight_bytes + least.gradient_bytes // 2
    assert (
        require_memory(config, device, 257, ranks).parameters < require_memory(config, device, 257, Ranks()).parameters
    )
    free_bytes(monkeypatch, here)
    with pytest.raises(MemoryLimitError, match="activations come on top; without these") as caught:
        require_memory(config, device, 257, ranks)
    lines = str(caught.value).splitlines()
    assert any(line.split() == ["MiB", "per", "GPU", "device", "host", "pinned"] for line in lines)
    told = next(line for line in lines if "device, steady step: " in line)
    assert "weights " in told
    assert "optimizer state " in told
    assert ("gathered weights " in told) == ranks.divided
    assert any("host, steady step: optimizer state " in line for line in lines)


def test_a_run_is_predicted_anew_by_the_rates_and_the_placements_of_its_optimizer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rates, asked = Rates(1e9, 4e10, 8e8, 3e10, 2e10), []

    def again(*of: Any) -> MemoryEstimate:
        asked.append(of)
        return MemoryEstimate(Estimate(1, 2, 3, 4.0, 5.0))

    def weighed(*_: object) -> MemoryEstimate:
        return MemoryEstimate(Estimate(9, 9, 9, 9.0, 9.0), measured=again)

    monkeypatch.setattr(setup, "require_fit", weighed)
    config = apply_overrides(recipes.load(TINY), ["optimizer.optimizer_cpu_offload=True", "train.device=cpu"])
    assert setup.prepare(TINY, config, run_dir=tmp_path).predicted == Estimate(9, 9, 9, 9.0, 9.0), "nothing measured"
    assert not asked
    monkeypatch.setattr(AdamW, "rates", property(lambda _: rates))
    run = setup.prepare(TINY, config, run_dir=tmp_path)
    assert run.predicted == Estimate(1, 2, 3, 4.0, 5.0)
    assert asked == [(rates, [bucket.placement for bucket in run.optimizer.plan.buckets])]


def test_a_run_that_was_weighed_chooses_its_mix_by_prediction_within_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, rates = torch.device("cuda"), Rates(2e9, 60e9, 1.5e9, 40e9, 50e9)
    words = [*offloaded(1), "model.num_layers=12", "model.hidden_size=512", "optimizer.offload_mix=auto"]

    def mix_of(free: int, *more: str) -> Callable[[Rates], float] | None:
        free_bytes(monkeypatch, free)
        config = configured(*words, *more)
        return require_fit(TINY, config, device, 257, None, Ranks()).mix_of

    found = mix_of(8 * GIB)
    assert found is not None
    config = configured(*words)
    work = recipe_workload(config, vocab_size=257)
    choice = Choice((), (Keep.KEEP,) * 12)
    costs = Costs(work, measured(speeds_of(profile("h200")), rates, work.inventory.as_asked))
    assert found(rates) == best_share(costs, choice, 1.0) > 0.0
    # The run is predicted anew with the rates and what followed from them, and so are its alternatives.
    rows = place_fraction(work.inventory.buckets, 1.0, found(rates)).buckets
    placements = [row.placement for row in rows]
    free_bytes(monkeypatch, 8 * GIB)
    before = require_fit(TINY, config, device, 257, None, Ranks())
    assert before.measured is not None
    assert before.frontier == (), "looked for once the rates are known"
    after, slow = (before.measured(r, placements) for r in (rates, replace(rates, host_parameters_per_s=2e7)))
    assert after.predicted is not None
    assert slow.predicted is not None
    own = replace(asked_choice(config, work), placements=tuple(placements))
    assert (
        after.predicted.step_s
        == predict(work, own, measured(speeds_of(profile("h200")), rates, work.inventory.as_asked)).step_s
    )
    assert after.predicted.device_peak_bytes == required(work, own).device_peak_bytes
    assert len(after.frontier) > 2
    assert min(p.step_s for p in slow.frontier[:2]) > min(p.step_s for p in after.frontier[:2])
    # Staging takes memory: where there is none for it, nothing is streamed.
    least = required(work, replace(choice, placements=(Placement.HOST,) * len(work.inventory.buckets)))
    tight = mix_of(least.device_peak_bytes)
    assert tight is not None
    assert tight(rates) == 0.0
    assert mix_of(8 * GIB, "optimizer.offload_mix=0.5") is None
    assert mix_of(8 * GIB, "optimizer.optimizer_offload_fraction=0") is None


def test_such_a_run_is_verified(cli: Cli, text: Path) -> None:
    words = [*SMALL, *COMMON, *LEAVING, f"dataset.path={text}", "train.train_iters=2"]
    found = cli("verify", *words, json=True)
    assert found.code == 0, found.out
    assert found.report["passed"]
