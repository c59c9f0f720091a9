"""`hostward.attach`: offloading of what backward needs, put on a model and taken off again."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hostward.activations.module_filter import marks_of
from hostward.activations.module_hooks import LayerCalls
from hostward.activations.recompute import Regions, elementwise_in, require_not_compiled
from hostward.activations.saved_tensors import Sorter, Why
from hostward.activations.transfers import ActivationTransfers
from hostward.config.arguments import named_fields, named_options, require_fewer, require_whole
from hostward.core.host_limits import host_memory, resident_bytes
from hostward.errors import ConfigError
from hostward.kernels.cpu.affinity import local_ranks
from hostward.model.collective_errors import agreed
from hostward.model.fence import unfenced
from hostward.model.layer_hooks import is_attached
from hostward.model.layers import find_layers
from hostward.model.parameters import groups_of
from hostward.optim.adamw import AdamW
from hostward.optim.param_groups import is_number
from hostward.optim.placement import planned, require_division
from hostward.plan.budgets import Budgets, refuse
from hostward.plan.decisions import ELEMENTWISE, LEAVES, RECOMPUTED, Keep
from hostward.plan.plan_file import PlanFile
from hostward.runtime.backend import Backend
from hostward.runtime.backend_choice import backend_for
from hostward.runtime.pinned_arena import HostArena
from hostward.schedule.activations import VisitsShape, lower_visits
from hostward.schedule.ops import Schedule
from hostward.weights.offload import OffloadedWeights, WeightReport, Weights, weights_of

if TYPE_CHECKING:
    from hostward.optim.adamw import AdamW


log = logging.getLogger("hostward")


@named_options
@unfenced
def attach(
    model: torch.nn.Module,
    optimizer: AdamW | None = None,
    *,
    activations: Activations | int | None = None,
    weights: Weights | int | None = None,
    recompute: Sequence[str] | Mapping[str, int | None] | None = None,
    plan: object = None,
    layers: Sequence[torch.nn.Module] | None = None,
    backend: Backend | None = None,
    force: bool = False,
) -> Attachment:
    """Offload what a model's layers save for backward, their weights, or both.

        run = hostward.attach(model, optimizer, activations=hostward.Activations(num_layers=20))
        ...  # train as before
        print(run.report().explain())
        run.detach()

    Gradients keep their bits. Use it as a context, or call `detach`. Of a model that several ranks share all of them
    call it, and where one refuses all raise its error.

    Args:
        model: is called as before; its layers' forward hooks tell where it is.
        optimizer: shares its lanes, so that copies do not get into each other's way.
        activations: how; a number is that of layers. None: they stay.
        weights: how weights leave; a number is that of layers. Frozen ones, and those that the host steps
            (`AdamW(offload_fraction=1.0, streamed_fraction=0.0)`). Of sharded ones this rank's parts. None: they stay.
        recompute: what layers run again in backward instead of saving it, by names of `hostward.activations.recompute`;
            ("layernorm", "mlp_act") costs little, and what remains is offloaded as `activations` says. With numbers
            of layers, from the first on: {"mlp_act": None, "layernorm": 9}; None: all.
        plan: from `hostward plan --json FILE`, or that file: all of this by layer, instead of the three above. Layers
            that it recomputes as a whole are told so; they stay that way after `detach`.
        layers: in order of use, where they cannot be found (`find_layers`), or others between them stay as they are.
        backend: where copies run; by default the optimizer's, or that of the model's device.
        force: go on although the plan needs more memory than is free. (What activations take without a plan is not
            known before the first forward.)

    Raises:
        ConfigError: nothing to offload, more layers than there are, modules that are none, or weights whose step is
            not on the host are asked for; the optimizer is another model's; the model, or a part of it, is attached
            already; the plan is for other ranks. ModelError: no layers were found; a module that cannot be recomputed
            as asked; compiled layers with `recompute`. MemoryLimitError: a plan, or copies of weights, do not fit.
    """
    parameters = list(model.parameters())
    device = next((p.device for p in parameters), torch.device("cpu"))
    with contextlib.ExitStack() as undo:
        put = agreed(
            parameters,
            device,
            lambda: _put_on(
                undo, model, optimizer, activations, weights, recompute, plan, layers, backend, device, force=force
            ),
        )
        run = Attachment(
            model, put.backend, put.layers, put.how,
            turns=optimizer is None, regions=put.regions, weights=put.away, marks=put.marks,
        )  # fmt: skip
        undo.pop_all()
        undo.callback(run.detach)
        if put.regions is not None:
            put.regions.warn_of_idle(put.layers)
        if put.planned is not None:  # once nothing else can be refused, on any rank: it is not undone
            recompute_whole(model, [layer for _, layer in put.layers], put.planned.whole)
        undo.pop_all()
    return run


@dataclass(frozen=True, slots=True)
class _PutOn:
    """What has been put on a model's layers, and what is to follow once all ranks have got so far."""

    layers: Sequence[tuple[str, torch.nn.Module]]
    backend: Backend
    planned: PlannedLayers | None
    how: Activations | None
    regions: Regions | None
    away: OffloadedWeights | None
    marks: Sequence[dict[torch.nn.Module, bool]] | None


def _put_on(
    undo: contextlib.ExitStack,
    model: torch.nn.Module,
    optimizer: AdamW | None,
    activations: Activations | int | None,
    weights: Weights | int | None,
    recompute: Sequence[str] | Mapping[str, int | None] | None,
    plan: object,
    layers: Sequence[torch.nn.Module] | None,
    backend: Backend | None,
    device: torch.device,
    *,
    force: bool,
) -> _PutOn:
    """All that may be refused. `undo` gets what takes it off again. Raises what `attach` raises."""
    if activations is None and weights is None and recompute is None and plan is None:
        raise ConfigError(
            "attach() without anything to offload", fix="activations=hostward.Activations(), or a number of layers"
        )
    sharding = groups_of(model)
    if sharding is not None:
        sharding.reshard()  # what FSDP2 has gathered passes for a plain parameter, until FSDP2 lets go of it
    if optimizer is not None:
        _require_optimizer_of(model, optimizer)
    _require_not_attached(model)
    found = find_layers(model, layers)
    given = planned(plan)
    by_plan = None if given is None else _planned(given, model, found, activations, weights, recompute)
    if by_plan is not None:
        activations, weights = by_plan.activations or None, by_plan.weights or None
        recompute = by_plan.recompute(found)
        require_whole_again(model, [layer for _, layer in found], by_plan.whole)
    how = None if activations is None else _how(activations, len(found))
    moving = None if weights is None else weights_of(weights, len(found))
    if given is not None and not force:
        require_room(given, device)
    if backend is None:
        backend = backend_for(device, None) if optimizer is None else optimizer.backend
    regions = away = None
    if recompute is not None:
        regions = Regions(found, recompute)
        undo.callback(regions.undo)
    marks = None if how is None else marks_in(found, how, regions)
    if moving is not None:
        away = OffloadedWeights(model, found, optimizer, backend, moving)
        undo.callback(away.detach)
    return _PutOn(found, backend, by_plan, how, regions, away, marks)


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
    return attach(model, optimizer, activations=Activations(**how), layers=layers, backend=backend)


def _planned(
    given: PlanFile, model: torch.nn.Module, layers: Sequence[tuple[str, torch.nn.Module]], *others: object
) -> PlannedLayers:
    """What a plan says about layers. `others`: what else `attach` was given."""
    require_division(given, model.named_parameters())
    sharding = groups_of(model)
    if sharding is not None:
        given.require_resharded(sharding.resharded(p for _, layer in layers for p in layer.parameters()))
    if any(other is not None for other in others):
        raise ConfigError(
            "attach() with plan=... and activations, weights or recompute",
            why="the plan says what becomes of each layer",
            fix="leave the others out, or edit the plan",
        )
    if len(given.layers) != len(layers):
        raise ConfigError(
            f"the plan has {len(given.layers)} layers, the model has {len(layers)}",
            why="it is a plan of another model",
            fix="make a plan of this model: hostward plan --json FILE",
        )
    chosen = layers_of(given)
    if not (chosen.activations or chosen.weights or chosen.parts or chosen.whole):
        raise ConfigError(
            "attach() with a plan that neither offloads nor recomputes anything of layers",
            fix="leave attach() out; hostward.AdamW(plan=...) alone carries it out",
        )
    return chosen


def _how(given: object, n_layers: int) -> Activations:
    if isinstance(given, bool) or not isinstance(given, (Activations, int)):
        raise ConfigError(
            f"activations={given!r} does not say what to offload",
            fix="activations=hostward.Activations(...), or a number of layers",
        )
    require_fewer(given if isinstance(given, int) else given.num_layers, n_layers)
    how = Activations(num_layers=given) if isinstance(given, int) else given
    if n_layers < 2:
        raise ConfigError("a model of one layer", why="its backward begins when its forward ends", fix="leave it alone")
    if how.num_layers == n_layers - 1:
        log.warning(
            "Offloading num_layers == model_layers - 1 is not recommended, it prevents overlapping of computation and "
            "offload/reload."
        )
    return how


def _require_optimizer_of(model: torch.nn.Module, optimizer: AdamW) -> None:
    if not isinstance(optimizer, AdamW):
        raise ConfigError(
            f"attach() with {type(optimizer).__name__}, which is no optimizer of hostward",
            why="only an optimizer of hostward has lanes to share",
            fix=f"attach(model, activations={optimizer})"
            if isinstance(optimizer, int)
            else "leave the optimizer out, or for trained weights use hostward.AdamW(model, offload_fraction=1.0, "
            "streamed_fraction=0.0)",
        )
    mine = {id(p) for p in model.parameters()}
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    if mine and not any(id(p) in mine for p in stepped):
        raise ConfigError(
            f"attach() with an optimizer of another model: none of its {len(stepped)} parameters belongs to this one",
            why="the optimizer's lanes are shared so that its copies and these take turns; a copied or reloaded model "
            "has parameters of its own",
            fix="pass the optimizer that was made from this model, or make one: hostward.AdamW(model, ...)",
        )


def _require_not_attached(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if is_attached(module):
            raise ConfigError(
                f"attach() to a model that is attached already: {name or type(model).__name__} is offloaded",
                why="what a layer saves would leave twice",
                fix="detach() the first attachment (run.detach()), or use it as a context, before attaching again",
            )


# Offloading that is on a model: how it was asked for, what it does, what it has done so far.


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
        self._transfers = ActivationTransfers(backend, self._arena, turns=turns)
        self._layer_calls: LayerCalls | None = None
        self._wrapped: list[_Checkpointing] = []
        if on:
            self._layer_calls = layer_calls = LayerCalls(
                model, layers, self._sorter, self._transfers, offloaded=offloaded, window=window, ahead=ahead,
                marks=marks, in_flight=how.max_in_flight, weights=weights,
            )  # fmt: skip
            self._wrapped = [_Checkpointing(layer_calls, i, layer) for i, (_, layer) in enumerate(layers)]
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
        transfers = self._transfers
        kept = {why.value: nbytes for why, nbytes in self._sorter.kept_bytes.items()}
        return ActivationReport(
            transfers.offloaded, transfers.freed, transfers.held, transfers.reloaded, transfers.on_demand, kept,
            self._transfers.host_bytes, self.backend.describe()["backend"] == "simulated", len(self.recomputed),
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
        if self._layer_calls is not None:
            self._layer_calls.close()
        if self._regions is not None:
            self._regions.undo()
        if self._weights is not None:
            self._weights.detach()
        self._attached = False
        self._transfers.close()

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

    def __init__(self, layer_calls: LayerCalls, number: int, layer: torch.nn.Module) -> None:
        self._layer_calls, self._number, self._layer = weakref.ref(layer_calls), number, weakref.ref(layer)
        self._outside = type(layer).__call__ is not torch.nn.Module.__call__
        self._attribute = next((name for name in self._ATTRIBUTES if name in layer.__dict__), None)
        if self._attribute is not None:
            self._function: Callable[..., Any] = layer.__dict__[self._attribute]
            setattr(layer, self._attribute, self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._function,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer_calls = self._layer_calls()
        if layer_calls is None or (torch.compiler.is_compiling() and not self._outside):
            return self._function(*args, **kwargs)
        if self._outside:
            layer_calls.pre_forward(self._number, (args[1:], kwargs))
        output = None
        try:
            output = self._function(*args, **kwargs)
            layer_calls.held(self._number, _not_by_position(args, kwargs))
        finally:
            if self._outside:
                layer_calls.post_forward(self._number, output)
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


# What a plan says about layers, as `attach` carries it out.


_SWITCH = "gradient_checkpointing"
"""Of a layer of transformers: whether it is checkpointed in training."""


@dataclass(frozen=True, slots=True)
class PlannedLayers:
    """How many of the first layers' activations leave, how many of the first layers' weights, in how many of the first
    layers norms and activations run again, and which layers run again as a whole.
    """

    activations: int
    weights: int
    parts: int
    whole: frozenset[int]

    def recompute(self, layers: Sequence[tuple[str, torch.nn.Module]]) -> dict[str, int] | None:
        """The norms and activations that can run again in those of a model's layers where the plan wants it.

        Raises:
            ConfigError: there are none. ModelError: compiled layers.
        """
        if not self.parts:
            return None
        require_not_compiled(layers[: self.parts])
        names = elementwise_in(layers[: self.parts])
        if not names:
            raise ConfigError(
                "the plan recomputes norms and activations, and no layer of the model has any that can be",
                fix="make a plan of this model: hostward plan --json FILE",
            )
        return dict.fromkeys(names, self.parts)


def layers_of(plan: PlanFile) -> PlannedLayers:
    """Raises ConfigError for an edited plan that cannot be carried out: what leaves belongs to the first layers."""
    keeps = [Keep(row.activations) for row in plan.layers]
    away = [row.weights == "host" for row in plan.layers]
    found = PlannedLayers(
        _first(plan, [k in LEAVES for k in keeps], "activations leave"),
        _first(plan, away, "weights leave"),
        _first(plan, [k in ELEMENTWISE for k in keeps], "norms and activations are recomputed"),
        frozenset(i for i, k in enumerate(keeps) if k in RECOMPUTED),
    )
    if keeps and (found.activations == len(keeps) or found.weights == len(keeps)):
        raise ConfigError(
            "the plan lets everything of the last layer leave",
            why="its backward begins as soon as its forward ends",
            fix="keep the last layer's activations and weights on the device",
        )
    return found


def _first(plan: PlanFile, yes: Sequence[bool], what: str) -> int:
    count = sum(yes)
    if not all(yes[:count]):
        last, gap = max(i for i, y in enumerate(yes) if y), yes.index(False)
        raise ConfigError(
            f"in the plan, {what} in layers[{last}], {plan.layers[last].layer}, but not in layers[{gap}] before it",
            why="hostward.attach counts layers from the first",
            fix="edit the plan so that these are the first layers, and something of the last one stays",
        )
    return count


def recompute_whole(
    model: torch.nn.Module, layers: Sequence[torch.nn.Module], chosen: frozenset[int], *, draws: bool = True
) -> None:
    """Put transformers' own checkpoint around these layers, and take it from the others.

    Args:
        draws: whether they may draw random numbers, so that the state of the generators is kept; a CUDA graph that is
            being captured cannot read it.

    Raises ConfigError for layers that have none.
    """
    enable = require_whole_again(model, layers, chosen)
    if chosen and enable is not None:
        enable({"use_reentrant": False, "preserve_rng_state": draws})
    for number, layer in enumerate(layers):
        if hasattr(layer, _SWITCH):
            setattr(layer, _SWITCH, number in chosen)


def require_whole_again(
    model: torch.nn.Module, layers: Sequence[torch.nn.Module], chosen: frozenset[int]
) -> Callable[[dict[str, bool]], object] | None:
    """What puts transformers' checkpoints around layers, if the model has it. Raises ConfigError where layers are
    chosen that have none.
    """
    causal: Any = model
    # transformers 5.22 has renamed it.
    enable: Callable[[dict[str, bool]], object] | None
    enable = getattr(causal, "activation_checkpointing_enable", None)
    enable = enable or getattr(causal, "gradient_checkpointing_enable", None)
    if chosen and (enable is None or not all(hasattr(layer, _SWITCH) for layer in layers)):
        raise ConfigError(
            f"the plan, or model.recompute_granularity=full, recomputes {len(chosen)} layers of a "
            f"{type(model).__name__}, which cannot be told to",
            why="it is no model of transformers",
            fix="hostward plan --keep '*=keep', or '*=elementwise', makes a plan without it; without a plan: "
            "model.recompute_granularity=selective, or null",
        )
    return enable


# Whether what a plan says fits, before `attach` does anything.


_CURE = "make a plan within these limits (hostward plan --device-memory SIZE --host-memory SIZE); force=True goes on"


def require_room(plan: PlanFile, device: torch.device) -> None:
    """Raises MemoryLimitError, with the plan's needs, where they exceed what is free.

    They are those of the whole run. What this process holds already, weights and optimizer state among it, is part of
    them, and counts as free. Of several ranks of a host each has its share of what is free there.
    """
    device_bytes = None
    if device.type == "cuda":
        device_bytes = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    host_bytes = host_memory().available_bytes // local_ranks(os.environ) + resident_bytes()
    refuse(plan.needs, Budgets(device_bytes, host_bytes), _cure(plan))


def _cure(plan: PlanFile) -> str:
    leaving = sum(row.weights == "host" for row in plan.layers)
    if not leaving or plan.workload.ranks > 1:
        return _CURE
    return f"{_CURE}; weights that leave need no room at first: hostward.move(model, device, weights={leaving})"
