"""Apply tensor parallelism to layers of Llama, Qwen3 and Qwen3 MoE, with DTensor's styles and some of our own.

Hidden states are replicated; between attention and MLP each rank may have its part of every sequence instead.
Projections into heads and into the MLP are sharded by their outputs, those back by their inputs, the embedding and the
output layer by the vocabulary. All other weights are replicated. The router and experts of an MoE receive the tokens of
a rank's part of the sequences; `hostward.distributed.expert_parallel` divides the experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
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
"""Head dimension in the input of those layer norms."""


def _on_every_rank(_: str, module: torch.nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        made = distribute_tensor(parameter, mesh, [Replicate()])
        module.register_parameter(name, torch.nn.Parameter(made, requires_grad=parameter.requires_grad))


class _Whole(ParallelStyle):
    """Replicates a module's weights, for replicated inputs or inputs of which each rank has a part.

    Args:
        placement: placement of input and output.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self._placement = placement

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        placements = [self._placement]

        def enter(_: Any, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            return (DTensor.from_local(inputs[0], mesh, placements, run_check=False), *inputs[1:])

        def leave(_: Any, output: Any, mesh: DeviceMesh) -> torch.Tensor:
            found: torch.Tensor = output.to_local()
            return found

        return distribute_module(module, device_mesh, _on_every_rank, enter, leave)  # type: ignore[arg-type]


class _Router(ParallelStyle):
    """Replicates a router's weights, for the tokens of this rank.

    The router returns its logits, and the weights and numbers of the chosen experts. It computes with plain tensors,
    because torch 2.11 has no backward of `topk` for DTensors.

    Args:
        balanced: the model has a load-balancing loss over the logits of all tokens, the same on every rank.
    """

    def __init__(self, *, balanced: bool) -> None:
        super().__init__()
        self._balanced = balanced

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        _on_every_rank("", module, device_mesh)
        weights: list[Any] = []

        def enter(router: Any, _: Any) -> None:
            weights.append(router._parameters["weight"])
            # Each rank has the gradient of its tokens; their sum is the gradient of the weight.
            router._parameters["weight"] = weights[-1].to_local(grad_placements=[Partial()])

        def leave(router: Any, _: Any, __: Any) -> None:
            router._parameters["weight"] = weights.pop()

        def say_of_all(_: Any, __: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
            said, *chosen = output
            parts = DTensor.from_local(said, device_mesh, [Shard(0)], run_check=False)
            return (parts.redistribute(placements=[Replicate()]).to_local(), *chosen)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)  # a recomputation may stop within it
        if self._balanced:
            module.register_forward_hook(say_of_all)
        return module


class _Border(ParallelStyle):
    """Shards hidden states along sequences before a first layer, or gathers them after a last layer.

    Args:
        first: each rank goes on with its part of every sequence of replicated hidden states.
        last: parts are gathered to replicated hidden states, for a pipeline stage to send.
    """

    def __init__(self, *, first: bool, last: bool) -> None:
        super().__init__()
        self._first = first
        self._last = last

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def enter(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            whole = DTensor.from_local(inputs[0], device_mesh, [Replicate()], run_check=False)
            return (whole.redistribute(placements=[_SEQUENCES]).to_local(), *inputs[1:])

        def leave(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
            parts = DTensor.from_local(output, device_mesh, [_SEQUENCES], run_check=False)
            whole: torch.Tensor = parts.redistribute(placements=[Replicate()]).to_local()
            return whole

        if self._first:
            module.register_forward_pre_hook(enter)
        if self._last:
            module.register_forward_hook(leave)
        return module


def divide_matrices(model: Any, mesh: DeviceMesh, *, sequences: bool = False) -> None:
    """Make every parameter of a causal language model, or of one stage of it, a DTensor over `mesh`.

    The mesh has one dimension; experts have to be DTensors already. Call this before `fully_shard`.

    Args:
        sequences: shard hidden states between attention and MLP along the sequence, whose length must be a multiple of
            the ranks. An MoE needs it: otherwise each rank would send the same tokens to the experts.

    Raises:
        ModelError: the model has other layers, or sizes that cannot be divided equally.
    """
    described, inner = model.config, model.model
    layers = [(f"model.layers.{name}", layer) for name, layer in inner.layers.named_children()]
    _require_equal_parts(described, mesh.size(), dense=any(hasattr(layer.mlp, "down_proj") for _, layer in layers))
    between: Placement = _SEQUENCES if sequences else Replicate()
    plan: dict[str, ParallelStyle] = {}
    if has_weights(inner.embed_tokens):
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    if has_weights(inner.norm):
        plan["model.norm"] = _Whole(between)
        plan["lm_head"] = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
    for path, layer in layers:
        plan |= {f"{path}.{name}": style for name, style in _styles(layer, described, between).items()}
        first, last = path == layers[0][0], path == layers[-1][0] and not has_weights(inner.norm)
        if sequences and (first or last):
            plan[path] = _Border(first=first, last=last)
    parallelize_module(model, mesh, plan)
    if described.tie_word_embeddings:
        model.tie_weights()
    left = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if left:
        raise ModelError(
            f"parameter {left[0]!r} is not known to tensor parallelism",
            why="layers of Llama, Qwen3 and Qwen3 MoE without biases are supported",
            fix="leave model.tensor_model_parallel_size at 1",
        )


def _require_equal_parts(described: Any, ranks: int, *, dense: bool) -> None:
    sizes = {
        "attention heads": described.num_attention_heads,
        "key and value heads": described.num_key_value_heads,
        "columns of the MLP": described.intermediate_size if dense else 0,
        "rows of the embedding": described.vocab_size,
    }
    for what, count in sizes.items():
        if count % ranks:
            raise ModelError(
                f"{count} {what} cannot be divided equally among {ranks} ranks",
                fix="choose model.tensor_model_parallel_size so that it divides them",
            )


def _styles(layer: torch.nn.Module, described: Any, between: Placement) -> dict[str, ParallelStyle]:
    """Return styles by path of a module in the layer.

    `between`: placement of hidden states between attention and MLP.
    """
    styles: dict[str, ParallelStyle] = {}
    styles |= {name: ColwiseParallel() for name in _BY_OUTPUT}
    styles |= {name: RowwiseParallel(output_layouts=between) for name in _BY_INPUT}
    styles |= {name: _Whole(between) for name in _NORMS}
    styles |= {name: _Whole(Shard(_HEADS)) for name in _NORMS_OF_HEADS}
    styles["mlp.gate"] = _Router(balanced=bool(getattr(described, "output_router_logits", False)))
    here = {name for name, _ in layer.named_modules()}
    if between == _SEQUENCES:
        whole: dict[str, Any] = {"hidden_states": Replicate()}
        styles["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": between}, desired_input_kwarg_layouts=whole
        )
        if "mlp.gate" not in here:  # an MoE computes on this rank's part
            styles["mlp"] = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    return {name: style for name, style in styles.items() if name in here}


def has_weights(module: torch.nn.Module) -> bool:
    """Return whether a module has weights here; another pipeline stage may have them."""
    return next(module.parameters(), None) is not None
