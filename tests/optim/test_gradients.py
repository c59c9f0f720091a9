"""What happens to gradients on the way: accumulation, the norm, clipping, non-finite values, loss scaling.

Seen red with: the skip flag not brought to the host, `found_inf` ignored, the norm of scaled gradients clipped by the
threshold, the clip factor applied twice, grad_dtype not set, one parameter left out of the norm.
"""

from __future__ import annotations

import math

import pytest
import torch
from optimizer_cases import (
    DTYPES,
    FRACTIONS,
    NEVER,
    Model,
    NumpyOptimizer,
    adamw,
    assert_equal,
    mlp,
    mlp_loss,
    set_gradients,
    snapshot,
)

from hostward.errors import ConfigError, ModelError

PLACES = (0.0, 0.5, 1.0)


def exact_norm(model: torch.nn.Module) -> float:
    squares = [p.grad.double().square().sum().item() for p in model.parameters() if p.grad is not None]
    return math.sqrt(math.fsum(squares))


@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_t29_h57_microbatches_are_added_in_fp32(dtype: torch.dtype, microbatches: int) -> None:
    """`.grad` is the fp32 sum, in order, of what autograd gives for each microbatch alone; then parity."""
    results = []
    for fraction in PLACES:
        model, alone = mlp(dtype), mlp(dtype)
        optimizer = adamw(model, offload_fraction=fraction, max_grad_norm=0.05, grad_dtype=torch.float32)
        for step in range(3):
            optimizer.zero_grad()
            alone.load_state_dict(model.state_dict())
            sums = [torch.zeros(p.shape) for p in alone.parameters()]
            for i in range(microbatches):
                mlp_loss(model, 8 * step + i).backward()
                alone.zero_grad()
                mlp_loss(alone, 8 * step + i).backward()
                for total, p in zip(sums, alone.parameters(), strict=True):
                    total += p.grad
            for total, p in zip(sums, model.parameters(), strict=True):
                assert p.grad.dtype is torch.float32
                assert torch.equal(p.grad, total)
            optimizer.step()
        results.append(snapshot(model, optimizer))
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])


@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_t27_every_pair_of_weight_and_gradient_dtypes(
    fraction: float, dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    model = Model(dtype)
    optimizer = adamw(model, offload_fraction=fraction, grad_dtype=grad_dtype, max_grad_norm=1.0)
    expected = NumpyOptimizer.over(model.named_parameters())
    for step in range(2):
        set_gradients(model, step)
        assert model.head.weight.grad.dtype is grad_dtype
        expected.step({n: p.grad for n, p in model.named_parameters()}, max_norm=1.0)
        optimizer.step()
    assert_equal(snapshot(model, optimizer), expected.snapshot())


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_the_gradient_dtype_may_change_between_steps(fraction: float) -> None:
    model = Model(torch.bfloat16)
    optimizer = adamw(model, offload_fraction=fraction)
    expected = NumpyOptimizer.over(model.named_parameters())
    for step, dtype in enumerate((torch.bfloat16, torch.float32, torch.bfloat16, torch.float32)):
        for p in model.parameters():
            p.grad = None
            p.grad_dtype = dtype
        set_gradients(model, step)
        expected.step({n: p.grad for n, p in model.named_parameters()})
        optimizer.step()
    assert_equal(snapshot(model, optimizer), expected.snapshot())


@pytest.mark.parametrize("fraction", PLACES)
def test_gradients_of_two_dtypes_in_one_bucket_are_refused(fraction: float) -> None:
    model = Model(torch.bfloat16)
    optimizer = adamw(model, offload_fraction=fraction)
    before = snapshot(model, optimizer)
    model.layers.get_submodule("0").bias.grad_dtype = torch.float32
    set_gradients(model, 0)
    with pytest.raises(ModelError, match=r"layers\.0 have dtypes torch\.bfloat16, torch\.float32") as caught:
        optimizer.step()
    assert "same grad_dtype" in caught.value.fix
    assert_equal(before, snapshot(model, optimizer))


def test_grad_dtype_is_refused_where_it_cannot_hold() -> None:
    with pytest.raises(ConfigError, match="grad_dtype must be one of"):
        adamw(Model(), grad_dtype=torch.float64)
    model = Model(torch.bfloat16)
    set_gradients(model, 0)
    with pytest.raises(ConfigError, match="already") as caught:
        adamw(model, grad_dtype=torch.float32)
    assert "zero_grad" in caught.value.fix


BAD = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
AT = {"first bucket": "embed.weight", "middle": NEVER, "last bucket": "head.weight", "scalar": "layers.0.scale"}


@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize("fraction", PLACES)
def test_t37_h49_h53_a_non_finite_gradient_skips_everything(fraction: float, at: str) -> None:
    """Clipped and unclipped in turn, and each kind of number everywhere and at every fraction."""
    turn = list(AT).index(at) + PLACES.index(fraction)
    for i, bad in enumerate(BAD):
        skipped(fraction, bad, at, (None, 0.5)[(turn + i) % 2])


def skipped(fraction: float, bad: str, at: str, max_norm: float | None) -> None:
    model = Model(torch.bfloat16)
    optimizer = adamw(model, offload_fraction=fraction, max_grad_norm=max_norm)
    expected = NumpyOptimizer.over(model.named_parameters())
    for step in range(4):
        set_gradients(model, step)
        if step == 1:
            model.get_parameter(AT[at]).grad.reshape(-1)[-1] = BAD[bad]
            before = snapshot(model, optimizer)
            optimizer.step()
            assert optimizer.last_step_skipped
            assert optimizer.grad_norm == math.inf
            assert_equal(before, snapshot(model, optimizer))
        else:
            gradients = {n: p.grad for n, p in model.named_parameters()}
            expected.step(gradients, max_norm=max_norm)
            optimizer.step()
            assert not optimizer.last_step_skipped
    assert_equal(snapshot(model, optimizer), expected.snapshot())


def test_h63_a_huge_but_finite_gradient_is_not_an_overflow() -> None:
    """Its norm exceeds fp32: clipped to nothing, never skipped; the same at every placement."""
    results = []
    for fraction in PLACES:
        model = Model()
        optimizer = adamw(model, offload_fraction=fraction, max_grad_norm=1.0)
        set_gradients(model, 0)
        model.embed.weight.grad.fill_(3e38)
        optimizer.step()
        assert not optimizer.last_step_skipped
        assert optimizer.grad_norm == math.inf
        results.append(snapshot(model, optimizer))
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])
    assert all(value.isfinite().all() for value in results[0].values())


@pytest.mark.parametrize("factor", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fraction", PLACES)
def test_h64_the_norm_against_float64(fraction: float, dtype: torch.dtype, factor: float) -> None:
    model = Model(dtype)
    optimizer = adamw(model, offload_fraction=fraction)
    set_gradients(model, 0, skip=[NEVER], factor=factor)
    exact = exact_norm(model)
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(exact, rel=2.0**-23)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_the_norm_has_the_same_bits_at_every_fraction(fraction: float) -> None:
    model = Model(torch.bfloat16)
    optimizer = adamw(model, offload_fraction=fraction)
    expected = NumpyOptimizer.over(model.named_parameters())
    set_gradients(model, 0)
    expected.step({n: p.grad for n, p in model.named_parameters()})
    optimizer.step()
    assert optimizer.grad_norm == expected.norm


@pytest.mark.parametrize("fraction", PLACES)
@pytest.mark.parametrize("ratio", [0.25, 1 - 1e-6, 1.0, 4.0, 1e6])
def test_t38_h48_norm_below_at_and_above_the_threshold(ratio: float, fraction: float) -> None:
    """Clipping to a quarter, to just the norm, to no effect: equal to torch's coefficient, applied by hand."""
    model = Model()
    set_gradients(model, 0)
    max_norm = exact_norm(model) * ratio
    optimizer = adamw(model, offload_fraction=fraction, max_grad_norm=max_norm)
    expected = NumpyOptimizer.over(model.named_parameters())
    expected.step({n: p.grad for n, p in model.named_parameters()}, max_norm=max_norm)
    unclipped = NumpyOptimizer.over(model.named_parameters())
    unclipped.step({n: p.grad for n, p in model.named_parameters()})
    optimizer.step()
    found = snapshot(model, optimizer)
    assert_equal(found, expected.snapshot())
    moments, plain = found["exp_avg head.weight"], unclipped.snapshot()["exp_avg head.weight"]
    assert torch.equal(moments, plain) is (ratio >= 1.0)
    torch.testing.assert_close(moments, plain * min(1.0, ratio), rtol=1e-5, atol=0.0)


def test_no_clipping_by_none_and_by_zero() -> None:
    results = []
    for max_norm in (None, 0.0, 1e30):
        model = Model()
        optimizer = adamw(model, max_grad_norm=max_norm, offload_fraction=0.5)
        set_gradients(model, 0)
        optimizer.step()
        results.append(snapshot(model, optimizer))
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])


def test_the_clip_of_torch_stays_legal() -> None:
    model = Model()
    optimizer = adamw(model, offload_fraction=0.5)
    set_gradients(model, 0)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm > 1.0
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(1.0, rel=1e-5)


def scaled_training(
    fraction: float, dtype: torch.dtype, *, unscale: bool, init_scale: float
) -> tuple[dict[str, torch.Tensor], list[bool], float]:
    model = mlp(dtype)
    optimizer = adamw(
        model, offload_fraction=fraction, max_grad_norm=0.05, grad_dtype=torch.float32 if unscale else None
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=4)
    skipped = []
    for step in range(12):
        optimizer.zero_grad()
        scaler.scale(mlp_loss(model, step)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        before = snapshot(model, optimizer)
        scaler.step(optimizer)
        scaler.update()
        skipped.append(optimizer.last_step_skipped)
        if skipped[-1]:
            assert_equal(before, snapshot(model, optimizer))
    return snapshot(model, optimizer), skipped, scaler.get_scale()


@pytest.mark.parametrize("unscale", [False, True], ids=["folded", "unscale_"])
def test_grad_scaler_overflow_and_recovery(unscale: bool) -> None:
    base = scaled_training(0.0, torch.float16, unscale=unscale, init_scale=2.0**24)
    skipped = base[1]
    assert skipped[0]
    assert not all(skipped)
    assert int(base[0]["step 0.weight"]) == skipped.count(False)
    for fraction in PLACES[1:]:
        other = scaled_training(fraction, torch.float16, unscale=unscale, init_scale=2.0**24)
        assert_equal(base[0], other[0])
        assert base[1:] == other[1:]


@pytest.mark.parametrize("fraction", PLACES)
def test_a_loss_scale_of_a_power_of_two_leaves_no_trace(fraction: float) -> None:
    """fp32 gradients: scaled by 2^k and back is exact, so norm, clipping and weights equal a run without a scaler."""
    plain_model, model = mlp(), mlp()
    plain = adamw(plain_model, offload_fraction=fraction, max_grad_norm=0.05)
    optimizer = adamw(model, offload_fraction=fraction, max_grad_norm=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(4):
        for m, o in ((plain_model, plain), (model, optimizer)):
            o.zero_grad()
            loss = mlp_loss(m, step)
            (scaler.scale(loss) if o is optimizer else loss).backward()
        plain.step()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.grad_norm == plain.grad_norm
    assert_equal(snapshot(plain_model, plain), snapshot(model, optimizer))


def test_a_step_after_the_scaler_is_gone_is_not_scaled() -> None:
    model = mlp()
    optimizer = adamw(model, offload_fraction=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(mlp_loss(model, 0)).backward()
    scaler.step(optimizer)
    optimizer.zero_grad()
    mlp_loss(model, 1).backward()
    exact = exact_norm(model)
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("fraction", PLACES)
def test_h49_found_inf_skips_although_these_gradients_are_finite(fraction: float) -> None:
    """As where another optimizer of the same scaler, or another rank, has overflowed."""
    model = Model(torch.bfloat16)
    optimizer = adamw(model, offload_fraction=fraction, max_grad_norm=1.0)
    before = snapshot(model, optimizer)
    set_gradients(model, 0)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert optimizer.last_step_skipped
    assert_equal(before, snapshot(model, optimizer))
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    assert not optimizer.last_step_skipped
    assert math.isfinite(optimizer.grad_norm)
