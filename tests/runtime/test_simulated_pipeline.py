"""The detector and the numbers agree on a double-buffered pipeline: intact, in any order, and with one wait less."""

from __future__ import annotations

import functools
import re
from itertools import chain, combinations

import pytest
import torch
from double_buffered import BUCKETS, STEPS, Pipeline, happens_before, new_pipeline, races, serial_weights

from hostward.errors import OrderingError
from hostward.runtime.simulated.backend import Order
from hostward.schedule.ops import Lane

USED = (Lane.COMPUTE, Lane.D2H, Lane.H2D, Lane.HOST)
"""Lanes of the pipeline: whether another one is late makes no difference to it."""
LATE_SUBSETS = [frozenset(s) for s in chain.from_iterable(combinations(USED, n) for n in range(len(USED) + 1))]
SEEDS = 100


def intact() -> Pipeline:
    pipeline = new_pipeline(checked=False)
    pipeline.run()
    return pipeline


WAITS = 84


def right(weights: list[torch.Tensor]) -> bool:
    return all(torch.equal(w, s) for w, s in zip(weights, serial_weights(), strict=True))


def test_the_intact_pipeline_has_no_race() -> None:
    pipeline = intact()
    assert races(pipeline.log) == []
    assert pipeline.n_waits == WAITS


def test_as_issued_gives_the_serial_numbers() -> None:
    assert right(new_pipeline().run())


@pytest.mark.parametrize("late", LATE_SUBSETS, ids=lambda s: "+".join(sorted(s)) or "none")
def test_all_sixteen_sets_of_late_lanes_give_the_serial_numbers(late: frozenset[Lane]) -> None:
    assert right(new_pipeline(Order(late=late)).run())
    assert right(new_pipeline(Order(seed=1, late=late)).run())


def test_random_orders_give_the_serial_numbers() -> None:
    assert [seed for seed in range(SEEDS) if not right(new_pipeline(Order(seed)).run())] == []


@functools.cache
def refusal(dropped: int) -> str | None:
    """The detector's words for the pipeline without one wait, or None."""
    try:
        new_pipeline(dropped=dropped).run()
    except OrderingError as error:
        return str(error)
    return None


REDUNDANT = BUCKETS * (STEPS - 1) + BUCKETS * STEPS
"""A bucket's gradient waits for its last upload, so its step and its next upload need not name these again."""


def test_h6_h21_each_wait_deleted_is_reported_or_was_redundant() -> None:
    relation = happens_before(intact().log)
    for n in range(WAITS):
        pipeline = new_pipeline(dropped=n, checked=False)
        pipeline.run()
        if refusal(n):
            assert races(pipeline.log), f"wait {n} was reported, and everything is ordered without it"
        else:
            assert happens_before(pipeline.log) == relation, f"wait {n} is missed, and was not reported"
    assert sum(refusal(n) is None for n in range(WAITS)) == REDUNDANT


def test_reports_name_both_operations_the_memory_and_the_cure() -> None:
    shape = re.compile(
        r"'.+' on lane (compute|d2h|h2d|host) and '.+' on lane (compute|d2h|h2d|host) both use '.+', and nothing "
        r"orders them\n  why: one of them writes it\n  fix: let '.+' wait for the event of '.+'"
    )
    texts = filter(None, map(refusal, range(WAITS)))
    assert [text for text in texts if not shape.fullmatch(text)] == []


@pytest.mark.parametrize("n", range(WAITS))
def test_a_wait_that_is_missed_gives_wrong_numbers_in_some_order(n: int) -> None:
    orders = (*(Order(None, late) for late in LATE_SUBSETS), Order(0))
    always_right = all(right(new_pipeline(order, dropped=n, checked=False).run()) for order in orders)
    assert always_right == (refusal(n) is None)
