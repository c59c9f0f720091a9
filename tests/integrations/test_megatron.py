"""Megatron-Core's flags and loop, hostward's step: the same bits at every fraction, layout by layout, in late orders.

Seen red: every wait and fence left out (each has its case here); experts, or replicas of tensor parallelism, counted
twice in the norm; gradients that sequence parallelism adds up after their reduction, taken before, and those that are
accumulated beside their buffer; buffers that are cleared twice; gradients scaled on some ranks before the norm;
gradients that nobody scales, where an optimizer that was made before `stop_using` still waits for them; a bare model,
of which Megatron's AttributeError was all that one saw.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_ranks import Ranks, is_installed

pytestmark = pytest.mark.skipif(not is_installed(), reason="megatron-core is not installed")

LAYOUTS = {"single": 1, "dp2": 2, "tp2": 2, "pp2": 2, "pp2-interleaved": 2, "ep2": 2, "dp2-ep2": 4}
WORLDS = {**LAYOUTS, "dp4": 4, "dp2-tp2": 4, "dp2-pp2": 4}
PRECISE = {"use_precision_aware_optimizer": True, "overlap_cpu_optimizer_d2h_h2d": True}
OVERLAPPED = {**PRECISE, "overlap": True}
BF16_STATE = {**OVERLAPPED, **{f"{part}_dtype": torch.bfloat16 for part in ("exp_avg", "exp_avg_sq", "main_params")}}
DIVIDED = {"distribute_saved_activations": True}
CASES = "megatron_offload_cases"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


def bits(told: dict[str, Any]) -> dict[str, Any]:
    return {key: told[key] for key in ("digest", "losses", "grad_norms", "updated")}


def assert_near(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    np.testing.assert_allclose(ours["grad_norms"][:1], theirs["grad_norms"][:1], rtol=1e-6)  # of equal gradients
    np.testing.assert_allclose(ours["grad_norms"], theirs["grad_norms"], rtol=2e-3)
    if ours["losses"][0] is not None:
        np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_are_equal_at_every_fraction_and_near_to_megatrons(ranks: Ranks, layout: str) -> None:
    ways = [
        {"fraction": 0.0},
        {"fraction": 0.5},
        {"fraction": 1.0, "use": {"streamed_fraction": 0.5}},
    ]
    own = {"fraction": None, "use_precision_aware_optimizer": False}
    found = ranks.run(WORLDS[layout], f"{CASES}.trained", layout=layout, ways=[*ways, own], steps=3, **OVERLAPPED)
    for none, *some, theirs in found:
        assert none["placed"] == 0.0
        for each in some:
            assert bits(each) == bits(none)
            assert each["placed"] > 0.1
            assert each["one optimizer"]
            decoder = [layer for layer in each["layers"] if layer.startswith("decoder.layers.")]
            assert decoder == sorted(decoder)  # in the order of forward
        assert_near(none, theirs)


@pytest.mark.parametrize(
    "how",
    [
        PRECISE,
        {},
        {"overlap_cpu_optimizer_d2h_h2d": True, "overlap": True},
        {"precision": "fp16", "initial_loss_scale": 2.0**40},
        {"distributed": False},
        {"precision": "fp32", "distributed": False},
        {"layout": "ep2", "distributed": False},
        {**OVERLAPPED, "use": {"clip": "megatron"}},
        {**OVERLAPPED, "clip_grad": 0.0},
        {**OVERLAPPED, "log_num_zeros_in_grad": True},
        {**OVERLAPPED, "model": {"calculate_per_token_loss": True}},
        {**OVERLAPPED, "ddp": {"grad_reduce_in_fp32": False}},
        {**OVERLAPPED, "layout": "tp2", "model": {"sequence_parallel": True}, "late": "none"},
    ],
    ids=[
        "waits at the step", "main weights, no flag", "main weights, overlapped", "fp16, skipped steps",
        "Float16Optimizer", "FP32Optimizer", "experts, Float16Optimizer", "Megatron clips",
        "no clipping", "zeros are counted", "loss per token", "bf16 gradients", "sequence parallel",
    ],
)  # fmt: skip
def test_each_way_of_megatron(ranks: Ranks, how: dict[str, Any]) -> None:
    own = {"fraction": None, "use_precision_aware_optimizer": False, "use": {}}
    ways = [{"fraction": 0.0}, {"fraction": 1.0, "use": {**how.get("use", {}), "streamed_fraction": 0.5}}, own]
    for none, whole, theirs in ranks.run(2, f"{CASES}.trained", **{"layout": "dp2", "ways": ways, **how}):
        assert bits(whole) == bits(none)
        if "fp16" in how.values():
            assert not all(none["updated"])
        assert none["updated"] == theirs["updated"]
        kept = {k: [v for v in values if v is not None] for k, values in bits(none).items() if k != "digest"}
        assert_near(kept, {k: [v for v in theirs[k] if v is not None] for k in kept})


@pytest.mark.parametrize("layout", ["dp2", "ep2", "pp2-interleaved"])
def test_steps_during_backward_change_no_bit(ranks: Ranks, layout: str) -> None:
    """Some steps clip. Seen red: a copy of gradients that the guess did not wait for."""
    ways = [{"fraction": 0.0}, {"fraction": 1.0, "use": {"streamed_fraction": 0.0, "step_early": True}}]
    for clip_grad in (0.01, 1e3):
        options = {**OVERLAPPED, "clip_grad": clip_grad, "steps": 4}
        for none, early in ranks.run(2, f"{CASES}.trained", layout=layout, ways=ways, **options):
            assert bits(early) == bits(none)
            assert none["guessed"] == [0] * 4
            assert min(early["guessed"]) > 3


def test_the_optimizer_of_torch_overlaps_nothing(ranks: Ranks) -> None:
    own = {"fraction": None, "use_precision_aware_optimizer": False}
    how = {**OVERLAPPED, "use_torch_optimizer_for_cpu_offload": True}
    for ours, theirs in ranks.run(2, f"{CASES}.trained", layout="dp2", ways=[{"fraction": 1.0}, own], **how):
        assert_near(ours, theirs)


def total(told: list[Any]) -> tuple[dict[Any, int], set[Any]]:
    """State of all ranks added up, and the different weights that they have."""
    sums: Counter[Any] = Counter()
    for of_state, _ in told:
        for key, bits_of in of_state.items():
            sums[key] += bits_of
    return {key: value % 2**64 for key, value in sums.items()}, {weights for _, weights in told}


@pytest.mark.parametrize(
    ("one", "others", "how"),
    [
        ("single", ["dp2", "dp4"], OVERLAPPED),
        ("tp2", ["dp2-tp2"], {"overlap": True}),  # main weights
        ("pp2", ["dp2-pp2"], PRECISE),
        ("ep2", ["dp2-ep2"], OVERLAPPED),
    ],
)
def test_clipped_steps_are_equal_at_every_number_of_replicas(
    ranks: Ranks, one: str, others: list[str], how: dict[str, Any]
) -> None:
    """Of equal gradients: those of a model are rounded otherwise at other numbers. Weights are cut within chunks."""
    how = {"model": {"ffn_hidden_size": 128 if one == "single" else 136}, **how}
    expected = ranks.run(WORLDS[one], f"{CASES}.stepped", layout=one, **how)
    for other in others:
        found = ranks.run(WORLDS[other], f"{CASES}.stepped", layout=other, **how)
        assert {tuple(norms) for norms, _, _ in found} == {tuple(norms) for norms, _, _ in expected}
        assert total([told for _, told, _ in found]) == total([told for _, told, _ in expected])
        assert all(shared for _, _, shared in found)
        if one == "single":
            assert found[0][0][0] == 1.0
            untold = ranks.run(WORLDS[other], f"{CASES}.stepped", layout=other, told=False, **how)
            assert untold[0][0][0] == 1.0 + 2.0**-23  # gradients tell apart where chunks begin


@pytest.mark.parametrize("late", ["d2h", "h2d", "host", "update"])
def test_one_late_lane_changes_no_bit(ranks: Ranks, late: str) -> None:
    ways = [{"fraction": 0.0}, {"fraction": 1.0, "late": late, "use": {"streamed_fraction": 0.5, "clip": "megatron"}}]
    ways[0]["use"] = {"clip": "megatron"}
    for none, whole in ranks.run(2, f"{CASES}.trained", layout="dp2", ways=ways, **OVERLAPPED):
        assert bits(whole) == bits(none)


@pytest.mark.parametrize(("wait", "streamed"), [("before_read", 0.0), ("wait_for_gradients", 1.0)])
def test_without_a_wait_the_bits_differ(ranks: Ranks, wait: str, streamed: float) -> None:
    """Norm and clipping are Megatron's: reading hostward's norm would wait for much of the step."""
    way = {"fraction": 1.0, "use": {"streamed_fraction": streamed, "clip": "megatron"}}
    options = {"layout": "single", "ways": [way], "steps": 4, **OVERLAPPED}
    ((whole,),) = ranks.run(1, f"{CASES}.trained", **options)
    ((broken,),) = ranks.run(1, f"{CASES}.trained", without=[wait], **options)
    assert broken["digest"] != whole["digest"]


@pytest.mark.parametrize(
    ("layout", "form", "how", "ways"),
    [
        ("dp2", "dp_reshardable", OVERLAPPED, [1.0, 0.0]),
        ("ep2", "dp_reshardable", PRECISE, [1.0]),
        ("dp2", "fully_reshardable", {}, [1.0]),
        ("dp2", "dp_reshardable", {"distributed": False}, [1.0]),
        ("dp2", "dp_reshardable", BF16_STATE, [1.0, 0.0]),
        ("dp2", "dp_reshardable", {"precision": "fp32"}, [1.0]),
    ],
)
def test_checkpoints_load_at_another_fraction(
    ranks: Ranks, tmp_path: Path, layout: str, form: str, how: dict[str, Any], ways: list[float]
) -> None:
    options = {"saved": 0.5, "ways": ways, "form": form, "how": how}
    for whole, *again in ranks.run(2, f"{CASES}.resumed", layout=layout, folder=str(tmp_path), **options):
        assert [bits(each) for each in again] == [bits(whole)] * len(ways)


@pytest.mark.parametrize(
    ("before", "after", "form", "how"),
    [
        ("dp2", "single", "dp_reshardable", OVERLAPPED),
        ("single", "dp2", "fully_reshardable", {}),
        ("tp2", "dp2-tp2", "dp_reshardable", PRECISE),
        ("dp2-pp2", "pp2", "fully_reshardable", PRECISE),
        ("dp2", "single", "dp_zero_gather_scatter", PRECISE),
    ],
)
def test_checkpoints_load_with_another_number_of_replicas(
    ranks: Ranks, tmp_path: Path, before: str, after: str, form: str, how: dict[str, Any]
) -> None:
    options = {"folder": str(tmp_path), "how": how}
    saved = ranks.run(WORLDS[before], f"{CASES}.saved", layout=before, form=form, **options)
    loaded = ranks.run(WORLDS[after], f"{CASES}.loaded", layout=after, **options)
    assert total(loaded) == total(saved)


@pytest.mark.parametrize("own_saves", [True, False])
def test_checkpoints_of_megatrons_hybrid_optimizer_load_and_the_other_way(
    ranks: Ranks, tmp_path: Path, own_saves: bool
) -> None:
    options = {"own_saves": own_saves, "form": "dp_reshardable", "how": PRECISE}
    for stays, crosses in ranks.run(2, f"{CASES}.crossed", layout="dp2", folder=str(tmp_path), **options):
        np.testing.assert_allclose(crosses["losses"], stays["losses"], rtol=3e-5)
        np.testing.assert_allclose(crosses["grad_norms"], stays["grad_norms"], rtol=5e-4)


def test_weights_that_are_set_are_taken_up(ranks: Ranks) -> None:
    for how in (OVERLAPPED, {}, {"distributed": False}):
        for none, *whole in ranks.run(1, f"{CASES}.weights_are_reloaded", layout="single", how=how):
            assert [bits(each) for each in whole] == [bits(none)] * 2


@pytest.mark.parametrize("flags", [{}, {"use_precision_aware_optimizer": False}])
def test_main_weights_of_a_checkpoint_are_taken_up(ranks: Ranks, flags: dict[str, Any]) -> None:
    (found,) = ranks.run(1, "megatron_edge_cases.main_weights_of_a_checkpoint", **flags)
    assert found == {1.0 + 2.0**-20}


def test_clipping_before_a_step_is_refused(ranks: Ranks) -> None:
    (found,) = ranks.run(1, "megatron_edge_cases.clipping_before_a_step")
    assert all('use(clip="megatron")' in raised for raised in found)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"ddp": {"fp8_param_gather": True}}, "fp8_param_gather"),
        ({**PRECISE, "exp_avg_dtype": torch.float16}, "exp_avg_dtype"),
        ({**PRECISE, "main_params_dtype": torch.float16}, "main_params_dtype"),
        ({"optimizer": "sgd"}, "optimizer='sgd'"),
        ({"use": {"offload_fraction": 0.5}}, "optimizer_offload_fraction"),
        ({"use": {"module": None}}, "leave module out"),
        ({"use": {"streamed": 1}}, "no option 'streamed'"),
        ({"use": {"clip": "never"}}, "clip='never'"),
        ({**PRECISE, "use": {"step_early": True}}, "leave out step_early, or overlap_grad_reduce=False"),
        (
            {**OVERLAPPED, "use_torch_optimizer_for_cpu_offload": True, "use": {"step_early": True}},
            "leave out step_early, or use_torch_optimizer_for_cpu_offload",
        ),
        ({**OVERLAPPED, "use": {"step_early": True, "clip": "megatron"}}, 'leave out step_early, or clip="megatron"'),
        (
            {**OVERLAPPED, "use": {"step_early": True, "early_gradients": False}},
            "leave out step_early, or early_gradients=False",
        ),
        (
            {**OVERLAPPED, "use": {"step_early": 0.5}, "model": {"calculate_per_token_loss": True}},
            "divided by the number of tokens",
        ),
    ],
)
def test_what_the_step_cannot_do_is_refused(ranks: Ranks, how: dict[str, Any], why: str) -> None:
    (answer,) = ranks.run(1, f"{CASES}.refused", layout="single", **how)
    assert why in answer
    assert answer.startswith(("ConfigError", "UnknownNameError"))


def test_an_optimizer_that_is_refused_changes_no_model(ranks: Ranks) -> None:
    """Seen red: the optimizer of before had left its model chunks, and hooks of the one that was refused were there."""
    (found,) = ranks.run(1, "megatron_edge_cases.trained_on_after_a_refusal")
    assert found["error"].startswith('use(step_early=...) with clip="megatron": nothing could')
    assert found["with"] == found["without"]


def test_a_part_that_is_stepped_alone_is_refused(ranks: Ranks) -> None:
    (answer,) = ranks.run(1, f"{CASES}.stepped_alone")
    assert answer.startswith("OrderingError")


def test_a_megatron_without_a_needed_name_is_named(ranks: Ranks) -> None:
    (answer,) = ranks.run(1, f"{CASES}.without_a_name")
    assert answer.startswith("ConfigError: megatron-core 0.")
    assert "start_param_sync" in answer


def test_optimizers_made_before_stay_megatrons(ranks: Ranks) -> None:
    (found,) = ranks.run(1, "megatron_edge_cases.masters_after_reload_of_one_made_before")
    assert set(found) == {0.25}


def test_parts_of_a_chain_are_not_stepped_alone(ranks: Ranks) -> None:
    for raised, counts in ranks.run(2, "megatron_edge_cases.steps_of_a_part_alone"):
        assert "is stepped alone" in raised
        assert counts == {0}


def test_gradients_are_scaled_as_often_as_megatron_says(ranks: Ranks) -> None:
    ((early, late),) = ranks.run(1, "megatron_edge_cases.norms_of_halved_twice")
    assert early == late


def test_chunks_that_are_scaled_by_different_numbers_are_refused(ranks: Ranks) -> None:
    """Seen red: the factor of the first chunk was that of all."""
    for raised in ranks.run(2, "megatron_edge_cases.of_chunks_scaled_by_different_numbers"):
        assert "or by another number" in raised


def test_a_step_that_was_refused_is_made_again_with_its_factor(ranks: Ranks) -> None:
    """Seen red: gradients were not divided by the number of tokens."""
    ((again, whole),) = ranks.run(1, "megatron_edge_cases.norms_after_a_step_that_raised")
    assert again == whole


def test_a_state_of_other_groups_is_refused(ranks: Ranks) -> None:
    """Seen red: the learning rate of one group was that of both. Megatron's own optimizer raises."""
    (raised,) = ranks.run(1, "megatron_edge_cases.load_of_other_groups")
    assert "decoupled_lr" in raised


def test_gradients_are_scaled_where_none_leaves_early(ranks: Ranks) -> None:
    found = ranks.run(4, "megatron_edge_cases.norms_of_scaled_gradients")
    assert [early for early, _ in found] == [late for _, late in found] == [found[0][0]] * 4


def test_norms_are_told_before_steps(ranks: Ranks) -> None:
    ((before, told),) = ranks.run(1, "megatron_edge_cases.norms_before_steps")
    np.testing.assert_allclose(before, told, rtol=1e-6)


def test_gradients_are_cleared_beside_forward(ranks: Ranks) -> None:
    """On a device they are cleared when the step has read them, while forward runs: at the latest at its end."""
    ((at_once, late),) = ranks.run(1, "megatron_edge_cases.cleared_late")
    assert late == at_once
    for wrong in ({"written": True}, {"hooked": False}):
        for raised in ranks.run(1, "megatron_edge_cases.cleared_late", **wrong)[0]:
            assert "written between zero_grad_buffer() and the end of forward" in raised


@pytest.mark.parametrize("place", ["before", "after", "inner"])
def test_zeros_are_written_when_gradients_have_been_read(ranks: Ranks, place: str) -> None:
    """Seen red: weights that were stepped with zeros, and an error after `zero_grad_buffer`."""
    ((to_none, in_place),) = ranks.run(1, "megatron_edge_cases.zeroed_in_place", place=place)
    assert in_place == to_none


def test_gradients_beside_buffers_are_taken_when_they_are_reduced(ranks: Ranks) -> None:
    for early, late in ranks.run(2, "megatron_edge_cases.norms_with_gradients_beside_buffers"):
        assert early == late


def test_a_forward_that_raised_is_made_again(ranks: Ranks) -> None:
    ((again, whole),) = ranks.run(1, "megatron_edge_cases.norms_after_a_forward_that_raised")
    assert again == whole


def test_norms_of_groups_are_there_after_a_step(ranks: Ranks) -> None:
    assert ranks.run(1, "megatron_edge_cases.norms_of_groups") == [{}]


def test_another_optimizer_of_the_same_model_takes_its_place(ranks: Ranks) -> None:
    ((norms, alone, raised, gone),) = ranks.run(1, "megatron_edge_cases.norms_of_an_optimizer_made_anew")
    assert norms == alone
    assert "have another one by now" in raised
    assert gone


def test_an_optimizer_that_nobody_has_is_gone(ranks: Ranks) -> None:
    ((kept, alone), there, changed) = ranks.run(1, "megatron_edge_cases.weights_without_their_optimizer")[0]
    assert alone == kept
    assert not there
    assert changed == []


def test_gradients_that_nobody_cleared_are_not_stepped_with_again(ranks: Ranks) -> None:
    """Seen red: an error about a method that Megatron's users do not know."""
    for raised in ranks.run(1, "megatron_edge_cases.steps_without_cleared_gradients")[0]:
        assert "those of the last step were not cleared" in raised
        assert "fix: one step() for each backward, and zero_grad_buffer() of every model chunk" in raised


@pytest.mark.parametrize("stopped", [False, True])
def test_an_optimizer_of_megatron_takes_its_place(ranks: Ranks, stopped: bool) -> None:
    case = "megatron_edge_cases.norms_of_megatrons_own_that_is_made_anew"
    ((norms, alone, raised),) = ranks.run(1, case, stopped=stopped)
    assert norms == alone
    assert "have another one by now" in raised


def test_what_other_optimizers_and_newer_versions_do_is_refused(ranks: Ranks) -> None:
    (found,) = ranks.run(1, "megatron_edge_cases.refusals")
    assert [name for name, raised in found.items() if name not in raised] == []


@pytest.mark.parametrize("model", [{}, {"calculate_per_token_loss": True}], ids=["", "loss per token"])
def test_a_rank_with_nothing_to_step_shares_norms(ranks: Ranks, model: dict[str, Any]) -> None:
    found = ranks.run(2, "megatron_edge_cases.beside_a_frozen_stage", **model)
    assert [norms for norms, _ in found[0]] == [norms for norms, _ in found[1]]
    for (theirs, _), none, whole in found:
        assert whole == none
        np.testing.assert_allclose(none[0], theirs, rtol=1e-5)


def test_weights_of_several_dtypes_are_stepped(ranks: Ranks) -> None:
    for (theirs, _), none, whole, copies in ranks.run(2, "megatron_edge_cases.with_a_weight_in_fp32"):
        assert none == whole == copies
        np.testing.assert_allclose(none[0], theirs, rtol=1e-5)


def test_weights_that_were_moved_are_noticed(ranks: Ranks) -> None:
    assert "has been moved" in ranks.run(1, "megatron_edge_cases.step_after_weights_were_moved")[0]


def test_state_of_a_legacy_format_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Seen red: Megatron read it. A whole file was loaded without an error, and no state was written."""
    (raised,) = ranks.run(1, "megatron_edge_cases.load_of_a_legacy_format", path=str(tmp_path / "state"))
    assert "optimizer_cpu_offload=False" in raised


@pytest.mark.parametrize("clip", ["hostward", "megatron"])
def test_skipped_steps_are_told(ranks: Ranks, clip: str) -> None:
    (told,) = ranks.run(1, "megatron_edge_cases.told_of_a_gradient_that_is_not_finite", clip=clip)
    assert told == [True, False, True]


def test_process_groups_are_those_of_the_model(ranks: Ranks) -> None:
    for names in ranks.run(2, "megatron_edge_cases.waits_for_all_gradients"):
        assert names
        assert all("norm" in name for name in names)


def test_reductions_that_are_made_by_whoever_waits_are_left_to_megatron(ranks: Ranks) -> None:
    summed = {"reduce_scatter_with_fp32_accumulation": True, "grad_reduce_in_fp32": False}
    assert ranks.run(2, "megatron_edge_cases.takes_early") == [True, True]
    assert ranks.run(2, "megatron_edge_cases.takes_early", **summed) == [False, False]


@pytest.mark.parametrize(
    ("layout", "layers", "named"),
    [
        ("single", 3, ["layers.0", "layers.1"]),
        ("pp2", 4, ["layers.0"]),  # of two layers
        ("pp2-interleaved", 4, ["layers.0"]),  # of two chunks with one layer each
        ("pp2", 2, []),  # of one layer
    ],
)
def test_activations_of_its_layers_are_offloaded(ranks: Ranks, layout: str, layers: int, named: list[str]) -> None:
    """With several microbatches in flight between pipeline stages, too."""
    model = {"num_layers": layers, "cpu_offloading_num_layers": 2}
    for without, offloaded in ranks.run(WORLDS[layout], f"{CASES}.attached", layout=layout, model=model, num_layers=1):
        assert offloaded[0] == without[0]
        assert offloaded[3] == named
        assert bool(offloaded[1]) == bool(named)


@pytest.mark.parametrize(
    ("layout", "how", "inputs"),
    [
        ("single", {"recompute_method": "uniform", "recompute_num_layers": 2, "num_layers": 4}, 1),
        ("pp2", {"recompute_method": "uniform", "recompute_num_layers": 1, "num_layers": 4}, 1),
        ("tp2", {"recompute_method": "block", "recompute_num_layers": 2, "num_layers": 3, **DIVIDED}, 2),
    ],
)
def test_inputs_of_layers_that_are_recomputed_are_offloaded(
    ranks: Ranks, layout: str, how: dict[str, Any], inputs: int
) -> None:
    model = {"recompute_granularity": "full", "cpu_offloading_num_layers": 1, **how}
    nbytes = 32 * 2 * 64 * 2 // (2 if DIVIDED.items() <= how.items() else 1)
    for without, offloaded in ranks.run(WORLDS[layout], f"{CASES}.attached", layout=layout, model=model):
        assert offloaded[0] == without[0]
        assert offloaded[1] == inputs * nbytes * 4 * 2  # microbatches and steps
        assert offloaded[2] >= (inputs - 1) * nbytes * 4 * 2  # the model has the first one until its forward ends


def test_what_megatron_offloads_itself_is_refused(ranks: Ranks) -> None:
    refused = f"{CASES}.attach_is_refused"
    assert "cpu_offloading=False" in ranks.run(1, refused, cpu_offloading=True, cpu_offloading_num_layers=1)[0]
    assert "cpu_offloading_weights=True" in ranks.run(1, refused, cpu_offloading_weights=True)[0]
    assert "no number of layers" in ranks.run(1, refused)[0]
    assert "at most 1 can be offloaded" in ranks.run(1, refused, activations=2)[0]
    assert "part of a larger buffer" in ranks.run(1, f"{CASES}.weights_are_refused")[0]
