"""Faults inside a step and around it: errors of host tasks, memory that is not there, Ctrl-C at any operation.

After each of them the state is whole and training goes on, or the optimizer says that it is torn until it is given a
checkpoint. Never is a step lost without a word.

Seen red: a host step's error that leaves the optimizer in good standing; slots marked as staged before they were taken;
a step that is cut short and not noticed; gradients of a torn step stepped with after the load; a schedule without the
buckets of the torn step kept for the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hostward
from hostward.errors import MemoryLimitError, ModelError, NativeError
from hostward.optim.bucket_state import same_bits
from hostward.runtime.backend import Tier
from hostward.runtime.simulated import backend as simulated
from hostward.runtime.simulated.backend import Order, SimulatedBackend
from hostward.schedule.ops import Lane

MIXES = {
    "device": {"offload_fraction": 0.0},
    "host": {"offload_fraction": 1.0, "streamed_fraction": 0.0},
    "streamed": {"offload_fraction": 1.0, "streamed_fraction": 1.0},
    "mixed": {"offload_fraction": 0.7, "streamed_fraction": 0.5},
}
EAGER = Order(eager=True)
LATEST = Order(late=frozenset(lane for lane in Lane if lane is not Lane.COMPUTE))
every_mix = pytest.mark.parametrize("mix", MIXES)


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: torch.Tensor, without: int | None = None) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i != without:
                x = torch.tanh(layer(x)) + x
        return x


class Training:
    """A network, its optimizer, and the seed of the next batch."""

    def __init__(self, mix: str, order: Order = EAGER, backend: type[SimulatedBackend] = SimulatedBackend) -> None:
        self.model = Net()
        self.on = backend(threads=1, order=order)
        self.optimizer = hostward.AdamW(self.model, lr=1e-2, max_grad_norm=0.5, backend=self.on, **MIXES[mix])  # type: ignore[arg-type]
        self.seed = 0

    def backward(self, without: int | None = None) -> None:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(self.seed))
        self.seed += 1
        self.optimizer.zero_grad()
        with self.optimizer.accumulate(last=True):
            self.model(x, without).square().mean().backward()

    def step(self, without: int | None = None) -> None:
        self.backward(without)
        self.optimizer.step()

    def everything(self) -> dict[str, torch.Tensor]:
        self.optimizer.wait()
        found = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for name, entry in self.optimizer.state_dict()["state"].items():
            found |= {f"{role} {name}": value for role, value in entry.items()}
        return found

    def checkpoint(self) -> Callable[[], None]:
        """Saves; what is returned loads."""
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        state, seed = self.optimizer.state_dict(), self.seed

        def load() -> None:
            self.model.load_state_dict(weights)
            self.optimizer.load_state_dict(state)
            self.seed = seed

        return load


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not same_bits(a[name], b[name])] == []


def undisturbed(*without: int | None) -> dict[str, torch.Tensor]:
    training = Training("device")
    for one in without:
        training.step(one)
    return training.everything()


# ---------------------------------------------------------------- host tasks


class FailsAt:
    """An AdamW kernel that raises `error` at its n-th call."""

    def __init__(self, n: int, error: BaseException) -> None:
        self.left, self.error = n, error

    def __call__(self, task: object) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error
        hostward.kernels.cpu.adamw.adamw_step(task)  # type: ignore[attr-defined]


READERS: dict[str, Callable[[Training], object]] = {
    "wait": lambda t: t.optimizer.wait(),
    "forward": lambda t: t.model(torch.ones(2, 8)),
    "state_dict": lambda t: t.optimizer.state_dict(),
    "state_dict of the module": lambda t: t.model.state_dict(),
    "arrive": lambda t: t.optimizer.wait_for_weights(),
    "backward": lambda t: t.backward(),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("mix", ["host", "streamed", "mixed"])
def test_an_error_of_a_host_task_surfaces_where_weights_are_waited_for_and_is_not_forgotten(
    mix: str, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(mix, LATEST)
    training.step()
    load = training.checkpoint()
    with monkeypatch.context() as patch:
        patch.setattr(simulated, "adamw_step", FailsAt(3, NativeError("a host step failed", why="on purpose")))
        training.step()
        with pytest.raises(NativeError, match="a host step failed"):
            READERS[reader](training)
    for call in (training.optimizer.step, training.optimizer.state_dict):
        with pytest.raises(ModelError, match="interrupted half way"):
            call()
    load()
    for _ in range(2):
        training.step()
    assert_equal(training.everything(), undisturbed(None, None, None))


@pytest.mark.parametrize("order", [EAGER, LATEST], ids=["eager", "late"])
def test_a_step_count_beyond_the_bias_tables_is_an_error_and_no_wrong_step(
    order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real kernel's own check: a count that no table reaches."""
    from hostward.kernels.cpu.adamw import bias_tables
    from hostward.optim import op_binding

    training = Training("host", order)
    load = training.checkpoint()
    with monkeypatch.context() as patch:
        patch.setattr(op_binding, "bias_tables", lambda beta1, beta2, steps: bias_tables(beta1, beta2, 2))

        def two_steps() -> None:
            for _ in range(2):
                training.step()
                training.optimizer.wait()

        with pytest.raises(NativeError):
            two_steps()
        training.on.drain()  # each of the steps that are still queued would tell it again
    with pytest.raises(ModelError, match="interrupted half way"):
        training.optimizer.state_dict()
    training.optimizer._executor._bindings.forget_step_bound()
    training.optimizer._executor._bindings._tables.clear()
    load()
    training.step()
    assert_equal(training.everything(), undisturbed(None))


# ---------------------------------------------------------------- memory


class Full(SimulatedBackend):
    """No device memory is left for staging slots while `full` is set."""

    full = False

    def allocate(self, tier: Tier, *arguments: Any, **options: Any) -> Any:
        if self.full and tier is Tier.DEVICE and "staging slots" in arguments:
            raise MemoryLimitError("staging slots: 1 byte of device memory could not be allocated", fix="free some")
        return super().allocate(tier, *arguments, **options)


@pytest.mark.parametrize("context", [True, False])
@pytest.mark.parametrize("mix", ["streamed", "mixed"])
def test_t04_slots_that_cannot_be_allocated_leave_the_state_whole_and_the_next_step_possible(
    mix: str, context: bool
) -> None:
    training = Training(mix, EAGER, Full)
    on = training.on
    assert isinstance(on, Full)
    training.step()
    before = training.everything()
    held = dict(on.ledger.held_bytes)
    on.full = True

    def attempt() -> None:
        if context:
            training.step()
        else:
            training.optimizer.zero_grad()
            training.model(torch.ones(2, 8)).square().mean().backward()
            training.optimizer.step()

    for _ in range(2):
        with pytest.raises(MemoryLimitError, match="staging slots"):
            attempt()
        training.optimizer.zero_grad()
    on.full = False
    assert_equal(before, training.everything())
    assert {k: n for k, n in on.ledger.held_bytes.items() if n} == {k: n for k, n in held.items() if n}
    training.seed = 1
    training.step()
    assert_equal(training.everything(), undisturbed(None, None))


# ---------------------------------------------------------------- Ctrl-C


class Interrupted(SimulatedBackend):
    """Ctrl-C arrives as operation number `at` is issued."""

    at: int | None = None

    def _issue(self, *arguments: Any, **options: Any) -> Any:
        if self.at is not None:
            self.at -= 1
            if self.at < 0:
                self.at = None
                raise KeyboardInterrupt
        return super()._issue(*arguments, **options)


def outcome(mix: str, order: Order, at: int, without: int | None, *, in_step: bool) -> str:
    """Interrupt one step at its k-th operation; what came of it. Whatever it is, training goes on from there."""
    training = Training(mix, order, Interrupted)
    on = training.on
    assert isinstance(on, Interrupted)
    training.step()
    load, before = training.checkpoint(), training.everything()
    if in_step:
        training.backward(without)
    on.at = at
    try:
        if not in_step:
            training.backward(without)
        training.optimizer.step()
        training.optimizer.wait()
    except KeyboardInterrupt:
        pass
    else:
        on.at = None
        assert_equal(training.everything(), undisturbed(None, without))
        return "done"
    assert on.at is None
    if training.optimizer._executor.torn:
        with pytest.raises(ModelError, match="interrupted half way"):
            training.optimizer.step()
        load()
        training.step(without)
        assert_equal(training.everything(), undisturbed(None, without))
        return "torn"
    now = training.everything()
    if all(same_bits(now[name], before[name]) for name in now):
        training.seed = 1
        training.step()  # of all layers, where the interrupted one may have left one out
        assert_equal(training.everything(), undisturbed(None, None))
        return "whole, before the step"
    assert_equal(now, undisturbed(None, without))
    training.step()
    assert_equal(training.everything(), undisturbed(None, without, None))
    return "whole, after the step"


@pytest.mark.parametrize(
    ("mix", "in_step", "order"),
    [
        *(("mixed", in_step, order) for in_step in (True, False) for order in (EAGER, LATEST)),
        *(("device", True, LATEST), ("device", False, EAGER), ("host", True, EAGER), ("host", False, LATEST)),
        *(("streamed", True, LATEST), ("streamed", False, EAGER)),
    ],
)
def test_t62_ctrl_c_at_any_operation_is_noticed_or_leaves_everything_whole(
    mix: str, in_step: bool, order: Order
) -> None:
    """At every operation of a mixed step as issued, at every fourth of the others."""
    without = 1 if order is LATEST else None
    every = 1 if mix == "mixed" and in_step and order is EAGER else 4
    found = set()
    for at in range(0, 400, every):
        result = outcome(mix, order, at, without, in_step=in_step)
        found.add(result)
        if result == "done":
            break
    assert {"done", "torn", "whole, before the step"} <= found


@pytest.mark.parametrize("mix", ["host", "streamed", "mixed"])
def test_t62_ctrl_c_while_weights_arrive_loses_none_of_them(mix: str) -> None:
    """Interrupted at any operation of the forward that waits for them, and run again."""
    for at in range(60):
        training = Training(mix, LATEST, Interrupted)
        on = training.on
        assert isinstance(on, Interrupted)
        training.step()
        on.at = at
        try:
            training.model(torch.ones(2, 8))
        except KeyboardInterrupt:
            training.step()
            assert_equal(training.everything(), undisturbed(None, None))
        else:
            break
    assert at >= 5
    assert at < 59
