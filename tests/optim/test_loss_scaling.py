"""A gradient scaler and gradients that were taken: it cannot look at them, so the norm does, with the same outcome.

Seen red: the factor applied twice, or not at all; the scaler's flag not raised by an overflow that the norm found; its
look at gradients forgotten with the step, or kept for the next one; the verdict of a step cleared by the next one,
which has no gradients, before all of it was skipped; the factor applied once for each dtype of gradients that were
taken; of two factors the last alone; the scale kept for the next step by one that raised; gradients unscaled in `.grad`
and once more by the step; a parameter without a gradient in a step refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from networks import LATEST, MIXES, loss_of, make, microbatch
from optimizer_cases import adamw, assert_equal, snapshot

import hostward
from hostward.errors import AsleepError, ModelError
from hostward.optim.sharded import require_one_scale
from hostward.runtime.simulated.backend import Order, SimulatedBackend

every_mix = pytest.mark.parametrize("mix", MIXES)


def scaled(
    mix: str, dtype: torch.dtype, *, context: bool, unscale: str, init_scale: float = 2.0**15
) -> tuple[dict[str, torch.Tensor], list[object]]:
    """Steps with a gradient scaler; in some of them a microbatch overflows. `unscale`: where it is asked for."""
    model, optimizer = make(mix, dtype, order=Order(seed=1) if context else None)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3)
    seen: list[object] = []
    for step in range(8):
        optimizer.zero_grad()
        before = snapshot(model, optimizer) if step == 4 else None
        for i in range(2):
            with microbatch(optimizer, context, i == 1):
                loss = loss_of(model, 10 * step + i, without=2 if i else None) * (float("inf") if step == 4 else 1.0)
                scaler.scale(loss).backward()
                if unscale == "inside" and i == 1:
                    scaler.unscale_(optimizer)
        if unscale == "outside":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        # Read first: a lane as late as `order` has it writes the scaler's flag when somebody waits for the norm.
        seen += [optimizer.last_step_skipped, optimizer.grad_norm]
        scaler.update()
        seen.append(scaler.get_scale())
        if before is not None:
            assert optimizer.last_step_skipped
            assert_equal(before, snapshot(model, optimizer))
    return snapshot(model, optimizer), seen


@pytest.mark.parametrize("unscale", ["never", "inside", "outside"])
@every_mix
def test_t37_a_scaler_folds_its_factor_into_gradients_that_were_taken(mix: str, unscale: str) -> None:
    """fp32 gradients and a scale of a power of two: unscaling is exact, so all ways give the same bits."""
    expected = scaled("device", torch.float32, context=False, unscale="never")
    found = scaled(mix, torch.float32, context=True, unscale=unscale)
    assert found[1] == expected[1]
    assert_equal(found[0], expected[0])
    assert found[1][0::3].count(True) == 1


@every_mix
def test_t37_overflow_of_fp16_gradients_lowers_the_scale_as_without_the_context(mix: str) -> None:
    plain = scaled("device", torch.float16, context=False, unscale="never", init_scale=2.0**22)
    found = scaled(mix, torch.float16, context=True, unscale="never", init_scale=2.0**22)
    assert found[1] == plain[1]
    assert_equal(found[0], plain[0])
    assert 1 < found[1][0::3].count(True) < 8


@every_mix
def test_two_scales_of_one_loss_are_both_undone(mix: str) -> None:
    results = []
    for scales in ((), (2.0**4, 2.0**6)):
        model, optimizer = make(mix)
        scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in scales]
        with microbatch(optimizer, True, True):
            loss = loss_of(model, 0)
            for scaler in scalers:
                loss = scaler.scale(loss)
            loss.backward()
        for scaler in scalers:
            scaler.unscale_(optimizer)
        optimizer.step()
        results.append(snapshot(model, optimizer) | {"norm": torch.tensor(optimizer.grad_norm)})
    assert_equal(*results)


@pytest.mark.parametrize("context", [True, False])
def test_a_scaler_and_gradients_set_by_hand(context: bool) -> None:
    """Some gradients taken in backward, one put into `.grad` of a parameter that had none."""
    results = []
    for mix in ("device", "mixed"):
        model, optimizer = make(mix)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        with microbatch(optimizer, context and mix == "mixed", True):
            scaler.scale(loss_of(model, 0, without=0)).backward()
        for p in model.blocks[0].parameters():
            p.grad = torch.full_like(p, 2.0**10)
        scaler.step(optimizer)
        scaler.update()
        assert not optimizer.last_step_skipped
        results.append(snapshot(model, optimizer) | {"norm": torch.tensor(optimizer.grad_norm)})
    assert_equal(*results)


def two_dtypes(mix: str, **options: Any) -> tuple[torch.nn.ModuleDict, hostward.AdamW]:
    """A layer in bf16 with its norm in fp32, whose gradients a scaler looks at in two calls; and the optimizer."""
    torch.manual_seed(0)
    layers = {"up": torch.nn.Linear(32, 300).bfloat16(), "norm": torch.nn.LayerNorm(300)}
    model = torch.nn.ModuleDict({**layers, "down": torch.nn.Linear(300, 32).bfloat16()})
    backend = SimulatedBackend(threads=1, order=Order(eager=True))
    return model, adamw(model, max_grad_norm=0.5, backend=backend, **{**MIXES[mix], **options})


def loss_of_two(model: torch.nn.ModuleDict, step: int, last: str = "down") -> torch.Tensor:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
    x = model["norm"](model["up"](x.bfloat16()).float())
    return (x if last == "norm" else model["down"](x.bfloat16()).float()).square().mean()


@pytest.mark.parametrize("gradients", ["device", "host"])
@every_mix
def test_a_scaler_unscales_gradients_of_two_dtypes_once(mix: str, gradients: str) -> None:
    results = []
    for unscale in (False, True):
        model, optimizer = two_dtypes(mix, gradients=gradients)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(2):
            with optimizer.accumulate(last=True):
                scaler.scale(loss_of_two(model, step)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append(snapshot(model, optimizer) | {"norm": torch.tensor(optimizer.grad_norm)})
    assert_equal(*results)


@every_mix
def test_gradients_of_which_a_scaler_has_unscaled_one_dtype_are_refused(mix: str) -> None:
    """A second backward leaves gradients of the fp32 norm in `.grad`, and those of `down` offloaded."""
    model, optimizer = two_dtypes(mix)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for unscale in (True, False):
        with optimizer.accumulate(last=True):
            scaler.scale(loss_of_two(model, 0)).backward()
        scaler.scale(loss_of_two(model, 1, "norm")).backward()
        if not unscale:  # the step is the only one to unscale, and right
            scaler.step(optimizer)
            assert 0 < optimizer.grad_norm < 10
            break
        scaler.unscale_(optimizer)
        before = snapshot(model, optimizer)
        with pytest.raises(ModelError, match=r"(?s)unscaled .*'norm.weight', and .*another dtype.*accumulate"):
            scaler.step(optimizer)
        assert_equal(snapshot(model, optimizer), before)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("context", [True, False])
@every_mix
def test_a_scaler_passes_over_gradients_that_were_used(mix: str, context: bool) -> None:
    """A layer that a step leaves out has what `zero_grad` has not cleared, or nothing."""
    results = []
    for clear in (lambda o: o.zero_grad(), lambda o: o.zero_grad(set_to_none=False), lambda _: None):
        model, optimizer = make(mix)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(3):
            with microbatch(optimizer, context, True):
                scaler.scale(loss_of(model, step, without=1 if step == 1 else None)).backward()
            if step == 1:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            clear(optimizer)
        results.append(snapshot(model, optimizer) | {"norm": torch.tensor(optimizer.grad_norm)})
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])


@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("kind", ["state", "weights"])
def test_a_step_that_raised_leaves_no_scale_for_the_next(kind: str, unscale: bool) -> None:
    """`scaler.step` sets the scale before the step, multiplied by one that it finds."""
    results = []
    for raises in (False, True):
        model, optimizer = make("mixed")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(2):
            scaler.scale(loss_of(model, step)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            if raises:
                optimizer.sleep((kind,))
                with pytest.raises(AsleepError):
                    scaler.step(optimizer)
                optimizer.wake()
            scaler.step(optimizer)
            scaler.update()
        results.append(snapshot(model, optimizer) | {"norm": torch.tensor(optimizer.grad_norm)})
    assert_equal(*results)


@pytest.mark.parametrize("taken", [True, False])
def test_a_scaler_that_looks_at_one_stage_alone_is_refused(taken: bool) -> None:
    """Gradients taken or not: another stage may have none to take, and refuse alone."""
    model, optimizer = make("mixed")
    stages, scaler = object(), torch.amp.GradScaler("cpu")
    with microbatch(optimizer, taken, True):
        scaler.scale(loss_of(model, 0)).backward()
    optimizer._stages = stages  # type: ignore[assignment]
    with pytest.raises(ModelError, match="looked at the gradients of one stage of a pipeline alone"):
        scaler.step(optimizer)
    optimizer.looked_at_over = stages  # type: ignore[attr-defined]
    optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    require_one_scale(optimizer, stages)
    with pytest.raises(ModelError, match="of one stage of a pipeline alone"):  # the next step is another look
        require_one_scale(optimizer, stages)


@pytest.mark.parametrize("fence", [True, False])
@every_mix
def test_a_step_without_gradients_waits_for_the_one_before_which_is_skipped(mix: str, fence: bool) -> None:
    model, optimizer = make(mix, order=LATEST, fence=fence)
    loss_of(model, 0).backward()
    optimizer.step()
    before = snapshot(model, optimizer)
    with optimizer.accumulate(last=True):
        (loss_of(model, 1) * float("inf")).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    assert (optimizer.grad_norm, optimizer.last_step_skipped) == (0.0, False)
    assert_equal(snapshot(model, optimizer), before)
