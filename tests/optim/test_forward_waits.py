"""Weights arrive by layer: forward of a layer waits for its own, and whoever else reads weights waits for all.

In these tests every lane but the compute lane is as late as it can be: a weight that nobody waited for still holds its
old bits, and a metered backend tells what has run.

Seen red: hooks left out of blocks, of their children, of the root, or of one home of a tied weight; parameters outside
numbered layers not brought along by the layer before them; arrival of all layers at once; arrivals of a module that is
not known left to its hooks; a state dict or a load that waits for nothing; a hook that compiles instead of running.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import LATEST, MIXES, OFFLOADED, Heard, Net, expected, loss_of, make, part_of, stepped, tokens, weights_of
from optimizer_cases import adamw, assert_equal, set_gradients, snapshot

import hostward
from hostward.errors import OrderingError
from hostward.optim.bucket_lifecycle import BucketStep
from hostward.optim.bucket_state import same_bits
from hostward.runtime.simulated.backend import Order, SimulatedBackend

every_mix = pytest.mark.parametrize("mix", MIXES)
offloaded = pytest.mark.parametrize("mix", OFFLOADED)


# ---------------------------------------------------------------- by layer


@pytest.mark.parametrize("mix", ["host", "streamed"])
def test_h1_forward_of_a_layer_waits_for_its_own_weights_and_no_others(mix: str) -> None:
    model, optimizer, heard = stepped(mix)
    reference, weights = expected()
    x = torch.ones(2, 32)
    steps: list[tuple[Callable[[], object], str, list[str]]] = [
        (lambda: model.embed(tokens(0)), "embed.", ["0000.", "0001.embed", "0002.embed"]),
        (lambda: model.blocks[0](x), "blocks.0.", ["0003.blocks.0"]),
        (lambda: model.blocks[1](x), "blocks.1.", ["0004.blocks.1"]),
        # What follows the last block may be read without being called.
        (lambda: model.blocks[2](x), "blocks.2.", ["0005.blocks.2", "0006.norm", "0007.head"]),
    ]
    so_far: list[str] = []
    for call, prefix, buckets in steps:
        call()
        so_far += buckets
        assert heard.arrived() == so_far
        mine = {name: p.detach() for name, p in model.named_parameters() if name.startswith(prefix)}
        assert_equal(mine, {name: weights[name] for name in mine})
    assert_equal(weights_of(model), weights)
    assert same_bits(model(tokens(1)), reference(tokens(1)))
    assert optimizer.plan.offloaded_bytes  # and it is still alive: what is pending runs when an optimizer goes


@offloaded
def test_a_layer_in_the_middle_may_come_first(mix: str) -> None:
    """Lanes keep their order, so what comes before it arrives as well; what comes after it does not."""
    model, optimizer, heard = stepped(mix)
    model.blocks[1](torch.ones(2, 32))
    assert heard.arrived()[-1] == "0004.blocks.1"
    assert_equal(weights_of(model.blocks[1]), part_of(expected()[1], "blocks.1"))
    optimizer.wait()


@offloaded
@pytest.mark.parametrize("child", ["norm", "up", "down"])
def test_a_block_that_is_never_called_itself(mix: str, child: str) -> None:
    """Pipelines and tensor-parallel plans call the modules inside."""
    model, optimizer, heard = stepped(mix)
    model.blocks[1].get_submodule(child)(torch.ones(2, 32))
    assert heard.arrived()[-1] == "0004.blocks.1"
    assert_equal(weights_of(model.blocks[1]), part_of(expected()[1], "blocks.1"))
    optimizer.wait()


MODES: dict[str, Callable[[], Any]] = {
    "train": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("evaluated", [False, True])
@every_mix
def test_t42_evaluation_right_after_the_step_sees_the_new_weights(mix: str, evaluated: bool, mode: str) -> None:
    model, optimizer, _ = stepped(mix)
    reference, weights = expected()
    with MODES[mode]():
        out = model.train(not evaluated)(tokens(1))
    assert same_bits(out.clone().detach(), reference(tokens(1)).detach())
    assert_equal(weights_of(model), weights)
    optimizer.zero_grad()
    loss_of(model.train(), 1).backward()
    optimizer.step()
    other_model, other = make("device")
    for step in range(2):
        other.zero_grad()
        loss_of(other_model, step).backward()
        other.step()
    assert_equal(snapshot(model, optimizer), snapshot(other_model, other))


# ---------------------------------------------------------------- other readers


READERS: dict[str, Callable[[Net, hostward.AdamW], object]] = {
    "wait": lambda model, optimizer: optimizer.wait(),
    "arrive": lambda model, optimizer: optimizer.wait_for_weights(),
    "state_dict of the module": lambda model, optimizer: model.state_dict(),
    "state_dict of the optimizer": lambda model, optimizer: optimizer.state_dict(),
    "deepcopy after arrive": lambda model, optimizer: (optimizer.wait_for_weights(), copy.deepcopy(model)),
    "reseed": lambda model, optimizer: optimizer.reseed(["scale"]),
    "load of other weights": lambda model, optimizer: model.load_state_dict(Net().state_dict()),
}


@pytest.mark.parametrize("reader", READERS)
@every_mix
def test_whoever_reads_all_weights_waits_for_all(mix: str, reader: str) -> None:
    model, optimizer, _ = stepped(mix)
    weights = expected()[1]
    READERS[reader](model, optimizer)
    if reader == "load of other weights":
        weights = weights_of(Net())
    assert_equal(weights_of(model), weights)


@pytest.mark.parametrize("part", ["", "blocks.2", "head", "blocks"])
@offloaded
def test_a_state_dict_holds_the_new_weights_and_so_does_that_of_a_part(mix: str, part: str) -> None:
    model, optimizer, heard = stepped(mix)
    state = {name: value.clone() for name, value in model.get_submodule(part).state_dict().items()}
    assert heard.arrived()
    assert_equal(state, part_of(expected()[1], part))
    optimizer.wait()


@offloaded
def test_a_load_of_equal_weights_right_after_the_step_keeps_the_remainders(mix: str) -> None:
    """What is compared with the load is what the step made, not what lay there before it."""
    results = []
    for each in (mix, "device"):
        model, optimizer = make(each, torch.bfloat16, LATEST)
        new = make("device", torch.bfloat16)
        for m, o in ((model, optimizer), new):
            loss_of(m, 0).backward()
            o.step()
        model.load_state_dict(new[0].state_dict())
        results.append(snapshot(model, optimizer))
    assert_equal(*results)
    assert results[0]["master head.weight"].bfloat16().float().ne(results[0]["master head.weight"]).any()


@every_mix
def test_a_second_step_without_a_forward_in_between(mix: str) -> None:
    results = []
    for each, order in ((mix, LATEST), ("device", None)):
        model, optimizer = make(each, order=order)
        for step in range(3):
            set_gradients(model, step)
            optimizer.step()
        results.append(snapshot(model, optimizer))
    assert_equal(*results)


@offloaded
def test_a_copy_of_the_module_makes_nobody_wait(mix: str) -> None:
    model, optimizer, _ = stepped(mix)
    optimizer.wait_for_weights()
    average = copy.deepcopy(model)
    loss_of(model, 1).backward()
    heard = Heard(optimizer.backend)  # type: ignore[arg-type]
    optimizer.step()
    average(tokens(0))
    average.state_dict()
    average.load_state_dict({k: v.clone() for k, v in average.state_dict().items()})
    assert heard.arrived() == []


@offloaded
def test_weights_have_arrived_when_the_optimizer_is_gone(mix: str) -> None:
    """What is pending belongs to the optimizer's memory: it goes only once that has run."""
    model, optimizer, heard = stepped(mix)
    del optimizer
    gc.collect()
    assert heard.arrived()
    assert_equal(weights_of(model), expected()[1])


# ---------------------------------------------------------------- modules of other shapes


@offloaded
def test_without_a_module_weights_arrive_with_the_step(mix: str) -> None:
    """Nobody would tell when they are used."""
    model = Net()
    optimizer = adamw(
        list(model.named_parameters()),
        **MIXES[mix],
        max_grad_norm=0.5,
        backend=SimulatedBackend(threads=1, order=LATEST),
    )
    loss_of(model, 0).backward()
    optimizer.step()
    assert_equal(weights_of(model), expected()[1])


@offloaded
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_module_may_be_given_apart_from_the_parameters(mix: str, wrapped: bool) -> None:
    model = Net()
    whole = torch.nn.Sequential(model) if wrapped else model
    optimizer = adamw(
        [{"params": list(model.named_parameters())}],
        module=whole,
        **MIXES[mix],
        max_grad_norm=0.5,
        fence=False,
        backend=SimulatedBackend(threads=1, order=LATEST),
    )
    loss_of(whole, 0).backward()
    optimizer.step()
    assert not same_bits(model.head.weight.detach(), expected()[1]["head.weight"])
    assert same_bits(whole(tokens(1)), expected()[0](tokens(1)))
    assert_equal(weights_of(model), expected()[1])


class FunctionalHead(Net):
    """Uses the head's weight without calling the head, as fused losses do."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.linear(self.norm(x), self.head.weight, self.head.bias)


class FunctionalBlock(torch.nn.Module):
    """A numbered layer whose own modules are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.up.weight + self.up.bias)


class FunctionalBlocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(2000, 16)
        self.blocks = torch.nn.ModuleList(FunctionalBlock() for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class Transposed(Net):
    """Weights that are not contiguous are stepped in flat copies, and scattered back."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)
        for block in self.blocks:
            block.up.weight = torch.nn.Parameter(block.up.weight.detach().t())  # type: ignore[union-attr]


class Tied(torch.nn.Module):
    """The head's weight is that of the embedding."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(50, 16)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.functional = functional

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens % 50)
        for block in self.blocks:
            x = torch.tanh(block(x))
        out: torch.Tensor = x @ self.head.weight.t() if self.functional else self.head(x)
        return out


class RootOnly(torch.nn.Module):
    """All parameters belong to the module itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Parameter(torch.randn(2000, 8))
        self.out = torch.nn.Parameter(torch.randn(8, 4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed[tokens] @ self.out


class Experts(torch.nn.Module):
    """Numbered layers inside numbered layers; a router decides which expert is called, and some never are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(2000, 8)
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {"experts": torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3)), "gate": torch.nn.Linear(8, 3)}
            )
            for _ in range(2)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(tokens)
        for layer in self.layers:
            chosen = int(layer["gate"](x).sum(0).argmax())
            x = x + torch.tanh(layer["experts"][chosen](x))
        return x


SHAPES: dict[str, Callable[[], torch.nn.Module]] = {
    "functional head": FunctionalHead,
    "functional blocks": FunctionalBlocks,
    "weights not contiguous": Transposed,
    "tied, called": lambda: Tied(functional=False),
    "tied, functional": lambda: Tied(functional=True),
    "root only": RootOnly,
    "experts": Experts,
    "one layer": lambda: torch.nn.Sequential(
        torch.nn.Embedding(2000, 8, _weight=torch.linspace(-1, 1, 16000).view(2000, 8))
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
@every_mix
def test_t22_modules_of_any_shape_train_alike(mix: str, shape: str) -> None:
    results = []
    for each, order in (("device", None), (mix, LATEST if mix != "mixed" else Order(seed=4))):
        model = SHAPES[shape]()
        optimizer = adamw(
            model,
            **MIXES[each],
            max_grad_norm=0.5,
            backend=SimulatedBackend(threads=1, order=order or Order(eager=True)),
        )
        outputs = []
        for step in range(4):
            optimizer.zero_grad()
            with optimizer.accumulate(last=True):
                out = model(tokens(step))
                out.float().square().mean().backward()
            outputs.append(out.detach().clone())
            optimizer.step()
        results.append(snapshot(model, optimizer) | {"outputs": torch.stack(outputs)})
    assert_equal(results[0], results[1])


@pytest.mark.parametrize("mix", OFFLOADED)
@pytest.mark.parametrize("layer", ["blocks.0", "blocks.1"])
def test_h1_a_gradient_of_a_layer_whose_use_nobody_reported(mix: str, layer: str) -> None:
    """The last layer's gradients come first, and with them all weights arrive: that is too late for the others."""
    model, optimizer, _ = stepped(mix, fence=False)
    optimizer.zero_grad()
    module = model.get_submodule(layer)
    hooks, before = module._forward_pre_hooks, dict(module._forward_pre_hooks)
    inner = {m: dict(m._forward_pre_hooks) for m in module.modules()}
    for m in inner:
        m._forward_pre_hooks.clear()
    with pytest.raises(OrderingError, match=f"of layer '{layer}' was used before"):
        loss_of(model, 1).backward()
    for m, kept in inner.items():
        m._forward_pre_hooks.update(kept)
    assert dict(hooks) == before
    optimizer.zero_grad()
    optimizer.wait()
    loss_of(model, 1).backward()
    optimizer.step()


def test_a_layer_that_only_the_second_microbatch_uses_has_arrived() -> None:
    model, optimizer, _ = stepped("mixed")
    optimizer.zero_grad()
    for i, without in enumerate((1, None)):
        with optimizer.accumulate(last=i == 1):
            loss_of(model, i, without=without).backward()
    optimizer.step()
    optimizer.wait()


@offloaded
def test_a_wait_that_was_interrupted_is_made_again(mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: a layer that counted as waited for, of a bucket that did not: every later backward raised."""

    def trained(*, interrupted: bool) -> dict[str, torch.Tensor]:
        model, optimizer, _ = stepped(mix)
        optimizer.zero_grad()

        def stop(_: BucketStep) -> None:
            raise KeyboardInterrupt

        if interrupted:
            with monkeypatch.context() as patch:
                patch.setattr(BucketStep, "used", stop)
                with pytest.raises(KeyboardInterrupt):
                    loss_of(model, 1)
        with optimizer.accumulate(last=True):
            loss_of(model, 1).backward()
        optimizer.step()
        return snapshot(model, optimizer)

    assert_equal(trained(interrupted=True), trained(interrupted=False))


def test_the_old_name_of_wait_for_weights_warns() -> None:
    _, optimizer, _ = stepped("host")
    with pytest.warns(DeprecationWarning, match=r"arrive\(\) is wait_for_weights\(\) now"):
        optimizer.arrive()
    assert optimizer._executor.pending == set()
