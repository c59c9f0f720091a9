"""Lower the optimizer step of a plan to a schedule.

    trigger      compute                        other lanes
    gradient/b   partials/b                     d2h: download/b (host buckets)
                 made/b                         d2h: download/b; host: add/b (host buckets that are accumulated there)
    release/b    release/b  (gradient freed)
    guesses                                     d2h: landed; host: guesses
    guess/b                                     host: guess/b (host buckets that are guessed)
    stage/k      acquire/k  (staging buffer)    h2d: read/b of the first streamed buckets
    step         norm, step/b (device buckets)  host: sums/b; h2d: lift/b (buckets that are accumulated on the host);
                                                d2h: fetch; host: step/b; h2d: upload/b;
                                                h2d: read/b; update: step/b; d2h: write/b
    unstage/k    unstage/k  (buffer freed)
    upload/L                                    h2d: upload/b, where weights of a layer before L are prefetched
    use/L        arrive/L, release/b (streamed)

The triggers are named `on_grad_ready` (gradient/b), `on_step` (step) and `on_pre_forward` (use/L) in comments. The
operations `backward/b` and `forward/L` are the caller's own passes, which read weights and make gradients.
`on_grad_ready` may come in any order, `release/b` after `gradient/b`, `guess/b` behind a `guesses` after it or not at
all, `stage/k` one after the other at any time before
`step`, `on_pre_forward` and `unstage/k` in any order after it; tests/schedule checks the rule over such orders.

State and weights share the lanes of the two copy directions, in order of use: a device makes one copy at a time in each
direction, and while state was copied on its own lane, no weight was copied. The first reads are issued before all other
copies, as many as overlap with backward (`prefetch_depth`). Each later read is issued after the step of the streamed
bucket `prefetch_depth` before it, at the latest after that of the last user of its staging buffer. So state is read
`prefetch_depth` buckets ahead of the CPU optimizer step's weights.

Weights of `prefetched` buckets are not uploaded: they are prefetched before their layers run
(`hostward.schedule.weights`). Weights that are used later must not be copied before them. Such weights are uploaded at
`on_pre_forward` of the last prefetched layer before them, at the latest at that of their own layer.

Gradients of buckets in `accumulated_on_host` are accumulated on the host: their `on_grad_ready` comes once in every
microbatch of a step, and a wait means the newest issue of the operation that it names, as everywhere.

The CPU optimizer step of a bucket in `guessed` is made when its gradients have landed, on the guess that the norm will
not clip: `guess/b` writes a second set of the state, and the step itself confirms that or makes it anew. `state/b` and
`source/b` name both sets. What a guess needs to know of the step before is recorded with the state. Several buckets
are guessed behind one wait for all copies of gradients so far (`landed`), because the driver blocks the caller where
many host functions each wait for an event of their own.
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
GUESSES = "guesses"
"""Trigger before those of buckets that are guessed together."""
MOST_GUESSES_APART = 20
"""Groups of buckets in a step that are guessed together, at most: of two steps as many waits may be pending."""
GRADIENTS_IN_FLIGHT = 2
"""Host buckets whose gradients are being offloaded at any time: one is copied while the next is made."""
LANDING_BUFFERS = 3
"""Landing buffers that accumulated buckets share: one is copied to, one added from, and one is free in between."""
_LANDED_BYTES = 4
"""Bytes reserved for an element of any dtype."""


def grad_ready_trigger(bucket: int) -> str:
    """Name the trigger `on_grad_ready` of a bucket: all its gradients are final."""
    return f"gradient/{bucket}"


def guess_trigger(bucket: int) -> str:
    """Name the trigger at which the step of a bucket is guessed, behind `GUESSES`: its gradients have been sent."""
    return f"guess/{bucket}"


def release_grad_trigger(bucket: int) -> str:
    """Name the trigger at which the device memory of a host bucket's gradients is released."""
    return f"release/{bucket}"


def pre_forward_trigger(layer: str) -> str:
    """Name the trigger `on_pre_forward` of a layer: the caller is about to use its weights."""
    return f"use/{layer}"


def acquire_staging_trigger(buffer: int) -> str:
    """Name the trigger at which there is room for a staging buffer."""
    return f"stage/{buffer}"


def release_staging_trigger(buffer: int) -> str:
    """Name the trigger at which the memory of a staging buffer is released."""
    return f"unstage/{buffer}"


def upload_trigger(layer: str) -> str:
    """Name the trigger at which new weights of a layer are uploaded, if a layer before it is prefetched."""
    return f"upload/{layer}"


def grads_to_copy_out(placements: Sequence[Placement], together: Iterable[Collection[int]]) -> frozenset[int]:
    """Return the buckets whose gradients must be copied out of memory shared with gradients that are offloaded earlier.

    Gradients of these buckets stay on the device until the step. The shared memory is freed only when none of it is in
    use.

    Args:
        placements: of every bucket.
        together: for each shared memory, the buckets that have gradients in it.
    """
    found: set[int] = set()
    for buckets in together:
        on_device = {b for b in buckets if placements[b] is not Placement.HOST}
        if len(on_device) < len(buckets):
            found |= on_device
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class StepShape:
    """Describe a step, as far as its schedule depends on it.

    Attributes:
        placements: of every bucket, in order of use in forward.
        layers: for every bucket the layer whose `on_pre_forward` needs its weights.
        absent: buckets without any gradient in this step.
        staging_buffers: number of GPU staging buffers, each for one streamed bucket; 0 where none is streamed.
        prefetch_depth: number of streamed buckets, from the first on, that are read when their staging buffer is
            acquired; None: one for each buffer.
        transient: staging buffers are acquired at `stage/k` and released at `unstage/k`, instead of being kept.
        overlap: False issues everything at the trigger `step`, the waits for new weights included.
        accumulated_on_host: host buckets whose gradients are accumulated on the host, microbatch by microbatch.
        prefetched: host buckets whose weights are prefetched layer by layer.
        guessed: host buckets whose step is guessed before the norm is known. Their gradients are not accumulated on
            the host, and their weights not prefetched.
    """

    placements: tuple[Placement, ...]
    layers: tuple[str, ...]
    absent: frozenset[int] = field(default=frozenset())
    staging_buffers: int = 0
    prefetch_depth: int | None = None
    transient: bool = False
    overlap: bool = True
    accumulated_on_host: frozenset[int] = field(default=frozenset())
    prefetched: frozenset[int] = field(default=frozenset())
    guessed: frozenset[int] = field(default=frozenset())

    @property
    def read_early(self) -> list[int]:
        """Return the streamed buckets that are read before the norm is known."""
        streamed = [b for b, p in enumerate(self.placements) if p is Placement.STREAMED]
        most = self.staging_buffers
        return streamed[: most if self.prefetch_depth is None else min(self.prefetch_depth, most)]


def landing_buffer_bytes(buckets: Sequence[Bucket]) -> list[int]:
    """Return the host bytes of each landing buffer that these buckets share, with room for gradients of any dtype."""
    return [max((b.offsets[-1] for b in buckets), default=0) * _LANDED_BYTES] * min(LANDING_BUFFERS, len(buckets))


def landing_buffer_by_bucket(accumulated: frozenset[int]) -> dict[int, int]:
    """Return the landing buffer of each bucket that is accumulated on the host; buckets use the buffers alternately."""
    return {b: i % LANDING_BUFFERS for i, b in enumerate(sorted(accumulated))}


@lru_cache(maxsize=16)
def staging_buffer_by_bucket(placements: tuple[Placement, ...], count: int) -> Mapping[int, int]:
    """Return the staging buffer of each streamed bucket; buckets use the `count` buffers alternately."""
    streamed = (b for b, p in enumerate(placements) if p is Placement.STREAMED)
    return MappingProxyType({b: n % count for n, b in enumerate(streamed)})


def staging_buffers_by_last_use(buffer_of_bucket: Mapping[int, int], count: int) -> list[int]:
    """Return all staging buffers by the time of their last write; first those that no bucket uses."""
    last = {buffer: bucket for bucket, buffer in sorted(buffer_of_bucket.items())}
    return sorted(range(count), key=lambda buffer: last.get(buffer, -1))


def deferred_uploads(shape: StepShape) -> dict[str, list[str]]:
    """Return for each prefetched layer the layers whose uploads are deferred to its `on_pre_forward`.

    Uploads of the layers after a prefetched layer, up to the next prefetched one, are deferred to it.
    """
    found: dict[str, list[str]] = {}
    last = None
    prefetched = {shape.layers[b] for b in shape.prefetched}
    for layer in dict.fromkeys(shape.layers):
        if layer in prefetched:
            last = layer
            found[last] = []
        elif last is not None:
            found[last].append(layer)
    return found


def _is_late(shape: StepShape, b: int) -> bool:
    return bool(shape.prefetched) and b > min(shape.prefetched) and b not in shape.prefetched


def lower_step(shape: StepShape) -> Schedule:
    """Return the schedule of one step, with the ordering rule checked over two steps in a row.

    Raises:
        OrderingError: the schedule has a race, which is a defect of this pass.
    """
    schedule = lower(shape)
    require_ordered(repeated(schedule, 2))
    return schedule


def lower(shape: StepShape) -> Schedule:
    """Return the schedule of one step, unchecked."""
    present = [b for b in range(len(shape.placements)) if b not in shape.absent]
    ops = [*_backward(shape, present), *_read_early(shape, present), *_step(shape, present), *_forward(shape, present)]
    if not shape.overlap:
        ops = [op if op.kind is Kind.MODEL else replace(op, trigger=STEP) for op in ops]
    return Schedule(tuple(ops))


def _of(shape: StepShape, present: Iterable[int], placement: Placement) -> list[int]:
    return [b for b in present if shape.placements[b] is placement]


def _backward(shape: StepShape, present: Sequence[int]) -> list[Op]:
    ops: list[Op] = []
    in_flight: list[int] = []
    weights = tuple(f"weight/{b}" for b in range(len(shape.placements)) if b not in shape.prefetched)
    landing_buffers = landing_buffer_by_bucket(shape.accumulated_on_host)
    for b in reversed(present):
        gradient = f"gradient/{b}"
        ops.append(Op(f"backward/{b}", Kind.MODEL, Lane.COMPUTE, grad_ready_trigger(b), b, weights, (gradient,)))
        partials = Op(
            f"partials/{b}", Kind.PARTIALS, Lane.COMPUTE, grad_ready_trigger(b), b, (gradient,), (f"partial/{b}",)
        )
        accumulated = b in shape.accumulated_on_host
        ops += [] if accumulated else [partials]
        if shape.placements[b] is Placement.HOST:
            if len(in_flight) == GRADIENTS_IN_FLIGHT:
                ops.append(_release(in_flight.pop(0), release_grad_trigger, "download"))
            ops += _accumulate(landing_buffers, shape.absent, b) if accumulated else [_download(b)]
            if b in shape.guessed:
                ops[-1] = replace(ops[-1], prior=(f"guess/{b}",))  # that reads what landed, which may come again
            in_flight.append(b)
    ops += [_release(b, release_grad_trigger, "download") for b in in_flight]
    return ops + _guesses([b for b in reversed(present) if b in shape.guessed])


def _download(b: int) -> Op:
    reads, writes, waits = (f"gradient/{b}",), (f"landing/{b}",), (f"partials/{b}",)
    return Op(f"download/{b}", Kind.COPY, Lane.D2H, grad_ready_trigger(b), b, reads, writes, waits)


def _guesses(buckets: Sequence[int]) -> list[Op]:
    """Return the operations that guess steps, behind one wait for all gradients that have been sent."""
    if not buckets:
        return []
    landed = Op("landed", Kind.JOIN, Lane.D2H, GUESSES)
    ops = [landed, Op(GUESSES, Kind.JOIN, Lane.HOST, GUESSES, waits=(landed.name,))]
    for b in buckets:
        reads, writes = (f"landing/{b}",), (f"state/{b}", f"source/{b}")
        ops.append(Op(f"guess/{b}", Kind.GUESS, Lane.HOST, guess_trigger(b), b, reads, writes))
    return ops


def _accumulate(landing_buffers: Mapping[int, int], absent: frozenset[int], b: int) -> list[Op]:
    buffer = landing_buffers[b]
    sharing = [e for e in reversed(landing_buffers) if landing_buffers[e] == buffer and e not in absent]
    # `on_grad_ready` comes in any order and more than once: the last user of the buffer is among all that share it.
    earlier = tuple(f"add/{e}" for e in sharing if e > b)
    before = tuple(f"add/{e}" for e in sharing if e <= b)
    trigger, gradient, landing, total = grad_ready_trigger(b), f"gradient/{b}", f"inbox/{buffer}", f"total/{b}"
    return [
        Op(f"made/{b}", Kind.JOIN, Lane.COMPUTE, trigger, b),
        Op(f"download/{b}", Kind.COPY, Lane.D2H, trigger, b, (gradient,), (landing,), (f"made/{b}", *earlier), before),
        Op(f"add/{b}", Kind.ADD, Lane.HOST, trigger, b, (landing, total), (total, f"sum/{b}"), (f"download/{b}",)),
    ]


def _accumulated_partials(buckets: Sequence[int]) -> list[Op]:
    """Return the operations that make the partial sums of accumulated gradients and copy them to the device.

    A partial sum that the last addition has made is not made again.
    """
    ops = [Op(f"sums/{b}", Kind.PARTIALS, Lane.HOST, STEP, b, (f"total/{b}",), (f"sum/{b}",)) for b in buckets]
    if buckets:
        ops.append(Op("summed", Kind.JOIN, Lane.HOST, STEP))
    waits = ("summed",)
    return ops + [
        Op(f"lift/{b}", Kind.COPY, Lane.H2D, STEP, b, (f"sum/{b}",), (f"partial/{b}",), waits) for b in buckets
    ]


def _release(b: int, trigger: object, after: str) -> Op:
    name = trigger(b) if callable(trigger) else str(trigger)
    return Op(f"release/{b}", Kind.RETIRE, Lane.COMPUTE, name, b, (), (f"gradient/{b}",), (f"{after}/{b}",))


def _read_early(shape: StepShape, present: Sequence[int]) -> list[Op]:
    """Return the operations before the norm is known: state of the first streamed buckets is read."""
    ops, early = [], shape.read_early
    for k in range(shape.staging_buffers):
        trigger, buffer = acquire_staging_trigger(k), f"slot/{k}"
        if shape.transient and early:
            ops.append(Op(f"acquire/{k}", Kind.ACQUIRE, Lane.COMPUTE, trigger, None, (), (buffer,)))
        ops += [_read(shape, present, b, trigger) for b in early[k : k + 1]]
    return ops


def _read(shape: StepShape, present: Sequence[int], b: int, trigger: str) -> Op:
    buffers = staging_buffer_by_bucket(shape.placements, shape.staging_buffers)
    buffer = buffers[b]
    earlier = [e for e in _of(shape, present, Placement.STREAMED) if e < b and buffers[e] == buffer]
    waits = (*([f"acquire/{buffer}"] if shape.transient else []), *(f"write/{e}" for e in earlier[-1:]))
    reads, writes = (f"state/{b}",), (f"slot/{buffer}",)
    return Op(f"read/{b}", Kind.COPY, Lane.H2D, trigger, b, reads, writes, waits, prior=("written",))


def _step(shape: StepShape, present: Sequence[int]) -> list[Op]:
    partials = tuple(f"partial/{b}" for b in range(len(shape.placements)))
    ops = [
        Op(f"partials/{b}", Kind.PARTIALS, Lane.COMPUTE, STEP, b, (), (f"partial/{b}",)) for b in sorted(shape.absent)
    ]
    accumulated = sorted(shape.accumulated_on_host.intersection(present))
    ops += _accumulated_partials(accumulated)
    lifted = tuple(f"lift/{b}" for b in accumulated[-1:])
    ops.append(Op("norm", Kind.NORM, Lane.COMPUTE, STEP, None, partials, (DEVICE_SCALARS,), lifted))
    if _of(shape, present, Placement.HOST):
        fetch = Op("fetch", Kind.COPY, Lane.D2H, STEP, None, (DEVICE_SCALARS,), (HOST_SCALARS,), ("norm",))
        ops.append(fetch)
    streamed = [b for b, p in enumerate(shape.placements) if p is Placement.STREAMED]
    next_read = iter(streamed[len(shape.read_early) :])
    first = True
    for b, placement in enumerate(shape.placements):
        if placement is Placement.STREAMED:
            ops += _streamed_bucket(shape, b) if b in present else []
            following = next(next_read, None)
            ops += [_read(shape, present, following, STEP)] if following in present and following is not None else []
        elif b in present and placement is Placement.DEVICE:
            ops += _device_bucket(b)
        elif b in present:
            landing = f"total/{b}" if b in shape.accumulated_on_host else f"landing/{b}"
            ops += _host_bucket(shape, b, landing, first=first)
            first = False
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
    # Only the first CPU optimizer step waits for `fetch`, which comes after all downloads on its lane; the other steps
    # follow the first on theirs. The driver lets only a few dozen host functions be pending that each wait for an
    # event, and then blocks the caller; of host functions that follow one another it lets hundreds be pending.
    reads, writes, waits = (landing, HOST_SCALARS), (f"state/{b}", f"source/{b}"), ("fetch",) if first else ()
    return [
        Op(f"step/{b}", Kind.ADAMW, Lane.HOST, STEP, b, reads, writes, waits),
        *([] if b in shape.prefetched or _is_late(shape, b) else [_upload(b, STEP)]),
        Op(f"retire/{b}", Kind.RETIRE, Lane.HOST, STEP, b, (), (landing,)),
    ]


def _upload(b: int, trigger: str) -> Op:
    waits = ("norm", f"step/{b}")
    return Op(f"upload/{b}", Kind.COPY, Lane.H2D, trigger, b, (f"source/{b}",), (f"weight/{b}",), waits)


def _streamed_bucket(shape: StepShape, b: int) -> list[Op]:
    """Return the step of a streamed bucket and the write of its state."""
    buffer, state = f"slot/{staging_buffer_by_bucket(shape.placements, shape.staging_buffers)[b]}", f"state/{b}"
    reads, waits = (f"gradient/{b}", DEVICE_SCALARS), ("norm", f"read/{b}")
    writes = (buffer, f"count/{b}", f"weight/{b}")
    return [
        Op(f"step/{b}", Kind.ADAMW, Lane.UPDATE, STEP, b, reads, writes, waits),
        Op(f"write/{b}", Kind.COPY, Lane.D2H, STEP, b, (buffer,), (state,), (f"step/{b}",)),
    ]


def _release_staging(shape: StepShape, present: Sequence[int]) -> list[Op]:
    """Return the releases of the staging buffers, each after the last use of its buffer."""
    buffer_of_bucket = staging_buffer_by_bucket(shape.placements, shape.staging_buffers)
    users: dict[int, list[int]] = {}
    for b, buffer in buffer_of_bucket.items():
        users.setdefault(buffer, []).append(b)
    ops, early = [], set(shape.read_early)
    for buffer in staging_buffers_by_last_use(buffer_of_bucket, shape.staging_buffers if buffer_of_bucket else 0):
        held = users.get(buffer, [])
        # A bucket is read before it is known whether it gets a gradient: without one its state is never written.
        written = [f"write/{b}" for b in held if b in present][-1:]
        waits = written or [f"read/{b}" for b in held if b in early]
        trigger, writes = release_staging_trigger(buffer), (f"slot/{buffer}",)
        ops.append(Op(f"unstage/{buffer}", Kind.RETIRE, Lane.COMPUTE, trigger, None, (), writes, tuple(waits)))
    return ops


def _forward(shape: StepShape, present: Sequence[int]) -> list[Op]:
    ops: list[Op] = []
    layers = list(dict.fromkeys(shape.layers))
    for i, layer in enumerate(layers):
        if shape.transient and i == len(layers) - 1:
            ops += _release_staging(shape, present)
        held = [b for b in range(len(shape.placements)) if shape.layers[b] == layer]
        weights = tuple(f"weight/{b}" for b in held if b not in shape.prefetched)
        own = [b for b in held if b in present]
        on_host = _of(shape, own, Placement.HOST)
        ops += [_upload(b, upload_trigger(layer)) for b in on_host if _is_late(shape, b)]
        waits = [f"upload/{b}" for b in on_host if b not in shape.prefetched]
        # Host functions read landing buffers, which the next step's copies overwrite; its additions are on their lane.
        waits += [f"retire/{b}" for b in on_host if b not in shape.accumulated_on_host]
        waits += [f"step/{b}" for b in _of(shape, own, Placement.STREAMED)]
        ops.append(
            Op(f"arrive/{layer}", Kind.JOIN, Lane.COMPUTE, pre_forward_trigger(layer), None, weights, (), tuple(waits))
        )
        ops += [_release(b, pre_forward_trigger(layer), "step") for b in _of(shape, own, Placement.STREAMED)]
        ops.append(Op(f"forward/{layer}", Kind.MODEL, Lane.COMPUTE, pre_forward_trigger(layer), None, weights))
    return ops
