"""The optimizer step of a plan as a schedule.

    point        compute                        other lanes
    gradient/b   partials/b                     d2h: download/b (host buckets)
                 made/b                         d2h: download/b; host: add/b (host buckets that are summed there)
    release/b    release/b  (gradient freed)
    stage/k      acquire/k  (a slot)            h2d: read/b of the first streamed buckets
    step         norm, step/b (device buckets)  host: sums/b; h2d: lift/b (summed buckets);
                                                d2h: fetch; host: step/b; h2d: upload/b;
                                                h2d: read/b; update: step/b; d2h: write/b
    unstage/k    unstage/k  (a slot freed)
    upload/L                                    h2d: upload/b, where weights before L are fetched by themselves
    use/L        arrive/L, release/b (streamed)

`backward/b` and `forward/L` stand for the caller's own passes: they read weights and make gradients. Gradient points
may come in any order, `release/b` after `gradient/b`, `stage/k` one after the other at any time before `step`, use
points and `unstage/k` in any order after it; tests/schedule runs the rule over such orders.

State and weights share the link's lanes, in order of use: a device copies one thing at a time in each direction, and
while state kept coming on a lane of its own, no weight got through. The first reads stand before all of them, as many
as backward hides (`ahead`). Each of the others stands where the streamed bucket so many before it has been stepped, or
at the last where the last user of its slot has: state runs ahead of the host's weights by `ahead` buckets.

Weights of `fetched` buckets are not uploaded: they come when their layers are used (`hostward.schedule.weights`).
What stands behind them in order of use must not stand before them on the lane: it is uploaded when the last fetched
layer before it is used, at the latest when its own layer is.

Gradients of summed buckets are added up on the host: their gradient points come once in every microbatch of a turn, and
a wait stands for the newest issue of the operation that it names, as everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType

from hostward.core.inventory import Bucket
from hostward.core.placement import Placement
from hostward.schedule.ops import Kind, Lane, Op, Schedule
from hostward.schedule.race_check import repeated, require_ordered

DEVICE_SCALARS = "scalars.device"
HOST_SCALARS = "scalars.host"
STEP = "step"
GRADIENTS_IN_FLIGHT = 2
"""Host buckets whose gradients are on their way out at any time: one is copied while the next is made."""
INBOXES = 3
"""Landing places that summed buckets share: one is copied to, one added from, and one is free in between."""
_LANDED_BYTES = 4
"""Of an element of any dtype."""


def gradient_point(bucket: int) -> str:
    """All gradients of the bucket are final."""
    return f"gradient/{bucket}"


def release_point(bucket: int) -> str:
    """The device memory of a host bucket's gradients is wanted back."""
    return f"release/{bucket}"


def use_point(layer: str) -> str:
    """The caller is about to use the weights of the layer."""
    return f"use/{layer}"


def stage_point(slot: int) -> str:
    """There is room for another slot."""
    return f"stage/{slot}"


def unstage_point(slot: int) -> str:
    """The memory of a slot is wanted back."""
    return f"unstage/{slot}"


def upload_point(layer: str) -> str:
    """New weights of the layer are wanted, if those before it are fetched by themselves."""
    return f"upload/{layer}"


def kept_apart(placements: Sequence[Placement], together: Iterable[Collection[int]]) -> frozenset[int]:
    """Buckets whose gradients stay until the step, and are made in one memory with some that leave before. That memory
    is free when nothing of it is in use, so what stays is copied out of it.

    Args:
        together: for each such memory, the buckets that have gradients in it.
    """
    found: set[int] = set()
    for buckets in together:
        staying = {b for b in buckets if placements[b] is not Placement.HOST}
        if len(staying) < len(buckets):
            found |= staying
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's schedule depends on.

    placements: of every bucket, in order of use in forward. layers: the use point's layer of every bucket. absent:
    buckets without any gradient in this turn. slots: device staging places, each for one streamed bucket; 0 where none
    is streamed. ahead: so many of the first streamed buckets are read when their slot is taken; None: all of them.
    transient: slots are taken at the points `stage/k` and given back at `unstage/k`, instead of being kept.
    overlap: False issues everything at the point `step`, arrivals included. summed: host buckets whose gradients are
    added up on the host, microbatch by microbatch. fetched: host buckets whose weights come by themselves.
    """

    placements: tuple[Placement, ...]
    layers: tuple[str, ...]
    absent: frozenset[int] = field(default=frozenset())
    slots: int = 0
    ahead: int | None = None
    transient: bool = False
    overlap: bool = True
    summed: frozenset[int] = field(default=frozenset())
    fetched: frozenset[int] = field(default=frozenset())

    @property
    def staged(self) -> list[int]:
        """The streamed buckets that are read before the norm is known."""
        streamed = [b for b, p in enumerate(self.placements) if p is Placement.STREAMED]
        return streamed[: self.slots if self.ahead is None else min(self.ahead, self.slots)]


def inbox_bytes(buckets: Sequence[Bucket]) -> list[int]:
    """Host bytes of each landing place that these summed buckets share: room for gradients of any dtype."""
    return [max((b.offsets[-1] for b in buckets), default=0) * _LANDED_BYTES] * min(INBOXES, len(buckets))


def inboxes_of(summed: frozenset[int]) -> dict[int, int]:
    """The landing place of each summed bucket: they take the inboxes in turn."""
    return {b: i % INBOXES for i, b in enumerate(sorted(summed))}


@lru_cache(maxsize=16)
def slots_of(placements: tuple[Placement, ...], slots: int) -> Mapping[int, int]:
    """The staging slot of each streamed bucket: they take the slots in turn."""
    streamed = (b for b, p in enumerate(placements) if p is Placement.STREAMED)
    return MappingProxyType({b: n % slots for n, b in enumerate(streamed)})


def slots_by_last_use(slot_of_bucket: Mapping[int, int], slots: int) -> list[int]:
    """All slots, in the order in which their last buckets are written back; first those that no bucket takes."""
    last = {slot: bucket for bucket, slot in sorted(slot_of_bucket.items())}
    return sorted(range(slots), key=lambda slot: last.get(slot, -1))


def later_uploads(shape: StepShape) -> dict[str, list[str]]:
    """By layer with fetched buckets: the layers behind it, up to the next of its kind, whose uploads come when it is
    used.
    """
    found: dict[str, list[str]] = {}
    last = None
    fetched = {shape.layers[b] for b in shape.fetched}
    for layer in dict.fromkeys(shape.layers):
        if layer in fetched:
            last = layer
            found[last] = []
        elif last is not None:
            found[last].append(layer)
    return found


def _is_late(shape: StepShape, b: int) -> bool:
    return bool(shape.fetched) and b > min(shape.fetched) and b not in shape.fetched


def lower_step(shape: StepShape) -> Schedule:
    """The schedule of one turn. The ordering rule is run on two of it in a row.

    Raises:
        OrderingError: the schedule has a race, which is a defect of this pass.
    """
    schedule = lower(shape)
    require_ordered(repeated(schedule, 2))
    return schedule


def lower(shape: StepShape) -> Schedule:
    """The schedule of one turn, unchecked."""
    present = [b for b in range(len(shape.placements)) if b not in shape.absent]
    ops = [*_backward(shape, present), *_staged(shape, present), *_step(shape, present), *_forward(shape, present)]
    if not shape.overlap:
        ops = [op if op.kind is Kind.MODEL else replace(op, point=STEP) for op in ops]
    return Schedule(tuple(ops))


def _of(shape: StepShape, present: Iterable[int], placement: Placement) -> list[int]:
    return [b for b in present if shape.placements[b] is placement]


def _backward(shape: StepShape, present: Sequence[int]) -> list[Op]:
    ops: list[Op] = []
    in_flight: list[int] = []
    weights = tuple(f"weight/{b}" for b in range(len(shape.placements)) if b not in shape.fetched)
    inboxes = inboxes_of(shape.summed)
    for b in reversed(present):
        gradient = f"gradient/{b}"
        ops.append(Op(f"backward/{b}", Kind.MODEL, Lane.COMPUTE, gradient_point(b), b, weights, (gradient,)))
        partials = Op(
            f"partials/{b}", Kind.PARTIALS, Lane.COMPUTE, gradient_point(b), b, (gradient,), (f"partial/{b}",)
        )
        ops += [] if b in shape.summed else [partials]
        if shape.placements[b] is Placement.HOST:
            if len(in_flight) == GRADIENTS_IN_FLIGHT:
                ops.append(_release(in_flight.pop(0), release_point, "download"))
            ops += _added(inboxes, shape.absent, b) if b in shape.summed else [_download(b)]
            in_flight.append(b)
    return ops + [_release(b, release_point, "download") for b in in_flight]


def _download(b: int) -> Op:
    reads, writes, waits = (f"gradient/{b}",), (f"landing/{b}",), (f"partials/{b}",)
    return Op(f"download/{b}", Kind.COPY, Lane.D2H, gradient_point(b), b, reads, writes, waits)


def _added(inboxes: Mapping[int, int], absent: frozenset[int], b: int) -> list[Op]:
    inbox = inboxes[b]
    sharing = [e for e in reversed(inboxes) if inboxes[e] == inbox and e not in absent]
    # Gradient points come in any order and more than once: whoever used the inbox last is among all that share it.
    earlier = tuple(f"add/{e}" for e in sharing if e > b)
    before = tuple(f"add/{e}" for e in sharing if e <= b)
    point, gradient, landing, total = gradient_point(b), f"gradient/{b}", f"inbox/{inbox}", f"total/{b}"
    return [
        Op(f"made/{b}", Kind.JOIN, Lane.COMPUTE, point, b),
        Op(f"download/{b}", Kind.COPY, Lane.D2H, point, b, (gradient,), (landing,), (f"made/{b}", *earlier), before),
        Op(f"add/{b}", Kind.ADD, Lane.HOST, point, b, (landing, total), (total, f"sum/{b}"), (f"download/{b}",)),
    ]


def _summed(summed: Sequence[int]) -> list[Op]:
    """Partial sums of totals, where the last addition did not make them, and all of them on their way to the norm."""
    ops = [Op(f"sums/{b}", Kind.PARTIALS, Lane.HOST, STEP, b, (f"total/{b}",), (f"sum/{b}",)) for b in summed]
    if summed:
        ops.append(Op("summed", Kind.JOIN, Lane.HOST, STEP))
    waits = ("summed",)
    return ops + [
        Op(f"lift/{b}", Kind.COPY, Lane.H2D, STEP, b, (f"sum/{b}",), (f"partial/{b}",), waits) for b in summed
    ]


def _release(b: int, point: object, after: str) -> Op:
    name = point(b) if callable(point) else str(point)
    return Op(f"release/{b}", Kind.RETIRE, Lane.COMPUTE, name, b, (), (f"gradient/{b}",), (f"{after}/{b}",))


def _slots(shape: StepShape) -> tuple[str, ...]:
    return tuple(f"slot/{k}" for k in range(shape.slots))


def _staged(shape: StepShape, present: Sequence[int]) -> list[Op]:
    """What happens before the norm is known: the first streamed buckets come in."""
    ops, staged = [], shape.staged
    for k, slot in enumerate(_slots(shape)):
        if shape.transient and staged:
            ops.append(Op(f"acquire/{k}", Kind.ACQUIRE, Lane.COMPUTE, stage_point(k), None, (), (slot,)))
        ops += [_read(shape, present, b, stage_point(k)) for b in staged[k : k + 1]]
    return ops


def _read(shape: StepShape, present: Sequence[int], b: int, point: str) -> Op:
    slots = slots_of(shape.placements, shape.slots)
    slot = slots[b]
    earlier = [e for e in _of(shape, present, Placement.STREAMED) if e < b and slots[e] == slot]
    waits = (*([f"acquire/{slot}"] if shape.transient else []), *(f"write/{e}" for e in earlier[-1:]))
    reads, writes = (f"state/{b}",), (f"slot/{slot}",)
    return Op(f"read/{b}", Kind.COPY, Lane.H2D, point, b, reads, writes, waits, prior=("written",))


def _step(shape: StepShape, present: Sequence[int]) -> list[Op]:
    partials = tuple(f"partial/{b}" for b in range(len(shape.placements)))
    ops = [
        Op(f"partials/{b}", Kind.PARTIALS, Lane.COMPUTE, STEP, b, (), (f"partial/{b}",)) for b in sorted(shape.absent)
    ]
    summed = sorted(shape.summed.intersection(present))
    ops += _summed(summed)
    lifted = tuple(f"lift/{b}" for b in summed[-1:])
    ops.append(Op("norm", Kind.NORM, Lane.COMPUTE, STEP, None, partials, (DEVICE_SCALARS,), lifted))
    if _of(shape, present, Placement.HOST):
        fetch = Op("fetch", Kind.COPY, Lane.D2H, STEP, None, (DEVICE_SCALARS,), (HOST_SCALARS,), ("norm",))
        ops.append(fetch)
    streamed = [b for b, p in enumerate(shape.placements) if p is Placement.STREAMED]
    next_read = iter(streamed[len(shape.staged) :])
    on_host: list[int] = []
    for b, placement in enumerate(shape.placements):
        if placement is Placement.STREAMED:
            ops += _streamed_bucket(shape, b, on_host[-2:-1]) if b in present else []
            following = next(next_read, None)
            ops += [_read(shape, present, following, STEP)] if following in present and following is not None else []
        elif b in present and placement is Placement.DEVICE:
            ops += _device_bucket(b)
        elif b in present:
            landing = f"total/{b}" if b in shape.summed else f"landing/{b}"
            ops += _host_bucket(shape, b, landing, first=not on_host)
            on_host.append(b)
    if streamed:
        ops.append(Op("written", Kind.JOIN, Lane.D2H, STEP))
    return ops


def _device_bucket(b: int) -> list[Op]:
    reads, writes = (f"gradient/{b}", DEVICE_SCALARS), (f"state/{b}", f"weight/{b}")
    return [
        Op(f"step/{b}", Kind.ADAMW, Lane.COMPUTE, STEP, b, reads, writes, ("norm",)),
        _release(b, STEP, "step"),
    ]


def _host_bucket(shape: StepShape, b: int, landing: str, *, first: bool) -> list[Op]:
    # All downloads come before `fetch` on their lane, and the first host step before the others on theirs. That is not
    # for beauty: of host functions that each wait for an event the driver lets only a few dozen be pending, and then
    # blocks the caller; of those that follow one another, hundreds.
    reads, writes, waits = (landing, HOST_SCALARS), (f"state/{b}", f"source/{b}"), ("fetch",) if first else ()
    return [
        Op(f"step/{b}", Kind.ADAMW, Lane.HOST, STEP, b, reads, writes, waits),
        *([] if b in shape.fetched or _is_late(shape, b) else [_upload(b, STEP)]),
        Op(f"retire/{b}", Kind.RETIRE, Lane.HOST, STEP, b, (), (landing,)),
    ]


def _upload(b: int, point: str) -> Op:
    waits = ("norm", f"step/{b}")
    return Op(f"upload/{b}", Kind.COPY, Lane.H2D, point, b, (f"source/{b}",), (f"weight/{b}",), waits)


def _streamed_bucket(shape: StepShape, b: int, paced_by: Sequence[int]) -> list[Op]:
    """`paced_by`: a host bucket before it. Its step says nothing about this state; it comes at a pace that leaves gaps
    between writes. A copy engine serves one stream until that has to wait, and models read flags back in forward
    (transformers does in each), which would come behind all writes.
    """
    slot, state = f"slot/{slots_of(shape.placements, shape.slots)[b]}", f"state/{b}"
    reads, writes, waits = (f"gradient/{b}", DEVICE_SCALARS), (slot, f"count/{b}", f"weight/{b}"), ("norm", f"read/{b}")
    pace = [f"step/{h}" for h in paced_by]
    return [
        Op(f"step/{b}", Kind.ADAMW, Lane.UPDATE, STEP, b, reads, writes, waits),
        Op(f"write/{b}", Kind.COPY, Lane.D2H, STEP, b, (slot,), (state,), (f"step/{b}", *pace)),
    ]


def _unstaged(shape: StepShape, present: Sequence[int]) -> list[Op]:
    """Each slot goes back behind what used it last."""
    slot_of_bucket = slots_of(shape.placements, shape.slots)
    users: dict[int, list[int]] = {}
    for b, slot in slot_of_bucket.items():
        users.setdefault(slot, []).append(b)
    ops, staged = [], set(shape.staged)
    for slot in slots_by_last_use(slot_of_bucket, shape.slots if slot_of_bucket else 0):
        held = users.get(slot, [])
        # Whether a bucket gets a gradient is not known when it is staged: one that got none is read, never written.
        written = [f"write/{b}" for b in held if b in present][-1:]
        waits = written or [f"read/{b}" for b in held if b in staged]
        point, slots = unstage_point(slot), (f"slot/{slot}",)
        ops.append(Op(f"unstage/{slot}", Kind.RETIRE, Lane.COMPUTE, point, None, (), slots, tuple(waits)))
    return ops


def _forward(shape: StepShape, present: Sequence[int]) -> list[Op]:
    ops: list[Op] = []
    layers = list(dict.fromkeys(shape.layers))
    for i, layer in enumerate(layers):
        if shape.transient and i == len(layers) - 1:
            ops += _unstaged(shape, present)
        held = [b for b in range(len(shape.placements)) if shape.layers[b] == layer]
        weights = tuple(f"weight/{b}" for b in held if b not in shape.fetched)
        own = [b for b in held if b in present]
        on_host = _of(shape, own, Placement.HOST)
        ops += [_upload(b, upload_point(layer)) for b in on_host if _is_late(shape, b)]
        waits = [f"upload/{b}" for b in on_host if b not in shape.fetched]
        # Host functions read landing places, which the next turn's copies overwrite; its additions are on their lane.
        waits += [f"retire/{b}" for b in on_host if b not in shape.summed]
        waits += [f"step/{b}" for b in _of(shape, own, Placement.STREAMED)]
        ops.append(Op(f"arrive/{layer}", Kind.JOIN, Lane.COMPUTE, use_point(layer), None, weights, (), tuple(waits)))
        ops += [_release(b, use_point(layer), "step") for b in _of(shape, own, Placement.STREAMED)]
        ops.append(Op(f"forward/{layer}", Kind.MODEL, Lane.COMPUTE, use_point(layer), None, weights))
    return ops
