"""Layers of Llama and Qwen3 over ranks that share each weight matrix: DTensor's own styles, and one for the rest.

Hidden states are whole on every rank; between attention and MLP each may have its part of every sequence instead.
Projections into heads and into the MLP are divided by their outputs, those back by their inputs, the embedding and the
output layer by the vocabulary. What is left is the same on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from hostward.errors import ModelError

_BY_OUTPUT = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_BY_INPUT = ("self_attn.o_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_NORMS_OF_HEADS = ("self_attn.q_norm", "self_attn.k_norm")
_SEQUENCES = Shard(1)
_HEADS = 2
"""The dimension of heads where those norms see it."""


class _Whole(ParallelStyle):
    """A module whose weights every rank has, for inputs that every rank has, or of which it has a part.

    Args:
        placement: of input and output.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self._placement = placement

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        placements = [self._placement]

        def partition(_: str, inner: torch.nn.Module, mesh: DeviceMesh) -> None:
            for name, parameter in list(inner.named_parameters(recurse=False)):
                made = distribute_tensor(parameter, mesh, [Replicate()])
                inner.register_parameter(name, torch.nn.Parameter(made, requires_grad=parameter.requires_grad))

        def enter(_: Any, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            return (DTensor.from_local(inputs[0], mesh, placements, run_check=False), *inputs[1:])

        def leave(_: Any, output: Any, mesh: DeviceMesh) -> torch.Tensor:
            found: torch.Tensor = output.to_local()
            return found

        return distribute_module(module, device_mesh, partition, enter, leave)  # type: ignore[arg-type]


class _OfSequences(ParallelStyle):
    """The first layer: of whole hidden states each rank goes on with its part of every sequence."""

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def enter(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            whole = DTensor.from_local(inputs[0], device_mesh, [Replicate()], run_check=False)
            return (whole.redistribute(placements=[_SEQUENCES]).to_local(), *inputs[1:])

        module.register_forward_pre_hook(enter)
        return module


def divide_matrices(model: Any, mesh: DeviceMesh, *, sequences: bool = False) -> None:
    """Make every parameter of a causal language model a DTensor over `mesh`, of one dimension. Before `fully_shard`.

    Args:
        sequences: divide hidden states between attention and MLP along the sequence, whose length the ranks divide.

    Raises:
        ModelError: the model has other layers, or sizes that cannot be divided equally.
    """
    described, size = model.config, mesh.size()
    sizes = {
        "attention heads": described.num_attention_heads,
        "key and value heads": described.num_key_value_heads,
        "columns of the MLP": described.intermediate_size,
        "rows of the embedding": described.vocab_size,
    }
    for what, count in sizes.items():
        if count % size:
            raise ModelError(
                f"{count} {what} cannot be divided equally among {size} ranks",
                fix="choose model.tensor_model_parallel_size so that it divides them",
            )
    layers = [f"model.layers.{i}." for i in range(described.num_hidden_layers)]
    between: Placement = _SEQUENCES if sequences else Replicate()
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "model.norm": _Whole(between),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    for layer in layers:
        plan |= {layer + name: ColwiseParallel() for name in _BY_OUTPUT}
        plan |= {layer + name: RowwiseParallel(output_layouts=between) for name in _BY_INPUT}
        plan |= {layer + name: _Whole(between) for name in _NORMS}
        if sequences:
            gathered: dict[str, Any] = {"hidden_states": Replicate()}
            plan[layer + "self_attn"] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": between}, desired_input_kwarg_layouts=gathered
            )
            plan[layer + "mlp"] = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
        plan |= {layer + name: _Whole(Shard(_HEADS)) for name in _NORMS_OF_HEADS if described.model_type == "qwen3"}
    if sequences:
        plan[layers[0].removesuffix(".")] = _OfSequences()
    parallelize_module(model, mesh, plan)
    model.tie_weights()
    left = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if left:
        raise ModelError(
            f"parameter {left[0]!r} is not known to tensor parallelism",
            why="layers of Llama and Qwen3 without biases are",
            fix="leave model.tensor_model_parallel_size at 1",
        )
