"""Saved activations that leave the device, as a schedule.

A *visit* is one call of a layer; what autograd saves in it leaves as a group, and comes back before that layer's
backward.

    point     compute                                     other lanes
    leave/v   made/v  (all of it has been written)        d2h: offload/v
    enter/v   release/u of the visit `window` before v  (with a bound on copies in flight, earlier: at leave/v)
    back/v    room/u  of the visit `window` before v      h2d: reload/u
    unpack/v  arrive/v
    drop/v    drop/v  (the last that used it has run)

What one visit saves may leave in several groups, the earlier ones while the layer runs: each has all of these.

Visits of one forward are numbered in order of their calls. Each carries its own events and its own host memory, so
microbatches may interleave in any way. `prior` of `offload/v` is whatever used v's host memory before.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from hostward.core.units import MIB
from hostward.schedule.ops import Kind, Lane, Op, Schedule
from hostward.schedule.race_check import repeated, require_ordered

VISIT = {
    "made": Op("made", Kind.JOIN, Lane.COMPUTE, "leave"),
    "offload": Op("offload", Kind.COPY, Lane.D2H, "leave", None, ("saved",), ("parked",), ("made",), ("reload",)),
    "release": Op("release", Kind.RETIRE, Lane.COMPUTE, "enter", None, (), ("saved",), ("offload",)),
    "room": Op("room", Kind.ACQUIRE, Lane.COMPUTE, "back", None, (), ("reloaded",)),
    "reload": Op("reload", Kind.COPY, Lane.H2D, "back", None, ("parked",), ("reloaded",), ("room", "offload")),
    "arrive": Op("arrive", Kind.JOIN, Lane.COMPUTE, "unpack", None, ("reloaded",), (), ("reload",)),
    "drop": Op("drop", Kind.RETIRE, Lane.COMPUTE, "drop", None, (), ("reloaded",)),
}
"""The operations of one visit, without its number. What the engine issues and waits for is taken from here."""

GROUP_BYTES = 256 * MIB
"""Copies start when that much has been saved, not only at the end of the layer. Small groups take long to issue."""
FIRST_GROUP_BYTES = 32 * MIB
"""That of a layer's first group: what a checkpointed layer keeps is its input alone, and the next layer would wait for
all of a copy that starts when the layer has run. (Reentrant checkpoints save it only then.) What is smaller is copied
in little time, and another group takes some to issue: where the line is best has not been measured.
"""


@dataclass(frozen=True, slots=True)
class VisitsShape:
    """What a forward and backward over `visits` layers depends on.

    offloaded: the first of them whose activations leave. window: how many visits' activations stay on the device;
    ahead: by how many more visits than that a reload comes early. unused: visits that backward does not reach.
    in_flight: so many visits at most have left and are still on the device; None: as many as the window holds.
    """

    visits: int
    offloaded: int
    window: int = 1
    ahead: int = 0
    unused: Collection[int] = field(default=frozenset())
    in_flight: int | None = None


def lower_visits(shape: VisitsShape) -> Schedule:
    """Forward and backward of one microbatch. The ordering rule is run on two in a row.

    Raises:
        OrderingError: the schedule has a race, which is a defect of this pass.
    """
    schedule = Schedule(tuple(_forward(shape) + _backward(shape)))
    require_ordered(repeated(schedule, 2))
    return schedule


def _forward(shape: VisitsShape) -> list[Op]:
    ops: list[Op] = []
    released, landed = _released(shape), _landed(shape)
    for v in range(shape.visits):
        if landed <= v - shape.window < shape.offloaded:
            ops.append(_of("release", v - shape.window, v))
        ops.append(Op(f"forward/{v}", Kind.MODEL, Lane.COMPUTE, f"enter/{v}", None, (), (f"saved/{v}",)))
        if v < shape.offloaded:
            offload = _of("offload", v, v)
            ops += [_of("made", v, v), offload if v < released else replace(offload, prior=())]
            if landed and shape.in_flight is not None and v >= shape.in_flight:
                ops.append(replace(_of("release", v - shape.in_flight, v), point=f"leave/{v}"))
    # Visits that no later one releases are still on the device when backward begins, and are not reloaded.
    return ops


def _released(shape: VisitsShape) -> int:
    """Visits, from the first on, that give up their device memory."""
    return max(0, _landed(shape), min(shape.offloaded, shape.visits - shape.window))


def _landed(shape: VisitsShape) -> int:
    """Visits, from the first on, that do so because others leave."""
    few = shape.in_flight is not None and shape.in_flight < shape.window
    return max(0, shape.offloaded - shape.in_flight) if few and shape.in_flight is not None else 0


def _backward(shape: VisitsShape) -> list[Op]:
    released = _released(shape)
    waiting = list(range(released))
    ops: list[Op] = []
    for v in reversed(range(shape.visits)):
        while waiting and waiting[-1] >= v - shape.window - shape.ahead:
            u = waiting.pop()
            ops += [_of("room", u, v), _of("reload", u, v)]
        back = v < released
        if v not in shape.unused:
            ops += [_of("arrive", v, v)] if back else []
            read = f"reloaded/{v}" if back else f"saved/{v}"
            ops.append(Op(f"backward/{v}", Kind.MODEL, Lane.COMPUTE, f"unpack/{v}", None, (read,)))
        if back:
            # What nobody has waited for is waited for before it goes.
            drop = _of("drop", v, v)
            ops.append(replace(drop, waits=(f"reload/{v}",)) if v in shape.unused else drop)
        elif v < shape.offloaded:
            ops.append(replace(_of("release", v, v), name=f"release/{v}", point=f"drop/{v}"))
    return ops


def _of(name: str, visit: int, at: int) -> Op:
    """An operation of `visit`, issued at the point of visit `at`."""
    op = VISIT[name]

    def numbered(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{word}/{visit}" for word in names)

    return replace(
        op,
        name=f"{name}/{visit}",
        point=f"{op.point}/{at}",
        reads=numbered(op.reads),
        writes=numbered(op.writes),
        waits=numbered(op.waits),
        prior=numbered(op.prior),
    )
