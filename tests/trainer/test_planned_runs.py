"""Training with a plan: `hostward train --plan`, `AdamW(plan=...)`, `attach(plan=...)`, and refusal before allocation.

Seen red: a plan of another model refused only after the weights were allocated.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from cli_runs import SMALL
from run_fixtures import Cli

import hostward
from hostward import recipes
from hostward.config.overrides import apply_overrides
from hostward.core.host_limits import host_memory
from hostward.core.placement import Placement
from hostward.core.units import MIB
from hostward.errors import ConfigError, MemoryLimitError
from hostward.plan import plan_file
from hostward.plan.budgets import Budgets, refuse
from hostward.plan.cost_model import Costs, speeds_of
from hostward.plan.decisions import Choice, Keep
from hostward.plan.hardware_profile import profile
from hostward.plan.memory_model import STEADY_STEP, required
from hostward.plan.plan_file import PlanFile, plan_of
from hostward.plan.search import Candidate
from hostward.plan.step_time import predict
from hostward.plan.workload import Workload
from hostward.runtime.backend import Tier
from hostward.runtime.simulated.backend import SimulatedBackend
from hostward.trainer.data.tokenizer import ByteTokenizer
from hostward.trainer.memory_check import FIX, FIX_UNPLANNED, asked_choice, estimate, fix_for
from hostward.trainer.models import build_model
from hostward.trainer.offload_options import recompute_layers, with_plan
from hostward.trainer.plan_request import shares, unplanned
from hostward.trainer.report import options_set
from hostward.trainer.workload import recipe_workload

WORDS = [word for word in SMALL if not word.startswith("train.")]
TINY = "qwen3_moe_tiny_pretrain_config"
BF16 = "model.params_dtype=bf16"


def workload(*words: str) -> Workload:
    return recipe_workload(apply_overrides(recipes.load(TINY), [*SMALL, BF16, *words]), name=TINY)


def plan(of: Workload, choice: Choice) -> PlanFile:
    hardware = profile("h200")
    candidate = Candidate(choice, required(of, choice), Costs(of, speeds_of(hardware)))
    return plan_of(of, hardware, 1, Budgets(), candidate)


def test_a_plan_that_locks_less_is_carried_out(small: Workload) -> None:
    choice = Choice((Placement.HOST,) * len(small.inventory.buckets), (Keep.KEEP,) * len(small.repeated))
    switches = {"pin_gradients": False, "pin_weights": False}
    unpinned = plan(replace(small, **switches), choice)  # type: ignore[arg-type]
    config = apply_overrides(recipes.load(TINY), [*SMALL, BF16])
    words = "optimizer.optimizer_cpu_offload=True", "optimizer.optimizer_offload_fraction=1.0"
    by_options = workload(*words, "optimizer.pin_cpu_grads=False", "optimizer.pin_cpu_params=False")
    assert (by_options.pin_gradients, by_options.pin_weights) == (False, False)
    asked = with_plan(config, unpinned).optimizer
    assert (asked.pin_cpu_grads, asked.pin_cpu_params) == (False, False)
    model = build_model(config, vocab_size=ByteTokenizer.vocab_size, device="cpu", dtype=torch.bfloat16, seed=1)
    pinned = []
    for made in (unpinned, plan(small, choice)):
        optimizer = hostward.AdamW(model, plan=made, backend=SimulatedBackend(threads=1))
        pinned.append(optimizer.backend.ledger.pinned_bytes)
    assert pinned[0] == 12 < pinned[1]


def test_a_plan_with_steps_during_backward_is_carried_out(small: Workload) -> None:
    """Seen red: the plan's bytes counted one set of the state, and the optimizer had one."""
    choice = Choice((Placement.HOST,) * len(small.inventory.buckets), (Keep.KEEP,) * len(small.repeated))
    config = apply_overrides(recipes.load(TINY), [*SMALL, BF16])
    words = "optimizer.optimizer_cpu_offload=True", "optimizer.optimizer_offload_fraction=1.0"
    assert workload(*words, "optimizer.step_early=0.5").step_early == 0.5
    early, late = plan(replace(small, step_early=0.5), choice), plan(small, choice)
    asked = with_plan(config, early)
    assert asked.optimizer.step_early == 0.5
    model = build_model(config, vocab_size=ByteTokenizer.vocab_size, device="cpu", dtype=torch.bfloat16, seed=1)
    held = []
    for made in (early, late):
        optimizer = hostward.AdamW(model, plan=made, backend=SimulatedBackend(threads=1))
        held.append(optimizer.backend.ledger.total_bytes(Tier.HOST))
    assert held[0] - held[1] == early.predicted.host_bytes - late.predicted.host_bytes > 0
    for made, share in ((late, 0.5), (early, True), (early, "all")):
        with pytest.raises(ConfigError, match="the plan counts on") as caught:
            hostward.AdamW(model, plan=made, step_early=share, backend=SimulatedBackend(threads=1))  # type: ignore[arg-type]
        assert "hostward plan --step-early" in caught.value.fix
    hostward.AdamW(model, plan=early, step_early=0.5, backend=SimulatedBackend(threads=1))
    with pytest.raises(ConfigError, match="leave the other option out, or plan without --step-early"):
        hostward.AdamW(model, plan=early, overlap=False, backend=SimulatedBackend(threads=1))
    by_option = apply_overrides(config, ["optimizer.optimizer_cpu_offload=True", "optimizer.step_early=1"])
    with pytest.raises(ConfigError, match="--plan and optimizer"):
        with_plan(by_option, early)
    with pytest.raises(ConfigError, match="without the overlap"):
        with_plan(apply_overrides(config, ["optimizer.overlap_cpu_optimizer_d2h_h2d=False"]), early)


@pytest.fixture(scope="module")
def small() -> Workload:
    return workload()


def test_what_is_predicted_of_a_run(small: Workload) -> None:
    """Seconds are the plan's, else those of a known GPU, else unknown; bytes are those of the memory model."""
    choice = Choice((Placement.HOST,) * len(small.inventory.buckets), (Keep.KEEP, Keep.KEEP))
    speeds, shared = (speeds_of(profile("h200"), gpus) for gpus in (1, 4))
    needs, seconds = required(small, choice), predict(small, choice, speeds)
    by_profile = estimate(small, choice, needs, None, speeds)
    assert (by_profile.step_s, by_profile.exposed_s) == (seconds.step_s, seconds.exposed_s)
    assert by_profile.device_peak_bytes == needs.device_peak_bytes > 0
    assert (by_profile.host_bytes, by_profile.pinned_bytes) == (needs.host_bytes, needs.pinned_bytes)
    among_four = estimate(small, choice, needs, None, shared)
    assert among_four.step_s == predict(small, choice, shared).step_s
    assert among_four.step_s > seconds.step_s, "four GPUs share the host's memory"
    unknown = estimate(small, choice, needs, None, None)
    assert (unknown.step_s, unknown.exposed_s) == (None, None)
    made = plan(small, choice)
    edited = replace(made, predicted=replace(made.predicted, step_s=7.0))
    assert estimate(small, choice, needs, edited, speeds).step_s == 7.0
    longer = workload("model.seq_length=48")  # which the plan is not for
    assert estimate(longer, choice, needs, edited, speeds).step_s == predict(longer, choice, speeds).step_s
    assert estimate(longer, choice, needs, edited, None).step_s is None


def test_a_plan_for_a_step_of_other_sizes_is_carried_out_and_it_is_said(
    train: Cli, small: Workload, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan_file.save(plan(small, mixed(small, (Keep.KEEP, Keep.KEEP))), path := tmp_path / "plan.json")
    sizes = (small.sequence_tokens, small.microbatch_sequences, small.microbatches)
    same = [f"model.seq_length={sizes[0]}", f"train.micro_batch_size={sizes[1]}"]
    same += [f"train.global_batch_size={sizes[1] * sizes[2]}"]
    train(BF16, "train.train_iters=1", *same, "--plan", path)
    assert "the plan is for" not in caplog.text
    more = [f"model.seq_length={2 * sizes[0]}", f"train.global_batch_size={3 * sizes[1] * sizes[2]}"]
    train(BF16, "train.train_iters=1", *same, *more, "--plan", path)
    assert (
        f"the plan is for sequences of {sizes[0]} tokens (here {2 * sizes[0]}), {sizes[2]} microbatches" in caplog.text
    )
    assert "sequences in a microbatch" not in caplog.text


def mixed(of: Workload, keeps: tuple[Keep, ...], weights: frozenset[str] = frozenset()) -> Choice:
    kinds = list(Placement)
    placements = tuple(
        Placement.HOST if bucket.layer in weights else kinds[i % 3] for i, bucket in enumerate(of.inventory.buckets)
    )
    return Choice(placements, keeps, weights, gradients_on_host=bool(weights))


@pytest.mark.parametrize(
    ("keeps", "weights"),
    [
        ((Keep.KEEP, Keep.KEEP), 0),
        ((Keep.OFFLOAD, Keep.KEEP), 0),
        ((Keep.RECOMPUTE_OFFLOAD, Keep.RECOMPUTE), 0),
        ((Keep.ELEMENTWISE_OFFLOAD, Keep.ELEMENTWISE), 0),
        ((Keep.RECOMPUTE, Keep.KEEP), 1),
    ],
)
def test_a_run_by_a_plan_has_the_bits_of_one_without(
    train: Cli, small: Workload, tmp_path: Path, keeps: tuple[Keep, ...], weights: int
) -> None:
    path = tmp_path / "plan.json"
    names = frozenset(layer.name for layer in small.repeated[:weights])
    choice = mixed(small, keeps, names)
    plan_file.save(plan(small, choice), path)
    words = [BF16, "train.train_iters=3", "optimizer.clip_grad=0.5"]
    plain = train(*words)
    by_plan = train(*words, "--plan", path)
    assert by_plan.report["losses"] == plain.report["losses"]
    assert by_plan.report["grad_norms"] == plain.report["grad_norms"]
    held = by_plan.report["memory"]["host_by_owner_bytes"]
    state = sum(b.state_bytes for b, p in zip(small.inventory.buckets, choice.placements, strict=True) if p.offloaded)
    assert held["exp_avg"] + held["exp_avg_sq"] + held["remainder"] >= state


def test_a_plan_of_the_command_trains(cli: Cli, train: Cli, tmp_path: Path) -> None:
    pytest.importorskip("scipy", reason="planning needs SciPy")
    path = tmp_path / "plan.json"
    words = [*SMALL, BF16]
    assert cli("plan", *words, "--place", "*=host", "--keep", "*.1=keep", "--json", path).code == 0
    found = train(BF16, "train.train_iters=2", "--plan", path, "--run-dir", tmp_path / "run")
    assert found.report["placed_fraction"] == 1.0
    points = [asdict(point) for point in plan_file.load(path).frontier]
    assert found.report["frontier"] == points
    assert "everything on the device" not in [point["label"] for point in points]
    assert cli("report", tmp_path / "run").code == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Step time against device memory" in page
    assert "This run is not among them" in page
    assert points[0]["label"] in page


def test_the_optimizer_places_by_a_plan(small: Workload, tmp_path: Path) -> None:
    config = apply_overrides(recipes.load(TINY), [*SMALL, BF16])
    model = build_model(config, vocab_size=ByteTokenizer.vocab_size, device="cpu", dtype=torch.bfloat16, seed=1)
    path = tmp_path / "plan.json"
    made = plan(small, mixed(small, (Keep.KEEP, Keep.KEEP)))
    plan_file.save(made, path)
    optimizer = hostward.AdamW(model, plan=str(path))
    assert [b.placement.value for b in optimizer.plan.buckets] == [row.placement for row in made.buckets]
    assert optimizer._executor._slots.count == 2
    assert hostward.AdamW(model, plan=replace(made, staging_bytes=1))._executor._slots.count == 1
    with pytest.raises(ConfigError, match="staging_bytes must be a whole number >= 1, got 0"):
        hostward.AdamW(model, plan=replace(made, staging_bytes=0))
    with pytest.raises(ConfigError, match=r"and offload_fraction=0\.5"):
        hostward.AdamW(model, plan=made, offload_fraction=0.5)
    on_host = replace(made, gradients_on_host=True)
    assert hostward.AdamW(model, plan=on_host)._sums_on_host
    with pytest.raises(ConfigError, match="the plan adds gradients up on the host, and gradients='device'"):
        hostward.AdamW(model, plan=on_host, gradients="device")
    with pytest.raises(ConfigError, match="neither a plan nor a file"):
        hostward.AdamW(model, plan=7)
    with pytest.raises(ConfigError, match="of another model"):
        hostward.AdamW(torch.nn.Linear(8, 8), plan=made)


def test_what_a_plan_streams_is_not_counted_as_stepped_on_the_host(small: Workload) -> None:
    """Landing places of gradients are asked of the host for what is stepped there, and for no more."""
    config = apply_overrides(recipes.load(TINY), [*SMALL, BF16])
    buckets = small.inventory.buckets
    streamed = plan(small, Choice((Placement.STREAMED,) * len(buckets), (Keep.KEEP, Keep.KEEP)))
    assert shares(with_plan(config, streamed)).host_share == (0.0, 0.0)
    some = plan(small, mixed(small, (Keep.KEEP, Keep.KEEP)))
    stepped = sum(row.numel for row in some.buckets if row.placement == Placement.HOST)
    assert shares(with_plan(config, some)).host_share[1] == pytest.approx(stepped / small.inventory.numel)
    nothing = plan(small, Choice((Placement.DEVICE,) * len(buckets), (Keep.KEEP, Keep.KEEP)))
    assert options_set(with_plan(config, nothing)) == options_set(config)


def test_layers_that_cannot_be_recomputed_are_refused_with_plan_and_option() -> None:
    words = ["model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1"]
    config = apply_overrides(recipes.load(TINY), [*SMALL, *words])
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    told = r"the plan, or model\.recompute_granularity=full, recomputes 2 layers of a Sequential"
    with pytest.raises(ConfigError, match=told) as caught:
        recompute_layers(model, config)
    assert "model.recompute_granularity=selective" in caught.value.fix


def checkpointed(model: torch.nn.Module) -> list[bool]:
    return [layer.gradient_checkpointing for layer in model.model.layers]


def test_a_plan_that_does_not_fit_is_refused_before_anything_is_done(small: Workload) -> None:
    config = apply_overrides(recipes.load(TINY), [*SMALL, BF16])
    model = build_model(config, vocab_size=ByteTokenizer.vocab_size, device="cpu", dtype=torch.bfloat16, seed=1)
    made = plan(small, mixed(small, (Keep.OFFLOAD, Keep.RECOMPUTE)))
    large = replace(made, predicted=replace(made.predicted, host_bytes=1 << 60))
    backend = SimulatedBackend()
    with pytest.raises(MemoryLimitError, match="the run needs more host memory than there is") as caught:
        hostward.attach(model, plan=large, backend=backend)
    assert f"{(1 << 60) / MIB:,.1f}" in caught.value.why
    assert "force=True" in caught.value.fix
    assert "hostward.move" not in caught.value.fix
    leaving = plan(small, mixed(small, (Keep.KEEP, Keep.KEEP), frozenset({small.repeated[0].name})))
    leaving = replace(leaving, predicted=replace(leaving.predicted, host_bytes=1 << 60))
    with pytest.raises(MemoryLimitError, match="more host memory") as moved:
        hostward.attach(model, plan=leaving, backend=backend)
    assert "hostward.move(model, device, weights=1)" in moved.value.fix
    assert backend.ledger.total_bytes(Tier.HOST) == 0
    assert checkpointed(model) == [False, False]
    with hostward.attach(model, plan=large, backend=backend, force=True) as run:
        assert run.schedule is not None
    assert checkpointed(model) == [False, True]


def test_several_ranks_of_a_host_share_what_is_free(small: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    config = apply_overrides(recipes.load(TINY), [*SMALL, BF16])
    model = build_model(config, vocab_size=ByteTokenizer.vocab_size, device="cpu", dtype=torch.bfloat16, seed=1)
    made = plan(small, mixed(small, (Keep.OFFLOAD, Keep.KEEP)))
    three_quarters = host_memory().available_bytes * 3 // 4
    made = replace(made, predicted=replace(made.predicted, host_bytes=three_quarters))
    hostward.attach(model, plan=made, backend=SimulatedBackend()).detach()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(MemoryLimitError, match="more host memory than there is"):
        hostward.attach(model, plan=made, backend=SimulatedBackend())


def test_layers_of_a_plan_that_nothing_was_told_of(small: Workload, caplog: pytest.LogCaptureFixture) -> None:
    """`AdamW` places state; what a plan does to layers is for `attach`, which says what it does."""
    config = apply_overrides(recipes.load(TINY), [*SMALL, BF16])
    made = plan(small, mixed(small, (Keep.RECOMPUTE, Keep.KEEP)))
    for attached in (False, True):
        model = build_model(config, vocab_size=ByteTokenizer.vocab_size, device="cpu", dtype=torch.bfloat16, seed=1)
        optimizer = hostward.AdamW(model, plan=made, backend=SimulatedBackend(threads=1))
        caplog.clear()
        with caplog.at_level("WARNING", "hostward"):
            if attached:
                run = hostward.attach(model.eval(), optimizer, plan=made)
                assert "evaluation mode" in caplog.text
                assert "1 whole layers recomputed in backward" in repr(run)
                assert "saving only their inputs: 1 whole layers" in run.report().explain()
            for _ in range(2):
                for p in model.parameters():
                    p.grad = torch.zeros_like(p)
                optimizer.step()
        assert caplog.text.count("recomputes something of 1 layers") == (not attached)


def test_attach_by_a_plan(small: Workload) -> None:
    config = apply_overrides(recipes.load(TINY), [*SMALL, BF16])
    model = build_model(config, vocab_size=ByteTokenizer.vocab_size, device="cpu", dtype=torch.bfloat16, seed=1)
    everything = plan(small, mixed(small, (Keep.OFFLOAD, Keep.KEEP)))
    with hostward.attach(model, plan=everything) as run:
        assert run.schedule is not None
    with pytest.raises(ConfigError, match="neither offloads nor recomputes anything of layers"):
        hostward.attach(model, plan=plan(small, mixed(small, (Keep.KEEP, Keep.KEEP))))
    again = plan(small, mixed(small, (Keep.RECOMPUTE, Keep.KEEP)))
    with pytest.raises(ConfigError, match="an optimizer of another model"):
        hostward.attach(model, hostward.AdamW(torch.nn.Linear(8, 8)), plan=again)
    assert checkpointed(model) == [False, False]
    hostward.attach(model, plan=again).detach()
    assert checkpointed(model) == [True, False]
    with pytest.raises(ConfigError, match=r"with plan=\.\.\. and activations"):
        hostward.attach(model, activations=1, plan=everything)
    backwards = json.loads(everything.to_json())
    backwards["layers"].reverse()
    backwards["layers"][0]["activations"], backwards["layers"][1]["activations"] = "keep", "offload"
    with pytest.raises(
        ConfigError, match=r"activations are offloaded in layers\[1\], model.layers.0, but not in layers\[0\] before it"
    ):
        hostward.attach(model, plan=PlanFile.from_json(json.dumps(backwards)))
    last = plan(small, mixed(small, (Keep.OFFLOAD, Keep.OFFLOAD)))
    with pytest.raises(ConfigError, match="everything of the last layer"):
        hostward.attach(model, plan=last)


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["optimizer.optimizer_cpu_offload=True"], ["--plan and optimizer.optimizer_cpu_offload"]),
        (["model.num_layers=3"], ["the plan is of another model"]),
    ],
)
def test_a_plan_that_does_not_go_with_the_options_is_refused(
    refused: Cli, small: Workload, tmp_path: Path, words: list[str], texts: list[str]
) -> None:
    path = tmp_path / "plan.json"
    plan_file.save(plan(small, mixed(small, (Keep.KEEP, Keep.KEEP))), path)
    found = refused(BF16, *words, "--plan", path)
    for text in texts:
        assert text in found.err


def test_weights_that_cannot_leave_and_a_plan_for_more_gpus_are_refused_when_the_file_is_read(
    refused: Cli, small: Workload, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    content = json.loads(plan(small, mixed(small, (Keep.KEEP, Keep.KEEP))).to_json())
    content["layers"][0]["weights"] = "host"
    path.write_text(json.dumps(content))
    assert "weights are offloaded only with a CPU optimizer step" in refused(BF16, "--plan", path).err
    content["layers"][0]["weights"] = "device"
    content["workload"]["ranks"] = content["machine"]["gpus"] = 4
    path.write_text(json.dumps(content))
    assert "shards the model among 4 GPUs, and here it is 1" in refused(BF16, "--plan", path).err


def test_a_plan_edited_into_nonsense_is_refused(refused: Cli, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}")
    found = refused(BF16, "--plan", path)
    assert "cannot be used as a plan" in found.err


def test_what_exceeds_the_free_memory_is_refused_with_the_table(small: Workload) -> None:
    choice = mixed(small, (Keep.KEEP, Keep.KEEP))
    needs = required(small, choice)
    refuse(needs, Budgets(needs.device_peak_bytes, needs.host_bytes), FIX)
    with pytest.raises(MemoryLimitError, match="more device memory than there is") as caught:
        refuse(needs, Budgets(needs.device_peak_bytes - 1, needs.host_bytes), FIX)
    lines = [line.split() for line in caught.value.why.splitlines()]
    steady = next(phase for phase in needs.phases if phase.name == "steady step")
    sizes = [f"{n / MIB:,.1f}" for n in (steady.device_bytes, steady.host_bytes, steady.pinned_bytes)]
    assert ["MiB", "per", "GPU", "device", "host", "pinned"] in lines
    assert ["steady", "step", *sizes] in lines
    assert ["limit", f"{(needs.device_peak_bytes - 1) / MIB:,.1f}", f"{needs.host_bytes / MIB:,.1f}", "none"] in lines
    assert "optimizer state" in next(" ".join(line) for line in lines if line[:2] == ["device,", "steady"])
    assert "--force" in caught.value.fix
    with pytest.raises(MemoryLimitError, match="more host memory than there is"):
        refuse(needs, Budgets(None, needs.host_bytes - 1), FIX)


@pytest.mark.parametrize(
    ("modules", "weighed"),
    [
        ("layernorm,moe_act", Keep.ELEMENTWISE),
        ("layernorm,moe", Keep.ELEMENTWISE),  # keeps less than that
        ("layernorm", Keep.KEEP),
        ("moe", Keep.KEEP),
    ],
)
def test_recomputation_is_never_weighed_as_more_than_it_is(small: Workload, modules: str, weighed: Keep) -> None:
    words = ["model.recompute_granularity=selective", f"model.recompute_modules=[{modules}]"]
    config = apply_overrides(recipes.load(TINY), [*SMALL, BF16, *words])
    assert set(asked_choice(config, small).activations) == {weighed}
    planned = modules == "layernorm,moe_act"
    assert fix_for(config) == (FIX if planned else FIX_UNPLANNED.format(f"model.recompute_modules=[{modules}]"))


@pytest.mark.parametrize(
    ("modules", "weighed"),
    [("layernorm,mlp_act", Keep.ELEMENTWISE), ("layernorm,mlp", Keep.ELEMENTWISE), ("mlp", Keep.KEEP)],
)
def test_the_same_of_dense_layers(modules: str, weighed: Keep) -> None:
    words = ["model.num_layers=2", "model.recompute_granularity=selective", f"model.recompute_modules=[{modules}]"]
    config = apply_overrides(recipes.load("llama32_1b_pretrain_config"), words)
    work = recipe_workload(config)
    assert set(asked_choice(config, work).activations) == {weighed}
    assert (unplanned(config) is None) == (modules == "layernorm,mlp_act")


def test_offloading_that_plans_do_not_know_is_weighed_as_the_text_says(small: Workload) -> None:
    fine = ["model.fine_grained_activation_offloading=true", "model.offload_modules=[core_attn]"]
    config = apply_overrides(recipes.load(TINY), [*SMALL, BF16, *fine])
    assert set(asked_choice(config, small).activations) == {Keep.KEEP}
    assert "saves memory that the estimate does not count" in fix_for(config)
    two = [
        "model.cpu_offloading=true",
        "model.cpu_offloading_num_layers=1",
        "model.cpu_offloading_double_buffering=true",
    ]
    config = apply_overrides(recipes.load(TINY), [*SMALL, BF16, *two])
    assert "keeps one layer more" in fix_for(config)
    for idle in ("model.cpu_offloading_num_layers=0", "model.cpu_offloading_activations=false"):
        assert unplanned(apply_overrides(recipes.load(TINY), [*SMALL, BF16, *two, idle])) is None


def test_what_options_ask_for_is_weighed(small: Workload) -> None:
    words = [
        "optimizer.optimizer_cpu_offload=True",
        "optimizer.optimizer_offload_fraction=1.0",
        "model.cpu_offloading=True",
        "model.cpu_offloading_num_layers=1",
    ]
    config = apply_overrides(recipes.load(TINY), [*SMALL, BF16, *words])
    choice = asked_choice(config, small)
    assert set(choice.placements) == {Placement.HOST}
    assert choice.activations == (Keep.OFFLOAD, Keep.KEEP)
    plain = asked_choice(apply_overrides(recipes.load(TINY), [*SMALL, BF16]), small)
    assert set(plain.placements) == {Placement.DEVICE}
    assert set(plain.activations) == {Keep.KEEP}


def test_a_serial_step_is_weighed_with_all_gradients(small: Workload) -> None:
    """None leaves in backward, and slots are taken behind it; benchmarks/results has a measured row of that kind."""
    words = ["optimizer.optimizer_cpu_offload=True", "optimizer.optimizer_offload_fraction=1.0"]
    words += ["train.global_batch_size=1", "train.micro_batch_size=1", "model.seq_length=16"]  # gradients are the most
    one = workload(*words)
    hidden, serial = (
        asked_choice(apply_overrides(recipes.load(TINY), [*SMALL, BF16, *words, *more]), one)
        for more in ([], ["optimizer.overlap_cpu_optimizer_d2h_h2d=False"])
    )
    assert (hidden.serial, serial.serial) == (False, True)
    steady = [required(one, choice).phase(STEADY_STEP).device for choice in (hidden, serial)]
    assert steady[1]["gradients"] > steady[0]["gradients"]
    streamed = replace(serial, placements=(Placement.STREAMED,) * len(one.inventory.buckets))
    assert required(one, streamed).slots == 2
