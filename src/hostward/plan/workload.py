"""Describe what a training step computes and holds, apart from placement, as frozen data. No torch.

All sizes are of one rank. A *sequence* has `sequence_tokens` tokens; a *microbatch* has `microbatch_sequences` of them;
a step has `microbatches` microbatches.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from hostward.core.inventory import Dtype, Inventory, StateFormat, cut_buckets


@dataclass(frozen=True, slots=True)
class PerToken:
    """Hold a quantity of one microbatch: `linear` per token, `square` per token and token of its sequence.

    The quantity is a number of bytes or of operations. Floats suffice: layers save whole numbers of bytes for a token.
    """

    linear: float
    square: float = 0.0

    def of(self, tokens: int, sequence_tokens: int) -> float:
        """Return the quantity for `tokens` tokens in sequences of `sequence_tokens`."""
        return tokens * (self.linear + self.square * sequence_tokens)

    def __add__(self, other: PerToken) -> PerToken:
        return PerToken(self.linear + other.linear, self.square + other.square)


@dataclass(frozen=True, slots=True)
class Saved:
    """Hold the bytes that one part of a layer saves for backward, each storage once, and the cost to recompute them.

    `name` is Megatron's where it has one (`core_attn`, `qkv_linear`, `attn_norm`, `mlp_norm`, `mlp_act`, `expert_fc1`),
    else the module's path within the layer. A tensor that several parts save belongs to the first in forward.
    """

    name: str
    bytes: PerToken
    elementwise: bool
    """True if `hostward.attach(recompute=("layernorm", "mlp_act"))` or its like recomputes it within the layer."""
    recompute_flops: PerToken
    """Matrix operations (a multiplication and an addition are two) to recompute it."""
    recompute_traffic_bytes: PerToken
    """Device memory read and written to recompute it."""


class Way(StrEnum):
    """Name the ways in which a layer can run."""

    KEEP = "keep"
    """Saved tensors stay or are offloaded."""
    RECOMPUTE = "recompute"
    """The layer saves its input and is recomputed in backward."""
    ELEMENTWISE = "elementwise"
    """Layer norms and activations are recomputed in backward."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Hold the bytes of a layer at one moment, without weights and their gradients.

    `gradients` counts the layer's gradients that exist; `fixed_bytes` do not depend on the number of tokens.
    """

    bytes: PerToken
    fixed_bytes: float = 0.0
    gradients: int = 0

    def of(self, tokens: int, sequence_tokens: int) -> float:
        """Return all bytes for `tokens` tokens in sequences of `sequence_tokens`."""
        return self.fixed_bytes + self.bytes.of(tokens, sequence_tokens)


@dataclass(frozen=True, slots=True)
class Curve:
    """Hold a layer's memory moment by moment while it runs, without what earlier layers keep.

    `forward` includes the layer's input and output, `kept` stays until its backward begins, and `backward` includes
    what it has kept. Moments that another one of the same pass exceeds in all regards are left out; the others are in
    order.
    """

    forward: tuple[Moment, ...]
    kept: Moment
    backward: tuple[Moment, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """Describe one layer of the model, or one part outside of the layers (embeddings, final norm, head and loss).

    `name` is that of `inventory.Parameter.layer`.
    """

    name: str
    repeated: bool
    """True if it is in the model's list of layers: only these can be offloaded or checkpointed."""
    trained_weight_bytes: int
    frozen_weight_bytes: int
    input_bytes: PerToken
    """Bytes that a checkpoint of the whole layer keeps."""
    saved: tuple[Saved, ...]
    forward_flops: PerToken
    """Matrix operations of one forward. Backward has twice as many for what is trained."""
    forward_traffic_bytes: PerToken
    """Device memory that operations other than matrix products read and write in one forward."""
    workspace_bytes: PerToken
    """Largest number of bytes of its backward besides weights, gradients of weights and saved tensors."""
    curves: Mapping[Way, Curve] = field(default_factory=dict)
    """Curves by the ways in which it can run. Without any, `saved` and `workspace_bytes` are all that is known."""
    gradients: tuple[str, ...] = ()
    """Names of trained parameters in the order in which its backward makes their gradients."""
    saves_input: bool = False
    """True if autograd saves the input itself: then it exists until the layer's backward is over, however it came."""

    @property
    def weight_bytes(self) -> int:
        return self.trained_weight_bytes + self.frozen_weight_bytes

    @property
    def saved_bytes(self) -> PerToken:
        total = PerToken(0.0)
        for part in self.saved:
            total += part.bytes
        return total


@dataclass(frozen=True, slots=True)
class Workload:
    """Describe a model and how it is trained: what one step computes and holds."""

    name: str
    """Recipe's name, or the configuration's model type."""
    inventory: Inventory
    """Trained parameters and their buckets, in order of use in forward."""
    layers: tuple[Layer, ...]
    """Layers in order of use in forward, with parts outside of the list of layers."""
    weight_dtype: Dtype
    sequence_tokens: int
    microbatch_sequences: int
    microbatches: int
    ranks: int = 1
    """Ranks among which parameters, gradients and state are sharded (1: this workload is one whole replica).
    """
    reduced_in_fp32: bool = False
    """True if the ranks reduce gradients of 16-bit weights in fp32, and keep them so until the step."""
    resharded: bool = False
    """Layers that the ranks share are gathered for forward and again for backward (`reshard_after_forward=True`); else
    they stay unsharded from the first microbatch's forward to the last one's backward.
    """
    snapshot: bool = False
    """Checkpoints are written from a second copy of the state on the host, which is kept from the first save on."""
    pin_gradients: bool = True
    """Host memory to which gradients of CPU-stepped buckets are offloaded is pinned."""
    pin_weights: bool = True
    """Host memory from which weights of CPU-stepped buckets are copied back is pinned."""
    step_early: float = 0.0
    """Share of the CPU-stepped state that is stepped during backward, into a second set of it on the host
    (`hostward.AdamW(step_early=...)`).
    """

    @property
    def microbatch_tokens(self) -> int:
        return self.sequence_tokens * self.microbatch_sequences

    @property
    def step_tokens(self) -> int:
        """Return the tokens of one step on this rank."""
        return self.microbatch_tokens * self.microbatches

    @property
    def gathering(self) -> int:
        """Return the ranks that gather weights from each other and reduce whole gradients; 0 for one, which has all."""
        return self.ranks if self.ranks > 1 else 0

    @property
    def gradients_in_fp32(self) -> bool:
        """Return whether gradients wait for the step in fp32, whatever dtype the weights have."""
        return self.microbatches > 1 or self.reduced_in_fp32

    @property
    def fetched_anew(self) -> bool:
        """Return whether offloaded weights are reloaded in each forward and each backward, not once a step."""
        return self.ranks == 1 or self.resharded

    @property
    def repeated(self) -> Sequence[Layer]:
        return [layer for layer in self.layers if layer.repeated]

    @property
    def weight_bytes(self) -> int:
        return sum(layer.weight_bytes for layer in self.layers)

    @property
    def held_bytes(self) -> int:
        """Return the bytes of weights and state."""
        return self.weight_bytes + self.inventory.state_bytes

    @property
    def least_bytes(self) -> int:
        """Return a lower bound on what device and host hold together in a step, whatever is chosen.

        With several microbatches the sums of the gradients are somewhere, too, when the last one's forward begins.
        """
        numel = self.inventory.numel if self.microbatches > 1 else 0
        return self.held_bytes + Dtype.FP32.itemsize_bytes * numel


def in_format(workload: Workload, form: StateFormat) -> Workload:
    """Return the workload with the optimizer's state stored in this format.

    Raises:
        ConfigError: fp16 weights whose main weights are asked for in bf16.
    """
    parameters = workload.inventory.parameters
    return replace(workload, inventory=Inventory(parameters, cut_buckets(parameters, form=form)))


# A workload as text, for a cache of traces.


def to_text(workload: Workload) -> str:
    """Write a workload as JSON without names of fields; `from_text` of the same source reads an equal workload."""
    return json.dumps(workload, default=_values, allow_nan=False, separators=(",", ":"))


def _values(value: Any) -> list[Any]:
    return [getattr(value, field.name) for field in dataclasses.fields(value)]


def from_text(text: str) -> Workload:
    """Read the text of `to_text`. Raises ValueError for any other text."""
    try:
        found = _reader(Workload)(json.loads(text))
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(found, Workload):
        raise ValueError("it is no workload")
    # Layers of a kind share their curves, as after tracing, so the memory model evaluates each curve once.
    shared: dict[Curve, Curve] = {}
    return dataclasses.replace(
        found,
        layers=tuple(
            dataclasses.replace(la, curves={way: shared.setdefault(c, c) for way, c in la.curves.items()})
            for la in found.layers
        ),
    )


@cache
def _reader(hint: Any) -> Callable[[Any], Any]:
    """Return a function that converts parsed JSON back to a value of this type."""
    arguments, origin = get_args(hint), get_origin(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        readers = [_reader(field) for field in get_type_hints(hint).values()]
        return lambda values: hint(*(read(value) for read, value in zip(readers, values, strict=True)))
    if origin is tuple:
        inner = _reader(arguments[0])
        return tuple if inner is _as_it_is else lambda values: tuple(map(inner, values))
    if origin is not None and issubclass(origin, Mapping):
        key, inner = _reader(arguments[0]), _reader(arguments[1])
        as_they_are = key is inner is _as_it_is
        return dict if as_they_are else lambda values: {key(name): inner(value) for name, value in values.items()}
    return hint if issubclass(hint, StrEnum) else _as_it_is


def _as_it_is(value: Any) -> Any:
    return value
