"""Offload what the layers of Megatron-Core's model chunks save for backward, with the layer count of Megatron's flags.

`hostward.integrations.megatron.attach` is the way in.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hostward.attachment import Activations, Attachment, attach as attach_layers
from hostward.config.arguments import require_fewer
from hostward.errors import ConfigError, needed_for
from hostward.model.layer_hooks import PostForwardHook, PreForwardHook
from hostward.runtime.backend_choice import backend_for

with needed_for("hostward.integrations.megatron", "megatron"):
    from megatron.core import tensor_parallel

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
    layers than the count offloads all but its last: of one layer, or of none, it offloads nothing. With
    `recompute_granularity="full"` what is offloaded are the inputs of the layers that are recomputed; several layers
    that are recomputed together are offloaded if the first of them is counted.

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
    runs = [_Runs.of(block) for chunk in chunks for block in blocks_of(chunk)]
    counts = [count for each in runs for count in each.counts]
    layers = [layer for each in runs for layer in each.layers]
    root = chunks[0] if len(chunks) == 1 else torch.nn.ModuleList(chunks)
    stepped = getattr(getattr(optimizer, "offloading", None), "optimizer", None)
    most = len(layers) - 1
    if config.pipeline_model_parallel_size == 1:
        require_fewer(how.num_layers, sum(counts))
        if most < 1 < sum(counts):
            raise ConfigError(
                f"activations of {sum(counts)} layers that are all recomputed together",
                why="their backward begins as soon as their forward ends",
                fix=f"recompute_num_layers below {sum(counts)}",
            )
    elif most < 1:
        log.info("activations of %d layers that run at once: nothing is offloaded on this rank", sum(counts))
        device = next((p.device for p in root.parameters()), torch.device("cpu"))
        backend = backend_for(device, None) if stepped is None else stepped.backend
        return Attachment(root, backend, [("", layer) for layer in layers], None, turns=False)
    if how.num_layers is not None:
        begun = sum(first < how.num_layers for first in itertools.accumulate(counts[:-1], initial=0))
        how = dataclasses.replace(how, num_layers=max(1, min(most, begun)))
    attached = attach_layers(root, stepped, activations=how, layers=layers)
    before = 0
    for each in runs:
        if each.recomputed:
            attached.undo_with(_Checkpoints(attached, each.block, before, each.recomputed).undo)
        before += len(each.layers)
    return attached


@dataclass(frozen=True, slots=True)
class _Runs:
    """Says how a block runs its layers: one by one, or several within one checkpoint, which saves their input alone."""

    block: Any
    layers: list[torch.nn.Module]
    """The first layer of each run."""
    counts: list[int]
    """How many layers each run has."""
    recomputed: int
    """So many runs, from the first on, are recomputed as a whole."""

    @classmethod
    def of(cls, block: Any) -> _Runs:
        """Read it from the flags. Raises ConfigError for checkpoints whose inputs are out of reach."""
        config, layers = block.config, list(block.layers)
        whole = config.recompute_granularity == "full"
        if whole and (config.fp8 or getattr(config, "fp4", None)):
            raise ConfigError(
                "activations of layers that are recomputed as a whole, with fp8 or fp4",
                why="Transformer Engine's checkpoints keep their inputs out of reach",
                fix='recompute_granularity="selective", or leave attach() out',
            )
        size = config.recompute_num_layers if whole and config.recompute_method == "uniform" else 1
        firsts = range(0, len(layers), size)
        counts = [min(size, len(layers) - first) for first in firsts]
        recomputed = 0
        if whole:
            recomputed = len(firsts) if config.recompute_method == "uniform" else config.recompute_num_layers
        return cls(block, [layers[first] for first in firsts], counts, min(recomputed, len(firsts)))


class _Checkpoints:
    """Makes the checkpoints of a block calls of its layers, so that their inputs are offloaded.

    Megatron calls `tensor_parallel.checkpoint`, which saves inputs after the layers have run, and outside of them.
    """

    def __init__(self, attached: Attachment, block: torch.nn.Module, first: int, count: int) -> None:
        """`first`: the number of the block's first run among all that are attached; `count`: of its checkpoints."""
        self._attached, self._first, self._count = attached, first, count
        self._next, self._inside = 0, False
        self._plain = tensor_parallel.checkpoint
        self._handles = [
            block.register_forward_pre_hook(PreForwardHook(self), with_kwargs=True),
            block.register_forward_hook(PostForwardHook(self), always_call=True),
        ]

    def pre_forward(self, _: Any, __: object) -> None:
        """Follow the checkpoints of the block, which is about to run."""
        self._next = 0
        if tensor_parallel.checkpoint is not self:
            self._plain = tensor_parallel.checkpoint
        tensor_parallel.checkpoint = self

    def post_forward(self, _: Any, __: object) -> None:
        """Leave Megatron its function; the block has run."""
        tensor_parallel.checkpoint = self._plain

    def mark(self, module: torch.nn.Module, about: Any) -> None:
        """Do nothing."""

    def __call__(self, function: Callable[..., Any], distributed: bool, *inputs: Any) -> Any:
        """Checkpoint the block's next layers, or, inside of one, a part of it."""
        if self._inside or self._next >= self._count:
            return self._plain(function, distributed, *inputs)
        number, self._next, self._inside = self._first + self._next, self._next + 1, True
        try:
            return self._attached.call(number, partial(self._plain, function, distributed), *inputs)
        finally:
            self._inside = False

    def undo(self) -> None:
        """Leave the block as it was."""
        for handle in self._handles:
            handle.remove()


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
