"""What a review of the Megatron-Core integration has found: each case was red before it was repaired."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from megatron_ranks import Ranks, is_installed

pytestmark = pytest.mark.skipif(not is_installed(), reason="megatron-core is not installed")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


def test_optimizers_made_before_stay_megatrons(ranks: Ranks) -> None:
    (found,) = ranks.run(1, "megatron_review_cases.masters_after_reload_of_one_made_before")
    assert set(found) == {0.25}


def test_parts_of_a_chain_are_not_stepped_alone(ranks: Ranks) -> None:
    for raised, counts in ranks.run(2, "megatron_review_cases.steps_of_a_part_alone"):
        assert "is stepped alone" in raised
        assert counts == {0}


def test_gradients_are_scaled_as_often_as_megatron_says(ranks: Ranks) -> None:
    ((early, late),) = ranks.run(1, "megatron_review_cases.norms_of_halved_twice")
    assert early == late


def test_another_optimizer_of_the_same_model_takes_its_place(ranks: Ranks) -> None:
    ((norms, alone, raised, gone),) = ranks.run(1, "megatron_review_cases.norms_of_an_optimizer_made_anew")
    assert norms == alone
    assert "have another one by now" in raised
    assert gone


def test_norms_and_reductions_of_newer_versions_are_refused(ranks: Ranks) -> None:
    (found,) = ranks.run(1, "megatron_review_cases.refusals")
    for raised, name in zip(
        found, ("grad_norm_skip_threshold", "grad_norm_group", "gtp_weight_remat_size"), strict=True
    ):
        assert name in raised


def test_weights_that_were_moved_are_noticed(ranks: Ranks) -> None:
    assert "has been moved" in ranks.run(1, "megatron_review_cases.step_after_weights_were_moved")[0]


@pytest.mark.parametrize("clip", ["hostward", "megatron"])
def test_skipped_steps_are_told(ranks: Ranks, clip: str) -> None:
    (told,) = ranks.run(1, "megatron_review_cases.told_of_a_gradient_that_is_not_finite", clip=clip)
    assert told == [True, False, True]


def test_reductions_that_are_made_by_whoever_waits_are_left_to_megatron(ranks: Ranks) -> None:
    summed = {"reduce_scatter_with_fp32_accumulation": True, "grad_reduce_in_fp32": False}
    assert ranks.run(2, "megatron_review_cases.takes_early") == [True, True]
    assert ranks.run(2, "megatron_review_cases.takes_early", **summed) == [False, False]
