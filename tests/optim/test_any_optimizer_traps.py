"""Optimizers that mix parameters, count, draw or keep tensors give the bits that they give without offloading."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_optimizer_cases import (
    OPTIMIZERS,
    OWNER,
    all_parameters,
    assert_same,
    groups,
    offloaded,
    parameters,
    set_gradients,
    simulated,
    train,
)
from hypothesis import given, settings, strategies as st
from optimizer_traps import TRAPS, Collects, GlobalOfState, KeepsTheLast, ListOfState, TensorCounter, Trap

from hostward.optim.any_optimizer.chunked_step import stepped_alone
from hostward.optim.any_optimizer.offload import offload_optimizer_states
from hostward.optim.bucket_state import same_bits
from hostward.runtime.backend import Lane, Tier

ORDERS: list[dict[str, Any]] = [
    {},
    {"late": frozenset({Lane.H2D})},
    {"late": frozenset({Lane.D2H})},
    {"late": frozenset({Lane.H2D, Lane.D2H})},
    {"seed": 1},
]


def train_both(plain: Any, optimizer: Any, steps: int, first: int = 0) -> None:
    for n in range(first, first + steps):
        for each in (plain, optimizer):
            torch.manual_seed(n)
            train(each, steps=1, first=n)


@pytest.mark.parametrize("name", TRAPS)
@pytest.mark.parametrize("turn", range(2))
def test_a_trap_gives_its_own_bits(name: str, turn: int) -> None:
    """In two orders of lanes, other ones for the next trap."""
    order = ORDERS[(2 * list(TRAPS).index(name) + turn) % len(ORDERS)]
    plain = TRAPS[name](groups(parameters()))
    optimizer, states = offloaded(TRAPS[name], backend=simulated(**order))
    train_both(plain, optimizer, steps=5)
    assert_same(optimizer, plain)
    assert states.offloaded_bytes > 0 or name == "ListOfEntries"  # which has all of it itself
    states.detach()
    train_both(plain, optimizer, steps=1, first=5)
    assert_same(optimizer, plain)


def device_bytes(states: Any) -> int:
    return int(states.backend.ledger.held_bytes[Tier.DEVICE, f"{OWNER} on the device"])


def of_many(kind: Any) -> tuple[Any, Any]:
    """Momentum of 12 MiB in chunks of one MiB."""
    optimizer = kind(parameters(shapes=[(256, 256)] * 48))
    return optimizer, offload_optimizer_states(optimizer, chunk_size_mb=1, backend=simulated())


@pytest.mark.parametrize("kind", [TensorCounter, GlobalOfState])
def test_a_step_that_walks_has_four_chunks_on_the_device(kind: Any) -> None:
    peaks = []

    class Watched(kind):  # type: ignore[misc]
        def factor(self, group: dict[str, Any], i: int, p: torch.Tensor) -> Any:
            peaks.append(device_bytes(states) if states else 0)
            return super().factor(group, i, p)

    states: Any = None
    optimizer, states = of_many(Watched)
    train(optimizer, steps=4)
    assert len(states._away.chunks) >= 12
    assert 0 < max(peaks) <= 4 << 20
    assert device_bytes(states) == 0


def test_the_first_step_does_not_keep_what_it_makes() -> None:
    kept = []

    class Watched(TensorCounter):
        def end(self) -> None:
            kept.append(sum("momentum" not in entry.away for entry in self.state.values()))

    optimizer, states = of_many(Watched)
    train(optimizer, steps=1)
    assert kept[0] <= 8
    assert states.offloaded_bytes == sum(p.nbytes for p in all_parameters(optimizer) if p.numel() > 1)


def test_a_step_that_collects_everything_has_everything_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    optimizer, states = of_many(Collects)
    train(optimizer, steps=3)
    assert device_bytes(states) == 0
    (record,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert record.getMessage().startswith("Collects had 11,796,480 bytes of state on the device at once")  # 45 of 48


def test_who_keeps_a_tensor_of_the_state_keeps_it_alive() -> None:
    """What somebody has stays on the device, and goes when it is let go."""
    plain, (optimizer, states) = KeepsTheLast(groups(parameters())), offloaded(KeepsTheLast)
    train_both(plain, optimizer, steps=3)
    assert device_bytes(states) > 0
    assert optimizer.last is optimizer.state[all_parameters(optimizer)[2]]["momentum"]
    assert same_bits(optimizer.last, plain.last)
    assert same_bits(optimizer.view, plain.view)
    for each in (plain, optimizer):
        each.last = each.view = None
        each.end = lambda: None  # type: ignore[method-assign]
    train_both(plain, optimizer, steps=1, first=3)
    assert device_bytes(states) == 0
    assert_same(optimizer, plain)


def test_state_that_is_in_a_list_as_well_stays() -> None:
    optimizer, states = offloaded(ListOfState)
    train(optimizer, steps=3)
    assert device_bytes(states) == sum(p.nbytes for p in states._away.chunk_of)
    optimizer.tensors = []
    optimizer.begin = lambda: None  # type: ignore[method-assign]
    train(optimizer, steps=1, first=3)
    assert states.offloaded_bytes == sum(p.nbytes for p in all_parameters(optimizer) if p.numel() > 1)


def test_a_variable_of_the_caller_stays_the_state() -> None:
    plain, optimizer = (OPTIMIZERS["adamw foreach"](groups(parameters())) for _ in range(2))
    train(plain, optimizer, steps=1)
    moments = [each.state[all_parameters(each)[0]]["exp_avg"] for each in (plain, optimizer)]
    offload_optimizer_states(optimizer, chunk_size_mb=1, backend=simulated(late=frozenset({Lane.D2H, Lane.H2D})))
    for n in (1, 2):
        for moment in moments:
            moment.mul_(0.5)
        train(plain, optimizer, steps=1, first=n)
        assert same_bits(*moments)
    assert_same(optimizer, plain)


@pytest.mark.parametrize("order", ORDERS, ids=lambda o: " ".join(sorted(map(str, o.get("late", o)))) or "issued")
@pytest.mark.parametrize("name", ["adamw foreach", "adamw fused", "muon like", "restless"])
def test_between_steps_state_is_read_and_written_as_it_would_be(name: str, order: dict[str, Any]) -> None:
    plain, (optimizer, _) = (
        OPTIMIZERS[name](groups(parameters())),
        offloaded(OPTIMIZERS[name], backend=simulated(**order)),
    )
    for n in range(4):
        train(plain, optimizer, steps=1, first=n)
        for i in (0, 3, 9):
            ours, theirs = (each.state[all_parameters(each)[i]] for each in (optimizer, plain))
            for key, value in theirs.items():
                if torch.is_tensor(value) and value.numel() > 1:
                    assert same_bits(ours[key], value)
                    value.mul_(0.75)
                    ours[key].mul_(0.75)
                    break
    assert_same(optimizer, plain)


def test_copies_and_pickles_have_plain_state() -> None:
    plain, (optimizer, _) = Trap(groups(parameters())), offloaded(Trap)
    train(plain, optimizer, steps=2)
    for made in (copy.deepcopy(dict(optimizer.state)), pickle.loads(pickle.dumps(dict(optimizer.state)))):
        for mine, entry in zip(made.values(), plain.state.values(), strict=True):
            assert type(mine) is dict
            assert same_bits(mine["momentum"], entry["momentum"])
    entry, theirs = (each.state[all_parameters(each)[0]] for each in (optimizer, plain))
    assert repr(entry) == repr(theirs)
    assert type(copy.deepcopy(optimizer.state).default_factory()) is dict
    train(plain, optimizer, steps=1, first=2)
    assert_same(optimizer, plain)


WAYS: dict[str, Callable[[Any], Any]] = {
    "item": lambda e: e["momentum"],
    "get": lambda e: e.get("momentum"),
    "setdefault": lambda e: e.setdefault("momentum", None),
    "pop": lambda e: e.pop("momentum"),
    "popitem": lambda e: e.popitem()[1],
    "values": lambda e: next(iter(e.values())),
    "items": lambda e: next(iter(e.items()))[1],
    "list": lambda e: [value for _, value in e.items()][0],  # noqa: RUF015
    "dict": lambda e: dict(e)["momentum"],
    "stars": lambda e: {**e}["momentum"],
    "call": lambda e: (lambda **values: values)(**e)["momentum"],
    "update": lambda e: (d := {}, d.update(e))[0]["momentum"],
    "or": lambda e: (e | {})["momentum"],
    "reverse or": lambda e: ({} | e)["momentum"],
    "copy": lambda e: e.copy()["momentum"],
    "shallow": lambda e: copy.copy(e)["momentum"],
    "deep": lambda e: copy.deepcopy(e)["momentum"],
    "pickle": lambda e: pickle.loads(pickle.dumps(e))["momentum"],
}


@pytest.mark.parametrize("way", WAYS)
def test_no_way_to_a_value_goes_past_the_copy(way: str) -> None:
    """The host tensor is not complete before the copies are over, and is on another device than its parameter."""
    plain, (optimizer, states) = Trap(groups(parameters())), offloaded(Trap)
    train(plain, optimizer, steps=2)
    entry, theirs = (each.state[all_parameters(each)[5]] for each in (optimizer, plain))
    home = dict.__getitem__(entry, "momentum")
    found = WAYS[way](entry)
    assert found.data_ptr() != home.data_ptr()
    assert same_bits(found, theirs["momentum"])
    assert entry == {} or same_bits(entry["momentum"], theirs["momentum"])
    assert states.offloaded_bytes > 0


def test_questions_without_a_tensor_move_nothing() -> None:
    optimizer, states = offloaded(Trap)
    train(optimizer, steps=2)
    entry = optimizer.state[all_parameters(optimizer)[5]]
    assert (len(entry), list(entry), list(entry.keys()), "momentum" in entry, bool(entry)) == (
        *(1, ["momentum"], ["momentum"], True, True),
    )
    assert device_bytes(states) == 0


def test_the_next_chunk_is_read_ahead() -> None:
    """Once a step is known, no chunk but the first is asked for before its copy has been issued."""
    waited = []

    class Watched(Trap):
        def move(self, p: torch.Tensor, rate: Any) -> None:
            staging = states._away.staging if states else None
            chunk = states._away.chunk_of.get(p) if states else None
            if chunk is not None and chunk not in staging._staged:
                waited.append(p)
            super().move(p, rate)

    states: Any = None
    optimizer, states = of_many(Watched)
    train(optimizer, steps=4)
    assert not waited


class Closure(torch.optim.SGD):
    """Evaluates its closure twice, as methods that look ahead do."""

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        first = closure()
        with torch.no_grad():
            super().step()
        return first + closure()


@pytest.mark.parametrize("make", [lambda g: Closure(g, lr=1e-2, momentum=0.9), torch.optim.LBFGS], ids=["two", "lbfgs"])
def test_a_closure_is_the_optimizers_own(make: Any) -> None:
    results = []
    for attach in (False, True):
        optimizer = make(parameters()[:-2])  # LBFGS asks for gradients that are contiguous
        if attach:
            offload_optimizer_states(
                optimizer, chunk_size_mb=1, backend=simulated(late=frozenset({Lane.H2D, Lane.D2H}))
            )
        calls: list[bool] = []

        def closure(optimizer: Any = optimizer, calls: Any = calls) -> torch.Tensor:
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = sum((p - 1).square().mean() for p in all_parameters(optimizer))
            loss.backward()
            return loss.detach()

        results.append((optimizer, [optimizer.step(closure) for _ in range(3)], calls))
    (plain, losses, calls), (optimizer, ours, my_calls) = results
    assert my_calls == calls
    assert all(torch.equal(a, b) for a, b in zip(losses, ours, strict=True))
    for p, q in zip(all_parameters(optimizer), all_parameters(plain), strict=True):
        assert same_bits(p.detach(), q.detach())


# -------------------------------------------------------------------- which steps are made of parts


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torchs_own_are_stepped_in_parts(name: str) -> None:
    optimizer = OPTIMIZERS[name](groups(parameters()))
    set_gradients(all_parameters(optimizer), 0)
    assert bool(stepped_alone(optimizer)) is (name not in ("muon like", "restless"))


class Renamed(torch.optim.Adam):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2)
        self.note = "own"

    def describe(self) -> str:
        return self.note


def test_a_subclass_that_changes_nothing_is_torchs_own() -> None:
    optimizer = Renamed(parameters())
    assert stepped_alone(optimizer)
    optimizer._init_group = lambda *args: None  # type: ignore[method-assign,assignment]
    assert not stepped_alone(optimizer)


@pytest.mark.parametrize("name", ["Inherits", "Extends"])
def test_a_subclass_with_code_of_its_own_is_not(name: str) -> None:
    assert not stepped_alone(TRAPS[name](parameters()))


def sparse_and_dense(p: torch.Tensor) -> None:
    place = torch.tensor([[0], [0]])
    p.grad = torch.sparse_coo_tensor(place, torch.ones(1), p.shape, check_invariants=True)


def of_other_strides(p: torch.Tensor) -> None:
    p.grad = p.grad.t().contiguous().t()  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
@pytest.mark.parametrize("change", [sparse_and_dense, of_other_strides])
@pytest.mark.parametrize("foreach", [False, True])
def test_gradients_of_two_kinds_are_for_one_call(change: Callable[[torch.Tensor], None], foreach: bool) -> None:
    """By these torch's steps choose between kernels for all parameters of a call."""

    def make(g: Any) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(g, lr=1e-2, foreach=foreach)

    plain, (optimizer, states) = make(groups(parameters())), offloaded(make)
    for n in range(3):
        for each in (plain, optimizer):
            set_gradients(all_parameters(each), n)
            change(all_parameters(each)[3])
            each.step()
        assert not stepped_alone(optimizer)
    assert_same(optimizer, plain)
    assert states.offloaded_bytes > 0


def test_momentum_that_some_only_have_yet_is_for_one_call() -> None:
    """foreach SGD decays momentum by another kernel then, which rounds 16-bit numbers otherwise on a CPU."""

    def make(g: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(g, lr=1e-2, momentum=0.9, foreach=True)

    bf16 = torch.bfloat16
    plain, (optimizer, states) = make(groups(parameters(bf16))), offloaded(make, dtype=bf16)
    for n in range(4):
        for each in (plain, optimizer):
            set_gradients(all_parameters(each), n)
            if n < 2:
                all_parameters(each)[3].grad = None
            each.step()
        assert stepped_alone(optimizer)  # the next step may be made in parts again
    assert_same(optimizer, plain)
    assert states.offloaded_bytes > 0


@pytest.mark.parametrize("foreach", [False, True])
def test_adafactor_of_two_dtypes_is_for_one_call(foreach: bool) -> None:
    """Without an eps of its own, torch takes that of the first parameter's dtype for all of a call."""

    def make(g: Any) -> torch.optim.Optimizer:
        for group in g:
            group["params"] = [
                p.bfloat16() if i % 2 else p for i, p in enumerate(map(torch.Tensor.detach, group["params"]))
            ]
        return torch.optim.Adafactor(g, lr=1e-2, foreach=foreach)

    plain, (optimizer, states) = make(groups(parameters())), offloaded(make)
    for n in range(3):
        for each in (plain, optimizer):
            set_gradients(all_parameters(each), n)
            for p in all_parameters(each):
                p.grad.mul_(1e-4)  # so that eps counts
            each.step()
    assert not stepped_alone(optimizer)
    assert_same(optimizer, plain)
    assert states.offloaded_bytes > 0
    for group in optimizer.param_groups:
        group["eps"] = (1e-5, 1e-3)
    assert stepped_alone(optimizer)


VARIANTS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9, "foreach": True}, {"momentum": 0.9, "fused": True}, {"momentum": 0.9, "nesterov": True}],
    "Adam": [{"foreach": True, "amsgrad": True}, {"fused": True}, {"foreach": False}, {"maximize": True}],
    "AdamW": [{"foreach": True, "amsgrad": True}, {"fused": True}, {"foreach": False}],
    "NAdam": [{"foreach": True, "decoupled_weight_decay": True}, {"foreach": False}],
    "RAdam": [{"foreach": True, "weight_decay": 0.1}, {"foreach": False}],
    "Adamax": [{"foreach": True}, {"foreach": False}],
    "Adagrad": [{"foreach": True, "lr_decay": 0.1}, {"fused": True}, {"foreach": False}],
    "Adadelta": [{"foreach": True}, {"foreach": False}],
    "RMSprop": [{"foreach": True, "centered": True, "momentum": 0.9}, {"foreach": False}],
    "Rprop": [{"foreach": True}, {"foreach": False}],
    "ASGD": [{"foreach": True, "weight_decay": 0.1, "t0": 2}, {"foreach": False, "t0": 2}],
    "Adafactor": [{"foreach": True}, {"foreach": False}],
}


@pytest.mark.parametrize(
    ("name", "options"), [(n, o) for n, all_of in VARIANTS.items() for o in all_of], ids=lambda v: str(v)
)
def test_every_variant_of_torch(name: str, options: dict[str, Any]) -> None:
    def make(g: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(g, **options)  # type: ignore[no-any-return]

    plain, (optimizer, states) = make(groups(parameters())), offloaded(make)
    train(plain, optimizer, steps=4)
    assert stepped_alone(optimizer)
    assert_same(optimizer, plain)
    assert states.offloaded_bytes > 0


def test_muon_of_torch() -> None:
    def make(g: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon([p for group in g for p in group["params"] if p.dim() == 2], lr=1e-2)

    plain, (optimizer, states) = make(groups(parameters())), offloaded(make)
    train(plain, optimizer, steps=4)
    assert stepped_alone(optimizer)
    assert_same(optimizer, plain)
    assert states.offloaded_bytes > 0


# -------------------------------------------------------------------- any walk


class Walks(torch.optim.Optimizer):
    """Reads and writes the state of its parameters in an order that it is given, keeping the newest `held` tensors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.order: list[tuple[int, str]] = []
        self.held: list[torch.Tensor] = []
        self.room = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        for n, (i, what) in enumerate(self.order):
            p = params[i % len(params)]
            state = self.state[p]
            if what == "new" or "m" not in state:
                state["m"] = torch.full_like(p, 1.0 + n)
            elif what == "swap":
                state["m"], state["n"] = state.get("n", torch.ones_like(p)), state["m"]
            elif what == "drop":
                del self.state[p]
                continue
            elif what == "view":
                self.held.append(state["m"].detach())
            elif what == "late":
                state[f"k{n % 2}"] = torch.full_like(p, 2.0 + n)
            for value in state.values():
                value.mul_(0.5).add_(0.1 * n)
                p.add_(value, alpha=0.01)
            self.held.append(state["m"])
            del self.held[: -self.room or None]
            for tensor in self.held:
                tensor.mul_(0.9)


WALK = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from(["use", "new", "swap", "drop", "view", "late"])), max_size=25
)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(WALK, st.integers(0, 4), st.sets(st.integers(0, 7))), min_size=1, max_size=5),
    st.sampled_from(ORDERS),
    st.sampled_from([0.5, 1.0]),
)
def test_any_walk_gives_its_own_bits(steps: list[Any], order: dict[str, Any], fraction: float) -> None:
    made = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(0)
        made.append(Walks([torch.nn.Parameter(torch.randn(300, generator=generator)) for _ in range(8)]))
    plain, optimizer = made
    states = offload_optimizer_states(optimizer, chunk_size_mb=1, backend=simulated(**order), fraction=fraction)
    states._away._chunk_bytes = 3000  # two parameters
    for walk, room, without in steps:
        for each in made:
            each.order, each.room = walk, room
            for i, p in enumerate(all_parameters(each)):
                p.grad = None if i in without else torch.ones_like(p)
            each.step()
        assert [t[:3].tolist() for t in plain.held] == [t[:3].tolist() for t in optimizer.held]
    assert_same(optimizer, plain)
    for each in made:
        each.held.clear()
        each.order, each.room = [(0, "use")], 0
        each.step()
    assert device_bytes(states) == 0
    states.detach()
    assert_same(optimizer, plain)
