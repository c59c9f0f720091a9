"""Stages of a pipeline: the layers that a process keeps of a causal language model, and how
`torch.distributed.pipelining` calls them.

What goes from stage to stage: hidden states [sequences, tokens, width], and with a load-balancing loss what the routers
of all layers so far have said [layers, sequences * tokens, experts], of which the last stage takes that loss.
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
    """A stage of a model, as transformers builds it, without the layers of other stages.

    Args:
        index, count: which of how many stages.
        before: layers of the model before this stage.
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
    """Take out of a causal language model what is not of stage `index` of `count`: contiguous layers in equal runs, the
    embedding with the first, the last norm and the output layer with the last. What stays keeps its name; of an output
    layer that is the embedding as well see `name_tied`.

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
    if getattr(described, "layer_types", None) is not None:  # a layer finds its own by counting those that are there
        described.layer_types = described.layer_types[part.before : part.before + each]
    if not part.first:
        inner.embed_tokens = torch.nn.Identity()
    if not part.last:
        inner.norm, model.lm_head = torch.nn.Identity(), torch.nn.Identity()
    if part.tied:
        described.tie_word_embeddings = False  # no part has both
    return part


class _SameWeights(torch.nn.Module):
    """Holds what another module holds, whatever becomes of it: FSDP2 and moves to a device replace parameters. It is
    not called.
    """

    def __init__(self, of: torch.nn.Module) -> None:
        super().__init__()
        self._parameters = of._parameters


def name_tied(part: Part) -> None:
    """Let the last stage's output layer, if it is the embedding as well, have the embedding's name before its own, as
    in the whole model: state, checkpoints and draws go by names. After FSDP2 has divided the part: it would divide the
    weight for each of its two places.
    """
    if part.tied and part.last:
        part.model.model.embed_tokens = _SameWeights(part.model.lm_head)


TIED = "model.embed_tokens.weight"
"""The name of that weight."""


def require_divisible(layers: int, count: int) -> None:
    """Raises as `cut` does for a model of so many layers."""
    if layers % count:
        raise ConfigError(
            f"{layers} layers cannot be divided equally among {count} pipeline stages",
            fix="choose model.pipeline_model_parallel_size so that it divides them",
        )


def gather_in_passes(model: Any) -> None:
    """Let a backward pass of a part, which FSDP2 gathers again for it, gather ahead its own layers alone.

    FSDP2 gathers ahead by the order in which all forwards have ended, as if their backward passes followed on one
    another: the first layer's would gather the last layer, which then was whole while another microbatch goes forward.
    """
    from torch.distributed.fsdp import FSDPModule

    # The model itself ends last, so what FSDP2 does is right; and it would gather ahead anew for each of its outputs.
    divided = [m for m in _as_they_end(model) if isinstance(m, FSDPModule) and m is not model]
    for before, module in zip([divided[0], *divided], divided, strict=False):  # ahead of the first: itself, so nothing
        module.set_modules_to_backward_prefetch([before])


def _as_they_end(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Modules in the order in which their forwards end."""
    for inner in module.children():
        yield from _as_they_end(inner)
    yield module


def together(parts: Sequence[Part]) -> torch.nn.Module:
    """One module that holds what several parts have, by the names of the whole model. It is not called: they are."""
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
    """A part as a stage's module. It has no parameters of its own: how they are gathered and reduced, and when, is not
    the schedule's to say.
    """

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
    """The loss of what the last stage has made of a microbatch, as the whole model takes it.

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
    """A stage wraps whatever is raised inside: bring it out again."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is not None:
            raise error.__cause__ from None
        raise


class Told(Protocol):
    """Is told of the passes of this process's parts."""

    def around(self, part: Part, *, last_of_part: bool) -> AbstractContextManager[None]:
        """Entered for each backward pass; the part has no other in this step if it is its last one."""

    def passed(self, part: Part, *, backward: bool) -> None:
        """A forward or backward pass has ended."""


class _Stage(PipelineStage):
    """A stage that tells of its passes."""

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
    """The schedule that runs a step: 1F1B, interleaved where this process has several parts. Gradients are sums over
    microbatches.

    Args:
        group: the processes that hold the stages, in order.
        sequences, tokens: of a microbatch.
    """
    described = parts[0].model.config
    dtype = next(p.dtype for p in parts[0].model.parameters())
    balanced = bool(getattr(described, "output_router_logits", False))

    def between(layers: int) -> tuple[torch.Tensor, ...]:
        """What a stage sends when so many layers are done."""
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
