"""`hostward.attach`: offloading of what backward needs, put on a model and taken off again."""

from __future__ import annotations

import contextlib
import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from hostward.engine.backend import Backend
from hostward.engine.choose import backend_for
from hostward.errors import ConfigError
from hostward.inspect import groups_of

from .attachment import Activations, Attachment
from .control import Control
from .layers import find_layers
from .mix import planned
from .planned import layers_of, recompute_whole
from .recompute import Regions
from .visit_hooks import is_attached
from .weight_offload import OffloadedWeights, Weights, check_weights, weights_of

if TYPE_CHECKING:
    from .optimizer import AdamW

log = logging.getLogger("hostward")


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
        activations: how; a number is that of layers. None: they stay.
        weights: how weights leave; a number is that of layers. Frozen ones, and those that the host steps
            (`AdamW(offload_fraction=1.0, streamed_fraction=0.0)`). None: they stay.
        recompute: what layers run again in backward instead of saving it, by names of `hostward.training.recompute`;
            ("layernorm", "mlp_act") costs little, and what remains is offloaded as `activations` says. With numbers
            of layers, from the first on: {"mlp_act": None, "layernorm": 9}; None: all.
        plan: from `hostward plan --json FILE`, or that file: all of this by layer, instead of the three above. Layers
            that it recomputes as a whole are told so; they stay that way after `detach`.
        layers: the layers in order of use, where they cannot be found (see `hostward.training.layers.find_layers`).
        backend: where copies run; by default the optimizer's, or that of the model's device.

    Raises:
        ConfigError: nothing to offload is asked for, or more layers than there are, or modules that are none, or
            weights whose step is not on the host; the optimizer is another model's; the model, or a part of it, is
            attached already. ModelError: no layers were found; a module that cannot be recomputed as asked; compiled
            layers with `recompute`. MemoryLimitError: the host has no room for copies of weights.
    """
    sharding = groups_of(model)
    if sharding is not None:
        sharding.reshard()  # what FSDP2 has gathered passes for a plain parameter, until FSDP2 lets go of it
    if plan is not None:
        activations, weights, recompute = _planned(model, plan, layers, activations, weights, recompute)
    how = _how(activations) if activations is not None or (weights is None and recompute is None) else None
    if optimizer is not None:
        _require_optimizer_of(model, optimizer)
    _require_not_attached(model)
    found = find_layers(model, layers)
    if how is not None:
        _check(how, len(found))
    moving = None if weights is None else weights_of(weights)
    if moving is not None:
        check_weights(moving, len(found))
    if how is not None and how.num_layers == len(found) - 1:
        log.warning(
            "Offloading num_layers == model_layers - 1 is not recommended, it prevents overlapping of computation and "
            "offload/reload."
        )
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if backend is None:
        backend = backend_for(device, None) if optimizer is None else optimizer.backend
    with contextlib.ExitStack() as undo:
        regions = away = None
        if recompute is not None:
            regions = Regions(found, recompute)
            undo.callback(regions.undo)
        if moving is not None:
            away = OffloadedWeights(model, found, optimizer, backend, moving)
            undo.callback(away.detach)
        run = Attachment(model, backend, found, how, turns=optimizer is None, regions=regions, weights=away)
        undo.pop_all()
    return run


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


def _planned(
    model: torch.nn.Module, plan: object, layers: Sequence[torch.nn.Module] | None, *others: object
) -> tuple[int | None, int | None, dict[str, int] | None]:
    """Activations, weights and recomputation of a plan."""
    if any(other is not None for other in others):
        raise ConfigError(
            "attach() with plan=... and activations, weights or recompute",
            why="the plan says what becomes of each layer",
            fix="leave the others out, or edit the plan",
        )
    given = planned(plan)
    found = find_layers(model, layers)
    if given is None or len(given.layers) != len(found):
        raise ConfigError(
            f"the plan has {len(given.layers) if given else 0} layers, the model has {len(found)}",
            why="it is a plan of another model",
            fix="make a plan of this model: hostward plan --json FILE",
        )
    chosen = layers_of(given)
    if not (chosen.activations or chosen.weights or chosen.parts):
        raise ConfigError(
            "attach() with a plan that neither offloads nor recomputes parts of layers",
            fix="leave attach() out; hostward.AdamW(plan=...) alone carries it out",
        )
    modules = [layer for _, layer in found]
    recompute = chosen.recompute(modules)
    recompute_whole(model, modules, chosen.whole)
    return chosen.activations or None, chosen.weights or None, recompute


def _how(given: object) -> Activations:
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
    for name in ("num_layers", "min_bytes", "min_elements", "host_bytes", "max_in_flight"):
        value = getattr(how, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ConfigError(f"Activations.{name} must be a whole number, got {value!r}", fix=f"{name}=1")
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
    if not 0 <= how.fraction <= 1:
        raise ConfigError(f"fraction={how.fraction}", fix="a share between 0 and 1 of the modules")
    if how.fraction != 1 and not how.modules:
        raise ConfigError(
            f"fraction={how.fraction} without modules", fix="modules=(...), or num_layers for a share of the layers"
        )
    limits = {"min_bytes": how.min_bytes, "min_elements": how.min_elements, "host_bytes": how.host_bytes}
    limits["max_in_flight"] = how.max_in_flight
    for name, value in limits.items():
        if value is not None and value < 0:
            raise ConfigError(f"{name} must not be negative, got {value}")


def _require_optimizer_of(model: torch.nn.Module, optimizer: AdamW) -> None:
    if not isinstance(optimizer, Control):
        raise ConfigError(
            f"attach() with {type(optimizer).__name__}, which is no optimizer of hostward",
            why="only an optimizer of hostward has lanes to share",
            fix="leave the optimizer out, or for trained weights use hostward.AdamW(model, offload_fraction=1.0, "
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
