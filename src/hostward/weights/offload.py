"""Offload the weights of a model: hooks prefetch the next layer's weights, and other readers wait for a reload.

Hooks decide only when weights are prefetched. `WeightHandle`, which is saved in place of a weight, guarantees that the
weight is on the device when autograd needs it; `Weight.held` prevents that memory is freed while other code holds it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from hostward.config.arguments import named_fields, require_fewer, require_whole
from hostward.errors import ConfigError, HostwardError, OrderingError
from hostward.model.autograd import at_end_of_backward, raise_modified, tensors_of
from hostward.model.fence import Fence, down, plain_type, unfenced, up, without_functions
from hostward.model.forward_code import layers_that_take_data
from hostward.model.layer_hooks import Mark, PostForwardHook, PreBackwardHook, PreForwardHook, Unmark
from hostward.model.layers import Runs
from hostward.model.parameters import groups_of, local_of
from hostward.optim.bucket_lifecycle import Kinds
from hostward.optim.master_sync import witness_of
from hostward.runtime.backend import Backend
from hostward.schedule.ops import Schedule
from hostward.schedule.weights import WeightsShape, lower_weights
from hostward.weights.fsdp2_gather import GatheredLayers, Gathers
from hostward.weights.guards import Apply, LoadHook, StateHook, guarded
from hostward.weights.policy import choose
from hostward.weights.residency import Residency, Weight

if TYPE_CHECKING:
    from hostward.optim.adamw import AdamW


@named_fields
@dataclass(frozen=True, slots=True)
class Weights:
    """Choose which weights are offloaded.

    num_layers: offload the weights of the first so many layers; None: of all layers but the last, whose backward
    follows its forward at once. min_elements: frozen weights with fewer elements stay on the device.

    Raises ConfigError for values out of range and for unknown option names.
    """

    num_layers: int | None = None
    min_elements: int = 65536

    def __post_init__(self) -> None:
        require_whole("Weights.num_layers", self.num_layers, least=1, optional=True)
        require_whole("Weights.min_elements", self.min_elements, least=0)


@dataclass(frozen=True, slots=True)
class WeightReport:
    """Report bytes of offloaded weights.

    offloaded: weights with a copy on the host. host: pinned for these copies; the other copies are the optimizer's.
    here: on the device now. fetched: copied to the device since `attach`; on_demand: the part of it that was not
    prefetched. held: not freed because other code held the memory, added up over all attempts. kept: not offloaded, by
    reason.
    """

    offloaded_bytes: int
    host_bytes: int
    here_bytes: int
    fetched_bytes: int
    on_demand_bytes: int
    held_bytes: int
    kept_bytes: Mapping[str, int]

    @property
    def freed_bytes(self) -> int:
        """Return the bytes of offloaded weights that are not on the device now."""
        return self.offloaded_bytes - self.here_bytes

    def explain(self) -> str:
        """Return a readable report of a few lines."""
        where = f"{self.freed_bytes:,} of them off the device now, {self.host_bytes:,} pinned for them"
        lines = [f"weights: {self.offloaded_bytes:,} bytes on the host, {where}"]
        lines.append(f"  reloaded: {self.fetched_bytes:,} bytes, {self.on_demand_bytes:,} of them not prefetched")
        if self.held_bytes:
            lines.append(f"  not freed after use, because other code held them: {self.held_bytes:,} bytes")
        lines += [f"  stays, because {why}: {nbytes:,} bytes" for why, nbytes in sorted(self.kept_bytes.items())]
        return "\n".join(lines)


class WeightHandle:
    """Stand for a weight, or a view of one, that autograd has saved, without holding its memory."""

    __slots__ = ("_dtype", "_number", "_offloaded", "_offset", "_sizes", "_strides", "_version", "_weight", "_witness")

    def __init__(self, offloaded: OffloadedWeights, number: int, weight: Weight, tensor: torch.Tensor) -> None:
        self._offloaded, self._number, self._weight = offloaded, number, weight
        self._version = tensor._version
        self._witness: torch.Tensor | None = None
        """Tensor that shares only the version counter of the view; None: the weight itself was saved."""
        if tensor is not weight.parameter:
            self._witness = tensor.detach()
            self._witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._dtype, self._sizes, self._strides = tensor.dtype, tuple(tensor.shape), tensor.stride()
        self._offset = int(tensor.storage_offset())

    @unfenced
    def unpack(self) -> torch.Tensor:
        """Return the tensor as it was saved. Raises ModelError if it was written since."""
        weight, witness = self._weight, self._witness
        if (weight.parameter if witness is None else witness)._version != self._version:
            raise_modified(self._sizes)
        self._offloaded.use_in_backward(self._number)
        if witness is None:
            return weight.parameter
        view = torch.empty(0, dtype=self._dtype, device=weight.storage.device)
        return view.set_(weight.storage, self._offset, self._sizes, self._strides)


class OffloadedWeights:
    """Offload weights of a model's first layers until `detach`."""

    def __init__(
        self,
        model: torch.nn.Module,
        layers: Sequence[tuple[str, torch.nn.Module]],
        optimizer: AdamW | None,
        backend: Backend,
        how: Weights,
    ) -> None:
        """Raises what `hostward.weights.policy.choose` raises."""
        count = len(layers) - 1 if how.num_layers is None else how.num_layers
        sharding = groups_of(model)
        gathered = None if sharding is None else GatheredLayers(sharding, layers, count)
        copies = None if optimizer is None else optimizer.weight_copies()
        chosen = choose(model, layers, count, copies, backend, how.min_elements, gathered)
        self._model, self._copies, self._backend, self._chosen = model, copies, backend, chosen
        self.count = len(chosen.layers)
        """Offloaded layers, or FSDP2 groups of them."""
        self._layers = len(layers) if gathered is None else len(gathered.names)
        self._runs = Runs((self._layers,))
        trained = {i for i, held in enumerate(chosen.layers) if held and held.stepped}
        shape = WeightsShape(self._layers, self.count, frozenset(trained), gathered=gathered is not None)
        self.schedule: Schedule = lower_weights(shape)
        """Lowered schedule for one step."""

        asleep = None if copies is None else copies.sleeper.asleep
        self.residency = Residency(backend, chosen.layers, shape.prefetch_depth, asleep)
        if copies is not None:
            copies.sleeper.fetchers.add(self.residency)
        self._of_storage = {
            w.storage._cdata: (i, w) for i, held in enumerate(chosen.layers) if held for w in held.weights
        }
        self._of_name = {w.name: i for i, w in self._of_storage.values() if w.changed is not None}
        self._stack: list[int] = []
        """Layers whose forward is running, innermost last."""
        self._parts: list[torch.nn.Module] = []
        """Modules within layers that run outside of their layer's call, innermost last."""
        self._task = -1
        """Graph task of the backward that calls `end` when it ends."""
        self._backward: weakref.finalize[[bool], Any] | None = None
        """Alive while that backward is."""
        self._backward_in = 0
        """Thread in which it called `pre_backward`: on a GPU that of the device, otherwise its caller's."""
        self._runner = self._trainer = 0
        """Threads that last ran a layer, and one with gradients: backwards are the latter's."""
        self._handles: list[RemovableHandle] = []
        self._guarded: list[Callable[[], None]] = []
        self._lock = threading.RLock() if copies is None else copies.lock
        self._fence = Fence(self.parameters(), _Reads(self))
        held_by: dict[int, list[torch.nn.Parameter]] = {}
        for i, weight in self._of_storage.values():
            held_by.setdefault(i, []).append(weight.parameter)
        self._entries = {i: self._fence.entries(held) for i, held in held_by.items()}
        self._down: set[int] = set()
        """Layers whose fence is down because their operations run now, with weights on the device."""
        self.residency.freed = self._raise
        if copies is not None and chosen.stepped:
            try:
                copies.offload(chosen.stepped, self.residency, self.present)
            except HostwardError:
                backend.free(chosen.buffers)
                raise
        self._gathers = None if gathered is None else Gathers(gathered, self.residency)
        if gathered is None:
            self._follow_layers([layer for _, layer in layers])
        self._guard(model, [layer for _, layer in layers[:count]])
        self.residency.sweep()
        up(self._fence.entries())

    def _follow_layers(self, layers: Sequence[torch.nn.Module]) -> None:
        for i, layer in enumerate(layers):
            self._handles.append(
                layer.register_forward_pre_hook(PreForwardHook(self, i), prepend=True, with_kwargs=True)
            )
            self._handles.append(layer.register_forward_hook(PostForwardHook(self, i), always_call=True))
            leaving = set() if i >= self.count else {w.parameter for w in self._weights_of(layer)}
            for owner in layer.modules():
                if owner is not layer and not leaving.isdisjoint(owner._parameters.values()):
                    self._handles.append(owner.register_forward_pre_hook(Mark(self, i), prepend=True))
                    self._handles.append(owner.register_forward_hook(Unmark(self), always_call=True))

    def _weights_of(self, layer: torch.nn.Module) -> list[Weight]:
        found = (self._of_storage.get(local_of(p).untyped_storage()._cdata) for p in layer.parameters())
        return [each[1] for each in found if each is not None]

    def _guard(self, model: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> None:
        self._guarded.append(guarded(model, "_apply", Apply(self, (), model)))
        for layer in layers:
            weights = {w.parameter: w for w in self._weights_of(layer)}
            if not weights:
                continue
            all_here = self._numbers(weights.values())
            self._guarded.append(guarded(layer, "_apply", Apply(self, all_here, layer)))
            for owner in layer.modules():
                names = {name: weights[p] for name, p in owner._parameters.items() if p in weights}
                numbers = self._numbers(names.values())
                if names or owner is layer:
                    # Weights stay until all of the layer is loaded: FSDP2 reads a module's parts after its children's.
                    loaded = LoadHook(self, all_here if owner is layer else (), names)
                    self._handles.append(owner.register_load_state_dict_post_hook(loaded))  # type: ignore[no-untyped-call]
                if names:
                    state = StateHook(self, numbers, names)
                    self._handles.append(owner.register_state_dict_pre_hook(state))  # type: ignore[no-untyped-call]
                    self._handles.append(owner.register_state_dict_post_hook(state))  # type: ignore[no-untyped-call]
        offloaded = {weight.parameter: weight for _, weight in self._of_storage.values()}
        for module in model.modules():
            if not offloaded.keys().isdisjoint(module.parameters()):
                own = self._numbers(offloaded[p] for p in module._parameters.values() if p in offloaded)
                self._handles.append(module.register_load_state_dict_pre_hook(LoadHook(self, own)))  # type: ignore[no-untyped-call]

    def _numbers(self, weights: Iterable[Weight]) -> tuple[int, ...]:
        return tuple(sorted({self._of_storage[w.storage._cdata][0] for w in weights}))

    # ---------------------------------------------------------------- forward and backward

    @unfenced
    def pre_forward(self, number: int, _: object) -> None:
        """Reload a layer's weights before it runs, and prefetch those of the next layer."""
        residency = self.residency
        if torch._C._current_graph_task_id() == -1:
            self._runner = threading.get_ident()
            self._trainer = self._runner if torch.is_grad_enabled() else self._trainer
        if number in self._stack:  # an interrupted forward never ended this call
            del self._stack[self._stack.index(number) :]
        self._stack.append(number)
        self.use(number)
        if torch._C._current_graph_task_id() != -1:
            residency.prefetch(self._beside(number, -1))
            return
        residency.sweep((*self._stack, number + 1))
        residency.prefetch(self._beside(number, 1))

    @unfenced
    def post_forward(self, number: int, output: object) -> None:
        """Free a layer's weights after it has returned or raised."""
        recomputed = torch._C._current_graph_task_id() != -1
        if not recomputed and threading.get_ident() != self._runner:
            return  # a thread that may not run the layer, see `require_no_backward`
        if number in self._stack:
            del self._stack[self._stack.index(number) :]
        back = PreBackwardHook(weakref.ref(self), number)
        for node in {tensor.grad_fn for tensor in tensors_of(output)}:
            if node is not None:
                node.register_prehook(back)
        if recomputed:
            return  # for a backward that follows now
        self._raise((number,))
        if number < self.count:
            self.residency.empty(number)
        elif number == self._layers - 1 and not torch.is_grad_enabled():
            self.residency.prefetch(0)

    @unfenced
    def mark(self, module: torch.nn.Module, number: int) -> None:
        """Reload a layer's weights before a module within it runs, perhaps outside of the layer's call."""
        if number not in self._stack and torch._C._current_graph_task_id() == -1:
            self._parts.append(module)
        self.use(number)

    @unfenced
    def unmark(self, module: torch.nn.Module) -> None:
        """Raise the fence after a module within a layer has run outside of the layer's call."""
        if module in self._parts:
            del self._parts[self._parts.index(module) :]
            if not self._parts:
                self._raise(self._down - {*self._stack})

    @unfenced
    def pre_backward(self, number: int) -> None:
        """Reload a layer's weights as backward reaches its output, and prefetch those of the layer before."""
        residency = self.residency
        self._follow_backward()
        self._raise(self._down - {*self._stack, number})
        self.use(number)
        residency.sweep((*self._stack, number, number - 1))
        residency.prefetch(self._beside(number, -1))

    def use_in_backward(self, number: int) -> None:
        """Reload a layer's weights as backward asks for one that was saved."""
        if torch._C._current_graph_task_id() == -1:  # code that looks into a graph
            self.residency.ensure(number)
            return
        self._follow_backward()
        self.use(number)

    def _follow_backward(self) -> None:
        """Let the backward that runs now report its end, also if it never reaches the output of a layer."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._require_no_other_backward()
        self._task, self._backward_in = task, threading.get_ident()
        self._backward = at_end_of_backward(lambda failed: self._backward_over(task, failed))

    def _backward_over(self, task: int, failed: bool) -> None:
        """Raise the fence after a backward. One that is nested in it may have ended the same way before."""
        if not failed:
            self.end()
        elif task == self._task:
            self._task, self._backward = -1, None
            self._raise(self._down - {*self._stack})

    @unfenced
    def end(self) -> None:
        """Free weights after a backward; it may be nested in another one, so prefetched weights stay."""
        self._task, self._backward = -1, None
        self._raise(self._down - {*self._stack})
        expected = self.residency.expected
        self.residency.sweep(self._stack if expected is None else (*self._stack, expected))

    def require_no_backward(self, layer: str) -> None:
        """Raise OrderingError if a backward of another thread runs now: it would free what this forward reads."""
        if self._backward_elsewhere():
            raise OrderingError(
                f"layer {layer} is called in thread {threading.current_thread().name} during a backward of the model",
                why="its weights are offloaded, and backward frees those of all layers but its own",
                fix="let training and evaluation of the model wait for each other (a lock around each step)",
            )

    def _require_no_other_backward(self) -> None:
        """Raise OrderingError if a backward in another thread runs now; one within another has its thread."""
        running = self._backward is not None and self._backward.alive
        if running and threading.get_ident() != self._backward_in:
            raise OrderingError(
                f"backward in thread {threading.current_thread().name} during another backward of the same model",
                why="its weights are offloaded, and each backward frees those of all layers but its own",
                fix="run one backward after the other (a lock around each)",
            )

    def _backward_elsewhere(self) -> bool:
        """Return whether a backward of the model runs for another thread than this one."""
        return self._backward is not None and self._backward.alive and threading.get_ident() != self._trainer

    def _beside(self, number: int, steps: int) -> int:
        """Return the layer so many steps further in the same run; -1: there is none."""
        return number + steps if number + steps in self._runs.beside(number) else -1

    def in_runs(self, lengths: Sequence[int]) -> None:
        """Set the length of each run of layers, see `Attachment.in_runs`."""
        if self._gathers is None:
            self._runs = Runs(tuple(lengths))
        else:
            self._gathers.in_runs(lengths)

    @unfenced
    def expect(self, run: int, *, backward: bool) -> None:
        """Prefetch the first weights of a run, see `Attachment.expect`."""
        if self._gathers is not None:
            self._gathers.expect(run, backward=backward)
            return
        number = self._runs.run(run)[-1 if backward else 0]
        self.residency.sweep((*self._stack, number))
        self.residency.prefetch(number)

    @functools.cached_property
    def _watched(self) -> frozenset[int]:
        """Return the layers whose forward may write weights through `.data`."""
        at = {id(w.parameter): number for number, w in self._of_storage.values()}
        return layers_that_take_data(self._model, at)

    def use(self, number: int) -> None:
        """Make the compute stream wait for a layer's weights, and lower their fence."""
        if number < self.count:
            self.residency.ensure(number)
            if number in self._entries and number not in self._down:
                self._down.add(number)
                down(self._entries[number], watched=number in self._watched)

    def _raise(self, numbers: Iterable[int]) -> None:
        """Raise the fence of these layers after their operations."""
        for number in [n for n in numbers if n in self._down]:
            self._down.discard(number)
            up(self._entries[number])

    @unfenced
    def pack(self, tensor: torch.Tensor) -> WeightHandle | None:
        """Return the handle to save for backward in place of a weight or its view; None: the tensor is neither."""
        if plain_type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return None
        found = self._of_storage.get(tensor.untyped_storage()._cdata)
        if found is None or tensor.is_conj() or tensor.is_neg():
            return None
        return WeightHandle(self, *found, tensor)

    # ---------------------------------------------------------------- other readers

    def read(self, parameters: Sequence[torch.Tensor]) -> None:
        """Reload weights that other code reads or writes; they stay until the next such read or the next forward.

        Raises:
            OrderingError: another thread runs the model now, and would free them meanwhile.
        """
        elsewhere = (self._stack and threading.get_ident() != self._runner) or self._backward_elsewhere()
        if elsewhere and not self.residency.pinned and torch._C._current_graph_task_id() == -1:
            raise OrderingError(
                f"an offloaded weight is used in thread {threading.current_thread().name} while another runs the model",
                why="its memory on the device may be freed at any time then",
                fix="a lock around this and around each step, or `with run.weights_here():` around both",
            )
        with self._lock, without_functions():
            self.residency.read(self._numbers(self._of_parameter(p) for p in parameters))

    def exposed(self, parameter: torch.Tensor, alias: torch.Tensor | None) -> None:
        """Note that other code can write a weight's memory, see `Reader.exposed`."""
        weight = self._of_parameter(parameter)
        if weight.changed is None and alias is None:
            weight.exposed = True
        elif weight.changed is None and alias is not None:
            weight.handed.append((witness_of(alias), alias._version))

    def _of_parameter(self, parameter: torch.Tensor) -> Weight:
        with without_functions():
            found = self._of_storage.get(local_of(parameter).untyped_storage()._cdata)
        if found is None:
            weight = next(weight for _, weight in self._of_storage.values() if weight.parameter is parameter)
            raise weight.has_other_memory()
        return found[1]

    @contextmanager
    def all_here(self) -> Iterator[None]:
        """Keep all weights on the device within the block."""
        residency, before = self.residency, self.residency.pinned
        residency.pinned = True
        try:
            with self._lock, without_functions():
                self.bring_all()
            yield
        finally:
            residency.pinned = before
            with self._lock, without_functions():
                residency.sweep(self._stack)

    def name_only(self, weights: Iterable[Weight]) -> None:
        """Lower the fence of weights before a module's `state_dict()`, whose entries `value` replaces afterwards."""
        down(self._fence.entries(weight.parameter for weight in weights))

    def named(self, weights: Iterable[Weight]) -> None:
        """Raise the fence of weights again after a module's `state_dict()`."""
        layers = {self._of_storage[w.storage._cdata][0]: w for w in weights}
        for number in layers.keys() - self._down:
            up(self._entries[number])

    def bring_all(self) -> None:
        """Reload all weights; each layer's are freed when it has run."""
        self.residency.bring_all()

    def present(self, name: str) -> AbstractContextManager[None]:
        """Keep a weight, given by the optimizer's name for it, on the device within the block."""
        number = self._of_name.get(name)
        return nullcontext() if number is None else self.residency.present(number)

    @contextmanager
    def all_present(self, numbers: Iterable[int]) -> Iterator[None]:
        """Keep all weights of these layers on the device within the block."""
        with ExitStack() as stack:
            for number in numbers:
                stack.enter_context(self.residency.present(number))
            yield

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return all offloaded parameters."""
        return [weight.parameter for _, weight in self._of_storage.values()]

    @unfenced
    def value(self, weight: Weight) -> torch.Tensor:
        """Return a copy of a weight on the CPU, from the host copy unless the weight on the device is newer."""
        held = self.residency.layers[self._of_storage[weight.storage._cdata][0]]
        self._backend.synchronise()
        newer = held is not None and held.resident and weight.written()
        return weight.like(weight.local.detach().cpu().clone() if newer else weight.host_value())

    @unfenced
    def loaded(self, numbers: Iterable[int]) -> None:
        """Update the host copies after weights were loaded."""
        for number in numbers:
            held = self.residency.layers[number]
            if held is None:
                continue
            if self._copies is not None and held.stepped:
                self._copies.follow()
            self.residency.empty(number)
        self._raise(self._down - {*self._stack})

    # ---------------------------------------------------------------- the end

    def report(self) -> WeightReport:
        """Return how many bytes are offloaded, and were copied so far."""
        residency = self.residency
        here = sum(held.nbytes for held in residency.layers if held is not None and held.resident)
        return WeightReport(
            sum(held.nbytes for held in residency.layers if held is not None),
            sum(buffer.nbytes for buffer in self._chosen.buffers),
            here, residency.fetched, residency.on_demand, residency.held,
            {why.value: nbytes for why, nbytes in self._chosen.kept_bytes.items()},
        )  # fmt: skip

    def require_detachable(self) -> None:
        """Raise where `detach` is not possible now.

        Raises:
            AsleepError: the optimizer has put weights to sleep. ModelError: it has taken gradients of trained ones.
        """
        if self._copies is not None:
            self._copies.sleeper.asleep.require(Kinds.WEIGHTS, "detach() is called")
            if self._guarded and self._chosen.stepped:
                self._copies.require_no_gradients()

    def abandon(self) -> None:
        """Forget the gradients of a step that failed, which `detach` would not be possible with."""
        if self._copies is not None:
            self._copies.discard_gradients()

    @unfenced
    def detach(self) -> None:
        """Reload all weights for good and remove the hooks."""
        if not self._guarded:
            return
        if self._gathers is not None:
            self._gathers.close()
        for number in range(self.count):
            self.use(number)
        for handle in self._handles:
            handle.remove()
        for undo in self._guarded:
            undo()
        self._fence.close()
        self._handles.clear()
        self._guarded.clear()
        self._backend.synchronise()
        if self._copies is not None and self._chosen.stepped:
            self._copies.give_back()
        self.residency.layers = [None] * self.count
        self._backend.free(self._chosen.buffers)
        self._of_storage.clear()


def weights_of(given: object, n_layers: int) -> Weights:
    """Return the options for `attach(weights=given)`, for a model of `n_layers` layers. Raises ConfigError."""
    if isinstance(given, bool) or not isinstance(given, (Weights, int)):
        raise ConfigError(
            f"weights={given!r} does not say what to offload",
            fix="weights=hostward.Weights(...), or a number of layers",
        )
    require_fewer(given if isinstance(given, int) else given.num_layers, n_layers)
    return Weights(num_layers=given) if isinstance(given, int) else given


class _Reads:
    """Forward the reports of a `Fence`; a weak reference, because records of fences may outlive the attachment."""

    def __init__(self, offloaded: OffloadedWeights) -> None:
        self._offloaded = weakref.ref(offloaded)

    def read(self, parameters: Sequence[torch.Tensor]) -> None:
        offloaded = self._offloaded()
        if offloaded is not None:
            offloaded.read(parameters)

    def exposed(self, parameter: torch.Tensor, alias: torch.Tensor | None) -> None:
        offloaded = self._offloaded()
        if offloaded is not None:
            offloaded.exposed(parameter, alias)
