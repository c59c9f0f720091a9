"""From options to what becomes of saved activations, offloaded, recomputed, or both, and of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostward.rule_table import captured
from hostward.training.attach import attach
from hostward.training.attachment import Activations, Attachment
from hostward.training.planned import layers_of, recompute_whole

from .models import layers_of as of_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hostward.config import Config
    from hostward.planning.plan_file import PlanFile
    from hostward.training.optimizer import AdamW


def recompute_layers(model: torch.nn.Module, config: Config, plan: PlanFile | None = None) -> int:
    """Put the model's own checkpoints around the layers that are to be recomputed: all (uniform), or the first
    `recompute_num_layers` (block) that are here, or those of a plan. Returns how many. Raises ConfigError for layers
    that have none.
    """
    options = config.model
    if plan is None and options.recompute_granularity != "full":
        return 0
    layers = [layer for _, layer in of_model(model)]
    if plan is not None:
        chosen = layers_of(plan).whole
    elif options.recompute_method == "uniform":
        chosen = frozenset(range(len(layers)))
    else:
        chosen = frozenset(range(min(options.recompute_num_layers or 0, len(layers))))
    recompute_whole(model, layers, chosen, draws=not captured(config))
    return len(chosen)


def attach_activations(
    model: torch.nn.Module,
    optimizer: AdamW,
    config: Config,
    plan: PlanFile | None = None,
    stages: Sequence[torch.nn.Module] = (),
) -> Attachment | None:
    """Offloading of activations and weights, and recomputation of parts of layers, as options or plan say; or None.

    Args:
        stages: those of a pipeline that `model` consists of.
    """
    if plan is not None:
        layers = layers_of(plan)
        # What does not fit was refused before the weights were allocated.
        wanted = layers.activations or layers.weights or layers.parts
        return attach(model, optimizer, plan=plan, force=True) if wanted else None
    how, modules, weights = _offloaded(config), None, None
    if config.model.recompute_granularity == "selective":
        modules = tuple(config.model.recompute_modules)
    if config.model.cpu_offloading and config.model.cpu_offloading_weights:
        weights = config.model.cpu_offloading_num_layers or None
    if how is None and modules is None and weights is None:
        return None
    inner = [layer for _, layer in of_model(model)]
    attached = attach(model, optimizer, activations=how, weights=weights, recompute=modules, layers=inner)
    if stages:
        attached.in_runs([len(of_model(stage)) for stage in stages])
    return attached


def _offloaded(config: Config) -> Activations | None:
    options = config.model
    if options.fine_grained_activation_offloading:
        # Megatron counts elements, and offloads in all layers but those whose backward comes at once.
        return Activations(
            modules=options.offload_modules,
            min_bytes=0,
            min_elements=options.min_offloaded_tensor_size,
            fraction=options.activation_offload_fraction,
            max_in_flight=options.fine_grained_offloading_max_inflight_offloads,
            retain_pinned_buffers=captured(config),  # replays copy to fixed addresses
        )
    count = options.cpu_offloading_num_layers
    if not (options.cpu_offloading and count and options.cpu_offloading_activations):
        return None
    return Activations(
        num_layers=count,
        double_buffering=options.cpu_offloading_double_buffering,
        retain_pinned_buffers=options.cpu_offloading_retain_pinned_cpu_buffers,
    )
