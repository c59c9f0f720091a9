"""Optimizers of which no two parameters can be stepped by themselves, or in another order: one trap each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

Step = Callable[[Any], None]


class Trap(torch.optim.Optimizer):
    """Momentum for each parameter, times `factor`, which is what a trap depends on."""

    steps_of_the_class = 0

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "factor": 1.0})
        self.prepare()

    def prepare(self) -> None:
        pass

    def all(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def move(self, p: torch.Tensor, rate: Any) -> None:
        state = self.state[p]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        state["momentum"].mul_(0.9).add_(p.grad)  # type: ignore[arg-type]
        p.sub_(state["momentum"] * rate)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin()
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    self.move(p, group["lr"] * self.factor(group, i, p))
        self.end()
        return loss

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass

    def factor(self, group: dict[str, Any], i: int, p: torch.Tensor) -> Any:
        return 1.0


class TensorCounter(Trap):
    def prepare(self) -> None:
        self.count = torch.zeros(())

    def begin(self) -> None:
        self.count += 1

    def factor(self, group: dict[str, Any], i: int, p: torch.Tensor) -> Any:
        return 1 / self.count


class NestedCounters(Trap):
    """A counter in an object in a list: no plain value of the optimizer."""

    def prepare(self) -> None:
        self.box = [defaultdict(int)]

    def begin(self) -> None:
        self.box[0]["steps"] += 1

    def factor(self, group: dict[str, Any], i: int, p: torch.Tensor) -> Any:
        return 1 / self.box[0]["steps"]


class CounterOfTheClass(Trap):
    def prepare(self) -> None:
        type(self).counts = getattr(type(self), "counts", {})  # type: ignore[attr-defined]
        self.number = len(self.counts)  # type: ignore[attr-defined]
        self.counts[self.number] = 0  # type: ignore[attr-defined]

    def begin(self) -> None:
        self.counts[self.number] += 1  # type: ignore[attr-defined]

    def factor(self, group: dict[str, Any], i: int, p: torch.Tensor) -> Any:
        return 1 / self.counts[self.number]  # type: ignore[attr-defined]


class CounterInAClosure(Trap):
    def prepare(self) -> None:
        count = 0

        def increase() -> None:
            nonlocal count
            count += 1

        self.increase, self.look = increase, lambda: count

    def begin(self) -> None:
        self.increase()

    def factor(self, group: dict[str, Any], i: int, p: torch.Tensor) -> Any:
        return 1 / self.look()


class ListByPosition(Trap):
    """Second momentum in a list beside `state`, by position in the whole."""

    def prepare(self) -> None:
        self.squares = [torch.zeros_like(p) for p in self.all()]

    def factor(self, group: dict[str, Any], i: int, p: torch.Tensor) -> Any:
        place = next(k for k, q in enumerate(self.all()) if q is p)
        self.squares[place].mul_(0.99).addcmul_(p.grad, p.grad)
        return self.squares[place].rsqrt().clamp(max=10.0) / (1 + i)


class ListOfState(Trap):
    """A list by position of the very tensors that `state` has."""

    def prepare(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def begin(self) -> None:
        if not self.tensors:
            for p in self.all():
                self.state[p]["momentum"] = torch.zeros_like(p)
            self.tensors = [self.state[p]["momentum"] for p in self.all()]
        for i, m in enumerate(self.tensors):
            m.add_(1e-3 * i)


class ListOfEntries(Trap):
    """A list by position of the dicts in `state`."""

    def prepare(self) -> None:
        self.entries = [self.state[p] for p in self.all()]

    def end(self) -> None:
        for i, entry in enumerate(self.entries):
            if "momentum" in entry:
                entry["momentum"].mul_(1 - 1e-3 * i)


class DictById(Trap):
    def prepare(self) -> None:
        self.rates = {id(p): 1 / (1 + i) for i, p in enumerate(self.all())}
        self.counts: dict[int, torch.Tensor] = {}

    def factor(self, group: dict[str, Any], i: int, p: torch.Tensor) -> Any:
        self.counts[id(p)] = self.counts.get(id(p), torch.zeros(())) + 1
        return self.rates[id(p)] / self.counts[id(p)]


class ClosedOver(Trap):
    """Draws from a generator of its own."""

    def prepare(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def factor(self, group: dict[str, Any], i: int, p: torch.Tensor) -> Any:
        return torch.rand(p.shape, generator=self.generator)


class DrawsFromTheDefault(Trap):
    """Stochastic: draws in the order of the parameters."""

    def factor(self, group: dict[str, Any], i: int, p: torch.Tensor) -> Any:
        return torch.rand(p.shape)


class GroupTensorStep(Trap):
    def begin(self) -> None:
        for group in self.param_groups:
            group.setdefault("t", torch.zeros(())).add_(1)

    def factor(self, group: dict[str, Any], i: int, p: torch.Tensor) -> Any:
        return 1 / group["t"]


class GlobalNorm(Trap):
    """Clips by the norm of all gradients, and leaves no trace of it."""

    def begin(self) -> None:
        self.scale = 1 / torch.stack([p.grad.norm() for p in self.all() if p.grad is not None]).norm()

    def factor(self, group: dict[str, Any], i: int, p: torch.Tensor) -> Any:
        return self.scale


class GlobalOfState(Trap):
    """Trust ratio over the momentum of all parameters, as the first of two ways over them all."""

    def begin(self) -> None:
        known = [self.state[p]["momentum"].norm() for p in self.all() if "momentum" in self.state[p]]
        self.trust = 1 / (1 + torch.stack(known).norm()) if known else 1.0

    def factor(self, group: dict[str, Any], i: int, p: torch.Tensor) -> Any:
        return self.trust


class OtherGradients(Trap):
    def factor(self, group: dict[str, Any], i: int, p: torch.Tensor) -> Any:
        gradients = [q.grad for q in self.all() if q.grad is not None]
        return 1 / (1 + gradients[-1 - i % len(gradients)].abs().mean())


class OtherState(Trap):
    """Reads and writes the state of another parameter while it has its own."""

    def factor(self, group: dict[str, Any], i: int, p: torch.Tensor) -> Any:
        mine = self.state[p].get("momentum")
        other = self.state[self.all()[(7 * i + 3) % len(self.all())]]
        if mine is None or "momentum" not in other:
            return 1.0
        other["momentum"].mul_(0.99)
        return 1 / (1 + other["momentum"].abs().mean() + mine.abs().mean())


class ChangesItsGroups(Trap):
    """Moves its last parameter to a group of its own in the second step."""

    def prepare(self) -> None:
        self.count = 0

    def begin(self) -> None:
        self.count += 1
        if self.count == 2:
            last = self.param_groups[0]["params"].pop()
            self.add_param_group({"params": [last], "lr": 1e-3})


class SharedEntry(Trap):
    """State that belongs to no parameter."""

    def begin(self) -> None:
        shared: Any = self.state["all"]  # type: ignore[index]
        shared["steps"] = shared.get("steps", torch.zeros(5)) + 1

    def factor(self, group: dict[str, Any], i: int, p: torch.Tensor) -> Any:
        return 1 / self.state["all"]["steps"][i % 5]  # type: ignore[index]


class KeepsTheLast(Trap):
    """Goes on with the tensor of one parameter's state, and with a view of another's, in the next step."""

    last: torch.Tensor | None = None
    view: torch.Tensor | None = None

    def begin(self) -> None:
        if self.last is not None and self.view is not None:
            self.last.add_(1e-2)
            self.view.mul_(0.5)

    def end(self) -> None:
        self.last = self.state[self.all()[2]]["momentum"]
        self.view = self.state[self.all()[4]]["momentum"].data[0]


class Collects(Trap):
    """Lists of everything first, as foreach does; and through views without a base."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        params = [p for p in self.all() if p.grad is not None]
        for p in params:
            self.state[p].setdefault("momentum", torch.zeros_like(p))
        momenta = [self.state[p]["momentum"].detach() for p in params]
        torch._foreach_mul_(momenta, 0.9)
        torch._foreach_add_(momenta, [p.grad for p in params])
        torch._foreach_add_(params, momenta, alpha=-1e-2)


class WaysOfADict(Trap):
    """Everything that a dict can do, on state that is away."""

    def move(self, p: torch.Tensor, rate: Any) -> None:
        state = self.state[p]
        if not state:
            state.update(momentum=torch.zeros_like(p), other=torch.ones_like(p), step=0)
        names = [key for key, value in state.items() if torch.is_tensor(value)]
        parts = [
            sum(v for v in state.values() if torch.is_tensor(v)),
            dict(state)["momentum"],
            {**state}["other"],
            state.copy()["momentum"],
            (state | {"step": 1})["momentum"],
            ({"x": 1} | state)["other"],
            state.get("momentum"),
            state.setdefault("other", None),
        ]
        other = state.pop("other")
        state["other"] = other.mul_(0.5)
        state |= {"step": state["step"] + len(names)}
        state["momentum"] = state["momentum"] * 0.9 + p.grad
        p.sub_(sum(parts) * rate)  # type: ignore[arg-type]


class EightBit(Trap):
    """As bitsandbytes has it: quantised state, a map of its values that all parameters share, an attribute on tensors,
    and settings by the place of a parameter.
    """

    def prepare(self) -> None:
        self.name2qmap = {"dynamic": torch.linspace(-1, 1, 256)}
        self.pid2config = {id(p): {"rate": 1 / (1 + i)} for i, p in enumerate(self.all())}

    def move(self, p: torch.Tensor, rate: Any) -> None:
        state = self.state[p]
        if not state:
            state["state1"] = torch.full(p.shape, 128, dtype=torch.uint8)
            state["absmax1"] = torch.zeros(7)
            state["paged"] = torch.zeros_like(p)
            state["paged"].is_paged = True
            state["qmap1"] = self.name2qmap["dynamic"]
        assert state["qmap1"] is self.name2qmap["dynamic"]
        assert state["paged"].is_paged
        value = state["qmap1"][state["state1"].long()] * state["absmax1"][0]
        value = value * 0.9 + p.grad + state["paged"].add_(0.1)
        state["absmax1"].fill_(value.abs().max())
        state["state1"].copy_((value / state["absmax1"][0] * 127.5 + 127.5).round().clamp(0, 255))
        p.sub_(value * rate * self.pid2config[id(p)]["rate"])


class OtherMemory(Trap):
    """Gives its tensors other memory, of the same layout and of another."""

    def move(self, p: torch.Tensor, rate: Any) -> None:
        state = self.state[p]
        if not state:
            state.update(momentum=torch.zeros_like(p), other=torch.ones_like(p), turned=torch.zeros_like(p))
        state["momentum"].data = state["momentum"] * 0.9 + p.grad
        state["other"].set_(state["other"] * 0.5 + 1)
        state["turned"].add_(0.1)
        if p.dim() == 2:
            state["turned"].t_()
        p.sub_((state["momentum"] + state["other"] + state["turned"].mean()) * rate)


class Inherits(torch.optim.AdamW):
    """A step of torch's with a counter around it, which is a tensor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2)
        self.count = torch.zeros(())

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 1e-2 / float(self.count)
        return super().step(closure)


class Extends(torch.optim.SGD):
    """torch's step over another collection of parameters: of the others, none is decayed."""

    def _init_group(self, group: Any, params: Any, grads: Any, buffers: Any) -> Any:
        found = super()._init_group(group, params, grads, buffers)
        total = sum(g.abs().mean() for g in grads)
        grads[:] = [g / (1 + total) for g in grads]
        return found


TRAPS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    kind.__name__: kind
    for kind in (
        *(TensorCounter, NestedCounters, CounterOfTheClass, CounterInAClosure, ListByPosition, ListOfState),
        *(ListOfEntries, DictById, ClosedOver, DrawsFromTheDefault, GroupTensorStep, GlobalNorm, GlobalOfState),
        *(
            OtherGradients,
            OtherState,
            ChangesItsGroups,
            SharedEntry,
            KeepsTheLast,
            Collects,
            WaysOfADict,
            EightBit,
            OtherMemory,
            Inherits,
        ),
    )
} | {"Extends": lambda g: Extends(g, lr=1e-2, momentum=0.9)}
