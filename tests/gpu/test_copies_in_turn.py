"""Long copies go to two streams in turn: the same bytes in the same order, and copies of others get in between."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch
from hidden_step_cases import SIDE_LANES, assert_equal, deterministic, every_mix, reference, slow, train

from hostward.runtime.backend import Tier
from hostward.runtime.cuda import streams
from hostward.runtime.cuda.backend import CudaBackend
from hostward.schedule.ops import Lane

__all__ = ["deterministic"]
pytestmark = [pytest.mark.gpu, pytest.mark.alone]

MIB = 1024 * 1024


@every_mix
def test_steps_have_the_same_bits_in_small_pieces(mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference()
    monkeypatch.setattr(streams, "PIECE_BYTES", 40_000)  # of 524,288 bytes of each layer's weights
    slow(SIDE_LANES, monkeypatch)
    assert_equal(train(mix), expected)


@pytest.mark.parametrize("lane", [Lane.H2D, Lane.D2H])
def test_pieces_arrive_in_place_and_in_order(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PIECE_BYTES", MIB)
    backend = CudaBackend()
    size = 37 * MIB + 5
    (host,) = backend.allocate(Tier.HOST, [size], torch.uint8, "test", pinned=True)
    (device,) = backend.allocate(Tier.DEVICE, [size], torch.uint8, "test")
    first = torch.randint(256, (size,), dtype=torch.uint8)
    to, of = (device, host) if lane is Lane.H2D else (host, device)
    of.data.copy_(first)
    backend.synchronise()
    work = backend.copy(lane, [(to, of)], name="test")
    work.issue()
    # Only behind the last piece may the source change.
    backend.wait_on_stream(torch.cuda.current_stream(), [work.done])
    if lane is Lane.D2H:
        of.data.zero_()
    backend.synchronise()
    assert torch.equal(to.data.cpu(), first)
    backend.free([host, device])


@pytest.mark.parametrize("lane", [Lane.H2D, Lane.D2H])
def test_a_small_copy_of_others_does_not_wait_for_all_pieces(lane: Lane) -> None:
    """In a process of its own: the device has eight queues, which the streams of all optimizers of a process share."""
    done = subprocess.run([sys.executable, __file__, lane.value], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    small_s, all_s = map(float, done.stdout.split())
    assert small_s < all_s / 2  # in turn about one piece of 32, on one stream all of them


def small_beside_long(lane: Lane) -> tuple[float, float]:
    """Seconds until a copy of 4 KiB is done that comes behind one of 2 GiB, and until that is."""
    backend = CudaBackend()
    (host,) = backend.allocate(Tier.HOST, [2048 * MIB], torch.uint8, "test", pinned=True)
    (device,) = backend.allocate(Tier.DEVICE, [2048 * MIB], torch.uint8, "test")
    to, of = (device, host) if lane is Lane.H2D else (host, device)
    small_host = torch.zeros(4096, dtype=torch.uint8, pin_memory=True)
    small_device = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    work = backend.copy(lane, [(to, of)], name="test")
    small_to, small_of = (small_device, small_host) if lane is Lane.H2D else (small_host, small_device)
    # What the first of a kind sets up takes its own time: the driver lets the first small copy to the host wait.
    small_to.copy_(small_of, non_blocking=True)
    work.issue()
    backend.synchronise()
    work.issue()
    small_to.copy_(small_of, non_blocking=True)
    small = torch.cuda.Event()
    small.record()
    began_s = time.perf_counter()
    small.synchronize()
    small_s = time.perf_counter() - began_s
    backend.wait(work.done)
    all_s = time.perf_counter() - began_s
    backend.synchronise()
    backend.free([host, device])
    return small_s, all_s


if __name__ == "__main__":
    print(*small_beside_long(Lane(sys.argv[1])))
