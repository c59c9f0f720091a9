"""A model of which every rank holds a part: built without memory, divided by FSDP2 layer by layer, then filled.

With `ddp.use_distributed_optimizer` weights, gradients and state are divided over all ranks. Without it every rank has
all of them: the same FSDP2, on a mesh of copies (docs/decisions/0011-ranks-of-a-run.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hostward.training.layers import find_layers

from .drawn import Draws, noted
from .models import empty_model, load_pretrained, transformers_config

if TYPE_CHECKING:
    from hostward.config import Config


def build_in_parts(
    config: Config, *, vocab_size: int | None, device: torch.device, dtype: torch.dtype, seed: int
) -> torch.nn.Module:
    """As `models.build_model`, divided over the ranks of the default process group. Drawn weights have the bits that
    one process would give them. A pretrained folder is read into host memory by every rank.
    """
    path = config.model.hf_model_path
    draws = None
    if path is None:
        described = transformers_config(config.model, vocab_size=vocab_size)
        with noted(device) as draws:
            model = empty_model(described, dtype)
        named = list(model.named_parameters())
    else:
        model = load_pretrained(config.model, path, dtype)
    model.config.use_cache = False
    _divide(model, config, device.type)
    if draws is not None:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            _fill(model, draws, named, device)
    trained: torch.nn.Module = model.train()
    return trained


def _divide(model: Any, config: Config, device_type: str) -> None:
    """Each layer is gathered for itself, and stays whole from its forward to its backward, as in Megatron. Experts
    of a layer are gathered for themselves, from the ranks that have the same experts.
    """
    from torch.distributed import get_world_size
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from hostward.adapters.experts import divide_experts
    from hostward.adapters.tensors import divide_matrices

    options = config.model
    size, of_experts, of_matrices = (
        get_world_size(),
        options.expert_model_parallel_size,
        options.tensor_model_parallel_size,
    )
    if of_matrices > 1:
        grid = init_device_mesh(device_type, (size // of_matrices, of_matrices), mesh_dim_names=("data", "matrices"))
        divide_matrices(model, grid["matrices"], sequences=options.sequence_parallel)
        mesh = grid["data"]
    elif config.ddp.use_distributed_optimizer:
        mesh = init_device_mesh(device_type, (size,), mesh_dim_names=("data",))
    else:
        mesh = init_device_mesh(device_type, (size, 1), mesh_dim_names=("copies", "data"))
    layers: list[Any] = [layer for _, layer in find_layers(model)]
    if of_experts > 1:
        grid = init_device_mesh(device_type, (size // of_experts, of_experts), mesh_dim_names=("data", "experts"))
        for layer in layers:
            divide_experts(layer.mlp.experts, grid["experts"])
            fully_shard(layer.mlp.experts, mesh=grid["data"], reshard_after_forward=False)
    for part in (*layers, *_ends(model)):
        fully_shard(part, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def _ends(model: Any) -> list[Any]:
    """Embedding and output layer, unless they have one weight. The whole model's own parameters are gathered before
    its first layer, and until the output layer has been stepped nothing would begin.
    """
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    return [] if embedding.weight is output.weight else [embedding, output]


def _fill(model: Any, draws: Draws, named: list[tuple[str, torch.Tensor]], device: torch.device) -> None:
    """Memory for the parts, and in it what was drawn."""
    from hostward.adapters import fsdp2

    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    model.tie_weights()
    parameters = dict(model.named_parameters())

    @torch.no_grad()
    def keep(name: str, whole: torch.Tensor) -> None:
        parameter = parameters[name]
        fsdp2.part_of(parameter).copy_(fsdp2.part_of_saved(name, whole, parameter))

    draws.carry_out(named, device, keep)


def synchronise_gradients(model: Any, *, last: bool) -> None:
    """Say whether the coming backward is that of the last microbatch: weights stay whole until then. Gradients are
    reduced in every one, so that sums take a rank's part of them alone.
    """
    model.set_is_last_backward(last)
    model.set_reshard_after_backward(last)
