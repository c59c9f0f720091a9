"""The plan as a file: read back, edited, compared, refused.

Seen red: a placement that is no word accepted, buckets compared by size alone, a digest that leaves dtypes out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from workload_cases import chosen, llama

from hostward.core.inventory import Dtype, Inventory, StateFormat, cut_buckets
from hostward.core.placement import Placement
from hostward.errors import ConfigError
from hostward.plan import plan_file
from hostward.plan.budgets import Budgets
from hostward.plan.cost_model import Costs, speeds_of
from hostward.plan.decisions import Choice, Keep
from hostward.plan.hardware_profile import profile
from hostward.plan.memory_model import required
from hostward.plan.plan_file import PlanFile, plan_of
from hostward.plan.search import Candidate
from hostward.plan.step_time import predict
from hostward.plan.workload import Workload, in_format

WORKLOAD = llama(layers=4, hidden=512, ffn=2048, heads=8, kv_heads=8, vocab=4000, sequence=1024)
H200 = profile("h200")


def made(workload: Workload, choice: Choice) -> PlanFile:
    candidate = Candidate(choice, required(workload, choice), Costs(workload, speeds_of(H200)))
    return plan_of(workload, H200, 1, Budgets(1 << 34), candidate)


CHOICE = replace(chosen(WORKLOAD, 0.5, 0.5, Keep.RECOMPUTE), offloaded_weights=frozenset())
PLAN = made(WORKLOAD, CHOICE)


def edited(**changes: Any) -> str:
    return json.dumps({**json.loads(PLAN.to_json()), **changes})


OF = json.loads(PLAN.to_json())["workload"]
LAYERS = json.loads(PLAN.to_json())["layers"]


def test_a_plan_reads_back_and_decides_what_was_decided(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_file.save(PLAN, path)
    found = plan_file.load(path)
    assert found == PLAN
    assert found.choice(WORKLOAD) == CHOICE
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_from_before_there_was_a_frontier_in_it_is_read() -> None:
    content = json.loads(PLAN.to_json())
    del content["frontier"]
    assert PlanFile.from_json(json.dumps(content)) == PLAN


@pytest.mark.parametrize("switch", ["pin_gradients", "pin_weights"])
def test_what_is_not_page_locked_is_in_the_plan(switch: str) -> None:
    unpinned = replace(WORKLOAD, **{switch: False})  # type: ignore[arg-type]
    plan = made(unpinned, CHOICE)
    found = PlanFile.from_json(plan.to_json())
    assert getattr(found, switch) is False
    assert found.choice(WORKLOAD) == CHOICE
    assert found.predicted.pinned_bytes < PLAN.predicted.pinned_bytes
    assert f"{switch}: True -> False" in plan_file.differences(PLAN, found)
    content = json.loads(PLAN.to_json())
    del content[switch]
    assert PlanFile.from_json(json.dumps(content)) == PLAN


def test_what_is_stepped_during_backward_is_in_the_plan() -> None:
    plan = made(replace(WORKLOAD, step_early=0.5), CHOICE)
    found = PlanFile.from_json(plan.to_json())
    assert found.step_early == 0.5
    assert found.choice(WORKLOAD) == CHOICE
    assert found.predicted.host_bytes > PLAN.predicted.host_bytes
    assert "step_early: 0 -> 0.5" in plan_file.differences(PLAN, found)
    content = json.loads(PLAN.to_json())
    del content["step_early"]
    assert PlanFile.from_json(json.dumps(content)) == PLAN


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"step_early": 1.5}, "step_early is 1.5, not in [0, 1]"),
        ({"step_early": 0.5, "gradients_on_host": True}, "step_early is set, and gradients_on_host is true"),
    ],
)
def test_a_share_that_nothing_can_step_is_refused(changed: dict[str, object], why: str) -> None:
    """Seen red: a plan that no optimizer takes was read."""
    content = json.loads(PLAN.to_json()) | changed
    with pytest.raises(ConfigError) as caught:
        PlanFile.from_json(json.dumps(content))
    assert why in str(caught.value)


def test_its_bytes_and_seconds_are_the_models() -> None:
    needs = required(WORKLOAD, CHOICE)
    assert PLAN.predicted.device_peak_bytes == needs.device_peak_bytes
    assert PLAN.predicted.pinned_bytes == needs.pinned_bytes
    assert PLAN.predicted.step_s == predict(WORKLOAD, CHOICE, speeds_of(H200)).step_s


def test_an_edited_placement_counts() -> None:
    content = json.loads(PLAN.to_json())
    for bucket in content["buckets"]:
        if bucket["bucket"].endswith(".layers.0"):
            bucket["placement"] = "host"
    content["buckets"][0]["placement"] = "host"
    content["layers"][1]["activations"] = "offload"
    content["layers"][0]["weights"] = "host"
    found = PlanFile.from_json(json.dumps(content)).choice(WORKLOAD)
    assert found.placements[0] is Placement.HOST
    assert found.activations[1] is Keep.OFFLOAD
    assert found.offloaded_weights == {"layers.0"}


def test_placements_alone_for_an_optimizer() -> None:
    plan = PLAN.placements(WORKLOAD.inventory.buckets)
    assert tuple(b.placement for b in plan.buckets) == CHOICE.placements
    assert plan.asked_fraction == pytest.approx(0.5, abs=0.1)


MOMENTS = StateFormat(Dtype.BF16, Dtype.BF16)


def test_a_plan_of_other_state_dtypes_is_refused() -> None:
    """Seen red: AdamW with fp32 moments took a plan for moments in bf16, and 4 bytes more for each parameter."""
    smaller = in_format(WORKLOAD, MOMENTS)
    text = "for optimizer state with exp_avg in fp32, exp_avg_sq in fp32, and here it has exp_avg in bf16"
    with pytest.raises(ConfigError, match=text):
        PLAN.placements(smaller.inventory.buckets)
    with pytest.raises(ConfigError, match=text) as caught:
        PLAN.choice(smaller)
    assert 'AdamW(state_dtypes={"exp_avg": torch.float32, "exp_avg_sq": torch.float32})' in caught.value.fix
    (line,) = (line for line in plan_file.differences(PLAN, made(smaller, CHOICE)) if "state:" in line)
    assert line == (
        "workload.state: exp_avg in fp32, exp_avg_sq in fp32, main_param in fp32 -> exp_avg in bf16, exp_avg_sq in "
        "bf16, main_param in fp32"
    )
    content = json.loads(PLAN.to_json())
    del content["workload"]["state"]
    assert PlanFile.from_json(json.dumps(content)).placements(smaller.inventory.buckets).buckets


def test_a_plan_for_fp8_knows_that_vectors_have_bf16() -> None:
    workload = in_format(WORKLOAD, StateFormat(Dtype.FP8, Dtype.FP8))
    buckets = workload.inventory.buckets
    assert {bucket.form for bucket in buckets} == {workload.inventory.form, MOMENTS}
    found = PlanFile.from_json(made(workload, chosen(workload, 0.5, 0.5, Keep.RECOMPUTE)).to_json())
    assert found.placements(buckets).buckets


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("[]", "not an object"),
        (edited(format="other"), 'its format is "other"'),
        (edited(version=2), "it has version 2"),
        (json.dumps({"version": 2, "rows": []}), "it has version 2"),
        (edited(gradients_on_host="yes"), "not true or false"),
        (
            edited(buckets=[{"bucket": "a", "numel": 1, "placement": "gpu"}]),
            r'buckets\[0\].placement is "gpu", not one of',
        ),
        (edited(buckets=[{"bucket": "a", "numel": -1, "placement": "host"}]), "negative"),
        (
            edited(layers=[{"layer": "a", "activations": "drop", "weights": "device"}]),
            'activations is "drop"',
        ),
        (edited(layers=[{"layer": "a", "activations": "keep", "weights": "disk"}]), "weights is 'disk'"),
        (edited(workload={**OF, "ranks": 0}), r"workload\.ranks is 0"),
        (edited(workload={**OF, "ranks": 3}), r"workload\.ranks is 3, machine\.gpus is 1"),
        (edited(workload={**OF, "microbatches": 0}), r"workload\.microbatches is 0"),
        (edited(workload={**OF, "parameters": 7}), r"workload\.parameters is 7, its buckets have \d+"),
        (
            edited(layers=[{**layer, "weights": "host"} for layer in LAYERS]),
            r"layers\[0\].weights is host, and buckets\[\d+\] of",
        ),
        (edited(extra=1), "key 'extra' is unknown"),
        (edited(predicted={}), "is missing"),
        ("[" * 100_000, "nested too deeply"),
        (edited(staging_bytes=1.5), "not a whole number"),
    ],
)
def test_nonsense_is_refused_with_its_place(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        PlanFile.from_json(text, "plan.json")
    assert caught.value.what == "plan.json cannot be used as a plan"


def test_a_plan_of_another_model_is_refused() -> None:
    other = llama(layers=5, hidden=512, ffn=2048, heads=8, kv_heads=8, vocab=4000, sequence=1024)
    for use in (lambda: PLAN.choice(other), lambda: PLAN.placements(other.inventory.buckets)):
        with pytest.raises(ConfigError, match="of another model: llama, ") as caught:
            use()
    assert "buckets, the model has" in caught.value.why
    with pytest.raises(ConfigError) as caught:
        PLAN.choice(other)
    assert caught.value.why == "it has 4 layers, the model has 5"


def test_a_plan_of_the_same_sizes_with_other_types_is_refused() -> None:
    parts = tuple(replace(p, dtype=Dtype.FP16) for p in WORKLOAD.inventory.parameters)
    other = replace(WORKLOAD, inventory=Inventory(parts, cut_buckets(parts)))
    for refusing in (PLAN.choice, lambda workload: PLAN.placements(workload.inventory.buckets)):
        with pytest.raises(ConfigError, match="for weights in bf16, and here they are in fp16"):
            refusing(other)
    assert "workload.weights: bf16 -> fp16" in plan_file.differences(PLAN, made(other, CHOICE))
    content = json.loads(PLAN.to_json())
    del content["workload"]["weights"]
    before = PlanFile.from_json(json.dumps(content))
    assert before.placements(other.inventory.buckets).buckets
    with pytest.raises(ConfigError, match="other sizes or element types"):
        before.choice(other)


def test_a_missing_bucket_and_a_renamed_layer_are_named() -> None:
    content = json.loads(PLAN.to_json())
    content["buckets"][1]["bucket"] = "0001.other"
    with pytest.raises(ConfigError, match="bucket 1 is"):
        PlanFile.from_json(json.dumps(content)).choice(WORKLOAD)
    content = json.loads(PLAN.to_json())
    content["layers"][2]["layer"] = "layers.9"
    with pytest.raises(ConfigError, match=r"layer 2 is layers\.9 in the plan"):
        PlanFile.from_json(json.dumps(content)).choice(WORKLOAD)


def test_a_plan_for_more_gpus_is_refused() -> None:
    """Were it not, a part would be taken for the whole of a smaller model of the same shape."""
    shared = replace(PLAN, workload=replace(PLAN.workload, ranks=4), machine=replace(PLAN.machine, gpus=4))
    assert PlanFile.from_json(shared.to_json()) == shared
    with pytest.raises(ConfigError, match="shards the model among 4 GPUs, and here it is 1"):
        shared.choice(WORKLOAD)


def test_a_plan_for_another_gpu_is_refused() -> None:
    PLAN.require_machine("NVIDIA H200")
    with pytest.raises(ConfigError, match="is for NVIDIA H200, this GPU is NVIDIA A10"):
        PLAN.require_machine("NVIDIA A10")


def test_differences_are_told_in_runs() -> None:
    other = made(WORKLOAD, replace(CHOICE, activations=(Keep.KEEP, *CHOICE.activations[1:3], Keep.KEEP)))
    lines = plan_file.differences(PLAN, other)
    assert "saved activations of layers.0: recompute -> keep" in lines
    assert "saved activations of layers.3: recompute -> keep" in lines
    assert any(line.startswith("predicted.step_s: ") for line in lines)
    assert not any(line.startswith("optimizer state") for line in lines)
    assert plan_file.differences(PLAN, PLAN) == []
    everything = made(WORKLOAD, chosen(WORKLOAD, 1.0, 0.0, Keep.RECOMPUTE))
    changed = plan_file.differences(PLAN, everything)
    assert not [line for line in changed if "bucket" in line or "0000." in line]
    (first, *_) = [line for line in changed if line.startswith("optimizer state")]
    assert re.fullmatch(r"optimizer state of [\w.]+( to [\w.]+)?: device -> host", first)


def test_seconds_that_were_added_up_in_another_order_are_no_difference() -> None:
    """Seen red: "a step 2.168e-19 s shorter (-0.0%)"."""
    step_s = math.nextafter(PLAN.predicted.step_s, 0.0)
    other = replace(PLAN, predicted=replace(PLAN.predicted, step_s=step_s), step_early=0.25)
    assert plan_file.differences(PLAN, other) == ["step_early: 0 -> 0.25"]
    assert plan_file.summary(PLAN, other).endswith(", a step as long")


def test_a_difference_within_a_layer_is_told() -> None:
    """Shares of a layer's parameters, and where these are equal, that the parameters are others."""
    layer = [i for i, row in enumerate(PLAN.buckets) if row.bucket.endswith(".layers.1")]
    first, second = (i for i in layer if PLAN.buckets[i].numel == PLAN.buckets[layer[0]].numel and i in layer[:2])

    def placed(host: int) -> plan_file.PlanFile:
        rows = list(PLAN.buckets)
        for i in layer:
            rows[i] = replace(rows[i], placement=Placement.HOST if i == host else Placement.DEVICE)
        return replace(PLAN, buckets=tuple(rows))

    (line,) = plan_file.differences(placed(first), placed(-1))
    assert re.fullmatch(r"optimizer state of layers.1: device \d+%, host \d+% -> device", line)
    (line,) = plan_file.differences(placed(first), placed(second))
    same = r"device \d+%, host \d+% in both plans, but not of the same parameters"
    assert re.fullmatch(f"optimizer state of layers.1: {same}", line)


def test_layers_that_differ_in_many_ways_are_told_of_together() -> None:
    """Seen red: a line for each of them, 28 for a plan of 36 layers."""
    workload = llama(layers=12, hidden=256, ffn=512, heads=8, kv_heads=8, vocab=400, sequence=256)
    rows = made(workload, chosen(workload, 1.0, 0.0, Keep.KEEP))
    repeated = [row.layer for row in rows.layers]

    def placed(devices: Sequence[str]) -> plan_file.PlanFile:
        """With the state of these layers on the device."""
        buckets = (
            replace(row, placement=Placement.DEVICE if row.layer in devices else row.placement) for row in rows.buckets
        )
        return replace(rows, buckets=tuple(buckets))

    assert plan_file.differences(rows, placed(repeated[1:9:2])) == [
        f"optimizer state of layers.{i}: host -> device" for i in (1, 3, 5, 7)
    ]
    assert plan_file.differences(rows, placed(repeated[1:11:2])) == [
        "optimizer state of layers.1-9, taken together: host -> device 56%, host 44%"
    ]
    assert plan_file.differences(rows, placed(repeated[:10])) == ["optimizer state of layers.0-9: host -> device"]
    longer = placed(repeated[1:11:2])
    shorter = replace(longer, buckets=tuple(row for row in longer.buckets if not row.layer.startswith("layers.")))
    assert plan_file.differences(shorter, longer) == [
        "optimizer state of layers.0-11, taken together: (not there) -> device 42%, host 58%"
    ]


def test_a_line_says_what_the_second_plan_gains_and_loses() -> None:
    gib = 1 << 30
    before = replace(PLAN, predicted=replace(PLAN.predicted, device_peak_bytes=8 * gib, host_bytes=gib, step_s=2.0))
    after = replace(PLAN, predicted=replace(PLAN.predicted, device_peak_bytes=5 * gib, host_bytes=3 * gib, step_s=2.5))
    assert plan_file.summary(before, after) == (
        "predicted of the second plan: 3.0 GiB less device memory, 2.0 GiB more host memory, "
        "a step 0.5 s longer (+25.0%)"
    )
    assert plan_file.summary(after, before).endswith("a step 0.5 s shorter (-20.0%)")
    same = "predicted of the second plan: as much device memory, as much host memory, a step as long"
    assert plan_file.summary(PLAN, PLAN) == same
    edited = replace(PLAN, layers=PLAN.layers[::-1])
    assert "from before it was edited" in plan_file.summary(PLAN, edited)


def test_unreadable_and_unwritable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        plan_file.load(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        plan_file.load(tmp_path / "binary")
    with pytest.raises(ConfigError, match="cannot be written"):
        plan_file.save(PLAN, tmp_path / "none" / "plan.json")
