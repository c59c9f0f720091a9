"""Divide the experts of an MoE over ranks, and send tokens to the ranks of their experts and back.

This supports modules that store the weights of all experts in stacked parameters [experts, ...] and are called with
hidden states [tokens, width], the experts chosen for each token [tokens, k] and their weights [tokens, k], as in
transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hostward.errors import ModelError


def divide_experts(experts: Any, mesh: DeviceMesh, *, sharing: int = 1) -> None:
    """Keep this rank's experts, as DTensors over `mesh`, and exchange tokens in forward; call before `fully_shard`.

    Args:
        mesh: one-dimensional mesh. Every rank calls the module equally often, each with different tokens; a loss that
            is a mean over ranks gives gradients of that mean.
        sharing: number of ranks that share the same samples, with different tokens of them, and have one loss.

    Raises:
        ModelError: the experts cannot be divided equally.
    """
    if experts.num_experts % mesh.size():
        raise ModelError(
            f"{experts.num_experts} experts cannot be divided equally among {mesh.size()} ranks",
            fix="choose model.expert_model_parallel_size so that it divides the number of experts",
        )
    experts.num_experts //= mesh.size()
    for name, whole in list(experts.named_parameters(recurse=False)):
        mine = whole.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
        divided = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)
        experts.register_parameter(name, torch.nn.Parameter(divided, requires_grad=whole.requires_grad))
    experts.group_of_experts = mesh.get_group()
    experts.share_of_gradients = sharing / mesh.size()
    of_all: Any = type(experts)
    experts.__class__ = _divided(of_all)


@functools.cache
def _divided(cls: Hashable) -> type[Any]:
    """Return a class of experts whose forward sends tokens to the ranks of their experts."""
    whole: Any = cls

    def forward(
        self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        if dist.get_world_size(self.group_of_experts) == 1:
            found: torch.Tensor = whole.forward(_WithOwnWeights(self), hidden_states, top_k_index, top_k_weights)
            return found

        def compute(tokens: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = whole.forward(
                _WithOwnWeights(self), tokens, experts[:, None], tokens.new_ones(len(tokens), 1)
            )
            return made

        return exchange_tokens(
            compute, self.group_of_experts, self.num_experts, hidden_states, top_k_index, top_k_weights
        )

    return type(f"Divided{whole.__name__}", (whole,), {"forward": forward})


class _WithOwnWeights:
    """Stands for a module of experts while it computes, with this rank's parameters as plain tensors.

    Their gradients are sums over the tokens that all ranks send; the loss of each rank is a mean over its own tokens.
    """

    def __init__(self, experts: Any) -> None:
        self._experts = experts
        share = experts.share_of_gradients
        self._weights: Mapping[str, torch.Tensor] = {
            name: _GradientTimes.apply(parameter.to_local(), share)  # type: ignore[no-untyped-call]
            for name, parameter in experts.named_parameters(recurse=False)
        }

    def __getattr__(self, name: str) -> Any:
        return self._weights[name] if name in self._weights else getattr(self._experts, name)


class _GradientTimes(torch.autograd.Function):
    """Returns its input, and multiplies the gradient by a factor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


def exchange_tokens(
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    group: dist.ProcessGroup,
    n_own: int,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Return the output of all experts for the tokens of this rank [tokens, width].

    Args:
        compute: returns the output of this rank's experts for tokens [n, width] with local expert numbers [n].
        n_own: number of experts on this rank.
    """
    k, ranks = top_k_index.size(-1), dist.get_world_size(group)
    chosen, order = top_k_index.reshape(-1).sort(stable=True)
    borders = torch.searchsorted(chosen, torch.arange(n_own * ranks + 1, device=chosen.device))
    sent = borders.diff()  # by expert
    received = torch.empty_like(sent)  # by rank they come from, and own expert
    dist.all_to_all_single(received, sent, group=group)
    # The host waits here, because it has to know the message sizes.
    n_sent, n_received = torch.stack([sent, received]).view(2, ranks, n_own).sum(-1).tolist()
    tokens = all_to_all_single_autograd(hidden_states[order // k], n_received, n_sent, group)
    experts = (
        torch.arange(n_own, device=chosen.device).repeat(ranks).repeat_interleave(received, output_size=sum(n_received))
    )
    if not len(experts):
        # Unused weights would have no gradient, and other ranks would wait for it.
        made = compute(tokens.new_zeros(1, tokens.size(1)), experts.new_zeros(1))[:0] + tokens
    else:
        made = compute(tokens, experts)
    back = all_to_all_single_autograd(made, n_sent, n_received, group)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    weighted = back[place].view(*top_k_weights.shape, -1) * top_k_weights[..., None]
    return weighted.sum(1).to(hidden_states.dtype)
