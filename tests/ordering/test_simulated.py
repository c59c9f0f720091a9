"""The simulated backend: lanes, events, freed and retired memory, refusals, and what it counts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from hostward.engine.backend import Buffer, Event, Lane, Scalars, Tier
from hostward.engine.simulated import Order, SimulatedBackend
from hostward.errors import MemoryLimitError, OrderingError, PlacementError

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def backend_with(order: Order | None = None, *, poison: bool = True) -> SimulatedBackend:
    return SimulatedBackend(order=order, threads=1, poison=poison)


def pair(backend: SimulatedBackend, dtype: torch.dtype = torch.float32, numel: int = 8) -> tuple[Buffer, Buffer]:
    """One device buffer and one host buffer."""
    (device,) = backend.allocate(Tier.DEVICE, [numel], dtype, "on device")
    (host,) = backend.allocate(Tier.HOST, [numel], dtype, "on host", pinned=True)
    return device, host


def fill(backend: SimulatedBackend, buffer: Buffer, value: float, waits: Sequence[Event] = ()) -> Event:
    return backend.launch(f"fill {value}", lambda: buffer.data.fill_(value), reads=[], writes=[buffer], waits=waits)


def test_nothing_runs_before_somebody_waits() -> None:
    backend = backend_with()
    device, host = pair(backend)
    filled = fill(backend, device, 3.0)
    assert not device.data.any()
    copied = backend.copy(Lane.D2H, host, device, name="copy", waits=[filled])
    backend.join([filled])
    assert device.data.eq(3.0).all()
    assert not host.data.any()
    backend.join([copied])
    assert host.data.eq(3.0).all()


@pytest.mark.parametrize("seed", [None, *range(20)])
@pytest.mark.parametrize("late", [frozenset(), frozenset({Lane.COMPUTE}), frozenset(Lane)])
def test_a_lane_keeps_its_order(seed: int | None, late: frozenset[Lane]) -> None:
    backend = backend_with(Order(seed, late))
    device, _ = pair(backend)
    seen: list[int] = []
    for i in range(6):
        backend.launch("note", lambda i=i: seen.append(i), reads=[], writes=[device])  # type: ignore[misc]
    backend.synchronise()
    assert seen == list(range(6))


def test_lanes_that_share_nothing_may_overtake_each_other() -> None:
    firsts = set()
    for late in (frozenset({Lane.COMPUTE}), frozenset({Lane.D2H})):
        backend = backend_with(Order(late=late))
        a, host = pair(backend)
        b, _ = pair(backend)
        a.data.fill_(1.0)
        seen: list[bool] = []
        backend.launch("look", lambda seen=seen, host=host: seen.append(bool(host.data.any())), reads=[], writes=[b])  # type: ignore[misc]
        backend.copy(Lane.D2H, host, a, name="copy")
        backend.synchronise()
        firsts.add(seen[0])
    assert firsts == {False, True}


def test_random_orders_differ_and_a_seed_repeats_itself() -> None:
    def trace(seed: int) -> tuple[int, ...]:
        """How many of the other lanes' operations each operation of the compute lane finds done."""
        backend = backend_with(Order(seed))
        probe, _ = pair(backend)
        others = [pair(backend)[1] for _ in range(9)]
        found: list[int] = []
        for _ in range(3):
            kernel = lambda: found.append(sum(bool(o.data.isnan().any()) for o in others))  # noqa: E731
            backend.launch("probe", kernel, reads=[], writes=[probe])
        for i, other in enumerate(others):
            backend.retire([other], (Lane.D2H, Lane.HOST, Lane.H2D)[i % 3])
        backend.synchronise()
        return tuple(found)

    assert trace(7) == trace(7)
    assert len({trace(seed) for seed in range(20)}) > 10


def test_order_through_a_third_lane_counts() -> None:
    backend = backend_with()
    device, host = pair(backend)
    filled = fill(backend, device, 1.0)
    down = backend.copy(Lane.D2H, host, device, name="down", waits=[filled])
    backend.retire([host], Lane.HOST, waits=[down])
    with pytest.raises(OrderingError, match="'retire' on lane h2d and 'retire' on lane host both use 'on host'"):
        backend.retire([host], Lane.H2D, waits=[down])
    fill(backend, device, 2.0, waits=[down])
    backend.synchronise()


def test_join_orders_everything_issued_later_on_every_lane() -> None:
    backend = backend_with()
    device, host = pair(backend)
    filled = fill(backend, device, 1.0)
    with pytest.raises(OrderingError):
        backend.copy(Lane.D2H, host, device, name="too early")
    backend.join([filled])
    backend.join([backend.copy(Lane.D2H, host, device, name="in time")])
    assert host.data.eq(1.0).all()


def test_record_covers_the_compute_lane_up_to_now_and_no_further() -> None:
    backend = backend_with()
    device, host = pair(backend)
    fill(backend, device, 1.0)
    backend.join([backend.record()])
    assert device.data.eq(1.0).all()
    fill(backend, device, 1.5)
    recorded = backend.record()
    copied = backend.copy(Lane.D2H, host, device, name="copy", waits=[recorded])
    fill(backend, device, 2.0, waits=[copied])
    with pytest.raises(OrderingError):
        backend.copy(Lane.D2H, host, device, name="copy again", waits=[recorded])


def test_adopted_memory_was_made_on_the_compute_lane() -> None:
    backend = backend_with()
    _, host = pair(backend)
    gradient = backend.adopt(torch.ones(8), "gradients")
    with pytest.raises(OrderingError, match="'copy' on lane d2h and 'made gradients' on lane compute"):
        backend.copy(Lane.D2H, host, gradient, name="copy")
    backend.join([backend.copy(Lane.D2H, host, gradient, name="copy", waits=[backend.record()])])
    assert host.data.eq(1.0).all()


@pytest.mark.parametrize("view_first", [True, False])
def test_views_of_the_same_memory_conflict(view_first: bool) -> None:
    backend = backend_with()
    whole, _ = pair(backend)
    view = Buffer(Tier.DEVICE, whole.data[2:4], "view")
    _, host = pair(backend, numel=2)
    first, second = (view, whole) if view_first else (whole, view)
    fill(backend, first, 1.0)
    with pytest.raises(OrderingError, match="both use"):
        backend.retire([second], Lane.D2H)
    other = Buffer(Tier.DEVICE, whole.data[4:6], "other part")
    if view_first:  # only the view was filled
        backend.copy(Lane.D2H, host, other, name="copy")
        backend.synchronise()


def test_memory_of_a_dropped_tensor_is_not_taken_for_another() -> None:
    backend = backend_with()
    _, landing = pair(backend, numel=1000)
    _, other = pair(backend)
    for _ in range(20):
        gradient = backend.adopt(torch.ones(1000), "gradients")
        backend.copy(Lane.D2H, landing, gradient, name="copy", waits=[backend.record()])
        # The copy, issued first, has run after this, but nothing on the compute lane is ordered after it.
        backend.join([backend.retire([other], Lane.HOST)])
        del gradient
    backend.synchronise()


@pytest.mark.parametrize("dtype", FLOATS)
def test_freed_memory_reads_as_nan(dtype: torch.dtype) -> None:
    backend = backend_with()
    device, _ = pair(backend, dtype)
    view = device.data[:4]
    filled = fill(backend, device, 1.0)
    backend.free([device], after=[filled])
    assert view.isnan().all()
    assert device.data.numel() == 0


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
def test_h21_retired_memory_reads_as_poison_once_the_lane_gets_there(dtype: torch.dtype) -> None:
    backend = backend_with()
    _, host = pair(backend, dtype)
    backend.retire([host], Lane.HOST)
    assert not host.data.any()
    backend.synchronise()
    assert host.data.view(torch.uint8).eq(0xFF).all()


def test_poison_can_be_switched_off() -> None:
    backend = backend_with(poison=False)
    _, host = pair(backend)
    host.data.fill_(1.0)
    backend.retire([host], Lane.HOST)
    backend.synchronise()
    assert host.data.eq(1.0).all()


def test_h21_free_while_in_use_is_reported_and_frees_nothing() -> None:
    backend = backend_with()
    device, host = pair(backend)
    spare, _ = pair(backend)
    held = backend.ledger.total_bytes(Tier.DEVICE)
    copied = backend.copy(Lane.D2H, host, device, name="download")
    with pytest.raises(OrderingError) as caught:
        backend.free([spare, device])
    assert caught.value.what == "'on device' is freed while 'download' may still use it"
    assert (caught.value.why, caught.value.fix) == ("a free is a write", "pass that operation's event to free()")
    assert backend.ledger.total_bytes(Tier.DEVICE) == held
    assert not spare.data.isnan().any()
    backend.free([spare, device], after=[copied])
    assert backend.ledger.by_owner(Tier.DEVICE) == {}
    assert not host.data.isnan().any()


def test_h21_free_of_a_slab_while_a_view_of_it_is_in_use_is_reported() -> None:
    backend = backend_with()
    _, host = pair(backend)
    view = Buffer(Tier.HOST, host.data[:4], "range")
    small, _ = pair(backend, numel=4)
    copied = backend.copy(Lane.D2H, view, small, name="download")
    with pytest.raises(OrderingError, match="'on host' is freed while 'download' may still use it"):
        backend.free([host])
    backend.join([copied])
    backend.free([host])


def test_free_after_synchronise_needs_no_event() -> None:
    backend = backend_with()
    device, host = pair(backend)
    backend.copy(Lane.D2H, host, device, name="copy")
    backend.synchronise()
    backend.free([device, host])
    assert backend.ledger.total_bytes(Tier.DEVICE) == backend.ledger.total_bytes(Tier.HOST) == 0


def test_an_event_that_never_comes_is_reported_as_deadlock() -> None:
    backend, other = backend_with(), backend_with()
    device, _ = pair(backend)
    elsewhere, _ = pair(other)
    fill(backend, device, 1.0, waits=[fill(other, elsewhere, 1.0)])
    with pytest.raises(OrderingError) as caught:
        backend.synchronise()
    assert caught.value.what == "deadlock: ['fill 1.0'] all wait"
    assert caught.value.fix == "an event is waited for that nobody records"


def test_an_operation_that_failed_raises_once_and_its_waiters_go_on_as_on_a_stream() -> None:
    backend = backend_with()
    device, host = pair(backend)

    def fail() -> None:
        raise MemoryLimitError("the kernel failed")

    failed = backend.launch("fails", fail, reads=[], writes=[device])
    backend.copy(Lane.D2H, host, device, name="copy", waits=[failed])
    with pytest.raises(MemoryLimitError, match="the kernel failed"):
        backend.synchronise()
    device.data.fill_(7.0)
    backend.synchronise()
    assert host.data.tolist() == device.data.tolist()


def test_an_event_of_another_backend_is_refused() -> None:
    with pytest.raises(OrderingError, match="an event of another backend"):
        backend_with().join([Event(object())])


@pytest.mark.parametrize("lane", Lane)
@pytest.mark.parametrize("source_tier", Tier)
@pytest.mark.parametrize("destination_tier", Tier)
def test_copies_go_between_the_tiers_of_their_lane(lane: Lane, source_tier: Tier, destination_tier: Tier) -> None:
    backend = backend_with()
    (source,) = backend.allocate(source_tier, [4], torch.float32, "source")
    (destination,) = backend.allocate(destination_tier, [4], torch.float32, "destination")
    legal = {(Lane.D2H, Tier.DEVICE, Tier.HOST), (Lane.H2D, Tier.HOST, Tier.DEVICE)}
    if (lane, source_tier, destination_tier) in legal:
        backend.copy(lane, destination, source, name="copy")
        assert backend.ledger.copied_bytes == {lane: 16}
        return
    with pytest.raises(PlacementError) as caught:
        backend.copy(lane, destination, source, name="copy")
    assert caught.value.what == f"lane {lane} cannot copy from {source_tier} to {destination_tier}"
    assert backend.ledger.copied_bytes == {}


@pytest.mark.parametrize(
    ("source", "destination", "what"),
    [
        (torch.ones(4), torch.ones(4, dtype=torch.bfloat16), "torch.float32 (4,) into torch.bfloat16 (4,)"),
        (torch.ones(4, dtype=torch.float16), torch.ones(4, dtype=torch.bfloat16), "torch.float16 (4,) into"),
        (torch.ones(4), torch.ones(5), "torch.float32 (4,) into torch.float32 (5,)"),
        (torch.ones(4), torch.ones(1), "torch.float32 (4,) into torch.float32 (1,)"),
        (torch.ones(8)[::2], torch.ones(4), "one side is not contiguous"),
        (torch.ones(4), torch.ones(8)[::2], "one side is not contiguous"),
    ],
)
def test_h24_a_copy_never_converts_and_never_goes_through_a_hidden_buffer(
    source: torch.Tensor, destination: torch.Tensor, what: str
) -> None:
    backend = backend_with()
    with pytest.raises(PlacementError) as caught:
        backend.copy(Lane.D2H, Buffer(Tier.HOST, destination, "to"), Buffer(Tier.DEVICE, source, "from"), name="copy")
    assert caught.value.what.startswith("copy of 'from': ")
    assert what in caught.value.what
    assert caught.value.why
    assert caught.value.fix
    assert backend.ledger.copied_bytes == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_h24_a_copy_there_and_back_keeps_every_bit(dtype: torch.dtype) -> None:
    backend = backend_with()
    device, host = pair(backend, dtype, 1024)
    back, _ = pair(backend, dtype, 1024)
    bits = torch.randint(
        0, 256, (1024 * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    device.data.view(torch.uint8).copy_(bits)
    down = backend.copy(Lane.D2H, host, device, name="down")
    backend.join([backend.copy(Lane.H2D, back, host, name="up", waits=[down])])
    assert torch.equal(back.data.view(torch.uint8), bits)


def test_device_kernels_refuse_host_memory() -> None:
    backend = backend_with()
    device, host = pair(backend)
    for reads, writes in (([host], [device]), ([device], [host])):
        with pytest.raises(PlacementError) as caught:
            backend.launch("kernel", lambda: None, reads=reads, writes=writes)
        assert caught.value.what == "kernel: operand 'on host' lies on the host, not on the device"
        assert caught.value.why == "device kernels never run on host memory, and host kernels never on device memory"
    scalars = Scalars(device, device, host)
    with pytest.raises(PlacementError, match="norm: operand 'on host'"):
        backend.norm([device], scalars, max_norm=1.0, inv_scale=None, found_inf=None)


def test_allocation_is_zero_exact_and_in_one_slab() -> None:
    backend = backend_with()
    buffers = backend.allocate(Tier.HOST, [3, 0, 5], torch.bfloat16, "x")
    assert [b.data.numel() for b in buffers] == [3, 0, 5]
    assert not any(b.data.any() for b in buffers)
    assert len({b.data.untyped_storage().data_ptr() for b in buffers}) == 1
    assert buffers[0].data.untyped_storage().nbytes() == 16
    assert backend.allocate(Tier.HOST, [], torch.float32, "x") == []
    assert [b.nbytes for b in backend.allocate(Tier.HOST, [0, 0], torch.int64, "x")] == [0, 0]


def test_the_ledger_counts_bytes_by_owner_tier_and_direction() -> None:
    backend = backend_with()
    a, b = backend.allocate(Tier.DEVICE, [10, 6], torch.float32, "exp_avg")
    (c,) = backend.allocate(Tier.HOST, [10], torch.float32, "exp_avg", pinned=True)
    backend.allocate(Tier.HOST, [7], torch.int16, "remainder")
    backend.adopt(torch.ones(5), "weights", counted=True)
    backend.adopt(torch.ones(5), "gradients")
    assert backend.ledger.by_owner(Tier.DEVICE) == {"exp_avg": 64, "weights": 20}
    assert backend.ledger.by_owner(Tier.HOST) == {"exp_avg": 40, "remainder": 14}
    assert backend.ledger.total_bytes(Tier.HOST) == 54
    assert backend.ledger.pinned_bytes == 40
    down = backend.copy(Lane.D2H, c, a, name="down")
    up = backend.copy(Lane.H2D, a, c, name="up", waits=[down])
    backend.copy(Lane.D2H, c, a, name="down", waits=[up])
    assert backend.ledger.copied_bytes == {Lane.D2H: 80, Lane.H2D: 40}
    backend.synchronise()
    backend.free([b, c])
    assert backend.ledger.by_owner(Tier.DEVICE) == {"exp_avg": 40, "weights": 20}
    assert backend.ledger.by_owner(Tier.HOST) == {"remainder": 14}
    assert backend.ledger.pinned_bytes == 0


@pytest.mark.parametrize(
    ("gradients", "found_inf", "expected"),
    [
        ([[3.0, 0.0], [0.0, 4.0]], None, (0.2 * 5 / 5, 0, 5.0)),
        ([[3.0, float("inf")], [0.0, 4.0]], None, (0.0, 1, float("inf"))),
        ([[3.0, 0.0], [0.0, 4.0]], 1.0, (0.2, 1, 5.0)),
    ],
)
def test_norm_writes_scale_skip_and_norm(
    gradients: list[list[float]], found_inf: float | None, expected: tuple[float, int, float]
) -> None:
    backend = backend_with()
    scale, norm = backend.allocate(Tier.DEVICE, [1, 1], torch.float32, "scalars")
    (skip,) = backend.allocate(Tier.DEVICE, [1], torch.int32, "skip")
    buffers = [backend.adopt(torch.tensor(g), "gradients") for g in gradients]
    flag = None if found_inf is None else torch.tensor(found_inf)
    done = backend.norm(buffers, Scalars(scale, skip, norm), max_norm=1.0, inv_scale=None, found_inf=flag)
    backend.join([done])
    assert scale.data.item() == pytest.approx(expected[0], abs=1e-6)
    assert (skip.data.item(), norm.data.item()) == expected[1:]


def test_describe_names_backend_threads_and_instruction_set() -> None:
    facts = backend_with().describe()
    assert (facts["backend"], facts["device"], facts["host_threads"]) == ("simulated", "cpu", 1)
    assert facts["isa"] in ("scalar", "avx2", "avx512", "neon")
    assert SimulatedBackend().threads >= 1
