"""`hostward.attach`: offloading of what backward needs, put on a model and taken off again."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hostward.engine.backend import Backend
from hostward.engine.choose import backend_for
from hostward.errors import ConfigError
from hostward.fence import unfenced
from hostward.inspect import groups_of
from hostward.planning.plan_file import PlanFile

from .agreement import agreed
from .attachment import Activations, Attachment, marks_in
from .control import Control
from .layers import find_layers
from .mix import planned
from .options import named_options, require_fewer
from .planned import PlannedLayers, layers_of, recompute_whole, require_whole_again
from .rank_plan import require_division
from .recompute import Regions
from .room import require_room
from .visit_hooks import is_attached
from .weight_offload import OffloadedWeights, Weights, weights_of

if TYPE_CHECKING:
    from .optimizer import AdamW

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
        recompute: what layers run again in backward instead of saving it, by names of `hostward.training.recompute`;
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
            f"activations={given!r} says not what to offload",
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
    if not isinstance(optimizer, Control):
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
