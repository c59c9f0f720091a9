"""`optimizer.accumulate`: gradients that leave during the last backward give the bits of gradients taken at the step.

The reference of every test is the same training at fraction 0 without the context.

Seen red: a gradient point before the bucket's last gradient; `give_back` that forgets what was taken, that returns the
landing place without waiting for the copy, or that returns one range of a split tensor; partial sums of a bucket taken
again left as they were; ranges without a gradient left as they were; gradients that the last microbatch did not touch
left behind; a second `take` that copies the whole bucket anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from networks import LATE, MIXES, OFFLOADED, Net, loss_of, make, microbatch, tokens, train
from optimizer_cases import DTYPES, adamw, assert_equal, snapshot
from torch.utils.checkpoint import checkpoint

from hostward.optim.offloaded_grad import OffloadedGrad
from hostward.runtime.simulated.backend import Order

every_mix = pytest.mark.parametrize("mix", MIXES)
Backward = Callable[[Net, int, int], None]


@functools.cache
def plain(microbatches: int, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    found = train("device", dtype, context=False, microbatches=microbatches)
    assert found["norms"].min() > 0.5, "clipping is not active"
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_mix
def test_t29_h57_microbatches_leave_with_the_last_one(mix: str, dtype: torch.dtype) -> None:
    microbatches = (1, 2, 4)[(list(MIXES).index(mix) + DTYPES.index(dtype)) % 3]
    order = Order(seed=microbatches, late=LATE[microbatches % 3])
    assert_equal(train(mix, dtype, microbatches=microbatches, order=order), plain(microbatches, dtype))


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
@every_mix
def test_t29_gradients_leave_in_the_dtype_in_which_they_were_added(mix: str, grad_dtype: torch.dtype) -> None:
    """bf16 sums differ from fp32 sums; which one it is does not depend on the context or the placement."""

    def run(mix: str, context: bool, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        model, optimizer = make(mix, torch.bfloat16, grad_dtype=dtype)
        for i in range(4):
            with microbatch(optimizer, context, i == 3):
                loss_of(model, i).backward()
                if context and i == 3:
                    assert model.head.weight.grad.dtype is dtype
        optimizer.step()
        return snapshot(model, optimizer)

    assert_equal(run(mix, True, grad_dtype), run("device", False, grad_dtype))
    other = run("device", False, torch.float32)
    same = torch.equal(other["exp_avg head.weight"], run(mix, True, grad_dtype)["exp_avg head.weight"])
    assert same is (grad_dtype is torch.float32)


def agrees(mix: str, backward: Backward, *, steps: int = 3, microbatches: int = 2, **options: Any) -> None:
    """This training with the context equals the one without at fraction 0, in several orders of lanes."""
    common = {"steps": steps, "microbatches": microbatches, "backward": backward, **options}
    expected = train("device", context=False, **common)
    for order in (None, Order(seed=1, late=LATE[0])):
        assert_equal(train(mix, order=order, **common), expected)


@every_mix
def test_t29_several_backwards_in_the_last_microbatch(mix: str) -> None:
    """The second one adds to gradients that have been taken, and that may be on the host by then."""

    def backward(model: Net, step: int, i: int) -> None:
        for k in range(3):
            loss_of(model, 100 * step + 10 * i + k).backward()

    agrees(mix, backward, microbatches=1)
    agrees(mix, backward, microbatches=2, dtype=torch.bfloat16)


@every_mix
def test_a_second_backward_through_the_same_graph(mix: str) -> None:
    def backward(model: Net, step: int, i: int) -> None:
        loss = loss_of(model, 10 * step + i)
        loss.backward(retain_graph=True)
        (loss * 0.5).backward()

    agrees(mix, backward)


@every_mix
def test_a_second_backward_that_reaches_only_some_parameters(mix: str) -> None:
    """Whole buckets are given back, and single ranges of a bucket; the rest stays taken."""

    def backward(model: Net, step: int, i: int) -> None:
        loss_of(model, 10 * step + i).backward()
        model.blocks[0].up.weight.square().sum().mul(0.01).backward()
        (model.head(torch.ones(2, 32)).square().mean() + model.scale.square().sum()).backward()
        model.embed(tokens(step)).square().mean().backward()

    agrees(mix, backward)


class Shared(torch.nn.Module):
    """One block used twice, each time recomputed in backward."""

    def __init__(self, net: Net, reentrant: bool) -> None:
        super().__init__()
        self.net, self.reentrant = net, reentrant

    def forward(self, seed: int) -> torch.Tensor:
        x = self.net.embed(tokens(seed))
        for _ in range(2):
            x = checkpoint(self.net.blocks[1], x, use_reentrant=self.reentrant)
        out: torch.Tensor = self.net.head(x).square().mean()
        return out


@pytest.mark.parametrize("reentrant", [True, False])
@every_mix
def test_h38_a_weight_of_two_checkpoints_is_stepped_once_with_the_whole_gradient(mix: str, reentrant: bool) -> None:
    """The hook of a weight in two reentrant checkpoints fires twice in one backward."""

    def backward(model: Net, step: int, i: int) -> None:
        Shared(model, reentrant)(10 * step + i).backward()

    agrees(mix, backward)


@pytest.mark.parametrize("reentrant", [True, False])
@every_mix
def test_recomputed_blocks(mix: str, reentrant: bool) -> None:
    agrees(mix, lambda model, step, i: loss_of(model, 10 * step + i, reentrant=reentrant).backward())


@every_mix
def test_parameters_that_no_microbatch_uses(mix: str) -> None:
    agrees(mix, lambda model, step, i: loss_of(model, 10 * step + i, without=1).backward())


@every_mix
def test_parameters_that_only_an_earlier_microbatch_uses(mix: str) -> None:
    """Their gradients are final all the same when the last microbatch ends."""
    agrees(mix, lambda model, step, i: loss_of(model, 10 * step + i, without=1 if i else None).backward())
    model, optimizer = make(mix)
    for i in range(2):
        with optimizer.accumulate(last=i == 1):
            loss_of(model, i, without=1 if i else None).backward()
    assert all(isinstance(p.grad, OffloadedGrad) for p in model.parameters())


@every_mix
def test_parameters_that_only_the_last_microbatch_uses(mix: str) -> None:
    agrees(mix, lambda model, step, i: loss_of(model, 10 * step + i, without=None if i else 2).backward())


@every_mix
def test_buckets_and_ranges_without_a_gradient_in_some_steps(mix: str) -> None:
    """Step by step: all, no block 0, all but two ranges of one bucket, the head alone, all."""

    def backward(model: Net, step: int, i: int) -> None:
        if step == 3:
            model.head(torch.ones(2, 32)).square().mean().backward()
            return
        frozen = [model.blocks[1].up.bias, model.blocks[1].down.weight] if step == 2 else []
        for p in frozen:
            p.requires_grad_(False)
        loss_of(model, 10 * step + i, without=0 if step == 1 else None).backward()
        for p in frozen:
            p.requires_grad_(True)

    agrees(mix, backward, steps=5)


@every_mix
def test_zeroed_instead_of_none(mix: str) -> None:
    """What has been taken cannot be zeroed, and is none afterwards; what has not, is zero."""
    common = {"backward": lambda model, step, i: loss_of(model, 10 * step + i).backward(), "set_to_none": False}
    assert_equal(train(mix, **common), train("device", context=False, **common))


@pytest.mark.parametrize("mix", OFFLOADED)
def test_microbatches_in_another_order_of_contexts(mix: str) -> None:
    """Only the last block needs to say so; microbatches outside any block count as not the last."""
    results = []
    for way in range(3):
        model, optimizer = make(mix)
        for step in range(3):
            optimizer.zero_grad()
            for i in range(3):
                with microbatch(optimizer, way > 0 and (way == 1 or i == 2), i == 2):
                    loss_of(model, 10 * step + i).backward()
            optimizer.step()
        results.append(snapshot(model, optimizer))
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])


@every_mix
def test_gradients_of_autograd_grad_are_not_taken(mix: str) -> None:
    """A penalty on gradients takes them by torch.autograd.grad: nothing accumulates, so nothing leaves."""

    def backward(model: Net, step: int, i: int) -> None:
        loss = loss_of(model, 10 * step + i)
        (wanted,) = torch.autograd.grad(loss, [model.head.weight], create_graph=True)
        (loss + wanted.square().sum()).backward()

    agrees(mix, backward)


def test_h66_gradients_of_host_buckets_are_let_go_during_backward() -> None:
    """Two buckets may be on their way out; the gradients of all others are on the host when backward ends."""
    for context, most in ((True, 2), (False, 0)):
        model, optimizer = make("host")
        with microbatch(optimizer, context, True):
            loss_of(model, 0).backward()
            held = [sum(buffer.data.numel() for buffer in bucket) for bucket in optimizer._executor._gradients]
        assert len(held) == 8
        assert sum(n > 0 for n in held) == most
        optimizer.step()


@pytest.mark.parametrize("mix", OFFLOADED)
def test_t14_host_memory_does_not_grow_with_the_number_of_microbatches(mix: str) -> None:
    held = []
    for microbatches in (1, 8):
        model, optimizer = make(mix, torch.bfloat16, grad_dtype=torch.float32)
        for i in range(microbatches):
            with optimizer.accumulate(last=i == microbatches - 1):
                loss_of(model, i).backward()
        optimizer.step()
        optimizer.wait()
        held.append(dict(optimizer.backend.ledger.held_bytes))
    assert held[0] == held[1]


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@every_mix
def test_the_next_round_starts_anew_without_zero_grad(mix: str, overlap: bool, last: bool) -> None:
    """`step` uses gradients up; until then rounds add up. Without overlap `.grad` stays, as with torch.optim."""

    def run(cleared: bool, steps: int) -> dict[str, torch.Tensor]:
        model = Net(torch.float32)  # on a backend without poison: without overlap `.grad` is let go, and stays
        optimizer = adamw(model, overlap=overlap, max_grad_norm=None, lr=0.0, backend=None, **MIXES[mix])
        for i in range(2):
            with optimizer.accumulate(last=last):
                loss_of(model, i).backward()
            if i == 1 or steps == 2:
                optimizer.step()
            if cleared:
                optimizer.zero_grad()
        return {"norm": torch.tensor(optimizer.grad_norm)}

    anew, added = run(True, 2), run(False, 1)
    assert anew != added
    assert_equal(run(False, 2), anew if overlap else added)
