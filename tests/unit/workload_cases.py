"""Workloads of known shapes, written by hand: Llama-like layers as transformers computes them."""

from __future__ import annotations

from hostward.choice import Choice, Keep
from hostward.inventory import Dtype, Inventory, Parameter, cut_buckets
from hostward.memory_model import Needs, PhaseNeeds
from hostward.plan import Placement
from hostward.planner import place_fraction
from hostward.planning.costs import ELEMENTWISE, LEAVES, RECOMPUTED
from hostward.workload import Layer, PerToken, Saved, Workload


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
    frozen: bool = False,
) -> Workload:
    """Untied embeddings, bf16 weights. `chunk`: the loss is made in chunks that are recomputed. `frozen`: only the head
    is trained.
    """
    kv = hidden * kv_heads // heads
    shapes = [
        ("q", hidden * hidden),
        ("k", hidden * kv),
        ("v", hidden * kv),
        ("o", hidden * hidden),
        ("gate", hidden * ffn),
        ("up", hidden * ffn),
        ("down", hidden * ffn),
        ("norm1", hidden),
        ("norm2", hidden),
    ]
    per_layer = sum(n for _, n in shapes)
    parameters = [] if frozen else [Parameter("embed", vocab * hidden, Dtype.BF16, "embed")]
    for number in range(0 if frozen else layers):
        parameters += [Parameter(f"layers.{number}.{n}", size, Dtype.BF16, f"layers.{number}") for n, size in shapes]
    parameters += [Parameter("head", vocab * hidden, Dtype.BF16, "head")]
    norms = 68.0 * hidden
    act = 10.0 * ffn
    traffic = norms + 26.0 * (hidden + kv) + act + 12.0 * hidden
    zero = PerToken(0.0)
    saved = (
        Saved("attn_norm", PerToken(4.0 * hidden), True, zero, PerToken(norms / 2)),
        Saved("core_attn", PerToken(10.0 * hidden + 6.0 * kv), False, PerToken(0.0, 2.0 * hidden), zero),
        Saved("mlp_norm", PerToken(4.0 * hidden), True, zero, PerToken(norms / 2)),
        Saved("mlp_act", PerToken(4.0 * ffn), True, zero, PerToken(act)),
        Saved("mlp", PerToken(4.0 * ffn), False, PerToken(4.0 * hidden * ffn), zero),
    )
    weights = 2 * per_layer
    flops = PerToken(2.0 * (per_layer - 2 * hidden), 2.0 * hidden)
    embed = 2 * vocab * hidden
    trained = (0, weights) if frozen else (weights, 0)
    found = [Layer("embed", False, 0 if frozen else embed, embed if frozen else 0, zero, (), zero, zero, zero)]
    for number in range(layers):
        found.append(
            Layer(
                f"layers.{number}",
                True,
                *trained,
                PerToken(2.0 * hidden),
                saved,
                flops,
                PerToken(traffic),
                PerToken(8.0 * ffn),
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


def counted_needs(workload: Workload, choice: Choice) -> Needs:
    """What a step holds, counted roughly: weights, state, gradients that stay, activations that stay, two slots."""
    tokens, sequence = workload.microbatch_tokens, workload.sequence_tokens
    layers, kept, parked = iter(choice.activations), 0.0, 0.0
    largest = 0.0
    for layer in workload.layers:
        saved = layer.saved_bytes.of(tokens, sequence)
        if not layer.repeated:
            kept += saved
            continue
        keep, largest = next(layers), max(largest, saved)
        if keep in RECOMPUTED:
            saved = layer.input_bytes.of(tokens, sequence)
        elif keep in ELEMENTWISE:
            saved -= sum(part.bytes.of(tokens, sequence) for part in layer.saved if part.elementwise)
        kept, parked = kept + (0 if keep in LEAVES else saved), parked + (saved if keep in LEAVES else 0)
    buckets = list(zip(workload.inventory.buckets, choice.placements, strict=True))
    wide = workload.microbatches > 1
    gradients = sum(
        b.numel * (4 if wide else 2)
        for b, p in buckets
        if p is not Placement.HOST or (wide and not choice.gradients_on_host)
    )
    streamed = [b.state_bytes for b, p in buckets if p is Placement.STREAMED]
    away = [layer.weight_bytes for layer in workload.layers if layer.name in choice.offloaded_weights]
    device = {
        "weights": workload.weight_bytes - sum(away) + sum(sorted(away)[-2:]),
        "state": sum(b.state_bytes for b, p in buckets if p is Placement.DEVICE),
        "staging": 2 * max(streamed, default=0),
        "gradients and activations": int(max(kept, largest + gradients, kept + gradients if wide else 0)),
    }
    host = {
        "state": sum(b.state_bytes for b, p in buckets if p.offloaded),
        "weights": sum(b.host_bytes - b.state_bytes for b, p in buckets if p is Placement.HOST)
        + sum(layer.frozen_weight_bytes for layer in workload.layers if layer.name in choice.offloaded_weights),
        "gradients": sum(b.numel * (4 if wide else 2) for b, p in buckets if p is Placement.HOST),
        "activations": int(parked),
    }
    return Needs((PhaseNeeds("steady step", device, host, host),))
