"""Bytes that the memory model tells, against those that the optimizer and the attachment really take."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import MIXES
from tape_cases import built, loss_of, tokens

import hostward
from hostward.checkpoint import api
from hostward.core.placement import Placement
from hostward.plan.decisions import Choice, Keep
from hostward.plan.memory_model import LOAD, SAVE, STEADY_STEP, required, save_bytes
from hostward.plan.workload import Workload
from hostward.profiler.workload import workload_of
from hostward.runtime.backend import Tier

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WORKSPACES = 12
"""Scalars of the step; the simulated device launches no kernels that read tables."""


@cache
def work(dtype: str = "bf16", microbatches: int = 1, layers: int = 4) -> Workload:
    model = built("Llama", "meta", DTYPES[dtype], "sdpa", num_hidden_layers=layers)
    return workload_of(model, sequence_tokens=24, microbatch_sequences=2, microbatches=microbatches, loss=loss_of)


def held(optimizer: Any, tier: Tier, *owners: str) -> int:
    """Bytes in the ledger, of these owners or of all but weights."""
    ledger = optimizer.backend.ledger.held_bytes
    wanted = owners or {owner for t, owner in ledger if t is tier and owner != "weights"}
    return sum(ledger.get((tier, owner), 0) for owner in wanted)


def kept(workload: Workload, optimizer: Any, on_host: bool = False) -> Choice:
    placements = tuple(b.placement for b in optimizer.plan.buckets)
    return Choice(placements, (Keep.KEEP,) * len(workload.repeated), gradients_on_host=on_host)


@pytest.mark.parametrize(
    ("dtype", "microbatches", "gradients"),
    [
        *((dtype, microbatches, "device") for dtype in DTYPES for microbatches in (1, 2)),
        *((dtype, 2, "host") for dtype in ("bf16", "fp32")),  # fp16 shows nothing that these do not
    ],
)
@pytest.mark.parametrize("mix", MIXES)
def test_host_bytes_are_those_of_the_ledger(dtype: str, mix: str, microbatches: int, gradients: str) -> None:
    workload = work(dtype, microbatches)
    options: dict[str, Any] = dict(MIXES[mix])
    if microbatches > 1 and gradients == "device" and dtype != "fp32":
        options["grad_dtype"] = torch.float32
    optimizer = hostward.AdamW(
        built("Llama", "cpu", DTYPES[dtype], num_hidden_layers=4), gradients=gradients, **options
    )
    needs = required(workload, kept(workload, optimizer, gradients == "host")).phase(LOAD)
    host = {k: v for k, v in needs.host.items() if k != "workspaces"}
    assert sum(host.values()) + WORKSPACES == held(optimizer, Tier.HOST)
    locked = {k: v for k, v in needs.pinned.items() if k != "workspaces"}
    assert sum(locked.values()) + WORKSPACES == optimizer.backend.ledger.pinned_bytes
    state = held(optimizer, Tier.DEVICE, "exp_avg", "exp_avg_sq", "remainder", "master")
    counts = 8 * sum(
        len(bucket.ranges)
        for bucket, placed in zip(optimizer.inventory.buckets, optimizer.plan.buckets, strict=True)
        if placed.placement is Placement.DEVICE
    )
    assert needs.device.get("optimizer state", 0) == state + counts
    assert needs.device["workspaces"] == held(optimizer, Tier.DEVICE, "norm partials")


@pytest.mark.parametrize("gradients", ["device", "host"])
@pytest.mark.parametrize("pins", [(False, True), (True, False), (False, False)])
@pytest.mark.parametrize("mix", ["host", "mixed"])
def test_page_locked_bytes_follow_the_switches(mix: str, pins: tuple[bool, bool], gradients: str) -> None:
    workload = replace(work("fp32", 2), pin_gradients=pins[0], pin_weights=pins[1])
    model = built("Llama", "cpu", torch.float32, num_hidden_layers=4)
    switches = {"pin_gradients": pins[0], "pin_weights": pins[1]}
    optimizer = hostward.AdamW(model, gradients=gradients, **MIXES[mix], **switches)  # type: ignore[arg-type]
    needs = required(workload, kept(workload, optimizer, gradients == "host")).phase(LOAD)
    locked = {k: v for k, v in needs.pinned.items() if k != "workspaces"}
    assert sum(locked.values()) + WORKSPACES == optimizer.backend.ledger.pinned_bytes


@pytest.mark.parametrize("share", [0.4, 1.0])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("mix", ["host", "mixed"])
def test_a_second_set_of_the_state_takes_the_host_bytes_that_were_told(mix: str, dtype: str, share: float) -> None:
    """Seen red: one set of weights counted."""
    workload = replace(work(dtype), step_early=share)
    optimizer = hostward.AdamW(
        built("Llama", "cpu", DTYPES[dtype], num_hidden_layers=4), step_early=share, **MIXES[mix]
    )
    choice = kept(workload, optimizer)
    needs = required(workload, choice).phase(LOAD)
    host = {k: v for k, v in needs.host.items() if k != "workspaces"}
    assert sum(host.values()) + WORKSPACES == held(optimizer, Tier.HOST)
    locked = {k: v for k, v in needs.pinned.items() if k != "workspaces"}
    assert sum(locked.values()) + WORKSPACES == optimizer.backend.ledger.pinned_bytes
    once = required(work(dtype), choice).phase(LOAD)
    assert needs.host_bytes > once.host_bytes
    assert needs.device == once.device


@pytest.mark.parametrize("mode", ["stream", "snapshot"])
def test_a_save_takes_the_host_bytes_that_were_told(mode: str, tmp_path: Path) -> None:
    workload, model = work(), built("Llama", "cpu", torch.bfloat16, num_hidden_layers=4)
    optimizer = hostward.AdamW(model, **MIXES["host"])
    needs = required(replace(workload, snapshot=mode == "snapshot"), kept(workload, optimizer))
    before = held(optimizer, Tier.HOST)
    saver = api.Saver(tmp_path, mode=mode)  # type: ignore[arg-type]
    saver.save(1, tensors=api.parts_of(model, optimizer).tensors, plain={})
    taken = held(optimizer, Tier.HOST) - before
    saver.close()
    told = needs.phase(SAVE).host["copies for a checkpoint"]
    assert told <= taken <= 1.01 * told  # places in a snapshot are aligned
    assert (
        needs.phase(STEADY_STEP).host.get("copies for a checkpoint", 0)
        == (mode == "snapshot") * save_bytes(workload)[1]
    )
    assert held(optimizer, Tier.HOST) == before


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("mode", ["stream", "snapshot"])
def test_a_save_of_weights_that_are_not_trained_takes_the_host_bytes_that_were_told(
    mode: str, away: bool, tmp_path: Path
) -> None:
    """Most of a model that is trained by adapters. Seen red: a snapshot took 40 times what was told."""

    def trained(device: str) -> Any:
        model = built("Llama", device, torch.bfloat16, "sdpa", num_hidden_layers=4)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
        return model

    described = workload_of(trained("meta"), sequence_tokens=24, loss=loss_of)
    workload, model = replace(described, snapshot=mode == "snapshot"), trained("cpu")
    optimizer = hostward.AdamW(model, **MIXES["host"])
    layers = frozenset(layer.name for layer in workload.repeated[:3]) if away else frozenset()
    needs = required(workload, replace(kept(workload, optimizer), offloaded_weights=layers))
    before = held(optimizer, Tier.HOST)
    saver = api.Saver(tmp_path, mode=mode)  # type: ignore[arg-type]
    with hostward.attach(model, optimizer, weights=3) if away else nullcontext():
        saver.save(1, tensors=api.parts_of(model, optimizer).tensors, plain={})
        taken = held(optimizer, Tier.HOST) - before
        saver.close()
    frozen = sum(p.nbytes for _, p in model.named_parameters() if not p.requires_grad)
    told = needs.phase(SAVE).host["copies for a checkpoint"]
    assert (mode == "snapshot") * frozen < taken <= 1.1 * told  # places in a snapshot are aligned
    buffers, copies = save_bytes(workload)
    assert frozen < copies < 2 * frozen
    alone = sum(layer.frozen_weight_bytes for layer in workload.repeated[:3]) if away else 0
    assert told == buffers + (copies if mode == "snapshot" else alone)


def run_once(model: Any, ids: torch.Tensor) -> None:
    loss_of(model, ids).backward()


@pytest.mark.parametrize(
    ("keep", "recompute"),
    [(Keep.OFFLOAD, None), (Keep.ELEMENTWISE_OFFLOAD, ("layernorm", "mlp_act"))],
)
def test_offloaded_activations_take_the_host_bytes_that_were_told(
    keep: Keep, recompute: tuple[str, ...] | None
) -> None:
    workload, model = work("fp32"), built("Llama", "cpu", attention="sdpa", num_hidden_layers=4)
    how = hostward.Activations(num_layers=2, min_bytes=1)
    with hostward.attach(model, activations=how, recompute=recompute) as run:
        run_once(model, tokens("cpu"))
        measured = run.report().offloaded_bytes
    rest = Keep.KEEP if recompute is None else Keep.ELEMENTWISE
    choice = Choice((Placement.DEVICE,) * len(workload.inventory.buckets), (keep, keep, rest, rest))
    predicted = required(workload, choice).phase(STEADY_STEP).host["activations"]
    assert measured == pytest.approx(predicted, rel=0.01)
