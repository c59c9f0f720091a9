"""What happens to offloaded activations besides one backward for each forward: nothing that was not so before.

Every scenario runs with and without offloading, in several orders of lanes; gradients are equal, and afterwards no hook
is installed, no host block in use, and nothing dead waits for a garbage collection.

Seen red: state that is kept per call order, handles that may be unpacked once, memory dropped while a copy is at it,
hooks that a failed forward leaves installed, a mutation that nobody notices, hooks of others that are left out.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from activation_cases import FEW, left_over, offloading
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import hostward
from hostward.errors import ModelError
from hostward.runtime.simulated.backend import Order
from hostward.schedule.ops import Lane

Scenario = Callable[["Net"], None]
autograd = torch._C._autograd


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Block(torch.nn.Module):
    """A residual layer. `fail`, if set, is raised in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 24)
        self.down = torch.nn.Linear(24, 8)
        self.fail: BaseException | None = None
        self.inner: Callable[[torch.Tensor], torch.Tensor] = torch.nn.functional.gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.up(x))
        if self.fail is not None:
            raise self.fail
        out: torch.Tensor = x + self.down(y)
        return out


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Block() for _ in range(4))
        self.order = [0, 1, 2, 3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            x = self.layers[i](x)
        return x


def batch(seed: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


def loss(net: Net, seed: int) -> torch.Tensor:
    return net(batch(seed)).square().sum()


def gradients(net: Net) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def equal(a: list[torch.Tensor | None], b: list[torch.Tensor | None]) -> bool:
    return all(x is y if x is None or y is None else torch.equal(x, y) for x, y in zip(a, b, strict=True))


def retained(net: Net) -> None:
    found = loss(net, 0)
    for i in range(3):
        found.backward(retain_graph=i < 2)


def double_backward(net: Net) -> None:
    x = batch(0).requires_grad_()
    (first,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    first.square().sum().backward()


def two_losses(net: Net) -> None:
    out = net(batch(0))
    out.square().sum().backward(retain_graph=True)
    out.exp().mean().backward()


def half_a_graph(net: Net) -> None:
    x = batch(0)
    outs = []
    for layer in net.layers:
        x = layer(x)
        outs.append(x)
    outs[1].square().sum().backward()


def branch_that_nobody_uses(net: Net) -> None:
    x = net.layers[0](batch(0))
    net.layers[1](x)
    net.layers[3](net.layers[2](x)).square().sum().backward()


def forward_without_backward(net: Net) -> None:
    loss(net, 1)
    loss(net, 0).backward()


def evaluation_in_between(net: Net) -> None:
    found = loss(net, 0)
    with torch.no_grad():
        loss(net, 1)
    with torch.inference_mode():
        loss(net, 2)
    net.eval()
    loss(net, 3)
    net.train()
    found.backward()


def microbatches_in_order(net: Net) -> None:
    for found in [loss(net, seed) for seed in range(4)]:
        found.backward()


def microbatches_in_reverse(net: Net) -> None:
    for found in reversed([loss(net, seed) for seed in range(4)]):
        found.backward()


def one_forward_one_backward(net: Net) -> None:
    """As a pipeline's stage does it: two microbatches in flight."""
    waiting = [loss(net, 0)]
    for seed in range(1, 5):
        waiting.append(loss(net, seed))
        waiting.pop(0).backward()
    waiting.pop().backward()


def a_microbatch_is_dropped(net: Net) -> None:
    losses = [loss(net, seed) for seed in range(3)]
    losses[2].backward()
    del losses[1]
    losses[0].backward()


def three_forwards_in_one_graph(net: Net) -> None:
    (loss(net, 0) + loss(net, 1) * loss(net, 2)).backward()


def another_order_of_layers(net: Net) -> None:
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]):
        net.order = order
        loss(net, 0).backward()


def layers_used_twice(net: Net) -> None:
    net.order = [0, 1, 0, 2, 3, 1]
    loss(net, 0).backward()


def failed_forward(net: Net) -> None:
    for layer in net.layers:
        layer.fail = ValueError("forward fails")  # type: ignore[assignment]
        with pytest.raises(ValueError, match="forward fails"):
            loss(net, 1)
        layer.fail = None  # type: ignore[assignment]
        loss(net, 0).backward()


def interrupted_forward(net: Net) -> None:
    """Hooks that torch calls after a failure are not called for this one."""
    for layer in net.layers:
        layer.fail = KeyboardInterrupt()  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            loss(net, 1)
        layer.fail = None  # type: ignore[assignment]
        found = loss(net, 0)
        assert autograd._top_saved_tensors_default_hooks(True) is None, "hooks are on outside all layers"
        found.backward()


def failed_backward(net: Net) -> None:
    for k in range(4):

        def fail(_: torch.Tensor) -> None:
            raise ValueError("backward fails")

        handle = net.layers[k].down.weight.register_hook(fail)  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="backward fails"):
            loss(net, 1).backward()
        handle.remove()
        net.zero_grad()
        loss(net, 0).backward()


def gradients_of_inputs_alone(net: Net) -> None:
    x = batch(0).requires_grad_()
    torch.autograd.grad(net(x).sum(), x)
    loss(net, 0).backward(inputs=[net.layers[1].up.weight])  # type: ignore[union-attr]


def checkpoint_within_a_layer(net: Net) -> None:
    for reentrant in (True, False):
        for layer in net.layers:
            layer.inner = lambda y, r=reentrant: checkpoint(torch.nn.functional.gelu, y, use_reentrant=r)  # type: ignore[assignment]
        loss(net, 0).backward()


def checkpoint_around_layers(net: Net) -> None:
    for reentrant in (True, False):
        x = batch(0).requires_grad_()
        for layer in net.layers:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        x.square().sum().backward()


def saved_views(net: Net) -> None:
    """Expanded, transposed and offset views, an empty tensor, a square matrix and its transpose (H31, H32)."""

    def inner(y: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(y)
        first, second = y.chunk(2, -1)
        square = y[:, :6].square()
        odd = (square * square.t()).sum() + (y[:0] * 2).sum() + (y[1:4:2, ::3] * y[1:4:2, ::3]).sum()
        wide = y[:1].expand(6, 24) * y
        return torch.nn.functional.gelu(torch.cat([second * first, first.exp()], -1)) + torch.tanh(odd) * wide

    for layer in net.layers:
        layer.inner = inner  # type: ignore[assignment]
    loss(net, 0).backward()


def frozen_layers(net: Net) -> None:
    for p in net.layers[1].parameters():
        p.requires_grad_(False)
    loss(net, 0).backward()


def selective_checkpoint_within_a_layer(net: Net) -> None:
    """torch's own: what its policy keeps of a checkpoint is kept by torch, the rest runs again."""

    def policy(_: object, op: object, *arguments: object, **options: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    def inner(y: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(
            lambda z: torch.tanh(torch.nn.functional.gelu(z) @ torch.ones(24, 24)),
            y,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
        return out

    for layer in net.layers:
        layer.inner = inner  # type: ignore[assignment]
    loss(net, 0).backward()


class _Own(torch.autograd.Function):
    """Whose backward hands on views of what it has saved (H16): they live on when nobody unpacks any more."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y.exp(), y.sin())
        return y.tanh()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
        first, _ = ctx.saved_tensors
        return first.view(-1).view(6, 24)  # nothing is computed: the gradient is the saved tensor's own memory


def views_of_saved_tensors_as_gradients(net: Net) -> None:
    for layer in net.layers:
        layer.inner = _Own.apply  # type: ignore[assignment]
    x = batch(0).requires_grad_()
    found = net(x).square().sum()
    kept = [torch.autograd.grad(found, x, retain_graph=True)[0] for _ in range(2)]
    found.backward()
    assert torch.equal(kept[0], kept[1])
    loss(net, 1).backward()


SCENARIOS: list[Scenario] = [
    retained, double_backward, two_losses, half_a_graph, branch_that_nobody_uses, forward_without_backward,
    evaluation_in_between, microbatches_in_order, microbatches_in_reverse, one_forward_one_backward,
    a_microbatch_is_dropped, three_forwards_in_one_graph, another_order_of_layers, layers_used_twice, failed_forward,
    interrupted_forward, failed_backward, gradients_of_inputs_alone, checkpoint_within_a_layer,
    checkpoint_around_layers, saved_views, frozen_layers, selective_checkpoint_within_a_layer,
    views_of_saved_tensors_as_gradients,
]  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_h33_h34_h35_h36_h37_h41(scenario: Scenario) -> None:
    plain = Net()
    scenario(plain)
    expected = gradients(plain)
    assert all(g is None or g.isfinite().all() for g in expected)
    for num_layers, order in [*((3, order) for order in (Order(), *FEW)), (1, FEW[1])]:
        net = Net()
        with offloading(net, order, num_layers=num_layers, double_buffering=num_layers == 1) as run:
            scenario(net)
            assert equal(gradients(net), expected), order
            loss(net, 9).backward()  # what died in flight is seen to
            run.backend.synchronise()
            assert left_over(run) == 0, order
            assert not run._transfers.orphans
        assert autograd._top_saved_tensors_default_hooks(True) is None


def in_place(before: bool) -> Scenario:
    """Changes a tensor that the next layer has saved."""

    def run(net: Net) -> None:
        x = net.layers[0](batch(0))
        y = net.layers[1](x)
        if before:
            x.add_(1.0)
        z = net.layers[3](net.layers[2](y))
        if not before:
            x.add_(1.0)
        z.sum().backward()

    return run


@pytest.mark.parametrize("before", [True, False], ids=["before it has left", "after it has left"])
@pytest.mark.parametrize("order", FEW)
def test_h29_a_saved_tensor_that_is_modified(before: bool, order: Order) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        in_place(before)(Net())
    net = Net()
    with offloading(net, order) as run:
        with pytest.raises(ModelError, match="modified by an in-place operation"):
            in_place(before)(net)
        net.zero_grad()
        loss(net, 0).backward()
        run.backend.synchronise()
    expected = Net()
    loss(expected, 0).backward()
    assert equal(gradients(net), gradients(expected))


def test_a_tensor_that_stays_and_is_modified() -> None:
    net = Net()
    with offloading(net, min_bytes=1 << 30), pytest.raises(ModelError, match="modified by an in-place operation"):
        in_place(True)(net)


def test_an_output_that_stays_does_not_keep_itself_alive() -> None:
    """`exp` saves its result: holding that very tensor would be a cycle through the graph, which nothing collects."""
    seen = []

    def inner(y: torch.Tensor) -> torch.Tensor:
        out = torch.exp(torch.tanh(y))
        seen.append(weakref.ref(out))
        return out

    for min_bytes in (64, 1 << 30):
        net = Net()
        for layer in net.layers:
            layer.inner = inner  # type: ignore[assignment]
        with offloading(net, min_bytes=min_bytes):
            loss(net, 0)  # backward would break the cycle
        assert [ref() for ref in seen] == [None] * len(seen)


def test_of_a_large_storage_only_what_is_saved_is_copied() -> None:
    def copied(inner: Callable[[torch.Tensor], torch.Tensor]) -> int:
        net = Net()
        for layer in net.layers:
            layer.inner = inner  # type: ignore[assignment]
        with offloading(net, num_layers=1) as run:
            loss(net, 0).backward()
            return run.report().offloaded_bytes

    row = 24 * 4
    plain = copied(lambda y: y + 0.0)
    # Two of six rows: less than half of the storage. Four of them: nearly all of it, so it is copied as it is.
    assert copied(lambda y: y + 0.0 + (y[:2] * y[:2]).sum()) == plain + 2 * row
    assert copied(lambda y: y + 0.0 + (y[:4] * y[:4]).sum()) == plain + 6 * row


def test_h12_what_dies_while_a_copy_is_at_it_waits_for_that_copy() -> None:
    """On its way out: a forward that is dropped half way. On its way back: a backward that fails just before."""
    net = Net()
    with offloading(net, Order(late=frozenset({Lane.D2H, Lane.H2D}))) as run:
        net.layers[1](net.layers[0](batch(0)))
        dropped = [event for _, event, _ in run._transfers.orphans]
        assert dropped
        run._transfers.collect()
        assert all(event.native.done for event in dropped)  # type: ignore[attr-defined]

        def fail(_: torch.Tensor) -> None:
            raise ValueError("backward fails")

        handle = net.layers[3].down.weight.register_hook(fail)  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="backward fails"):
            loss(net, 0).backward()
        handle.remove()
        torch.ones(1, requires_grad=True).sum().backward()  # torch holds the last failed graph until here
        back = [tensors[0] for tensors, *_ in run._transfers.orphans if tensors[0].dtype is torch.uint8]
        assert back
        run._transfers.collect()
        assert not run._transfers.orphans


def test_weights_from_elsewhere_and_detached_ones_stay() -> None:
    """A parameter that no module of the model holds is one all the same; so is what shares its memory with one."""
    outside = torch.nn.Parameter(torch.eye(24))

    def kept(inner: Callable[[Block], Callable[[torch.Tensor], torch.Tensor]]) -> int:
        net = Net()
        for layer in net.layers:
            layer.inner = inner(layer)  # type: ignore[arg-type, assignment]
        with offloading(net, num_layers=3) as run:
            loss(net, 0).backward()
            return run.report().kept_bytes["it is a weight"]

    plain = kept(lambda _: torch.nn.functional.gelu)
    assert kept(lambda _: lambda y: torch.nn.functional.gelu(y @ outside)) == plain + 3 * 24 * 24 * 4
    assert kept(lambda layer: lambda y: torch.nn.functional.gelu(y * layer.up.bias.detach())) == plain + 3 * 24 * 4


class Marked(torch.Tensor):
    """What libraries wrap tensors in."""


def test_h42_tensors_of_other_classes_stay() -> None:
    def inner(y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(y.as_subclass(Marked)).as_subclass(torch.Tensor)

    plain, net = Net(), Net()
    for of in (plain, net):
        for layer in of.layers:
            layer.inner = inner  # type: ignore[assignment]
    loss(plain, 0).backward()
    with offloading(net) as run:
        loss(net, 0).backward()
        assert run.report().kept_bytes["it is no plain tensor on the device"] == 3 * 6 * 24 * 4
    assert equal(gradients(net), gradients(plain))


def test_hooks_of_others_within_a_layer_win_there() -> None:
    net, seen = Net(), []

    def inner(y: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t.clone(), lambda t: t):
            return torch.nn.functional.gelu(y)

    for layer in net.layers:
        layer.inner = inner  # type: ignore[assignment]
    with offloading(net):
        loss(net, 0).backward()
    assert len(seen) == 4
    plain = Net()
    loss(plain, 0).backward()
    assert equal(gradients(net), gradients(plain))


def _half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16() if tensor.dtype is torch.float32 else tensor


AROUND: dict[str, Callable[[], Any]] = {
    "rounds when it packs": lambda: torch.autograd.graph.saved_tensors_hooks(_half, torch.Tensor.float),
    "rounds when it unpacks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: _half(t).float()),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "allow_mutation_on_saved_tensors": torch.autograd.graph.allow_mutation_on_saved_tensors,
}


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("order", FEW)
def test_hooks_of_others_around_layers_are_applied(name: str, order: Order) -> None:
    found = []
    for offload in (False, True):
        net = Net()
        with offloading(net, order) if offload else contextlib.nullcontext() as run:
            with AROUND[name]():
                first = net.layers[0](batch(0))
                second = torch.tanh(net.layers[1](first))
                out = net.layers[3](net.layers[2](second))
                if name.startswith("allow"):
                    second.mul_(2)
                out.square().sum().backward()
            found.append(gradients(net))
            if run is not None:
                assert (run.report().offloaded_bytes > 0) is (name == "rounds when it unpacks")
                assert ("saved-tensor hooks of other code have packed it" in run.report().explain()) is (
                    name != "rounds when it unpacks"
                )
    assert equal(*found)


def test_hooks_of_others_that_cross_the_border_of_a_layer_are_an_error() -> None:
    net = Net()
    context = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)

    def inner(y: torch.Tensor) -> torch.Tensor:
        context.__enter__()
        return y

    net.layers[0].inner = inner  # type: ignore[assignment]
    plain = Net()
    loss(plain, 0).backward()
    with offloading(net):
        with pytest.raises(ModelError, match="cross the border of a layer"):
            loss(net, 0)
        context.__exit__()
        net.layers[0].inner = torch.nn.functional.gelu  # type: ignore[assignment]
        loss(net, 0).backward()
    assert equal(gradients(net), gradients(plain))


def test_functorch_is_refused_with_the_cure() -> None:
    net = Net()
    with offloading(net), pytest.raises(ModelError, match=r"layers\.0 cannot be offloaded here"):
        torch.func.grad(lambda x: net(x).sum())(batch(0))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["copy", "pickle"])
def test_a_copy_of_the_model_is_not_attached(how: Callable[[Net], Net]) -> None:
    net = Net()
    with offloading(net) as run:
        other = how(net)
        loss(other, 0).backward()
        assert run.report().offloaded_bytes == 0
        loss(net, 0).backward()
        assert run.report().offloaded_bytes > 0
    assert equal(gradients(other), gradients(net))


def test_detached_between_forward_and_backward() -> None:
    """What has been saved comes back; after that nothing is left."""
    net = Net()
    run = hostward.attach(net, activations=hostward.Activations(min_bytes=64))
    found = loss(net, 0)
    run.detach()
    found.backward()
    plain = Net()
    loss(plain, 0).backward()
    assert equal(gradients(net), gradients(plain))
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in net.layers)


def test_attached_twice_in_a_row() -> None:
    net, plain = Net(), Net()
    for _ in range(2):
        with offloading(net):
            loss(net, 0).backward()
        loss(plain, 0).backward()
    assert equal(gradients(net), gradients(plain))
