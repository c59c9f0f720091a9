"""Adapters of peft: their gradients keep their bits, and the report says what was saved.

Seen red: wrappers in whose modules nobody looks for layers; a report without its sentence; weights that are copied.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from activation_cases import FEW, left_over, loss_of, same, transformer

import hostward
from hostward.runtime.simulated.backend import Order, SimulatedBackend

peft = pytest.importorskip("peft")

pytestmark = [
    # What peft and transformers say of each other's names.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning"),
]
LAYERS = [f"base_model.model.model.layers.{i}" for i in range(3)]


def adapted(base: torch.dtype, reentrant: bool | None) -> Any:
    """A tiny Llama, frozen, with adapters on the queries and values. `reentrant`: how layers are checkpointed."""
    frozen = transformer("Llama").to(base)
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(frozen, config)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)  # zeros would give the other factor no gradient
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    return model.train()


def trained(
    model: Any, order: Order | None = None, weights: hostward.Weights | None = None
) -> tuple[list[torch.Tensor], hostward.ActivationReport | None]:
    """Three steps: gradients of every step and weights after the last, with `order` offloaded in that order; with
    `weights` those of the frozen base as well.
    """
    torch.manual_seed(2)  # dropout
    backend = SimulatedBackend(threads=1, order=order or Order(eager=True))
    optimizer = hostward.AdamW(model, lr=1e-2, max_grad_norm=1.0, offload_fraction=1.0, backend=backend)
    attached = None
    if order is not None:
        attached = hostward.attach(model, optimizer, activations=hostward.Activations(min_bytes=64), weights=weights)
        assert attached.layers == LAYERS
        if weights is not None:
            frozen, adapters = 0, 0
            for p in model.get_submodule(LAYERS[0]).parameters():
                frozen, adapters = frozen + p.nbytes * (not p.requires_grad), adapters + p.nbytes * p.requires_grad
            told = attached.report().weights
            assert told is not None
            # Of adapters, which the host steps, the optimizer has the one copy there is on the host.
            assert (told.host_bytes, told.offloaded_bytes) == (3 * frozen, 3 * (frozen + adapters))
            assert told.here_bytes == 0
    found = []
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, step)
        loss.backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    report = None
    if attached is not None:
        assert left_over(attached) == 0
        report = attached.report()
        attached.detach()  # weights come back
    found += [p.detach().clone() for p in model.parameters()]
    return found, report


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["saved", "reentrant", "checkpointed"])
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16], ids=str)
def test_s11_adapters_train_the_same_bits(base: torch.dtype, reentrant: bool | None) -> None:
    expected, _ = trained(adapted(base, reentrant))
    for order in FEW:
        found, report = trained(adapted(base, reentrant), order)
        assert same(found, expected), order
        assert report is not None
        assert report.offloaded_bytes == report.reloaded_bytes > 0
        assert report.on_demand_bytes == 0
        if reentrant is not None:
            inputs = 3 * 3 * 2 * 24 * 64 * base.itemsize  # steps, layers, batch, sequence, hidden, bytes
            assert report.offloaded_bytes == inputs


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["saved", "reentrant", "checkpointed"])
def test_s11_adapters_train_the_same_bits_with_their_base_on_the_host(reentrant: bool | None) -> None:
    expected, _ = trained(adapted(torch.bfloat16, reentrant))
    for order in FEW:
        found, report = trained(adapted(torch.bfloat16, reentrant), order, hostward.Weights(min_elements=0))
        assert same(found, expected), order
        assert report is not None
        assert report.offloaded_bytes == report.reloaded_bytes > 0


def test_frozen_weights_stay_and_casts_of_them_leave() -> None:
    """autocast keeps no copy of a frozen weight, and what it makes does not tell of what it was made."""
    model = adapted(torch.bfloat16, None)
    frozen = 0  # parameters that backward multiplies by
    for i, layer in enumerate(LAYERS):
        for name, p in model.get_submodule(layer).named_parameters():
            # The first layer is given embeddings, which need no gradient, so its first projections save no weight.
            first = i == 0 and any(f"self_attn.{which}_proj" in name for which in "qkv")
            if "_proj" in name and "lora" not in name and not first:
                frozen += p.numel()
    _, kept = trained(model, FEW[0])
    _, cast = trained(adapted(torch.float32, None), FEW[0])
    assert kept is not None
    assert cast is not None
    assert kept.kept_bytes["it is a weight"] >= 3 * 2 * frozen
    assert "it is a weight" not in cast.kept_bytes or cast.kept_bytes["it is a weight"] < 2 * frozen
    assert cast.offloaded_bytes >= kept.offloaded_bytes + 3 * 2 * frozen


def test_the_report_says_when_little_leaves() -> None:
    """Of short sequences backward needs weights above all."""
    model = adapted(torch.bfloat16, None)
    backend = SimulatedBackend(threads=1, order=Order(eager=True))
    with hostward.offload_activations(model, min_bytes=64, backend=backend) as run:
        assert "little" not in run.report().explain()
        ids = torch.zeros(1, 2, dtype=torch.long)
        model(input_ids=ids, labels=ids).loss.backward()
        report = run.report()
    kept = sum(report.kept_bytes.values())
    share = report.offloaded_bytes / (report.offloaded_bytes + kept)
    assert 0 < share < 0.25
    assert report.explain().endswith(
        f"  only {share:.0%} of these layers' activations are offloaded; most others stay, because it is a weight"
    )
    with hostward.offload_activations(model, min_bytes=64, backend=backend) as run:
        loss_of(model, 0).backward()
        assert "little" not in run.report().explain()


@pytest.mark.parametrize("how", ["merge_adapter", "merge and unmerge", "merge_and_unload"])
@pytest.mark.parametrize("kept", [False, True])
def test_adapters_merge_into_weights_that_are_away(how: str, kept: bool) -> None:
    """As PEFT writes it, `base_layer.weight.data += ...`. Seen red: the write lost when its layer went."""
    ends = []
    for away in (False, True):
        model = adapted(torch.bfloat16, None).eval()
        backend = SimulatedBackend(threads=1, order=FEW[1])
        optimizer = hostward.AdamW(model, lr=1e-2, offload_fraction=1.0, streamed_fraction=0.0, backend=backend)
        run = hostward.attach(model, optimizer, weights=hostward.Weights(min_elements=0)) if away else None
        with nullcontext() if run is None or not kept else run.weights_here():
            if how == "merge_and_unload":
                model = model.merge_and_unload()
            else:
                model.merge_adapter()
            if how == "merge and unmerge":
                model.unmerge_adapter()
        with torch.no_grad():
            found = [loss_of(model, 0)]
        if run is not None:
            run.detach()
        ends.append([*found, *[p.detach().clone() for p in model.parameters()]])
    assert same(ends[1], ends[0])
