"""Training loops that do what torch.optim.AdamW allows: several optimizers of one parameter, gradients in buffers of
the program, weights given other memory, `optimizer.state` written, steps in inference mode.

Seen red with: no wait for the optimizer before when one is made, gradients of another one passed over, also where it
offloads anew what the next one had taken over, the wait for held gradients left out, their memory released and each way
to hold one overlooked, no look at overlaps, at who holds weights when an optimizer is made, at strides or
`optimizer.state`, a flat copy kept as the place of a weight, inference mode left on; writes through `.data` lost after
backward had recomputed a layer, and after an error in forward; a hook in autograd.grad that read weights without bytes.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import LATEST, MIXES, OFFLOADED, Net, loss_of, make, microbatch
from optimizer_cases import adamw, assert_equal, snapshot

import hostward
from hostward.errors import ModelError
from hostward.runtime.simulated.backend import Order, SimulatedBackend

Loop = Callable[[Net, hostward.AdamW], object]


def run(mix: str, loop: Loop, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, torch.Tensor]:
    """Run a loop without offloading as issued, else in the latest order; freed memory keeps what it held."""
    order = Order(eager=True) if mix == "device" else LATEST
    model = Net(dtype)
    optimizer = adamw(model, backend=SimulatedBackend(threads=1, order=order, poison=False), **MIXES[mix], **options)
    loop(model, optimizer)
    return snapshot(model, optimizer)


def require_equal(loop: Loop, **options: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        expected = run("device", loop, dtype, **options)
        for mix in OFFLOADED:
            assert_equal(run(mix, loop, dtype, **options), expected)


def one_step(model: Net, optimizer: hostward.AdamW, seed: int, *, context: bool = True) -> None:
    optimizer.zero_grad()
    with microbatch(optimizer, context, True):
        loss_of(model, seed).backward()
    optimizer.step()


# ---------------------------------------------------------------- several optimizers of one parameter


def another(model: Net, mix: str, **options: Any) -> hostward.AdamW:
    return adamw(model, backend=SimulatedBackend(threads=1, order=LATEST), **{**MIXES[mix], "lr": 3e-3, **options})


@pytest.mark.parametrize("context", [True, False])
def test_an_optimizer_made_after_the_step_of_another_begins_with_its_weights(context: bool) -> None:
    results = []
    for mix in MIXES:
        model, first = make(mix, torch.bfloat16, LATEST)
        one_step(model, first, 0, context=context)
        second = another(model, mix)
        one_step(model, second, 1, context=context)
        results.append(snapshot(model, second))
    for found in results[1:]:
        assert_equal(found, results[0])


@pytest.mark.parametrize("between", ["forward", "nothing"])
def test_optimizers_that_take_turns(between: str) -> None:
    """Each sees what the other has written, also where no forward comes in between."""
    results = []
    for mix in MIXES:
        model, first = make(mix, torch.bfloat16, LATEST)
        second = another(model, mix)
        gradients = [torch.full_like(p, 1e-2) for p in model.parameters()]
        for i in range(4):
            optimizer = (first, second)[i % 2]
            optimizer.zero_grad()
            if between == "forward":
                one_step(model, optimizer, i)
                continue
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.grad = g.clone()
            optimizer.step()
        results.append(snapshot(model, second))
    for found in results[1:]:
        assert_equal(found, results[0])


@pytest.mark.parametrize("mix", MIXES)
def test_one_gradient_is_not_left_out_of_a_second_optimizer(mix: str) -> None:
    """torch steps the trunk twice, once by each."""
    model, first = make(mix)
    second = another(model, mix)
    loss_of(model, 0).backward()
    first.step()
    with pytest.raises(ModelError, match=r"'scale' was used by the last step of another hostward\.AdamW"):
        second.step()
    one_step(model, second, 1)


@pytest.mark.parametrize("held_by", ["context", "gradients"])
def test_what_one_optimizer_has_offloaded_another_does_not_leave_out(held_by: str) -> None:
    options = {} if held_by == "context" else {"gradients": "host"}
    model, first = make("host", **options)
    second = another(model, "host", **options)
    with microbatch(first, held_by == "context", True):
        loss_of(model, 0).backward()
    before = snapshot(model, second)
    with pytest.raises(ModelError, match=r"is offloaded for another hostward\.AdamW") as caught:
        second.step()
    assert 'gradients="device"' in caught.value.fix
    assert_equal(snapshot(model, second), before)


def test_what_the_one_before_goes_on_offloading_is_not_left_out_of_the_next() -> None:
    """It has part of the parameters, has stepped, and is still there: no `zero_grad` when the next one is made."""
    model = Net()
    kept = adamw(list(model.blocks[0].parameters()), module=model, gradients="host", **MIXES["host"])
    loss_of(model, 0).backward()
    kept.step()
    second = another(model, "host")
    before = snapshot(model, second)
    loss_of(model, 1).backward()
    with pytest.raises(ModelError, match=r"'blocks\.0\..*' is offloaded for another hostward\.AdamW"):
        second.step()
    assert_equal(snapshot(model, second), before)


@pytest.mark.parametrize("mix", MIXES)
def test_what_the_one_before_has_used_is_no_gradient_of_the_next(mix: str) -> None:
    model, first = make(mix)
    one_step(model, first, 0)
    second = another(model, mix)
    loss_of(model, 1, without=1).backward()
    second.step()
    assert second.step_count("blocks.1.up.weight") == 0
    assert second.step_count("blocks.0.up.weight") == 1
    with pytest.raises(ModelError, match="without a new gradient"):
        second.step()


# ---------------------------------------------------------------- gradients that the program holds


def as_they_are(parameters: list[torch.Tensor], buffers: list[torch.Tensor]) -> None:
    for p, buffer in zip(parameters, buffers, strict=True):
        p.grad = buffer


def as_views(parameters: list[torch.Tensor], buffers: list[torch.Tensor]) -> None:
    for p, buffer in zip(parameters, buffers, strict=True):
        p.grad = buffer.view_as(p)


@pytest.mark.parametrize("context", [True, False])
@pytest.mark.parametrize("put", [as_they_are, as_views])
def test_gradients_in_buffers_that_are_overwritten_after_the_step(put: Callable[..., None], context: bool) -> None:
    """As in data parallelism by hand, and where workers share one model."""

    def loop(model: Net, optimizer: hostward.AdamW) -> None:
        parameters = list(model.parameters())
        buffers = [torch.zeros_like(p).detach() for p in parameters]
        for step in range(3):
            made = torch.autograd.grad(loss_of(model, step), parameters)
            with microbatch(optimizer, context, True):
                for buffer, gradient in zip(buffers, made, strict=True):
                    buffer.copy_(gradient)
                put(parameters, buffers)
            optimizer.step()
            for buffer in buffers:
                buffer.fill_(7.0)

    require_equal(loop)


def test_a_slice_of_one_flat_buffer() -> None:
    def loop(model: Net, optimizer: hostward.AdamW) -> None:
        parameters = list(model.parameters())
        flat = torch.zeros(sum(p.numel() for p in parameters), dtype=model.scale.dtype)
        for step in range(3):
            made = torch.autograd.grad(loss_of(model, step), parameters)
            torch.cat([g.reshape(-1) for g in made], out=flat)
            for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                p.grad = part.view_as(p)
            optimizer.step()
            flat.zero_()

    require_equal(loop)


def kept_by_hooks(model: Net) -> list[torch.Tensor]:
    """Return what each backward makes, from hooks that were there before the optimizer."""
    kept: list[torch.Tensor] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    return kept


def put_before_backward(model: Net) -> list[torch.Tensor]:
    """Return one flat buffer, into which each backward adds."""
    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=model.scale.dtype)
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = part.view_as(p)
    return [flat]


@pytest.mark.parametrize("keep", [kept_by_hooks, put_before_backward])
@pytest.mark.parametrize("order", [Order(eager=True), LATEST], ids=["eager", "latest"])
@pytest.mark.parametrize("mix", OFFLOADED)
def test_gradients_that_are_held_while_backward_makes_them(
    keep: Callable[..., list[torch.Tensor]], order: Order, mix: str
) -> None:
    """They may be scaled when it is over, and overwritten after the step."""

    def trained(mix: str) -> dict[str, torch.Tensor]:
        model = Net(torch.float32)
        held = keep(model) if keep is kept_by_hooks else []
        on = SimulatedBackend(threads=1, order=Order(eager=True) if mix == "device" else order)
        optimizer = adamw(model, backend=on, **MIXES[mix])
        for step in range(3):
            held.clear()
            if keep is put_before_backward:
                held += keep(model)
            with microbatch(optimizer, True, True):
                loss_of(model, step).backward()
            for kept in held:
                kept.mul_(0.5)
            optimizer.step()
            for kept in held:
                kept.fill_(7.0)
            optimizer.zero_grad()
        return snapshot(model, optimizer)

    assert_equal(trained(mix), trained("device"))


def test_gradients_of_microbatches_that_are_held_may_be_overwritten() -> None:
    """`gradients="host"` reads them when backward is over."""

    def trained(*, keep: bool) -> dict[str, torch.Tensor]:
        model = Net(torch.float32)
        held = kept_by_hooks(model) if keep else []
        backend = SimulatedBackend(threads=1, order=LATEST, poison=False)
        optimizer = adamw(model, backend=backend, gradients="host", **MIXES["host"])
        for step in range(2):
            for i in range(2):
                with microbatch(optimizer, True, i == 1):
                    loss_of(model, 10 * step + i).backward()
                for kept in held:
                    kept.fill_(7.0)
                held.clear()
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model, optimizer)

    assert_equal(trained(keep=True), trained(keep=False))


@pytest.mark.parametrize("context", [True, False])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("mix", MIXES)
def test_buffers_of_gradients_keep_what_they_hold(mix: str, flat: bool, context: bool) -> None:
    """As DistributedDataParallel's with gradient_as_bucket_view=True: it reads and writes them later."""
    model, optimizer = make(mix)
    held = put_before_backward(model) if flat else []
    with microbatch(optimizer, context, True):
        loss_of(model, 0).backward()
    if not flat and not context:
        model.head.bias.grad = None  # not all of its bucket comes
    held = held or [p.grad for p in model.parameters() if type(p.grad) is torch.Tensor]
    assert held or context
    before = [each.clone() for each in held]
    optimizer.step()
    optimizer.backend.synchronise()
    assert all(torch.equal(*pair) for pair in zip(held, before, strict=True))


def test_gradients_that_nobody_else_holds_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make("streamed")
    waits: list[None] = []
    monkeypatch.setattr(type(optimizer._executor), "wait_for_gradients", lambda _: waits.append(None))
    joined = [torch.nn.Parameter(torch.randn(3)) for _ in range(3)]  # whose gradients are parts of one tensor
    others = adamw([(str(i), p) for i, p in enumerate(joined)])
    for step in range(2):
        one_step(model, optimizer, step, context=False)
        torch.cat(joined).square().sum().backward()
        others.step()
    assert waits == []
    loss_of(model, 2).backward()
    kept = model.head.weight.grad
    optimizer.step()
    assert len(waits) == 1
    del kept


# ---------------------------------------------------------------- weights given other memory


def tie_memory(model: Net) -> None:
    model.blocks[1].up.weight.data = model.blocks[0].up.weight.data


def expand(model: Net) -> None:
    model.blocks[1].up.bias.data = model.blocks[1].up.bias.data[:1].expand(32)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("change", "text"), [(tie_memory, "share memory"), (expand, "has elements that share memory")])
def test_memory_that_two_elements_share_is_refused(change: Callable[[Net], None], text: str, mix: str) -> None:
    model, optimizer = make(mix)
    one_step(model, optimizer, 0)
    change(model)
    with pytest.raises(ModelError, match=text):
        one_step(model, optimizer, 1)


def test_a_weight_that_is_transposed_in_its_place() -> None:
    """Its address and its version stay; a step later it is transposed back."""

    def loop(model: Net, optimizer: hostward.AdamW) -> None:
        for step in range(5):
            one_step(model, optimizer, step)
            if step in (1, 2):
                weight = model.blocks[1].up.weight
                weight.data = weight.data.t()

    require_equal(loop)


@pytest.mark.parametrize("moment", ["before the first step", "after it"])
def test_weights_written_through_a_buffer_that_was_there_before_the_optimizer(moment: str) -> None:
    """Parameters that are parts of one flat tensor, which the program writes."""

    def flat_model(dtype: torch.dtype) -> tuple[Net, torch.Tensor]:
        model = Net(dtype)
        flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        parts = flat.split([p.numel() for p in model.parameters()])
        for p, part in zip(model.parameters(), parts, strict=True):
            p.data = part.view_as(p)
        return model, flat

    for dtype in (torch.float32, torch.bfloat16):
        results = []
        for mix in MIXES:
            model, flat = flat_model(dtype)
            optimizer = another(model, mix)
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                if moment == "before the first step":
                    flat.clamp_(-0.1, 0.1)
                optimizer.step()
                if moment == "after it":
                    flat.clamp_(-0.1, 0.1)
            results.append(snapshot(model, optimizer))
        for found in results[1:]:
            assert_equal(found, results[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_weights_written_through_data_after_a_backward_that_recomputes(reentrant: bool) -> None:
    """Weights behind the last layer are waited for with that layer, which is recomputed after their gradients."""

    def loop(model: Net, optimizer: hostward.AdamW) -> None:
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, step, reentrant=reentrant).backward()
            for p in model.parameters():
                p.data.mul_(0.9)
            optimizer.step()

    require_equal(loop)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_weights_written_through_data_after_an_error(where: str) -> None:
    def fail() -> None:
        raise KeyError("on purpose")

    def loop(model: Net, optimizer: hostward.AdamW) -> None:
        for step in range(2):
            loss = loss_of(model, 7, reentrant=False)
            model.blocks[1].fail = fail
            with pytest.raises(KeyError):
                loss_of(model, 8) if where == "forward" else loss.backward()
            model.blocks[1].fail = None
            for p in model.parameters():
                p.data.mul_(0.9)
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()

    require_equal(loop)


def test_hooks_in_the_backward_of_autograd_grad_see_offloaded_weights() -> None:
    def found(mix: str, order: Order) -> dict[str, torch.Tensor]:
        model, optimizer = make(mix, order=order)
        run = hostward.attach(model, optimizer, weights=2, layers=list(model.blocks)) if mix == "host" else None
        norms: list[torch.Tensor] = []

        def look(*_: object) -> None:
            norms.extend(p.norm() for p in model.parameters())

        for step in range(2):
            one_step(model, optimizer, step)
            hook = model.blocks[2].register_full_backward_hook(look)
            weights = [model.embed.weight, model.blocks[1].up.weight, model.head.bias]
            grads = torch.autograd.grad(loss_of(model, 5, without=1), weights, materialize_grads=True)
            hook.remove()
            norms += grads
            for p in model.parameters():
                p.data.mul_(0.9)
        if run is not None:
            run.detach()
        return {f"seen {i}": norm for i, norm in enumerate(norms)} | snapshot(model, optimizer)

    assert_equal(found("host", LATEST), found("device", Order(eager=True)))


# ---------------------------------------------------------------- optimizer.state, and where step() is called


def clear(optimizer: hostward.AdamW) -> None:
    optimizer.state = collections.defaultdict(dict)


def clear_each(optimizer: hostward.AdamW) -> None:
    for p in optimizer.param_groups[0]["params"]:
        optimizer.state[p] = {}


def write(optimizer: hostward.AdamW) -> None:
    for p in optimizer.param_groups[0]["params"]:
        optimizer.state[p]["exp_avg"] = torch.zeros_like(p)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("change", [clear, clear_each, write])
def test_state_that_is_reset_in_torchs_way_is_not_kept_in_silence(
    change: Callable[[hostward.AdamW], None], mix: str
) -> None:
    model, optimizer = make(mix)
    one_step(model, optimizer, 0)
    change(optimizer)
    for use in (lambda: one_step(model, optimizer, 1), optimizer.state_dict):
        with pytest.raises(ModelError, match=r"optimizer\.state was (cleared|written)") as caught:
            use()
    assert "set_state_of" in caught.value.fix


def test_state_that_is_read_in_torchs_way_is_named() -> None:
    """Seen red: a KeyError, as before the first step. What others look for there is told as ever."""
    model, optimizer = make("host")
    one_step(model, optimizer, 0)
    entry = optimizer.state[next(model.parameters())]
    with pytest.raises(ModelError, match=r"optimizer\.state has no 'exp_avg'(.|\n)*state_of\(name\)"):
        entry["exp_avg"].mul_(0.5)
    assert "exp_avg" not in entry
    assert entry.get("step") is None
    with pytest.raises(KeyError):
        entry["slow"]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("change", [clear, clear_each, write])
def test_a_load_makes_state_whole_that_was_reset_in_torchs_way(
    change: Callable[[hostward.AdamW], None], mix: str
) -> None:
    """As the error says. Seen red: the load succeeded, and every step after it was refused."""
    results = []
    for reset in (False, True):
        model, optimizer = make(mix)
        one_step(model, optimizer, 0)
        saved = optimizer.state_dict()
        if reset:
            optimizer.state[next(model.parameters())]["mine"] = 1
            change(optimizer)
        optimizer.load_state_dict(saved)
        one_step(model, optimizer, 1)
        results.append(snapshot(model, optimizer))
    assert_equal(*results)
    mine = optimizer.state[next(model.parameters())]
    assert list(mine) == ([] if change is not write else ["mine"])


def test_what_others_keep_in_state_does_no_harm() -> None:
    def loop(model: Net, optimizer: hostward.AdamW) -> None:
        for step in range(2):
            one_step(model, optimizer, step)
            for p in model.parameters():
                optimizer.state[p]["slow"] = p.detach().clone()

    require_equal(loop)


@pytest.mark.parametrize("save", [hostward.AdamW.state_dict, hostward.AdamW.sources])
def test_what_others_keep_in_state_is_said_not_to_be_saved(
    save: Callable[[hostward.AdamW], object], caplog: pytest.LogCaptureFixture
) -> None:
    """torch.optim saves it. Seen red: a lookahead's slow weights, made anew after a resume."""
    model, optimizer = make("host")
    one_step(model, optimizer, 0)
    save(optimizer)
    assert "slow" not in caplog.text
    optimizer.state[next(model.parameters())]["slow"] = torch.zeros(())
    optimizer.state["k"] = 5
    save(optimizer)
    assert "optimizer.state has 'k', 'slow'" in caplog.text


def test_a_step_in_inference_mode() -> None:
    def loop(model: Net, optimizer: hostward.AdamW) -> None:
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            with torch.inference_mode():
                optimizer.step()

    require_equal(loop)
    require_equal(loop, step_early=True)
