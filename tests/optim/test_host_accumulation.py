"""`gradients="host"`: microbatches' gradients leave in every backward and are added up in float32 on the host.

The reference is the same training on the device alone, with float32 accumulators.

Seen red: a range that begins its total with an addition; totals of one step that go on in the next; partial sums of the
last microbatch alone; ranges that the last microbatch did not touch left without partial sums; a second gradient that
overtakes one which waits for its bucket; an inbox that is not waited for; gradients refilled before their memory was
released; slots taken in the first microbatch; what stays on the device added up in its own dtype; tied weights in the
dtype of their parameters on the host; `zero_grad` that leaves zeros on the device alone; what one backward contributes
cast before it is added up, on the device alone; layers that were frozen at first and got no hooks;
stand-ins not put back after `torch.autograd.grad`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from networks import LATE, LATEST, MIXES, OFFLOADED, Heard, Net, loss_of, make, microbatch, tokens, train
from optimizer_cases import DTYPES, adamw, assert_equal, snapshot
from torch.utils.checkpoint import checkpoint

import hostward
from hostward.errors import ConfigError, ModelError
from hostward.optim.offloaded_grad import OffloadedGrad, Where
from hostward.runtime.backend import Tier
from hostward.runtime.simulated.backend import Order, SimulatedBackend
from hostward.schedule.optimizer import LANDING_BUFFERS

every_mix = pytest.mark.parametrize("mix", MIXES)
ORDERS = (None, Order(seed=1, late=LATE[0]), Order(seed=2, late=LATE[1]), LATEST)
SPLIT = {"offload_fraction": 0.5, "streamed_fraction": 0.0}
"""The embedding's first bucket stays on the device, and its second does not."""
Backward = Callable[[Net, int, int], None]


def summing(mix: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> dict[str, torch.Tensor]:
    return train(mix, dtype, gradients="host", **options)


@functools.cache
def plain(microbatches: int, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    found = train("device", dtype, context=False, microbatches=microbatches)
    assert found["norms"].min() > 0.5, "clipping is not active"
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_mix
def test_t29_sums_on_the_host_are_those_of_the_device(mix: str, dtype: torch.dtype) -> None:
    """Of one, two and five microbatches, in turn with the context and in a plain loop."""
    turn = list(MIXES).index(mix) + DTYPES.index(dtype)
    for microbatches in (1, 2, 5):
        order = ORDERS[(turn + microbatches) % 4]
        found = summing(mix, dtype, microbatches=microbatches, context=(turn + microbatches) % 2 == 0, order=order)
        assert_equal(found, plain(microbatches, dtype))


def test_a_parameter_that_lies_on_both_sides() -> None:
    for order in ORDERS:
        assert_equal(summing("mixed", microbatches=3, order=order, **SPLIT), plain(3, torch.bfloat16))


def agrees(backward: Backward, *, microbatches: int = 3, **options: Any) -> None:
    """This training equals the one on the device, in several orders of lanes, with the context and without."""
    common = {"microbatches": microbatches, "backward": backward, **options}
    expected = train("device", torch.bfloat16, context=False, **common)
    for mix, context in (("host", True), ("mixed", False), ("mixed", True), ("host", False)):
        for order in ORDERS[::2] if context else ORDERS[1::2]:
            assert_equal(summing(mix, order=order, context=context, **common), expected)


def test_layers_that_only_some_microbatches_use() -> None:
    """A bucket's ranges then begin their totals in different microbatches, and the last one touches few of them."""

    def backward(model: Net, step: int, i: int) -> None:
        loss_of(model, 10 * step + i, without=(step + i) % 3).backward()

    agrees(backward)


def test_ranges_of_one_bucket_in_turn() -> None:
    """A bucket is never filled: biases in one microbatch, weights in the next."""

    def backward(model: Net, step: int, i: int) -> None:
        block = model.blocks[step % 3]
        which = [p for name, p in block.named_parameters() if name.endswith("bias") is bool(i % 2)]
        loss_of(model, 10 * step + i).backward(inputs=which)

    agrees(backward)


def test_t29_several_backwards_in_one_microbatch() -> None:
    def backward(model: Net, step: int, i: int) -> None:
        for k in range(2):
            loss_of(model, 100 * step + 10 * i + k).backward()

    agrees(backward)


@pytest.mark.parametrize("which", ["all", "some"])
def test_totals_are_kept_where_autograd_grad_asks_for_gradients(which: str) -> None:
    """As a program that logs them does. The hooks run then, and nothing is added to `.grad`."""

    def backward(model: Net, step: int, i: int) -> None:
        loss = loss_of(model, 10 * step + i)
        loss.backward(retain_graph=True)
        torch.autograd.grad(loss, list(model.parameters())[:: 1 if which == "all" else 3], allow_unused=True)

    agrees(backward)


@every_mix
def test_a_backward_after_the_last_one_counts_as_well(mix: str) -> None:
    """The partial sums that the last addition made are not those of the totals any more."""

    def run(mix: str, context: bool, **options: Any) -> dict[str, torch.Tensor]:
        model, optimizer = make(mix, torch.bfloat16, grad_dtype=torch.float32, **options)
        with microbatch(optimizer, context, True):
            loss_of(model, 0).backward()
        loss_of(model, 1).backward()
        optimizer.step()
        return snapshot(model, optimizer) | {"norm": torch.tensor(optimizer.grad_norm)}

    assert_equal(run(mix, True, gradients="host"), run("device", False))


def test_a_model_that_is_called_several_times_before_backward() -> None:
    """Autograd adds up what one backward pass contributes in the dtype of the weights, wherever their state is."""

    def backward(model: Net, step: int, i: int) -> None:
        (loss_of(model, 10 * step + i) + 3 * loss_of(model, 10 * step + i + 5)).backward()

    expected = summing("device", microbatches=2, backward=backward)
    for order in ORDERS:
        assert_equal(summing("host", order=order, microbatches=2, backward=backward), expected)
        assert_equal(summing("mixed", order=order, microbatches=2, backward=backward, context=False), expected)


@pytest.mark.parametrize("mix", OFFLOADED)
def test_a_layer_that_is_trained_later(mix: str) -> None:
    """It was frozen when the optimizer was made."""

    def run(mix: str, **options: Any) -> dict[str, torch.Tensor]:
        model = Net(torch.bfloat16)
        model.blocks[1].requires_grad_(False)
        backend = SimulatedBackend(threads=1, order=Order(eager=True))
        optimizer = adamw(list(model.named_parameters()), backend=backend, **{**MIXES[mix], **options})
        for step in range(2):
            model.blocks[1].requires_grad_(step == 1)
            for i in range(5):
                with optimizer.accumulate(last=i == 4):
                    loss_of(model, i).backward()
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model, optimizer)

    assert_equal(run(mix, gradients="host"), run("device", grad_dtype=torch.float32))


def test_several_backwards_to_half_a_bucket() -> None:
    """The first gradient still waits for the rest of its bucket when the second one comes."""

    def backward(model: Net, step: int, i: int) -> None:
        for k in range(3):
            loss = loss_of(model, 100 * step + 10 * i + k)
            loss.backward(inputs=[model.blocks[1].up.weight, model.head.bias])  # type: ignore[union-attr]

    agrees(backward)


@pytest.mark.parametrize("reentrant", [True, False])
def test_h38_checkpointed_layers(reentrant: bool) -> None:
    def backward(model: Net, step: int, i: int) -> None:
        loss_of(model, 10 * step + i, reentrant=reentrant).backward()

    agrees(backward)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shared", ["weight", "layer"])
@every_mix
def test_what_several_places_contribute_is_added_up_alike(mix: str, shared: str, dtype: torch.dtype) -> None:
    """Tied weights, and a layer in two places: autograd adds up their gradients in the dtype of `.grad`."""

    def run(mix: str, **options: Any) -> dict[str, torch.Tensor]:
        model = Net(dtype)
        if shared == "weight":
            model.blocks[2].up.weight = model.blocks[0].up.weight
        else:
            model.blocks[2] = model.blocks[0]
        optimizer = adamw(model, max_grad_norm=0.5, **MIXES[mix], **options)
        for i in range(4):
            with optimizer.accumulate(last=i % 2 == 1):
                loss_of(model, i).backward()
            if i % 2:
                optimizer.step()
        return snapshot(model, optimizer) | {"norm": torch.tensor(optimizer.grad_norm)}

    assert_equal(run(mix, gradients="host"), run("device", grad_dtype=torch.float32))


def test_a_layer_used_twice_under_reentrant_checkpoints() -> None:
    """Its gradient is accumulated twice within one backward."""

    def backward(model: Net, step: int, i: int) -> None:
        x = model.embed(tokens(10 * step + i))
        for _ in range(2):
            x = checkpoint(model.blocks[0], x, use_reentrant=True)
        model.head(model.norm(x)).float().square().mean().backward()

    agrees(backward, steps=2)


@every_mix
def test_a_step_with_gradients_set_by_hand(mix: str) -> None:
    def run(mix: str, **options: Any) -> dict[str, torch.Tensor]:
        model, optimizer = make(mix, **options)
        for step in range(2):
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.01 * (step + 1))
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model, optimizer)

    assert_equal(run(mix, gradients="host"), run("device"))


@every_mix
def test_a_gradient_that_is_not_finite_in_an_early_microbatch_skips_the_step(mix: str) -> None:
    model, optimizer = make(mix, torch.bfloat16, gradients="host")
    before = snapshot(model, optimizer)
    for i in range(3):
        with optimizer.accumulate(last=i == 2):
            (loss_of(model, i) * (float("inf") if i == 0 else 1.0)).backward()
    optimizer.step()
    assert optimizer.last_step_skipped
    assert_equal(snapshot(model, optimizer), before)


@pytest.mark.parametrize("context", [True, False])
def test_t37_a_gradient_scaler(context: bool) -> None:
    def run(mix: str, **options: Any) -> dict[str, torch.Tensor]:
        model, optimizer = make(mix, torch.float16, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        for step in range(5):
            for i in range(2):
                with microbatch(optimizer, context, i == 1):
                    factor = float("inf") if step == 2 and i == 0 else 1.0
                    scaler.scale(loss_of(model, 10 * step + i) * factor).backward()
            scaler.step(optimizer)
            optimizer.wait()
            scaler.update()
            optimizer.zero_grad()
        return snapshot(model, optimizer) | {"scale": torch.tensor(scaler.get_scale())}

    expected = run("device", grad_dtype=torch.float32)
    assert_equal(run("host", gradients="host"), expected)
    assert_equal(run("mixed", gradients="host"), expected)


# ---------------------------------------------------------------- memory


def test_gradients_leave_in_every_microbatch() -> None:
    """Between microbatches nothing of them is on the device, where the host steps."""
    model, optimizer = make("host", torch.bfloat16, gradients="host")
    for i in range(3):
        with optimizer.accumulate(last=i == 2):
            loss_of(model, i).backward()
        for name, p in model.named_parameters():
            assert isinstance(p.grad, OffloadedGrad), name
            assert p.grad.fate.now is Where.TAKEN
            assert p.grad.dtype is torch.bfloat16
    held = {t.untyped_storage().data_ptr() for t in optimizer._executor._held.values()}
    assert len(held) < len(list(model.parameters())) / 2, "most have been released"
    optimizer.step()


def test_a_bucket_that_is_not_filled_leaves_with_its_microbatch() -> None:
    model, optimizer = make("host", torch.bfloat16, gradients="host")
    heard = Heard(optimizer.backend)  # type: ignore[arg-type]
    with optimizer.accumulate(last=False):
        loss_of(model, 0).backward(inputs=[model.head.bias])
        assert heard.names == []
    left = [name.rpartition("/")[0] for name in heard.names if "wait" not in name]
    assert left == ["offload/d2h/grad", "offload/host/add"]


def test_memory_is_released_before_the_bucket_gets_the_next_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that is never filled: its first gradients are still on their way out when the next ones come."""
    model, optimizer = make("host", torch.bfloat16, gradients="host")
    executor, seen = optimizer._executor, list[str]()
    issue = executor._issue

    def watched(triggers: Sequence[str], *, last: bool = True) -> None:
        seen.extend(triggers)
        issue(triggers, last=last)

    monkeypatch.setattr(executor, "_issue", watched)
    for i in range(3):
        loss_of(model, i).backward(inputs=[model.head.bias])
    (bucket,) = {point.partition("/")[2] for point in seen}
    assert seen == [f"gradient/{bucket}", f"release/{bucket}"] * 2


def test_totals_and_what_lands_before_them_are_all_that_is_held() -> None:
    _, optimizer = make("host", torch.bfloat16, gradients="host")
    held = optimizer.backend.ledger.by_owner(Tier.HOST)["gradients"]
    largest = max(b.offsets[-1] for b in optimizer.inventory.buckets)
    padded = sum(b.offsets[-1] for b in optimizer.inventory.buckets)
    assert held == 4 * padded + LANDING_BUFFERS * 4 * largest
    assert optimizer.backend.ledger.by_owner(Tier.HOST)["norm partials"] > 0


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_parameter_without_a_new_gradient_is_stepped_nowhere(set_to_none: bool) -> None:
    """`zero_grad(set_to_none=False)` would leave a zero to step with in `.grad`, and nothing on the host."""

    def run(mix: str) -> dict[str, torch.Tensor]:
        model, optimizer = make(mix, torch.bfloat16, gradients="host")
        for i in range(3):
            loss_of(model, i, without=1 if i else None).backward()
            if i:
                optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return snapshot(model, optimizer)

    for mix in OFFLOADED:
        assert_equal(run(mix), run("device"))


def test_what_stays_on_the_device_is_added_up_in_float32() -> None:
    """A parameter that lies on both sides is not added up in two places; nor are those of its bucket."""
    model, optimizer = make("mixed", torch.bfloat16, gradients="host", **SPLIT)
    loss_of(model, 0).backward()
    moved = {name for name, p in model.named_parameters() if isinstance(p.grad, OffloadedGrad)}
    placed = zip(optimizer.inventory.buckets, optimizer.plan.buckets, strict=True)
    sides: dict[str, set[str]] = {}
    for bucket, where in placed:
        for r in bucket.ranges:
            sides.setdefault(r.name, set()).add(where.placement.value)
    assert sides["embed.weight"] == {"device", "host"}
    assert moved == {name for name, found in sides.items() if found == {"host"}}
    for name, p in model.named_parameters():
        assert name in moved or p.grad.dtype is torch.float32
    assert optimizer._summed
    optimizer.step()


def test_slots_are_taken_in_the_last_microbatch() -> None:
    model, optimizer = make("mixed", torch.bfloat16, gradients="host")
    slots = optimizer._executor._slots
    slots._stage_at = (len(optimizer.plan.buckets),) * slots.count
    for step in range(2):
        for i in range(3):
            with optimizer.accumulate(last=i == 2):
                loss_of(model, 10 * step + i).backward()
            assert optimizer._executor._staged == (slots.count if i == 2 else 0)
        optimizer.step()


def test_the_trace_names_additions() -> None:
    model, optimizer = make("host", torch.bfloat16, gradients="host")
    heard = Heard(optimizer.backend)  # type: ignore[arg-type]
    for i in range(2):
        with optimizer.accumulate(last=i == 1):
            loss_of(model, i).backward()
    optimizer.step()
    optimizer.wait()
    buckets = [b.name for b in optimizer.inventory.buckets]
    for start in ("offload/host/add/", "offload/d2h/grad/"):
        named = [name.removeprefix(start) for name in heard.names if name.startswith(start)]
        assert sorted(named) == sorted(buckets * 2)
    assert not [name for name in heard.names if name.startswith("offload/norm/")], "the last addition made them"
    assert len([name for name in heard.names if name.startswith("offload/h2d/sums/")]) == len(buckets)


def test_partial_sums_are_made_at_the_step_where_no_microbatch_was_the_last() -> None:
    model, optimizer = make("host", torch.bfloat16, gradients="host")
    heard = Heard(optimizer.backend)  # type: ignore[arg-type]
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.wait()
    assert len([n for n in heard.names if n.startswith("offload/norm/")]) == len(optimizer.inventory.buckets)


# ---------------------------------------------------------------- giving up, and going on


@pytest.mark.parametrize("how", ["optimizer", "model", "discard"])
@pytest.mark.parametrize("order", ORDERS)
def test_totals_that_are_cleared_are_not_stepped_with(how: str, order: Order | None) -> None:
    model, optimizer = make("host", torch.bfloat16, order, gradients="host")
    for i in (7, 8):
        loss_of(model, i).backward()
    {"optimizer": optimizer.zero_grad, "model": model.zero_grad, "discard": optimizer.discard_gradients}[how]()
    if how == "model":
        optimizer.zero_grad()
    for i in range(2):
        with optimizer.accumulate(last=i == 1):
            loss_of(model, i).backward()
    optimizer.step()
    other_model, other = make("device", torch.bfloat16, grad_dtype=torch.float32)
    for i in range(2):
        loss_of(other_model, i).backward()
    other.step()
    assert_equal(snapshot(model, optimizer), snapshot(other_model, other))


@pytest.mark.parametrize("failing", [0, 1])
def test_t62_a_microbatch_that_fails_makes_the_totals_incomplete(failing: int) -> None:
    model, optimizer = make("host", torch.bfloat16, gradients="host")
    before = snapshot(model, optimizer)

    def stop(_: torch.Tensor) -> None:
        raise KeyboardInterrupt

    for i in range(failing + 1):
        handle = model.blocks[0].up.weight.register_hook(stop) if i == failing else None  # type: ignore[union-attr]
        try:
            with optimizer.accumulate(last=i == 1):
                loss_of(model, i).backward()
        except KeyboardInterrupt:
            assert i == failing
        if handle is not None:
            handle.remove()
    with pytest.raises(ModelError, match="is incomplete"):
        optimizer.step()
    optimizer.zero_grad()
    assert_equal(snapshot(model, optimizer), before)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.wait()


def test_gradients_of_one_bucket_that_differ_in_dtype_are_refused_before_anything_changes() -> None:
    model, optimizer = make("host", torch.bfloat16, gradients="host")
    before = snapshot(model, optimizer)
    for name, p in model.named_parameters():
        dtype = torch.float32 if name == "blocks.1.up.weight" else torch.bfloat16
        p.grad_dtype = dtype
        p.grad = torch.zeros_like(p, dtype=dtype)
    with pytest.raises(ModelError, match="have dtypes"):
        optimizer.step()
    optimizer.zero_grad()
    assert_equal(snapshot(model, optimizer), before)


def test_gradients_may_come_in_another_dtype_in_a_later_step() -> None:
    model, optimizer = make("host", torch.bfloat16, gradients="host")
    other_model, other = make("device", torch.bfloat16, grad_dtype=torch.float32)
    for step in range(3):
        for m, o in ((model, optimizer), (other_model, other)):
            if step == 1 and m is model:
                for p in m.parameters():
                    p.grad = None
                    p.grad_dtype = torch.float32
            loss_of(m, step).backward()
            o.step()
            o.zero_grad()
    assert_equal(snapshot(model, optimizer), snapshot(other_model, other))


def test_groups_that_are_added_later_are_summed_as_well() -> None:
    def run(mix: str, **options: Any) -> dict[str, torch.Tensor]:
        model = Net(torch.bfloat16)
        named = list(model.named_parameters())
        backend = SimulatedBackend(threads=1, order=Order(eager=True))
        optimizer = adamw([{"params": named[:6]}], backend=backend, **{**MIXES[mix], **options})
        loss_of(model, 0).backward()
        optimizer.step()
        model.zero_grad()
        optimizer.add_param_group({"params": named[6:]})
        for i in range(2):
            with optimizer.accumulate(last=i == 1):
                loss_of(model, i).backward()
        optimizer.step()
        return snapshot(model, optimizer)

    assert_equal(run("host", gradients="host"), run("device", grad_dtype=torch.float32))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gradients": "cpu"}, 'gradients must be "device" or "host"'),
        ({"gradients": "host", "overlap": False}, "leave during backward"),
        ({"gradients": "host", "use_torch_optimizer": True}, "leave during backward"),
        ({"gradients": "host", "grad_dtype": torch.bfloat16}, "float32"),
    ],
)
def test_what_cannot_be_is_refused(options: Mapping[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        hostward.AdamW(Net(), offload_fraction=1.0, streamed_fraction=0.0, **options)


def test_accumulate_does_not_nest() -> None:
    _, optimizer = make("host")
    with (
        optimizer.accumulate(last=False),
        pytest.raises(ModelError, match="inside accumulate"),
        optimizer.accumulate(last=True),
    ):
        pass


@pytest.mark.parametrize("mix", OFFLOADED)
def test_steps_of_both_kinds_take_turns(mix: str) -> None:
    """State saved by one and loaded by the other goes on with the same bits."""
    model, optimizer = make(mix, torch.bfloat16, gradients="host")
    other_model, other = make("device", torch.bfloat16, grad_dtype=torch.float32)
    for step in range(2):
        for m, o in ((model, optimizer), (other_model, other)):
            for i in range(2):
                loss_of(m, 10 * step + i).backward()
            o.step()
            o.zero_grad()
    saved = optimizer.state_dict()
    other.load_state_dict(saved)
    assert_equal(snapshot(model, optimizer), snapshot(other_model, other))
