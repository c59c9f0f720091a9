"""State by name: round trips at another placement, in files, against mismatches.

Seen red with: the master left out of a load, the step count left out, the host weights left as they were, views of the
slabs handed out, groups updated before the check, names not compared, bf16 rounded half down, views copied, views
where copies were asked for, pieces that do not lie end to end taken for one, the last part of a master left out,
weights that are not contiguous left as they were, memory not asked for, names of another kind let through, tensors that
cannot be read found where others have been written.
"""

from __future__ import annotations

import copy
import gc
import io
import itertools
import logging
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from optimizer_cases import (
    DTYPES,
    FRACTIONS,
    NEVER,
    SHAPES,
    Model,
    adamw,
    assert_equal,
    backend,
    set_gradients,
    snapshot,
)

import hostward
from hostward.checkpoint.torch_adamw import from_torch_adamw, to_torch_adamw
from hostward.core.host_limits import HostMemory
from hostward.core.inventory import Inventory
from hostward.errors import CheckpointError, MemoryLimitError, ModelError
from hostward.optim import state_dict
from hostward.optim.bucket_state import rounded, same_bits
from hostward.runtime import pinned_memory

PLACES = (0.0, 0.5, 1.0)


def trained(dtype: torch.dtype, fraction: float, first: int = 0, steps: int = 3) -> tuple[Model, hostward.AdamW]:
    model = Model(dtype)
    optimizer = adamw(model, offload_fraction=fraction, max_grad_norm=2.0)
    go_on(model, optimizer, first, steps)
    return model, optimizer


def go_on(model: Model, optimizer: hostward.AdamW, first: int, steps: int = 3) -> None:
    for step in range(first, first + steps):
        set_gradients(model, step, skip=[NEVER] if step % 2 else [])
        optimizer.step()


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("saved_at", "loaded_at"), list(itertools.product(PLACES, FRACTIONS)))
def test_t48_t51_t56_saved_at_one_fraction_goes_on_at_another(
    saved_at: float, loaded_at: float, dtype: torch.dtype
) -> None:
    """Through a file with weights_only=True; equal to no break at all. Model and optimizer are loaded in either order:
    each dtype and each fraction in both.
    """
    unbroken_model, unbroken = trained(dtype, saved_at)
    weights, state = through_a_file((unbroken_model.state_dict(), unbroken.state_dict()))
    go_on(unbroken_model, unbroken, 3)
    model = Model(dtype, seed=9)
    optimizer = adamw(model, offload_fraction=loaded_at, max_grad_norm=2.0)
    calls: list[Callable[[], object]] = [
        lambda: model.load_state_dict(weights),
        lambda: optimizer.load_state_dict(state),
    ]
    turn = PLACES.index(saved_at) + FRACTIONS.index(loaded_at) + DTYPES.index(dtype)
    for call in calls if turn % 2 else reversed(calls):
        call()
    assert not any(optimizer.state.values())
    go_on(model, optimizer, 3)
    assert_equal(snapshot(model, optimizer), snapshot(unbroken_model, unbroken))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_a_state_dict_holds(dtype: torch.dtype) -> None:
    model, optimizer = trained(dtype, 0.5)
    state = optimizer.state_dict()
    assert list(state) == ["format", "optimizer", "state", "param_groups"]
    assert state["optimizer"] == "hostward.AdamW"
    assert list(state["state"]) == list(SHAPES)
    roles = {"step", "exp_avg", "exp_avg_sq"} | ({"master"} if dtype is not torch.float32 else set())
    for name, entry in state["state"].items():
        assert entry.keys() == roles
        assert entry["step"].dtype is torch.int64
        assert entry["step"].shape == ()
        for role in roles - {"step"}:
            assert entry[role].dtype is torch.float32
            assert entry[role].shape == SHAPES[name]
            assert entry[role].is_contiguous()
    (group,) = state["param_groups"]
    assert group["params"] == group["param_names"] == list(SHAPES)
    assert group["betas"] == [0.9, 0.95]
    assert model.head.weight.dtype is dtype


def test_h67_tensors_own_their_storage_and_do_not_change_later() -> None:
    model, optimizer = trained(torch.bfloat16, 0.5)
    state = optimizer.state_dict()
    tensors = [v for entry in state["state"].values() for v in entry.values()]
    for value in tensors:
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size()
    kept = copy.deepcopy(state["state"])
    go_on(model, optimizer, 3)
    for name, entry in state["state"].items():
        assert_equal(entry, kept[name])
    # And the other way: what is loaded is copied.
    optimizer.load_state_dict(state)
    for value in tensors:
        value.fill_(7)
    loaded = optimizer.state_dict()["state"]
    for name, entry in kept.items():
        assert_equal(entry, loaded[name])


def test_h60_masters_keep_all_their_bits() -> None:
    model, optimizer = trained(torch.bfloat16, 1.0)
    master = optimizer.state_dict()["state"]["head.weight"]["master"]
    assert not torch.equal(master, master.bfloat16().float())
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(optimizer.state_dict()["state"]["head.weight"]["master"], master)
    assert model.head.weight.dtype is torch.bfloat16


@pytest.mark.parametrize("fraction", PLACES)
def test_hdo_h9_state_saved_before_the_first_step_loads(fraction: float) -> None:
    model, other = Model(torch.float16), Model(torch.float16, seed=3)
    fresh, target = adamw(model, offload_fraction=fraction), adamw(other, offload_fraction=1 - fraction)
    target.load_state_dict(through_a_file(fresh.state_dict()))
    assert_equal(snapshot(model, fresh), snapshot(other, target))
    assert {int(e["step"]) for e in target.state_dict()["state"].values()} == {0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fraction", PLACES)
def test_weights_follow_the_masters_of_a_loaded_state(
    fraction: float, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """A state alone restores a 16-bit model; what it changed is logged."""
    source, optimizer = trained(dtype, 0.5)
    model = Model(dtype)
    target = adamw(model, offload_fraction=fraction)
    with caplog.at_level(logging.WARNING, logger="hostward"):
        target.load_state_dict(optimizer.state_dict())
        assert_equal(snapshot(model, target), snapshot(source, optimizer))
    (record,) = caplog.records
    assert "weights were set from the masters" in record.getMessage()


def test_hdo_h8_state_is_found_by_name_not_by_position() -> None:
    """Two parameters of one shape, given in another order: refused, since groups list names in order."""

    def make(*names: str) -> hostward.AdamW:
        parameters = {name: torch.nn.Parameter(torch.full((5,), float(len(name)))) for name in names}
        return adamw(list(parameters.items()))

    optimizer, other = make("a", "bb"), make("bb", "a")
    with pytest.raises(CheckpointError, match="not those of this optimizer") as caught:
        other.load_state_dict(optimizer.state_dict())
    assert "order and grouping count" in caught.value.why


def test_hyper_parameters_and_extra_keys_of_groups_return() -> None:
    model = Model()
    optimizer = adamw([{"params": list(model.named_parameters()), "lr": 0.5, "betas": (0.1, 0.2), "label": "all"}])
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = through_a_file(optimizer.state_dict())
    other = adamw([{"params": list(Model().named_parameters())}])
    other.load_state_dict(state)
    group = other.param_groups[0]
    assert (group["lr"], group["betas"], group["label"]) == (0.25, (0.1, 0.2), "all")
    assert float(group["initial_lr"]) == 0.25
    assert all(a is b for a, b in zip(group["params"], (t.parameter for t in other._tracked), strict=True))


def _without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda s: s.pop(key)


def _edit(name: str, role: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda s: s["state"][name].update({role: value})


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no format": (_without("format"), "not an optimizer state of hostward"),
    "another optimizer": (lambda s: s.update(optimizer="other.Muon"), r"a state of other\.Muon, not of hostward"),
    "a parameter too many": (
        lambda s: s["state"].update({"x": dict(s["state"]["head.weight"])}),
        "holds 1 parameters that this optimizer does not have: x",
    ),
    "other format": (lambda s: s.update(format=2), "not an optimizer state of hostward"),
    "no state": (_without("state"), "incomplete"),
    "no groups": (_without("param_groups"), "incomplete"),
    "groups of another kind": (lambda s: s.update(param_groups={}), "incomplete"),
    "a group without names": (lambda s: s["param_groups"][0].pop("params"), "incomplete"),
    "a group with numbers": (lambda s: s["param_groups"][0].update(params=[0, 1]), "incomplete"),
    "a group of a number": (lambda s: s["param_groups"][0].update(params=3), "incomplete"),
    "state by number": (lambda s: s["state"].update({0: {}}), "incomplete"),
    "another name": (lambda s: s["param_groups"][0]["params"].append("x"), "not those of this optimizer"),
    "a parameter missing": (lambda s: s["state"].pop("head.weight"), "no step/exp_avg/exp_avg_sq/master for"),
    "a role missing": (lambda s: s["state"]["head.weight"].pop("master"), r"for parameter 'head\.weight'"),
    "other shape": (_edit("head.weight", "exp_avg", torch.zeros(100, 90)), r"\(100, 90\).*expected.*\(90, 100\)"),
    "other dtype": (_edit("head.weight", "master", torch.zeros(90, 100).bfloat16()), "bfloat16"),
    "not a tensor": (_edit("head.weight", "exp_avg", [0.0]), "exp_avg of parameter 'head.weight'"),
    "on no device": (_edit("head.weight", "exp_avg", torch.zeros(90, 100, device="meta")), "no plain dense tensor"),
    "sparse": (_edit("head.weight", "exp_avg_sq", torch.zeros(90, 100).to_sparse()), "no plain dense tensor"),
    "a negative view": (
        _edit("head.weight", "master", torch.zeros(90, 100, dtype=torch.complex64).conj().imag),
        "no plain dense tensor",
    ),
    "step of floats": (_edit("head.weight", "step", torch.tensor(1.5)), "step of parameter 'head.weight'"),
    "a step on no device": (
        _edit("head.weight", "step", torch.tensor(1, device="meta")),
        "step of parameter 'head.weight' is .*meta",
    ),
    "negative step": (_edit("head.weight", "step", torch.tensor(-1)), "step of parameter 'head.weight'"),
    "bad lr": (lambda s: s["param_groups"][0].update(lr=float("nan")), "unusable"),
    "bad betas": (lambda s: s["param_groups"][0].update(betas=[0.9]), "unusable"),
    "no betas": (lambda s: s["param_groups"][0].update(betas=None), "unusable"),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(fraction: float, case: str) -> None:
    state = trained(torch.bfloat16, 0.5)[1].state_dict()
    damage, text = BROKEN[case]
    state["param_groups"][0]["lr"] = 0.77
    damage(state)
    model = Model(torch.bfloat16, seed=4)
    optimizer = adamw(model, offload_fraction=fraction)
    before, groups = snapshot(model, optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(CheckpointError, match=text):
        optimizer.load_state_dict(state)
    assert_equal(before, snapshot(model, optimizer))
    assert optimizer.state_dict()["param_groups"] == groups


@pytest.mark.parametrize(("saved", "loaded"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_state_of_another_weight_dtype(saved: torch.dtype, loaded: torch.dtype) -> None:
    """fp32 states have no masters: refused. Masters beside fp32 weights are not needed: moments and counts load."""
    source = trained(saved, 0.5)[1]
    model = Model(loaded)
    target = adamw(model)
    if saved is torch.float32:
        with pytest.raises(CheckpointError, match="master"):
            target.load_state_dict(source.state_dict())
        return
    target.load_state_dict(source.state_dict())
    mine, theirs = target.state_dict()["state"]["head.weight"], source.state_dict()["state"]["head.weight"]
    assert_equal(mine, {role: theirs[role] for role in mine})


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_copies_and_pickles_are_refused(make: Callable[[object], object]) -> None:
    with pytest.raises(ModelError, match="cannot be copied or pickled") as caught:
        make(adamw(Model()))
    assert "state_dict()" in caught.value.fix


@pytest.mark.parametrize("fraction", PLACES)
def test_hdo_h12_the_optimizer_and_its_slabs_go_without_the_garbage_collector(fraction: float) -> None:
    adamw(Model())  # the first optimizer of a process imports torch's compiler, whose frames refer to each other
    gc.collect()
    gc.disable()
    try:
        model = Model(torch.bfloat16)
        optimizer = adamw(model, offload_fraction=fraction)
        model.load_state_dict(model.state_dict())
        go_on(model, optimizer, 0)
        optimizer.load_state_dict(optimizer.state_dict())
        alive = [weakref.ref(optimizer), *(weakref.ref(s.exp_avg.data) for s in optimizer._states)]
        del optimizer  # what the model keeps, hooks and placeholders in .grad, holds nothing of it
        assert [ref() for ref in alive] == [None] * len(alive)
    finally:
        gc.enable()


@pytest.mark.parametrize("fraction", PLACES)
def test_there_and_back_through_torch_adamw(fraction: float) -> None:
    model, optimizer = trained(torch.bfloat16, fraction)
    state = optimizer.state_dict()
    torch_state, masters = to_torch_adamw(copy.deepcopy(state))
    other = Model(torch.float32)
    with torch.no_grad():
        for name, p in other.named_parameters():
            p.copy_(masters[name])
    plain = torch.optim.AdamW(other.named_parameters())
    plain.load_state_dict(torch_state)
    back = from_torch_adamw(plain.state_dict(), masters={n: p.detach() for n, p in other.named_parameters()})
    again = Model(torch.bfloat16, seed=2)
    resumed = adamw(again, offload_fraction=1 - fraction, max_grad_norm=2.0)
    resumed.load_state_dict(back)
    for m, o in ((model, optimizer), (again, resumed)):
        go_on(m, o, 3)
    assert_equal(snapshot(model, optimizer), snapshot(again, resumed))


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 70), max_size=3).map(tuple), min_size=1, max_size=8),
    dtype=st.sampled_from(DTYPES),
    saved_at=st.floats(0, 1),
    loaded_at=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_any_shapes_and_fractions(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, saved_at: float, loaded_at: float, seed: int
) -> None:
    """Train, save, go on elsewhere: equal to going on in place, which is equal to fraction 0."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    grads = [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(3)]
    used = torch.rand(3, len(shapes), generator=generator) < 0.8

    def make(fraction: float) -> tuple[hostward.AdamW, list[torch.nn.Parameter]]:
        parameters = [torch.nn.Parameter(v.clone()) for v in values]
        named = [(f"layers.{i // 3}.p{i}", p) for i, p in enumerate(parameters)]
        return adamw(named, offload_fraction=fraction, max_grad_norm=1.0, backend=backend(seed)), parameters

    def steps(optimizer: hostward.AdamW, parameters: list[torch.nn.Parameter], which: range) -> None:
        for step in which:
            for p, g, has in zip(parameters, grads[step], used[step], strict=True):
                p.grad = g.clone() if has else None
            optimizer.step()

    def all_of(optimizer: hostward.AdamW, parameters: list[torch.nn.Parameter]) -> dict[str, torch.Tensor]:
        entries = optimizer.state_dict()["state"].items()
        state = {f"{role} {name}": value for name, entry in entries for role, value in entry.items()}
        return state | {str(i): p.detach().clone() for i, p in enumerate(parameters)}

    base, first, second = make(0.0), make(saved_at), make(loaded_at)
    steps(*base, range(3))
    steps(*first, range(2))
    with torch.no_grad():
        for p, q in zip(second[1], first[1], strict=True):
            p.copy_(q)
    second[0].load_state_dict(first[0].state_dict())
    steps(*first, range(2, 3))
    steps(*second, range(2, 3))
    assert_equal(all_of(*base), all_of(*first))
    assert_equal(all_of(*base), all_of(*second))


def test_the_inventory_covers_every_element_once() -> None:
    inventory = adamw(Model()).inventory
    assert isinstance(inventory, Inventory)
    assert sum(b.numel for b in inventory.buckets) == inventory.numel


# ---------------------------------------------------------------- bytes


def state_bytes(dtype: torch.dtype) -> int:
    numel = sum(p.numel() for p in Model(dtype).parameters())
    return numel * (8 if dtype is torch.float32 else 12)


def own_bytes(state: dict[str, Any], optimizer: hostward.AdamW) -> int:
    """Bytes of a state dict that do not lie in the optimizer's own memory; step counts left out."""
    slabs = {b.data.untyped_storage().data_ptr() for s in optimizer._states for b in s.buffers()}
    tensors = [v for entry in state["state"].values() for role, v in entry.items() if role != "step"]
    return sum(v.nbytes for v in tensors if v.numel() and v.untyped_storage().data_ptr() not in slabs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fraction", PLACES)
def test_views_of_the_state_hold_the_same_in_fewer_bytes(fraction: float, dtype: torch.dtype) -> None:
    _, optimizer = trained(dtype, fraction)
    copies, views = optimizer.state_dict(), optimizer.state_dict(copy=False)
    assert copies["param_groups"] == views["param_groups"]
    for name, entry in copies["state"].items():
        assert_equal(entry, views["state"][name])
    assert own_bytes(copies, optimizer) == state_bytes(dtype)
    masters = sum(entry["master"].nbytes for entry in views["state"].values() if "master" in entry)
    straddling = 2 * 4 * 300 * 256 if 0 < fraction < 1 else 0  # the split embedding lies on two sides
    assert masters <= own_bytes(views, optimizer) <= masters + straddling


def test_views_change_with_the_next_step_and_copies_do_not() -> None:
    model, optimizer = trained(torch.bfloat16, 1.0)
    copies, views = (optimizer.state_dict(copy=copy)["state"]["head.weight"] for copy in (True, False))
    before = copies["exp_avg"].clone()
    go_on(model, optimizer, 3)
    optimizer.wait()
    assert torch.equal(copies["exp_avg"], before)
    assert not torch.equal(views["exp_avg"], before)


def test_the_memory_for_copies_is_asked_for_before_the_first_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = trained(torch.bfloat16, 0.5)
    needed = state_bytes(torch.bfloat16)
    small = HostMemory(2 * needed, needed - 1, "the container's cgroup")
    monkeypatch.setattr(pinned_memory, "host_memory", lambda: small)
    with pytest.raises(MemoryLimitError, match=f"a copy of the optimizer state: {needed:,} bytes"):
        optimizer.state_dict()
    optimizer.state_dict(copy=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("fraction", PLACES)
def test_masters_of_several_parts(
    fraction: float, transposed: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that end inside a range, at its end and behind it; weights that are not contiguous."""
    monkeypatch.setattr(state_dict, "_PART_ELEMENTS", 1000)

    def make(seed: int) -> tuple[torch.nn.Parameter, hostward.AdamW]:
        value = torch.randn(300, 230, generator=torch.Generator().manual_seed(seed)).to(dtype)
        parameter = torch.nn.Parameter(value.t() if transposed else value)
        return parameter, adamw([("w", parameter)], offload_fraction=fraction)

    source, optimizer = make(0)
    source.grad = torch.ones_like(source)
    optimizer.step()
    optimizer.wait()
    state = optimizer.state_dict()
    master = state["state"]["w"]["master"]
    assert torch.equal(rounded(master, dtype), source.detach())
    assert not torch.equal(master, source.detach().float())
    target, other = make(1)
    other.load_state_dict(state)
    assert same_bits(target.detach(), source.detach())
    assert_equal(other.state_dict()["state"]["w"], state["state"]["w"])
    with torch.no_grad():
        target.view(-1)[-1:].zero_() if not transposed else target[-1, -1].zero_()
    other.load_state_dict(state)  # one element of the last part differs
    assert same_bits(target.detach(), source.detach())
