"""The device kernels launched by the driver rather than by Triton: the same bits, on side streams, on any thread, in
graphs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from kernel_case import (
    COMBINATIONS,
    DEVICE,
    GRADS,
    LAYOUTS,
    Case,
    as_grad,
    assert_bits,
    from_device,
    ordinary,
    to_device,
)

from hostward.errors import DeviceError
from hostward.kernels import reference
from hostward.kernels.cuda import adamw, norm
from hostward.kernels.cuda.launcher import Launch
from hostward.runtime.cuda.commands import Command, CommandList, Streams, Verb, driver_table
from hostward.runtime.cuda.driver import current_context

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("quiet_numpy")]

LENGTHS = {
    "none is a block": [1, 2, 3, 129, 511],
    "whole blocks and tails": [4096, 3 * 4096, 4097, 300_001],
    "many ranges": [97] * 700,
    "one large": [20_000_003],
}


class Native:
    """Launches as commands on a stream; a side stream by default."""

    def __init__(self, launches: Sequence[Launch], stream: torch.cuda.Stream | None = None) -> None:
        torch.cuda.current_stream().synchronize()  # a context on this thread, and operands that are there
        self.launches = launches
        self.stream = torch.cuda.Stream() if stream is None else stream
        self.streams = Streams(1, current_context())
        self.streams.set(0, self.stream.cuda_stream)
        commands = [Command(Verb.KERNEL, 0, launch.native().address) for launch in launches]
        self.commands = CommandList(commands, driver_table())

    def issue(self) -> None:
        self.commands.issue(self.streams)

    def wait(self) -> None:
        self.stream.synchronize()


def natively(launches: Sequence[Launch], times: int = 1) -> None:
    native = Native(launches)
    for _ in range(times):
        native.issue()
    native.wait()


@pytest.mark.parametrize(
    ("grad_code", "layout", "lengths"),
    [
        *((*combination, lengths) for combination in COMBINATIONS for lengths in LENGTHS if lengths != "one large"),
        (1, "bf16-split", "one large"),
    ],
)
def test_adamw_has_the_bits_of_the_definition(grad_code: int, layout: str, lengths: str) -> None:
    # Two gaps: with one of them every range is 16-byte aligned.
    for gap in (16, 1):
        case = Case(grad_code, layout, LENGTHS[lengths], gap=gap, wild=lengths != "one large", seed=gap)
        for _ in range(2):
            natively(case.bound())
            case.expect_step()
        case.check()
        assert int(case.error[0]) == 0


def test_skip_and_scale_are_read_when_the_kernel_runs() -> None:
    case = Case(1, "bf16-split", [5, 4096, 1000], gap=8)
    native = Native(case.bound())
    case.skip.fill_(1)
    torch.cuda.synchronize()
    native.issue()
    native.wait()
    case.check()
    case.skip.fill_(0)
    case.scale.fill_(0.37)
    torch.cuda.synchronize()
    native.issue()
    native.wait()
    case.expect_step(float(np.float32(0.37)))
    case.check()


def test_state_at_another_address_is_a_parameter_to_write() -> None:
    """As slots of streamed state change: nothing is bound anew."""
    case = Case(1, "bf16-split", [3 * 4096, 100], gap=16)
    launches = case.bound()
    names = "exp_avg", "exp_avg_sq", "remainder"
    before = {name: case.device[name] for name in names}
    copies = {name: before[name].clone() for name in names}
    kept = {name: before[name].clone() for name in names}
    words = launches[0].native().words
    for at, name in zip(adamw.STATE_PARAMETERS, names, strict=True):
        assert words[at] == before[name].data_ptr()
        words[at] = copies[name].data_ptr()
    natively(launches)
    for name in names:
        assert torch.equal(before[name], kept[name])
        case.device[name] = copies[name]
    case.expect_step()
    case.check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_thousand_launches_have_the_bits_of_a_thousand_by_triton(layout: str) -> None:
    lengths = [4096, 300, 4097, 65_536]
    ours, theirs = (Case(1, layout, lengths, gap=16, counts=[0, 7, 299, 4000]) for _ in range(2))
    natively(ours.bound(), times=1000)
    for _ in range(1000):
        theirs.checked_step()
    torch.cuda.synchronize()
    for name, tensor in ours.device.items():
        slab = ours.slabs[name]
        assert_bits(name, from_device(tensor, slab.dtype), from_device(theirs.device[name], slab.dtype))
    assert from_device(ours.device["count"], np.int64).tolist() == [1000, 1007, 1299, 5000]


@pytest.mark.parametrize("code", GRADS)
@pytest.mark.parametrize("shift", [0, 1])
def test_partial_sums_have_the_bits_of_the_definition(code: int, shift: int) -> None:
    rng = np.random.default_rng(code)
    gradients = [as_grad(ordinary(rng, n), code) for n in (1, 3, 4095, 4096, 4097, 12_288, 2_000_003)]
    slab = to_device(np.concatenate([np.zeros(shift, GRADS[code]), *gradients]))
    starts = np.cumsum([shift, *(g.size for g in gradients)])
    firsts = np.cumsum([0, *(-(-g.size // 4096) for g in gradients)])
    rows = [
        (slab.data_ptr() + int(start) * slab.element_size(), g.size, first)
        for start, g, first in zip(starts, gradients, firsts, strict=False)
    ]
    items, chunk_map = to_device(np.array(rows, np.int64)), to_device(norm.chunk_map([g.size for g in gradients]))
    sums = torch.full((int(firsts[-1]),), -1, dtype=torch.int64, device=DEVICE)
    exponents = torch.full((int(firsts[-1]),), -1, dtype=torch.int32, device=DEVICE)
    natively(norm.bind_partials(items, chunk_map, code, sums, exponents), times=3)
    parts = [reference.norm_partials(g) for g in gradients]
    assert_bits("exponents", from_device(exponents, np.int32), np.concatenate([p[1] for p in parts]))
    assert_bits("sums", from_device(sums, np.int64), np.concatenate([p[0] for p in parts]))


@pytest.mark.parametrize("n", [1, 1023, 1024, 1025, 30_000, 2_000_000])
@pytest.mark.parametrize(
    ("max_norm", "inv_scale", "found_inf"),
    [(1.0, None, None), (0.0, 0.3, 0.0), (1e-3, 2.0**-16, 1.0), (float("inf"), None, 0.0), (0.1, 1.0, None)],
)
def test_norm_and_clip_factor_have_the_bits_of_the_definition(
    n: int, max_norm: float, inv_scale: float | None, found_inf: float | None
) -> None:
    """Floats and None as arguments, and a kernel whose launches wait for one another."""
    rng = np.random.default_rng(3)
    exponents = rng.integers(-40, 3, n).astype(np.int32)
    sums = rng.integers(2**48, 2**62, n)
    on_device = to_device(sums), to_device(exponents)
    totals = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    largest = on_device[1].amax()
    optional = [None if x is None else torch.tensor([x], device=DEVICE) for x in (inv_scale, found_inf)]
    outputs = [torch.full((1,), -7, dtype=t, device=DEVICE) for t in (torch.float32, torch.int32, torch.float32)]
    natively(
        [
            norm.bind_totals(*on_device, largest, totals),
            norm.bind_finish(
                totals, largest, max_norm, (optional[0], optional[1]), (outputs[0], outputs[1], outputs[2])
            ),
        ]
    )
    expected, _ = reference.norm_from_partials(sums, exponents)
    inverse = 1.0 if inv_scale is None else inv_scale
    clip = reference.clip_scale(float(expected), max_norm if max_norm > 0 else None, inverse)
    assert_bits("scale", from_device(outputs[0], np.float32), np.array([clip], np.float32))
    assert_bits("norm", from_device(outputs[2], np.float32), np.array([expected * np.float32(inverse)], np.float32))
    assert int(outputs[1][0]) == int(bool(found_inf))


def test_a_thread_that_has_never_used_the_device_may_issue() -> None:
    case = Case(1, "bf16-split", [4096, 100], gap=8)
    native, seen = Native(case.bound()), []

    def issue() -> None:
        try:
            native.issue()
        except DeviceError as error:
            seen.append(error)

    thread = threading.Thread(target=issue)
    thread.start()
    thread.join()
    native.wait()
    assert seen == []
    case.expect_step()
    case.check()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_another_device_may_be_current() -> None:
    case = Case(1, "bf16-split", [4096, 100], gap=8)
    native = Native(case.bound())
    with torch.cuda.device(1):
        torch.zeros(1, device="cuda:1")
        native.issue()
        assert torch.cuda.current_device() == 1
        assert torch.ones(3, device="cuda:1").sum().item() == 3.0
    native.wait()
    case.expect_step()
    case.check()


def test_a_captured_launch_keeps_the_parameters_that_it_was_captured_with() -> None:
    case = Case(1, "bf16-split", [4096, 100], gap=8)
    side = torch.cuda.Stream()
    native = Native(case.bound(), side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        native.issue()
    for launch in native.launches:
        words: Any = launch.native().words
        for at in range(len(words)):
            words[at] = 0
    torch.cuda.synchronize()
    case.check()  # a capture runs nothing
    for _ in range(3):
        graph.replay()
        case.expect_step()
    torch.cuda.synchronize()
    case.check()


def test_a_launch_that_the_driver_refuses_is_told_and_leaves_the_device_well() -> None:
    case = Case(1, "bf16-split", [4096], gap=8)
    native = Native(case.bound())
    native.launches[0].native()._native.shared_bytes = 1 << 30  # more than any device has
    with pytest.raises(DeviceError, match="KERNEL on lane 0, could not be enqueued"):
        native.issue()
    assert torch.ones(8, device=DEVICE).sum().item() == 8.0
    case.check()
