"""The Triton norm against its numpy definition, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernel_case import (
    DEVICE,
    GRADS,
    INTERPRETED,
    as_grad,
    assert_bits,
    bits_of,
    copy_bytes_per_s,
    device_only,
    from_device,
    ordinary,
    seconds,
    to_device,
)

from hostward.errors import ConfigError, PlacementError
from hostward.kernels import reference
from hostward.kernels.cuda import norm
from hostward.kernels.cuda.launcher import launch_all

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("quiet_numpy")


def run_partials(gradients: list[np.ndarray[Any, Any]], code: int, shift: int = 0) -> tuple[Any, Any]:
    """(sums, exponents) of gradients that lie one after another, the first `shift` elements into the memory."""
    slab = to_device(np.concatenate([np.zeros(shift, GRADS[code]), *gradients]))
    starts = np.cumsum([shift, *(g.size for g in gradients)])
    chunks = [-(-g.size // 4096) for g in gradients]
    firsts = np.cumsum([0, *chunks])
    rows = [
        (slab.data_ptr() + int(s) * slab.element_size(), g.size, f)
        for s, g, f in zip(starts, gradients, firsts, strict=False)
    ]
    items, chunk_map = to_device(np.array(rows, np.int64)), to_device(norm.chunk_map([g.size for g in gradients]))
    sums = torch.full((int(firsts[-1]),), -1, dtype=torch.int64, device=DEVICE)
    exponents = torch.full((int(firsts[-1]),), -1, dtype=torch.int32, device=DEVICE)
    if INTERPRETED:
        launch_all(norm.bind_partials(items, chunk_map, code, sums, exponents))
    else:
        norm.norm_partials(items, chunk_map, code, sums, exponents)
    return from_device(sums, np.int64), from_device(exponents, np.int32)


def check_partials(gradients: list[np.ndarray[Any, Any]], code: int, shift: int = 0) -> None:
    sums, exponents = run_partials(gradients, code, shift)
    parts = [reference.norm_partials(g) for g in gradients]
    assert_bits("exponents", exponents, np.concatenate([p[1] for p in parts]))
    assert_bits("sums", sums, np.concatenate([p[0] for p in parts]))


@pytest.mark.parametrize("code", GRADS)
@pytest.mark.parametrize("shift", [0, 1])
def test_norm_partials_of_every_shape(code: int, shift: int) -> None:
    rng = np.random.default_rng(code)
    lengths = (
        [1, 2, 4095, 4096, 4097, 0, 12_288]
        if INTERPRETED
        else [1, 2, 3, 4095, 4096, 4097, 0, 3 * 4096, 100_000, 2_000_003]
    )
    check_partials([as_grad(ordinary(rng, n), code) for n in lengths], code, shift)


@pytest.mark.parametrize("code", GRADS)
def test_norm_partials_of_every_exponent(code: int) -> None:
    """Chunks at each scale, from denormals of which the largest has few bits to the largest finite numbers."""
    rng = np.random.default_rng(5)
    exponents = [-149, -148, -140, -127, -126, -100, -25, -14, 0, 15, 100, 127] if INTERPRETED else range(-149, 128)
    gradients = []
    for exponent in exponents:
        # Normals below the largest exponent, down to 40 orders below: beyond 25 of them a square counts nothing.
        wide = rng.uniform(1, 2, 4096) * 2.0 ** (exponent - rng.integers(0, 40, 4096)) * rng.choice([-1, 1], 4096)
        gradient = as_grad(wide.astype(np.float32), code)
        value = reference.float_of(gradient)
        gradients.append(np.where(np.isfinite(value), gradient, as_grad(np.float32([1.0]), code)).astype(GRADS[code]))
    check_partials(gradients, code)


@pytest.mark.parametrize("code", GRADS)
def test_norm_partials_of_special_chunks(code: int) -> None:
    largest, smallest = {0: (0x7F7FFFFF, 1), 1: (0x7F7F, 1), 2: (0x7BFF, 1)}[code]
    bits = bits_of(np.zeros(1, GRADS[code])).dtype

    def chunk(values: list[int], n: int = 4096) -> np.ndarray[Any, Any]:
        return np.resize(np.array(values, bits), n).view(GRADS[code])

    infinity, nan = {0: (0x7F800000, 0x7FC00000), 1: (0x7F80, 0x7FC0), 2: (0x7C00, 0x7E00)}[code]
    sign = {0: 1 << 31, 1: 1 << 15, 2: 1 << 15}[code]
    check_partials(
        [
            chunk([0]), chunk([sign]), chunk([largest]), chunk([largest | sign, smallest]), chunk([smallest]),
            chunk([smallest], 1), chunk([0] * 4095 + [infinity]), chunk([infinity | sign] + [0] * 4095), chunk(
                [1] * 99 + [nan], 100
            ),
            chunk([3, 2, 0, sign]),
        ],
        code,
    )  # fmt: skip


def run_finish(
    sums: Any, exponents: Any, max_norm: float, inv_scale: float | None = None, found_inf: float | None = None
) -> tuple[Any, Any, int]:
    """(norm, scale, skip)"""
    optional = [
        None if x is None else torch.tensor([x], dtype=torch.float32, device=DEVICE) for x in (inv_scale, found_inf)
    ]
    outputs = [torch.full((1,), -7, dtype=t, device=DEVICE) for t in (torch.float32, torch.int32, torch.float32)]
    operands = to_device(np.asarray(sums, np.int64)), to_device(np.asarray(exponents, np.int32))
    if INTERPRETED:
        norm.launch_finish(*operands, max_norm, (optional[0], optional[1]), (outputs[0], outputs[1], outputs[2]))
    else:
        norm.finish(
            *operands, max_norm=max_norm, inv_scale=optional[0], found_inf=optional[1],
            scale_out=outputs[0], skip_out=outputs[1], norm_out=outputs[2],
        )  # fmt: skip
    scale, skip, value = (from_device(t, None or t.cpu().numpy().dtype) for t in outputs)
    return value, scale, int(skip[0])


def check_finish(
    sums: Any, exponents: Any, max_norm: float, inv_scale: float | None = None, found_inf: float | None = None
) -> None:
    value, scale, skip = run_finish(sums, exponents, max_norm, inv_scale, found_inf)
    expected, finite = reference.norm_from_partials(np.asarray(sums, np.int64), np.asarray(exponents, np.int32))
    inverse = 1.0 if inv_scale is None else inv_scale
    assert_bits("norm", value, np.array([expected * np.float32(inverse)], np.float32))
    clip = reference.clip_scale(float(expected), max_norm if max_norm > 0 else None, inverse)
    assert_bits("scale", scale, np.array([clip], np.float32))
    assert skip == int(not finite or bool(found_inf))


ZERO, BAD = reference.ALL_ZERO, reference.NOT_FINITE


@pytest.mark.parametrize(
    ("max_norm", "inv_scale", "found_inf"),
    [(1.0, None, None), (0.0, 0.3, 0.0), (1e-3, 2.0**-16, 1.0), (1e9, 1.0, 0.0), (-1.0, None, None)],
)
def test_finish_equals_the_definition(max_norm: float, inv_scale: float | None, found_inf: float | None) -> None:
    rng = np.random.default_rng(3)
    for n in (1, 2, 1024, 1025, 3000) if INTERPRETED else (1, 2, 1023, 1024, 1025, 30_000, 2_000_000):
        exponents = rng.integers(-40, 3, n).astype(np.int32)
        exponents[rng.random(n) < 0.1] = ZERO
        sums = np.where(exponents == ZERO, 0, rng.integers(2**48, 2**62, n))
        check_finish(sums, exponents, max_norm, inv_scale, found_inf)
        exponents[n // 2] = BAD
        check_finish(sums, exponents, max_norm, inv_scale, found_inf)


@pytest.mark.parametrize(
    ("sums", "exponents"),
    [
        ([], []),
        ([0], [ZERO]),
        ([0, 2**48, 0], [ZERO, -148, ZERO]),
        ([2**62], [128]),
        ([2**62] * 70, [128] * 70),
        ([2**62, 2**62 - 1, 2**50 + 12345], [0, -148, 128]),
        ([2**62, 2**62 - 1, 2**50 + 12345], [0, -100, 60]),
        ([2**61 + 1, 2**48 + 7], [5, 5 - 32]),
        ([0, 0], [BAD, ZERO]),
    ],
)
def test_finish_at_the_edges(sums: list[int], exponents: list[int]) -> None:
    for max_norm in (1.0, 0.0, 1e-45, 1e39, float("inf")):
        check_finish(sums, exponents, max_norm)


def test_partials_go_where_first_chunk_says() -> None:
    """Items and outputs in opposite order, and an output that belongs to nobody."""
    rng = np.random.default_rng(2)
    gradients = [as_grad(ordinary(rng, n), 0) for n in (5000, 100)]
    slabs = [to_device(g) for g in gradients]
    items = to_device(np.array([[slabs[0].data_ptr(), 5000, 2], [slabs[1].data_ptr(), 100, 0]], np.int64))
    sums = torch.full((4,), -1, dtype=torch.int64, device=DEVICE)
    exponents = torch.full((4,), -1, dtype=torch.int32, device=DEVICE)
    chunk_map = to_device(norm.chunk_map([5000, 100]))
    if INTERPRETED:
        launch_all(norm.bind_partials(items, chunk_map, 0, sums, exponents))
    else:
        norm.norm_partials(items, chunk_map, 0, sums, exponents)
    (first, first_exponents), (second, second_exponents) = (reference.norm_partials(g) for g in gradients)
    assert from_device(sums, np.int64).tolist() == [*second, -1, *first]
    assert from_device(exponents, np.int32).tolist() == [*second_exponents, -1, *first_exponents]


def test_the_norm_does_not_depend_on_order_or_grouping() -> None:
    rng = np.random.default_rng(11)
    gradients = [as_grad(ordinary(rng, n, 10.0**k), 1) for k, n in ((-6, 5000), (0, 4096), (3, 100), (-2, 9000))]
    sums, exponents = run_partials(gradients, 1)
    first = run_finish(sums, exponents, 1.0)
    backward, last = run_partials(gradients[::-1], 1), run_partials(gradients[:1], 1)
    assert_bits("norm backward", run_finish(*backward, 1.0)[0], first[0])
    rest = run_partials(gradients[1:], 1)
    joined = [np.concatenate(pair) for pair in zip(rest, last, strict=True)]
    assert_bits("norm in two launches", run_finish(*joined, 1.0)[0], first[0])
    exact = np.sqrt(sum(float((reference.float_of(g).astype(np.float64) ** 2).sum()) for g in gradients))
    assert abs(float(first[0][0]) / exact - 1) < 1e-7


@device_only
def test_norm_operands_are_checked_before_the_launch() -> None:
    one = {t: torch.zeros(1, dtype=t, device=DEVICE) for t in (torch.float32, torch.int32, torch.int64)}
    good: dict[str, Any] = {"max_norm": 1.0, "inv_scale": None, "found_inf": None, "scale_out": one[torch.float32]}
    good |= {"skip_out": one[torch.int32], "norm_out": one[torch.float32]}
    with pytest.raises(PlacementError, match=r"skip_out has dtype torch\.float32"):
        norm.finish(one[torch.int64], one[torch.int32], **{**good, "skip_out": one[torch.float32]})
    with pytest.raises(PlacementError, match="scale_out is on cpu"):
        norm.finish(one[torch.int64], one[torch.int32], **{**good, "scale_out": torch.zeros(1)})
    with pytest.raises(ConfigError, match="max_norm is NaN"):
        norm.finish(one[torch.int64], one[torch.int32], **{**good, "max_norm": float("nan")})


@pytest.mark.alone
@device_only
def test_norm_speed_against_a_copy(capsys: pytest.CaptureFixture[str]) -> None:
    """Floors far below what is expected; the printed numbers are the point."""
    n, roof, slow = 2**28, copy_bytes_per_s(), []
    lines = [f"{torch.cuda.get_device_name(DEVICE)}: copy {roof / 1e12:.2f} TB/s"]
    for code, dtype in ((1, torch.bfloat16), (2, torch.float16), (0, torch.float32)):
        gradients = torch.randn(n, device=DEVICE).to(dtype)
        items, chunk_map = torch.tensor([[gradients.data_ptr(), n, 0]], device=DEVICE), to_device(norm.chunk_map([n]))
        outputs = [torch.empty(len(chunk_map), dtype=t, device=DEVICE) for t in (torch.int64, torch.int32)]
        operands = (items, chunk_map, code, outputs[0], outputs[1])
        speed = gradients.nbytes / seconds(lambda operands=operands: norm.norm_partials(*operands))
        lines.append(f"norm partials {dtype} {speed / 1e12:.2f} TB/s read")
        slow += [lines[-1]] if speed < 0.3 * roof else []
    sums = torch.full((2_000_000,), 2**50, dtype=torch.int64, device=DEVICE)
    exponents = torch.zeros(2_000_000, dtype=torch.int32, device=DEVICE)
    out = [torch.zeros(1, dtype=t, device=DEVICE) for t in (torch.float32, torch.int32, torch.float32)]
    finish_s = seconds(lambda: norm.launch_finish(sums, exponents, 1.0, (None, None), (out[0], out[1], out[2])))
    lines.append(f"finish of 2,000,000 chunks {finish_s * 1e6:.0f} us")
    with capsys.disabled():
        print("\n  " + "\n  ".join(lines))
    assert not slow
    assert finish_s < 1e-3
