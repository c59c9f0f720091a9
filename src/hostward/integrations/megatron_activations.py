"""Offload what the layers of Megatron-Core's model chunks save for backward, with the layer count of Megatron's flags.

`hostward.integrations.megatron.attach` is the way in.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch

from hostward.attachment import Activations, Attachment, attach as attach_layers
from hostward.errors import ConfigError
from hostward.runtime.backend_choice import backend_for

log = logging.getLogger("hostward")


def attach(
    model_chunks: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: Any = None,
    *,
    activations: Activations | int | None = None,
) -> Attachment:
    """Offload the activations that the first layers of this rank save for backward. Gradients stay bitwise identical.

        run = hostward.integrations.megatron.attach(model_chunks, optimizer)
        ...  # train as before
        print(run.report().explain())
        run.detach()

    Layers are counted over all chunks of a rank, in the order of the chunks, and the last one stays. A rank with fewer
    layers than the count offloads all but its last: of one layer, or of none, it offloads nothing.

    Args:
        model_chunks: what `get_megatron_optimizer` is given, wrapped or not.
        optimizer: what it returned; its copy streams are shared, so that copies do not compete. None: streams of its
            own.
        activations: which activations to offload, or the number of layers. None: as the flags of the model's
            configuration say: `cpu_offloading_num_layers`, `cpu_offloading_double_buffering` and
            `cpu_offloading_retain_pinned_cpu_buffers`. `cpu_offloading` itself stays False, and so Megatron refuses
            neither pipelines nor recomputation.

    Raises:
        ConfigError: Megatron offloads activations itself; no number of layers; more layers than a model that is not
            divided into stages has; weights, which belong to Megatron's buffers; chunks that are attached already.
            ModelError: modules that cannot be offloaded.
    """
    chunks = [model_chunks] if isinstance(model_chunks, torch.nn.Module) else list(model_chunks)
    config: Any = chunks[0].config
    how = _asked(config, activations)
    layers = [layer for chunk in chunks for block in blocks_of(chunk) for layer in block.layers]
    root = chunks[0] if len(chunks) == 1 else torch.nn.ModuleList(chunks)
    stepped = getattr(getattr(optimizer, "offloading", None), "optimizer", None)
    if config.pipeline_model_parallel_size > 1:
        most = len(layers) - 1
        if most < 1:
            log.info("activations of %d layers: nothing is offloaded on this rank", len(layers))
            device = next((p.device for p in root.parameters()), torch.device("cpu"))
            backend = backend_for(device, None) if stepped is None else stepped.backend
            return Attachment(root, backend, [("", layer) for layer in layers], None, turns=False)
        how = dataclasses.replace(how, num_layers=min(most, how.num_layers or most))
    return attach_layers(root, stepped, activations=how, layers=layers)


def blocks_of(chunk: torch.nn.Module) -> list[Any]:
    """Return the outermost blocks of layers of a model chunk: TransformerBlock, MambaStack and HybridStack."""
    found: list[tuple[str, torch.nn.Module]] = []
    for name, module in chunk.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if not inside and hasattr(module, "num_layers_per_pipeline_rank") and hasattr(module, "layers"):
            found.append((name, module))
    return [module for _, module in found]


def _asked(config: Any, activations: Activations | int | None) -> Activations:
    """Return what to offload. Raises ConfigError for flags that say otherwise."""
    if config.cpu_offloading:
        raise ConfigError(
            "cpu_offloading=True with hostward's attach()",
            why="Megatron would offload the same activations by itself",
            fix="cpu_offloading=False; cpu_offloading_num_layers says the number of layers",
        )
    if config.cpu_offloading_weights:
        raise ConfigError(
            "cpu_offloading_weights=True",
            why="weights are parts of the buffers of Megatron's data parallelism, which are there as a whole",
            fix="cpu_offloading_weights=False, and more of the optimizer's state by optimizer_offload_fraction",
        )
    if isinstance(activations, Activations):
        return activations
    count = config.cpu_offloading_num_layers if activations is None else activations
    if not count:
        raise ConfigError(
            "no number of layers whose activations are to be offloaded",
            fix="TransformerConfig(cpu_offloading_num_layers=...), or activations=hostward.Activations(), which are "
            "all layers but the last",
        )
    if activations is not None:
        return Activations(num_layers=count)
    return Activations(
        num_layers=count,
        double_buffering=config.cpu_offloading_double_buffering,
        retain_pinned_buffers=getattr(config, "cpu_offloading_retain_pinned_cpu_buffers", False),
    )
