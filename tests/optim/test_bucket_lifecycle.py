"""Each legal way through the life of a bucket and of a layer's weights; every other transition raises OrderingError.

Seen red: each check of a phase left out in turn; `last_ranges` not kept; streams of returned memory not cleared; a
guess kept after each of the transitions that end it, made with a part of the gradients, at the step, or without being
asked for.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hostward.core.placement import Placement
from hostward.errors import OrderingError
from hostward.optim.bucket_lifecycle import BucketPhase, BucketStep, LayerPhase, LayerStep

HERE = frozenset({0})


def bucket(phase: BucketPhase, *, accumulates: bool = False) -> BucketStep:
    """A host bucket of two ranges that has come to this phase."""
    made = BucketStep(0, Placement.HOST, 2, accumulates=accumulates)
    ways: dict[BucketPhase, list[Callable[[], None]]] = {
        BucketPhase.ACCUMULATING: [lambda: made.accept(0, HERE)],
        BucketPhase.GRAD_IN_FLIGHT: [made.sent],
        BucketPhase.GRAD_OFFLOADED: [made.released],
        BucketPhase.STEPPED: [made.stepped],
    }
    for reached, step in ways.items():
        if made.phase is not phase:
            for transition in step:
                transition()
            assert made.phase is reached
    assert made.phase is phase
    return made


def resting(placement: Placement, *, overlap: bool = True) -> BucketStep:
    """A bucket whose gradients stay on the device until the step."""
    made = BucketStep(0, placement, 2, overlap=overlap)
    made.accept_all(HERE)
    made.sent()
    return made


TRANSITIONS: dict[str, Callable[[BucketStep], object]] = {
    "accept": lambda b: b.accept(1, HERE),
    "accept_all": lambda b: b.accept_all(HERE),
    "retract": lambda b: b.retract(0),
    "sent": lambda b: b.sent(),
    "released": lambda b: b.released(),
    "reopen": lambda b: b.reopen(),
    "stepped": lambda b: b.stepped(),
    "used": lambda b: b.used(),
}
LEGAL = {
    BucketPhase.IDLE: {"accept", "accept_all", "stepped"},
    BucketPhase.ACCUMULATING: {"accept", "retract", "sent"},
    BucketPhase.GRAD_IN_FLIGHT: {"retract", "released", "reopen"},
    BucketPhase.GRAD_OFFLOADED: {"retract", "reopen", "stepped"},
    BucketPhase.STEPPED: {"used"},
}


@pytest.mark.parametrize("name", TRANSITIONS)
@pytest.mark.parametrize("phase", LEGAL, ids=lambda p: p.name)
def test_what_is_not_legal_raises_and_changes_nothing(phase: BucketPhase, name: str) -> None:
    made = bucket(phase)
    before = set(made.ranges), set(made.unsent)
    if name in LEGAL[phase]:
        TRANSITIONS[name](made)
        return
    with pytest.raises(OrderingError, match=f"and it is {phase.value}"):
        TRANSITIONS[name](made)
    assert made.phase is phase
    assert (made.ranges, made.unsent) == before


@pytest.mark.parametrize("name", TRANSITIONS)
def test_gradients_that_stay_on_the_device_are_stepped_or_retracted(name: str) -> None:
    made = resting(Placement.STREAMED)
    assert made.phase is BucketPhase.GRAD_READY
    if name in ("retract", "reopen", "stepped"):
        TRANSITIONS[name](made)
        return
    with pytest.raises(OrderingError, match="and it is gradient ready"):
        TRANSITIONS[name](made)


@pytest.mark.parametrize("phase", [BucketPhase.ACCUMULATING, BucketPhase.GRAD_IN_FLIGHT, BucketPhase.GRAD_OFFLOADED])
def test_a_total_on_the_host_is_never_reloaded(phase: BucketPhase) -> None:
    with pytest.raises(OrderingError, match="of a total on the host"):
        bucket(phase, accumulates=True).retract(0)


def test_a_total_takes_no_microbatch_before_the_last_one_is_released() -> None:
    made = bucket(BucketPhase.GRAD_IN_FLIGHT, accumulates=True)
    with pytest.raises(OrderingError, match="gradient in flight"):
        made.reopen()
    made.released()
    made.reopen()
    assert made.phase is BucketPhase.ACCUMULATING


def test_a_range_without_a_gradient_cannot_be_reloaded() -> None:
    with pytest.raises(OrderingError, match="reload the gradient of range 1"):
        bucket(BucketPhase.ACCUMULATING).retract(1)


def test_a_bucket_without_gradients_stays_idle_through_a_step() -> None:
    made = bucket(BucketPhase.STEPPED)
    assert made.last_ranges == {0}
    made.used()
    made.stepped()
    assert made.phase is BucketPhase.IDLE
    assert made.last_ranges == set()


@pytest.mark.parametrize(
    ("placement", "overlap", "after"),
    [
        (Placement.DEVICE, True, BucketPhase.IDLE),
        (Placement.STREAMED, True, BucketPhase.STEPPED),
        (Placement.HOST, False, BucketPhase.STEPPED),
    ],
)
def test_what_the_compute_lane_steps_need_not_be_waited_for(
    placement: Placement, overlap: bool, after: BucketPhase
) -> None:
    made = resting(placement, overlap=overlap)
    assert made.unsent == (set() if overlap else {0, 1})
    made.stepped()
    assert made.phase is after


def test_ranges_that_were_sent_stay_so_when_another_is_retracted() -> None:
    made = BucketStep(0, Placement.HOST, 2)
    made.accept_all(HERE)
    assert made.complete
    made.sent()
    made.retract(1)
    assert (made.phase, made.ranges, made.unsent) == (BucketPhase.ACCUMULATING, {0}, set())
    made.retract(0)
    assert made.phase is BucketPhase.IDLE


ENDS: dict[str, Callable[[BucketStep], object]] = {
    "retract": lambda b: b.retract(0),
    "state changed": lambda b: b.drop_guess(),
    "discard": lambda b: b.discard(),
    "abort": lambda b: b.abort(),
    "stepped": lambda b: (b.released(), b.stepped()),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_guess_counts_until_what_it_was_made_of_changes(end: str) -> None:
    made = BucketStep(0, Placement.HOST, 2, guesses=True)
    made.accept(0, HERE)
    made.accept(1, HERE)
    assert not made.can_guess
    made.sent()
    assert made.can_guess
    assert not made.guessed
    made.guess()
    assert made.guessed
    ENDS[end](made)
    assert not made.guessed


def test_no_guess_is_made_at_the_step() -> None:
    made = BucketStep(0, Placement.HOST, 2, guesses=True)
    for late in (True, False):
        made.late = late
        made.accept_all(HERE)
        made.sent()
        made.guess()
        assert made.guessed is not late
        made.discard()
        assert not made.late


def test_no_guess_is_made_with_a_part_of_the_gradients_or_unless_asked() -> None:
    part, never = BucketStep(0, Placement.HOST, 2, guesses=True), BucketStep(0, Placement.HOST, 2)
    part.accept(0, HERE)
    part.sent()
    part.guess()
    never.accept_all(HERE)
    never.sent()
    never.guess()
    assert not part.guessed
    assert not never.guessed


def test_totals_and_their_partial_sums_are_told_apart() -> None:
    made = BucketStep(0, Placement.HOST, 2, accumulates=True)
    for last in (False, True, False):
        made.accept(0, HERE)
        made.sent(last=last)
        assert (made.accumulated, made.summed) == ({0}, {0} if last else set())
        made.released()
        made.reopen()


def test_memory_goes_back_to_the_streams_that_made_it_once() -> None:
    made = BucketStep(0, Placement.HOST, 2)
    made.accept(0, {1})
    made.accept(1, {2})
    assert made.return_memory() == {1, 2}
    assert not made.on_device
    assert made.return_memory() == set()


@pytest.mark.parametrize("phase", LEGAL, ids=lambda p: p.name)
def test_discarding_keeps_what_was_stepped_and_aborting_does_not(phase: BucketPhase) -> None:
    discarded, aborted = bucket(phase), bucket(phase)
    discarded.discard()
    aborted.abort()
    assert discarded.phase is (phase if phase is BucketPhase.STEPPED else BucketPhase.IDLE)
    assert aborted.phase is BucketPhase.IDLE
    assert discarded.ranges == aborted.ranges == set()


# ---------------------------------------------------------------- layers


def layer(phase: LayerPhase) -> LayerStep:
    made = LayerStep("layers.0")
    if phase is LayerPhase.PENDING:
        made.stepped()
    if phase is LayerPhase.UNREPORTED:
        made.stepped()
        made.waited(0)
        made.unreported()
    assert made.phase is phase
    return made


OF_A_LAYER: dict[str, Callable[[LayerStep], object]] = {
    "stepped": lambda layer: layer.stepped(),
    "waited": lambda layer: layer.waited(1),
    "unreported": lambda layer: layer.unreported(),
}
LEGAL_OF_A_LAYER = {
    LayerPhase.READY: {"stepped", "unreported"},
    LayerPhase.PENDING: {"waited"},
    LayerPhase.UNREPORTED: {"stepped"},
}


@pytest.mark.parametrize("name", OF_A_LAYER)
@pytest.mark.parametrize("phase", LEGAL_OF_A_LAYER, ids=lambda p: p.name)
def test_a_layer_is_waited_for_once_after_each_step(phase: LayerPhase, name: str) -> None:
    made = layer(phase)
    if name in LEGAL_OF_A_LAYER[phase]:
        OF_A_LAYER[name](made)
        return
    with pytest.raises(OrderingError, match=f"its weights are {phase.value}"):
        OF_A_LAYER[name](made)
    assert made.phase is phase


def test_a_step_forgets_who_has_waited() -> None:
    made = layer(LayerPhase.PENDING)
    made.waited(3)
    made.upload_issued = True
    assert made.waited_by == {3}
    made.stepped()
    assert (made.waited_by, made.external, made.upload_issued) == (set(), set(), False)


def test_a_late_report_counts() -> None:
    made = layer(LayerPhase.UNREPORTED)
    made.reported()
    assert made.phase is LayerPhase.READY


def test_aborting_waits_for_nothing() -> None:
    made = layer(LayerPhase.PENDING)
    made.abort()
    assert made.phase is LayerPhase.READY


def test_before_the_first_step_no_other_stream_waits_for_a_layer() -> None:
    made, stream = LayerStep("layers.0"), OtherStream()
    with pytest.raises(OrderingError, match=r"layer 'layers\.0' is waited for on another stream"):
        made.waited_on(stream)  # type: ignore[arg-type]
    made.stepped()
    made.waited_on(stream)  # type: ignore[arg-type]
    assert made.external == {stream}


class OtherStream:
    """Stands for a stream of a device: a CPU has none."""
