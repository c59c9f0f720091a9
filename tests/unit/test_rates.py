"""Rates that several ranks measure together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch

from hostward.engine import rates
from hostward.engine.backend import Backend, Work
from hostward.engine.simulated import SimulatedBackend
from hostward.inspect import Tracked
from hostward.schedule import Lane
from hostward.training.mix import Mix


class Others:
    """Three ranks besides this one. `told`: of each collective, how many values there were."""

    def __init__(self, rate: float = 0.0, fraction: float = 0.0) -> None:
        self._rate, self._fraction = rate, fraction
        self.told: list[int] = []

    def total(self, values: torch.Tensor) -> None:
        self.told.append(values.numel())
        if values.numel() == 5:
            values += 3 * torch.tensor([self._rate] * 4 + [1.0], dtype=values.dtype)

    def largest(self, values: torch.Tensor) -> None:
        self.told.append(values.numel())
        values.clamp_(min=self._fraction)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_ELEMENTS", 8192)
    monkeypatch.setattr(rates, "_COPIED_BYTES", 8192)


def test_ranks_measure_at_once_and_take_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: Callable[..., float] = lambda *_: 2.0  # noqa: E731
    monkeypatch.setattr(rates, "_seconds", seconds)
    others = Others(rate=0.0)
    alone = rates.measure_rates(SimulatedBackend(threads=1))
    found = rates.measure_rates(SimulatedBackend(threads=1), others)
    assert others.told == [1, 1, 1, 1, 5]  # before each measurement, and at the end
    assert found.host_parameters_per_s == alone.host_parameters_per_s / 4
    assert found.duplex_bytes_per_s == alone.duplex_bytes_per_s / 4
    assert found.busy_host_parameters_per_s == alone.busy_host_parameters_per_s / 4
    assert found.busy_duplex_bytes_per_s == alone.busy_duplex_bytes_per_s / 4


def test_what_is_timed_beside_others_ends_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both directions of the link until both have ended: a step needs as much of each, and one is slower then."""
    took = {Lane.HOST: 1.0, Lane.H2D: 4.0, Lane.D2H: 2.0}
    timed: list[tuple[Counter[Lane], list[Lane]]] = []

    def seconds(_: Backend, works: Sequence[Work], last: Sequence[Work]) -> float:
        timed.append((Counter(work.lane for work in works), [work.lane for work in last]))
        return max(took[work.lane] for work in last)

    monkeypatch.setattr(rates, "_seconds", seconds)
    found = rates.measure_rates(SimulatedBackend(threads=1))
    # Three works take 1 s on the host and 4 s on the link, alone.
    assert timed[2:] == [
        ({Lane.HOST: 3, Lane.H2D: 4, Lane.D2H: 4}, [Lane.HOST]),
        ({Lane.HOST: 60, Lane.H2D: 3, Lane.D2H: 3}, [Lane.H2D, Lane.D2H]),
    ]
    assert found.busy_host_parameters_per_s == 3 * 8192
    assert found.busy_duplex_bytes_per_s == found.duplex_bytes_per_s == 2 * 3 * 8192 / 4.0


@pytest.mark.parametrize(("theirs", "expected"), [(0.75, 0.75), (0.0, 0.0)])
def test_the_rank_that_has_least_room_decides_for_all(theirs: float, expected: float) -> None:
    tracked = [Tracked("weight", torch.nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16)), 0)]
    mix = Mix("auto", 0.0, device_memory="1GiB")
    _, plan = mix.place(SimulatedBackend(threads=1), tracked, ranks=Others(fraction=theirs))
    assert plan.asked_fraction == mix.offload_fraction == expected
