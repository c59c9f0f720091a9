"""Rates that several ranks measure together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hostward.core.host_limits import Rates
from hostward.core.inventory import Dtype, Parameter, StateFormat, cut_buckets
from hostward.errors import ConfigError
from hostward.model.parameters import ParamRecord
from hostward.optim.placement import PlacementPolicy
from hostward.runtime import calibrate
from hostward.runtime.backend import TORCH_DTYPES, AdamWOperands, Backend, Buffer, Event, Scalars, Work
from hostward.runtime.simulated.backend import SimulatedBackend
from hostward.schedule.ops import Lane


class Others:
    """Three ranks besides this one. `told`: of each collective, how many values there were."""

    def __init__(self, rate: float = 0.0, fraction: float = 0.0) -> None:
        self._rate, self._fraction = rate, fraction
        self.told: list[int] = []

    def total(self, values: torch.Tensor) -> None:
        self.told.append(values.numel())
        if values.numel() == 6:
            values += 3 * torch.tensor([self._rate] * 5 + [1.0], dtype=values.dtype)

    def largest(self, values: torch.Tensor) -> None:
        self.told.append(values.numel())
        values.clamp_(min=self._fraction)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_ELEMENTS", 8192)
    monkeypatch.setattr(calibrate, "_COPIED_BYTES", 8192)


def test_ranks_measure_at_once_and_take_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: Callable[..., float] = lambda *_: 2.0  # noqa: E731
    monkeypatch.setattr(calibrate, "_seconds", seconds)
    others = Others(rate=0.0)
    alone = calibrate.measure_rates(SimulatedBackend(threads=1))
    found = calibrate.measure_rates(SimulatedBackend(threads=1), others)
    assert others.told == [1, 1, 1, 1, 1, 6]  # before each measurement, and at the end
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

    monkeypatch.setattr(calibrate, "_seconds", seconds)
    found = calibrate.measure_rates(SimulatedBackend(threads=1))
    # Three works take 1 s on the host and 4 s on the link, alone.
    assert timed[2] == ({Lane.D2H: 3}, [Lane.D2H])
    assert timed[3:] == [
        ({Lane.HOST: 3, Lane.H2D: 4, Lane.D2H: 4}, [Lane.HOST]),
        ({Lane.HOST: 60, Lane.H2D: 3, Lane.D2H: 3}, [Lane.H2D, Lane.D2H]),
    ]
    assert found.busy_host_parameters_per_s == 3 * 8192
    assert found.busy_duplex_bytes_per_s == found.duplex_bytes_per_s == 2 * 3 * 8192 / 4.0
    assert found.d2h_bytes_per_s == 3 * 8192 / took[Lane.D2H]


class OfADevice(SimulatedBackend):
    """Says that it is a CUDA device, whose rates are given."""

    def __init__(self) -> None:
        super().__init__(threads=1)
        self.device = torch.device("cuda")


class Recording(SimulatedBackend):
    """Keeps the operands of the CPU step, and how many numbers of its moments were not zero at the end."""

    def __init__(self) -> None:
        super().__init__(threads=1)
        self.stepped: list[AdamWOperands] = []
        self.filled: list[int] = []

    def adamw(self, lane: Lane, name: str, operands: AdamWOperands, scalars: Scalars, **options: Any) -> Work:
        self.stepped.append(operands)
        return super().adamw(lane, name, operands, scalars, **options)

    def free(self, buffers: Sequence[Buffer], after: Sequence[Event] = ()) -> None:
        for operands in self.stepped:
            moments = operands.exp_avg, operands.exp_avg_sq
            self.filled += [int(moment.data[:8192].count_nonzero()) for moment in moments]
        super().free(buffers, after)


@pytest.mark.parametrize(
    ("dtype", "form", "bytes_of"),
    [
        (Dtype.BF16, StateFormat(), (4, 4, 2)),
        (Dtype.FP32, StateFormat(), (4, 4)),
        (Dtype.FP16, StateFormat(exp_avg=Dtype.BF16), (2, 4, 4)),
        (Dtype.BF16, StateFormat(Dtype.FP8, Dtype.FP8, Dtype.BF16), (1, 1)),
    ],
)
def test_the_step_that_is_measured_has_the_format_of_the_state(
    dtype: Dtype, form: StateFormat, bytes_of: tuple[int, ...]
) -> None:
    """And numbers as they are in training: a block of zeros takes FP8 longer."""
    backend = Recording()
    calibrate.measure_rates(backend, dtype=dtype, form=form)
    [stepped] = backend.stepped
    state = (stepped.exp_avg, stepped.exp_avg_sq, *([stepped.low] if stepped.low else []))
    assert tuple(buffer.data.element_size() for buffer in state) == bytes_of
    [bound] = stepped.ranges
    assert bound.gradient.data.dtype == bound.weight.data.dtype == TORCH_DTYPES[dtype]
    assert min(backend.filled) > 8000


RATES = Rates(4.226e9, 72.46e9, 2.915e9, 44.2e9, 49.5e9)


def tracked_weights() -> list[ParamRecord]:
    return [ParamRecord(f"w{i}", torch.nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16)), 0) for i in range(2)]


def test_who_knows_more_of_the_step_tells_the_share_by_the_rates() -> None:
    asked: list[Rates] = []

    def told(rates: Rates) -> float:
        asked.append(rates)
        return 0.75

    mix, buckets = PlacementPolicy(1.0, told), cut_buckets(tuple(t.facts for t in tracked_weights()))
    mix.rates = RATES
    assert [mix.streamed_share(OfADevice(), buckets, fraction) for fraction in (1.0, 0.5, 0.0)] == [0.75, 0.75, 0.0]
    assert asked == [RATES]  # once: groups that come later are placed alike
    assert mix.streamed_share(SimulatedBackend(threads=1), buckets, 1.0) == 0.0  # no link, nothing to overlap


def test_ranks_that_were_told_different_shares_stream_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without parameters has a say as well, since all take part in the collective."""
    told: list[float] = []

    def most(own: Callable[[], float], *_: object) -> float:  # a collective of device tensors: there are none here
        told.append(own())
        return max(0.6, told[-1])

    monkeypatch.setattr("hostward.optim.placement._most", most)
    for buckets in (cut_buckets(tuple(t.facts for t in tracked_weights())), ()):
        mix = PlacementPolicy(1.0, lambda _: 0.25)
        mix.rates = RATES
        assert mix.streamed_share(OfADevice(), buckets, 1.0, Others()) == 0.6
    assert told == [0.25, 0.25]


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP32])
def test_rates_are_measured_with_the_format_that_is_placed(monkeypatch: pytest.MonkeyPatch, dtype: Dtype) -> None:
    """By ranks without parameters as well, which measure together with the others."""
    found: list[tuple[Dtype, StateFormat]] = []

    def measured(backend: Backend, ranks: object = None, *, dtype: Dtype, form: StateFormat) -> Rates:
        found.append((dtype, form))
        return RATES

    monkeypatch.setattr("hostward.optim.placement.measure_rates", measured)
    form = StateFormat(Dtype.FP8, Dtype.FP8)
    parameters = [Parameter("scale", 1, dtype, "", dims=1), Parameter("w", 4096, dtype, "layers.0")]
    PlacementPolicy(1.0, "auto").streamed_share(OfADevice(), cut_buckets(parameters, form=form), 1.0, form=form)
    PlacementPolicy(1.0, "auto").streamed_share(OfADevice(), (), 1.0, form=form)
    assert found == [(dtype, form), (Dtype.BF16, form)]


def test_a_vector_that_comes_first_does_not_decide_the_share() -> None:
    """It has other bytes of state than FP8 matrices, and a rank may have no element of it."""
    scale, weight = Parameter("scale", 1, Dtype.BF16, "", dims=1), Parameter("w", 4096, Dtype.BF16, "layers.0")
    mix = PlacementPolicy(1.0, "auto")
    mix.rates = RATES

    def share(form: StateFormat, *parameters: Parameter) -> float:
        return mix.streamed_share(OfADevice(), cut_buckets(parameters, form=form), 1.0)

    fp8, bf16 = (StateFormat(dtype, dtype) for dtype in (Dtype.FP8, Dtype.BF16))
    assert share(fp8, scale, weight) == share(fp8, weight) != share(bf16, weight)


@pytest.mark.parametrize("wrong", [1.5, -0.1, "half", float("nan")])
def test_a_share_that_is_told_is_a_share(wrong: object) -> None:
    mix, buckets = PlacementPolicy(1.0, lambda _: wrong), cut_buckets(tuple(t.facts for t in tracked_weights()))  # type: ignore[arg-type, return-value]
    mix.rates = RATES
    with pytest.raises(ConfigError, match=r"streamed_fraction must be a number in \[0.0, 1.0\]"):
        mix.streamed_share(OfADevice(), buckets, 1.0)


def test_nobody_tells_a_share_beside_a_plan() -> None:
    with pytest.raises(ConfigError, match=r"plan=\.\.\. and streamed_fraction="):
        PlacementPolicy(1.0, lambda _: 0.5, "plan.json")


@pytest.mark.parametrize(("theirs", "expected"), [(0.75, 0.75), (0.0, 0.0)])
def test_the_rank_that_has_least_room_decides_for_all(theirs: float, expected: float) -> None:
    tracked = [ParamRecord("weight", torch.nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16)), 0)]
    mix = PlacementPolicy("auto", 0.0, device_memory="1GiB")
    _, plan, _ = mix.place(SimulatedBackend(threads=1), tracked, ranks=Others(fraction=theirs))
    assert plan.asked_fraction == mix.offload_fraction == expected
