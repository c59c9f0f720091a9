"""Host memory copied by the native library, and masters put together from their halves."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from hostward.errors import ConfigError, NativeError, PlacementError
from hostward.kernels import reference
from hostward.kernels.cpu.library import Isa
from hostward.kernels.cpu.memory_copy import Copy, copy

from native_cases import ISAS, Guarded, random_floats

PIECE = (1 << 20) // 4
"""Elements of fp32 that one thread copies at a time."""


def halves(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights and remainders of any bits."""
    return rng.integers(0, 1 << 16, n).astype(np.uint16), rng.integers(-(1 << 15), 1 << 15, n).astype(np.int16)


@pytest.mark.parametrize("isa", ISAS)
def test_masters_equal_numpy_at_every_length_and_alignment(isa: Isa) -> None:
    rng = np.random.default_rng(5)
    for n in [*range(130), 4096, 65536 + 3, PIECE + 5]:
        weight, remainder = halves(rng, n)
        shifts = rng.integers(0, 33, 3)
        into = Guarded(np.zeros(n, np.float32), int(shifts[0]))
        data, low = Guarded(weight, int(shifts[1])), Guarded(remainder, int(shifts[2]))
        copy([Copy(into.values, data.values, low.values)], isa=isa)
        expected = reference.join_master(weight, remainder)
        assert into.values.view(np.uint32).tolist() == expected.view(np.uint32).tolist(), n
        for each in (into, data, low):
            each.assert_guards()


@pytest.mark.parametrize("isa", ISAS)
def test_bytes_are_copied_at_every_length_and_alignment(isa: Isa) -> None:
    rng = np.random.default_rng(8)
    for n in [*range(200), 4096, 4 * 4096 - 1, 4 * 4096, 9 * 4096 + 77, 4 * PIECE + 5]:
        values = rng.integers(0, 256, n).astype(np.uint8)
        for shift in rng.integers(0, 65, 3):
            into, data = Guarded(np.zeros(n, np.uint8), int(shift)), Guarded(values, int(64 - shift))
            copy([Copy(into.values, data.values)], isa=isa)
            assert into.values.tobytes() == values.tobytes(), n
            into.assert_guards()


def test_masters_that_were_split_come_back() -> None:
    master = reference.canonical(random_floats(np.random.default_rng(6), 9999, 0.3))
    weight, remainder = reference.split_master(master)
    into = np.zeros_like(master)
    copy([Copy(into, weight, remainder)])
    assert into.view(np.uint32).tolist() == master.view(np.uint32).tolist()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 7, 100, PIECE, PIECE + 1, 2 * PIECE + 3]), min_size=0, max_size=6),
    joined=st.lists(st.booleans(), min_size=6, max_size=6),
    threads=st.integers(1, 9),
)
def test_any_copies_by_any_number_of_threads(lengths: list[int], joined: list[bool], threads: int) -> None:
    rng = np.random.default_rng(7)
    made: list[tuple[Guarded, np.ndarray]] = []
    copies = []
    for n, join in zip(lengths, joined, strict=False):
        weight, remainder = halves(rng, n)
        if join:
            made.append((Guarded(np.zeros(n, np.float32), 1), reference.join_master(weight, remainder)))
            copies.append(Copy(made[-1][0].values, weight, remainder))
        else:
            made.append((Guarded(np.zeros(n, np.uint16), 3), weight))
            copies.append(Copy(made[-1][0].values, weight))
    copy(copies, threads=threads)
    for into, expected in made:
        assert into.values.tobytes() == expected.tobytes()
        into.assert_guards()


def test_bits_of_tensors_are_copied_whatever_they_mean() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        bits = torch.arange(-3000, 3000, dtype=torch.int32)
        data = bits.view(dtype)
        into = torch.zeros_like(data)
        copy([Copy(into, data)], threads=2)
        assert torch.equal(into.view(torch.int32), bits)


FLOATS = torch.zeros(4)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((FLOATS, torch.zeros(3)), ConfigError, r"copies\[0\] is of 3, 4 elements"),
        (
            (FLOATS, FLOATS.clone(), torch.zeros(4, dtype=torch.int16)),
            PlacementError,
            r"copies\[0\].data has dtype fp32",
        ),
        ((FLOATS.bfloat16(), FLOATS), PlacementError, r"copies\[0\].data has dtype fp32"),
        ((FLOATS, FLOATS.bfloat16(), torch.zeros(4, dtype=torch.int32)), PlacementError, "low has dtype int32"),
        ((FLOATS, FLOATS.bfloat16(), torch.zeros(2, dtype=torch.int16)), ConfigError, "2, 4 elements"),
        ((torch.zeros(8)[::2], FLOATS), PlacementError, "not contiguous"),
        ((FLOATS.to("meta"), FLOATS), PlacementError, "is on meta"),
        ((np.frombuffer(b"\0" * 16, np.float32), FLOATS), PlacementError, "read-only"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        copy([Copy(*arguments)])


def test_no_threads_and_a_foreign_instruction_set_are_refused() -> None:
    with pytest.raises(ConfigError, match="threads is 0"):
        copy([], threads=0)
    foreign = Isa.AVX2 if os.uname().machine == "aarch64" else Isa.NEON
    with pytest.raises(NativeError, match="instruction set"):
        copy([Copy(FLOATS.clone(), FLOATS)], isa=foreign)
