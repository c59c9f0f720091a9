"""Layers that write their own weights through `.data` in forward train as those that write them in torch's usual way.

Seen red: the fence lowered in these layers, too: for state on the host, in every way of writing, also where weights are
offloaded; and each way of writing with its step of the walk through the code left out.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import LATEST, MIXES, OFFLOADED, Block, Net, adamw, loss_of, microbatch
from optimizer_cases import assert_equal, snapshot

import hostward
from hostward.model.fence import FencedParameter
from hostward.model.forward_code import layers_that_take_data
from hostward.runtime.simulated.backend import Order, SimulatedBackend

LIMIT = 0.12
"""Weights of `up` are larger at first, and again after steps of LR."""
LR = 0.05


def limit(weight: torch.Tensor) -> None:
    weight.data.clamp_(-LIMIT, LIMIT)


class Limiter:
    """A helper that is no module."""

    def limit_it(self, weight: torch.Tensor) -> None:
        weight.data.clamp_(-LIMIT, LIMIT)


class Usual(Block):
    """Written in the way that torch's version counter sees."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-LIMIT, LIMIT)
        return super().forward(x)


class InForward(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.up.weight.data.clamp_(-LIMIT, LIMIT)
        return super().forward(x)


class InMethod(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.apply_limit()
        return super().forward(x)

    def apply_limit(self) -> None:
        self.up.weight.data.clamp_(-LIMIT, LIMIT)


class InFunction(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        limit(self.up.weight)
        return super().forward(x)


class InHelper(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.limiter.limit_it(self.up.weight)
        return super().forward(x)


class Inherited(InForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class ByName(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        getattr(self.up.weight, "data").clamp_(-LIMIT, LIMIT)  # noqa: B009
        return super().forward(x)


class Limited(torch.nn.Linear):
    """A part of a layer: the write comes after other parts of the layer have run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-LIMIT, LIMIT)
        return super().forward(x)


def in_part(block: Block) -> None:
    block.up.__class__ = Limited


def in_helper(block: Block) -> None:
    block.__class__ = InHelper
    block.limiter = Limiter()


def in_hook(block: Block) -> None:
    block.register_forward_pre_hook(lambda module, _: limit(module.up.weight))


def in_late_hook(_: Block) -> None:
    """Registered only when all is made, see `run`."""


def in_forward_of_the_instance(block: Block) -> None:
    def forward(self: Block, x: torch.Tensor) -> torch.Tensor:
        self.up.weight.data.clamp_(-LIMIT, LIMIT)
        return Block.forward(self, x)

    block.forward = types.MethodType(forward, block)


def in_partial(block: Block) -> None:
    before = block.forward

    @functools.wraps(before)
    def limited(x: torch.Tensor) -> torch.Tensor:
        limit(block.up.weight)
        return before(x)

    block.forward = functools.partial(limited)


class WholeNet(Net):
    """The model writes weights of its layers, before each of them runs."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            block.up.weight.data.clamp_(-LIMIT, LIMIT)
            x = block(x)
        return self.head(self.norm(x))


def of_class(kind: type[Block]) -> Callable[[Block], None]:
    def change(block: Block) -> None:
        block.__class__ = kind

    return change


WAYS: dict[str, Callable[[Block], None]] = {
    "in forward": of_class(InForward),
    "in what it inherits": of_class(Inherited),
    "in a method": of_class(InMethod),
    "in a function": of_class(InFunction),
    "by name": of_class(ByName),
    "in a part": in_part,
    "in a helper": in_helper,
    "in a hook": in_hook,
    "in a late hook": in_late_hook,
    "in a forward of the instance": in_forward_of_the_instance,
    "in a partial": in_partial,
}


def run(
    way: Callable[[Block], None] | None,
    mix: str,
    *,
    order: Order = LATEST,
    away: bool = False,
    dtype: torch.dtype = torch.float32,
    kind: type[Net] = Net,
    compiled: bool = False,
    **forward_options: Any,
) -> dict[str, torch.Tensor]:
    model = kind(dtype)
    if way is not None:
        for block in model.blocks:
            way(block)
    options: dict[str, Any] = {"grad_dtype": None if dtype is torch.float32 else torch.float32}
    backend = SimulatedBackend(threads=1, order=order)
    optimizer = adamw(model, backend=backend, max_grad_norm=0.5, lr=LR, **MIXES[mix], **options)
    attached = hostward.attach(model, optimizer, weights=2, layers=list(model.blocks)) if away else None
    if way is in_late_hook:
        for block in model.blocks:
            in_hook(block)
    forward = torch.compile(model, backend="eager") if compiled else model
    for step in range(3):
        optimizer.zero_grad()
        for i in range(2):
            with microbatch(optimizer, step % 2 == 0, i == 1):
                loss_of(forward, 2 * step + i, **forward_options).backward()
        optimizer.step()
        assert {type(p) for p in model.parameters()} == {FencedParameter}
    if attached is not None:
        attached.detach()
    return snapshot(model, optimizer)


@functools.cache
def usual(mix: str = "device", **options: Any) -> dict[str, torch.Tensor]:
    return run(of_class(Usual), mix, order=Order(eager=True), **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mix", MIXES)
def test_the_write_counts(way: str, mix: str) -> None:
    assert_equal(run(WAYS[way], mix), usual())


def test_it_changes_what_is_trained() -> None:
    """The negative control: a run without the write ends elsewhere."""
    with pytest.raises(AssertionError):
        assert_equal(run(None, "device"), usual())


@pytest.mark.parametrize("way", WAYS)
def test_with_16_bit_weights(way: str) -> None:
    mix = OFFLOADED[list(WAYS).index(way) % len(OFFLOADED)]
    assert_equal(run(WAYS[way], mix, dtype=torch.bfloat16), usual(dtype=torch.bfloat16))


@pytest.mark.parametrize("way", WAYS)
def test_with_weights_away(way: str) -> None:
    assert_equal(run(WAYS[way], "host", away=True), usual())


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("away", [False, True])
def test_the_model_writes_weights_of_its_layers(mix: str, away: bool) -> None:
    if away and mix != "host":
        return
    assert_equal(run(None, mix, kind=WholeNet, away=away), usual())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("away", [False, True])
def test_in_layers_that_are_checkpointed(reentrant: bool, away: bool) -> None:
    """Their forward runs once more in backward, and writes what is there already."""
    assert_equal(run(WAYS["in forward"], "host", away=away, reentrant=reentrant), usual(reentrant=reentrant))


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("way", ["in forward", "in a function", "in a part"])
def test_compiled(way: str) -> None:
    assert_equal(run(WAYS[way], "mixed", compiled=True), usual())


def test_a_forward_may_name_what_is_gone_or_not_there_yet() -> None:
    class Names(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x is None:
                self.gone.limit_it(x, later)
            return super().forward(x)

    model, limiter = Names(4, 4), Limiter()
    model.gone = weakref.proxy(limiter)
    del limiter
    assert layers_that_take_data(model, {id(model.weight): "layer"}) == frozenset()
    later = None


def test_code_that_takes_no_data_costs_nothing() -> None:
    """Weights are plain in forward of all other layers (tests/programs/test_any_program.py)."""
    model = Net()
    in_part(model.blocks[1])
    optimizer = adamw(model, backend=SimulatedBackend(threads=1), **MIXES["host"])
    seen: dict[int, set[type]] = {}
    for i, block in enumerate(model.blocks):
        block.fail = lambda i=i, block=block: seen.update({i: {type(p) for p in block.parameters()}})
    loss_of(model, 0).backward()
    optimizer.step()
    loss_of(model, 1).backward()
    assert seen == {0: {torch.nn.Parameter}, 1: {FencedParameter}, 2: {torch.nn.Parameter}}
