"""The simulated backend: works, lanes, events, orders.

Seen red: `mark` that does not wait on the compute lane, `refill` and `allocate` that note no write, an event that keeps
its first issue, `synchronise` that leaves the clocks as they are, an eager order that runs nothing or forgets nothing,
an operation that another thread is running reported as a deadlock.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch
from verbs import backend_with, copy, fill, pair, retire, wait

from hostward.errors import MemoryLimitError, OrderingError, PlacementError
from hostward.runtime.backend import Buffer, Event, Tier
from hostward.runtime.simulated.backend import Order
from hostward.schedule.ops import Lane


def test_nothing_runs_before_somebody_waits() -> None:
    backend = backend_with(Order(late=frozenset({Lane.D2H})))
    device, host = pair(backend)
    filled = fill(backend, device, 3.0)
    assert not device.data.any()
    copied = copy(backend, Lane.D2H, host, device, "copy", [filled])
    wait(backend, filled)
    assert device.data.eq(3.0).all()
    assert not host.data.any()
    wait(backend, copied)
    assert host.data.eq(3.0).all()


@pytest.mark.parametrize("seed", [None, *range(20)])
@pytest.mark.parametrize("late", [frozenset(), frozenset({Lane.COMPUTE}), frozenset(Lane)])
def test_a_lane_keeps_its_order(seed: int | None, late: frozenset[Lane]) -> None:
    backend = backend_with(Order(seed, late))
    device, _ = pair(backend)
    seen: list[int] = []
    for i in range(6):
        backend.launch("note", lambda i=i: seen.append(i), reads=[], writes=[device]).issue()  # type: ignore[misc]
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
        look = lambda seen=seen, host=host: seen.append(bool(host.data.any()))  # noqa: E731
        backend.launch("look", look, reads=[], writes=[b]).issue()
        copy(backend, Lane.D2H, host, a, "copy")
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
            backend.launch("probe", kernel, reads=[], writes=[probe]).issue()
        for i, other in enumerate(others):
            retire(backend, [other], (Lane.D2H, Lane.HOST, Lane.H2D)[i % 3])
        backend.synchronise()
        return tuple(found)

    assert trace(7) == trace(7)
    assert len({trace(seed) for seed in range(20)}) > 10


def test_order_through_a_third_lane_counts() -> None:
    backend = backend_with()
    device, host = pair(backend)
    filled = fill(backend, device, 1.0)
    down = copy(backend, Lane.D2H, host, device, "down", [filled])
    retire(backend, [host], Lane.HOST, [down])
    with pytest.raises(OrderingError, match="retire' on lane h2d and 'offload/retire' on lane host both use 'on host'"):
        retire(backend, [host], Lane.H2D, [down])
    fill(backend, device, 2.0, waits=[down])
    backend.synchronise()


def test_a_mark_on_the_compute_lane_waits_and_orders_no_other_lane() -> None:
    backend = backend_with()
    device, host = pair(backend)
    filled = fill(backend, device, 1.0)
    wait(backend, filled)
    assert device.data.eq(1.0).all()
    with pytest.raises(OrderingError, match=r"'too early' on lane d2h and 'fill 1\.0' on lane compute"):
        copy(backend, Lane.D2H, host, device, "too early")
    wait(backend, copy(backend, Lane.D2H, host, device, "in time", [filled]))
    assert host.data.eq(1.0).all()


@pytest.mark.parametrize("lane", [lane for lane in Lane if lane is not Lane.COMPUTE])
def test_a_mark_on_another_lane_makes_that_lane_wait_and_nobody_else(lane: Lane) -> None:
    backend = backend_with()
    device, host = pair(backend)
    filled = fill(backend, device, 1.0)
    backend.mark("mark", lane, waits=[filled]).issue()
    assert not device.data.any()
    retire(backend, [device], lane)
    with pytest.raises(OrderingError):
        retire(backend, [device], Lane.COMPUTE)
    backend.synchronise()
    assert host.data.eq(0.0).all()


def test_synchronise_orders_everything_issued_later_on_every_lane() -> None:
    backend = backend_with()
    device, host = pair(backend)
    fill(backend, device, 1.0)
    with pytest.raises(OrderingError):
        copy(backend, Lane.D2H, host, device, "too early")
    backend.synchronise()
    wait(backend, copy(backend, Lane.D2H, host, device, "in time"))
    assert host.data.eq(1.0).all()


def test_an_event_covers_its_lane_up_to_now_and_no_further() -> None:
    backend = backend_with()
    device, host = pair(backend)
    fill(backend, device, 1.0)
    wait(backend, wait(backend))
    assert device.data.eq(1.0).all()
    fill(backend, device, 1.5)
    recorded = wait(backend)
    copied = copy(backend, Lane.D2H, host, device, "copy", [recorded])
    fill(backend, device, 2.0, waits=[copied])
    with pytest.raises(OrderingError):
        copy(backend, Lane.D2H, host, device, "copy again", [recorded])


def test_an_event_stands_for_the_newest_issue_and_for_nothing_before_the_first() -> None:
    backend = backend_with()
    device, host = pair(backend)
    values = iter([1.0, 2.0])
    done = backend.event()
    work = backend.launch("next", lambda: device.data.fill_(next(values)), reads=[], writes=[device], done=done)
    assert work.done is done
    down = backend.copy(Lane.D2H, [(host, device)], name="down", waits=[done])
    down.issue()  # of a work that was never issued: nothing to wait for
    wait(backend, down.done)
    assert not host.data.any()
    for value in (1.0, 2.0):
        backend.mark("after the copy", Lane.COMPUTE, waits=[down.done]).issue()
        assert work.issue() is done
        wait(backend, down.issue())
        assert host.data.eq(value).all()


def test_a_work_looks_up_its_buffers_when_it_is_issued() -> None:
    """Buffers over gradients get another tensor in every step."""
    backend = backend_with()
    device, host = pair(backend, numel=4)
    gradient = backend.adopt(torch.ones(4), "gradients")
    made = wait(backend)
    down = backend.copy(Lane.D2H, [(host, gradient)], name="down", waits=[made])
    backend.refill(gradient, torch.full((4,), 5.0))
    with pytest.raises(OrderingError, match="'down' on lane d2h and 'made gradients' on lane compute"):
        down.issue()
    down = backend.copy(Lane.D2H, [(host, gradient)], name="down", waits=[wait(backend)])
    wait(backend, down.issue())
    assert host.data.eq(5.0).all()
    backend.refill(gradient, torch.ones(5))
    with pytest.raises(PlacementError, match=r"\(5,\) into torch.float32 \(4,\)"):
        down.issue()
    backend.refill(gradient, torch.empty(0))
    assert device.data.numel() == 4


def test_device_memory_belongs_to_the_compute_lane_at_first_and_is_poison_unless_zero() -> None:
    backend = backend_with()
    fresh, (host,) = (
        backend.allocate(Tier.DEVICE, [4], torch.float32, "fresh", zero=False)[0],
        backend.allocate(Tier.HOST, [4], torch.float32, "on host"),
    )
    assert fresh.data.isnan().all()
    with pytest.raises(OrderingError, match="'up' on lane h2d and 'made fresh' on lane compute"):
        copy(backend, Lane.H2D, fresh, host, "up")
    wait(backend, copy(backend, Lane.H2D, fresh, host, "up", [wait(backend)]))
    assert fresh.data.eq(0.0).all()


@pytest.mark.parametrize("poison", [True, False])
def test_an_eager_order_runs_what_is_issued_when_it_is_issued(poison: bool) -> None:
    backend = backend_with(Order(eager=True), poison=poison)
    device, host = pair(backend)
    filled = fill(backend, device, 3.0)
    assert device.data.eq(3.0).all()
    with pytest.raises(OrderingError):  # the rule holds all the same
        copy(backend, Lane.D2H, host, device, "too early")
    backend.synchronise()
    copy(backend, Lane.D2H, host, device, "copy", [filled])
    assert host.data.eq(3.0).all()
    retire(backend, [host], Lane.D2H)
    assert bool(host.data.isnan().all()) is poison


def test_an_eager_turn_forgets_the_accesses_of_the_one_before() -> None:
    """A loop of ten thousand steps must not keep every tensor it ever saw."""
    backend = backend_with(Order(eager=True))
    device, host = pair(backend)
    filled = fill(backend, device, 1.0)
    assert backend._bytes._spans
    backend.begin_step()
    assert not backend._bytes._spans
    copy(backend, Lane.D2H, host, device, "copy")  # everything before the turn has run
    backend.end_step()
    assert filled.native is not None


def test_adopted_memory_was_made_on_the_compute_lane() -> None:
    backend = backend_with()
    _, host = pair(backend)
    gradient = backend.adopt(torch.ones(8), "gradients")
    with pytest.raises(OrderingError, match="'copy' on lane d2h and 'made gradients' on lane compute"):
        copy(backend, Lane.D2H, host, gradient, "copy")
    wait(backend, copy(backend, Lane.D2H, host, gradient, "copy", [wait(backend)]))
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
        retire(backend, [second], Lane.D2H)
    other = Buffer(Tier.DEVICE, whole.data[4:6], "other part")
    if view_first:  # only the view was filled
        copy(backend, Lane.D2H, host, other, "copy")
        backend.synchronise()


def test_memory_of_a_dropped_tensor_is_not_taken_for_another() -> None:
    backend = backend_with()
    _, landing = pair(backend, numel=1000)
    _, other = pair(backend)
    for _ in range(20):
        gradient = backend.adopt(torch.ones(1000), "gradients")
        copy(backend, Lane.D2H, landing, gradient, "copy", [wait(backend)])
        # The copy, issued first, has run after this, but nothing on the compute lane is ordered after it.
        wait(backend, retire(backend, [other], Lane.HOST))
        del gradient
    backend.synchronise()


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

    failed = backend.launch("fails", fail, reads=[], writes=[device]).issue()
    copy(backend, Lane.D2H, host, device, "copy", [failed])
    with pytest.raises(MemoryLimitError, match="the kernel failed"):
        backend.synchronise()
    device.data.fill_(7.0)
    backend.synchronise()
    assert host.data.tolist() == device.data.tolist()


def test_an_event_of_another_backend_is_refused() -> None:
    with pytest.raises(OrderingError, match="an event of another backend"):
        wait(backend_with(), Event(object()))


def test_a_meter_hears_of_every_operation_of_the_other_lanes() -> None:
    """And of how long the caller's own code stood still for them, on the compute lane."""
    heard: list[tuple[str, Lane, int, int]] = []

    def meter(name: str, lane: Lane, start_s: float, end_s: float, nbytes: int, turn: int) -> None:
        assert 0.0 <= start_s <= end_s
        heard.append((name, lane, nbytes, turn))

    backend = backend_with()
    backend.meter = meter
    device, host = pair(backend)
    for turn in (1, 2):
        backend.begin_step()
        copy(backend, Lane.D2H, host, device, f"copy {turn}", [fill(backend, device, 1.0)])
        backend.synchronise()
    copies = [(f"copy {turn}", Lane.D2H, 32, turn) for turn in (1, 2)]
    waits = [("offload/wait/d2h", Lane.COMPUTE, 0, turn) for turn in (1, 2)]
    assert heard == [copies[0], waits[0], copies[1], waits[1]]


def test_the_host_may_wait_for_one_event() -> None:
    backend = backend_with(Order(late=frozenset({Lane.D2H})))
    device, host = pair(backend)
    _, other = pair(backend)
    copied = copy(backend, Lane.D2H, host, device, "copy", [fill(backend, device, 4.0)])
    retire(backend, [other], Lane.D2H)
    backend.wait(backend.event())  # of nothing
    assert not host.data.any()
    backend.wait(copied)
    assert host.data.eq(4.0).all()
    assert not other.data.isnan().any()


def test_a_thread_waits_for_what_another_one_is_running() -> None:
    backend = backend_with(Order(late=frozenset({Lane.D2H})))
    running, raised = threading.Event(), list[Exception]()

    def slow() -> None:
        running.set()
        time.sleep(0.1)

    done = backend.launch("slow", slow, reads=[], writes=[]).issue()

    def other() -> None:
        running.wait()
        try:
            backend.wait(done)
        except OrderingError as error:
            raised.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    backend.synchronise()
    thread.join()
    assert raised == []
