"""Attach offloading of saved activations and weights to a model, and detach it again."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hostward.activations.module_filter import marks_of
from hostward.activations.module_hooks import LayerCalls
from hostward.activations.recompute import Regions, elementwise_in, require_not_compiled
from hostward.activations.saved_tensors import Sorter, Why
from hostward.activations.transfers import ActivationTransfers
from hostward.config.arguments import named_fields, named_options, require_fewer, require_whole
from hostward.core.host_limits import host_memory, resident_bytes
from hostward.errors import ConfigError, ModelError
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
from hostward.plan.plan_file import PlanFile, PlannedLayers, layers_of
from hostward.runtime.backend import Backend
from hostward.runtime.backend_choice import backend_for
from hostward.runtime.pinned_arena import HostArena
from hostward.schedule.activations import LayerCallsShape, lower_layer_calls
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
    plan: PlanFile | str | Path | None = None,
    layers: Sequence[torch.nn.Module] | None = None,
    backend: Backend | None = None,
    force: bool = False,
) -> Attachment:
    """Offload the activations that a model's layers save for backward, their weights, or both.

        run = hostward.attach(model, optimizer, activations=hostward.Activations(num_layers=20))
        ...  # train as before
        print(run.report().explain())
        run.detach()

    Gradients are bitwise identical. Use the result as a context, or call `detach`. All ranks that share a model have to
    call this; if it fails on one rank, all ranks raise that rank's error.

    Args:
        model: the model to train; its layers' hooks follow forward and backward.
        optimizer: its copy streams are shared, so that copies do not compete.
        activations: which activations to offload, or the number of layers. None: they stay.
        weights: which weights to offload, or the number of layers: frozen weights, and those with a CPU optimizer step
            (`AdamW(offload_fraction=1.0, streamed_fraction=0.0)`); of sharded weights this rank's parts. None: they
            stay.
        recompute: modules to recompute in backward instead of saving their activations, by names of
            `hostward.activations.recompute`; ("layernorm", "mlp_act") costs little, and remaining activations are
            offloaded as `activations` says. With numbers of layers, from the first on:
            {"mlp_act": None, "layernorm": 9}; None: all.
        plan: the result of `hostward plan --json FILE`, or that file: sets all of this by layer, instead of the three
            above. Layers that it recomputes as a whole keep this setting after `detach`.
        layers: the layers in order of use, if they cannot be found (`find_layers`), or only some are to be offloaded.
        backend: runs the copies; by default the optimizer's, or that of the model's device.
        force: go on although the plan needs more memory than is free. (Without a plan the size of activations is not
            known before the first forward.)

    Raises:
        ConfigError: nothing to offload; more layers than there are; unknown modules; weights without a CPU optimizer
            step; the optimizer of another model; the model, or a part of it, is attached already; the plan is for
            other ranks. ModelError: no layers were found; a module that cannot be recomputed as requested; compiled
            layers with `recompute`; modules of torch.jit. MemoryLimitError: a plan, or host copies of weights, do not
            fit.
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
        if put.planned is not None:  # after everything that can fail, on any rank, because it is not undone
            layers_only = [layer for _, layer in put.layers]
            recompute_whole(model, layers_only, put.planned.whole)
            run.follow_checkpoints(layers_only)  # older transformers have put others in place of those that run follows
            run.recomputed_layers = [put.layers[number][0] for number in sorted(put.planned.whole)]
            if optimizer is not None:
                optimizer.layers_attached()
        undo.pop_all()
    return run


@dataclass(frozen=True, slots=True)
class _PutOn:
    """Holds what has been installed on a model's layers, and what follows once no rank has failed."""

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
    """Do all parts of `attach` that may raise, and register their removal with `undo`. Raises as `attach` does."""
    if activations is None and weights is None and recompute is None and plan is None:
        raise ConfigError(
            "attach() without anything to offload", fix="activations=hostward.Activations(), or a number of layers"
        )
    sharding = groups_of(model)
    if sharding is not None:
        sharding.reshard()  # unsharded parameters look like plain ones until FSDP2 frees them
    if optimizer is not None:
        _require_optimizer_of(model, optimizer)
    _require_not_attached(model)
    found = find_layers(model, layers)
    given = planned(plan)
    by_plan = None if given is None else _planned(given, model, found, activations, weights, recompute)
    if by_plan is not None:
        activations, weights = by_plan.activations or None, by_plan.weights or None
        recompute = recomputed_parts(by_plan, found)
        require_whole_again(model, [layer for _, layer in found], by_plan.whole)
    _require_no_scripts(found, within=weights is not None or recompute is not None)
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
    """Attach activation offloading for a block of a custom training loop, with fields of `Activations` as keywords.

        with hostward.offload_activations(model, num_layers=20):
            loss(model, batch).backward()

    Raises:
        ConfigError, ModelError: as `attach`; also for a keyword that `Activations` does not have.
    """
    return attach(model, optimizer, activations=Activations(**how), layers=layers, backend=backend)


def _planned(
    given: PlanFile, model: torch.nn.Module, layers: Sequence[tuple[str, torch.nn.Module]], *others: object
) -> PlannedLayers:
    """Return what a plan says about layers. `others`: further arguments of `attach`, which have to be None."""
    require_division(given, model.named_parameters())
    sharding = groups_of(model)
    if sharding is not None:
        given.require_resharded(sharding.resharded(p for _, layer in layers for p in layer.parameters()))
    if any(other is not None for other in others):
        raise ConfigError(
            "attach() with plan=... and activations, weights or recompute",
            why="the plan decides for each layer",
            fix="leave the others out, or edit the plan",
        )
    if len(given.layers) != len(layers):
        raise ConfigError(
            f"the plan has {len(given.layers)} layers, the model has {len(layers)}",
            why="the plan was made for another model",
            fix="make a plan of this model: hostward plan --json FILE",
        )
    chosen = layers_of(given)
    if not chosen:
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
            why="only an optimizer of hostward has copy streams to share",
            fix=f"attach(model, activations={optimizer})"
            if isinstance(optimizer, int)
            else "leave the optimizer out, or for trained weights use hostward.AdamW(model, offload_fraction=1.0, "
            "streamed_fraction=0.0)",
        )
    mine = {id(p) for p in model.parameters()}
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    # With an owner of buffers, parameters are parts of those buffers, and no parameters of the model.
    if mine and optimizer.waits == "hooks" and not any(id(p) in mine for p in stepped):
        raise ConfigError(
            f"attach() with an optimizer of another model: none of its {len(stepped)} parameters belongs to this one",
            why="the optimizer's copy streams are shared so that its copies and these do not compete; a copied or "
            "reloaded model has other parameters",
            fix="pass the optimizer that was made from this model, or make one: hostward.AdamW(model, ...)",
        )


def _require_not_attached(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if is_attached(module):
            raise ConfigError(
                f"attach() to a model that is attached already: {name or type(model).__name__} is offloaded",
                why="activations and weights would be offloaded twice",
                fix="detach() the first attachment (run.detach()), or use it as a context, before attaching again",
            )


def _require_no_scripts(layers: Sequence[tuple[str, torch.nn.Module]], *, within: bool) -> None:
    """Raise ModelError for layers of torch.jit. `within`: for modules of torch.jit within layers, too."""
    for name, layer in layers:
        for path, module in layer.named_modules(prefix=name) if within else [(name, layer)]:
            if isinstance(module, torch.jit.ScriptModule):
                raise ModelError(
                    f"{path} is a module of torch.jit",
                    why="it takes no hooks, and its code reads weights without them",
                    fix="attach() to the plain model; torch.compile() of layers works",
                )


# Offloading that is attached to a model: its options, its work, and its report.


_LITTLE = 0.25
"""Offloaded share of the layers' activations below which the report points it out."""


@named_fields
@dataclass(frozen=True, slots=True)
class Activations:
    """Choose which saved activations are offloaded, and how.

    num_layers: offload those of the first so many layers; None: of all layers but the last, whose backward follows at
    once. modules: offload only tensors saved by these modules within the layers, by path ("mlp", "self_attn.*_proj") or
    by Megatron's names (core_attn, attn_proj, ...); (): by all. min_bytes, min_elements: smaller tensors stay.
    double_buffering: reload one layer earlier, for one more layer's worth of device memory. retain_pinned_buffers: keep
    all pinned memory until `detach`; False: free what eight steps in a row have not needed. host_bytes: the most pinned
    memory to use; None: all that the machine has. fraction: offload this share of the modules, counted layer by layer;
    the first ones stay (Megatron's activation_offload_fraction). max_in_flight: the most groups of saved tensors (of a
    layer, or 256 MiB of them) that are being copied and still on the device; for another group, the compute stream
    waits for the oldest. 0: it waits at the end of each layer; None: the limit is the window of layers.

    Raises ConfigError for values out of range and for unknown option names.
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
    """Report bytes of saved activations since `attach`.

    offloaded: copied to the host. freed: the part of it whose device memory was freed. held: the part that other code
    still held. reloaded: copied back; on_demand: the part of it that was not prefetched. kept: not offloaded, by
    reason. host: pinned now. recomputed_modules: modules that save only their inputs. weights: the report of offloaded
    weights, if there are any.
    """

    offloaded_bytes: int
    freed_bytes: int
    held_bytes: int
    reloaded_bytes: int
    on_demand_bytes: int
    kept_bytes: Mapping[str, int]
    host_bytes: int
    simulated: bool = False
    """True without a GPU: the device is a part of host memory, and nothing is pinned."""
    recomputed_modules: int = 0
    weights: WeightReport | None = None
    recomputed_layers: int = 0
    """Layers that save only their inputs, as a plan says."""

    def explain(self) -> str:
        """Return a readable report of a few lines."""
        lines = [] if self.weights is None else [self.weights.explain()]
        return "\n".join([*lines, *self.of_activations()])

    def of_activations(self) -> list[str]:
        """Return the lines about activations; none if only weights are offloaded."""
        back = f"{self.reloaded_bytes:,} reloaded, {self.on_demand_bytes:,} of them not prefetched"
        freed = f"{self.freed_bytes:,} of them freed, {self.held_bytes:,} held by others"
        where = " (simulated device)" if self.simulated else ""
        lines = []
        # If only weights are offloaded, every layer keeps its activations.
        if self.offloaded_bytes or self.weights is None or set(self.kept_bytes) - {Why.LAYER.value}:
            lines.append(f"saved activations{where}: {self.offloaded_bytes:,} bytes to the host, {freed}; {back}")
            lines.append(f"  {'host memory' if self.simulated else 'pinned'} for them: {self.host_bytes:,} bytes")
            lines += [f"  stays, because {why}: {nbytes:,} bytes" for why, nbytes in sorted(self.kept_bytes.items())]
        if self.recomputed_modules:
            lines.append(f"  recomputed in backward, saving only their inputs: {self.recomputed_modules} modules")
        if self.recomputed_layers:
            lines.append(f"  recomputed in backward, saving only their inputs: {self.recomputed_layers} whole layers")
        return [*lines, *(self._little() if self.offloaded_bytes or self.weights is None else [])]

    def _little(self) -> list[str]:
        """Return a line that says so if most activations of offloaded layers stay."""
        # A checkpoint saves its inputs; tensors saved in its recomputation are used at once. Others stay as asked for.
        aside = (Why.RECOMPUTED.value, Why.LAYER.value)
        kept = {why: nbytes for why, nbytes in self.kept_bytes.items() if why not in aside}
        saved = self.offloaded_bytes + sum(kept.values())
        if self.offloaded_bytes >= _LITTLE * saved:
            return []
        share, most = self.offloaded_bytes / saved, max(kept, key=lambda why: kept[why])
        return [f"  only {share:.0%} of these layers' activations are offloaded; most others stay, because {most}"]


def marks_in(
    layers: Sequence[tuple[str, torch.nn.Module]], how: Activations, regions: Regions | None
) -> list[dict[torch.nn.Module, bool]] | None:
    """Return by layer the modules in whose calls saved tensors are offloaded or stay; None: not decided by module.

    Raises ConfigError for unknown modules, and for modules that are recomputed as a part of others.
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
    """Controls the offloading of a model until `detach`; tensors offloaded by then are still reloaded."""

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
        """Install the hooks.

        `how`: None offloads no activations. `turns`: no optimizer begins and ends the backend's steps. `regions`:
        recomputed modules. `weights`: offloaded weights. `marks`: the result of `marks_in`.
        """
        self._weights = weights
        self._regions = regions
        self.recomputed = [] if regions is None else list(regions.names)
        """Recomputed modules, by path."""
        self.recomputed_layers: list[str] = []
        """Layers that are recomputed as a whole, by path."""
        on, offloaded = how is not None or weights is not None, 0 if how is None else _leaving(layers, how)
        how = how or Activations()
        window, ahead = max(1, len(layers) - offloaded), int(how.double_buffering)
        self.layers = [name for name, _ in layers[:offloaded]]
        """Layers whose activations are offloaded, by path."""
        self._which = f" in {', '.join(how.modules)}" if how.modules else ""
        self._shape = LayerCallsShape(len(layers), offloaded, window, ahead, in_flight=how.max_in_flight)
        self.schedule: Schedule = lower_layer_calls(self._shape)
        """Lowered schedule of one forward and backward."""
        self.weight_schedule: Schedule | None = None if weights is None else weights.schedule
        """Lowered schedule of offloaded weights."""
        self.backend = backend
        self._arena = HostArena(
            backend, "saved activations", limit_bytes=how.host_bytes, retain=how.retain_pinned_buffers
        )
        self._sorter = Sorter(backend.device, how.min_bytes, how.min_elements)
        self._transfers = ActivationTransfers(backend, self._arena, turns=turns)
        self._layer_calls: LayerCalls | None = None
        self._wrapped: list[_Checkpointing] = []
        self._also_undone: list[Callable[[], None]] = []
        if on:
            self._layer_calls = LayerCalls(
                model, layers, self._sorter, self._transfers, offloaded=offloaded, window=window, ahead=ahead,
                marks=marks, in_flight=how.max_in_flight, weights=weights,
            )  # fmt: skip
            self.follow_checkpoints([layer for _, layer in layers])
        self._attached = True
        weakref.finalize(self, backend.drain)

    def follow_checkpoints(self, layers: Sequence[torch.nn.Module]) -> None:
        """Follow the checkpoints that these layers, all that are attached, now have within or around them."""
        layer_calls = self._layer_calls
        if layer_calls is not None:
            for wrapped in self._wrapped:
                wrapped.undo()
            self._wrapped = [_Checkpointing(layer_calls, i, layer) for i, layer in enumerate(layers)]

    def in_runs(self, lengths: Sequence[int]) -> None:
        """Declare that layers are called in runs of these lengths, such as the stages of a pipeline.

        Runs may come in any order, forward or backward. Offloaded weights are then prefetched within a run, and for the
        run that `expect` names.

        Raises:
            ConfigError: the lengths do not add up to all layers.
        """
        if sum(lengths) != self._shape.layer_calls or min(lengths) < 1:
            raise ConfigError(
                f"runs of {list(lengths)} layers, of {self._shape.layer_calls} in all",
                fix="give the number of layers of each run, in order; together they are all that are attached",
            )
        if self._weights is not None:
            self._weights.in_runs(lengths)

    def expect(self, run: int, *, backward: bool) -> None:
        """Prefetch weights for the run of layers that comes next; other runs' weights are fetched when needed.

        Raises:
            ConfigError: weights are offloaded, and there is no such run.
        """
        if self._weights is not None:
            self._weights.expect(run, backward=backward)

    def call(self, layer: int, function: Callable[..., Any], *inputs: Any) -> Any:
        """Call `function`, a checkpoint that begins outside of a layer, as a call of that layer. Returns its result.

        Those of the inputs that it saves are offloaded. `layer`: its number among those that are attached, from 0.
        """
        if self._layer_calls is None:
            return function(*inputs)
        output = None
        self._layer_calls.pre_forward(layer, (inputs, {}))
        try:
            output = function(*inputs)
        finally:
            self._layer_calls.post_forward(layer, output)
        return output

    def undo_with(self, undo: Callable[[], None]) -> None:
        """Have `detach` call `undo`, too."""
        self._also_undone.append(undo)

    def weights_here(self) -> AbstractContextManager[None]:
        """Return a context in which all offloaded weights stay on the device, to be read and written.

        Use it for averages, norms or PEFT's merge; writes are kept. Outside of it a weight that is read is reloaded
        automatically, and freed when the next one is read.

        Raises:
            torch.OutOfMemoryError: the device has no room for all of them.
        """
        return contextlib.nullcontext() if self._weights is None else self._weights.all_here()

    def report(self) -> ActivationReport:
        """Return how much has been offloaded so far."""
        transfers = self._transfers
        kept = {why.value: nbytes for why, nbytes in self._sorter.kept_bytes.items()}
        return ActivationReport(
            transfers.offloaded, transfers.freed, transfers.held, transfers.reloaded, transfers.on_demand, kept,
            self._transfers.host_bytes, self.backend.describe()["backend"] == "simulated", len(self.recomputed),
            None if self._weights is None else self._weights.report(), len(self.recomputed_layers),
        )  # fmt: skip

    def __repr__(self) -> str:
        report, what = self.report(), []
        if self.layers:
            where = f"{_first_and_last(self.layers)} of {self._shape.layer_calls}"
            moved = f"{report.offloaded_bytes:,} bytes to the host, {report.reloaded_bytes:,} reloaded"
            what.append(f"{where}: activations are offloaded{self._which}; so far {moved}")
        if self._weights is not None:
            away = self._weights.report()
            now = f"{away.here_bytes:,} of them on the device now"
            what.append(f"{away.offloaded_bytes:,} bytes of weights on the host, {now}")
        if self.recomputed:
            what.append(f"{len(self.recomputed)} modules recomputed in backward")
        if self.recomputed_layers:
            what.append(f"{len(self.recomputed_layers)} whole layers recomputed in backward")
        return f"Attachment({'; '.join(what)}{'' if self._attached else '; detached'})"

    def detach(self) -> None:
        """Remove all hooks from the model, and return host memory.

        Host memory is kept if autograd still needs it, or during the capture of a CUDA graph: then a second call
        returns it later. CUDA graphs that were captured before must not be replayed afterwards, because the host memory
        that they copy to has been freed.

        Raises:
            AsleepError: weights are offloaded and asleep (`AdamW.sleep`). ModelError: trained weights are offloaded,
                between backward and step. Nothing has been undone then.
        """
        if self._weights is not None:
            self._weights.require_detachable()
        for undo in (*(wrapped.undo for wrapped in self._wrapped), *self._also_undone):
            undo()
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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._weights is not None:
            self._weights.abandon()
        self.detach()


def _first_and_last(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}, {len(names)} layers"


class _Checkpointing:
    """Replaces, on a layer instance, the function with which the layer checkpoints itself.

    Older transformers' layers wrap the module and its hooks: the checkpoint saves the layer's inputs before the hooks
    run, so the layer call begins here. A checkpoint saves only tensors passed by position; other arguments it holds,
    and no saved-tensor hook sees them.

    A copy or pickle of the layer has the plain function.
    """

    _ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")
    """Attributes in transformers' layers, and in torch's `checkpoint_wrapper`."""

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
    """Return those arguments of a checkpoint, whose first is its function, in which it does not look for tensors."""
    function, *inputs = args
    bound = [function.args, function.keywords] if isinstance(function, functools.partial) else []
    return [*bound, kwargs, *(value for value in inputs if not isinstance(value, torch.Tensor))]


# A plan's decisions about layers, as `attach` carries them out.


_SWITCH = "gradient_checkpointing"
"""Layer attribute of transformers: whether the layer is checkpointed in training."""


def recomputed_parts(planned: PlannedLayers, layers: Sequence[tuple[str, torch.nn.Module]]) -> dict[str, int] | None:
    """Return the layer norms and activations to recompute, with their number of layers; None: nothing.

    Raises:
        ConfigError: the layers have none that can be recomputed. ModelError: compiled layers.
    """
    if not planned.parts:
        return None
    require_not_compiled(layers[: planned.parts])
    names = elementwise_in(layers[: planned.parts])
    if not names:
        raise ConfigError(
            "the plan recomputes layer norms and activations, but the model's layers have none that can be",
            fix="make a plan of this model: hostward plan --json FILE",
        )
    return dict.fromkeys(names, planned.parts)


def recompute_whole(
    model: torch.nn.Module, layers: Sequence[torch.nn.Module], chosen: frozenset[int], *, draws: bool = True
) -> None:
    """Enable transformers' own checkpointing of these layers, and disable it for the others.

    Args:
        draws: whether they may draw random numbers, so that the generators' state is saved; it cannot be read during
            the capture of a CUDA graph.

    Raises ConfigError for layers that have none.
    """
    enable = require_whole_again(model, layers, chosen)
    if chosen and not model.training:
        log.warning("the model is in evaluation mode, in which transformers checkpoints no layer: call model.train()")
    if chosen and enable is not None:
        enable({"use_reentrant": False, "preserve_rng_state": draws})
    for number, layer in enumerate(layers):
        if hasattr(layer, _SWITCH):
            setattr(layer, _SWITCH, number in chosen)


def require_whole_again(
    model: torch.nn.Module, layers: Sequence[torch.nn.Module], chosen: frozenset[int]
) -> Callable[[dict[str, bool]], object] | None:
    """Return the method that enables transformers' checkpointing, if the model has one.

    Raises:
        ConfigError: layers are chosen that cannot be checkpointed.
    """
    causal: Any = model
    # transformers 5.22 has renamed it.
    enable: Callable[[dict[str, bool]], object] | None
    enable = getattr(causal, "activation_checkpointing_enable", None)
    enable = enable or getattr(causal, "gradient_checkpointing_enable", None)
    if chosen and (enable is None or not all(hasattr(layer, _SWITCH) for layer in layers)):
        raise ConfigError(
            f"the plan, or model.recompute_granularity=full, recomputes {len(chosen)} layers of a "
            f"{type(model).__name__}, which does not support it",
            why="it is not a model of transformers",
            fix="hostward plan --keep '*=keep', or '*=elementwise', makes a plan without it; without a plan: "
            "model.recompute_granularity=selective, or null",
        )
    return enable


# Check that the plan's memory needs fit before attaching.


_FIX = "make a plan within these limits (hostward plan --device-memory SIZE --host-memory SIZE); force=True goes on"


def require_room(plan: PlanFile, device: torch.device) -> None:
    """Raise MemoryLimitError if a plan needs more memory than is free.

    The needs are those of the whole run. Memory that this process holds already, such as weights and optimizer state,
    is part of them and counts as free. Ranks on one host share its free memory equally.
    """
    device_bytes = None
    if device.type == "cuda":
        device_bytes = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    host_bytes = host_memory().available_bytes // local_ranks(os.environ) + resident_bytes()
    refuse(plan.needs, Budgets(device_bytes, host_bytes), _fix(plan))


def _fix(plan: PlanFile) -> str:
    leaving = sum(row.weights == "host" for row in plan.layers)
    if not leaving or plan.workload.ranks > 1:
        return _FIX
    return f"{_FIX}; offloaded weights need no device memory at first: hostward.move(model, device, weights={leaving})"
