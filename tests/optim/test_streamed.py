"""Streamed state: on the host between steps, on the device for its step, through a bounded number of slots.

Seen red: state not written back, or written back before the step; a slot read into before its last bucket was written;
slots kept after the forward, taken twice, or smaller than a bucket; counts on the host; what was staged before a load
or a reseed stepped with all the same.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from networks import Net, loss_of, make
from optimizer_cases import (
    DTYPES,
    LATE_SUBSETS,
    MIXED,
    MIXES,
    NEVER,
    Model,
    NumpyOptimizer,
    adamw,
    assert_equal,
    backend,
    set_gradients,
    snapshot,
)

import hostward
from hostward.core.inventory import state_bytes_per_element
from hostward.core.placement import Placement
from hostward.errors import ConfigError
from hostward.optim import adamw as building, op_binding, step_executor as issuing
from hostward.optim.staging_buffers import StagingBuffers
from hostward.runtime.backend import Tier
from hostward.runtime.simulated.backend import Order, SimulatedBackend
from hostward.schedule.ops import Lane
from hostward.schedule.optimizer import StepShape

STEPS = 4
SLOTS = "staging slots"
with_streamed = pytest.mark.parametrize("mix", ["streamed", "half streamed", "both", "mixed"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def in_numpy(model: torch.nn.Module, max_norm: float | None) -> dict[str, torch.Tensor]:
    expected = NumpyOptimizer.over(model.named_parameters())
    for step in range(STEPS):
        gradients(model, step)
        expected.step({n: p.grad for n, p in model.named_parameters()}, max_norm=max_norm)
    return expected.snapshot()


def gradients(model: torch.nn.Module, step: int) -> None:
    """In every other step some are missing: one range of a bucket, then a whole bucket. Some norms are small."""
    skip = {1: [NEVER], 3: ["layers.2.weight", "layers.2.after", NEVER]}.get(step, [])
    set_gradients(model, step, skip=skip, factor=1e-3 if step % 2 else 1.0)


def trained(
    mix: Mapping[str, float], dtype: torch.dtype, on: SimulatedBackend | None = None, **options: Any
) -> tuple[Model, hostward.AdamW]:
    model = Model(dtype)
    optimizer = adamw(model, **mix, **({} if on is None else {"backend": on}), **options)
    for step in range(STEPS):
        gradients(model, step)
        optimizer.step()
        assert not optimizer.last_step_skipped
    return model, optimizer


@every_dtype
@with_streamed
def test_t28_streamed_state_equals_the_numpy_reference(mix: str, dtype: torch.dtype) -> None:
    max_norm = (None, 0.5)[(list(MIXES).index(mix) + DTYPES.index(dtype)) % 2]
    expected = in_numpy(Model(dtype), max_norm)
    for on in (None, backend(seed=1), backend(seed=2, late=LATE_SUBSETS[-1])):
        assert_equal(snapshot(*trained(MIXES[mix], dtype, on, max_grad_norm=max_norm)), expected)


@pytest.mark.parametrize("late", LATE_SUBSETS, ids=lambda late: "+".join(sorted(late)) or "none")
def test_h6_every_subset_of_late_lanes_gives_the_same_bits(late: frozenset[Lane]) -> None:
    found = snapshot(*trained(MIXED, torch.bfloat16, backend(late=late), max_grad_norm=0.5))
    assert_equal(found, in_numpy(Model(torch.bfloat16), 0.5))


# ---------------------------------------------------------------- slots


class Profile:
    """A gauge that sees so much memory freed by the middle of backward that `slots` slots fit there."""

    def __init__(self, watched: StagingBuffers, slots: int) -> None:
        self._watched = watched
        self._freed_bytes = max(0, slots - 2) * watched.slot_bytes
        self.restarted = 0

    def peak_bytes(self) -> int:
        spans, at = self._watched._spans, self._watched._late
        late = any(span.bucket is not None and span.bucket <= at for span in spans)
        return 1_000_000 + spans[-1].held_bytes + (0 if late else self._freed_bytes)

    def restart(self) -> None:
        self.restarted += 1


def with_profile(monkeypatch: pytest.MonkeyPatch, slots: int) -> list[Profile]:
    """Optimizers made from here on choose `slots` slots after their third step."""
    made: list[Profile] = []

    def build(*arguments: Any, **options: Any) -> StagingBuffers:
        found = StagingBuffers(*arguments, **options)
        made.append(Profile(found, slots))
        found._gauge, found._profiled = made[-1], not found.count
        return found

    monkeypatch.setattr(building, "StagingBuffers", build)
    return made


def staging_buffer_by_bucket(optimizer: hostward.AdamW) -> int:
    return len({name for op in optimizer.schedule.ops for name in op.writes if name.startswith("slot/")})


def test_an_interrupt_between_new_slots_and_the_schedule_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of which the schedule knows nothing would be given back behind nothing."""
    with_profile(monkeypatch, 4)
    monkeypatch.setattr(op_binding, "_KEPT_WORKS", 0)  # works are bound anew in every step
    lower, interrupts = issuing.Schedules, [1]

    def interrupted(shape: StepShape) -> issuing.Schedules:
        if shape.staging_buffers == 4 and interrupts:
            interrupts.pop()
            raise KeyboardInterrupt
        return lower(shape)

    monkeypatch.setattr(issuing, "Schedules", interrupted)
    model = Model(torch.bfloat16)
    optimizer = adamw(model, **MIXES["streamed"], backend=backend(late=[Lane.UPDATE, Lane.D2H]), max_grad_norm=0.5)
    expected = NumpyOptimizer.over(model.named_parameters())
    saved: list[Any] = []
    for step in range(6):
        gradients(model, step)
        expected.step({n: p.grad for n, p in model.named_parameters()}, max_norm=0.5)
        if step == 2:
            saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            gradients(model, step)
        optimizer.step()
    assert not interrupts
    assert staging_buffer_by_bucket(optimizer) == 4
    assert_equal(snapshot(model, optimizer), expected.snapshot())


@pytest.mark.parametrize("slots", [2, 3, 4, 100])
@with_streamed
def test_h21_any_number_of_slots_and_a_change_of_it_give_the_same_bits(
    mix: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiles = with_profile(monkeypatch, slots)
    for on in [backend(seed=3)] if slots in (2, 100) else [backend(late=[Lane.H2D, Lane.UPDATE])]:
        model = Model(torch.bfloat16)
        optimizer = adamw(model, **MIXES[mix], backend=on, max_grad_norm=0.5)
        expected = NumpyOptimizer.over(model.named_parameters())
        counts: list[int] = []
        restarts: list[int] = []
        for step in range(6):
            gradients(model, step)
            expected.step({n: p.grad for n, p in model.named_parameters()}, max_norm=0.5)
            optimizer.step()
            counts.append(staging_buffer_by_bucket(optimizer))
            restarts.append(profiles[-1].restarted)
        streamed = optimizer.plan.count(Placement.STREAMED)
        assert counts[:2] == [min(2, streamed)] * 2
        assert counts[-1] == min(slots, streamed)
        assert_equal(snapshot(model, optimizer), expected.snapshot())
        assert restarts[1] == 0 < restarts[2] == restarts[-1]


@with_streamed
def test_staging_bytes_bound_the_slots_and_one_is_always_there(mix: str) -> None:
    sizes = []
    for staging_bytes in (1, 1_500_000, None):
        model, optimizer = trained(MIXES[mix], torch.bfloat16, backend(seed=1), staging_bytes=staging_bytes)
        sizes.append(staging_buffer_by_bucket(optimizer))
        assert_equal(snapshot(model, optimizer), in_numpy(Model(torch.bfloat16), None))
    assert sizes[0] == 1
    assert sizes[2] == 2
    for wrong in (0, -1, 1.5, "1", True):
        with pytest.raises(ConfigError, match="staging_bytes"):
            adamw(Model(), staging_bytes=wrong)


class Watermark(SimulatedBackend):
    """Remembers the most bytes of staging slots that were ever held."""

    def __init__(self) -> None:
        super().__init__(threads=1, order=Order(seed=2))
        self.most = 0

    def allocate(self, *arguments: Any, **options: Any) -> Any:
        made = super().allocate(*arguments, **options)
        self.most = max(self.most, self.ledger.held_bytes[Tier.DEVICE, SLOTS])
        return made


@with_streamed
def test_slots_are_there_for_the_step_alone(mix: str) -> None:
    on = Watermark()
    model = Net(torch.bfloat16)
    optimizer = adamw(model, **MIXES[mix], backend=on)
    held = dict(on.ledger.held_bytes)
    streamed = [s.bucket for s in optimizer._states if s.placement is Placement.STREAMED]
    largest = max(b.offsets[-1] * state_bytes_per_element(b.kind) for b in streamed)
    for step in range(3):
        with optimizer.accumulate(last=True):
            loss_of(model, step).backward()
        optimizer.step()
        assert on.ledger.held_bytes[Tier.DEVICE, SLOTS] == on.most
        loss_of(model, step)
        assert on.ledger.held_bytes[Tier.DEVICE, SLOTS] == 0
        optimizer.wait()
        assert {k: n for k, n in on.ledger.held_bytes.items() if n} == {k: n for k, n in held.items() if n}
    count = min(2, len(streamed))
    assert count * largest <= on.most <= count * (largest + 3 * 256)


@every_dtype
@with_streamed
def test_s7_state_moves_once_each_way_and_nothing_else_does(mix: str, dtype: torch.dtype) -> None:
    model = Model(dtype)
    optimizer = adamw(model, **MIXES[mix])
    ledger = optimizer.backend.ledger
    streamed = [s for s in optimizer._states if s.placement is Placement.STREAMED]
    state_bytes = sum(s.bucket.offsets[-1] * state_bytes_per_element(s.bucket.kind) for s in streamed)
    host = [s for s in optimizer._states if s.placement is Placement.HOST]
    weight_bytes = sum(s.bucket.numel for s in host) * dtype.itemsize
    for step in range(3):
        set_gradients(model, step)
        before = dict(ledger.copied_bytes)
        optimizer.step()
        moved = {lane: n - before.get(lane, 0) for lane, n in ledger.copied_bytes.items()}
        assert moved == {Lane.H2D: state_bytes + weight_bytes, Lane.D2H: state_bytes + weight_bytes + 12 * bool(host)}
    owners = ledger.by_owner(Tier.DEVICE)
    on_device = sum(s.bucket.offsets[-1] for s in optimizer._states if s.placement is Placement.DEVICE)
    assert owners.get("exp_avg", 0) == 4 * on_device
    # Counts lie where the step runs, and streamed buckets are stepped on the device.
    assert owners["step counts"] == 8 * sum(
        len(s.bucket.ranges) for s in optimizer._states if s.placement is not Placement.HOST
    )


class Layers(torch.nn.Module):
    """Four layers of one size, any of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor, without: set[int]) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i not in without:
                x = torch.tanh(layer(x)) + x
        return x


@pytest.mark.parametrize("late", [None, [], [Lane.H2D], [Lane.D2H, Lane.UPDATE]], ids=str)
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 1.0])
def test_h12_state_staged_for_layers_that_take_no_part(share: float, late: list[Lane] | None) -> None:
    """Backward brings the first streamed buckets in before it is known that one of them gets no gradient."""
    left_out: list[set[int]] = [{i} for i in range(4)] + [{i, j} for j in range(4) for i in range(j)] + [set()]
    results = []
    for mix in ({"offload_fraction": 1.0, "streamed_fraction": share}, {"offload_fraction": 0.0}):
        model = Layers()
        on = SimulatedBackend(threads=1, order=Order(eager=True) if late is None else Order(late=frozenset(late)))
        optimizer = adamw(model, **mix, max_grad_norm=0.5, backend=on)
        for step, without in enumerate(left_out):
            optimizer.zero_grad()
            x = torch.randn(3, 16, generator=torch.Generator().manual_seed(step))
            with optimizer.accumulate(last=True):
                model(x, without).square().mean().backward()
            optimizer.step()
        results.append(snapshot(model, optimizer))
    assert_equal(*results)


# ---------------------------------------------------------------- options


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf"), True, "half", "0.5", [1.0], "AUTO"])
def test_t15_streamed_fractions_outside_the_range(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^streamed_fraction must be a number in \[0\.0, 1\.0\]"):
        adamw(Model(), offload_fraction=1.0, streamed_fraction=value)


def test_streamed_state_is_not_stepped_by_torch() -> None:
    with pytest.raises(ConfigError, match=r"streamed_fraction=0\.5 with use_torch_optimizer") as caught:
        adamw(Model(), offload_fraction=1.0, streamed_fraction=0.5, use_torch_optimizer=True)
    assert caught.value.fix == "leave one of them out"
    for value in ("auto", 0.0, 0):
        plan = adamw(Model(), offload_fraction=1.0, streamed_fraction=value, use_torch_optimizer=True).plan
        assert plan.count(Placement.STREAMED) == 0


def test_a_share_of_what_is_not_offloaded_is_said_to_do_nothing(caplog: pytest.LogCaptureFixture) -> None:
    adamw(Model(), streamed_fraction=0.5)
    (told,) = [r.getMessage() for r in caplog.records]
    assert told == "streamed_fraction=0.5 does nothing while offload_fraction=0: it is a share of what is offloaded"
    caplog.clear()
    adamw(Model())
    adamw(Model(), streamed_fraction=0.0)
    adamw(Model(), streamed_fraction=0.5, offload_fraction=0.5)
    assert not caplog.records


def test_a_plan_says_what_is_streamed() -> None:
    with pytest.raises(ConfigError, match=r"^plan=... and streamed_fraction=0\.5") as caught:
        adamw(Model(), streamed_fraction=0.5, plan="plan.json")
    assert caught.value.fix == "leave streamed_fraction out, or edit the plan"


def test_auto_streams_nothing_where_rates_cannot_be_measured() -> None:
    plan = adamw(Model(), offload_fraction=1.0, streamed_fraction="auto").plan
    assert plan.count(Placement.HOST) == len(plan.buckets)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_plan_tells_what_is_streamed(share: float) -> None:
    optimizer = adamw(Model(), offload_fraction=1.0, streamed_fraction=share)
    streamed = optimizer.plan.count(Placement.STREAMED)
    assert (f"{streamed} streamed" in repr(optimizer)) is (share > 0)
    held = optimizer.backend.ledger.by_owner(Tier.HOST)
    assert ("weights for upload" in held) is (share < 1.0)
    assert ("gradients" in held) is (share < 1.0)


@pytest.mark.parametrize("mix", ["streamed", "mixed"])
def test_a_read_that_was_interrupted_is_made_again(mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: a staging buffer that counted as made anew while it was being filled."""

    def trained(*, interrupted: bool) -> dict[str, torch.Tensor]:
        model, optimizer = make(mix, torch.bfloat16, Order(late=frozenset({Lane.H2D})))

        def backward(step: int) -> None:
            with optimizer.accumulate(last=True):
                loss_of(model, step).backward()

        for step in range(5):
            if interrupted and step == 3:
                with monkeypatch.context() as patch:
                    patch.setattr(type(optimizer._executor._slots.pace), "issued", _interrupt)
                    with pytest.raises(KeyboardInterrupt):
                        backward(step)
                optimizer.zero_grad()
            backward(step)
            optimizer.step()
        return snapshot(model, optimizer)

    assert_equal(trained(interrupted=True), trained(interrupted=False))


def _interrupt(_: object) -> None:
    raise KeyboardInterrupt
