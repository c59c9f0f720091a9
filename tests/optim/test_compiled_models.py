"""Compiled models: hostward breaks the graph where it must, and nothing of itself is compiled (T43, H47).

Seen red: a hook that is skipped while what it calls is compiled (other bits, through torch's own numpy), the step or
the context compiled, arrival inside the compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from networks import MIXES, Net, loss_of, make, tokens
from optimizer_cases import adamw, assert_equal, snapshot

import hostward
from hostward.runtime.simulated.backend import Order, SimulatedBackend
from hostward.schedule.ops import Lane

# The compiler looks at .grad of everything, and warns of what it does itself.
pytestmark = pytest.mark.filterwarnings("ignore")
LATEST = Order(late=frozenset(lane for lane in Lane if lane is not Lane.COMPUTE))
STEPS = 3
OURS = hostward.__path__[0]


class Watched:
    """A compiler backend that notes from which lines of code its graphs come."""

    def __init__(self, name: str) -> None:
        self.compile = torch._dynamo.lookup_backend(name)
        self.lines: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., object]:
        self.lines += [node.stack_trace for node in graph.graph.nodes if node.stack_trace]
        return self.compile(graph, inputs)  # type: ignore[no-any-return]

    def require_only_the_model(self) -> None:
        assert self.lines
        assert [line for line in self.lines if OURS in line] == []


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(model: Net, how: str, backend: Watched) -> Callable[[int], torch.Tensor]:
    if how == "whole model":
        whole = torch.compile(model, backend=backend)
        return lambda seed: whole(tokens(seed))
    if how == "in place":
        model.compile(backend=backend)
    else:
        for block in model.blocks:
            block.compile(backend=backend)
    return lambda seed: model(tokens(seed))


@pytest.mark.parametrize(
    ("how", "name"), [("per layer", "aot_eager"), ("whole model", "eager"), ("in place", "aot_eager")]
)
def test_t43_h47_compiled_layers_wait_for_their_weights(how: str, name: str) -> None:
    results = []
    for mix, order in (("device", None), ("mixed", LATEST)):
        torch.compiler.reset()
        model, optimizer = make(mix, order=order)
        backend = Watched(name)
        forward = compiled(model, how, backend)
        outputs = []
        for step in range(STEPS):
            optimizer.zero_grad()
            with optimizer.accumulate(last=True):
                out = forward(step)
                (out - 1.0).square().mean().backward()
            outputs.append(out.detach().clone())
            optimizer.step()
        results.append(snapshot(model, optimizer) | {"outputs": torch.stack(outputs)})
        backend.require_only_the_model()
    assert_equal(*results)


def test_t43_a_whole_training_step_in_one_compiled_function() -> None:
    results, backend = [], Watched("aot_eager")
    for mix, order, compiles in (("device", None, False), ("mixed", LATEST, True)):
        model, optimizer = make(mix, order=order)

        def one_step(seed: int, model: Net = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            with optimizer.accumulate(last=True):
                loss_of(model, seed).backward()
            optimizer.step()

        run = torch.compile(one_step, backend=backend) if compiles else one_step
        for step in range(STEPS):
            run(step)
        results.append(snapshot(model, optimizer))
    backend.require_only_the_model()
    assert_equal(*results)


@pytest.mark.parametrize(("how", "name"), [("whole model", "aot_eager"), ("in place", "eager")])
def test_t43_a_model_that_was_compiled_and_called_before_the_optimizer_was_made(how: str, name: str) -> None:
    """Dynamo looks at hooks when it compiles, and never again."""
    results = []
    for mix, order in (("device", None), ("mixed", LATEST)):
        torch.compiler.reset()
        model = Net()
        forward = compiled(model, how, Watched(name))
        (forward(0) - 1.0).square().mean().backward()
        model.zero_grad()
        backend = SimulatedBackend(threads=1, order=order or Order(eager=True))
        optimizer = adamw(model, backend=backend, max_grad_norm=0.5, **MIXES[mix])
        outputs = []
        for step in range(STEPS):
            out = forward(step)
            (out - 1.0).square().mean().backward()
            outputs.append(out.detach().clone())
            optimizer.step()
            optimizer.zero_grad()
        results.append(snapshot(model, optimizer) | {"outputs": torch.stack(outputs)})
    assert_equal(*results)
