"""Works of a point are gathered once, and again for another choice of ranges; the order is that of the schedule.

Seen red: a gathered point kept for another choice, for another set of buckets without gradients, after buffers had
changed; one choice kept instead of several; points of a run in reverse; a release before its own run's gradient points;
gradients of a bucket that is not whole left behind; those that a bucket still holds dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import pytest
import torch
from networks import loss_of, make
from optimizer_cases import MIXED, NEVER, Model, adamw, assert_equal, backend, set_gradients, snapshot

import hostward
from hostward.core.placement import Placement
from hostward.optim.bucket_lifecycle import BucketPhase
from hostward.optim.op_binding import Bindings
from hostward.optim.step_executor import TOGETHER, StepExecutor
from hostward.runtime.backend import Batch, Event, Work
from hostward.runtime.simulated.backend import SimulatedBackend
from hostward.schedule.ops import Kind, Lane, Op
from hostward.schedule.optimizer import (
    GRADIENTS_IN_FLIGHT,
    STEP,
    grad_ready_trigger,
    pre_forward_trigger,
    release_grad_trigger,
)


class Batches(SimulatedBackend):
    """Remembers the works that it was asked to put together."""

    def __init__(self) -> None:
        super().__init__(threads=1)
        self.works: list[Sequence[Work]] = []

    def batch(self, works: Sequence[Work]) -> Work | Batch:
        self.works.append(works)
        return super().batch(works)


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Operations whose works were looked up, as it goes on."""
    names: list[str] = []

    def counting(method: Callable[..., Work]) -> Callable[..., Work]:
        def counted(self: Bindings, op: Op, *args: Any, **options: bool) -> Work:
            names.append(op.name)
            return method(self, op, *args, **options)

        return counted

    monkeypatch.setattr(Bindings, "work", counting(Bindings.work))
    monkeypatch.setattr(Bindings, "addition", counting(Bindings.addition))
    return names


def test_a_step_like_an_earlier_one_looks_nothing_up(looked_up: list[str]) -> None:
    model = Model()
    optimizer = adamw(model, backend=backend(), **MIXED)
    counts = []
    for step, skip in enumerate([(), (), (), [NEVER], [NEVER], [NEVER], ()]):
        optimizer.zero_grad()
        looked_up.clear()
        set_gradients(model, step, skip=skip)
        optimizer.step()
        optimizer.wait()
        counts.append(len(looked_up))
    assert counts[0] > counts[3] > 0
    # What is staged before a choice is known goes by the last step's: it follows one step later.
    assert [counts[i] for i in (1, 2, 4, 5, 6)] == [0, 0, 2, 0, 0]


def test_microbatches_that_are_added_up_look_nothing_up_in_the_second_step(looked_up: list[str]) -> None:
    """The first begins totals, the next go on with them, and the last makes partial sums."""
    model, optimizer = make("host", torch.bfloat16, gradients="host")
    for step in range(4):
        if step == 2:
            assert any(name.startswith("add/") for name in looked_up)
            looked_up.clear()
        for m in range(4):
            with optimizer.accumulate(last=m == 3):
                loss_of(model, 4 * step + m).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert looked_up == []


def test_works_are_put_together_in_the_order_of_the_schedule() -> None:
    model, lanes = Model(), Batches()
    optimizer = adamw(model, backend=lanes, **MIXED)
    set_gradients(model, 0)
    optimizer.step()
    ops = [op for op in optimizer.schedule.triggers[STEP] if op.kind is not Kind.MODEL]
    first = next(i for i, op in enumerate(ops) if op.kind is Kind.ADAMW)
    events = optimizer._executor._bindings.events
    expected = [[events[op.name] for op in part] for part in (ops[:first], ops[first:])]
    asked = [[work.done for work in works] for works in lanes.works]
    at = asked.index(expected[0])
    assert asked[at + 1] == expected[1]
    assert {work.lane for work in lanes.works[at + 1]} >= {Lane.HOST, Lane.UPDATE, Lane.H2D, Lane.D2H}


def done_of(optimizer: hostward.AdamW, points: Sequence[str]) -> list[Event]:
    """What is recorded at these points, in the order of the schedule."""
    ops = [op for point in points for op in optimizer.schedule.triggers.get(point, ()) if op.kind is not Kind.MODEL]
    return [optimizer._executor._bindings.events[op.name] for op in ops]


def test_points_that_come_together_are_put_together_in_order() -> None:
    model, lanes = Model(), Batches()
    optimizer = adamw(model, backend=lanes, offload_fraction=1.0)
    set_gradients(model, 0)
    optimizer.step()
    asked = [[work.done for work in works] for works in lanes.works]
    placements = [b.placement for b in optimizer.plan.buckets]
    run = range(min(TOGETHER, len(placements)))
    assert asked[0] == done_of(optimizer, [grad_ready_trigger(b) for b in run])
    host = [b for b in run if placements[b] is Placement.HOST][:-GRADIENTS_IN_FLIGHT]
    assert len(host) > 1
    assert asked[1] == done_of(optimizer, [release_grad_trigger(b) for b in host])
    lanes.works.clear()
    layers = sorted(optimizer._executor.pending, key=list(optimizer._executor._layers).index)
    optimizer.wait_for_weights()
    assert len(layers) > 1
    assert [work.done for work in lanes.works[-1]] == done_of(
        optimizer, [pre_forward_trigger(layer) for layer in layers]
    )


@pytest.mark.parametrize("skip", [[], ["layers.2.weight", NEVER]])
def test_gradients_taken_together_give_the_bits_of_one_by_one(
    skip: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> Mapping[str, object]:
        model = Model()
        optimizer = adamw(model, backend=backend(), **MIXED)
        for step in range(3):
            set_gradients(model, step, skip=skip)
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model, optimizer)

    together = run()

    def one_by_one(self: StepExecutor, gradients: Mapping[str, torch.Tensor], borrowed: Set[str]) -> None:
        for name, gradient in gradients.items():
            self.offload_gradient(name, gradient, borrowed=name in borrowed)

    monkeypatch.setattr(StepExecutor, "offload_gradients", one_by_one)
    assert_equal(together, run())  # type: ignore[arg-type]


def test_a_bucket_that_was_given_a_gradient_back_is_not_released_with_others() -> None:
    model = Model()
    optimizer = adamw(model, backend=backend(), offload_fraction=1.0)
    executor = optimizer._executor
    gradients = {name: torch.ones_like(p) for name, p in model.named_parameters() if p.numel() and name != NEVER}
    (head,), (layer,) = ([b for b, *_ in executor._map.parts[name]] for name in ("head.weight", "layers.0.bias"))
    for name in sorted(gradients, key=lambda name: name.startswith("layers.0")):
        executor.offload_gradient(name, gradients[name])
    buckets, in_flight = executor._buckets, executor._in_flight
    assert buckets[layer] in in_flight
    while in_flight[0] is not buckets[layer]:
        in_flight.popleft().released()
    executor.reload_gradient("layers.0.bias")
    executor.reload_gradient("head.weight")
    executor.offload_gradients({"head.weight": gradients["head.weight"]})
    executor._release_in_flight()
    assert buckets[head].phase is BucketPhase.GRAD_OFFLOADED
    assert buckets[layer].phase is BucketPhase.ACCUMULATING
    held = [buffer.data.numel() for buffer in executor._gradients[layer]]
    assert sorted(held) == sorted([0, *(gradients[f"layers.0.{part}"].numel() for part in ("weight", "scale"))])


def test_choices_that_come_and_go_give_the_bits_of_the_device_alone() -> None:
    """Buckets without any gradient, ranges without one, and back again; other dtypes of gradients among them."""
    patterns: Sequence[Sequence[str]] = [[], ["layers.2.weight", "layers.2.after"], [NEVER], [], ["embed.weight"], []]

    def run(**options: float) -> Mapping[str, object]:
        model = Model()
        optimizer = adamw(model, backend=backend(), **options)
        for step, skip in enumerate([*patterns, *patterns]):
            set_gradients(model, step, skip=skip)
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model, optimizer)

    assert_equal(run(), run(**MIXED))  # type: ignore[arg-type]
