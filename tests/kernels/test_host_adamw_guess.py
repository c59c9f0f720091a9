"""A step that is guessed writes another set of the state, and its confirmation makes that set right in every case.

Seen red: a guess that is made after a clipped step, or after a skipped one; one that leaves the record of the guess
before; a confirmation that does not look at the scale, or at the hyper-parameters, or at the flag of skipped steps;
counts of the other set that a skipped step advances; a copy of a skipped step without the scales of blocks; a
confirmation that leaves its guess to be confirmed again; a step over staged memory that starts each block anew.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from hostward.errors import ConfigError, NativeError
from hostward.kernels.cpu.adamw import OtherSet, Role, adamw_step
from hostward.kernels.cpu.library import load

from native_cases import (
    FP8_MOMENTS,
    GRADS,
    HYPER,
    ISAS,
    LAYOUTS,
    MOMENTS,
    STATE,
    Case,
    TwoSets,
    native_run,
    stored,
    two_sets,
)

FORMS = [(grad, layout, MOMENTS[0]) for grad in GRADS for layout in LAYOUTS] + [
    ("bf16", "split", MOMENTS[1]),
    ("bf16", "rounded", MOMENTS[2]),
    ("fp32", "fp32", MOMENTS[3]),
    *(("bf16", "split", moments) for moments in FP8_MOMENTS),
    ("fp16", "fp16", FP8_MOMENTS[0]),
    ("bf16", "rounded", FP8_MOMENTS[3]),
]


def snapshot(sets: TwoSets) -> dict[str, bytes]:
    own = sets.own
    return {name: held.store.tobytes() for name, held in own.operands.items()} | {"counts": own.counts.tobytes()}


def initial(case: Case) -> dict[str, np.ndarray]:
    return {"exp_avg": case.exp_avg, "exp_avg_sq": case.exp_avg_sq, **stored(case.master, case.layout)}


@pytest.mark.parametrize(("grad", "layout", "moments"), FORMS)
def test_a_guess_has_the_bits_of_the_step_and_leaves_its_own_set(
    grad: str, layout: str, moments: tuple[str, str]
) -> None:
    rng = np.random.default_rng(5)
    for n in (0, 1, 63, 127, 128, 129, 256, 257, 511, 777, 1300):
        case = Case.random(rng, n, grad, layout, special=0.1 if n % 2 else 0.002, moments=moments)
        expected = case.expected(step=8)
        for isa in ISAS:
            sets = two_sets(case, count=7, shifts=tuple(int(s) for s in rng.integers(0, 33, 5)))
            before = snapshot(sets)
            sets.run(Role.GUESS, isa=isa)
            sets.other.assert_equal(expected, (n, isa))
            assert snapshot(sets) == before
            assert (sets.own.counts.tolist(), sets.other.counts.tolist()) == ([7], [8])
            sets.run(Role.CONFIRM, isa=isa)
            sets.other.assert_equal(expected, (n, isa))
            assert sets.other.counts.tolist() == [8]


@pytest.mark.parametrize(("grad", "layout", "moments"), FORMS)
def test_a_wrong_guess_and_a_skipped_step_are_made_anew(grad: str, layout: str, moments: tuple[str, str]) -> None:
    rng = np.random.default_rng(6)
    n = 2 * 65536 + 300
    cuts = (128, 128, 65536) if "fp8" in moments else (1, 100, 70000)
    case = Case.random(rng, n, grad, layout, special=0.002, moments=moments)
    for scale, skip in ((0.37, 0), (1.0, 1)):
        sets = two_sets(case, cuts=cuts, count=3)
        before = snapshot(sets)
        sets.run(Role.GUESS, threads=2)
        sets.scale[0], sets.skip[0] = scale, skip
        sets.run(Role.CONFIRM, threads=3)
        sets.other.assert_equal(initial(case) if skip else case.expected(4, scale), (scale, skip))
        assert snapshot(sets) == before
        assert sets.other.counts.tolist() == [3 if skip else 4] * 4


def make() -> tuple[Case, TwoSets]:
    case = Case.random(np.random.default_rng(7), 1000, "bf16", "split")
    return case, two_sets(case)


def spoil(sets: TwoSets) -> None:
    sets.other.operands["weight"].values[:] = 3


def spoiled(sets: TwoSets) -> bool:
    return bool((sets.other.operands["weight"].values == 3).all())


def test_a_guess_that_was_right_is_not_made_again() -> None:
    _, sets = make()
    sets.run(Role.GUESS)
    spoil(sets)
    sets.run(Role.CONFIRM)
    assert spoiled(sets)
    sets.run(Role.CONFIRM)  # of a step without a guess
    assert not spoiled(sets)


@pytest.mark.parametrize(
    ("scale", "skip"), [(0.5, 0), (1.0, 1), (float("nan"), 0), (np.nextafter(np.float32(1), 0), 0)]
)
def test_no_guess_is_made_after_a_step_that_clipped_or_was_skipped(scale: float, skip: int) -> None:
    case, sets = make()
    spoil(sets)
    sets.scale[0], sets.skip[0] = scale, skip
    sets.run(Role.GUESS)
    assert spoiled(sets)
    sets.scale[0], sets.skip[0] = 1.0, 0
    sets.run(Role.CONFIRM)
    sets.other.assert_equal(case.expected())


def test_a_guess_that_is_not_made_forgets_the_one_before() -> None:
    case, sets = make()
    sets.run(Role.GUESS)
    sets.skip[0] = 1
    sets.run(Role.GUESS)
    sets.skip[0] = 0
    spoil(sets)
    sets.run(Role.CONFIRM)
    sets.other.assert_equal(case.expected())


@pytest.mark.parametrize("field", ["lr", "weight_decay", "beta1", "beta2", "eps"])
def test_a_guess_with_other_hyper_parameters_was_wrong(field: str) -> None:
    case, sets = make()
    sets.run(Role.GUESS)
    changed = replace(HYPER, **{field: getattr(HYPER, field) * 0.5})
    spoil(sets)
    sets.run(Role.CONFIRM, hyper=changed)
    assert not spoiled(sets)
    if "beta" not in field:  # the tables are those of the old betas
        sets.other.assert_equal(case.expected(hyper=changed))


def test_a_guess_that_cannot_be_made_is_not_confirmed() -> None:
    _, sets = make()
    sets.run(Role.GUESS)
    task = sets.task(Role.GUESS)
    task.struct.table_length = 1
    with pytest.raises(NativeError, match="past the end"):
        adamw_step(task)
    spoil(sets)
    sets.run(Role.CONFIRM)
    assert not spoiled(sets)


@pytest.mark.parametrize("field", ["exp_avg_out", "exp_avg_sq_out", "remainder_out", "guess"])
def test_native_code_checks_the_other_set(field: str) -> None:
    _, sets = make()
    task = sets.task(Role.GUESS)
    setattr(task.struct, field, None)
    spoil(sets)
    assert load().adamw_step(ctypes.byref(task.struct)) == 1
    assert spoiled(sets)
    for range_field in ("weight_out", "count_out"):
        task = sets.task(Role.GUESS)
        setattr(task._ranges[0], range_field, None)
        assert load().adamw_step(ctypes.byref(task.struct)) == 1
    task.struct.role = 3
    assert load().adamw_step(ctypes.byref(task.struct)) == 2


def test_roles_and_sets_that_do_not_go_together_are_refused() -> None:
    _, sets = make()
    with pytest.raises(ConfigError, match="the role CONFIRM and no other set"):
        native_run(make()[0], isa=ISAS[0], role=Role.CONFIRM)
    other = {name: sets.other.operands[name].values for name in STATE if name in sets.other.operands}
    same = {"master": None, "guess": sets.guess, **other}
    given = {
        "the role STEP and an other set": (Role.STEP, same),
        "store main weights differently": (
            Role.GUESS,
            same | {"remainder": None, "master": np.zeros(1000, np.float32)},
        ),
        "moments differ in dtype": (Role.GUESS, same | {"exp_avg": np.zeros(1000, np.uint16)}),
    }
    for text, (role, operands) in given.items():
        with pytest.raises(ConfigError, match=text):
            native_run(make()[0], isa=ISAS[0], role=role, other=OtherSet(**operands))
