"""The simulated backend: freed and retired memory, copies, refusals, the norm, and what it counts.

Seen red: a free of host memory that waits for nobody, a free that is no write, poison left out, copies that check
neither lane nor dtype nor strides, partial sums in the order given, a norm that ignores the inverse scale.
"""

from __future__ import annotations

import pytest
import torch
from verbs import FLOATS, backend_with, copy, fill, pair, retire, wait

from hostward.errors import OrderingError, PlacementError
from hostward.runtime.backend import Buffer, Clipping, Partials, Scalars, Tier, chunks_of
from hostward.runtime.simulated.backend import SimulatedBackend
from hostward.schedule.ops import Lane


@pytest.mark.parametrize("dtype", FLOATS)
def test_freed_memory_reads_as_nan(dtype: torch.dtype) -> None:
    backend = backend_with()
    device, _ = pair(backend, dtype)
    view = device.data[:4]
    filled = fill(backend, device, 1.0)
    backend.free([device], after=[filled])
    assert not view.isnan().any()
    backend.synchronise()
    assert view.isnan().all()
    assert device.data.numel() == 0


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
def test_h21_retired_memory_reads_as_poison_once_the_lane_gets_there(dtype: torch.dtype) -> None:
    backend = backend_with()
    _, host = pair(backend, dtype)
    retire(backend, [host], Lane.HOST)
    assert not host.data.any()
    backend.synchronise()
    assert host.data.view(torch.uint8).eq(0xFF).all()


def test_poison_can_be_switched_off() -> None:
    backend = backend_with(poison=False)
    _, host = pair(backend)
    host.data.fill_(1.0)
    retire(backend, [host], Lane.HOST)
    backend.synchronise()
    assert host.data.eq(1.0).all()


def test_h21_free_while_in_use_is_reported_and_keeps_the_memory() -> None:
    backend = backend_with()
    device, host = pair(backend)
    spare, _ = pair(backend)
    held = backend.ledger.total_bytes(Tier.DEVICE)
    copied = copy(backend, Lane.D2H, host, device, "download")
    with pytest.raises(OrderingError) as caught:
        backend.free([device, spare])
    assert caught.value.what.startswith("'free on device' on lane compute and 'download' on lane d2h both use")
    assert (caught.value.why, caught.value.fix) == (
        "one of them writes it",
        "let 'free on device' wait for the event of 'download'",
    )
    assert backend.ledger.total_bytes(Tier.DEVICE) == held
    assert device.data.numel() == 8
    backend.free([device, spare], after=[copied])
    backend.synchronise()
    assert not host.data.isnan().any()


def test_h21_free_of_a_slab_while_a_view_of_it_is_in_use_is_reported() -> None:
    backend = backend_with()
    device, _ = pair(backend)
    view = Buffer(Tier.DEVICE, device.data[:4], "range")
    _, small = pair(backend, numel=4)
    copied = copy(backend, Lane.D2H, small, view, "download")
    with pytest.raises(OrderingError, match="'free on device' on lane compute and 'download' on lane d2h"):
        backend.free([device])
    wait(backend, copied)
    backend.free([device])


def test_host_memory_is_given_back_only_when_all_lanes_are_empty() -> None:
    backend = backend_with()
    device, host = pair(backend)
    view = host.data
    down = copy(backend, Lane.D2H, host, device, "download", [fill(backend, device, 2.0)])
    copied = torch.empty(8)
    backend.launch("look", lambda: copied.copy_(view), reads=[device], writes=[], waits=[down]).issue()
    backend.free([host])
    assert copied.eq(2.0).all()
    assert host.data.numel() == 0
    assert backend.ledger.total_bytes(Tier.HOST) == 0


def test_free_after_synchronise_needs_no_event() -> None:
    backend = backend_with()
    device, host = pair(backend)
    copy(backend, Lane.D2H, host, device, "copy")
    backend.synchronise()
    backend.free([device, host])
    assert backend.ledger.total_bytes(Tier.DEVICE) == backend.ledger.total_bytes(Tier.HOST) == 0


@pytest.mark.parametrize("lane", Lane)
@pytest.mark.parametrize("source_tier", Tier)
@pytest.mark.parametrize("destination_tier", Tier)
def test_copies_go_between_the_tiers_of_their_lane(lane: Lane, source_tier: Tier, destination_tier: Tier) -> None:
    backend = backend_with()
    (source,) = backend.allocate(source_tier, [4], torch.float32, "source")
    (destination,) = backend.allocate(destination_tier, [4], torch.float32, "destination")
    backend.synchronise()
    down, up = {Lane.D2H, Lane.D2H}, {Lane.H2D, Lane.H2D}
    legal = {(one, Tier.DEVICE, Tier.HOST) for one in down} | {(one, Tier.HOST, Tier.DEVICE) for one in up}
    if (lane, source_tier, destination_tier) in legal:
        copy(backend, lane, destination, source, "copy")
        assert backend.ledger.copied_bytes == {lane: 16}
        return
    with pytest.raises(PlacementError) as caught:
        copy(backend, lane, destination, source, "copy")
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
        copy(backend, Lane.D2H, Buffer(Tier.HOST, destination, "to"), Buffer(Tier.DEVICE, source, "from"), "copy")
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
    down = copy(backend, Lane.D2H, host, device, "down")
    wait(backend, copy(backend, Lane.H2D, back, host, "up", [down]))
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
        backend.norm(Partials(device, device), scalars, Clipping())
    with pytest.raises(PlacementError, match="sums: operand 'on host'"):
        backend.partials("sums", [host], [8], [0], Partials(device, device))
    with pytest.raises(PlacementError, match="sums: operand 'on host'"):
        backend.partials("sums", [device], [8], [0], Partials(device, host))


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
    backend.synchronise()
    down = copy(backend, Lane.D2H, c, a, "down")
    up = copy(backend, Lane.H2D, a, c, "up", [down])
    copy(backend, Lane.D2H, c, a, "down", [up])
    assert backend.ledger.copied_bytes == {Lane.D2H: 80, Lane.H2D: 40}
    backend.synchronise()
    backend.free([b, c])
    assert backend.ledger.by_owner(Tier.DEVICE) == {"exp_avg": 40, "weights": 20}
    assert backend.ledger.by_owner(Tier.HOST) == {"remainder": 14}
    assert backend.ledger.pinned_bytes == 0


INF = float("inf")


@pytest.mark.parametrize(
    ("gradients", "found_inf", "inv_scale", "expected"),
    [
        ([[3.0, 0.0], [0.0, 4.0]], None, None, (0.2, 0, 5.0)),
        ([[0.3, 0.0], [0.0, 0.4]], None, None, (1.0, 0, 0.5)),
        ([[3.0, INF], [0.0, 4.0]], None, None, (0.0, 1, INF)),
        ([[3.0, 0.0], [0.0, 4.0]], 1.0, None, (0.2, 1, 5.0)),
        ([[3.0, 0.0], [0.0, 4.0]], 0.0, 0.5, (0.2, 0, 2.5)),
    ],
)
def test_norm_writes_scale_skip_and_norm(
    gradients: list[list[float]], found_inf: float | None, inv_scale: float | None, expected: tuple[float, int, float]
) -> None:
    backend = backend_with()
    scale, norm = backend.allocate(Tier.DEVICE, [1, 1], torch.float32, "scalars")
    (skip,) = backend.allocate(Tier.DEVICE, [1], torch.int32, "skip")
    buffers = [backend.adopt(torch.tensor(g), "gradients") for g in gradients]
    (sums,) = backend.allocate(Tier.DEVICE, [2], torch.int64, "partials")
    (exponents,) = backend.allocate(Tier.DEVICE, [2], torch.int32, "partials")
    flag = None if found_inf is None else torch.tensor(found_inf)
    factor = None if inv_scale is None else torch.tensor(inv_scale)
    overflow = torch.tensor(0.0)
    partials, clipping = Partials(sums, exponents), Clipping(1.0, factor, flag, overflow)
    # Out of order: where partial sums lie tells whose they are.
    backend.partials("sums", buffers, [2, 2], [1, 0], partials).issue()
    done = backend.norm(partials, Scalars(scale, skip, norm), clipping).issue()
    wait(backend, done)
    assert scale.data.item() == pytest.approx(expected[0], abs=1e-6)
    assert (skip.data.item(), norm.data.item()) == expected[1:]
    assert overflow.item() == expected[1]


def test_partial_sums_take_one_place_for_each_4096_elements() -> None:
    assert [chunks_of(n) for n in (0, 1, 4096, 4097)] == [0, 1, 1, 2]
    backend = backend_with()
    (sums,) = backend.allocate(Tier.DEVICE, [4], torch.int64, "partials")
    (exponents,) = backend.allocate(Tier.DEVICE, [4], torch.int32, "partials")
    sums.data.fill_(-1)
    whole = backend.adopt(torch.ones(4097), "gradients")
    backend.partials("sums", [whole], [4097], [1], Partials(sums, exponents)).issue()
    backend.synchronise()
    assert (sums.data == -1).tolist() == [True, False, False, True]
    small, large = (backend.adopt(torch.tensor([value]), "gradients") for value in (1.0, 1e6))
    backend.partials("sums", [small, large], [1, 1], [3, 0], Partials(sums, exponents)).issue()
    backend.synchronise()
    assert exponents.data[0] > exponents.data[3]
    part = Partials(sums, exponents).part(1, 2)
    assert torch.equal(part.sums.data, sums.data[1:3])
    assert part.exponents.data.numel() == 2


def test_describe_names_backend_threads_and_instruction_set() -> None:
    facts = backend_with().describe()
    assert (facts["backend"], facts["device"], facts["host_threads"]) == ("simulated", "cpu", 1)
    assert facts["isa"] in ("scalar", "avx2", "avx512", "neon")
    assert SimulatedBackend().threads >= 1
