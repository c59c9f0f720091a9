"""Cut a causal language model into pipeline stages, and run them with `torch.distributed.pipelining`.

Stages send hidden states [sequences, tokens, width], and with a load-balancing loss the router logits of all layers so
far [layers, sequences * tokens, experts], from which the last stage computes that loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from hostward.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Part:
    """Holds one stage of a model of transformers, without the layers of other stages.

    Args:
        index, count: number of this stage, and of all stages.
        before: number of the model's layers before this stage.
        tied: the embedding is the output layer as well, and both the first stage and the last have that weight.
    """

    model: Any
    index: int
    count: int
    before: int
    tied: bool = False

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1


def cut(model: Any, index: int, count: int) -> Part:
    """Remove from a causal language model all modules that do not belong to stage `index` of `count`.

    Stages have equal numbers of contiguous layers; the first has the embedding, the last the final layer norm and the
    output layer. Remaining modules keep their names; for tied weights see `name_tied`.

    Raises:
        ConfigError: the layers cannot be divided equally.
    """
    described, inner = model.config, model.model
    layers = len(inner.layers)
    require_divisible(layers, count)
    each = layers // count
    part = Part(model, index, count, index * each, described.tie_word_embeddings and count > 1)
    for i in range(layers):
        if not part.before <= i < part.before + each:
            delattr(inner.layers, str(i))
    if getattr(described, "layer_types", None) is not None:  # a layer finds its type by its position in this stage
        described.layer_types = described.layer_types[part.before : part.before + each]
    if not part.first:
        inner.embed_tokens = torch.nn.Identity()
    if not part.last:
        inner.norm, model.lm_head = torch.nn.Identity(), torch.nn.Identity()
    if part.tied:
        described.tie_word_embeddings = False  # no part has both
    return part


class _SameWeights(torch.nn.Module):
    """Shares the parameters of another module, also after FSDP2 or moves replace them; it is never called."""

    def __init__(self, of: torch.nn.Module) -> None:
        super().__init__()
        self._parameters = of._parameters


def name_tied(part: Part) -> None:
    """Give a tied output layer of the last stage the embedding's name first, as in the unsharded model.

    State, checkpoints and random initialisation use names. Call this after FSDP2 has sharded the part, since FSDP2
    would shard the weight once for each of its two names.
    """
    if part.tied and part.last:
        part.model.model.embed_tokens = _SameWeights(part.model.lm_head)


TIED = "model.embed_tokens.weight"
"""Tied weight, by name."""


def require_divisible(layers: int, count: int) -> None:
    """Raise ConfigError if `layers` cannot be divided equally among `count` stages."""
    if layers % count:
        raise ConfigError(
            f"{layers} layers cannot be divided equally among {count} pipeline stages",
            fix="choose model.pipeline_model_parallel_size so that it divides them",
        )


def gather_in_passes(model: Any) -> None:
    """Let FSDP2 prefetch only layers of the same part in a backward pass.

    By default FSDP2 prefetches in the reverse order of all forwards, as if their backward passes followed one another:
    the backward of the first layer would gather the last layer, which would stay unsharded during the next forward.
    """
    from torch.distributed.fsdp import FSDPModule

    # The model itself ends last, so FSDP2's order is right; and it would prefetch again for each of its outputs.
    divided = [m for m in _as_they_end(model) if isinstance(m, FSDPModule) and m is not model]
    for before, module in zip([divided[0], *divided], divided, strict=False):  # the first prefetches itself: nothing
        module.set_modules_to_backward_prefetch([before])


def _as_they_end(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield modules in the order in which their forwards end."""
    for inner in module.children():
        yield from _as_they_end(inner)
    yield module


def together(parts: Sequence[Part]) -> torch.nn.Module:
    """Return one module that holds several parts, under the names of the whole model; it is never called."""
    whole, inner, layers = torch.nn.Module(), torch.nn.Module(), torch.nn.ModuleList()
    first, last = parts[0], parts[-1]
    for part in parts:
        if part.first or (part.last and part.tied):
            inner.embed_tokens = part.model.model.embed_tokens
    inner.layers = layers
    for part in parts:
        for name, layer in part.model.model.layers.named_children():
            layers.add_module(name, layer)
    if last.last:
        inner.norm = last.model.model.norm
    whole.model = inner
    if last.last:
        whole.lm_head = last.model.lm_head
    whole.config = first.model.config
    return whole.train()


class _Forward(torch.nn.Module):
    """Wraps a part as a stage's module without parameters, so that the schedule does not gather or reduce them."""

    def __init__(self, part: Part, balanced: bool) -> None:
        super().__init__()
        self._part = part
        self._balanced = balanced

    def forward(self, received: torch.Tensor, routers: torch.Tensor | None = None) -> Any:
        part = self._part
        made = part.model(**{"input_ids" if part.first else "inputs_embeds": received}, use_cache=False)
        if not self._balanced:
            return made.logits
        own = torch.stack(made.router_logits)
        return made.logits, own if routers is None else torch.cat([routers, own])


def loss_of(model: Any, output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of the last stage's output for a microbatch, as the whole model computes it.

    Args:
        labels: int64 [sequences, tokens], aligned.
    """
    logits, routers = output if isinstance(output, (tuple, list)) else (output, None)
    labels = labels.contiguous()
    loss: torch.Tensor = model.loss_function(logits, labels, model.config.vocab_size, shift_labels=labels)
    if routers is None:
        return loss
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    described = model.config
    balance = load_balancing_loss_func(routers.unbind(), described.num_experts, described.num_experts_per_tok)
    balanced: torch.Tensor = loss + described.router_aux_loss_coef * balance
    return balanced


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise the original error in place of the RuntimeError in which a stage wraps it."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is not None:
            raise error.__cause__ from None
        raise


class Told(Protocol):
    """Receives reports of the passes of this process's parts."""

    def around(self, part: Part, *, last_of_part: bool) -> AbstractContextManager[None]:
        """Return a context for a backward pass; `last_of_part`: it is the part's last one in this step."""

    def passed(self, part: Part, *, backward: bool) -> None:
        """Called after a forward or backward pass."""


class _Stage(PipelineStage):
    """Reports the passes of a stage."""

    def __init__(self, part: Part, told: Told, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._part = part
        self._told = told

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        with _own_errors():
            output = super().forward_one_chunk(*args, **options)
        self._told.passed(self._part, backward=False)
        return output

    def backward_one_chunk(self, *args: Any, **options: Any) -> None:
        with _own_errors(), self._told.around(self._part, last_of_part=bool(options.get("last_backward"))):
            super().backward_one_chunk(*args, **options)
        self._told.passed(self._part, backward=True)


def schedule_of(
    parts: Sequence[Part],
    group: dist.ProcessGroup,
    *,
    sequences: int,
    tokens: int,
    microbatches: int,
    device: torch.device,
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
    told: Told,
) -> Any:
    """Return the schedule that runs a step: 1F1B, interleaved if this process has several parts.

    Gradients are sums over microbatches.

    Args:
        group: the processes that hold the stages, in order.
        sequences, tokens: size of a microbatch.
    """
    described = parts[0].model.config
    dtype = next(p.dtype for p in parts[0].model.parameters())
    balanced = bool(getattr(described, "output_router_logits", False))

    def between(layers: int) -> tuple[torch.Tensor, ...]:
        """Return meta tensors of the shapes that a stage sends after so many layers."""
        shapes = [(sequences, tokens, described.hidden_size)]
        if balanced:
            shapes.append((layers, sequences * tokens, described.num_experts))
        return tuple(torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape in shapes)

    def stage(part: Part) -> _Stage:
        ids = torch.empty((sequences, tokens), dtype=torch.int64, device="meta")
        each = len(part.model.model.layers)
        made = between(part.before + each)
        if part.last:
            logits = torch.empty((sequences, tokens, described.vocab_size), dtype=dtype, device="meta")
            made = logits.requires_grad_(), *made[1:]
        return _Stage(
            part, told, _Forward(part, balanced), part.index, part.count, device,
            input_args=(ids,) if part.first else between(part.before), output_args=made, group=group,
        )  # fmt: skip

    stages = [stage(part) for part in parts]
    if len(stages) == 1:
        return Schedule1F1B(stages[0], microbatches, loss_fn=loss, scale_grads=False)
    return ScheduleInterleaved1F1B(list(stages), microbatches, loss_fn=loss, scale_grads=False)
