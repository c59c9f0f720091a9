"""`hostward.AdamW` on a CUDA device: the same bits at every fraction, and memory that really leaves."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

import hostward
from hostward.kernels import reference
from hostward.kernels.cpu.adamw import bias_tables
from hostward.optim.bucket_state import same_bits
from hostward.runtime.backend import AdamWOperands, BoundRange, Constants, Hyper, Tier
from hostward.runtime.cuda.backend import CudaBackend
from hostward.schedule.ops import Lane

pytestmark = pytest.mark.gpu

FRACTIONS = (0.0, 0.25, 0.5, 1.0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def build(dtype: torch.dtype, width: int = 512) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, width), torch.nn.GELU(), torch.nn.Linear(width, 3 * width), torch.nn.GELU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(3 * width, 256)).to("cuda", dtype)


def train(
    fraction: float,
    dtype: torch.dtype,
    *,
    steps: int = 50,
    max_grad_norm: float | None = 0.02,
    microbatches: int = 1,
    **options: bool,
) -> tuple[torch.nn.Module, hostward.AdamW, list[float]]:
    model = build(dtype)
    optimizer = hostward.AdamW(
        model,
        lr=1e-2,
        weight_decay=0.1,
        max_grad_norm=max_grad_norm,
        offload_fraction=fraction,
        streamed_fraction=0.0,
        grad_dtype=torch.float32 if microbatches > 1 else None,
        **options,
    )
    generator = torch.Generator("cuda").manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(microbatches):
            x = torch.randn(16, 256, device="cuda", dtype=dtype, generator=generator)
            loss = (model(x).float() - x.float()).square().mean() / microbatches
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    optimizer.wait()
    return model, optimizer, losses


def assert_equal_runs(a: tuple, b: tuple) -> None:
    for _, optimizer, _ in (a, b):
        optimizer.wait()
    for (name, p), q in zip(a[0].named_parameters(), b[0].parameters(), strict=True):
        assert same_bits(p.detach(), q.detach()), f"weight {name} differs"
    mine, theirs = a[1].state_dict()["state"], b[1].state_dict()["state"]
    for name, role in itertools.product(mine, ("step", "exp_avg", "exp_avg_sq", "master")):
        if role in mine[name]:
            assert same_bits(mine[name][role], theirs[name][role]), f"{role} of {name} differs"
    assert a[2] == b[2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_t28_every_fraction_gives_the_bits_of_fraction_0(dtype: torch.dtype, microbatches: int) -> None:
    base = train(0.0, dtype, microbatches=microbatches)
    for fraction in FRACTIONS[1:]:
        assert_equal_runs(base, train(fraction, dtype, microbatches=microbatches))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_one_step_equals_the_numpy_reference(dtype: torch.dtype, fraction: float) -> None:
    parameter = torch.nn.Parameter(torch.randn(300, 1000, device="cuda").to(dtype))
    master = parameter.detach().float().cpu().numpy().reshape(-1).copy()
    m, v = np.zeros_like(master), np.zeros_like(master)
    optimizer = hostward.AdamW([("w", parameter)], lr=1e-2, weight_decay=0.1, offload_fraction=fraction)
    hyper = reference.Hyper(lr=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.999, eps=1e-8)
    tables = bias_tables(0.9, 0.999, 16)
    for step in range(1, 4):
        gradient = torch.randn(300, 1000, device="cuda").to(dtype)
        parameter.grad = gradient
        optimizer.step()
        flat = gradient.float().cpu().numpy().reshape(-1)
        master, m, v = reference.adamw(master, m, v, flat, step, hyper, tables)
    state = optimizer.state_dict()["state"]["w"]
    assert same_bits(state["exp_avg"].reshape(-1), torch.from_numpy(m))
    assert same_bits(state["exp_avg_sq"].reshape(-1), torch.from_numpy(v))
    kept = state.get("master", parameter.detach().float().cpu()).reshape(-1)
    assert same_bits(kept, torch.from_numpy(master))


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_t37_a_non_finite_gradient_changes_nothing(fraction: float, bad: float) -> None:
    model, optimizer, _ = train(fraction, torch.bfloat16, steps=2)
    weights = [p.detach().clone() for p in model.parameters()]
    before = optimizer.state_dict()["state"]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    next(model.parameters()).grad.view(-1)[7] = bad
    optimizer.step()
    assert optimizer.last_step_skipped
    assert optimizer.grad_norm == float("inf")
    after = optimizer.state_dict()["state"]  # waits for the weights as well
    assert all(same_bits(w, p.detach()) for w, p in zip(weights, model.parameters(), strict=True))
    assert all(same_bits(before[n][r], after[n][r]) for n in before for r in before[n])
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert not optimizer.last_step_skipped


def test_the_norm_and_the_clip_factor() -> None:
    for fraction in (0.0, 1.0):
        model = build(torch.bfloat16)
        optimizer = hostward.AdamW(model, max_grad_norm=1.0, offload_fraction=fraction, streamed_fraction=0.0)
        for i, p in enumerate(model.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to("cuda", torch.bfloat16)
        exact = sum(p.grad.double().square().sum() for p in model.parameters()).sqrt().item()
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(exact, rel=2e-7)


def test_grad_scaler_skips_and_recovers() -> None:
    results = []
    for fraction in (0.0, 1.0):
        model = build(torch.float16)
        optimizer = hostward.AdamW(model, lr=1e-3, max_grad_norm=1.0, offload_fraction=fraction, streamed_fraction=0.0)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)
        generator = torch.Generator("cuda").manual_seed(1)
        skipped = 0
        for _ in range(20):
            optimizer.zero_grad()
            x = torch.randn(16, 256, device="cuda", dtype=torch.float16, generator=generator)
            scaler.scale((model(x).float() - x.float()).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            skipped += optimizer.last_step_skipped
        assert 0 < skipped < 20
        results.append((model, optimizer, [scaler.get_scale()]))
    assert_equal_runs(*results)


@pytest.mark.parametrize(
    ("dtype", "bytes_each"), [(torch.float32, 8), (torch.bfloat16, 10), (torch.float16, 12)], ids=str
)
def test_allocated_memory_falls_by_what_was_placed(dtype: torch.dtype, bytes_each: int) -> None:
    def steady(fraction: float) -> tuple[int, hostward.AdamW]:
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        model, optimizer = build(dtype, width=2048), None
        optimizer = hostward.AdamW(model, offload_fraction=fraction, streamed_fraction=0.0)
        for _ in range(2):
            model(torch.randn(4, 256, device="cuda", dtype=dtype)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.wait()
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - before, optimizer

    base, full = steady(0.0)[0], 0
    for fraction in (0.25, 0.5, 1.0):
        now, optimizer = steady(fraction)
        promised = optimizer.plan.offloaded_bytes
        assert abs((base - now) - promised) <= 0.02 * promised
        full = promised
        del optimizer
    assert full == bytes_each * sum(p.numel() for p in build(dtype, width=2048).parameters())


@pytest.mark.parametrize("placement", ["host", "streamed"])
def test_host_memory_is_exact_pinned_where_copies_reach_it_and_given_back(placement: str) -> None:
    model = build(torch.bfloat16, width=2048)
    streamed = float(placement == "streamed")
    optimizer = hostward.AdamW(model, offload_fraction=1.0, streamed_fraction=streamed)
    backend = optimizer.backend
    assert isinstance(backend, CudaBackend)
    numel = sum(p.numel() for p in model.parameters())
    by_owner = backend.ledger.by_owner(Tier.HOST)
    pinned_bytes = backend.ledger.pinned_bytes - by_owner.get("upload tables", 0)  # a fixed arena, whatever the model
    per_element = 10 if streamed else 4  # state, or gradient and weight
    assert per_element * numel <= pinned_bytes <= 1.02 * per_element * numel + 4096
    for state in optimizer._states:
        assert {b.data.is_pinned() for b in state.streamed()} == {bool(streamed)}
        places = [b for b in (state.weight, state.gradient) if b is not None]
        assert [b.data.is_pinned() for b in places] == ([] if streamed else [True, True])
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    if not streamed:
        assert backend.ledger.copied_bytes[Lane.D2H] == 2 * numel + 12
        assert backend.ledger.copied_bytes[Lane.H2D] == 2 * numel
        assert sum(by_owner.values()) <= 14.2 * numel + 4096 + by_owner.get("upload tables", 0)
    del optimizer, backend, state
    gc.collect()
    torch.empty(1, device="cuda").fill_(1)
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pins", [(False, True), (True, False), (False, False)])
def test_t10_memory_that_is_not_page_locked_gives_the_same_bits(dtype: torch.dtype, pins: tuple[bool, bool]) -> None:
    """Small weights too, which the driver reads as soon as a copy is enqueued."""
    other = train(1.0, dtype, steps=20, pin_gradients=pins[0], pin_weights=pins[1])
    assert_equal_runs(train(0.0, dtype, steps=20), other)


def test_h2_training_under_a_side_stream() -> None:
    base = train(0.5, torch.bfloat16, steps=5)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        other = train(0.5, torch.bfloat16, steps=5)
    torch.cuda.synchronize()
    assert_equal_runs(base, other)


def test_saved_at_one_fraction_goes_on_at_another() -> None:
    def go_on(make: Callable[[], tuple[torch.nn.Module, hostward.AdamW]]) -> tuple:
        model, optimizer = make()
        for i in range(3):
            for k, p in enumerate(model.parameters()):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(9 * i + k)).to(p)
            optimizer.step()
        optimizer.wait()
        return model, optimizer, []

    saved_model, saved, _ = train(0.25, torch.bfloat16, steps=4)
    weights, state = {k: v.clone() for k, v in saved_model.state_dict().items()}, saved.state_dict()

    def resumed() -> tuple[torch.nn.Module, hostward.AdamW]:
        model = build(torch.bfloat16)
        optimizer = hostward.AdamW(
            model, lr=1e-2, weight_decay=0.1, max_grad_norm=0.02, offload_fraction=1.0, streamed_fraction=0.0
        )
        optimizer.load_state_dict(state)
        model.load_state_dict(weights)
        return model, optimizer

    assert_equal_runs(go_on(lambda: (saved_model, saved)), go_on(resumed))


def test_t20_host_and_device_operands_are_never_mixed() -> None:
    model = build(torch.bfloat16)
    optimizer = hostward.AdamW(model, offload_fraction=1.0, streamed_fraction=0.0)
    state, memory, backend = optimizer._states[0], optimizer._memory, optimizer.backend
    gradient = backend.adopt(torch.ones(128, device="cuda", dtype=torch.bfloat16), "gradients")
    weight = backend.adopt(torch.zeros(128, device="cuda", dtype=torch.bfloat16), "weights")
    constants = Constants(Hyper(1e-3, 0.0, 0.9, 0.999, 1e-8), bias_tables(0.9, 0.999, 16))
    ranges = [BoundRange(0, gradient, weight, state.count_of(0))]
    operands = AdamWOperands(ranges, state.bucket.kind, state.exp_avg, state.exp_avg_sq, state.low, constants)
    for lane, scalars in ((Lane.HOST, memory.host_scalars), (Lane.COMPUTE, memory.device_scalars)):
        with pytest.raises(hostward.errors.PlacementError):
            backend.adamw(lane, "mixed", operands, scalars)
