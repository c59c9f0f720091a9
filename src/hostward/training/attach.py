"""`hostward.attach`: offloading of what backward needs, put on a model and taken off again."""

from __future__ import annotations

import difflib
import functools
import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from hostward.engine.backend import Backend
from hostward.engine.choose import backend_for
from hostward.engine.host_arena import HostArena
from hostward.errors import ConfigError, HostwardError
from hostward.lowering.activations import VisitsShape, lower_visits
from hostward.schedule import Schedule

from .control import Control
from .layers import find_layers
from .modules import marks_of
from .movement import Movement
from .saved_tensors import Sorter
from .visits import Visits
from .weight_offload import OffloadedWeights, WeightReport, Weights, check_weights, weights_of

if TYPE_CHECKING:
    from .optimizer import AdamW


log = logging.getLogger("hostward")


@dataclass(frozen=True, slots=True)
class Activations:
    """How saved activations leave the device.

    num_layers: those of the first so many layers; None: of all but the last, whose backward comes at once.
    modules: only what these modules within the layers save, by path ("mlp", "self_attn.*_proj") or by Megatron's names
    (core_attn, attn_proj, ...); (): all. min_bytes: smaller tensors stay; min_elements: so do those of fewer elements.
    double_buffering: bring them back one layer earlier, for one more layer's worth of device memory.
    retain_pinned_buffers: keep all page-locked memory until `detach`; False: what eight steps in a row have not needed
    goes back. host_bytes: the most page-locked memory that they take; None: what the machine has.
    """

    num_layers: int | None = None
    modules: Sequence[str] = ()
    min_bytes: int = 1024 * 1024
    min_elements: int = 0
    double_buffering: bool = False
    retain_pinned_buffers: bool = False
    host_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ActivationReport:
    """Bytes of saved activations since `attach`.

    offloaded: copied to the host. freed: of these, what left the device. held: what somebody else holds. reloaded:
    copied back; on_demand: of these, what nobody had foreseen. kept: by reason. host: page-locked now. weights: of
    offloaded weights, if there are any.
    """

    offloaded_bytes: int
    freed_bytes: int
    held_bytes: int
    reloaded_bytes: int
    on_demand_bytes: int
    kept_bytes: Mapping[str, int]
    host_bytes: int
    weights: WeightReport | None = None

    def explain(self) -> str:
        """A few lines for people."""
        back = f"{self.reloaded_bytes:,} back, {self.on_demand_bytes:,} of them unforeseen"
        freed = f"{self.freed_bytes:,} of them freed, {self.held_bytes:,} held by others"
        lines = [] if self.weights is None else [self.weights.explain()]
        if self.weights is not None and not self.offloaded_bytes:
            return "\n".join(lines)
        lines += [f"saved activations: {self.offloaded_bytes:,} bytes to the host, {freed}; {back}"]
        lines.append(f"  page-locked for them: {self.host_bytes:,} bytes")
        lines += [f"  stays, because {why}: {nbytes:,} bytes" for why, nbytes in sorted(self.kept_bytes.items())]
        return "\n".join(lines)


class Attachment:
    """Offloading that is on. `detach` takes it off; what has been saved by then still comes back."""

    def __init__(
        self,
        model: torch.nn.Module,
        backend: Backend,
        layers: Sequence[tuple[str, torch.nn.Module]],
        how: Activations,
        *,
        turns: bool,
        weights: OffloadedWeights | None = None,
    ) -> None:
        """`turns`: nobody else counts the turns of the backend."""
        self._weights = weights
        marks = marks_of([layer for _, layer in layers], how.modules) if how.modules else None
        offloaded = len(layers) - 1 if how.num_layers is None else how.num_layers
        window, ahead = max(1, len(layers) - offloaded), int(how.double_buffering)
        self.layers = [name for name, _ in layers[:offloaded]]
        """Paths of the layers whose activations leave."""
        self._shape = VisitsShape(len(layers), offloaded, window, ahead)
        self.schedule: Schedule = lower_visits(self._shape)
        """One forward and backward, as data."""
        self.weight_schedule: Schedule | None = None if weights is None else weights.schedule
        """The same of offloaded weights."""
        self.backend = backend
        self._arena = HostArena(
            backend, "saved activations", limit_bytes=how.host_bytes, retain=how.retain_pinned_buffers
        )
        self._sorter = Sorter(backend.device, how.min_bytes, how.min_elements)
        self._movement = Movement(backend, self._arena, turns=turns)
        self._visits = Visits(
            model,
            layers,
            self._sorter,
            self._movement,
            offloaded=offloaded,
            window=window,
            ahead=ahead,
            marks=marks,
            weights=weights,
        )
        self._wrapped = [_Checkpointing(self._visits, i, layer) for i, (_, layer) in enumerate(layers)]
        weakref.finalize(self, backend.drain)

    def report(self) -> ActivationReport:
        """What has been offloaded so far."""
        movement = self._movement
        kept = {why.value: nbytes for why, nbytes in self._sorter.kept_bytes.items()}
        return ActivationReport(
            movement.offloaded, movement.freed, movement.held, movement.reloaded, movement.on_demand, kept,
            self._arena.slab_bytes, None if self._weights is None else self._weights.report(),
        )  # fmt: skip

    def detach(self) -> None:
        """Leave the model as it was. Host memory goes back too, unless a graph still needs what it saved: then a second
        call returns it later.
        """
        for wrapped in self._wrapped:
            wrapped.undo()
        self._visits.close()
        if self._weights is not None:
            self._weights.detach()
        self._movement.collect()
        self.backend.synchronise()
        if self._arena.blocks_in_use == 0:
            self._arena.close()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def attach(
    model: torch.nn.Module,
    optimizer: AdamW | None = None,
    *,
    activations: Activations | int | None = None,
    weights: Weights | int | None = None,
    layers: Sequence[torch.nn.Module] | None = None,
    backend: Backend | None = None,
) -> Attachment:
    """Offload what a model's layers save for backward, their weights, or both.

        run = hostward.attach(model, optimizer, activations=hostward.Activations(num_layers=20))
        ...  # train as before
        print(run.report().explain())
        run.detach()

    Gradients keep their bits. Use it as a context, or call `detach`.

    Args:
        model: is called as before; its layers' forward hooks tell where it is.
        optimizer: shares its lanes, so that copies do not get into each other's way.
        activations: how saved tensors leave; a number is that of layers.
        weights: how weights leave; a number is that of layers. Frozen ones, and those that the host steps
            (`AdamW(offload_fraction=1.0, streamed_fraction=0.0)`).
        layers: the layers in order of use, where they cannot be found (see `hostward.training.layers.find_layers`).
        backend: where copies run; by default the optimizer's, or that of the model's device.

    Raises:
        ConfigError: nothing to offload is asked for, or more layers than there are, or weights whose step is not on
            the host. ModelError: no layers were found. MemoryLimitError: the host has no room for copies of weights.
    """
    how = _how(activations, nothing=weights is None)
    if optimizer is not None and not isinstance(optimizer, Control):
        raise ConfigError(
            f"attach() with a {type(optimizer).__name__}",
            why="only an optimizer of hostward has lanes to share",
            fix="leave the optimizer out: attach(model, activations=...)",
        )
    found = find_layers(model, layers)
    if activations is not None:
        _check(how, len(found))
    moving = None if weights is None else weights_of(weights)
    if moving is not None:
        check_weights(moving, len(found))
    if how.num_layers == len(found) - 1:
        log.warning(
            "Offloading num_layers == model_layers - 1 is not recommended, it prevents overlapping of computation and "
            "offload/reload."
        )
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if backend is None:
        backend = backend_for(device, None) if optimizer is None else optimizer.backend
    away = None if moving is None else OffloadedWeights(model, found, optimizer, backend, moving)
    try:
        return Attachment(model, backend, found, how, turns=optimizer is None, weights=away)
    except HostwardError:
        if away is not None:
            away.detach()
        raise


def offload_activations(
    model: torch.nn.Module,
    optimizer: AdamW | None = None,
    *,
    layers: Sequence[torch.nn.Module] | None = None,
    backend: Backend | None = None,
    **how: Any,
) -> Attachment:
    """`attach` for a block of one's own loop, with the fields of `Activations` as keywords.

        with hostward.offload_activations(model, num_layers=20):
            loss(model, batch).backward()

    Raises:
        ConfigError, ModelError: as `attach`; a keyword that `Activations` does not have.
    """
    known = [f.name for f in fields(Activations)]
    for name in how:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"offload_activations() has no option {name!r}",
                fix=f"did you mean {near[0]}?" if near else f"options are {', '.join(known)}",
            )
    return attach(model, optimizer, activations=Activations(**how), layers=layers, backend=backend)


def _how(given: object, *, nothing: bool) -> Activations:
    if given is None and not nothing:
        return Activations(num_layers=0)
    if given is None:
        raise ConfigError(
            "attach() without anything to offload", fix="activations=hostward.Activations(), or a number of layers"
        )
    if isinstance(given, Activations):
        return given
    if isinstance(given, bool) or not isinstance(given, int):
        raise ConfigError(
            f"activations={given!r} says not what to offload",
            fix="activations=hostward.Activations(...), or a number of layers",
        )
    return Activations(num_layers=given)


def _check(how: Activations, layers: int) -> None:
    if how.num_layers is not None and not 0 < how.num_layers < layers:
        raise ConfigError(
            f"CPU offloading can be done only for layers less than {layers}",
            why=f"the model has {layers} layers, and {how.num_layers} were asked for",
            fix=f"num_layers between 1 and {layers - 1}: the last layer's backward begins as soon as its forward ends",
        )
    if layers < 2:
        raise ConfigError("a model of one layer", why="its backward begins when its forward ends", fix="leave it alone")
    if isinstance(how.modules, str):
        raise ConfigError(f"modules={how.modules!r} is a string", fix=f"modules=({how.modules!r},)")
    limits = {"min_bytes": how.min_bytes, "min_elements": how.min_elements, "host_bytes": how.host_bytes}
    for name, value in limits.items():
        if value is not None and value < 0:
            raise ConfigError(f"{name} must not be negative, got {value}")


class _Checkpointing:
    """A transformers layer whose `__call__` puts a checkpoint around the module and its hooks: what the checkpoint
    saves itself, the layer's inputs, is saved before the hooks run. So the visit begins around the checkpoint.
    """

    def __init__(self, visits: Visits, number: int, layer: torch.nn.Module) -> None:
        self._layer = weakref.ref(layer)
        self._before: Any = None
        if type(layer).__call__ is torch.nn.Module.__call__:
            return
        function = layer.__dict__.get("_gradient_checkpointing_func")
        if function is None:
            return
        self._before = function
        this = weakref.ref(visits)

        @functools.wraps(function)
        def around(*args: Any, **kwargs: Any) -> Any:
            alive = this()
            if alive is None:
                return function(*args, **kwargs)
            alive.enter(number, (args[1:], kwargs))
            output = None
            try:
                output = function(*args, **kwargs)
            finally:
                alive.leave(number, output)
            return output

        layer._gradient_checkpointing_func = around  # type: ignore[assignment]

    def undo(self) -> None:
        layer = self._layer()
        if layer is not None and self._before is not None:
            layer._gradient_checkpointing_func = self._before
