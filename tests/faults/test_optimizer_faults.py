"""Faults of training with an offloaded optimizer; the ids are those of the project's list of faults and hazards.

T15, T19, T22 to T29, T37, T38, T42, T48, T49, T51 and T56 are tested next to what they belong to.

Seen red with: require_tier taken out, the poison of retired gradients taken out, every range of a bucket stepped (idle
experts, poison read as a gradient).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hostward
from hostward.core.placement import Placement
from hostward.errors import PlacementError
from hostward.kernels.cpu.adamw import bias_tables
from hostward.optim.bucket_state import same_bits
from hostward.runtime.backend import AdamWOperands, BoundRange, Buffer, Constants, Hyper, Tier
from hostward.runtime.simulated.backend import POISON, Order, SimulatedBackend
from hostward.schedule.ops import Lane

PLACES = (0.0, 0.5, 1.0)


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(model: torch.nn.Module, fraction: float, *, late: tuple[Lane, ...] = (), **options: object) -> hostward.AdamW:
    backend = SimulatedBackend(order=Order(seed=3, late=frozenset(late)), threads=1)
    settings = {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.1, **options}
    return hostward.AdamW(model, offload_fraction=fraction, backend=backend, **settings)  # type: ignore[arg-type]


def everything(model: torch.nn.Module, optimizer: hostward.AdamW) -> dict[str, torch.Tensor]:
    optimizer.wait()
    entries = optimizer.state_dict()["state"].items()
    state = {f"{role} {name}": value for name, entry in entries for role, value in entry.items()}
    return state | {f"weight {name}": p.detach().clone() for name, p in model.named_parameters()}


def assert_parity(results: list[dict[str, torch.Tensor]]) -> None:
    for other in results[1:]:
        assert other.keys() == results[0].keys()
        assert [name for name in other if not same_bits(other[name], results[0][name])] == []


class Experts(torch.nn.Module):
    """Each expert sees the tokens given to it; one without tokens takes no part in backward."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(16, 16, dtype=dtype)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(16, 16, dtype=dtype) for _ in range(4))

    def forward(self, x: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        hidden, parts, start = self.inner(x), [], 0
        for expert, count in zip(self.experts, tokens, strict=True):
            if count:
                parts.append(expert(hidden[start : start + count]))
            start += count
        return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_t41_an_expert_with_no_tokens_then_one_then_ten_times_as_many(dtype: torch.dtype) -> None:
    loads = [[5, 0, 5, 5], [5, 1, 5, 5], [5, 10, 5, 5], [5, 0, 5, 5], [1, 10, 0, 0], [0, 0, 0, 9]]
    results = []
    for fraction in PLACES:
        model = Experts(dtype)
        optimizer = make(model, fraction)
        start = everything(model, optimizer)
        for i, tokens in enumerate(loads):
            optimizer.zero_grad()
            x = torch.randn(sum(tokens), 16, generator=torch.Generator().manual_seed(i)).to(dtype)
            model(x, tokens).float().square().mean().backward()
            optimizer.step()
            if i == 0:
                now = everything(model, optimizer)
                assert all(same_bits(now[k], start[k]) for k in now if "experts.1." in k)
        results.append(everything(model, optimizer))
        for expert in range(4):
            steps = sum(bool(tokens[expert]) for tokens in loads)
            assert int(results[-1][f"step experts.{expert}.weight"]) == steps
    assert_parity(results)


def test_t20_kernels_refuse_operands_of_the_other_side() -> None:
    optimizer = make(torch.nn.Linear(300, 300), 1.0)
    backend, state = optimizer.backend, optimizer._states[0]
    memory = optimizer._memory
    on_device = backend.adopt(torch.zeros(128), "gradients")
    on_host = Buffer(Tier.HOST, torch.zeros(128), "weights for upload")
    constants = Constants(Hyper(1e-3, 0.0, 0.9, 0.999, 1e-8), bias_tables(0.9, 0.999, 16))

    def operands(gradient: Buffer, weight: Buffer) -> AdamWOperands:
        ranges = [BoundRange(0, gradient, weight, state.count_of(0))]
        return AdamWOperands(ranges, state.bucket.kind, state.exp_avg, state.exp_avg_sq, None, constants)

    for lane in (Lane.COMPUTE, Lane.UPDATE):
        with pytest.raises(PlacementError, match="operand 'exp_avg' lies on the host, not on the device"):
            backend.adamw(lane, "step", operands(on_device, on_device), memory.device_scalars)
    with pytest.raises(PlacementError, match="operand 'gradients' lies on the device, not on the host") as caught:
        backend.adamw(Lane.HOST, "step", operands(on_device, on_host), memory.host_scalars)
    assert "device kernels never run on host memory" in caught.value.why
    with pytest.raises(PlacementError, match="step scalars"):
        backend.adamw(Lane.HOST, "step", operands(on_host, on_host), memory.device_scalars)
    with pytest.raises(PlacementError, match="lane h2d cannot copy from device to host"):
        backend.copy(Lane.H2D, [(state.gradients[0], on_device)], name="wrong way")


@pytest.mark.parametrize("late", [(), (Lane.HOST,), (Lane.H2D, Lane.COMPUTE), (Lane.D2H,)])
def test_t32_h21_staging_is_poisoned_after_use_and_never_read(late: tuple[Lane, ...]) -> None:
    """An unused parameter's landing place holds NaN in the next step, and nobody looks at it (no skip, no change)."""
    model = Experts(torch.bfloat16)
    optimizer = make(model, 1.0, late=late)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.wait()
    landings = [g.data.view(torch.uint8) for s in optimizer._states for g in s.gradients]
    assert landings
    assert all((landing == POISON).all() for landing in landings)
    before = everything(model, optimizer)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model.experts[2].weight.grad = None
    optimizer.step()
    after = everything(model, optimizer)
    assert not optimizer.last_step_skipped
    assert all(value.isfinite().all() for value in after.values())
    kept = {name for name in after if same_bits(before[name], after[name])}
    assert {name for name in after if name.endswith(" experts.2.weight")} <= kept


@pytest.mark.parametrize("backwards", [1, 3])
def test_t29_several_backwards_add_up_in_the_dtype_of_the_gradient(backwards: int) -> None:
    """Without grad_dtype a 16-bit gradient accumulates in 16 bits: the same at every placement all the same."""
    results = []
    for fraction in PLACES:
        model = Experts(torch.bfloat16)
        optimizer = make(model, fraction)
        for i in range(4):
            optimizer.zero_grad()
            for k in range(backwards):
                x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * i + k)).bfloat16()
                model(x, [2, 2, 2, 2]).float().square().mean().backward()
            optimizer.step()
        results.append(everything(model, optimizer))
    assert_parity(results)


class Recomputed(torch.nn.Module):
    """One weight used in two checkpointed calls, one weight never used."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = torch.nn.Linear(16, 16)
        self.never = torch.nn.Linear(16, 16)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        once = checkpoint(self.shared, x, use_reentrant=self.reentrant)
        twice: torch.Tensor = checkpoint(self.shared, torch.tanh(once), use_reentrant=self.reentrant)
        return twice


@pytest.mark.parametrize("reentrant", [True, False])
def test_h38_a_weight_of_two_checkpoints_is_stepped_once_with_the_whole_gradient(reentrant: bool) -> None:
    results = []
    for fraction in PLACES:
        model = Recomputed(reentrant=reentrant)
        optimizer = make(model, fraction)
        for i in range(3):
            optimizer.zero_grad()
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(i)).requires_grad_()
            model(x).square().mean().backward()
            plain = torch.nn.functional.linear
            w, b = (p.detach().clone().requires_grad_() for p in (model.shared.weight, model.shared.bias))
            plain(torch.tanh(plain(x.detach(), w, b)), w, b).square().mean().backward()
            torch.testing.assert_close(model.shared.weight.grad, w.grad)
            optimizer.step()
        results.append(everything(model, optimizer))
        assert int(results[-1]["step shared.weight"]) == 3
        assert int(results[-1]["step never.weight"]) == 0
    assert_parity(results)


@pytest.mark.parametrize("fraction", PLACES)
def test_t42_an_exception_in_the_closure_leaves_everything_whole(fraction: float) -> None:
    model = Experts(torch.bfloat16)
    optimizer = make(model, fraction)
    before = everything(model, optimizer)

    def closure() -> torch.Tensor:
        model(torch.ones(8, 16).bfloat16(), [2, 2, 2, 2]).float().mean().backward()
        raise KeyError("data ran out")

    with pytest.raises(KeyError, match="data ran out"):
        optimizer.step(closure)
    after = everything(model, optimizer)
    assert all(same_bits(before[name], after[name]) for name in before)
    optimizer.step()
    assert int(optimizer.state_dict()["state"]["inner.weight"]["step"]) == 1


@pytest.mark.parametrize("fraction", PLACES)
def test_t50_weights_without_an_optimizer_state_start_at_step_0(fraction: float) -> None:
    trained = Experts(torch.bfloat16)
    with torch.no_grad():
        trained.inner.weight.mul_(3)
    model = Experts(torch.bfloat16)
    optimizer = make(model, fraction)
    model.load_state_dict(trained.state_dict())
    state = optimizer.state_dict()["state"]
    for name, entry in state.items():
        assert int(entry["step"]) == 0
        assert not entry["exp_avg"].any()
        assert not entry["exp_avg_sq"].any()
        assert torch.equal(entry["master"], trained.get_parameter(name).float())


@pytest.mark.parametrize("fraction", PLACES)
def test_h50_frameworks_that_move_optimizer_state_find_nothing_to_move(fraction: float) -> None:
    model = Experts(torch.float32)
    optimizer = make(model, fraction)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    held = dict(optimizer.backend.ledger.held_bytes)
    optimizer.step()
    assert not any(optimizer.state.values())
    assert dict(optimizer.backend.ledger.held_bytes) == held
    tiers = {s.placement: s.exp_avg.tier for s in optimizer._states}
    assert tiers.get(Placement.HOST, Tier.HOST) is Tier.HOST
    assert tiers.get(Placement.DEVICE, Tier.DEVICE) is Tier.DEVICE
