"""Offloaded activations inside the capture of a CUDA graph, on a backend that keeps the rules of captures.

Seen red: copies that the end of a capture does not wait for, after forward, and after a backward that has not reached
all; waits for copies of another capture, or of none, in a release, a reload, when memory is let go, at the end;
backward elsewhere than its forward; host memory that is not the graph's alone, is locked in a capture, or is not
returned; captures without retained memory or beside saved tensors of before; turns that change in a capture; limits
that forget the graph.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from activation_cases import LANES, loss_of, same, transformer
from torch.utils.checkpoint import checkpoint

import hostward
from hostward.errors import ModelError
from hostward.runtime.backend import Buffer, Event, Tier
from hostward.runtime.simulated.backend import Order, SimulatedBackend, operation_of
from hostward.runtime.simulated.race_detector import Operation
from hostward.schedule.ops import Lane

ORDERS = [Order(eager=True), Order(late=frozenset(LANES)), Order(late=frozenset({Lane.D2H})), Order(seed=3)]


class Captures(SimulatedBackend):
    """Refuses what a CUDA stream that is being captured refuses; operations run all the same, as in a first replay."""

    number = 0
    _newest = 0

    def __init__(self, order: Order | None = None) -> None:
        super().__init__(order=order, threads=1)
        self._captured: dict[Operation, list[Operation]] = {}
        """Those of the present capture, and what each comes behind."""
        self._last: dict[Lane, Operation] = {}
        self._capture_of: dict[Operation, int] = {}
        self.used: dict[int, set[int]] = {}
        """By capture, addresses of host memory that its copies use."""

    def capture(self) -> int:
        return self.number

    def capturing(self) -> bool:
        return self.capture() != 0

    @contextmanager
    def capturing_a_graph(self) -> Iterator[None]:
        """One capture. It begins with empty lanes, and all of its operations come before the compute lane's last."""
        self.synchronise()
        self._captured, self._last = {}, {}
        Captures._newest += 1
        self.number = Captures._newest
        try:
            yield
            assert self._unjoined() == []
        finally:
            self.number = 0

    def allocate(self, tier: Tier, *arguments: Any, **options: Any) -> list[Buffer]:
        assert not self.number, "memory is locked in a capture"
        return super().allocate(tier, *arguments, **options)

    def synchronise(self) -> None:
        assert not self.number, "a wait on the host in a capture"
        super().synchronise()

    def begin_step(self) -> None:
        assert not self.number, "a turn begins in a capture"
        super().begin_step()

    def end_step(self) -> None:
        assert not self.number, "a turn ends in a capture"

    def _issue(
        self,
        lane: Lane,
        name: str,
        run: Callable[[], None] | None,
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
        waits: Sequence[Event],
        nbytes: int = 0,
    ) -> Operation:
        before = [earlier for event in waits if (earlier := operation_of(event)) is not None]
        assert all(self._capture_of[earlier] == self.number for earlier in before), f"{name} waits across a capture"
        if self.number and lane is not Lane.COMPUTE and lane not in self._last:
            assert any(earlier.lane in self._last for earlier in before), f"{name} is not part of the graph"
        operation = super()._issue(lane, name, run, reads, writes, waits, nbytes)
        self._capture_of[operation] = self.number
        if self.number:
            self._captured[operation] = [*before, *([self._last[lane]] if lane in self._last else [])]
            self._last[lane] = operation
        used = {b.data.data_ptr() for b in (*reads, *writes) if b.tier is Tier.HOST}
        self.used.setdefault(self.number, set()).update(used)
        return operation

    def _unjoined(self) -> list[str]:
        """Copies that the compute lane has not waited for."""
        reached: set[Operation] = set()
        open_ = [self._last[Lane.COMPUTE]] if Lane.COMPUTE in self._last else []
        while open_:
            operation = open_.pop()
            if operation not in reached:
                reached.add(operation)
                open_ += self._captured[operation]
        return [operation.name for operation in self._captured if operation not in reached]


class Block(torch.nn.Module):
    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            return checkpoint(self.run, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
        return self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return x + torch.tanh(y) * torch.sigmoid(y)


class Net(torch.nn.Module):
    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Block(recompute=recompute) for _ in range(4))

    def forward(self, x: torch.Tensor, layers: int = 4) -> torch.Tensor:
        for layer in list(self.layers)[:layers]:
            x = layer(x)
        return x


def batch(seed: int, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def gradients(net: torch.nn.Module, seed: int, microbatches: int = 1) -> list[torch.Tensor]:
    net.zero_grad()
    for i in range(microbatches):
        x = loss_of(net, seed + i) if hasattr(net, "config") else net(batch(seed + i)).square().mean()
        x.backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def attached(net: torch.nn.Module, order: Order | None = None, **options: Any) -> tuple[hostward.Attachment, Captures]:
    backend = Captures(order)
    how = hostward.Activations(**{"min_bytes": 64, "retain_pinned_buffers": True, **options})
    return hostward.attach(net, activations=how, backend=backend), backend


NETS: dict[str, Callable[[], torch.nn.Module]] = {
    "plain": Net,
    "checkpointed": lambda: Net(recompute=True),
    "Llama": lambda: transformer("Llama"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "three layers": {},
    "one layer": {"num_layers": 1},
    "double buffering": {"double_buffering": True, "num_layers": 2},
    "none in flight": {"max_in_flight": 0},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", NETS)
def test_t44_forward_and_backward_are_captured_together(name: str, options: str) -> None:
    microbatches = 1 + (list(NETS).index(name) + list(OPTIONS).index(options)) % 2
    expected = [gradients(NETS[name](), 5 * seed, microbatches) for seed in range(4)]
    for order in ORDERS[: 2 if name == "Llama" else None]:
        net = NETS[name]()
        run, backend = attached(net, order, **OPTIONS[options])
        for seed in range(2):
            assert same(gradients(net, 5 * seed, microbatches), expected[seed])
        locked, before = run.report().host_bytes, run.report()
        with backend.capturing_a_graph():
            assert same(gradients(net, 10, microbatches), expected[2]), order
        after = run.report()
        assert after.offloaded_bytes - before.offloaded_bytes == after.reloaded_bytes - before.reloaded_bytes > 0
        assert (after.on_demand_bytes, after.host_bytes) == (0, locked)
        # Later forwards have memory of their own, and waits of their own.
        assert same(gradients(net, 15, microbatches), expected[3]), order
        assert run.report().host_bytes > locked
        run.detach()
        assert run.report().host_bytes == 0
        assert backend.ledger.by_owner(Tier.HOST) == {}


def test_h25_each_graph_has_host_memory_of_its_own() -> None:
    """Between two captures, iterations lock what the next one needs."""
    net = Net()
    run, backend = attached(net)
    used = []
    for seed in range(3):
        gradients(net, seed)
        with backend.capturing_a_graph():
            gradients(net, seed)
            used.append(backend.used.pop(backend.number))
    backend.used.clear()
    gradients(net, 9)
    used.append(backend.used[0])
    assert all(used)
    assert len(set().union(*used)) == sum(map(len, used))
    run.detach()
    assert backend.ledger.by_owner(Tier.HOST) == {}


def test_memory_is_locked_before_the_capture_or_never() -> None:
    net = Net()
    run, backend = attached(net)
    with backend.capturing_a_graph(), pytest.raises(ModelError, match="do not suffice for a CUDA graph"):
        net(batch(0))
    gradients(net, 0)
    with backend.capturing_a_graph():
        with pytest.raises(ModelError, match="do not suffice for a CUDA graph"):
            net(batch(0, rows=64))
        run._transfers.join()
    run.detach()
    assert backend.ledger.by_owner(Tier.HOST) == {}


def test_what_a_graph_has_counts_towards_the_limit() -> None:
    net = Net()
    run, backend = attached(net, num_layers=1)
    gradients(net, 0)
    needed = run.report().host_bytes
    run.detach()
    run, backend = attached(net, num_layers=1, host_bytes=needed)
    gradients(net, 0)
    with backend.capturing_a_graph():
        gradients(net, 0)
    with pytest.raises(hostward.errors.MemoryLimitError, match=f"{needed:,} were allowed"):
        gradients(net, 0)
    run.detach()


def test_t44_without_retained_memory_a_capture_is_refused() -> None:
    net = Net()
    run, backend = attached(net, retain_pinned_buffers=False)
    expected = gradients(net, 0)
    with backend.capturing_a_graph():
        with pytest.raises(ModelError, match="inside the capture of a CUDA graph") as error:
            net(batch(0))
        with torch.no_grad():
            net(batch(0))
    assert "retain_pinned_buffers=True" in str(error.value)
    assert same(gradients(net, 0), expected)
    run.detach()


def test_t44_what_is_on_the_host_from_before_is_refused() -> None:
    net = Net()
    run, backend = attached(net)
    loss = net(batch(0)).square().mean()
    with backend.capturing_a_graph(), pytest.raises(ModelError, match="saved by an earlier forward"):
        net(batch(0))
    with backend.capturing_a_graph(), pytest.raises(ModelError, match="backward in the capture of a CUDA graph"):
        loss.backward()
    run.detach()


def test_t44_forward_and_backward_in_two_captures_are_refused() -> None:
    """As `make_graphed_callables` makes them; or backward outside of any."""
    net = Net()
    run, backend = attached(net)
    for _ in range(2):
        gradients(net, 0)
        with backend.capturing_a_graph():
            loss = net(batch(0)).square().mean()
        with pytest.raises(ModelError, match="backward outside of any CUDA graph of a forward in the capture"):
            loss.backward(retain_graph=True)
        with backend.capturing_a_graph(), pytest.raises(ModelError, match="of a forward in the capture of another"):
            loss.backward()
        del loss
        gradients(net, 1)
    run.detach()
    assert backend.ledger.by_owner(Tier.HOST) == {}


def test_a_capture_may_end_after_forward() -> None:
    """The last layer has run: nothing is under way. Later backwards leave what the graph has saved where it is."""
    net = Net()
    run, backend = attached(net, num_layers=1, double_buffering=True)
    expected = gradients(net, 0)
    with backend.capturing_a_graph():
        out = net(batch(0))
    assert same(gradients(net, 0), expected)
    del out
    assert same(gradients(net, 0), expected)
    run.detach()
    assert backend.ledger.by_owner(Tier.HOST) == {}


def test_outputs_that_are_dropped_in_a_capture() -> None:
    net = Net()
    run, backend = attached(net)
    expected = gradients(net, 0)
    with backend.capturing_a_graph():
        net(batch(1), layers=3)
        net.layers[3](batch(2))
    gradients(net, 0)
    with backend.capturing_a_graph():
        net(batch(1))
        assert same(gradients(net, 0), expected)
    assert same(gradients(net, 0), expected)
    run.detach()
    assert backend.ledger.by_owner(Tier.HOST) == {}


def test_what_a_captured_backward_has_not_reached() -> None:
    """It is waited for in the capture all the same; afterwards nobody waits for it, nor may anybody use it."""
    net = Net()
    run, backend = attached(net)
    expected = gradients(net, 0)
    for used in (False, True):
        gradients(net, 0)
        with backend.capturing_a_graph():
            reached = net(batch(0), layers=2)
            beyond = net.layers[2](reached)
            torch.autograd.grad(reached.sum(), net.layers[1].linear.weight)
        if used:
            with pytest.raises(ModelError, match="backward outside of any CUDA graph of a forward in the capture"):
                torch.autograd.grad(beyond.sum(), net.layers[2].linear.weight)
        assert same(gradients(net, 0), expected)
        del beyond
        assert same(gradients(net, 0), expected)
    del reached
    gradients(net, 0)
    run.detach()
    assert backend.ledger.by_owner(Tier.HOST) == {}


def test_after_a_capture_that_failed() -> None:
    net = Net()
    run, backend = attached(net)
    expected = gradients(net, 0)
    wrong = batch(0).detach()[:, :3]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), backend.capturing_a_graph():
        net(wrong, layers=net(batch(0), layers=2).dim())
    assert same(gradients(net, 0), expected)

    def fail(_: torch.Tensor) -> None:
        raise ValueError("backward fails")

    handle = net.layers[2].linear.weight.register_hook(fail)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="backward fails"), backend.capturing_a_graph():
        gradients(net, 0)
    handle.remove()
    torch.ones(1, requires_grad=True).sum().backward()  # torch holds the last failed graph until here
    assert same(gradients(net, 0), expected)
    with backend.capturing_a_graph():
        net(batch(0))
    gradients(net, 0)
    with backend.capturing_a_graph():
        assert same(gradients(net, 0), expected)
    run.detach()
    assert backend.ledger.by_owner(Tier.HOST) == {}


def test_after_a_capture_iterations_of_many_sizes_share_memory_as_before() -> None:
    def varied(net: Net) -> None:
        for rows in (8, 24, 16, 24, 8):
            net(batch(0, rows)).square().mean().backward()

    net, other = Net(), Net()
    run, backend = attached(net)
    alone, _ = attached(other)
    gradients(net, 0)
    before = run.report().host_bytes
    with backend.capturing_a_graph():
        gradients(net, 0)
    varied(net)
    varied(other)
    assert run.report().host_bytes == before + alone.report().host_bytes
    run.detach()
    alone.detach()


def test_what_died_before_the_capture_is_let_go_after_it() -> None:
    net = Net()
    run, backend = attached(net, Order(late=frozenset({Lane.D2H, Lane.H2D})))
    expected = gradients(net, 0)
    net.layers[1](net.layers[0](batch(0)))
    with backend.capturing_a_graph():
        assert same(gradients(net, 0), expected)
    assert run._transfers.orphans
    assert same(gradients(net, 0), expected)
    assert not run._transfers.orphans
    run.detach()


def test_retained_graphs_within_a_capture() -> None:
    net = Net()
    expected = [gradients(Net(), 0)]
    run, backend = attached(net)
    gradients(net, 0)
    inner = list[torch.Tensor]()
    with backend.capturing_a_graph():
        handle = net.layers[1].linear.register_forward_hook(lambda *call: inner.append(call[-1]))  # type: ignore[union-attr]
        loss = net(batch(0)).square().mean()
        handle.remove()
        for _ in range(3):
            net.zero_grad()
            loss.backward(retain_graph=True)
            expected.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    assert all(same(found, expected[0]) for found in expected)
    with pytest.raises(ModelError, match="backward outside of any CUDA graph"):
        loss.backward()
    with pytest.raises(ModelError, match="backward outside of any CUDA graph"):
        torch.autograd.grad(inner[0].sum(), net.layers[1].linear.weight)  # past the layer's output
    del loss
    inner.clear()
    assert same(gradients(net, 0), expected[0])
    run.detach()


def test_detached_during_a_capture_memory_goes_back_later() -> None:
    net = Net()
    run, backend = attached(net)
    gradients(net, 0)
    with backend.capturing_a_graph():
        gradients(net, 0)
        run.detach()
        assert backend.ledger.by_owner(Tier.HOST) != {}
    run.detach()
    assert backend.ledger.by_owner(Tier.HOST) == {}
