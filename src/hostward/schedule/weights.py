"""Weights of layers that lie on the host while the layers are not in use, as a schedule.

    point     compute                                      other lanes
    begin     room/0.f                                     h2d: fetch/0.f
    enter/v   arrive/v.f; room/u.f of the next layer       h2d: fetch/u.f
    leave/v   empty/v.f (the storage has no bytes now)
    back/v    arrive/v.b; room/u.b of the layer before     h2d: fetch/u.b
    past/v    empty/v.b
    step      norm                                         host: step/v of trained layers, into the same host copy

Each layer is fetched twice: for forward and again for backward. What was never used is waited for when it goes. Layers
that are trained have one host copy, which the optimizer's host step writes: `prior` of a fetch is that step.

Of a sharded model these are this rank's parts. A gather reads them before the layer runs, and then they go; the next
gather runs beside this layer, so the parts that it reads are fetched one layer earlier still:

    point     compute                                                 other lanes
    begin     room/0.f, room/1.f                                      h2d: fetch/0.f, fetch/1.f
    enter/v   arrive/v.f; gather/v.f; room/v+2.f; empty/v.f           h2d: fetch/v+2.f
    back/v    arrive/v.b; gather/v.b; room/v-1.b, room/v-2.b; empty/v.b    h2d: fetch/v-1.b, fetch/v-2.b

The gather stands where the compute lane waits for it: it runs on a stream of FSDP2's own.
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
WEIGHT = {
    "room": Op("room", Kind.ACQUIRE, Lane.COMPUTE, "ahead", None, (), ("weight",)),
    "fetch": Op("fetch", Kind.COPY, Lane.H2D, "ahead", None, ("source",), ("weight",), ("room",)),
    "arrive": Op("arrive", Kind.JOIN, Lane.COMPUTE, "enter", None, ("weight",), (), ("fetch",)),
    "empty": Op("empty", Kind.RETIRE, Lane.COMPUTE, "leave", None, (), ("weight",), ("fetch",)),
}
"""The operations of one stay of a layer's weights on the device. What the engine issues and waits for is taken from
here.
"""
GATHERED_AHEAD = 2
"""So many gathers before its own is what a gather reads fetched: the fetch has the time of a layer, and the gather that
of the next.
"""


def fetched_ahead(*, gathered: bool) -> int:
    """How many layers before its use one is fetched, if it is used whole, or gathered."""
    return GATHERED_AHEAD if gathered else 1


@dataclass(frozen=True, slots=True)
class WeightsShape:
    """What a turn over `layers` layers depends on.

    offloaded: the first of them, not all, whose weights lie on the host. trained: of these, those that a host step
    writes.
    unused: layers that backward does not reach.
    gathered: layers, or what is gathered of them, are sharded, and whole while they run.
    """

    layers: int
    offloaded: int
    trained: Collection[int] = field(default=frozenset())
    unused: Collection[int] = field(default=frozenset())
    gathered: bool = False

    @property
    def ahead(self) -> int:
        """How many layers before its use one is fetched."""
        return fetched_ahead(gathered=self.gathered)


def lower_weights(shape: WeightsShape) -> Schedule:
    """Forward, backward and step. The ordering rule is run on two turns in a row.

    Raises:
        OrderingError: the schedule has a race, which is a defect of this pass.
    """
    passes = _gathered(shape) if shape.gathered else [*_forward(shape), *_backward(shape)]
    schedule = Schedule((*passes, *_step(shape)))
    require_ordered(repeated(schedule, 2))
    return schedule


def _forward(shape: WeightsShape) -> list[Op]:
    ops = _fetched(shape, 0, "f", "begin")
    for v in range(shape.layers):
        away = v < shape.offloaded
        if away:
            ops.append(_of("arrive", v, "f", f"enter/{v}"))
        ops += _fetched(shape, v + 1, "f", f"enter/{v}")
        ops.append(Op(f"forward/{v}", Kind.MODEL, Lane.COMPUTE, f"enter/{v}", None, (f"weight/{v}",)))
        if away:
            ops.append(_of("empty", v, "f", f"leave/{v}"))
    return ops


def _backward(shape: WeightsShape) -> list[Op]:
    ops: list[Op] = []
    here: list[int] = []
    for v in reversed(range(shape.layers)):
        fetched = _fetched(shape, v - 1, "b", f"back/{v}")
        if v in shape.unused:
            ops += fetched  # nobody knows yet that it will not be used
            here += [v] if v < shape.offloaded else []
            continue
        if v < shape.offloaded:
            ops.append(_of("arrive", v, "b", f"back/{v}"))
        ops += [_of("empty", u, "b", f"past/{u}") for u in here]
        here = [v] if v < shape.offloaded else []
        ops += fetched
        ops.append(Op(f"backward/{v}", Kind.MODEL, Lane.COMPUTE, f"back/{v}", None, (f"weight/{v}",)))
    return ops + [_of("empty", u, "b", f"past/{u}") for u in here]


def _gathered(shape: WeightsShape) -> list[Op]:
    forward, backward = range(shape.layers), range(shape.layers - 1, -1, -1)
    ops = [op for u in range(shape.ahead) for op in _fetched(shape, u, "f", "begin")]
    for which, word, order in (("f", "enter", forward), ("b", "back", backward)):
        here = set(range(shape.ahead)) if which == "f" else set()
        for v in order:
            if which == "b" and v in shape.unused:
                continue
            point, away = f"{word}/{v}", v < shape.offloaded
            if away and v not in here:  # none behind it was gathered
                ops += _fetched(shape, v, which, point)
            if away:
                ops.append(_of("arrive", v, which, point))
                ops.append(Op(f"gather/{v}.{which}", Kind.MODEL, Lane.COMPUTE, point, None, (f"weight/{v}",)))
            for steps in range(1, shape.ahead + 1):
                u = v + steps if which == "f" else v - steps
                if u not in here:
                    ops += _fetched(shape, u, which, point)
                    here.add(u)
            if away:
                ops.append(_of("empty", v, which, point))
                here.discard(v)
            ops.append(Op(f"{'forward' if which == 'f' else 'backward'}/{v}", Kind.MODEL, Lane.COMPUTE, point, None))
        ops += [_of("empty", u, which, f"past/{u}") for u in sorted(here) if 0 <= u < shape.offloaded]
    return ops


def _fetched(shape: WeightsShape, u: int, which: str, point: str) -> list[Op]:
    if not 0 <= u < shape.offloaded:
        return []
    fetch = _of("fetch", u, which, point)
    return [_of("room", u, which, point), replace(fetch, prior=(f"step/{u}",) if u in shape.trained else ())]


def _step(shape: WeightsShape) -> list[Op]:
    if not shape.trained:
        return []
    ops = [Op("norm", Kind.NORM, Lane.COMPUTE, "step", None)]
    for v in sorted(shape.trained):
        ops.append(Op(f"step/{v}", Kind.ADAMW, Lane.HOST, "step", None, (), (f"source/{v}",), ("norm",)))
    return ops


def _of(name: str, layer: int, which: str, point: str) -> Op:
    """An operation of `layer` for forward (f) or backward (b), issued at `point`."""
    op = WEIGHT[name]
    return replace(
        op,
        name=f"{name}/{layer}.{which}",
        point=point,
        reads=tuple(f"{word}/{layer}" for word in op.reads),
        writes=tuple(f"{word}/{layer}" for word in op.writes),
        waits=tuple(f"{word}/{layer}.{which}" for word in op.waits),
    )
