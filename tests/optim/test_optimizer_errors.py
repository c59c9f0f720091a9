"""Bad input: typed errors that say what, why and what to do, before anything is allocated or changed.

Seen red with: the check of the whole memory taken out, either check of overlapping memory taken out; most of the others
were red before their check existed.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from optimizer_cases import Model, adamw, assert_equal, backend, mlp, mlp_loss, set_gradients, snapshot

import hostward
from hostward.core.host_limits import HostMemory
from hostward.errors import ConfigError, HostwardError, MemoryLimitError, ModelError
from hostward.runtime import pinned_memory
from hostward.runtime.backend import Tier
from hostward.runtime.simulated.backend import SimulatedBackend


def parameter(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))


class Subclass(torch.Tensor):
    pass


def subclass() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(3).as_subclass(Subclass))


def overlapping_itself() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.as_strided(torch.zeros(10), (3, 3), (1, 1)))


def expanded() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(1, 3).expand(4, 3))


def halves_that_overlap() -> list[tuple[str, torch.nn.Parameter]]:
    base = torch.zeros(10)
    return [("a", torch.nn.Parameter(base[:6])), ("b", torch.nn.Parameter(base[5:]))]


def no_trainable() -> torch.nn.Module:
    return torch.nn.Linear(3, 3).requires_grad_(False)


REFUSED: dict[str, tuple[Callable[[], object], str, str]] = {
    "unnamed": (lambda: [parameter(3)], "parameters without names", r"hostward\.AdamW\(model"),
    "parameters()": (lambda: Model().parameters(), "parameters without names", r"model\.named_parameters\(\)"),
    "unnamed group": (lambda: [{"params": [parameter(3)]}], "parameters without names", "named_parameters"),
    "group without params": (lambda: [{"lr": 1.0}], "parameter group without 'params'", "params"),
    "one tensor": (lambda: parameter(3), "parameters without names", "model"),
    "not iterable": (lambda: 3, "cannot take parameters from int", "pass the module"),
    "empty": (list, "no parameters to optimize", "trainable parameters"),
    "nothing trainable": (no_trainable, "no trainable parameter", "requires_grad"),
    "duplicate names": (lambda: [("a", parameter(3)), ("a", parameter(3))], "named 'a'", "a name of its own"),
    "float64": (lambda: [("w", parameter(3, dtype=torch.float64))], "'w' has dtype torch.float64", "leave this"),
    "complex": (lambda: [("w", parameter(3, dtype=torch.complex64))], "'w' has dtype torch.complex64", "leave"),
    "meta": (lambda: [("w", parameter(3, device="meta"))], "'w' is on meta", "move it to its device"),
    "two devices": (
        lambda: [("v", parameter(3)), ("w", parameter(3, device="meta"))],
        "'w' is on meta, but the optimizer is for cpu",
        "move it to its device before the optimizer",
    ),
    "subclass": (lambda: [("w", subclass())], "'w' is a Subclass, a tensor subclass", "leave this parameter out"),
    "lazy": (lambda: torch.nn.LazyLinear(3), "'weight' has no shape yet", "build the model"),
    "expanded": (lambda: [("w", expanded())], "'w' has elements that share memory", "leave this parameter out"),
    "overlap in itself": (lambda: [("w", overlapping_itself())], "'w' has elements that share memory", "leave"),
    "overlap of two": (halves_that_overlap, "'a' and 'b' share memory", "same Parameter"),
}


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("case", REFUSED)
def test_t23_t27_parameters_that_cannot_be_tracked(case: str, fraction: float) -> None:
    make, what, fix = REFUSED[case]
    on = backend()
    with pytest.raises(ModelError, match=what) as caught:
        adamw(make(), offload_fraction=fraction, backend=on)
    assert re.search(fix, caught.value.fix)
    assert on.ledger.total_bytes(Tier.HOST) == on.ledger.total_bytes(Tier.DEVICE) == 0


def test_meta_without_a_backend_names_the_devices_that_work() -> None:
    with pytest.raises(ModelError, match="parameters are on meta") as caught:
        hostward.AdamW(torch.nn.Linear(3, 3, device="meta"))
    assert "move the model to cuda or cpu" in caught.value.fix


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "lr negative": ({"lr": -1e-3}, r"lr must be a number in \[0.0, inf\), got -0.001"),
    "lr nan": ({"lr": math.nan}, "lr must be a number"),
    "lr infinite": ({"lr": math.inf}, "lr must be a number"),
    "lr text": ({"lr": "1e-3"}, "lr must be a number .* got '1e-3'"),
    "lr bool": ({"lr": True}, "lr must be a number"),
    "lr None": ({"lr": None}, "lr must be a number"),
    "lr vector": ({"lr": torch.ones(2)}, "lr must be a number"),
    "eps": ({"eps": -1e-8}, "eps must be a number"),
    "eps text": ({"eps": "x"}, "eps must be a number"),
    "weight_decay": ({"weight_decay": -0.1}, "weight_decay must be a number"),
    "beta 1": ({"betas": (1.0, 0.9)}, r"betas\[0\] must be a number in \[0.0, 1.0\), got 1.0"),
    "beta 2": ({"betas": (0.9, math.nan)}, r"betas\[1\] must be a number"),
    "one beta": ({"betas": (0.9,)}, "betas must be two numbers"),
    "beta alone": ({"betas": 0.9}, "betas must be two numbers"),
    "norm": ({"max_grad_norm": -1.0}, "max_grad_norm must be a finite number >= 0, got -1.0"),
    "norm nan": ({"max_grad_norm": math.nan}, "max_grad_norm must be a finite number"),
    "norm text": ({"max_grad_norm": "1"}, "max_grad_norm must be a finite number >= 0, got '1'"),
    "threads": ({"host_threads": 0}, "host_threads must be a whole number >= 1, got 0"),
    "threads float": ({"host_threads": 1.5}, "host_threads must be a whole number"),
    "grad_dtype": ({"grad_dtype": torch.int8}, "grad_dtype must be one of torch.float32"),
    "grad_dtype text": ({"grad_dtype": "fp32"}, "grad_dtype must be one of"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_outside_their_range(case: str) -> None:
    options, text = OPTIONS[case]
    on = backend()
    with pytest.raises(ConfigError, match=text):
        adamw(Model(), backend=on, **options)
    assert on.ledger.total_bytes(Tier.HOST) == on.ledger.total_bytes(Tier.DEVICE) == 0


@pytest.mark.parametrize("key", ["amsgrad", "maximize", "capturable", "differentiable"])
def test_t19_variants_of_adam_that_are_not_built(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}=True is not supported") as caught:
        adamw([{"params": list(Model().named_parameters()), key: True}])
    assert caught.value.fix == f"leave {key} out"
    adamw([{"params": list(Model().named_parameters()), key: False}])


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf, "50%", "0.5", True, [0.5], -1e-9])
def test_t15_fractions_outside_the_range(value: object) -> None:
    with pytest.raises(ValueError, match=r"offload_fraction must be a number in \[0\.0, 1\.0\]") as caught:
        adamw(Model(), offload_fraction=value)
    assert isinstance(caught.value, ConfigError)
    assert "0 none, 1 all" in caught.value.fix


@given(st.floats(0, 1))
def test_t15_hdo_h6_the_share_is_met_to_within_one_bucket_and_printed(fraction: float) -> None:
    optimizer = adamw(Model(torch.bfloat16), offload_fraction=fraction)
    plan = optimizer.plan
    largest = max(b.state_bytes for b in plan.buckets) / plan.state_bytes
    assert abs(plan.placed_fraction - fraction) <= largest / 2 + 1e-12
    owners = optimizer.backend.ledger.by_owner(Tier.HOST)
    held = sum(owners.get(owner, 0) for owner in ("exp_avg", "exp_avg_sq", "remainder"))
    assert plan.offloaded_bytes <= held <= plan.offloaded_bytes * 1.05 + 20_000  # padding
    told = repr(optimizer)
    assert f"asked {fraction:.4f}, placed {plan.placed_fraction:.4f}" in told
    tensors = optimizer.param_groups[0]["params"]
    numel = sum(p.numel() for p in tensors)
    assert (
        f"  group 0: {len(tensors)} tensors, {numel:,} parameters; betas (0.9, 0.95), eps 1e-08, lr 0.01, weight_decay "
        in told
    )
    assert "max_grad_norm" not in told
    assert "\n  max_grad_norm 0.5\n)" in repr(adamw(Model(torch.bfloat16), max_grad_norm=0.5))
    assert len(told) < 500


@pytest.mark.parametrize("value", [0, 0.0, None, -0.0])
def test_t15_hdo_h7_zero_and_none_mean_off_and_say_so(value: float | None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hostward"):
        optimizer = adamw(Model(), offload_fraction=value)
    assert optimizer.plan.offloaded_bytes == 0
    assert "no state is offloaded" in caplog.text
    assert "asked 0.0000" in caplog.text


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_a_sparse_gradient_is_refused_and_changes_nothing(fraction: float) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "e": torch.nn.Embedding(20, 4, sparse=True)})
    optimizer = adamw(model, offload_fraction=fraction)
    before = snapshot(model, optimizer)
    (model["a"](model["e"](torch.arange(3)))).sum().backward()
    with pytest.raises(ModelError, match=r"'e\.weight' has a gradient with layout torch\.sparse_coo") as caught:
        optimizer.step()
    assert "give it such a gradient" in caught.value.fix
    assert_equal(before, snapshot(model, optimizer))


def test_memory_limit_is_checked_for_the_whole_before_the_first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each slab alone would fit. The limit is what the machine tells; here, a machine told to be small."""
    model = Model(torch.bfloat16)
    whole = adamw(model, offload_fraction=1.0).backend.ledger.total_bytes(Tier.HOST)
    for available in (whole // 2, whole - 4096):
        small = HostMemory(whole, available, "the container's cgroup")
        monkeypatch.setattr(pinned_memory, "host_memory", lambda small=small: small)
        on = backend()
        with pytest.raises(MemoryLimitError, match=r"optimizer state: .* bytes of host memory asked") as caught:
            adamw(model, offload_fraction=1.0, backend=on)
        assert "the container's cgroup" in caught.value.why
        assert "optimizer_offload_fraction" in caught.value.fix
        assert not any(on.ledger.held_bytes.values())
    monkeypatch.undo()
    optimizer = adamw(model, offload_fraction=1.0)
    set_gradients(model, 0)
    optimizer.step()


def state_on_host(optimizer: hostward.AdamW) -> int:
    held = optimizer.backend.ledger.held_bytes
    return sum(held[Tier.HOST, owner] for owner in ("exp_avg", "exp_avg_sq", "remainder", "master"))


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_hdo_h13_h14_bytes_held_and_moved(fraction: float, dtype: torch.dtype) -> None:
    """Exact-size slabs, 16-bit traffic, flat over steps."""
    model = Model(dtype)
    optimizer = adamw(model, offload_fraction=fraction)
    ledger, plan = optimizer.backend.ledger, optimizer.plan
    size = dtype.itemsize
    on_host = sum(b.numel for b in plan.buckets if b.placement.value == "host")
    held, per_bucket = ledger.total_bytes(Tier.HOST), 128 * 16 * len(model.state_dict())
    assert plan.host_bytes + size * on_host <= held <= plan.host_bytes + size * on_host + per_bucket
    # What copies reach: gradients and weights of what the host steps, and its scalars. Its state they do not.
    assert ledger.pinned_bytes == (held - ledger.held_bytes[Tier.HOST, "step counts"] - state_on_host(optimizer))
    moved = []
    for step in range(3):
        set_gradients(model, step)
        before = dict(ledger.copied_bytes)
        optimizer.step()
        moved.append({lane: n - before.get(lane, 0) for lane, n in ledger.copied_bytes.items()})
        assert ledger.total_bytes(Tier.HOST) == held
    by_lane = {lane.value: n for lane, n in moved[0].items() if n}
    assert by_lane == ({"d2h": size * on_host + 12, "h2d": size * on_host} if on_host else {})
    assert moved[0] == moved[1] == moved[2]


@given(st.text(max_size=30), st.text(max_size=30), st.text(max_size=30))
def test_errors_print_what_why_and_fix(what: str, why: str, fix: str) -> None:
    error = HostwardError(what, why=why, fix=fix)
    assert (error.what, error.why, error.fix) == (what, why, fix)
    assert all(part in str(error) for part in (what, why, fix))


class Capturing(SimulatedBackend):
    """Says that a CUDA graph is being captured."""

    def capturing(self) -> bool:
        return True


def test_t44_a_step_is_not_captured() -> None:
    model = mlp()
    optimizer = hostward.AdamW(model, backend=Capturing(threads=1))
    mlp_loss(model, 0).backward()
    before = snapshot(model, optimizer)
    with pytest.raises(ModelError, match="while a CUDA graph is captured"):
        optimizer.step()
    assert_equal(snapshot(model, optimizer), before)


class CapturingLater(SimulatedBackend):
    """As the test says."""

    captures = False

    def capturing(self) -> bool:
        return self.captures


def test_t44_weights_that_are_on_their_way_are_not_captured() -> None:
    model, backend = mlp(), CapturingLater(threads=1)
    optimizer = hostward.AdamW(model, offload_fraction=1.0, backend=backend)
    mlp_loss(model, 0).backward()
    optimizer.step()
    backend.captures = True
    with pytest.raises(ModelError, match="are still to arrive, and a CUDA graph is captured"):
        mlp_loss(model, 1)
    with pytest.raises(ModelError, match="are still to arrive, and a CUDA graph is captured"):
        optimizer._executor.wait_on_stream(min(optimizer._executor.pending), SimpleNamespace())  # type: ignore[arg-type]
    backend.captures = False
    optimizer.wait_for_weights()
    backend.captures = True
    mlp_loss(model, 1)


def test_a_backend_is_no_name_of_a_device() -> None:
    with pytest.raises(ConfigError, match="backend='cuda' is no backend") as caught:
        adamw(Model(), backend="cuda")
    assert caught.value.fix == 'leave it out, and move the model: model.to("cuda")'
