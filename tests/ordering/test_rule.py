"""The ordering rule on lowered schedules, and the simulated backend's agreement with it.

Seen red: one wait left out of `lower_step`; `Accesses.unordered` without readers; `without_redundant_waits` that
drops every wait; `StepIssuer.step` that does not inherit the waits of a bucket without gradients.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hostward
from hostward.engine.simulated import LANES, Order, SimulatedBackend
from hostward.errors import OrderingError
from hostward.lowering.optimizer import lower_step
from hostward.ordering import races, repeated, require_ordered, same_order, stamps, without_redundant_waits
from hostward.plan import Placement
from hostward.schedule import Kind, Lane, Op, Schedule
from hostward.training.state import same_bits

D, H = Placement.DEVICE, Placement.HOST
PLACEMENTS = st.lists(st.sampled_from(Placement), min_size=1, max_size=9)


def waits_of(schedule: Schedule) -> list[tuple[str, str]]:
    return [(op.name, wait) for op in schedule.ops for wait in op.waits]


@given(PLACEMENTS)
def test_lowered_steps_have_no_race_however_often_they_repeat(placements: list[Placement]) -> None:
    schedule = lower_step(placements)
    assert races(repeated(schedule, 3)) == []
    assert Schedule.from_text(schedule.to_text()) == schedule
    stepped = [op.bucket for op in schedule.ops if op.kind is Kind.ADAMW]
    assert stepped == list(range(len(placements)))


@given(PLACEMENTS)
def test_each_wait_of_a_lowered_step_is_needed(placements: list[Placement]) -> None:
    schedule = lower_step(placements)
    for name, wait in waits_of(schedule):
        assert races(repeated(schedule.without_wait(name, wait), 2)), f"{name} need not wait for {wait}"


def test_pruning_keeps_the_order() -> None:
    ops = (
        Op("a", Kind.NORM, Lane.COMPUTE, writes=("x",)),
        Op("b", Kind.COPY, Lane.D2H, reads=("x",), writes=("y",), waits=("a",)),
        Op("c", Kind.ADAMW, Lane.HOST, reads=("y",), waits=("a", "b")),
        Op("d", Kind.ADAMW, Lane.HOST, reads=("y",), waits=("b",)),
    )
    pruned = without_redundant_waits(Schedule(ops))
    assert waits_of(pruned) == [("b", "a"), ("c", "b")]
    assert same_order(Schedule(ops), pruned)
    assert not same_order(pruned, pruned.without_wait("c", "b"))


def test_a_race_is_told_with_its_cure() -> None:
    schedule = lower_step([D, H]).without_wait("upload/1", "step/1")
    with pytest.raises(OrderingError) as caught:
        require_ordered(schedule)
    assert caught.value.what.startswith("'upload/1' on lane h2d and 'step/1' on lane host both use 'source/1'")
    assert caught.value.fix == "let 'upload/1' wait for the event of 'step/1'"


def test_a_free_and_a_second_writer_conflict_with_readers() -> None:
    read = Op("read", Kind.COPY, Lane.D2H, reads=("x",))
    for kind in (Kind.RETIRE, Kind.ADAMW):
        later = Op("later", kind, Lane.HOST, writes=("x",))
        assert [r.operand for r in races(Schedule((read, later)))] == ["x"]
    both_read = Schedule((read, Op("also", Kind.COPY, Lane.HOST, reads=("x",))))
    assert races(both_read) == []
    assert set(stamps(both_read)) == {"read", "also"}


class Model(torch.nn.Module):
    """Six small layers; the last may be left out of forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: torch.Tensor, used: int) -> torch.Tensor:
        for layer in self.layers[:used]:
            x = torch.tanh(layer(x))
        return x


def train(
    order: Order | None = None, *, schedule: Schedule | None = None, steps: int = 2, fraction: float = 0.6
) -> list[torch.Tensor]:
    model = Model()
    backend = SimulatedBackend(threads=1, order=order)
    optimizer = hostward.AdamW(model, lr=1e-2, max_grad_norm=0.1, offload_fraction=fraction, backend=backend)
    if schedule is not None:
        optimizer._issuer.schedule = schedule
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        optimizer.zero_grad()
        # Every other step leaves the last bucket, which lies on the host, without a gradient.
        model(torch.randn(4, 16, generator=generator), 6 - step % 2).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def the_schedule() -> Schedule:
    optimizer = hostward.AdamW(Model(), offload_fraction=0.6, backend=SimulatedBackend(threads=1))
    assert [b.placement for b in optimizer.plan.buckets].count(H) == 4
    return optimizer.schedule


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_three_hundred_orders_give_the_same_bits(first: int) -> None:
    expected = train(fraction=0.0, steps=3)
    for seed in range(first, first + 50):
        assert all(same_bits(a, b) for a, b in zip(expected, train(Order(seed=seed), steps=3), strict=True))


@pytest.mark.parametrize("late", [s for n in range(5) for s in itertools.combinations(LANES, n)], ids=str)
def test_every_choice_of_late_lanes_gives_the_same_bits(late: tuple[Lane, ...]) -> None:
    expected = train(fraction=0.0, steps=3)
    order = Order(late=frozenset(late))
    assert all(same_bits(a, b) for a, b in zip(expected, train(order, steps=3), strict=True))


@pytest.mark.parametrize(("name", "wait"), waits_of(the_schedule()))
def test_the_simulated_backend_agrees_with_the_rule(name: str, wait: str) -> None:
    broken = the_schedule().without_wait(name, wait)
    if races(broken) and name != "join":
        with pytest.raises(OrderingError):
            train(schedule=broken)
    else:  # a race with what comes after the step, which a step that ends in a synchronisation cannot run into
        assert races(repeated(broken, 2))
        assert all(same_bits(a, b) for a, b in zip(train(), train(schedule=broken), strict=True))


def test_a_bucket_without_gradients_hands_its_waits_on() -> None:
    model = Model()
    # Its weight is copied back after the step, by an operation that relies on the join alone.
    model.layers[3].weight = torch.nn.Parameter(model.layers[3].weight.detach().t())
    optimizer = hostward.AdamW(model, offload_fraction=1.0, backend=SimulatedBackend(threads=1))
    assert optimizer.schedule.by_name["join"].waits == ("upload/5", "retire/5")
    before = model.layers[3].weight.detach().clone()
    model(torch.ones(4, 16), 5).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model.layers[3].weight, before)
