"""Any program of the backend's verbs: the detector agrees with a search for unordered pairs, and orders agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import hypothesis.strategies as st
import torch
from double_buffered import Issued, conflict, races
from hypothesis import given, settings

from hostward.errors import OrderingError
from hostward.runtime.backend import Buffer, Event, Tier
from hostward.runtime.simulated.backend import Order, SimulatedBackend
from hostward.schedule.ops import Lane

CELLS = 3
DEVICE = {f"d{i}": frozenset({f"d{i}"}) for i in range(CELLS)} | {"d01": frozenset({"d0", "d1"})}
"""Device buffers, by the cells of memory that they cover; d01 is a view over d0 and d1."""
HOST = {f"h{i}": frozenset({f"h{i}"}) for i in range(CELLS)}

cells = st.integers(0, CELLS - 1)
device_sets = st.lists(st.sampled_from(sorted(DEVICE)), max_size=2, unique=True)


@dataclass(frozen=True)
class Call:
    """One verb: launch (compute, update), copy (down, up) or retire, on named buffers. `kept` are drawn waits, taken
    modulo the index.
    """

    lane: Lane
    verb: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    kept: tuple[int, ...]

    def declared(self, waits: Sequence[int]) -> Issued:
        covers = DEVICE | HOST
        reads = frozenset().union(*(covers[name] for name in self.reads))
        writes = frozenset().union(*(covers[name] for name in self.writes))
        return Issued(self.lane, reads, writes, tuple(waits))


waits = st.lists(st.integers(0, 20), max_size=3).map(tuple)
calls = st.one_of(
    st.builds(
        lambda lane, r, w, k: Call(lane, "launch", tuple(r), tuple(w), k),
        st.sampled_from((Lane.COMPUTE, Lane.UPDATE)),
        device_sets,
        device_sets,
        waits,
    ),
    st.builds(
        lambda lane, d, h, k: Call(lane, "copy", (f"d{d}",), (f"h{h}",), k),
        st.sampled_from((Lane.D2H, Lane.D2H)),
        cells,
        cells,
        waits,
    ),
    st.builds(
        lambda lane, h, d, k: Call(lane, "copy", (f"h{h}",), (f"d{d}",), k),
        st.sampled_from((Lane.H2D, Lane.H2D)),
        cells,
        cells,
        waits,
    ),
    st.builds(
        lambda lane, b, k: Call(lane, "retire", (), (b,), k),
        st.sampled_from(Lane),
        st.sampled_from(sorted(DEVICE | HOST)),
        waits,
    ),
)
programs = st.lists(calls, min_size=1, max_size=14)


def make_buffers(backend: SimulatedBackend) -> dict[str, Buffer]:
    on_device = backend.allocate(Tier.DEVICE, [4] * CELLS, torch.int32, "on device")
    on_host = backend.allocate(Tier.HOST, [4] * CELLS, torch.int32, "on host")
    found = {f"d{i}": b for i, b in enumerate(on_device)} | {f"h{i}": b for i, b in enumerate(on_host)}
    slab = torch.as_strided(on_device[0].data, (8,), (1,))
    backend.synchronise()  # device memory belongs to the compute lane until then
    return found | {"d01": Buffer(Tier.DEVICE, slab, "view")}


def issue(backend: SimulatedBackend, buffers: dict[str, Buffer], call: Call, number: int, on: list[Event]) -> Event:
    reads, writes = [buffers[n] for n in call.reads], [buffers[n] for n in call.writes]
    if call.verb == "copy":
        return backend.copy(call.lane, [(writes[0], reads[0])], name="copy", waits=on).issue()
    if call.verb == "retire":
        return backend.retire(writes, call.lane, waits=on).issue()

    def kernel() -> None:
        total = sum(int(r.data.sum()) for r in reads) * 31 + number
        for w in writes:
            w.data.fill_(total % 1_000_003)

    return backend.launch("launch", kernel, reads=reads, writes=writes, lane=call.lane, waits=on).issue()


@settings(deadline=None, max_examples=300)
@given(programs)
def test_the_detector_stops_at_the_first_operation_with_an_unordered_conflict(program: list[Call]) -> None:
    log = [c.declared([k % i for k in c.kept] if i else []) for i, c in enumerate(program)]
    unordered = races(log)
    expected = min((j for _, j in unordered), default=None)
    backend = SimulatedBackend(threads=1)
    buffers = make_buffers(backend)
    events: list[Event] = []
    found = None
    for i, call in enumerate(program):
        try:
            events.append(issue(backend, buffers, call, i, [events[w] for w in log[i].waits]))
        except OrderingError:
            found = i
            break
    assert found == expected


@settings(deadline=None, max_examples=60)
@given(programs)
def test_programs_that_wait_for_every_conflict_give_the_same_bits_in_every_order(program: list[Call]) -> None:
    plain = [c.declared(()) for c in program]
    needed = [[i for i in range(j) if conflict(plain[i], plain[j])] for j in range(len(plain))]
    outcomes = set()
    for order in (None, Order(late=frozenset({Lane.COMPUTE})), *(Order(seed) for seed in range(6))):
        backend = SimulatedBackend(order=order, threads=1)
        buffers = make_buffers(backend)
        events: list[Event] = []
        for j, call in enumerate(program):
            events.append(issue(backend, buffers, call, j, [events[i] for i in needed[j]]))
        backend.synchronise()
        outcomes.add(tuple(tuple(buffers[name].data.tolist()) for name in sorted(buffers)))
    assert len(outcomes) == 1
