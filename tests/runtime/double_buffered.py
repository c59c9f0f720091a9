"""An optimizer step over several buckets through two slots, written with a backend's verbs, and what must come out.

    compute   gradient of bucket b from its weight, into device slot b % 2
    d2h       gradient to host slot b % 2; the device slot is dead after that
    host      AdamW of bucket b; the host slot is dead after that
    h2d       weight of bucket b

Every wait of every operation has a number, so that a test can leave one out. `log` holds what was declared, from
which `races` decides by itself, without clocks, whether all conflicting pairs are ordered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import torch

from hostward.core.inventory import MasterKind
from hostward.kernels import reference
from hostward.kernels.cpu.adamw import bias_tables
from hostward.runtime.backend import AdamWOperands, BoundRange, Buffer, Constants, Event, Hyper, Scalars, Tier
from hostward.runtime.simulated.backend import Order, SimulatedBackend
from hostward.runtime.simulated.race_detector import ByteRule
from hostward.schedule.ops import Lane

BUCKETS, SLOTS, STEPS, NUMEL = 4, 2, 3, 8
HYPER = Hyper(lr=0.1, weight_decay=0.01, beta1=0.9, beta2=0.99, eps=1e-8)
TABLES = bias_tables(HYPER.beta1, HYPER.beta2, STEPS + 2)


class NoRule(ByteRule):
    def check(self, *_: object) -> None:
        pass


class UncheckedBackend(SimulatedBackend):
    """A simulated backend without the detector: a missing wait shows only in the numbers, if at all."""

    def __init__(self, *, order: Order | None = None, threads: int | None = None) -> None:
        super().__init__(order=order, threads=threads)
        self._bytes = NoRule()


@dataclass(frozen=True)
class Issued:
    """What an operation declared. Reads and writes are sets of names of memory, waits are indices into the log."""

    lane: Lane
    reads: frozenset[str]
    writes: frozenset[str]
    waits: tuple[int, ...]


def happens_before(log: Sequence[Issued]) -> list[int]:
    """For each operation, the bit set of those before it through lanes, waits, or a chain of both."""
    before: list[int] = []
    last: dict[Lane, int] = {}
    for i, operation in enumerate(log):
        found = 0
        for j in (*operation.waits, *([last[operation.lane]] if operation.lane in last else [])):
            found |= before[j] | 1 << j
        before.append(found)
        last[operation.lane] = i
    return before


def races(log: Sequence[Issued]) -> list[tuple[int, int]]:
    """Pairs that use the same memory, one of them writing, and that nothing orders."""
    before = happens_before(log)
    return [(i, j) for i, j in combinations(range(len(log)), 2) if conflict(log[i], log[j]) and not before[j] >> i & 1]


def conflict(a: Issued, b: Issued) -> bool:
    return bool(a.writes & (b.reads | b.writes) or b.writes & a.reads)


def initial_weight(bucket: int) -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, NUMEL) + bucket


def gradient_of(weight: torch.Tensor, bucket: int, step: int) -> torch.Tensor:
    return weight * 0.5 + (bucket + 1) / (step + 2)


@dataclass
class Pipeline:
    """Issues all steps on `backend`; leaves out wait number `dropped`."""

    backend: SimulatedBackend
    dropped: int | None = None
    log: list[Issued] = field(default_factory=list)
    n_waits: int = 0
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        def make(
            tier: Tier, count: int, owner: str, numel: int = NUMEL, dtype: torch.dtype = torch.float32
        ) -> list[Buffer]:
            return self.backend.allocate(tier, [numel] * count, dtype, owner, pinned=tier is Tier.HOST)

        self.weights = make(Tier.DEVICE, BUCKETS, "weights")
        self.sources = make(Tier.HOST, BUCKETS, "sources")
        self.device_slots = make(Tier.DEVICE, SLOTS, "device slots")
        self.host_slots = make(Tier.HOST, SLOTS, "host slots")
        self.moments = list(
            zip(make(Tier.HOST, BUCKETS, "exp_avg"), make(Tier.HOST, BUCKETS, "exp_avg_sq"), strict=True)
        )
        self.counts = make(Tier.HOST, BUCKETS, "counts", 1, torch.int64)
        scale, norm = make(Tier.HOST, 2, "scalars", 1)
        (skip,) = make(Tier.HOST, 1, "skip", 1, torch.int32)
        scale.data.fill_(1.0)
        self.scalars = Scalars(scale, skip, norm)
        for b in range(BUCKETS):
            self.weights[b].data.copy_(initial_weight(b))
            self.sources[b].data.copy_(initial_weight(b))

    def run(self) -> list[torch.Tensor]:
        """Final device weights, one float32 [8] per bucket."""
        uploaded: dict[int, int] = {}
        device_free: dict[int, int] = {}
        host_free: dict[int, int] = {}
        for step in range(STEPS):
            for b in range(BUCKETS):
                k = b % SLOTS
                made = self._gradient(b, k, step, [*_known(uploaded, b), *_known(device_free, k)])
                landed, device_free[k] = self._download(k, [made, *_known(host_free, k)])
                stepped, host_free[k] = self._step(b, k, [landed, *_known(uploaded, b)])
                uploaded[b] = self._upload(b, [stepped, made])
        self.backend.synchronise()
        return [w.data.clone() for w in self.weights]

    def _issue(
        self,
        lane: Lane,
        reads: Collection[str],
        writes: Collection[str],
        waits: Sequence[int],
        verb: Callable[[list[Event]], Event],
    ) -> int:
        kept = [w for n, w in enumerate(waits, self.n_waits) if n != self.dropped]
        self.n_waits += len(waits)
        self.log.append(Issued(lane, frozenset(reads), frozenset(writes), tuple(kept)))
        self.events.append(verb([self.events[w] for w in kept]))
        return len(self.log) - 1

    def _gradient(self, b: int, k: int, step: int, waits: Sequence[int]) -> int:
        weight, slot = self.weights[b], self.device_slots[k]

        def kernel() -> None:
            slot.data.copy_(gradient_of(weight.data, b, step))

        return self._issue(
            Lane.COMPUTE,
            [f"weight {b}"],
            [f"device slot {k}"],
            waits,
            lambda events: self.backend.launch(
                f"gradient {b}", kernel, reads=[weight], writes=[slot], waits=events
            ).issue(),
        )

    def _download(self, k: int, waits: Sequence[int]) -> tuple[int, int]:
        source, target = self.device_slots[k], self.host_slots[k]
        landed = self._issue(
            Lane.D2H,
            [f"device slot {k}"],
            [f"host slot {k}"],
            waits,
            lambda events: self.backend.copy(Lane.D2H, [(target, source)], name="download", waits=events).issue(),
        )
        return landed, self._retire(source, f"device slot {k}", Lane.D2H)

    def _step(self, b: int, k: int, waits: Sequence[int]) -> tuple[int, int]:
        exp_avg, exp_avg_sq = self.moments[b]
        slot, source, count = self.host_slots[k], self.sources[b], self.counts[b]
        operands = AdamWOperands(
            ranges=[BoundRange(0, slot, source, count)],
            kind=MasterKind.WEIGHT,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            low=None,
            constants=Constants(HYPER, TABLES),
        )
        stepped = self._issue(
            Lane.HOST,
            [f"host slot {k}", "scalars"],
            [f"source {b}", f"moments {b}"],
            waits,
            lambda events: self.backend.adamw(Lane.HOST, f"step {b}", operands, self.scalars, waits=events).issue(),
        )
        return stepped, self._retire(slot, f"host slot {k}", Lane.HOST)

    def _upload(self, b: int, waits: Sequence[int]) -> int:
        weight, source = self.weights[b], self.sources[b]
        return self._issue(
            Lane.H2D,
            [f"source {b}"],
            [f"weight {b}"],
            waits,
            lambda events: self.backend.copy(Lane.H2D, [(weight, source)], name=f"upload {b}", waits=events).issue(),
        )

    def _retire(self, buffer: Buffer, name: str, lane: Lane) -> int:
        return self._issue(
            lane, [], [name], [], lambda events: self.backend.retire([buffer], lane, waits=events).issue()
        )


def _known(found: dict[int, int], key: int) -> list[int]:
    return [found[key]] if key in found else []


def new_pipeline(order: Order | None = None, *, dropped: int | None = None, checked: bool = True) -> Pipeline:
    """A pipeline ready to `run()`, which raises OrderingError where `checked`."""
    kind = SimulatedBackend if checked else UncheckedBackend
    return Pipeline(kind(order=order, threads=1), dropped)


def serial_weights() -> list[torch.Tensor]:
    """The final weights by the numpy definition of AdamW, one operation after the other."""
    final = []
    for b in range(BUCKETS):
        weight = initial_weight(b).numpy()
        exp_avg, exp_avg_sq = np.zeros(NUMEL, np.float32), np.zeros(NUMEL, np.float32)
        for step in range(STEPS):
            gradient = gradient_of(torch.from_numpy(weight), b, step).numpy()
            weight, exp_avg, exp_avg_sq = reference.adamw(
                weight, exp_avg, exp_avg_sq, gradient, step + 1, reference.Hyper(0.1, 0.01, 0.9, 0.99, 1e-8), TABLES
            )
        final.append(torch.from_numpy(weight))
    return final
