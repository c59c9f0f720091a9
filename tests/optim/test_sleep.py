"""Sleep: device memory goes to the host and comes back, and training goes on with the bits of a run that never slept.

Seen red: with each wait of the two copies left out (below), with addresses of before, with masters taken anew from
weights that merely lie elsewhere, with `.grad` that is not put back, with staging buffers that count as filled, with
backward refused at the first stand-in alone, with weights compared after their memory was retired, with FP8 moments
that numpy had read in place, with a weight in shared memory that torch calls resizable,
with another optimizer made over weights that sleep, which torch refused, with weights taken to be where they were
because something else is there.
"""

from __future__ import annotations

import copy
import functools
import gc
import runpy
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import LATEST, MIXES, Net, loss_of, make
from optimizer_cases import FRACTIONS, LATE_SUBSETS, assert_equal, snapshot

import hostward
from hostward.checkpoint import api
from hostward.errors import AsleepError, ConfigError, MemoryLimitError, ModelError, OrderingError
from hostward.model.fence import without_functions
from hostward.optim import sleeping
from hostward.runtime.backend import Tier
from hostward.runtime.simulated.backend import Order, SimulatedBackend
from hostward.schedule.ops import Lane

ALL = ("state", "gradients", "weights")
MOMENTS = ("start", "between microbatches", "before the step", "after the step")
BF16 = torch.bfloat16


def nap(optimizer: hostward.AdamW, kinds: Collection[str] = ALL) -> None:
    """Asleep and awake again, each asked for twice."""
    slabs = [optimizer.sleep(kinds).pinned_bytes, optimizer.sleep(kinds).pinned_bytes]
    assert set(optimizer.asleep) == set(kinds)
    assert slabs[0] == slabs[1]
    optimizer.wake()
    optimizer.wake()
    assert optimizer.asleep == ()


def train(
    moments: Collection[str] = (),
    kinds: Collection[str] = ALL,
    mix: str = "mixed",
    order: Order | None = None,
    steps: int = 2,
    dtype: torch.dtype = BF16,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Norms, losses, weights and state after some steps of two microbatches, with a nap at these moments."""
    model, optimizer = make(mix, dtype, order, grad_dtype=torch.float32, **options)
    found = {}

    def at(moment: str) -> None:
        if moment in moments:
            nap(optimizer, kinds)

    at("start")
    for step in range(steps):
        for i in range(2):
            with optimizer.accumulate(last=i == 1):
                loss = loss_of(model, 10 * step + i)
                loss.backward()
            found[f"loss {step} {i}"] = loss.detach().clone()
            at(MOMENTS[1 + i])
        optimizer.step()
        at("after the step")
        found[f"norm {step}"] = torch.tensor(optimizer.grad_norm)
        optimizer.zero_grad()
    return found | snapshot(model, optimizer)


@functools.cache
def awake(dtype: torch.dtype = BF16, gradients: str = "device") -> dict[str, torch.Tensor]:
    return train(mix="host", dtype=dtype, gradients=gradients)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("moment", [*MOMENTS, MOMENTS])
def test_bits_are_those_of_a_run_that_never_slept(mix: str, moment: str | tuple[str, ...]) -> None:
    moments = (moment,) if isinstance(moment, str) else moment
    assert_equal(train(moments, mix=mix, order=LATEST), awake())


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("streamed", [0.0, 1.0])
def test_at_every_fraction(fraction: float, streamed: float) -> None:
    mixed = {"offload_fraction": fraction, "streamed_fraction": streamed}
    assert_equal(train(MOMENTS, order=LATEST, **mixed), awake())


@pytest.mark.parametrize("late", LATE_SUBSETS, ids=lambda late: "+".join(sorted(late)) or "none")
def test_in_every_late_order(late: frozenset[Lane]) -> None:
    assert_equal(train(MOMENTS, order=Order(late=late)), awake())


@pytest.mark.parametrize("kinds", [("state",), ("gradients",), ("weights",), ("state", "gradients")])
def test_one_kind_alone(kinds: Sequence[str]) -> None:
    assert_equal(train(MOMENTS, kinds, mix="device", order=LATEST), awake())


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": False},
        {"gradients": "host"},
        {"fence": False},
        {"dtype": torch.float32},
        {"dtype": torch.float32, "overlap": False, "mix": "device"},
    ],
    ids=str,
)
def test_with_other_options(options: dict[str, Any]) -> None:
    expected = train(**options) if "gradients" in options else awake(options.get("dtype", BF16))
    assert_equal(train(MOMENTS, order=LATEST, **options), expected)


# What each wait is for: without it the simulated device says so, or the bits are poison.


class _WithoutWaits(SimulatedBackend):
    """Leaves the waits out of one operation of sleep."""

    careless = ""

    def copy(self, lane: Lane, pairs: Any, *, name: str, waits: Any = (), done: Any = None) -> Any:
        return super().copy(lane, pairs, name=name, waits=() if name == self.careless else waits, done=done)

    def retire(self, buffers: Any, lane: Lane, *, waits: Any = (), done: Any = None) -> Any:
        asleep = self.careless == "retire" and buffers and buffers[0].owner == "asleep"
        return super().retire(buffers, lane, waits=() if asleep else waits, done=done)


@pytest.mark.parametrize("careless", ["offload/d2h/sleep", "retire", "offload/h2d/wake"])
def test_a_copy_without_its_wait_is_found(careless: str) -> None:
    backend = _WithoutWaits(threads=1, order=LATEST)
    model = Net(BF16)
    optimizer = hostward.AdamW(model, backend=backend)
    nap(optimizer)
    backend.careless = careless
    with pytest.raises(OrderingError, match="asleep"):
        nap(optimizer)
    del model


@pytest.mark.parametrize("going", [True, False], ids=["to sleep", "awake"])
def test_the_host_waits_for_both_copies(going: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that, memory is freed while it is copied; here it is overwritten, where a GPU would lend it to others."""
    model, optimizer = make("device", BF16, LATEST)
    backend = optimizer.backend
    before = snapshot(model, optimizer)
    resize = torch.UntypedStorage.resize_
    if going:
        optimizer.sleep(("gradients",))
        monkeypatch.setattr(backend, "wait", lambda _: None)
        monkeypatch.setattr(torch.UntypedStorage, "resize_", _overwrite)
        optimizer.sleep(("state",))
        monkeypatch.undo()
        optimizer.wake()
    else:
        optimizer.sleep(("state",))
        monkeypatch.setattr(backend, "wait", lambda _: None)
        monkeypatch.setattr(backend, "synchronise", lambda: None)
        optimizer.wake()
    now = {name: state.exp_avg.data.clone() for name, state in enumerate(optimizer._states)}
    monkeypatch.undo()
    assert torch.UntypedStorage.resize_ is resize
    assert any(not torch.equal(moment, torch.zeros_like(moment)) for moment in now.values())
    del before


def _overwrite(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
    return storage.fill_(255) if nbytes == 0 else storage


# What is freed, what stays, and what is kept.


def test_the_report_counts_what_left_the_device() -> None:
    model, optimizer = make("device", BF16)
    loss_of(model, 0).backward()
    weights = sum(p.nbytes for p in model.parameters())
    state_bytes = optimizer.plan.state_bytes
    held = optimizer.backend.ledger.total_bytes(Tier.DEVICE)
    report = optimizer.sleep()
    assert report.stays == ()
    assert report.freed_bytes["weights"] == report.freed_bytes["gradients"] == weights
    assert report.freed_bytes["state"] >= state_bytes
    freed = report.freed_bytes["state"] + weights
    assert optimizer.backend.ledger.total_bytes(Tier.DEVICE) == held - freed
    with without_functions():
        assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == 0
    assert report.pinned_now_bytes == report.pinned_bytes >= freed + weights
    assert "weights" in report.explain()
    optimizer.wake()
    assert optimizer.backend.ledger.total_bytes(Tier.DEVICE) == held
    for kinds in (ALL, ("weights",), ("gradients", "weights"), ALL):  # the pinned memory is used for whatever comes
        again = optimizer.sleep(kinds)
        assert (again.pinned_bytes, again.pinned_now_bytes) == (report.pinned_bytes, 0)
        optimizer.wake()


def test_parameters_gradients_and_views_are_the_same_objects_afterwards() -> None:
    model, optimizer = make("device", torch.float32)
    loss_of(model, 0).backward()
    weight, gradient = model.head.weight, model.head.weight.grad
    value, version = weight.detach().clone(), weight._version
    optimizer.sleep()
    with pytest.raises(AsleepError, match="wake"):
        model.head.weight.grad.sum()  # type: ignore[union-attr]
    with pytest.raises(AsleepError, match="wake"):
        torch._foreach_zero_([p.grad for p in model.parameters() if p.grad is not None])
    optimizer.wake()
    assert model.head.weight is weight
    assert weight.grad is gradient
    assert weight._version == version
    assert torch.equal(weight, value)
    buffers = [b for state in optimizer._states for b in state.buffers()]
    assert all(buffer.address == buffer.data.data_ptr() for buffer in buffers)  # a GPU copies from and to addresses
    optimizer.zero_grad()
    with optimizer.accumulate(last=True):
        loss_of(model, 1).backward()
    taken = [b for each in optimizer._executor._gradients for b in each if b.data.numel()]
    nap(optimizer)
    assert taken
    assert all(buffer.address == buffer.data.data_ptr() for buffer in taken)


@pytest.mark.parametrize("mix", MIXES)
def test_weights_in_other_memory_where_theirs_was_before_are_stepped(mix: str) -> None:
    """What is allocated while weights are asleep lies where they were, and a program may make it their memory."""
    results = []
    for asleep in (False, True):
        model, optimizer = make(mix, BF16)
        for step in range(2):
            loss_of(model, step).backward()
            if step == 1:
                others = while_asleep(model, optimizer) if asleep else {}
                assert bool(others) is asleep
                for name, p in model.named_parameters():
                    p.data = others.get(name, torch.empty_like(p.data)).copy_(p.data)
            optimizer.step()
            optimizer.zero_grad()
        results.append(snapshot(model, optimizer))
    assert_equal(*results)


def while_asleep(model: Net, optimizer: hostward.AdamW) -> dict[str, torch.Tensor]:
    """Tensors like weights, made while these were asleep, that lie where the weights were before."""
    before = {p.data_ptr(): (name, p) for name, p in model.named_parameters()}
    random = torch.Generator().manual_seed(0)
    for _ in range(100):  # it is the allocator that decides
        optimizer.sleep()
        made: list[torch.Tensor] = []
        for i in torch.randperm(len(before), generator=random).tolist():
            _, p = list(before.values())[i]
            made += [torch.empty_like(p, requires_grad=False) for _ in range(2 * i)]
        optimizer.wake()
        there = {t.data_ptr(): t for t in made}
        found = {name: there[at] for at, (name, p) in before.items() if at in there and there[at].shape == p.shape}
        if found:
            return found
    return {}


def test_what_other_code_holds_stays_and_is_named() -> None:
    model, optimizer = make("device", torch.float32)
    view, kept = model.head.weight.detach()[1:], model.norm.bias.data
    loss = loss_of(model, 0)  # the graph has saved weights
    model.blocks[0].norm.weight.data = torch.ones(64)[:32]  # a part of something larger
    report = optimizer.sleep()
    why = {stays.name: stays.why for stays in report.stays}
    assert all("other code" in why[name] for name in ("head.weight", "norm.bias", "blocks.1.up.weight"))
    assert "larger buffer" in why["blocks.0.norm.weight"]
    assert "head.weight" in report.explain()
    assert torch.isfinite(view).all()
    assert torch.isfinite(kept).all()
    optimizer.wake()
    loss.backward()
    del loss, view, kept
    gc.collect()
    assert {stays.name for stays in optimizer.sleep().stays} == {"blocks.0.norm.weight"}
    optimizer.wake()
    optimizer.step()


def test_frozen_and_tied_weights_leave_too() -> None:
    model = Net(BF16)
    model.blocks[0].requires_grad_(False)
    model.blocks[2].up.weight = model.blocks[1].up.weight  # one parameter in two places
    backend = SimulatedBackend(threads=1, order=LATEST)
    optimizer = hostward.AdamW(model, lr=1e-2, backend=backend)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = optimizer.sleep(("weights",))
    assert report.stays == ()
    assert report.freed_bytes == {"weights": sum(p.nbytes for p in before.values())}
    with pytest.raises(AsleepError):
        model.blocks[0].up.weight.sum()
    optimizer.wake()
    assert_equal(dict(model.named_parameters()), before)


def test_a_budget_frees_at_least_that_and_no_more_than_it_needs() -> None:
    model, optimizer = make("device", torch.float32)
    whole = optimizer.plan.state_bytes
    report = optimizer.sleep(device_bytes=whole // 4)
    assert whole // 4 <= sum(report.freed_bytes.values()) < whole
    assert optimizer.asleep == tuple(report.freed_bytes) == ("state",)
    assert {stays.kind for stays in report.stays} == {"state", "weights"}
    with torch.no_grad():
        loss_of(model, 1)  # weights are awake
    more = optimizer.sleep(device_bytes="1KiB")
    assert more.freed_bytes
    optimizer.sleep()
    optimizer.wake()
    with pytest.raises(MemoryLimitError, match="can leave the device"):
        optimizer.sleep(device_bytes=2**40)
    assert optimizer.asleep == ()
    loss_of(model, 0).backward()
    optimizer.step()


# What is refused, and what works meanwhile.


def _backward(model: Net, optimizer: hostward.AdamW) -> None:
    loss_of(model, 1).backward()


USES: dict[str, tuple[str, Callable[[Net, hostward.AdamW, Path], object]]] = {
    "forward": ("weights", lambda m, o, _: loss_of(m, 1)),
    "a weight": ("weights", lambda m, o, _: m.head.weight.sum()),
    "a weight's address": ("weights", lambda m, o, _: m.head.weight.data_ptr()),
    ".data": ("weights", lambda m, o, _: m.head.weight.data),
    "a copy of the model": ("weights", lambda m, o, _: copy.deepcopy(m)),
    "weights' state dict": ("weights", lambda m, o, _: m.state_dict()),
    "weights loaded": ("weights", lambda m, o, _: m.load_state_dict(Net().state_dict())),
    "attach": ("weights", lambda m, o, _: hostward.attach(m, o, weights=1, layers=list(m.blocks))),
    "weights waited for": ("weights", lambda m, o, _: o.wait_for_weights()),
    "the step": ("state", lambda m, o, _: o.step()),
    "the state dict": ("state", lambda m, o, _: o.state_dict()),
    "state loaded": ("state", lambda m, o, _: o.load_state_dict({})),
    "a checkpoint": ("state", lambda m, o, _: api.parts_of(m, o)),
    "reseed": ("state", lambda m, o, _: o.reseed()),
    "another group": ("state", lambda m, o, _: o.add_param_group({"params": []})),
    "backward": ("gradients", lambda m, o, _: _backward(m, o)),
    "a microbatch": ("gradients", lambda m, o, _: o.accumulate(last=True).__enter__()),
    "a gradient taken": ("gradients", lambda m, o, _: o.take_gradient("norm.bias", torch.zeros(32))),
    "the step with them": ("gradients", lambda m, o, _: o.step()),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("fence", [True, False])
def test_what_needs_them_is_refused_and_works_after_wake(use: str, fence: bool, tmp_path: Path) -> None:
    kind, call = USES[use]
    model, optimizer = make("mixed", torch.float32, fence=fence)
    loss_of(model, 0).backward()
    optimizer.sleep((kind,))
    with pytest.raises(AsleepError, match=r"optimizer\.wake\(\)"):
        call(model, optimizer, tmp_path)
    optimizer.wake()
    optimizer.step()
    assert_equal(snapshot(model, optimizer), _one_step())


@functools.cache
def _one_step() -> dict[str, torch.Tensor]:
    model, optimizer = make("mixed", torch.float32)
    loss_of(model, 0).backward()
    optimizer.step()
    return snapshot(model, optimizer)


@pytest.mark.parametrize("overlap", [True, False])
def test_backward_is_refused_before_it_adds_to_any_gradient(overlap: bool) -> None:
    """Also where there is no gradient that could be asleep, or the one that backward makes first has stayed."""

    def trained(*, asleep: bool) -> dict[str, torch.Tensor]:
        model, optimizer = make("mixed", torch.float32, overlap=overlap)
        for step in range(3):
            held = None
            if step:
                loss_of(model, 10 + step).backward()
                held = model.head.bias.grad if step == 2 else None
                if step == 1:
                    optimizer.step()
                    optimizer.zero_grad()
            view = None if held is None else held[1:]
            if asleep:
                optimizer.sleep(("gradients",))
                with pytest.raises(AsleepError, match=r"optimizer\.wake\(\)"):
                    loss_of(model, step).backward()
                optimizer.wake()
            del view
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model, optimizer)

    assert_equal(trained(asleep=True), trained(asleep=False))


@pytest.mark.parametrize("mix", ["device", "mixed"])
def test_fp8_moments_sleep_after_they_were_read(mix: str) -> None:
    model, optimizer = make(mix, BF16, state_dtypes={"exp_avg": torch.uint8, "exp_avg_sq": torch.uint8})
    loss_of(model, 0).backward()
    optimizer.step()
    before = snapshot(model, optimizer)
    assert optimizer.sleep(("state",)).stays == ()
    optimizer.wake()
    assert_equal(snapshot(model, optimizer), before)


def test_state_that_numpy_shares_stays_and_is_named() -> None:
    model, optimizer = make("device", torch.float32)
    buffer = optimizer._states[0].exp_avg
    shared = buffer.data.numpy()
    stays = {stays.name: stays.why for stays in optimizer.sleep().stays}
    assert "numpy" in stays[buffer.owner]
    assert (shared == 0).all()
    optimizer.wake()
    loss_of(model, 0).backward()
    optimizer.step()
    assert_equal(snapshot(model, optimizer), _one_step())


def test_a_weight_that_another_process_shares_stays_and_is_named() -> None:
    model, optimizer = make("device", torch.float32)
    name, weight = next(iter(model.named_parameters()))
    weight.share_memory_()  # type: ignore[operator]
    stays = {stays.name: stays.why for stays in optimizer.sleep().stays}
    assert "another process" in stays[name]
    optimizer.wake()
    loss_of(model, 0).backward()
    optimizer.step()
    assert_equal(snapshot(model, optimizer), _one_step())


def test_weights_known_by_their_bits_keep_their_main_weights() -> None:
    """They were read by their addresses, so nothing else tells whether they were written."""
    model, optimizer = make("device", BF16)
    loss_of(model, 0).backward()
    optimizer.step()
    addresses = [p.data_ptr() for p in model.parameters()]
    before = snapshot(model, optimizer)
    nap(optimizer)
    assert_equal(snapshot(model, optimizer), before)
    assert addresses


def test_the_model_generates_while_state_and_gradients_are_asleep() -> None:
    model, optimizer = make("device", torch.float32)
    loss_of(model, 0).backward()
    optimizer.sleep(("state", "gradients"))
    with torch.no_grad():
        assert loss_of(model, 1).isfinite()
    model.load_state_dict(model.state_dict())
    optimizer.wake(("gradients",))
    assert optimizer.asleep == ("state",)
    optimizer.wake(("state",))
    optimizer.step()
    assert_equal(snapshot(model, optimizer), _one_step())


def test_weights_written_while_state_sleeps_are_followed() -> None:
    def trained(*, asleep: bool) -> dict[str, torch.Tensor]:
        model, optimizer = make("device", BF16)
        loss_of(model, 0).backward()
        optimizer.step()
        if asleep:
            optimizer.sleep(("state",))
        with torch.no_grad():
            model.head.weight.mul_(1.5)
        if asleep:
            optimizer.sleep(("weights",))
            optimizer.wake()
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        optimizer.step()
        return snapshot(model, optimizer)

    assert_equal(trained(asleep=True), trained(asleep=False))


def test_another_optimizer_over_weights_that_sleep_is_refused() -> None:
    model, optimizer = make("mixed", BF16)
    optimizer.sleep()
    with pytest.raises(ModelError, match=r"(?s)'[\w.]+' has no memory on cpu.*wake\(\) that optimizer"):
        hostward.AdamW(model, offload_fraction=1.0)
    optimizer.wake()
    hostward.AdamW(model, offload_fraction=1.0)


def test_gradients_that_are_cleared_asleep_do_not_come_back() -> None:
    model, optimizer = make("device", torch.float32, overlap=False)
    loss_of(model, 0).backward()
    optimizer.sleep()
    optimizer.zero_grad()
    optimizer.wake()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("mix", ["mixed", "device"])
def test_after_an_error_in_backward(mix: str) -> None:
    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("in backward")

    model, optimizer = make(mix, torch.float32, LATEST)
    handle = model.blocks[0].down.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="in backward"), optimizer.accumulate(last=True):
        loss_of(model, 5).backward()
    handle.remove()
    nap(optimizer)
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    optimizer.step()
    assert_equal(snapshot(model, optimizer), _one_step())


def test_offloaded_weights_stay_where_they_are() -> None:
    def trained(*, asleep: bool) -> dict[str, torch.Tensor]:
        model, optimizer = make("host", torch.float32, LATEST)
        run = hostward.attach(model, optimizer, weights=hostward.Weights(min_elements=0), layers=list(model.blocks))
        for step in range(2):
            loss_of(model, step).backward()
            if asleep:
                report = optimizer.sleep()
                assert report.stays == ()
                assert run.report().weights.here_bytes == 0  # type: ignore[union-attr]
                with pytest.raises(AsleepError):
                    loss_of(model, 9)
                with pytest.raises(AsleepError):
                    model.blocks[0].up.weight.sum()
                with pytest.raises(AsleepError):
                    run.detach()
                assert run.report().weights.here_bytes == 0  # type: ignore[union-attr]
                optimizer.wake()
            optimizer.step()
            optimizer.zero_grad()
        run.detach()
        return snapshot(model, optimizer)

    assert_equal(trained(asleep=True), trained(asleep=False))


@pytest.mark.parametrize("together_bytes", [1, 1 << 30])
def test_no_room_on_the_device_leaves_everything_asleep(together_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first copies may be under way. Seen red: memory freed before they ended."""
    monkeypatch.setattr(sleeping, "COPIED_TOGETHER_BYTES", together_bytes)
    model, optimizer = make("device", torch.float32)
    loss_of(model, 0).backward()
    optimizer.sleep()
    resize, left = torch.UntypedStorage.resize_, 3

    def full(storage: torch.UntypedStorage, nbytes: int) -> Any:
        nonlocal left
        left -= nbytes > 0
        if left < 0 and nbytes:
            raise torch.OutOfMemoryError("no room")
        return resize(storage, nbytes)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", full)
    with pytest.raises(MemoryLimitError, match="call wake\\(\\) again"):
        optimizer.wake()
    assert optimizer.asleep == ALL
    with without_functions():
        assert not any(p.untyped_storage().nbytes() for p in model.parameters())
    left = 10**9
    optimizer.wake()
    optimizer.step()
    assert_equal(snapshot(model, optimizer), _one_step())


def test_an_interrupt_while_waking_leaves_everything_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: memory that stayed taken, and copies of the next wake() that did not wait for those under way."""
    monkeypatch.setattr(sleeping, "COPIED_TOGETHER_BYTES", 1)
    model, optimizer = make("device", torch.float32)
    loss_of(model, 0).backward()
    optimizer.sleep()
    copy, left = optimizer.backend.copy, 3

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return copy(*args, **kwargs)

    monkeypatch.setattr(optimizer.backend, "copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.wake()
    assert optimizer.asleep == ALL
    with without_functions():
        assert not any(p.untyped_storage().nbytes() for p in model.parameters())
    left = 10**9
    optimizer.wake()
    optimizer.step()
    assert_equal(snapshot(model, optimizer), _one_step())


def _goes_on_after_an_interrupt(
    going: bool, patched: Callable[[hostward.AdamW], tuple[object, str]], n: int, *, again: bool = False
) -> None:
    """Interrupt `sleep` (going) or `wake` after the n-th call of what is patched; then `wake` makes it whole.

    `again`: `sleep` is called once more before.
    """

    def trained(interrupted: bool) -> dict[str, torch.Tensor]:
        model, optimizer = make("mixed", BF16)
        loss_of(model, 0).backward()
        optimizer.step()
        loss_of(model, 1).backward()
        if interrupted:
            held = optimizer.backend.ledger.total_bytes(Tier.DEVICE)
            if not going:
                optimizer.sleep()
            with pytest.MonkeyPatch.context() as patch:
                _interrupt_after(patch, *patched(optimizer), n)
                with pytest.raises(KeyboardInterrupt):
                    optimizer.sleep() if going else optimizer.wake()
            if again:
                optimizer.sleep()
                with pytest.raises(AsleepError):
                    model.head.weight.sum()
            for _ in range(2):
                optimizer.wake()
                assert optimizer.backend.ledger.total_bytes(Tier.DEVICE) == held
                optimizer.sleep()
            optimizer.wake()
        optimizer.step()
        return snapshot(model, optimizer)

    assert_equal(trained(interrupted=True), trained(interrupted=False))


def _interrupt_after(patch: pytest.MonkeyPatch, owner: object, name: str, n: int) -> None:
    call, calls = getattr(owner, name), []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        calls.append(name)
        if len(calls) == n:
            raise KeyboardInterrupt
        return result

    patch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("name", "n"), [("wait", 1), ("wait", 2), ("_copy_out", 1), ("_stand_in", 1)])
def test_an_interrupted_sleep_has_lost_nothing(name: str, n: int, again: bool) -> None:
    """Seen red: device memory overwritten while what was copied of it was dropped, or copied once more."""
    _goes_on_after_an_interrupt(True, lambda o: (o.backend if name == "wait" else o._sleeper, name), n, again=again)


@pytest.mark.parametrize("step", ["_bring_back", "_settle", "woken", "relocated"])
def test_wake_does_what_an_interrupted_one_has_left_undone(step: str) -> None:
    """Seen red: gradients that were not put back, addresses of before, main weights taken anew from weights."""

    def patched(optimizer: hostward.AdamW) -> tuple[object, str]:
        parts = optimizer._parts_of_sleep()
        return {"woken": parts.executor, "relocated": parts.watch}.get(step, optimizer._sleeper), step

    _goes_on_after_an_interrupt(False, patched, 1)


def test_no_room_on_the_host_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make("device", torch.float32)
    loss_of(model, 0).backward()

    def full(*_: object, **__: object) -> Any:
        raise MemoryLimitError("the host is full")

    monkeypatch.setattr(optimizer.backend, "allocate", full)
    with pytest.raises(MemoryLimitError, match="device_bytes"):
        optimizer.sleep()
    monkeypatch.undo()
    assert optimizer.asleep == ()
    optimizer.step()
    assert_equal(snapshot(model, optimizer), _one_step())


def test_what_cannot_be_meant_raises() -> None:
    model, optimizer = make("mixed", torch.float32)
    for kinds in ("state", (), ("stat",), None):
        with pytest.raises(ConfigError, match="state, gradients, weights"):
            optimizer.sleep(kinds)  # type: ignore[arg-type]
    for budget in (0, -1, True, 1.5):
        with pytest.raises(ConfigError, match="device_bytes"):
            optimizer.sleep(device_bytes=budget)  # type: ignore[arg-type]
    manual = hostward.AdamW(Net(), backend=SimulatedBackend(threads=1), waits="manual")
    with pytest.raises(ModelError, match="buffers of their owner"):
        manual.sleep()
    nap(manual, ("state",))
    handle = model.head.weight.register_hook(lambda _: optimizer.sleep() and None)
    with pytest.raises(ModelError, match="inside backward"):
        loss_of(model, 0).backward()
    handle.remove()
    optimizer._executor.read_by_graph = True
    with pytest.raises(ModelError, match="CUDA graph"):
        optimizer.sleep(("weights",))
    nap(optimizer, ("state",))
    del model


def test_the_example() -> None:
    """Learns what is rewarded, asleep between all steps."""
    ended = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "sleeping_loop.py"))
    assert ended["rewards"][0] < 0.2
    assert ended["rewards"][-1] > 0.8
    assert ended["report"].stays == ()
    assert set(ended["report"].freed_bytes) == {"state", "weights"}
