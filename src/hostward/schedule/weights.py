"""Lower the prefetching of offloaded weights to a schedule: they are on the host while their layers are not in use.

    trigger   compute                                      other lanes
    begin     room/0.f                                     h2d: fetch/0.f
    enter/v   arrive/v.f; room/u.f of the next layer       h2d: fetch/u.f
    leave/v   empty/v.f (the storage has no bytes now)
    back/v    arrive/v.b; room/u.b of the layer before     h2d: fetch/u.b
    past/v    empty/v.b
    step      norm                                         host: step/v of trained layers, into the same host copy

Each layer is prefetched twice: for forward and again for backward. Weights that were never used are waited for when
they are released. Trained layers have one host copy, which the CPU optimizer step writes: `prior` of a fetch is that
step.

For a sharded model the weights are this rank's shards. An all-gather reads the shards before the layer runs, and then
they are released; the next all-gather overlaps with this layer, so its shards are prefetched one layer earlier still:

    trigger   compute                                                 other lanes
    begin     room/0.f, room/1.f                                      h2d: fetch/0.f, fetch/1.f
    enter/v   arrive/v.f; gather/v.f; room/v+2.f; empty/v.f           h2d: fetch/v+2.f
    back/v    arrive/v.b; gather/v.b; room/v-1.b, room/v-2.b; empty/v.b    h2d: fetch/v-1.b, fetch/v-2.b

The schedule lists an all-gather where the compute lane waits for it: FSDP2 runs it on its own stream.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from hostward.schedule.ops import Kind, Lane, Op, Schedule
from hostward.schedule.race_check import repeated, require_ordered

ROOM = "offload/wait/weights/room"
"""Name of the mark at which the compute lane has taken the memory of offloaded weights."""
GATHERED = "offload/wait/weights/gathered"
"""Name of the compute lane's wait for a gather, as long as that had waited for weights at most."""
WEIGHT_OPS = {
    "room": Op("room", Kind.ACQUIRE, Lane.COMPUTE, "ahead", None, (), ("weight",)),
    "fetch": Op("fetch", Kind.COPY, Lane.H2D, "ahead", None, ("source",), ("weight",), ("room",)),
    "arrive": Op("arrive", Kind.JOIN, Lane.COMPUTE, "enter", None, ("weight",), (), ("fetch",)),
    "empty": Op("empty", Kind.RETIRE, Lane.COMPUTE, "leave", None, (), ("weight",), ("fetch",)),
}
"""The operations of one stay of a layer's weights on the device, as the runtime issues them and waits for them."""
GATHERED_PREFETCH_DEPTH = 2
"""Shards are prefetched this many all-gathers ahead: the H2D copy overlaps with one layer, the all-gather with the
next.
"""


def weight_prefetch_depth(*, gathered: bool) -> int:
    """Return how many layers ahead weights are prefetched; sharded weights (`gathered`) need more."""
    return GATHERED_PREFETCH_DEPTH if gathered else 1


@dataclass(frozen=True, slots=True)
class WeightsShape:
    """Describe a step over `layers` layers, as far as its weight schedule depends on it.

    Attributes:
        layers: number of layers.
        offloaded: number of layers, from the first on and not all, whose weights are offloaded.
        trained: of the offloaded layers those that a CPU optimizer step writes.
        unused: layers that backward does not reach.
        gathered: the layers are sharded, and unsharded by an all-gather while they run.
    """

    layers: int
    offloaded: int
    trained: Collection[int] = field(default=frozenset())
    unused: Collection[int] = field(default=frozenset())
    gathered: bool = False

    @property
    def prefetch_depth(self) -> int:
        """Return how many layers ahead weights are prefetched."""
        return weight_prefetch_depth(gathered=self.gathered)


def lower_weights(shape: WeightsShape) -> Schedule:
    """Return the schedule of forward, backward and step, with the ordering rule checked over two steps in a row.

    Raises:
        OrderingError: the schedule has a race, which is a defect of this pass.
    """
    passes = _gathered(shape) if shape.gathered else [*_forward(shape), *_backward(shape)]
    schedule = Schedule((*passes, *_step(shape)))
    require_ordered(repeated(schedule, 2))
    return schedule


def _forward(shape: WeightsShape) -> list[Op]:
    ops = _prefetch(shape, 0, "f", "begin")
    for v in range(shape.layers):
        offloaded = v < shape.offloaded
        if offloaded:
            ops.append(_of("arrive", v, "f", f"enter/{v}"))
        ops += _prefetch(shape, v + 1, "f", f"enter/{v}")
        ops.append(Op(f"forward/{v}", Kind.MODEL, Lane.COMPUTE, f"enter/{v}", None, (f"weight/{v}",)))
        if offloaded:
            ops.append(_of("empty", v, "f", f"leave/{v}"))
    return ops


def _backward(shape: WeightsShape) -> list[Op]:
    ops: list[Op] = []
    here: list[int] = []
    for v in reversed(range(shape.layers)):
        prefetch = _prefetch(shape, v - 1, "b", f"back/{v}")
        if v in shape.unused:
            ops += prefetch  # it is not known yet that backward will not use it
            here += [v] if v < shape.offloaded else []
            continue
        if v < shape.offloaded:
            ops.append(_of("arrive", v, "b", f"back/{v}"))
        ops += [_of("empty", u, "b", f"past/{u}") for u in here]
        here = [v] if v < shape.offloaded else []
        ops += prefetch
        ops.append(Op(f"backward/{v}", Kind.MODEL, Lane.COMPUTE, f"back/{v}", None, (f"weight/{v}",)))
    return ops + [_of("empty", u, "b", f"past/{u}") for u in here]


def _gathered(shape: WeightsShape) -> list[Op]:
    forward, backward = range(shape.layers), range(shape.layers - 1, -1, -1)
    ops = [op for u in range(shape.prefetch_depth) for op in _prefetch(shape, u, "f", "begin")]
    for which, word, order in (("f", "enter", forward), ("b", "back", backward)):
        here = set(range(shape.prefetch_depth)) if which == "f" else set()
        for v in order:
            if which == "b" and v in shape.unused:
                continue
            trigger, offloaded = f"{word}/{v}", v < shape.offloaded
            if offloaded and v not in here:  # no layer that backward reaches earlier has prefetched it
                ops += _prefetch(shape, v, which, trigger)
            if offloaded:
                ops.append(_of("arrive", v, which, trigger))
                ops.append(Op(f"gather/{v}.{which}", Kind.MODEL, Lane.COMPUTE, trigger, None, (f"weight/{v}",)))
            for distance in range(1, shape.prefetch_depth + 1):
                u = v + distance if which == "f" else v - distance
                if u not in here:
                    ops += _prefetch(shape, u, which, trigger)
                    here.add(u)
            if offloaded:
                ops.append(_of("empty", v, which, trigger))
                here.discard(v)
            ops.append(Op(f"{'forward' if which == 'f' else 'backward'}/{v}", Kind.MODEL, Lane.COMPUTE, trigger, None))
        ops += [_of("empty", u, which, f"past/{u}") for u in sorted(here) if 0 <= u < shape.offloaded]
    return ops


def _prefetch(shape: WeightsShape, u: int, which: str, trigger: str) -> list[Op]:
    if not 0 <= u < shape.offloaded:
        return []
    fetch = _of("fetch", u, which, trigger)
    return [_of("room", u, which, trigger), replace(fetch, prior=(f"step/{u}",) if u in shape.trained else ())]


def _step(shape: WeightsShape) -> list[Op]:
    if not shape.trained:
        return []
    ops = [Op("norm", Kind.NORM, Lane.COMPUTE, "step", None)]
    for v in sorted(shape.trained):
        ops.append(Op(f"step/{v}", Kind.ADAMW, Lane.HOST, "step", None, (), (f"source/{v}",), ("norm",)))
    return ops


def _of(name: str, layer: int, which: str, trigger: str) -> Op:
    """Return an operation of `layer` for forward (f) or backward (b), issued at `trigger`."""
    op = WEIGHT_OPS[name]
    return replace(
        op,
        name=f"{name}/{layer}.{which}",
        trigger=trigger,
        reads=tuple(f"{word}/{layer}" for word in op.reads),
        writes=tuple(f"{word}/{layer}" for word in op.writes),
        waits=tuple(f"{word}/{layer}.{which}" for word in op.waits),
    )
