"""The norm over ranks, on totals: the same integers as in one process, wherever the borders between ranks lie."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from hostward.kernels import reference
from hostward.runtime.backend import Buffer, Partials, Tier
from hostward.runtime.global_norm import Across, Fragment

CHUNK = 4096
NUMEL = 5 * CHUNK + 1234


class Threads:
    """Ranks that are threads of this process: each collective is over once all have brought their values."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=20)
        self._lock = threading.Lock()
        self._brought: list[torch.Tensor] = []

    def _reduce(self, values: torch.Tensor, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        with self._lock:
            self._brought.append(values.clone())
        self._barrier.wait()
        values.copy_(how(torch.stack(self._brought)))
        if self._barrier.wait() == 0:
            self._brought.clear()
        self._barrier.wait()

    def largest(self, values: torch.Tensor) -> None:
        self._reduce(values, lambda all_: all_.amax(0))

    def total(self, values: torch.Tensor) -> None:
        self._reduce(values, lambda all_: all_.sum(0))


def device(data: torch.Tensor) -> Buffer:
    return Buffer(Tier.DEVICE, data, "test")


def part(
    grad: torch.Tensor, start: int, stop: int, shared: dict[int, int], ranks: Threads, stages: Threads | None = None
) -> tuple[Across, Partials]:
    """What the rank with elements [start, stop) has, cut as buckets are: where a chunk begins."""
    head = min(-start % CHUNK, stop - start)
    spans = [(a, b) for a, b in ((start, start + head), (start + head, stop)) if b > a]
    sums, exponents, fragments, values = [], [], [], []
    for i, (a, b) in enumerate(spans):
        for at in range(a, b, CHUNK):
            end = min(at + CHUNK, b)
            s, e = reference.norm_partials(grad[at:end].numpy())
            if at // CHUNK in shared:
                fragments.append(Fragment(0, i, at - a, end - a, len(sums), shared[at // CHUNK]))
                values.append(grad[at:end])
            sums.append(int(s[0]))
            exponents.append(int(e[0]))
    counted = torch.ones(len(sums), dtype=torch.int64)
    across = Across(ranks, fragments, len(shared), lambda n: device(torch.empty(n)), counted, stages)
    for (_, kept), value in zip(across.of(0), values, strict=True):
        kept.data.copy_(value)
    return across, Partials(
        device(torch.tensor(sums, dtype=torch.int64)), device(torch.tensor(exponents, dtype=torch.int32))
    )


def over_ranks(grad: torch.Tensor, borders: Sequence[int]) -> list[tuple[int, int, float]]:
    """Total, exponent and flag on every rank."""
    return over_stages([(grad, borders)])


def over_stages(stages: Sequence[tuple[torch.Tensor, Sequence[int]]]) -> list[tuple[int, int, float]]:
    """The same of stages, each with a gradient of its own, and borders in it between as many ranks."""
    size = len(stages[0][1]) + 1
    between = [Threads(len(stages)) if len(stages) > 1 else None for _ in range(size)]
    found: dict[tuple[int, int], tuple[int, int, float]] = {}

    def run(stage: int, rank: int, span: tuple[int, int], shared: dict[int, int], ranks: Threads) -> None:
        across, partials = part(stages[stage][0], *span, shared, ranks, between[rank])
        flag = torch.ones(1) if (stage, rank) == (0, 1) else None
        (high, low), top, overflow = across.totals(partials, flag)
        found[stage, rank] = int(high) * 2**31 + int(low), int(top), float(overflow)

    threads = []
    for s, (grad, borders) in enumerate(stages):
        shared = {c: i for i, c in enumerate(sorted({b // CHUNK for b in borders if b % CHUNK and b < len(grad)}))}
        spans, ranks = pairwise([0, *borders, len(grad)]), Threads(size)
        threads += [threading.Thread(target=run, args=(s, r, span, shared, ranks)) for r, span in enumerate(spans)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return list(found.values())


def whole(grad: torch.Tensor) -> tuple[int, int]:
    """Total and exponent by the definition, in one process."""
    sums, exponents = reference.norm_partials(grad.numpy())
    top = int(exponents.max())
    shift = np.minimum(2 * (top - exponents.astype(np.int64)), 63)
    return int((sums >> shift).sum()), top


def gradient(seed: int, zeros: slice | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(NUMEL, generator=generator)
    made *= torch.exp2(torch.randint(-30, 4, (NUMEL,), generator=generator).float())
    made[::3] *= 2.0**-130
    if zeros is not None:
        made[zeros] = 0.0
    return made


BORDERS = {
    "within chunks": [1, 5000, 3 * CHUNK + 7],
    "on chunks": [CHUNK, 2 * CHUNK, 3 * CHUNK],
    "several in one chunk": [100, 200, 300, 4000, CHUNK + 1],
    "empty parts": [NUMEL - 1, NUMEL, NUMEL],
    "all but nothing": [0, 0, 3],
}


@pytest.mark.parametrize("zeros", [None, slice(0, CHUNK + 700), slice(4000, NUMEL)])
@pytest.mark.parametrize("borders", BORDERS.values(), ids=list(BORDERS))
def test_totals_do_not_depend_on_borders(borders: list[int], zeros: slice | None) -> None:
    grad = gradient(len(borders), zeros)
    found = over_ranks(grad, borders)
    assert found == [(*whole(grad), 1.0)] * (len(borders) + 1)


@pytest.mark.parametrize("scale", [2.0**-40, 1.0, 2.0**40])
def test_totals_of_stages_are_those_of_all_their_gradients(scale: float) -> None:
    """Stages have other chunks in common, and other numbers of them."""
    first, second = gradient(1), gradient(2) * scale
    third = torch.zeros(NUMEL)
    stages = [(first, [1, 5000, 3 * CHUNK + 7]), (second, [CHUNK, 2 * CHUNK, 2 * CHUNK + 1]), (third, [0, 0, 3])]
    padded = [torch.nn.functional.pad(grad, (0, -NUMEL % CHUNK)) for grad, _ in stages]
    assert over_stages(stages) == [(*whole(torch.cat(padded)), 1.0)] * 12


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_value_that_is_not_finite_is_seen_by_every_rank(bad: float) -> None:
    grad = gradient(0)
    grad[4999] = bad
    assert {top for _, top, _ in over_ranks(grad, [1, 5000, 3 * CHUNK + 7])} == {2**31 - 1}


def test_no_gradient_at_all_is_an_exponent_of_nothing() -> None:
    assert {(total, top) for total, top, _ in over_ranks(torch.zeros(NUMEL), [7, 5000])} == {(0, -(2**31))}
