"""Predicted step times: against measured steps, and in the directions that physics demands.

Seen red: uploads that no layer waits for, one step played instead of two, recomputation without its forward, gradients
that land wherever they like.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from workload_cases import all_device, chosen, llama

from hostward.core.host_limits import Rates
from hostward.core.inventory import Inventory
from hostward.errors import ConfigError
from hostward.plan.cost_model import (
    EXCHANGE_TRAFFIC,
    GUESS_SECONDS,
    HOST_STEP_BYTES,
    Costs,
    Speeds,
    balanced_share,
    measured,
    speeds_of,
)
from hostward.plan.decisions import Choice, Keep
from hostward.plan.hardware_profile import PROFILES, profile
from hostward.plan.lane_simulator import Queue
from hostward.plan.rank_partition import sharded
from hostward.plan.step_time import explain, predict
from hostward.plan.workload import Workload

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
H200 = speeds_of(profile("h200"))
SMALL = llama(layers=6, hidden=1024, ffn=4096, heads=8, kv_heads=8, vocab=8000, sequence=2048)


def measured_s(file: str, row: str) -> float:
    """Return the seconds of a row: of the state, in a run of these days; of activations, when they were measured."""
    day = "2026-11-29" if file == "step-8k" else "2026-11-21"
    rows = json.loads((RESULTS / f"{day}-{file}-h200.json").read_text())["rows"]
    return float(next(r["step_s"] for r in rows if r["row"] == row))


def with_keeps(workload: Workload, *runs: tuple[Keep, int]) -> Choice:
    return Choice(all_device(workload), tuple(keep for keep, count in runs for _ in range(count)))


CHECKPOINTED = Keep.RECOMPUTE


@pytest.mark.parametrize(
    ("file", "row", "batch", "fraction", "share"),
    [
        ("step-8k", "0", 2, 0, 0),
        ("step-8k", "auto:0.5", 2, 0.5, 0.461),
        ("step-8k", "host:1", 2, 1, 0),
        ("step-8k", "auto:1", 2, 1, 0.490),
        ("step-32k", "0", 8, 0, 0),
    ],
)
def test_optimizer_rows_are_within_a_tenth(file: str, row: str, batch: int, fraction: float, share: float) -> None:
    workload = llama(batch=batch)
    found = predict(workload, chosen(workload, fraction, share, CHECKPOINTED), H200)
    assert found.step_s == pytest.approx(measured_s(file, row), rel=0.1)


def test_what_gpus_exchange_takes_time_from_compute() -> None:
    """A layer is gathered once in a step, or for each forward and each backward; its gradient is reduced in each."""

    def layer(**how: bool) -> tuple[float, float]:
        divided = sharded(replace(SMALL, microbatches=8), 4, **how)
        alone, found = (Costs(w, H200).layers[1] for w in (SMALL, divided))
        assert found.again_s(Keep.RECOMPUTE) == alone.again_s(Keep.RECOMPUTE) == alone.forward_s
        return found.forward_s - alone.forward_s, found.backward_s - alone.backward_s

    once = EXCHANGE_TRAFFIC * SMALL.layers[1].weight_bytes / H200.traffic_bytes_per_s
    assert layer() == pytest.approx((once / 2, once), rel=1e-6)  # of two microbatches each
    assert layer(resharded=True) == pytest.approx((once, 2 * once), rel=1e-6)
    assert layer(reduced_in_fp32=True) == pytest.approx((once / 2, 2 * once), rel=1e-6)


def test_parameters_may_be_in_none_of_the_layers() -> None:
    """A caller may have named layers that hold parameters of other names, or none."""
    elsewhere = replace(SMALL, layers=tuple(replace(layer, name=f"part.{layer.name}") for layer in SMALL.layers))
    assert predict(elsewhere, chosen(elsewhere, 1, 0.5, CHECKPOINTED), H200).step_s > 0
    nothing = replace(elsewhere, inventory=Inventory((), ()))
    assert predict(nothing, Choice((), (CHECKPOINTED,) * 6), H200).step_s > 0


def test_eight_billion_parameters_are_within_a_tenth() -> None:
    workload = llama(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256, batch=4, chunk=True)
    found = predict(workload, chosen(workload, 1, 0.4136, CHECKPOINTED), H200)
    assert found.step_s == pytest.approx(measured_s("step-8b-16k", "auto:1"), rel=0.1)


@pytest.mark.parametrize(
    ("file", "row", "runs"),
    [
        ("activations-8k", "keep", [(Keep.KEEP, 24)]),
        ("activations-8k", "checkpoint", [(Keep.RECOMPUTE, 24)]),
        ("activations-8k", "offload:4", [(Keep.OFFLOAD, 4), (Keep.KEEP, 20)]),
        ("activations-8k", "offload:8", [(Keep.OFFLOAD, 8), (Keep.KEEP, 16)]),
        (
            "activations-8k",
            "offload:8+block:16",
            [(Keep.RECOMPUTE_OFFLOAD, 8), (Keep.RECOMPUTE, 8), (Keep.KEEP, 8)],
        ),
        ("activations-8k", "offload:23+checkpoint", [(Keep.RECOMPUTE_OFFLOAD, 23), (Keep.RECOMPUTE, 1)]),
        ("activations-8k-elementwise", "elementwise", [(Keep.ELEMENTWISE, 24)]),
        (
            "activations-8k-elementwise",
            "offload:5+elementwise",
            [(Keep.ELEMENTWISE_OFFLOAD, 5), (Keep.ELEMENTWISE, 19)],
        ),
    ],
)
def test_activation_rows_are_within_a_tenth(file: str, row: str, runs: list[tuple[Keep, int]]) -> None:
    """These have no optimizer step; what the prediction has of it is taken off."""
    workload = llama()
    step_s = 28 * workload.inventory.numel / H200.traffic_bytes_per_s
    found = predict(workload, with_keeps(workload, *runs), H200)
    assert found.step_s - step_s == pytest.approx(measured_s(file, row), rel=0.1)


def test_everything_on_the_device_is_compute_alone() -> None:
    found = predict(SMALL, chosen(SMALL), H200)
    assert found.exposed_s == pytest.approx(0.0, abs=1e-9)
    assert found.busy_s[Queue.HOST] == found.busy_s[Queue.D2H] == found.busy_s[Queue.H2D] == 0.0


fractions = st.sampled_from([0.0, 0.25, 0.5, 1.0])


@given(fractions, fractions, st.sampled_from(list(Keep)), st.integers(1, 3))
@settings(deadline=None, max_examples=30)
def test_no_step_is_shorter_than_any_of_its_lanes(fraction: float, share: float, keep: Keep, microbatches: int) -> None:
    workload = replace(SMALL, microbatches=microbatches)
    found = predict(workload, chosen(workload, fraction, share, keep), H200)
    assert found.step_s >= max(found.busy_s.values()) * (1 - 1e-6)
    assert found.step_s >= found.compute_s * (1 - 1e-9)


@pytest.mark.parametrize(
    ("choice", "moving"),
    [
        (with_keeps(SMALL, (Keep.OFFLOAD, 4), (Keep.KEEP, 2)), (Queue.D2H, Queue.H2D)),
        (replace(chosen(SMALL, 1.0), gradients_on_host=True), (Queue.D2H,)),
    ],
)
def test_microbatches_in_between_are_work_as_well(choice: Choice, moving: tuple[Queue, ...]) -> None:
    """They are played once and counted; what comes and goes in each of them is as much as in the first and the last."""
    two, three, six = (predict(replace(SMALL, microbatches=n), choice, H200).busy_s for n in (2, 3, 6))
    for queue in moving:
        assert three[queue] == pytest.approx(1.5 * two[queue])
        assert six[queue] == pytest.approx(3 * two[queue])
    for queue in Queue:
        assert six[queue] - two[queue] == pytest.approx(4 * (three[queue] - two[queue]), abs=1e-9)
    assert six[Queue.HOST] > two[Queue.HOST] or not choice.gradients_on_host


@pytest.mark.parametrize("microbatches", [2, 3, 8])
def test_backward_waits_for_a_host_that_is_behind_with_its_sums(microbatches: int) -> None:
    """There are few landing places: the host's additions do not pile up."""
    several = replace(SMALL, microbatches=microbatches)
    slow = replace(H200, host_parameters_per_s=H200.host_parameters_per_s / 20)
    found = predict(several, replace(chosen(several, 1.0), gradients_on_host=True), slow)
    assert found.busy_s[Queue.HOST] > 2 * found.compute_s
    # What has landed when a microbatch ends is added while those in between are played.
    assert found.step_s >= 0.95 * found.busy_s[Queue.HOST]
    assert found.waited_s["gradients being offloaded"] > 0.0


@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])
def test_a_slower_host_never_makes_a_step_shorter(fraction: float) -> None:
    choice = chosen(SMALL, fraction)
    slower = replace(H200, host_parameters_per_s=H200.host_parameters_per_s / 2)
    assert predict(SMALL, choice, slower).step_s >= predict(SMALL, choice, H200).step_s * (1 - 1e-6)


def test_recomputation_costs_a_forward_of_the_layer() -> None:
    kept, again = (predict(SMALL, chosen(SMALL, keep=keep), H200) for keep in (Keep.KEEP, Keep.RECOMPUTE))
    layers = sum(cost.forward_s for cost in Costs(SMALL, H200).layers if cost.layer.repeated)
    assert again.step_s - kept.step_s == pytest.approx(layers)


@pytest.mark.parametrize(("sequences", "waits"), [(8, False), (1, True)])
def test_inputs_of_checkpointed_layers_leave_while_these_run(sequences: int, waits: bool) -> None:
    """If they are worth a copy of their own: 128 MiB are, 16 MiB are not."""
    workload = replace(llama(sequence=4096), microbatch_sequences=sequences)
    choice = with_keeps(workload, (Keep.RECOMPUTE_OFFLOAD, 23), (Keep.RECOMPUTE, 1))
    found = predict(workload, choice, H200)
    assert ("activations being offloaded" in found.waited_s) is waits


def test_weights_on_the_host_come_twice() -> None:
    workload = llama(layers=6, hidden=4096, ffn=16384)
    names = frozenset(layer.name for layer in workload.repeated[:4])
    here = chosen(workload, 1.0)
    found = predict(workload, replace(here, offloaded_weights=names), H200)
    weights = sum(layer.weight_bytes for layer in workload.repeated[:4])
    more = found.busy_s[Queue.H2D] - predict(workload, here, H200).busy_s[Queue.H2D]
    # Twice for each layer, instead of once as the step's result.
    assert more == pytest.approx(weights / H200.h2d_bytes_per_s, rel=0.05)


def test_why_names_the_host_and_the_tokens_that_would_hide_it() -> None:
    workload = llama()
    choice = chosen(workload, 1.0, 0.0, Keep.RECOMPUTE)
    costs, found = Costs(workload, H200), predict(workload, choice, H200)
    first = explain(costs, choice, found)[0]
    assert first.startswith(f"CPU AdamW {found.busy_s[Queue.HOST]:.2f} s does not fit within a {found.forward_s:.2f} s")
    tokens = int(first.split("; with ")[1].split(" K tokens")[0]) * 1024
    sequences = tokens // 4096
    enough = predict(replace(workload, microbatch_sequences=sequences), choice, H200)
    assert enough.exposed_s < 0.02 * enough.step_s
    half = predict(replace(workload, microbatch_sequences=sequences // 2), choice, H200)
    assert half.exposed_s > 0.02 * half.step_s


def test_hidden_offloading_says_so() -> None:
    workload = llama(batch=32)
    choice = chosen(workload, 0.25, 0.0, Keep.RECOMPUTE)
    costs = Costs(workload, H200)
    found = predict(workload, choice, H200)
    assert "overlaps with compute" in explain(costs, choice, found)[0]
    nothing = replace(found, step_s=found.compute_s + 1e-9)
    assert explain(costs, choice, nothing) == ["all of the offloading overlaps with compute"]
    assert explain(costs, choice, replace(found, step_s=found.compute_s + 1e-4))[0].startswith("all but 0.10 ms of")


@pytest.mark.parametrize("row", ["host:1+calm+early", "mix0.2:1+calm+early", "mix0.35:1+calm+early"])
def test_rows_stepped_during_backward_are_within_a_tenth(row: str) -> None:
    """With the rates that were measured in the same run. Seen red: guesses as fast as steps in place."""
    content = json.loads((RESULTS / "2026-11-28-step-early-calm-h200.json").read_text())
    rows = {found["row"]: found for found in content["rows"]}
    speeds = measured(H200, Rates(**rows["auto:1+calm"]["rates"]), None)
    placed = rows[row]["placed_parameters"]
    share = placed["streamed"] / (placed["streamed"] + placed["host"])
    workload = replace(llama(), step_early=1.0)
    found = predict(workload, chosen(workload, 1.0, share, CHECKPOINTED), speeds)
    assert found.step_s == pytest.approx(rows[row]["step_s"], rel=0.1)


@pytest.mark.parametrize("share", [0.3, 0.7, 1.0])
def test_steps_during_backward_use_the_time_in_which_the_cpu_was_idle(share: float) -> None:
    """Seen red: uploads that did not wait for the norm, and guesses counted after it as well."""
    workload = llama()
    choice = chosen(workload, 1.0, 0.0, CHECKPOINTED)
    after, during = (predict(replace(workload, step_early=of), choice, H200) for of in (0.0, share))
    assert during.step_s < after.step_s
    in_place_s = after.busy_s[Queue.HOST]
    guessed_s = (during.busy_s[Queue.HOST] - in_place_s) / (GUESS_SECONDS - 1)
    assert guessed_s == pytest.approx(share * in_place_s, rel=0.05)
    assert during.step_s >= max(during.busy_s[Queue.HOST], after.compute_s)
    # No gradients come early where the device keeps none of them for the CPU.
    alone = chosen(workload, 1.0, 1.0, CHECKPOINTED)
    assert predict(replace(workload, step_early=share), alone, H200) == predict(workload, alone, H200)


def test_layers_with_weights_on_the_host_are_not_stepped_during_backward() -> None:
    """As in training. Seen red: they were."""
    workload = llama()
    names = frozenset(layer.name for layer in workload.repeated)
    choice = replace(chosen(workload, 1.0, 0.0, CHECKPOINTED), offloaded_weights=names)
    after, during = (predict(replace(workload, step_early=of), choice, H200) for of in (0.0, 1.0))
    moved = Costs(replace(workload, step_early=1.0), H200).moved(choice)
    guessed = [u for u, early in zip(moved.offloaded, moved.guessed, strict=True) if early]
    assert {unit.layer for unit in guessed} == {layer.name for layer in workload.layers} - names
    longer_s = (GUESS_SECONDS - 1) * sum(unit.host_s for unit in guessed)
    assert during.busy_s[Queue.HOST] - after.busy_s[Queue.HOST] == pytest.approx(longer_s)


def test_short_waits_are_told_in_milliseconds() -> None:
    """Seen red: "0.00 s"."""
    tiny = llama(layers=2, hidden=256, ffn=512, heads=4, kv_heads=4, vocab=1000, sequence=64)
    slow = replace(H200, host_parameters_per_s=1e9)
    choice = chosen(tiny, 1.0)
    found = predict(tiny, choice, slow)
    text = " ".join(explain(Costs(tiny, slow), choice, found))
    assert "does not fit within a" in text
    assert "0.00 " not in text


def test_gpus_of_one_node_share_its_memory() -> None:
    one, four = speeds_of(profile("h200")), speeds_of(profile("h200"), 4)
    assert four.host_parameters_per_s == pytest.approx(7.2e9 / 4)
    assert four.h2d_bytes_per_s == pytest.approx(182e9 / 4)
    assert four.flops_per_s == one.flops_per_s
    workload = llama()
    choice = chosen(workload, 1.0)
    assert predict(workload, choice, four).step_s > predict(workload, choice, one).step_s


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize(
    ("given", "drawn_bytes_per_s"), [(224e9, 224e9), (150e9, 150e9), (None, 7.2e9 * HOST_STEP_BYTES)]
)
def test_host_and_link_of_all_gpus_together_draw_no_more_than_the_node_gives(
    gpus: int, given: float | None, drawn_bytes_per_s: float
) -> None:
    """Where it is not measured, it is the most that is known: here what the CPU steps of all ranks draw."""
    hardware = replace(profile("h200"), node_memory_bytes_per_s=given)
    shared = speeds_of(hardware, gpus)
    assert ("node_memory_bytes_per_s" in dict(shared.assumed)) is (given is None)

    def drawn(speeds: Speeds, copies: int) -> float:
        _, d2h, h2d, host = speeds.slowdown[4 + copies]
        stepped = host * speeds.host_parameters_per_s * HOST_STEP_BYTES
        moved = d2h * speeds.d2h_bytes_per_s * (copies & 1) + h2d * speeds.h2d_bytes_per_s * (copies >> 1)
        return stepped + moved

    assert gpus * drawn(shared, 3) == pytest.approx(drawn_bytes_per_s)
    for copies in (1, 2):
        assert drawn(shared, copies) <= drawn(shared, 3) * (1 + 1e-9)


@pytest.mark.parametrize("name", ["busy_duplex_bytes_per_s", "host_parameters_per_s"])
def test_a_rate_of_nothing_is_refused(name: str) -> None:
    wrong = replace(profile("h200"), **{name: 0.0})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"says {name} is 0"):
        speeds_of(wrong)


@pytest.mark.parametrize("name", list(PROFILES))
def test_every_shipped_profile_has_speeds_and_says_what_it_assumed(name: str) -> None:
    speeds = speeds_of(profile(name))
    assert speeds.flops_per_s > 0
    assert bool(speeds.assumed) == (profile(name).host_parameters_per_s is None)
    assert all(0 < speed <= 1 for row in speeds.slowdown for speed in row)
    assert 0 <= balanced_share(speeds, SMALL) < 1


def test_a_machine_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no GPU"):
        speeds_of(replace(profile("h200"), gpu=None, gpu_count=0, links=()))


def test_a_machine_of_which_nothing_is_known_is_refused() -> None:
    h200 = profile("h200")
    assert h200.gpu is not None
    unknown = replace(h200.gpu, bf16_matmul_flops_per_s=None, bf16_peak_flops_per_s=None)
    with pytest.raises(ConfigError, match=r"does not say gpu\.bf16_matmul_flops_per_s"):
        speeds_of(replace(h200, gpu=unknown))
