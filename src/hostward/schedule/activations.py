"""Lower the offloading of saved activations to a schedule.

A layer call is one forward of a layer. The tensors that autograd saves in it are offloaded as a group, and reloaded
before that layer's backward. The triggers of call v are `enter` (pre-forward), `leave` (post-forward), `back`
(pre-backward), `unpack` (a saved tensor is unpacked) and `drop` (its last use has run):

    trigger   compute                                     other lanes
    leave/v   made/v  (all of it has been written)        d2h: offload/v
    enter/v   release/u of the call `window` before v  (with a limit of copies in flight, earlier: at leave/v)
    back/v    room/u  of the call `window` before v       h2d: reload/u
    unpack/v  arrive/v
    drop/v    drop/v

The tensors of one call may be offloaded in several groups, the earlier ones while the layer runs. Each group has all of
these operations.

Calls of one forward are numbered in their order. Each has its own events and its own host memory, so microbatches may
interleave in any way. `prior` of `offload/v` is the reload that used v's host memory before.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from hostward.core.units import MIB
from hostward.schedule.ops import Kind, Lane, Op, Schedule
from hostward.schedule.race_check import repeated, require_ordered

LAYER_CALL_OPS = {
    "made": Op("made", Kind.JOIN, Lane.COMPUTE, "leave"),
    "offload": Op("offload", Kind.COPY, Lane.D2H, "leave", None, ("saved",), ("parked",), ("made",), ("reload",)),
    "release": Op("release", Kind.RETIRE, Lane.COMPUTE, "enter", None, (), ("saved",), ("offload",)),
    "room": Op("room", Kind.ACQUIRE, Lane.COMPUTE, "back", None, (), ("reloaded",)),
    "reload": Op("reload", Kind.COPY, Lane.H2D, "back", None, ("parked",), ("reloaded",), ("room", "offload")),
    "arrive": Op("arrive", Kind.JOIN, Lane.COMPUTE, "unpack", None, ("reloaded",), (), ("reload",)),
    "drop": Op("drop", Kind.RETIRE, Lane.COMPUTE, "drop", None, (), ("reloaded",)),
}
"""The operations of one layer call, without its number, as the runtime issues them and waits for them."""

GROUP_BYTES = 256 * MIB
"""D2H copies start when this much has been saved, not only at the end of the layer. Small groups take long to issue."""
FIRST_GROUP_BYTES = 32 * MIB
"""The same for a layer's first group. A checkpointed layer saves only its input, and the next layer would wait for all
of a copy that starts after the layer has run. (Reentrant checkpoints save the input only then.) A smaller input is
copied in little time, while another group takes time to issue; the best limit has not been measured.
"""


@dataclass(frozen=True, slots=True)
class LayerCallsShape:
    """Describe a forward and backward, as far as the schedule of their activations depends on it.

    Attributes:
        layer_calls: number of layer calls.
        offloaded: number of calls, from the first on, whose activations are offloaded.
        window: number of calls whose activations stay on the device.
        prefetch_depth: number of calls beyond `window` by which a reload is issued early.
        unused: calls that backward does not reach.
        in_flight: most calls whose activations are being offloaded and still on the device; None: the size of `window`.
    """

    layer_calls: int
    offloaded: int
    window: int = 1
    prefetch_depth: int = 0
    unused: Collection[int] = field(default=frozenset())
    in_flight: int | None = None


def lower_layer_calls(shape: LayerCallsShape) -> Schedule:
    """Return the schedule of one microbatch's forward and backward, with the ordering rule checked over two in a row.

    Raises:
        OrderingError: the schedule has a race, which is a defect of this pass.
    """
    schedule = Schedule(tuple(_forward(shape) + _backward(shape)))
    require_ordered(repeated(schedule, 2))
    return schedule


def _forward(shape: LayerCallsShape) -> list[Op]:
    ops: list[Op] = []
    released, limited = _released(shape), _released_by_limit(shape)
    for v in range(shape.layer_calls):
        if limited <= v - shape.window < shape.offloaded:
            ops.append(_of("release", v - shape.window, v))
        ops.append(Op(f"forward/{v}", Kind.MODEL, Lane.COMPUTE, f"enter/{v}", None, (), (f"saved/{v}",)))
        if v < shape.offloaded:
            offload = _of("offload", v, v)
            ops += [_of("made", v, v), offload if v < released else replace(offload, prior=())]
            if limited and shape.in_flight is not None and v >= shape.in_flight:
                ops.append(replace(_of("release", v - shape.in_flight, v), trigger=f"leave/{v}"))
    # Calls that no later one releases are still on the device when backward begins, and are not reloaded.
    return ops


def _released(shape: LayerCallsShape) -> int:
    """Return how many calls, from the first on, release their device memory in forward."""
    return max(0, _released_by_limit(shape), min(shape.offloaded, shape.layer_calls - shape.window))


def _released_by_limit(shape: LayerCallsShape) -> int:
    """Return how many calls, from the first on, release their device memory because of the limit `in_flight`."""
    few = shape.in_flight is not None and shape.in_flight < shape.window
    return max(0, shape.offloaded - shape.in_flight) if few and shape.in_flight is not None else 0


def _backward(shape: LayerCallsShape) -> list[Op]:
    released = _released(shape)
    waiting = list(range(released))
    ops: list[Op] = []
    for v in reversed(range(shape.layer_calls)):
        while waiting and waiting[-1] >= v - shape.window - shape.prefetch_depth:
            u = waiting.pop()
            ops += [_of("room", u, v), _of("reload", u, v)]
        reloaded = v < released
        if v not in shape.unused:
            ops += [_of("arrive", v, v)] if reloaded else []
            read = f"reloaded/{v}" if reloaded else f"saved/{v}"
            ops.append(Op(f"backward/{v}", Kind.MODEL, Lane.COMPUTE, f"unpack/{v}", None, (read,)))
        if reloaded:
            # A reload that backward has not waited for must end before its memory is freed.
            drop = _of("drop", v, v)
            ops.append(replace(drop, waits=(f"reload/{v}",)) if v in shape.unused else drop)
        elif v < shape.offloaded:
            ops.append(replace(_of("release", v, v), name=f"release/{v}", trigger=f"drop/{v}"))
    return ops


def _of(name: str, call: int, at: int) -> Op:
    """Return an operation of layer call `call`, issued at the trigger of call `at`."""
    op = LAYER_CALL_OPS[name]

    def numbered(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{word}/{call}" for word in names)

    return replace(
        op,
        name=f"{name}/{call}",
        trigger=f"{op.trigger}/{at}",
        reads=numbered(op.reads),
        writes=numbered(op.writes),
        waits=numbered(op.waits),
        prior=numbered(op.prior),
    )
