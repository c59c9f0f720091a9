"""Run one forward and backward of a model on a meta tape, and report each layer's memory moment by moment."""

from __future__ import annotations

import fnmatch
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from hostward.activations.module_filter import MEGATRON_MODULES
from hostward.errors import ModelError
from hostward.model.autograd import tensors_of
from hostward.profiler.meta_tape import Block, Made, MetaTape, Work

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
"""Function `loss(model, ids)` of token numbers int64 [sequences, tokens] that returns a 0-dim tensor, as training does.
"""

Layers = Sequence[tuple[str, torch.nn.Module]]

RESIDUAL = "residual"
"""Name for the work of a layer outside its modules."""
MLP_ACT = "mlp_act"
_GATED = ("gate_proj", "up_proj", "down_proj", "act_fn")


@dataclass(frozen=True, slots=True)
class PartRun:
    """Hold the run of one part: before the layers, a layer, or after them.

    forward, backward: live bytes after each operation, without memory that existed before the part except its input. In
    backward, gradients of weights are left out, and `made` counts those of `gradients` that exist. gradients: names of
    parameters in the order in which backward makes their gradients. kept_bytes: bytes kept from forward for backward.
    saves_input: whether the input is among what autograd saved. saved: bytes that it saved, by module; work: operations
    of forward, by module.
    """

    forward: list[int]
    backward: list[int]
    made: list[int]
    gradients: tuple[str, ...]
    kept_bytes: int
    input_bytes: int
    saves_input: bool = False
    saved: Mapping[str, int] = field(default_factory=Counter)
    work: Mapping[str, Work] = field(default_factory=dict)


def run(
    model: torch.nn.Module, layers: Layers, ids: torch.Tensor, loss: Loss, made: Made | None = None
) -> list[PartRun]:
    """Run a model and return its parts in order of use in forward.

    Model and ids are on one device, usually meta, and no parameter has a gradient. With `made`, which is filled,
    several runs on the meta device take less time.

    Raises:
        ModelError: the model needs values; or its layers are not called once each, in this order.
    """
    recorder = LayerProfiler(model, layers, ids, made)
    try:
        recorder.record(loss)
        return recorder.parts()
    except (RuntimeError, AttributeError, TypeError, ValueError, LookupError) as error:
        raise ModelError(
            f"the allocations of a {type(model).__name__} cannot be predicted without running it",
            why=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
            fix="plan for a model whose forward does not depend on values of tensors",
        ) from error
    finally:
        model.zero_grad(set_to_none=True)


class LayerProfiler:
    def __init__(self, model: torch.nn.Module, layers: Layers, ids: torch.Tensor, made: Made | None = None) -> None:
        self._model, self._layers, self._ids = model, layers, ids
        self._starts: list[int] = [0]
        """First forward operation by part."""
        self._inputs: list[Block | None] = [None]
        self._reached: dict[int, int] = {}
        """First backward operation after the gradient of the part's input was made, by part."""
        self._stack: list[str] = []
        self._saved: list[tuple[int, str, Block]] = []
        self._end = 0
        outside = [*model.parameters(), *model.buffers(), ids]
        self._tape = MetaTape(ids.device, outside, lambda: self._stack[-1] if self._stack else None, made)

    def record(self, loss: Loss) -> None:
        """Run forward and backward. Raises ModelError for layers that are not called once each."""
        with ExitStack() as undo:
            for number, (_, layer) in enumerate(self._layers):
                for path, module in layer.named_modules():
                    enter, leave = self._hooks(number, path)
                    undo.callback(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True).remove)
                    undo.callback(module.register_forward_hook(leave, always_call=True).remove)
            undo.enter_context(self._tape)
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _same):
                value = loss(self._model, self._ids)
            self._end = self._tape.position
            value.backward()  # type: ignore[no-untyped-call]
        if len(self._starts) != len(self._layers) + 2:
            raise ModelError(
                "the layers of the model are not called once each, one after the other",
                fix="name the layers in the order in which forward calls them",
            )

    def _hooks(self, number: int, path: str) -> tuple[Any, Any]:
        def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            if not path and torch._C._current_graph_task_id() == -1:
                self._begin((args, kwargs))
            self._stack.append(path)
            self._tape.attention.__enter__()  # type: ignore[no-untyped-call]

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            self._tape.attention.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._stack.pop()
            if not path and number == len(self._layers) - 1 and torch._C._current_graph_task_id() == -1:
                self._begin(output)

        return enter, leave

    def _begin(self, given: Any) -> None:
        """Begin the next part, whose input is `given`."""
        part = len(self._starts)
        self._starts.append(self._tape.position)
        first = next((t for t in tensors_of(given) if t.is_floating_point()), None)
        self._inputs.append(None if first is None else self._tape.block(first))
        node = None if first is None else first.grad_fn

        def reached(_: object) -> None:
            self._reached.setdefault(part, self._tape.position)

        if node is not None:
            node.register_prehook(reached)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        block = self._tape.block(tensor)
        if block is not None:
            self._saved.append((len(self._starts) - 1, self._stack[-1] if self._stack else "", block))
        return tensor

    # ---------------------------------------------------------------- after the run

    def parts(self) -> list[PartRun]:
        """Return moments and sums by part."""
        tape = self._tape
        names = {}
        for name, parameter in self._model.named_parameters():
            block = None if parameter.grad is None else tape.block(parameter.grad)
            if block is not None:
                names[id(block)] = name
        others = [b for b in tape.blocks if id(b) not in names]
        gradients = sorted((b.made, names[id(b)]) for b in tape.blocks if id(b) in names)
        live, count = _live(others, tape.position), len(self._starts)
        bases = self._bases(others)
        ends, last = [0] * count, tape.position
        for part in range(count):
            last = ends[part] = self._reached.get(part, last)
        begins = [*ends[1:], self._end]
        found = []
        for part, base in enumerate(bases):
            stop = self._starts[part + 1] if part + 1 < count else self._end
            own = [(at, name) for at, name in gradients if begins[part] <= at < ends[part]]
            positions = [at for at, _ in own]
            found.append(
                PartRun(
                    [live[t] - base for t in range(self._starts[part], stop)],
                    [live[t] - base for t in range(begins[part], ends[part])],
                    [bisect_right(positions, t) for t in range(begins[part], ends[part])],
                    tuple(name for _, name in own),
                    bases[part + 1] - base if part + 1 < count else 0,
                    self._input_bytes(part),
                    any(number == part and block is self._inputs[part] for number, _, block in self._saved),
                    self._saved_in(part),
                    self._work_in(range(self._starts[part], stop), part),
                )
            )
        return found

    def _bases(self, others: Sequence[Block]) -> list[int]:
        """Return the bytes that exist before each part; its input counts as its own."""
        first, second = self._inputs[1], self._starts[2]
        # The caller of the layers may hold the first input until the last layer has run, so no layer keeps it.
        held = first is not None and (first.gone is None or first.gone > second)
        by_caller = first if held and all(block is not first for _, _, block in self._saved) else None
        bases = []
        for part, (start, block) in enumerate(zip(self._starts, self._inputs, strict=True)):
            not_its = {id(b) for b in (block, by_caller if part > 1 else None) if b is not None}
            bases.append(_before((b for b in others if id(b) not in not_its), start))
        return bases

    def _input_bytes(self, part: int) -> int:
        block = self._inputs[part]
        return 0 if block is None else block.nbytes

    def _groups(self, part: int) -> Mapping[str, str]:
        return groups_of(self._layers[part - 1][1]) if 0 < part <= len(self._layers) else {}

    def _saved_in(self, part: int) -> Mapping[str, int]:
        found: Counter[str] = Counter()
        groups, seen = self._groups(part), set[int]()
        for number, path, block in self._saved:
            given = block.made < self._starts[part] and block is not self._inputs[part]
            if number == part and id(block) not in seen and not given:
                seen.add(id(block))
                found[groups.get(path, path) or RESIDUAL] += block.nbytes
        return found

    def _work_in(self, operations: range, part: int) -> Mapping[str, Work]:
        found: dict[str, Work] = {}
        groups = self._groups(part)
        for path, work in (self._tape.work[t] for t in operations):
            name = path or RESIDUAL
            # The output of an MLP's last projection is not saved.
            name = name if name.endswith("down_proj") else groups.get(name, name)
            found[name] = found.get(name, Work()) + work
        return found


def groups_of(layer: torch.nn.Module) -> dict[str, str]:
    """Map each path within a layer to Megatron's name for its part."""
    modules = dict(layer.named_modules())
    found = {
        path: name
        for name, parts in MEGATRON_MODULES.items()
        for part in parts
        for path in fnmatch.filter(modules, part.pattern)
    }
    for path, module in modules.items():
        if path and all(hasattr(module, name) for name in _GATED):
            found |= dict.fromkeys((path, f"{path}.act_fn", f"{path}.down_proj"), MLP_ACT)
    return found


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _live(blocks: Sequence[Block], operations: int) -> list[int]:
    """Return the live bytes after each operation."""
    changes = [0] * (operations + 1)
    for block in blocks:
        changes[block.made] += block.nbytes
        if block.gone is not None:
            changes[block.gone] -= block.nbytes
    return list(accumulate(changes))


def _before(blocks: Iterable[Block], operation: int) -> int:
    """Return the live bytes when an operation begins."""
    return sum(b.nbytes for b in blocks if b.made < operation and (b.gone is None or b.gone > operation))
