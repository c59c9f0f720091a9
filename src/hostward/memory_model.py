"""How many bytes a run needs, by phase and owner, from a workload and what is decided about it. No torch.

The device's peak is the most at any moment of a step. Moments are those of the workload's curves; what lives around
them (weights, what earlier layers keep, gradients that have not left, staging slots) follows the schedules that the
engine carries out: gradients leave as `hostward.lowering.optimizer` says, saved tensors as
`hostward.lowering.activations`, weights as `hostward.lowering.weights`, and slots are counted by
`hostward.lowering.staging` from the same spans that the engine measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .choice import Choice
from .errors import ConfigError
from .gradient_model import Gradients
from .inventory import SPLIT_ELEMENTS, MasterKind, master_kind, state_bytes_per_element
from .lowering.optimizer import INBOXES, inbox_bytes
from .lowering.staging import FEWEST
from .plan import Placement, bucket_host_bytes
from .step_model import Owner, StepModel
from .workload import Workload

MIB = 1024 * 1024
CUBLAS_WORKSPACES = 2
"""One of the thread that runs forward, one of autograd's."""
CUBLAS_WORKSPACE_BYTES = 32 * MIB
"""Of each on a GPU of compute capability 9.0 and later; less on earlier ones."""
KERNEL_TABLES_BYTES = 2 * MIB
"""Page-locked, for addresses and constants on their way to kernels: one for each lane that launches them."""
_PARTIAL_BYTES = 12
"""Of the norm, for each chunk of a gradient."""
_SCALARS_BYTES = 12


@dataclass(frozen=True, slots=True)
class PhaseNeeds:
    """Bytes by owner: on the device at its peak, on the host, and page-locked of those on the host."""

    name: str
    device: Mapping[str, int]
    host: Mapping[str, int]
    pinned: Mapping[str, int]

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def pinned_bytes(self) -> int:
        return sum(self.pinned.values())


LOAD, FIRST_STEP, STEADY_STEP, SAVE, RESUME, SLEEP = "load", "first step", "steady step", "save", "resume", "sleep"
TRAINING = (LOAD, FIRST_STEP, STEADY_STEP)
"""Phases that every run has."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes by phase, in the order of `LOAD` to `SLEEP`. Totals are those of every run: the most of `TRAINING`."""

    phases: tuple[PhaseNeeds, ...]
    slots: int = 0
    """Staging slots from the fourth step on."""

    @property
    def device_peak_bytes(self) -> int:
        return max(phase.device_bytes for phase in self.phases if phase.name in TRAINING)

    @property
    def host_bytes(self) -> int:
        return max(phase.host_bytes for phase in self.phases if phase.name in TRAINING)

    @property
    def pinned_bytes(self) -> int:
        return max(phase.pinned_bytes for phase in self.phases if phase.name in TRAINING)

    def phase(self, name: str) -> PhaseNeeds:
        """The phase of that name. Raises KeyError."""
        return {phase.name: phase for phase in self.phases}[name]


def required(workload: Workload, choice: Choice) -> Needs:
    """What a run needs, in each of its phases.

    Not counted are the context of the CUDA driver and its modules (about 0.5 GiB on either side), and what the caching
    allocator holds besides what is allocated.

    Raises:
        ConfigError: a choice that is not of this workload.
    """
    _check(workload, choice)
    buckets, placements = workload.inventory.buckets, choice.placements
    gradients = Gradients(workload, choice)
    step = StepModel(workload, choice, gradients)
    host = _host(workload, choice, gradients, step.parked_bytes)
    state = sum(
        b.offsets[-1] * state_bytes_per_element(b.kind) + 8 * len(b.ranges)
        for b, p in zip(buckets, placements, strict=True)
        if p is Placement.DEVICE
    )
    rest = {
        Owner.STATE: state,
        Owner.WORKSPACE: CUBLAS_WORKSPACES * CUBLAS_WORKSPACE_BYTES + _partials(workload),
    }
    slots = step.slots()
    first, steady = (
        {**rest, **step.peak(count, unstage_at)}
        for count, unstage_at in ((min(FEWEST, slots.most), None), (slots.count, slots.unstage_at))
    )
    idle = {**rest, Owner.WEIGHTS: step.resident_weight_bytes}
    loading = {Owner.WEIGHTS: workload.weight_bytes, Owner.STATE: state, Owner.WORKSPACE: _partials(workload)}
    asleep = {
        **host,
        Owner.STATE: host.get(Owner.STATE, 0) + state,
        Owner.WEIGHTS: host.get(Owner.WEIGHTS, 0) + step.resident_weight_bytes,
    }
    settled = {**host, Owner.ACTIVATIONS: 0.0}
    phases = (
        _phase(LOAD, loading, settled, settled),
        _phase(FIRST_STEP, first, host, host),
        _phase(STEADY_STEP, steady, host, host),
        _phase(SAVE, idle, {**host, Owner.COPIES: _saved_copies(workload, choice)}, host),
        _phase(RESUME, loading, {**settled, Owner.COPIES: _loaded_copies(workload)}, settled),
        _phase(SLEEP, {}, asleep, asleep),
    )
    return Needs(phases, slots.count)


def _phase(
    name: str, device: Mapping[Owner, float], host: Mapping[Owner, float], pinned: Mapping[Owner, float]
) -> PhaseNeeds:
    return PhaseNeeds(name, *({o.value: round(v) for o, v in held.items() if v} for held in (device, host, pinned)))


def _check(workload: Workload, choice: Choice) -> None:
    buckets, layers = len(workload.inventory.buckets), len(workload.repeated)
    fix = "make the choice for this workload"
    if len(choice.placements) != buckets:
        raise ConfigError(f"{len(choice.placements)} placements for {buckets} buckets", fix=fix)
    if len(choice.activations) != layers:
        raise ConfigError(f"{len(choice.activations)} choices of activations for {layers} layers", fix=fix)
    unknown = choice.offloaded_weights - {layer.name for layer in workload.repeated}
    if unknown:
        raise ConfigError(f"weights of {min(unknown)!r} are to be offloaded, which is none of the layers", fix=fix)


def _partials(workload: Workload) -> int:
    """Device bytes of the norm's partial sums."""
    ranges = (r for b in workload.inventory.buckets for r in b.ranges)
    return _PARTIAL_BYTES * sum(-(-r.numel // SPLIT_ELEMENTS) for r in ranges)


def _host(workload: Workload, choice: Choice, gradients: Gradients, parked_bytes: float) -> dict[Owner, float]:
    """Host bytes of a step, all of them page-locked."""
    found = {Owner.STATE: 0.0, Owner.WEIGHTS: 0.0, Owner.GRADIENTS: 0.0}
    for bucket, placement in zip(workload.inventory.buckets, choice.placements, strict=True):
        landed = gradients.landed_itemsize_bytes(bucket)
        total = bucket_host_bytes(bucket, placement, landed)
        landing = bucket.offsets[-1] * landed if placement is Placement.HOST else 0
        source = bucket.offsets[-1] * bucket.dtype.itemsize_bytes if placement is Placement.HOST else 0
        found[Owner.STATE] += total - landing - source
        found[Owner.WEIGHTS] += source
        found[Owner.GRADIENTS] += landing
    summed = [workload.inventory.buckets[b] for b in sorted(gradients.summed)]
    if summed:
        inboxes = inbox_bytes(summed) // INBOXES * min(INBOXES, len(summed))
        found[Owner.GRADIENTS] += inboxes + _partials(workload)
    for layer in workload.repeated:
        if layer.name in choice.offloaded_weights:
            found[Owner.WEIGHTS] += layer.frozen_weight_bytes
    lanes = 2 if Placement.STREAMED in choice.placements else 1
    workspace = lanes * KERNEL_TABLES_BYTES + _SCALARS_BYTES
    return found | {Owner.ACTIVATIONS: parked_bytes, Owner.WORKSPACE: workspace}


def _saved_copies(workload: Workload, choice: Choice) -> int:
    """Host bytes beside the state while `hostward train` saves: masters of 16-bit weights, moments that do not lie on
    the host in one piece, and one tensor at a time on its way to the file.
    """
    away: dict[str, set[Placement]] = {}
    for bucket, placement in zip(workload.inventory.buckets, choice.placements, strict=True):
        for r in bucket.ranges:
            away.setdefault(r.name, set()).add(placement)
    total = 0
    for p in workload.inventory.parameters:
        total += 0 if master_kind(p.dtype) is MasterKind.WEIGHT else 4 * p.numel
        in_one_piece = len(away.get(p.name, ())) == 1 and Placement.DEVICE not in away[p.name]
        total += 0 if in_one_piece else 8 * p.numel
    return total + 4 * max((p.numel for p in workload.inventory.parameters), default=0)


def _loaded_copies(workload: Workload) -> int:
    """Host bytes of a whole state beside the one that is being filled."""
    return sum(_sizes(workload))


def _sizes(workload: Workload) -> Iterable[int]:
    for p in workload.inventory.parameters:
        yield p.numel * (8 if master_kind(p.dtype) is MasterKind.WEIGHT else 12)
