"""Workloads of known shapes, written by hand: Llama-like layers as transformers computes them."""

from __future__ import annotations

from hostward.core.inventory import Dtype, Inventory, Parameter, cut_buckets
from hostward.core.placement import Placement, place_fraction
from hostward.plan.decisions import Choice, Keep
from hostward.plan.workload import Layer, PerToken, Saved, Workload

_TREATMENTS = {
    "K": Keep.KEEP,
    "O": Keep.OFFLOAD,
    "R": Keep.RECOMPUTE,
    "r": Keep.RECOMPUTE_OFFLOAD,
    "E": Keep.ELEMENTWISE,
    "e": Keep.ELEMENTWISE_OFFLOAD,
}


def treatments(letters: str) -> tuple[Keep, ...]:
    """What is done to each layer, by a letter for each: keep, offload, recompute, elementwise; small: and offload."""
    return tuple(_TREATMENTS[letter] for letter in letters)


def llama(
    name: str = "llama",
    *,
    layers: int = 24,
    hidden: int = 2048,
    ffn: int = 8192,
    heads: int = 16,
    kv_heads: int = 16,
    vocab: int = 32000,
    sequence: int = 4096,
    batch: int = 2,
    microbatches: int = 1,
    chunk: bool = False,
    cap: int | None = None,
    experts: int = 1,
    active: int = 1,
) -> Workload:
    """Untied embeddings, bf16 weights. `chunk`: the loss is made in chunks that are recomputed. With `experts`, each of
    width `ffn`, `active` of them for a token.
    """
    kv = hidden * kv_heads // heads
    shapes = [
        ("q", hidden * hidden),
        ("k", hidden * kv),
        ("v", hidden * kv),
        ("o", hidden * hidden),
        ("gate", experts * hidden * ffn),
        ("up", experts * hidden * ffn),
        ("down", experts * hidden * ffn),
        ("norm1", hidden),
        ("norm2", hidden),
    ]
    per_layer = sum(n for _, n in shapes)
    parameters = [Parameter("embed", vocab * hidden, Dtype.BF16, "embed")]
    for number in range(layers):
        layer = f"layers.{number}"
        parameters += [
            Parameter(f"{layer}.{n}", size, Dtype.BF16, layer, dims=1 if n.startswith("norm") else 2)
            for n, size in shapes
        ]
    parameters += [Parameter("head", vocab * hidden, Dtype.BF16, "head")]
    norms = 68.0 * hidden
    act = 10.0 * ffn * active
    used = per_layer - 3 * hidden * ffn * (experts - active)
    traffic = norms + 26.0 * (hidden + kv) + act + 12.0 * hidden
    zero = PerToken(0.0)
    saved = (
        Saved("attn_norm", PerToken(4.0 * hidden), True, zero, PerToken(norms / 2)),
        Saved("core_attn", PerToken(10.0 * hidden + 6.0 * kv), False, PerToken(0.0, 2.0 * hidden), zero),
        Saved("mlp_norm", PerToken(4.0 * hidden), True, zero, PerToken(norms / 2)),
        Saved("mlp_act", PerToken(4.0 * ffn * active), True, zero, PerToken(act)),
        Saved("mlp", PerToken(4.0 * ffn * active), False, PerToken(4.0 * hidden * ffn * active), zero),
    )
    weights = 2 * per_layer
    flops = PerToken(2.0 * (used - 2 * hidden), 2.0 * hidden)
    embed = 2 * vocab * hidden
    found = [Layer("embed", False, embed, 0, zero, (), zero, zero, zero)]
    for number in range(layers):
        found.append(
            Layer(
                f"layers.{number}",
                True,
                weights,
                0,
                PerToken(2.0 * hidden),
                saved,
                flops,
                PerToken(traffic),
                PerToken(8.0 * ffn * active),
            )
        )
    logits = Saved("logits", PerToken(0.0 if chunk else 6.0 * vocab), False, zero, zero)
    head_flops = PerToken(2.0 * vocab * hidden * (4 / 3 if chunk else 1))
    found.append(Layer("head", False, embed, 0, zero, (logits,), head_flops, PerToken(11.0 * vocab), PerToken(0.0)))
    inventory = Inventory(tuple(parameters), cut_buckets(parameters, cap=cap))
    return Workload(name, inventory, tuple(found), Dtype.BF16, sequence, batch, microbatches)


def chosen(workload: Workload, fraction: float = 0.0, share: float = 0.0, keep: Keep = Keep.KEEP) -> Choice:
    """A share of the state off the device, a share of that streamed; every layer alike."""
    placements = tuple(b.placement for b in place_fraction(workload.inventory.buckets, fraction, share).buckets)
    return Choice(placements, (keep,) * len(workload.repeated))


def all_device(workload: Workload) -> tuple[Placement, ...]:
    return (Placement.DEVICE,) * len(workload.inventory.buckets)
