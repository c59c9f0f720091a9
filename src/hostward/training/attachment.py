"""Offloading that is on a model: how it was asked for, what it does, what it has done so far."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from hostward.engine.backend import Backend
from hostward.engine.host_arena import HostArena
from hostward.errors import ConfigError
from hostward.lowering.activations import VisitsShape, lower_visits
from hostward.schedule import Schedule

from .groups import is_number
from .modules import marks_of
from .movement import Movement
from .options import named_fields, require_whole
from .recompute import Regions
from .saved_tensors import Sorter, Why
from .visits import Visits
from .weight_offload import OffloadedWeights, WeightReport

_LITTLE = 0.25
"""Of what offloaded layers save: where less than this share leaves, the report says so."""


@named_fields
@dataclass(frozen=True, slots=True)
class Activations:
    """How saved activations leave the device.

    num_layers: those of the first so many layers; None: of all but the last, whose backward comes at once.
    modules: only what these modules within the layers save, by path ("mlp", "self_attn.*_proj") or by Megatron's names
    (core_attn, attn_proj, ...); (): all. min_bytes: smaller tensors stay; min_elements: so do those of fewer elements.
    double_buffering: bring them back one layer earlier, for one more layer's worth of device memory.
    retain_pinned_buffers: keep all page-locked memory until `detach`; False: what eight steps in a row have not needed
    goes back. host_bytes: the most page-locked memory that they take; None: what the machine has.
    fraction: of the modules, counted layer by layer, the share that leaves; the first ones stay (Megatron's
    activation_offload_fraction). max_in_flight: so many groups of saved tensors at most (a layer's, or 256 MiB of them)
    are on their way and still on the device; for another, the compute lane waits for the oldest. 0: it waits at the end
    of each layer; None: as long as the window of layers allows.

    Raises ConfigError for values out of range, and for names that are none of these.
    """

    num_layers: int | None = None
    modules: Sequence[str] = ()
    min_bytes: int = 1024 * 1024
    min_elements: int = 0
    double_buffering: bool = False
    retain_pinned_buffers: bool = False
    host_bytes: int | None = None
    fraction: float = 1.0
    max_in_flight: int | None = None

    def __post_init__(self) -> None:
        require_whole("Activations.num_layers", self.num_layers, least=1, optional=True)
        require_whole("Activations.min_bytes", self.min_bytes, least=0)
        require_whole("Activations.min_elements", self.min_elements, least=0)
        require_whole("Activations.host_bytes", self.host_bytes, least=0, optional=True)
        require_whole("Activations.max_in_flight", self.max_in_flight, least=0, optional=True)
        if isinstance(self.modules, str):
            raise ConfigError(f"modules={self.modules!r} is a string", fix=f"modules=({self.modules!r},)")
        if not is_number(self.fraction) or not 0 <= self.fraction <= 1:
            raise ConfigError(f"fraction={self.fraction!r}", fix="a share between 0 and 1 of the modules")
        if self.fraction != 1 and not self.modules:
            raise ConfigError(
                f"fraction={self.fraction} without modules",
                fix="modules=(...), or num_layers, a share of the layers",
            )


@dataclass(frozen=True, slots=True)
class ActivationReport:
    """Bytes of saved activations since `attach`.

    offloaded: copied to the host. freed: of these, what left the device. held: what somebody else holds. reloaded:
    copied back; on_demand: of these, what nobody had foreseen. kept: by reason. host: page-locked now.
    recomputed_modules: parts of layers that save their inputs alone. weights: of offloaded weights, if there are any.
    """

    offloaded_bytes: int
    freed_bytes: int
    held_bytes: int
    reloaded_bytes: int
    on_demand_bytes: int
    kept_bytes: Mapping[str, int]
    host_bytes: int
    simulated: bool = False
    """There is no GPU: the device is a part of the host's memory, and nothing is page-locked."""
    recomputed_modules: int = 0
    weights: WeightReport | None = None

    def explain(self) -> str:
        """A few lines for people."""
        lines = [] if self.weights is None else [self.weights.explain()]
        return "\n".join([*lines, *self.of_activations()])

    def of_activations(self) -> list[str]:
        """The same without offloaded weights; nothing where these leave alone."""
        back = f"{self.reloaded_bytes:,} back, {self.on_demand_bytes:,} of them unforeseen"
        freed = f"{self.freed_bytes:,} of them freed, {self.held_bytes:,} held by others"
        where = " (simulated device)" if self.simulated else ""
        lines = []
        # With weights alone every layer keeps what it saves.
        if self.offloaded_bytes or self.weights is None or set(self.kept_bytes) - {Why.LAYER.value}:
            lines.append(f"saved activations{where}: {self.offloaded_bytes:,} bytes to the host, {freed}; {back}")
            lines.append(f"  {'host memory' if self.simulated else 'page-locked'} for them: {self.host_bytes:,} bytes")
            lines += [f"  stays, because {why}: {nbytes:,} bytes" for why, nbytes in sorted(self.kept_bytes.items())]
        if self.recomputed_modules:
            lines.append(f"  saves its inputs alone, and runs again in backward: {self.recomputed_modules} modules")
        return [*lines, *(self._little() if self.offloaded_bytes or self.weights is None else [])]

    def _little(self) -> list[str]:
        """A sentence where most of what offloaded layers save stays."""
        # A checkpoint saves its inputs; what its recomputation saves is used at once.
        kept = {why: nbytes for why, nbytes in self.kept_bytes.items() if why != Why.RECOMPUTED.value}
        saved = self.offloaded_bytes + sum(kept.values())
        if self.offloaded_bytes >= _LITTLE * saved:
            return []
        share, most = self.offloaded_bytes / saved, max(kept, key=lambda why: kept[why])
        return [f"  little leaves: {share:.0%} of what these layers save; most of the rest stays, because {most}"]


def marks_in(
    layers: Sequence[tuple[str, torch.nn.Module]], how: Activations, regions: Regions | None
) -> list[dict[torch.nn.Module, bool]] | None:
    """By layer, where it begins to hold that saved tensors leave or stay; None: nowhere within layers.

    Raises ConfigError for modules that are none, or that run again as a part of others.
    """
    if not how.modules:
        return None
    inner = [layer for _, layer in layers]
    marks = marks_of(inner, how.modules, _leaving(layers, how), how.fraction)
    if regions is not None:
        regions.require_outside(inner, how.modules)
    return marks


def _leaving(layers: Sequence[object], how: Activations) -> int:
    return len(layers) - 1 if how.num_layers is None else how.num_layers


class Attachment:
    """Offloading that is on. `detach` takes it off; what has been saved by then still comes back."""

    def __init__(
        self,
        model: torch.nn.Module,
        backend: Backend,
        layers: Sequence[tuple[str, torch.nn.Module]],
        how: Activations | None,
        *,
        turns: bool,
        regions: Regions | None = None,
        weights: OffloadedWeights | None = None,
        marks: Sequence[dict[torch.nn.Module, bool]] | None = None,
    ) -> None:
        """`how`: None offloads nothing. `turns`: nobody else counts the turns of the backend. `regions`: are on.
        `weights`: come and go. `marks`: of `marks_in`.
        """
        self._weights = weights
        self._regions = regions
        self.recomputed = [] if regions is None else list(regions.names)
        """Paths of the modules that are recomputed in part or as a whole."""
        on, offloaded = how is not None or weights is not None, 0 if how is None else _leaving(layers, how)
        how = how or Activations()
        window, ahead = max(1, len(layers) - offloaded), int(how.double_buffering)
        self.layers = [name for name, _ in layers[:offloaded]]
        """Paths of the layers whose activations leave."""
        self._which = f" in {', '.join(how.modules)}" if how.modules else ""
        self._shape = VisitsShape(len(layers), offloaded, window, ahead, in_flight=how.max_in_flight)
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
        self._visits: Visits | None = None
        self._wrapped: list[_Checkpointing] = []
        if on:
            self._visits = visits = Visits(
                model, layers, self._sorter, self._movement, offloaded=offloaded, window=window, ahead=ahead,
                marks=marks, in_flight=how.max_in_flight, weights=weights,
            )  # fmt: skip
            self._wrapped = [_Checkpointing(visits, i, layer) for i, (_, layer) in enumerate(layers)]
        self._attached = True
        weakref.finalize(self, backend.drain)

    def in_runs(self, lengths: Sequence[int]) -> None:
        """Layers are called in runs of so many, in any order of runs, forward or backward: as those of the stages of a
        pipeline. Weights that leave are then fetched ahead within a run, and for the one that is expected.

        Raises:
            ConfigError: these are not all layers.
        """
        if sum(lengths) != self._shape.visits or min(lengths) < 1:
            raise ConfigError(
                f"runs of {list(lengths)} layers, of {self._shape.visits} in all",
                fix="give the number of layers of each run, in order; together they are all that are attached",
            )
        if self._weights is not None:
            self._weights.in_runs(lengths)

    def expect(self, run: int, *, backward: bool) -> None:
        """The layers of this run come next. What comes without being expected is fetched when it is needed.

        Raises:
            ConfigError: weights leave, and there is no such run.
        """
        if self._weights is not None:
            self._weights.expect(run, backward=backward)

    def weights_here(self) -> AbstractContextManager[None]:
        """A context in which all offloaded weights are on the device, and stay there. They are read and written as any
        others: an average, a norm, PEFT's merge. What was written within is kept.

        Without it a weight that is read comes by itself, and goes with the next one that is.

        Raises:
            torch.OutOfMemoryError: the device has no room for all of them.
        """
        return contextlib.nullcontext() if self._weights is None else self._weights.all_here()

    def report(self) -> ActivationReport:
        """What has been offloaded so far."""
        movement = self._movement
        kept = {why.value: nbytes for why, nbytes in self._sorter.kept_bytes.items()}
        return ActivationReport(
            movement.offloaded, movement.freed, movement.held, movement.reloaded, movement.on_demand, kept,
            self._movement.host_bytes, self.backend.describe()["backend"] == "simulated", len(self.recomputed),
            None if self._weights is None else self._weights.report(),
        )  # fmt: skip

    def __repr__(self) -> str:
        report, what = self.report(), []
        if self.layers:
            where = f"{_first_and_last(self.layers)} of {self._shape.visits}"
            moved = f"{report.offloaded_bytes:,} bytes to the host, {report.reloaded_bytes:,} back"
            what.append(f"{where}: what they save for backward leaves{self._which}; so far {moved}")
        if self._weights is not None:
            away = self._weights.report()
            what.append(f"{away.offloaded_bytes:,} bytes of weights on the host, {away.here_bytes:,} of them here now")
        if self.recomputed:
            what.append(f"{len(self.recomputed)} modules run again in backward")
        return f"Attachment({'; '.join(what)}{'' if self._attached else '; detached'})"

    def detach(self) -> None:
        """Leave the model as it was. Host memory goes back too, unless autograd still needs what was saved, or a CUDA
        graph is being captured: then a second call returns it later. CUDA graphs that were captured before must not be
        replayed afterwards: the host memory that they copy to is gone.
        """
        for wrapped in self._wrapped:
            wrapped.undo()
        if self._visits is not None:
            self._visits.close()
        if self._regions is not None:
            self._regions.undo()
        if self._weights is not None:
            self._weights.detach()
        self._attached = False
        self._movement.close()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def _first_and_last(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}, {len(names)} layers"


class _Checkpointing:
    """The call with which a layer puts a checkpoint around what it does, replaced on the instance.

    Older transformers' layers put it around the module and its hooks: what the checkpoint saves itself, the layer's
    inputs, is saved before the hooks run, so the visit begins here. Whoever calls: a checkpoint saves the tensors that
    it is given by position. What else it is given it holds, and no hook sees that (H43).

    A copy or pickle of the layer has the plain call.
    """

    _ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")
    """Of transformers' layers, and of torch's `checkpoint_wrapper`."""

    def __init__(self, visits: Visits, number: int, layer: torch.nn.Module) -> None:
        self._visits, self._number, self._layer = weakref.ref(visits), number, weakref.ref(layer)
        self._outside = type(layer).__call__ is not torch.nn.Module.__call__
        self._attribute = next((name for name in self._ATTRIBUTES if name in layer.__dict__), None)
        if self._attribute is not None:
            self._function: Callable[..., Any] = layer.__dict__[self._attribute]
            setattr(layer, self._attribute, self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._function,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        visits = self._visits()
        if visits is None or (torch.compiler.is_compiling() and not self._outside):
            return self._function(*args, **kwargs)
        if self._outside:
            visits.enter(self._number, (args[1:], kwargs))
        output = None
        try:
            output = self._function(*args, **kwargs)
            visits.held(self._number, _not_by_position(args, kwargs))
        finally:
            if self._outside:
                visits.leave(self._number, output)
        return output

    def undo(self) -> None:
        layer = self._layer()
        if layer is not None and self._attribute is not None and layer.__dict__.get(self._attribute) is self:
            setattr(layer, self._attribute, self._function)


def _itself(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _not_by_position(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Of the arguments of a checkpoint, its function first, those in which it does not look for tensors."""
    function, *inputs = args
    bound = [function.args, function.keywords] if isinstance(function, functools.partial) else []
    return [*bound, kwargs, *(value for value in inputs if not isinstance(value, torch.Tensor))]
