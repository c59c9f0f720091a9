"""How much streamed state can be read while backward runs: as far as its time and the memory that it frees allow."""

from __future__ import annotations

from hostward.choice import LEAVES, Choice
from hostward.lowering.staging import slot_bytes, streamed_bytes
from hostward.memory_model import Needs
from hostward.plan import Placement

from .costs import Costs


def read_ahead(costs: Costs, choice: Choice, needs: Needs) -> float:
    """That state as a share of all of the workload's.

    Args:
        choice: that streams all state which may be streamed.
        needs: of that choice: its staging slots, and the buckets at whose gradient points they are taken.
    """
    buckets = costs.workload.inventory.buckets
    streamed = [b for b, p in zip(buckets, choice.placements, strict=True) if p is Placement.STREAMED]
    if not streamed or not choice.overlapped:
        return 0.0
    size_bytes = slot_bytes([streamed_bytes(b.kind, b.offsets[-1]) for b in streamed])
    slot_s = size_bytes / costs.speeds.h2d_bytes_per_s
    keep = costs.keep_of(choice)
    over_s, ends_s = 0.0, {}
    for i in reversed(range(len(costs.layers))):
        over_s += costs.layers[i].backward_s + (costs.layers[i].again_s(keep[i]) if i in keep else 0.0)
        ends_s[costs.layers[i].layer.name] = over_s
    # Saved tensors that come back go first.
    reloaded = sum(costs.layers[i].held_bytes(kept) for i, kept in keep.items() if kept in LEAVES)
    read_s, count = reloaded / costs.speeds.h2d_bytes_per_s, 0
    for bucket in needs.stage_at:
        read_s = max(read_s, ends_s.get(buckets[bucket].layer, over_s)) + slot_s
        count += read_s <= over_s
    return min(1.0, count * size_bytes / sum(b.state_bytes for b in buckets))
