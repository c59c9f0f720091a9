"""From options to what becomes of saved activations, offloaded, recomputed, or both, and of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hostward.training.attach import Activations, Attachment, attach
from hostward.training.layers import find_layers

if TYPE_CHECKING:
    import torch

    from hostward.config import Config
    from hostward.training.optimizer import AdamW


def recompute_layers(model: torch.nn.Module, config: Config) -> int:
    """Put the model's own checkpoints around the layers that are to be recomputed: all (uniform), or the first
    `recompute_num_layers` (block). Returns how many.
    """
    options = config.model
    if options.recompute_granularity is None:
        return 0
    causal: Any = model
    # transformers 5.22 has renamed it.
    enable = getattr(causal, "activation_checkpointing_enable", None) or causal.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    layers: list[Any] = [layer for _, layer in find_layers(model)]
    count = len(layers) if options.recompute_method == "uniform" else int(options.recompute_num_layers or 0)
    for layer in layers[count:]:
        layer.gradient_checkpointing = False
    return min(count, len(layers))


def attach_activations(model: torch.nn.Module, optimizer: AdamW, config: Config) -> Attachment | None:
    """Offloading of activations and weights as the options say; None: off."""
    options = config.model
    if options.fine_grained_activation_offloading:
        # Megatron counts elements, and offloads in all layers but those whose backward comes at once.
        least = options.min_offloaded_tensor_size
        return attach(
            model, optimizer, activations=Activations(modules=options.offload_modules, min_bytes=0, min_elements=least)
        )
    count = options.cpu_offloading_num_layers
    if not (options.cpu_offloading and count):
        return None
    how = Activations(
        num_layers=count,
        double_buffering=options.cpu_offloading_double_buffering,
        retain_pinned_buffers=options.cpu_offloading_retain_pinned_cpu_buffers,
    )
    return attach(
        model,
        optimizer,
        activations=how if options.cpu_offloading_activations else None,
        weights=count if options.cpu_offloading_weights else None,
    )
