"""What a gradient that has been taken leaves behind, and every way in which somebody may trip over it.

Seen red: a placeholder that lets an operation through; nothing marked as lost after an interrupted backward; the
context left armed by an exception; replaced or cleared gradients not looked for; a scaler's factor applied twice, or
not at all, to gradients that were taken; its flag not raised; gradients of zero size taken; one that backward did not
make (None of a custom function) looked for, or the one of before taken back for it; one that was moved to another
parameter passed over, at the step and in backward; gradients left as they are beside stand-ins that are zeroed.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from networks import LATE, MIXES, OFFLOADED, Net, loss_of, make, microbatch, tokens
from optimizer_cases import Model, adamw, assert_equal, set_gradients, snapshot

import hostward
from hostward.errors import ModelError
from hostward.optim.offloaded_grad import OffloadedGrad
from hostward.runtime.simulated.backend import Order

every_mix = pytest.mark.parametrize("mix", MIXES)
ORDERS = {"eager": None, "late": Order(seed=5, late=LATE[0])}
every_order = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)


def taken(mix: str = "host", order: Order | None = None, **options: Any) -> tuple[Net, hostward.AdamW]:
    model, optimizer = make(mix, order=order, **options)
    with optimizer.accumulate(last=True):
        loss_of(model, 0).backward()
    return model, optimizer


class _Cut(torch.autograd.Function):
    """Passes its input on, and returns None in backward: what comes before it gets no gradient, but its hooks run."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize("gradients", ["device", "host"])
@pytest.mark.parametrize("cut", [{0}, {1}, {0, 1}, {1, 2}, {3}])
@every_mix
def test_a_custom_backward_may_return_none(mix: str, cut: set[int], gradients: str) -> None:
    def train(mix: str, cut: set[int], *, frozen: bool, **options: Any) -> dict[str, torch.Tensor]:
        model, optimizer = make(mix, **options)
        for i in range(4):
            with optimizer.accumulate(last=i % 2 == 1):
                x = model.embed(tokens(i)) * model.scale
                x = x.detach() if i in cut and frozen else _Cut.apply(x) if i in cut else x  # type: ignore[no-untyped-call]
                model.head(model.norm(x)).square().mean().backward()
            if i % 2:
                optimizer.step()
        return snapshot(model, optimizer)

    assert_equal(train(mix, cut, frozen=False, gradients=gradients), train("device", cut, frozen=True))


USES: dict[str, Callable[[torch.Tensor], object]] = {
    "norm": torch.linalg.vector_norm,
    "norm of a list": lambda g: torch._foreach_norm([g]),
    "clip_grad_norm_": lambda g: torch.nn.utils.clip_grad_norm_([_with(g)], 1.0),
    "clip_grad_value_": lambda g: torch.nn.utils.clip_grad_value_([_with(g)], 1.0),
    "isfinite": torch.isfinite,
    "isnan": lambda g: g.isnan().any(),
    "item": lambda g: g.sum().item(),
    "in place": lambda g: g.mul_(2.0),
    "add": lambda g: g + 1.0,
    "clone": torch.clone,
    "detach": torch.detach,
    "view": lambda g: g.view(-1),
    "index": lambda g: g[0],
    "iterate": list,
    "copy_": lambda g: torch.zeros_like(g, dtype=torch.float32, device="cpu").copy_(g),
    "cast": lambda g: g.to(torch.float64),
    "equal": lambda g: torch.equal(g, g),
    "stack": lambda g: torch.stack([g]),
    "numpy": lambda g: g.numpy(),
    "tolist": lambda g: g.tolist(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda g: torch.save(g, io.BytesIO()),
    "share": lambda g: g.share_memory_(),
    "data": lambda g: g.data,
}


def _with(gradient: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(gradient.shape))
    parameter.grad = gradient
    return parameter


@pytest.mark.parametrize("use", USES)
def test_h64_any_use_of_a_gradient_that_was_taken_is_a_typed_error(use: str) -> None:
    model, optimizer = taken()
    with pytest.raises(ModelError) as caught:
        USES[use](model.head.weight.grad)
    assert caught.value.what.startswith("the gradient of parameter 'head.weight' is not in .grad any more (")
    assert caught.value.why == "the optimizer took it during backward, and its bytes may be on the host by now"
    assert "max_grad_norm" in caught.value.fix
    assert "accelerator.clip_grad_norm_(model.parameters(), ...)" in caught.value.fix
    assert "optimizer.grad_norm" in caught.value.fix
    optimizer.step()
    with pytest.raises(ModelError) as caught:
        torch.linalg.vector_norm(model.head.weight.grad)
    assert caught.value.why == "the last step used it up"
    assert "overlap=False" in caught.value.fix


def test_a_placeholder_tells_what_it_stands_for_and_prints() -> None:
    model, optimizer = taken()
    gradient = model.head.weight.grad
    assert (gradient.shape, gradient.dtype, gradient.device) == ((10, 32), torch.float32, torch.device("cpu"))
    assert repr(gradient) == f"{gradient}" == "OffloadedGrad('head.weight', taken, (10, 32), torch.float32)"
    optimizer.step()
    assert repr(gradient) == "OffloadedGrad('head.weight', used, (10, 32), torch.float32)"
    model16, _ = taken(dtype=torch.bfloat16)
    assert model16.head.weight.grad.dtype is torch.bfloat16


@every_order
def test_h64_clipping_by_torch_after_the_gradients_left_is_refused_and_the_step_is_as_before(order: Order) -> None:
    model, optimizer = taken(order=order)
    with pytest.raises(ModelError, match=r"parameter 'scale' is not in \.grad any more"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    other_model, other = taken("device")
    other.step()
    assert_equal(snapshot(model, optimizer), snapshot(other_model, other))


def test_clipping_by_torch_inside_the_context_of_earlier_microbatches_is_legal() -> None:
    model, optimizer = make("host")
    with optimizer.accumulate(last=False):
        loss_of(model, 0).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert norm > 0.1
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(0.1, rel=1e-5)


# ---------------------------------------------------------------- zeroed, cleared, replaced


@pytest.mark.parametrize("by", ["optimizer", "module", "module to zero", "optimizer to zero"])
@every_order
@every_mix
def test_gradients_cleared_before_the_step_are_as_if_there_were_none(mix: str, order: Order, by: str) -> None:
    model, optimizer = taken(mix, order)
    before = snapshot(model, optimizer)
    if by == "module to zero":
        with pytest.raises(ModelError, match=r"zero_.*\n.*\n.*without set_to_none=False"):  # they are not here
            model.zero_grad(set_to_none=False)
        return
    if by == "optimizer":
        optimizer.zero_grad()
    elif by == "optimizer to zero":
        optimizer.zero_grad(set_to_none=False)
    else:
        model.zero_grad()
    optimizer.step()
    assert optimizer.grad_norm == 0.0
    assert not optimizer.last_step_skipped
    assert_equal(before, snapshot(model, optimizer))
    assert all(p.grad is None for p in model.parameters())
    goes_on_as_if_nothing_had_been(model, optimizer)


def goes_on_as_if_nothing_had_been(model: Net, optimizer: hostward.AdamW) -> None:
    """Two more steps with the context give what a new optimizer gives that never saw what came before."""
    results = []
    for m, o in ((model, optimizer), make("device")):
        for step in range(2):
            o.zero_grad()
            with o.accumulate(last=True):
                loss_of(m, 50 + step).backward()
            o.step()
        results.append(snapshot(m, o))
    assert_equal(*results)


def test_some_gradients_cleared_by_hand_are_refused() -> None:
    model, optimizer = taken()
    model.head.weight.grad = None
    with pytest.raises(ModelError, match=r"'head\.weight' was cleared after the optimizer had taken it") as caught:
        optimizer.step()
    assert "optimizer.zero_grad()" in caught.value.fix
    optimizer.zero_grad()
    goes_on_as_if_nothing_had_been(model, optimizer)


def test_a_gradient_replaced_by_hand_is_refused() -> None:
    model, optimizer = taken()
    model.head.weight.grad = torch.ones(10, 32)
    with pytest.raises(ModelError, match=r"'head\.weight' was replaced after the optimizer had taken it") as caught:
        optimizer.step()
    assert "accumulate(last=True)" in caught.value.fix
    optimizer.zero_grad()
    goes_on_as_if_nothing_had_been(model, optimizer)


@pytest.mark.parametrize("way", ["swapped", "shared", "of a layer without one"])
@pytest.mark.parametrize("then", ["step", "backward"])
def test_a_gradient_that_is_put_elsewhere_is_refused(way: str, then: str) -> None:
    """The step would be made as if it had stayed where it was."""
    model, optimizer = make("host")
    with optimizer.accumulate(last=True):
        loss_of(model, 0, without=2 if way == "of a layer without one" else None).backward()
    first, second = model.blocks[2].up.weight, model.blocks[1].up.weight
    first.grad, second.grad = second.grad, first.grad if way == "swapped" else second.grad
    with pytest.raises(
        ModelError, match=r"'blocks\.[12]\.up\.weight' was put into \.grad of 'blocks\.[12]\.up\.weight'"
    ):
        optimizer.step() if then == "step" else loss_of(model, 1).backward(inputs=[first])
    optimizer.zero_grad()
    goes_on_as_if_nothing_had_been(model, optimizer)


def test_gradients_among_those_that_are_used_up_are_zeroed() -> None:
    """A backward of one layer comes after a step; its gradient is to be thrown away, by one call for all."""
    model, optimizer = taken()
    optimizer.step()
    model.head(torch.ones(2, 32)).sum().backward()
    torch._foreach_zero_([p.grad for p in model.parameters()])
    assert model.head.weight.grad is not None
    assert not model.head.weight.grad.any()
    assert isinstance(model.scale.grad, OffloadedGrad)


@every_mix
def test_a_second_step_without_a_new_gradient_is_refused(mix: str) -> None:
    model, optimizer = taken(mix)
    optimizer.step()
    before = snapshot(model, optimizer)
    with pytest.raises(ModelError, match=r"step\(\) without a new gradient") as caught:
        optimizer.step()
    assert "run a backward pass between two steps" in caught.value.fix
    assert_equal(before, snapshot(model, optimizer))


@every_mix
def test_a_backward_after_a_step_starts_anew_without_zero_grad(mix: str) -> None:
    """The gradients of the step before are used up: nothing is added to them."""
    results = []
    for clears in (True, False):
        model, optimizer = make(mix)
        for step in range(3):
            if clears:
                optimizer.zero_grad()
            with optimizer.accumulate(last=True):
                loss_of(model, step).backward()
            optimizer.step()
        results.append(snapshot(model, optimizer))
    assert_equal(*results)


# ---------------------------------------------------------------- interrupted


class BrokenDataError(Exception):
    pass


def interrupt() -> None:
    raise BrokenDataError


def raise_in_backward(model: Net, block: int) -> torch.utils.hooks.RemovableHandle:
    return model.blocks[block].down.weight.register_hook(lambda _: interrupt())


@pytest.mark.parametrize(
    ("where", "block"), [("forward", 0), ("forward", 2), ("backward", 1), ("backward", 2)], ids=str
)
@every_order
@every_mix
def test_t42_h41_after_an_exception_zero_grad_makes_everything_whole(
    mix: str, order: Order, block: int, where: str
) -> None:
    model, optimizer = make(mix, order=order)
    with optimizer.accumulate(last=False):
        loss_of(model, 0).backward()
    if where == "forward":
        model.blocks[block].fail = interrupt
        with pytest.raises(BrokenDataError), optimizer.accumulate(last=True):
            loss_of(model, 1).backward()
        model.blocks[block].fail = None
    else:
        handle = raise_in_backward(model, block)
        with pytest.raises(BrokenDataError), optimizer.accumulate(last=True):
            loss_of(model, 1).backward()
        handle.remove()
        with pytest.raises(ModelError, match="is incomplete") as caught:
            optimizer.step()
        assert caught.value.why == "the backward pass that made it was interrupted"
        assert caught.value.fix == "call optimizer.zero_grad() and run the microbatches again"
        with pytest.raises(ModelError, match="is incomplete"):
            loss_of(model, 2).backward()
    optimizer.zero_grad()
    goes_on_as_if_nothing_had_been(model, optimizer)


@every_mix
def test_t42_an_exception_in_an_earlier_microbatch_loses_nothing(mix: str) -> None:
    """Gradients are in `.grad` until the last microbatch, and belong to the loop: it may go on, as with torch."""
    results = []
    for each in (mix, "device"):
        model, optimizer = make(each)
        with optimizer.accumulate(last=False):
            loss_of(model, 0).backward()
        model.blocks[1].fail = interrupt
        with pytest.raises(BrokenDataError), optimizer.accumulate(last=False):
            loss_of(model, 1).backward()
        model.blocks[1].fail = None
        with microbatch(optimizer, each == mix, True):
            loss_of(model, 2).backward()
        optimizer.step()
        results.append(snapshot(model, optimizer))
    assert_equal(*results)


def test_contexts_do_not_nest() -> None:
    model, optimizer = make("host")
    with optimizer.accumulate(last=True):
        with pytest.raises(ModelError, match=r"accumulate\(\) inside accumulate\(\)"), optimizer.accumulate(last=True):
            pass
        loss_of(model, 0).backward()
    optimizer.step()
    other_model, other = taken("device")
    other.step()
    assert_equal(snapshot(model, optimizer), snapshot(other_model, other))


@pytest.mark.parametrize("fault", ["sparse", "two dtypes"])
@every_mix
def test_a_gradient_that_cannot_be_stepped_is_refused_in_the_context_too(mix: str, fault: str) -> None:
    model, optimizer = make(mix, torch.bfloat16)
    if fault == "two dtypes":
        model.blocks[1].up.bias.grad_dtype = torch.float32
    else:
        model.embed.sparse = True
    before = snapshot(model, optimizer)

    def one_step() -> None:
        with optimizer.accumulate(last=True):
            loss_of(model, 0).backward()
        optimizer.step()

    with pytest.raises(ModelError, match="sparse_coo" if fault == "sparse" else "have dtypes"):
        one_step()
    optimizer.zero_grad()
    assert_equal(before, snapshot(model, optimizer))
    model.blocks[1].up.bias.grad_dtype = None
    model.embed.sparse = False
    one_step()
    assert {int(e["step"]) for e in optimizer.state_dict()["state"].values()} == {1}


def test_zero_size_parameters_take_part_in_nothing() -> None:
    model = Model()
    optimizer = adamw(model, offload_fraction=1.0)
    with optimizer.accumulate(last=True):
        sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    assert int(snapshot(model, optimizer)["step layers.1.weight"]) == 1
    assert int(snapshot(model, optimizer)["step layers.1.empty"]) == 0


# ---------------------------------------------------------------- around the step


@every_mix
def test_h68_a_closure_with_the_context_equals_a_plain_loop(mix: str) -> None:
    results = []
    for closed in (True, False):
        model, optimizer = make(mix)

        def closure(model: Net = model, optimizer: hostward.AdamW = optimizer, seed: int = 0) -> torch.Tensor:
            optimizer.zero_grad()
            for i in range(2):
                with optimizer.accumulate(last=i == 1):
                    loss = loss_of(model, 10 * seed + i)
                    loss.backward()
            return loss

        for step in range(3):
            if closed:
                assert optimizer.step(lambda step=step: closure(seed=step)) > 0  # type: ignore[misc]
            else:
                closure(seed=step)
                optimizer.step()
        results.append(snapshot(model, optimizer))
    assert_equal(*results)


@pytest.mark.parametrize("mix", OFFLOADED)
def test_a_module_may_be_cast_after_a_step(mix: str) -> None:
    """`module.to` casts gradients along with weights; one that is used up is no obstacle, one still needed is."""
    with pytest.raises(ModelError, match="_to_copy"):
        taken(mix)[0].double()
    model, optimizer = taken(mix)
    optimizer.step()
    optimizer.wait()
    model.to(torch.float64)
    assert model.head.weight.grad.dtype is torch.float64
    with pytest.raises(ModelError, match="when the optimizer was made"):
        optimizer.step()
    assert model.to("meta").head.weight.grad.device.type == "meta"


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("mix", ["none", "host"])
def test_a_resized_parameter_is_refused_in_backward(mix: str, rows: int, stepped: bool) -> None:
    """As `resize_token_embeddings` does it. Seen red: sizes not compared, before and after the first step."""
    table = torch.nn.Embedding(20, 8)
    optimizer = adamw(table, offload_fraction=float(mix == "host"))
    for _ in range(int(stepped)):
        with optimizer.accumulate(last=True):
            table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        optimizer.wait()
    table.weight.data = torch.ones(rows, 8)
    context = pytest.raises(ModelError, match=rf"'weight' has a gradient \({rows}, 8\)(.|\n)*it was \(20, 8\) when")
    with context, optimizer.accumulate(last=True):
        table(torch.tensor([1, 2])).sum().backward()


def test_without_the_context_gradients_stay_until_the_step_and_the_weights_are_the_same() -> None:
    """Seen red: gradients taken in every backward."""
    found = []
    for context in (True, False):
        model, optimizer = make("host")
        for step in range(2):
            with optimizer.accumulate(last=True) if context else nullcontext():
                loss_of(model, step).backward()
            assert isinstance(model.head.weight.grad, OffloadedGrad) is context
            optimizer.step()
            optimizer.zero_grad()
        found.append(snapshot(model, optimizer))
    assert_equal(*found)


def test_another_optimizer_may_take_over_a_model_with_placeholders() -> None:
    model, first = taken()
    first.step()
    first.wait()
    del first
    fresh = torch.optim.SGD(model.parameters(), lr=0.1)
    fresh.zero_grad()
    loss_of(model, 1).backward()
    fresh.step()
    ours = hostward.AdamW(model)
    assert not isinstance(model.head.weight.grad, OffloadedGrad)
    ours.step()
    loss_of(model, 2).backward()
    ours.step()
    assert {int(e["step"]) for e in ours.state_dict()["state"].values()} == {2}


def test_gradients_set_by_hand_after_others_were_given_up() -> None:
    model, optimizer = taken("mixed")
    optimizer.zero_grad()
    set_gradients(model, 0)
    optimizer.step()
    other_model, other = make("device")
    set_gradients(other_model, 0)
    other.step()
    assert_equal(snapshot(model, optimizer), snapshot(other_model, other))


@pytest.mark.parametrize("gradients", ["device", "host"])
@pytest.mark.parametrize("last", [True, False])
@every_mix
def test_a_module_that_is_cleared_between_two_microbatches(mix: str, last: bool, gradients: str) -> None:
    """What had been taken is dropped, as it is where nothing is taken."""
    model, optimizer = make(mix, gradients=gradients)
    with optimizer.accumulate(last=last):
        loss_of(model, 0).backward()
    model.zero_grad()
    with optimizer.accumulate(last=True):
        loss_of(model, 1).backward()
    optimizer.step()
    other_model, other = make("device")
    loss_of(other_model, 1).backward()
    other.step()
    assert_equal(snapshot(model, optimizer), snapshot(other_model, other))


def test_some_gradients_that_are_cleared_between_two_microbatches() -> None:
    model, optimizer = make("host", gradients="host")
    loss_of(model, 0).backward()
    model.blocks[1].zero_grad()
    with pytest.raises(ModelError, match=r"clear all of them with optimizer\.zero_grad"):
        loss_of(model, 1).backward()
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    optimizer.step()
