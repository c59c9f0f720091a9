"""The same bits at every fraction, order, thread count and instruction set, and those of the numpy reference.

Seen red with: each of the four waits of a host bucket (gradient, scalars, step, upload) taken out, the first piece of a
gradient given to all ranges of a split tensor, the bound of the step counts not advanced, or not forgotten on a load.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from optimizer_cases import (
    DTYPES,
    FRACTIONS,
    LATE_SUBSETS,
    MIXED,
    NEVER,
    Model,
    NumpyOptimizer,
    adamw,
    assert_equal,
    backend,
    set_gradients,
    snapshot,
)

from hostward.core.placement import Placement
from hostward.kernels.cpu.adamw import AdamWTask, bias_tables
from hostward.kernels.cpu.library import Isa, load
from hostward.runtime import host_tasks
from hostward.runtime.backend import Lane
from hostward.runtime.simulated.backend import SimulatedBackend

STEPS = 4
NORM_BELOW, NORM_ABOVE = 1e6, 0.5  # thresholds: never reached, always exceeded


def run(
    dtype: torch.dtype,
    fraction: float,
    max_norm: float | None,
    weight_decay: float,
    on: SimulatedBackend | None = None,
    steps: int = STEPS,
) -> dict[str, torch.Tensor]:
    model = Model(dtype)
    optimizer = adamw(
        model,
        weight_decay=weight_decay,
        max_grad_norm=max_norm,
        offload_fraction=fraction,
        backend=on or backend(),
    )
    for step in range(steps):
        set_gradients(model, step, skip=[NEVER] if step % 2 else [])
        optimizer.step()
        assert not optimizer.last_step_skipped
    return snapshot(model, optimizer)


@functools.cache
def in_numpy(dtype: torch.dtype, max_norm: float | None, weight_decay: float) -> dict[str, torch.Tensor]:
    model = Model(dtype)
    optimizer = NumpyOptimizer.over(model.named_parameters())
    for step in range(STEPS):
        set_gradients(model, step, skip=[NEVER] if step % 2 else [])
        gradients = {name: p.grad for name, p in model.named_parameters()}
        optimizer.step(gradients, max_norm=max_norm, weight_decay=weight_decay)
    return optimizer.snapshot()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_t28_every_fraction_equals_the_numpy_reference(fraction: float, dtype: torch.dtype) -> None:
    """Clipped with weight decay, and one of the other ways in turn."""
    ways = [(NORM_ABOVE, 0.1), *((norm, decay) for norm in (None, NORM_BELOW) for decay in (0.0, 0.1))]
    turn = list(FRACTIONS).index(fraction) + DTYPES.index(dtype)
    for max_norm, weight_decay in (ways[0], ways[1 + turn % 4]):
        assert_equal(run(dtype, fraction, max_norm, weight_decay), in_numpy(dtype, max_norm, weight_decay))


def test_the_cases_differ_where_they_should() -> None:
    """Guards the test above: clipping and weight decay are not without effect."""
    base = in_numpy(torch.float32, None, 0.0)
    assert_equal(base, in_numpy(torch.float32, NORM_BELOW, 0.0))
    for other in (in_numpy(torch.float32, NORM_ABOVE, 0.0), in_numpy(torch.float32, None, 0.1)):
        assert not torch.equal(base["weight head.weight"], other["weight head.weight"])


@pytest.mark.parametrize("late", LATE_SUBSETS, ids=lambda late: "+".join(sorted(late)) or "none")
def test_h9_every_subset_of_late_lanes_gives_the_same_bits(late: frozenset[Lane]) -> None:
    dtype = (torch.float32, torch.bfloat16)[LATE_SUBSETS.index(late) % 2]
    on = backend(late=late)
    assert_equal(run(dtype, 0.5, NORM_ABOVE, 0.1, on), in_numpy(dtype, NORM_ABOVE, 0.1))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_random_orders_give_the_same_bits(fraction: float, seed: int) -> None:
    on = backend(seed=seed, late=LATE_SUBSETS[seed * 2 + 1])
    assert_equal(run(torch.float16, fraction, NORM_ABOVE, 0.1, on), in_numpy(torch.float16, NORM_ABOVE, 0.1))


def test_poison_changes_nothing() -> None:
    plain = SimulatedBackend(threads=1, poison=False)
    assert_equal(run(torch.bfloat16, 0.5, NORM_ABOVE, 0.1, plain), in_numpy(torch.bfloat16, NORM_ABOVE, 0.1))


@pytest.mark.parametrize(("threads", "isa"), list(itertools.product((1, 2, 3), load().supported_isas())), ids=str)
def test_h54_threads_and_instruction_sets_give_the_same_bits(
    threads: int, isa: Isa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_tasks, "AdamWTask", functools.partial(AdamWTask, isa=isa))
    on = backend(threads=threads)
    assert_equal(run(torch.bfloat16, 0.5, NORM_ABOVE, 0.1, on), in_numpy(torch.bfloat16, NORM_ABOVE, 0.1))


def test_h52_omp_num_threads_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    before = SimulatedBackend().threads
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert SimulatedBackend().threads == before
    assert adamw(Model(), backend=None, host_threads=3).backend.describe()["host_threads"] == 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_model_has_several_buckets_at_each_placement(dtype: torch.dtype) -> None:
    """Guards this file: fractions that place nothing, or everything, would test nothing."""
    plan = adamw(Model(dtype), offload_fraction=0.5).plan
    assert len(plan.buckets) == 6
    assert {b.placement for b in plan.buckets} == {Placement.DEVICE, Placement.HOST}
    mixed = adamw(Model(dtype), **MIXED).plan
    assert {b.placement for b in mixed.buckets} == set(Placement)
    bucket = next(s for s in adamw(Model(dtype)).inventory.buckets if any(r.name == NEVER for r in s.ranges))
    names = [r.name for r in bucket.ranges]
    assert 0 < names.index(NEVER) < len(names) - 1


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_h55_building_the_optimizer_changes_no_weight(fraction: float, dtype: torch.dtype) -> None:
    model, untouched = Model(dtype), Model(dtype)
    optimizer = adamw(model, offload_fraction=fraction)
    expected = NumpyOptimizer.over(untouched.named_parameters()).snapshot()
    assert_equal(snapshot(model, optimizer), expected)
    assert not any(optimizer.state.values())


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_split_masters_accumulate_far_below_one_bf16_ulp(fraction: float) -> None:
    parameter = torch.nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    optimizer = adamw([("w", parameter)], lr=2.0**-16, weight_decay=0.0, eps=0.0, offload_fraction=fraction)
    ulp_below_one = 2.0**-8
    moved_at = None
    for step in range(1, 200):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        if moved_at is None and parameter[0] != 1.0:
            moved_at = step
    assert moved_at == pytest.approx(ulp_below_one / 2 * 2**16, abs=2)  # 128 steps of 1/256 ulp
    master = optimizer.state_dict()["state"]["w"]["master"]
    assert master.double().sub(1 - 199 * 2.0**-16).abs().max() < 199 * 2.0**-24


def test_steps_past_the_first_bias_table_equal_the_reference() -> None:
    """The tables are built anew at 1,023 steps; betas near 1 keep them from saturating."""
    parameter, betas = torch.nn.Parameter(torch.linspace(-1, 1, 40)), (0.99, 0.9999)
    expected = NumpyOptimizer.over([("w", parameter)])
    optimizer = adamw([("w", parameter)], betas=betas, offload_fraction=1.0)
    parameter.grad = torch.linspace(-2, 3, 40)
    expected.step({"w": parameter.grad}, betas=betas)
    optimizer.step()  # makes the first table
    state = optimizer.state_dict()
    state["state"]["w"]["step"] = torch.tensor(1020)
    optimizer.load_state_dict(state)
    expected.count["w"] = 1020

    expected.tables[betas] = bias_tables(*betas, 4096)
    for _ in range(8):
        parameter.grad = torch.linspace(-2, 3, 40)
        expected.step({"w": parameter.grad}, betas=betas)
        optimizer.step()
    assert_equal({"weight w": parameter.detach()}, {"weight w": expected.snapshot()["weight w"]})
    assert int(optimizer.state_dict()["state"]["w"]["step"]) == 1028
