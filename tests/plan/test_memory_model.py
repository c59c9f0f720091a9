"""The memory model on a workload that is written down: what goes where, and what that leaves on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from hostward.core.inventory import Dtype, Inventory, Parameter, cut_buckets
from hostward.core.placement import Placement
from hostward.errors import ConfigError
from hostward.plan.budgets import Budgets
from hostward.plan.decisions import Choice, Keep
from hostward.plan.gradient_memory import Facts, Gradients
from hostward.plan.memory_model import (
    CUBLAS_WORKSPACE_BYTES,
    CUBLAS_WORKSPACES,
    EVALUATION,
    FIRST_STEP,
    LOAD,
    RESUME,
    SAVE,
    SLEEP,
    STEADY_STEP,
    TRAINING,
    Needs,
    required,
)
from hostward.plan.workload import Curve, Layer, Moment, PerToken, Saved, Way, Workload
from hostward.schedule.optimizer import GRADIENTS_IN_FLIGHT

LAYERS, NUMEL, TOKENS = 6, 1 << 20, 1024
SAVED, INPUT, SPARE = 1000.0, 100.0, 300.0
DEVICE, HOST, STREAMED = Placement.DEVICE, Placement.HOST, Placement.STREAMED


def moment(rate: float, gradients: int = 0) -> Moment:
    return Moment(PerToken(rate), 0.0, gradients)


def layer(name: str, loss: float = 0.0) -> Layer:
    """A layer of one weight. `loss`: it is none of the list, and holds that much."""
    keep = Curve((moment(loss or SAVED + INPUT),), moment(0 if loss else SAVED), (moment(loss or SAVED + SPARE, 1),))
    again = Curve((moment(2 * INPUT),), moment(INPUT), (moment(INPUT + SAVED + SPARE, 1),))
    curves = dict.fromkeys(Way, keep) if loss else {Way.KEEP: keep, Way.RECOMPUTE: again}
    saved = () if loss else (Saved("mlp", PerToken(SAVED), False, PerToken(0.0), PerToken(0.0)),)
    rates = PerToken(INPUT), saved, PerToken(1e6), PerToken(0.0), PerToken(SPARE)
    return Layer(name, not loss, 2 * NUMEL, 0, *rates, curves, (f"{name}.weight",))


def workload(microbatches: int = 1, loss: float = 1.0) -> Workload:
    layers = [layer("embed", 1.0), *(layer(f"layers.{i}") for i in range(LAYERS)), layer("head", loss)]
    parameters = tuple(Parameter(f"{part.name}.weight", NUMEL, Dtype.BF16, part.name) for part in layers)
    inventory = Inventory(parameters, cut_buckets(parameters, cap=NUMEL))
    return Workload("hand", inventory, tuple(layers), Dtype.BF16, TOKENS, 1, microbatches)


def needs(
    placements: Placement | Sequence[Placement] = DEVICE,
    keeps: Keep | Sequence[Keep] = Keep.KEEP,
    work: Workload | None = None,
    **more: object,
) -> Needs:
    placed = (placements,) * (LAYERS + 2) if isinstance(placements, Placement) else tuple(placements)
    kept = (keeps,) * LAYERS if isinstance(keeps, Keep) else tuple(keeps)
    return required(work or workload(), Choice(placed, kept, **more))  # type: ignore[arg-type]


def device(found: Needs, owner: str) -> int:
    return found.phase(STEADY_STEP).device.get(owner, 0)


def test_all_on_the_device() -> None:
    found = needs()
    weights = 2 * NUMEL * (LAYERS + 2)
    assert device(found, "weights") == weights
    assert device(found, "optimizer state") == 10 * NUMEL * (LAYERS + 2) + 8 * (LAYERS + 2)
    # At the end of backward: the embedding's own, and all gradients.
    assert (device(found, "activations"), device(found, "gradients")) == (TOKENS, weights)
    assert set(found.phase(STEADY_STEP).host) == {"workspaces"}
    assert [phase.name for phase in found.phases] == [LOAD, FIRST_STEP, STEADY_STEP, SAVE, RESUME, EVALUATION, SLEEP]


def test_totals_are_those_of_phases_that_every_run_has() -> None:
    found = needs(STREAMED)
    held = [phase for phase in found.phases if phase.name in TRAINING]
    assert found.device_peak_bytes == max(phase.device_bytes for phase in held)
    assert found.host_bytes == max(phase.host_bytes for phase in held) < found.phase(SAVE).host_bytes
    assert found.pinned_bytes == max(phase.pinned_bytes for phase in held)
    assert not found.phase(SLEEP).device


def test_evaluation_holds_one_layer_and_no_gradients() -> None:
    """Weights and state are where training has them. Seen red: with what earlier layers keep for backward."""
    work = workload(loss=10.0)
    for keep in (Keep.KEEP, Keep.RECOMPUTE):
        found = needs(HOST, keep, work)
        held, step = found.phase(EVALUATION), found.phase(STEADY_STEP)
        assert held.device["weights"] == step.device["weights"]
        assert "gradients" not in held.device
        assert held.device.get("activations", 0) + held.device.get("logits and loss", 0) <= (SAVED + 10) * TOKENS
        assert held.host == step.host
    assert Budgets(host_bytes=0, phases=(EVALUATION,)).over(found) == {"host": held.host_bytes}


def test_the_peak_is_at_the_loss_or_in_the_layers() -> None:
    small, large = needs(work=workload(loss=1.0)), needs(work=workload(loss=10_000.0))
    assert device(small, "logits and loss") == 0
    assert device(large, "logits and loss") == 10_000 * TOKENS
    assert device(large, "activations") == SAVED * LAYERS * TOKENS
    assert device(large, "gradients") <= 2 * NUMEL


def test_gradients_of_host_buckets_leave_a_few_at_a_time() -> None:
    found = needs(HOST, Keep.RECOMPUTE)
    assert device(found, "gradients") <= (GRADIENTS_IN_FLIGHT + 1) * 2 * NUMEL
    assert found.phase(STEADY_STEP).host["gradients"] == 2 * NUMEL * (LAYERS + 2)


def test_of_several_ranks_what_stays_of_a_layer_keeps_nothing_that_leaves_of_it() -> None:
    """Two buckets for each layer, and every second one streamed: what is reduced of both lies in one memory."""
    whole = workload()
    halves = Inventory(whole.inventory.parameters, cut_buckets(whole.inventory.parameters, cap=NUMEL // 2))
    work = replace(whole, ranks=2, resharded=True, inventory=halves)
    mixed = Choice((HOST, STREAMED) * (LAYERS + 2), (Keep.RECOMPUTE,) * LAYERS)

    def left(of: Workload) -> float:
        """On the device when the last is made."""
        return Gradients(Facts(of), mixed).held[-1]

    assert len(halves.buckets) == 2 * (LAYERS + 2)
    assert left(work) == NUMEL * (LAYERS + 2) + GRADIENTS_IN_FLIGHT * 2 * NUMEL
    # In one process each weight's gradient is a memory, and all of it stays for what stays of it.
    assert left(replace(whole, inventory=halves)) == 2 * NUMEL * (LAYERS + 2)


@pytest.mark.parametrize(
    ("placement", "gradients", "weights", "each"),
    [
        (HOST, True, True, {"gradients": 2, "weights": 2}),
        (HOST, False, True, {"weights": 2}),
        (HOST, True, False, {"gradients": 2}),
        (HOST, False, False, {}),
        (STREAMED, True, True, {"optimizer state": 10}),
        (STREAMED, False, False, {"optimizer state": 10}),
    ],
)
def test_page_locked_is_what_copies_reach(
    placement: Placement, gradients: bool, weights: bool, each: dict[str, int]
) -> None:
    work = replace(workload(), pin_gradients=gradients, pin_weights=weights)
    found = needs(placement, Keep.RECOMPUTE, work)
    for phase in found.phases:
        rest = {owner: n for owner, n in phase.pinned.items() if owner not in ("workspaces", "copies for a checkpoint")}
        more = {"optimizer state": 0, "weights": 2} if phase.name == SLEEP else {}
        expected = {owner: each.get(owner, 0) + more.get(owner, 0) for owner in {*each, *more}}
        assert rest == {owner: n * NUMEL * (LAYERS + 2) for owner, n in expected.items() if n}
    plain = needs(placement, Keep.RECOMPUTE)
    assert [phase.host for phase in found.phases] == [phase.host for phase in plain.phases]


def test_several_microbatches_keep_gradients_in_fp32_unless_the_host_adds_them_up() -> None:
    work = workload(microbatches=2)
    stay = needs(HOST, work=work)
    leave = needs(HOST, work=work, gradients_on_host=True)
    assert device(stay, "gradients") >= 4 * NUMEL * (LAYERS + 2)
    assert device(leave, "gradients") <= (GRADIENTS_IN_FLIGHT + 1) * 2 * NUMEL
    assert stay.phase(STEADY_STEP).host["gradients"] == 4 * NUMEL * (LAYERS + 2)
    assert leave.phase(STEADY_STEP).host["gradients"] > stay.phase(STEADY_STEP).host["gradients"]


def test_the_newest_gradients_of_a_microbatch_leave_with_the_first_of_the_next() -> None:
    """Seen red: 2.1 % too low on two GPUs, without the embedding's gradient in the forward behind it."""
    work = workload(microbatches=2)
    choice = Choice((HOST,) * (LAYERS + 2), (Keep.RECOMPUTE,) * LAYERS, gradients_on_host=True)
    one = replace(choice, gradients_on_host=False)
    found, alone = Gradients(Facts(work), choice), Gradients(Facts(workload()), one)
    assert found.before_bytes == GRADIENTS_IN_FLIGHT * 2 * NUMEL
    assert alone.before_bytes == 0
    in_flight = [(found.held - alone.held)[made] // (2 * NUMEL) for made in range(LAYERS + 3)]
    assert in_flight == [2, 2, 1, *[0] * LAYERS]
    few = replace(choice, placements=(HOST, *[STREAMED] * (LAYERS + 1)))
    assert Gradients(Facts(work), few).before_bytes == 2 * NUMEL + 4 * NUMEL * (LAYERS + 1)


def test_what_is_offloaded_leaves_the_loss_and_comes_back_one_layer_ahead() -> None:
    work = workload(loss=100_000.0)
    kept = needs(keeps=[Keep.OFFLOAD] * 2 + [Keep.KEEP] * (LAYERS - 2), work=work)
    assert device(kept, "activations") == SAVED * (LAYERS - 2) * TOKENS
    assert kept.phase(STEADY_STEP).host["activations"] == 2 * SAVED * TOKENS
    all_but_one = [Keep.OFFLOAD] * (LAYERS - 1) + [Keep.KEEP]
    in_layers = needs(HOST, all_but_one)
    assert device(in_layers, "activations") == (2 * SAVED + SPARE) * TOKENS


def test_offloaded_weights_are_there_for_the_layer_that_runs_and_the_next() -> None:
    names = frozenset(f"layers.{i}" for i in range(LAYERS - 1))
    at_loss = needs(HOST, work=workload(loss=100_000.0), offloaded_weights=names)
    in_layers = needs(HOST, offloaded_weights=names)
    assert device(at_loss, "weights") == 2 * NUMEL * 3
    assert device(in_layers, "weights") == 2 * NUMEL * 5
    assert in_layers.phase(STEADY_STEP).host["weights"] == 2 * NUMEL * (LAYERS + 2)
    frozen = workload()
    frozen = replace(frozen, layers=tuple(replace(la, frozen_weight_bytes=7) for la in frozen.layers))
    assert needs(HOST, work=frozen, offloaded_weights=names).phase(STEADY_STEP).host["weights"] == (
        2 * NUMEL * (LAYERS + 2) + 7 * (LAYERS - 1)
    )


def test_slots_use_what_backward_has_freed_and_two_besides() -> None:
    slot = 10 * NUMEL
    large = needs(STREAMED, work=workload(loss=100_000.0))
    assert large.slots == LAYERS + 2  # the loss is so large that all of them find room later
    assert device(large, "staging slots") == 0
    small = needs(STREAMED, Keep.RECOMPUTE)
    assert 2 <= small.slots < LAYERS + 2
    assert device(small, "staging slots") <= small.slots * slot
    assert needs(STREAMED, staging_bytes=slot).slots == 1
    assert needs(HOST).slots == 0


def test_t44_a_graph_keeps_its_gradients_and_its_memory_during_the_step() -> None:
    work = workload(loss=100_000.0)
    apart, captured = (needs(STREAMED, work=work, staging_bytes=20 * NUMEL, captured=on) for on in (False, True))
    assert captured.slots == apart.slots == 2
    assert (device(apart, "staging slots"), device(captured, "staging slots")) == (0, 20 * NUMEL)
    assert device(captured, "logits and loss") == device(apart, "logits and loss") == 100_000 * TOKENS
    apart, captured = (needs(HOST, Keep.RECOMPUTE, captured=on) for on in (False, True))
    assert device(apart, "gradients") <= (GRADIENTS_IN_FLIGHT + 1) * 2 * NUMEL
    assert device(captured, "gradients") == 2 * NUMEL * (LAYERS + 2)
    assert device(captured, "workspaces") - device(apart, "workspaces") == CUBLAS_WORKSPACES * CUBLAS_WORKSPACE_BYTES


def test_without_curves_sums_are_used() -> None:
    work = workload()
    plain = replace(work, layers=tuple(replace(part, curves={}) for part in work.layers))
    keep, again = needs(HOST, work=plain), needs(HOST, Keep.RECOMPUTE, plain)
    assert device(keep, "activations") >= SAVED * (LAYERS - 1) * TOKENS > device(again, "activations")
    away = needs(keeps=Keep.OFFLOAD, work=plain)
    assert away.phase(STEADY_STEP).host["activations"] == SAVED * LAYERS * TOKENS


KEEPS = st.lists(st.sampled_from([Keep.KEEP, Keep.OFFLOAD, Keep.RECOMPUTE]), min_size=LAYERS, max_size=LAYERS)
PLACED = st.lists(st.sampled_from(list(Placement)), min_size=LAYERS + 2, max_size=LAYERS + 2)


@settings(max_examples=60, deadline=None)
@given(PLACED, KEEPS, st.integers(0, LAYERS + 1), st.sampled_from([1.0, 3000.0, 30_000.0]))
def test_stepping_one_more_bucket_on_the_host_never_needs_more_of_the_device(
    placed: list[Placement], keeps: list[Keep], which: int, loss: float
) -> None:
    work = workload(loss=loss)
    more = [HOST if i == which else p for i, p in enumerate(placed)]
    before, after = needs(placed, keeps, work), needs(more, keeps, work)
    if placed[which] is DEVICE:
        assert after.device_peak_bytes <= before.device_peak_bytes
        assert after.host_bytes > before.host_bytes
    for found in (before, after):
        for phase in found.phases:
            assert all(n > 0 for held in (phase.device, phase.host, phase.pinned) for n in held.values())
            assert phase.pinned_bytes <= phase.host_bytes


@pytest.mark.parametrize(
    ("placed", "keeps", "more", "text"),
    [
        ([HOST], [Keep.KEEP] * LAYERS, {}, "1 placements for 8 buckets"),
        ([HOST] * (LAYERS + 2), [Keep.KEEP], {}, "1 choices of activations for 6 layers"),
        (
            [HOST] * (LAYERS + 2),
            [Keep.KEEP] * LAYERS,
            {"offloaded_weights": frozenset({"embed"})},
            "none of the layers",
        ),
    ],
)
def test_a_choice_of_another_workload_is_refused(
    placed: list[Placement], keeps: list[Keep], more: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        needs(placed, keeps, **more)
