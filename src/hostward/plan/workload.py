"""What a training step does and holds, apart from where things are placed: facts as frozen data; no torch.

All sizes are of one rank. A *sequence* has `sequence_tokens` tokens; a *microbatch* has `microbatch_sequences` of them;
a step has `microbatches` microbatches.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from hostward.core.inventory import Dtype, Inventory


@dataclass(frozen=True, slots=True)
class PerToken:
    """A quantity of one microbatch: `linear` for each token, and `square` for each token and token of its sequence.

    Bytes, or operations. Exact as rational numbers are not needed: layers save whole numbers of bytes for a token.
    """

    linear: float
    square: float = 0.0

    def of(self, tokens: int, sequence_tokens: int) -> float:
        """The quantity for `tokens` tokens in sequences of `sequence_tokens`."""
        return tokens * (self.linear + self.square * sequence_tokens)

    def __add__(self, other: PerToken) -> PerToken:
        return PerToken(self.linear + other.linear, self.square + other.square)


@dataclass(frozen=True, slots=True)
class Saved:
    """What one part of a layer saves for backward, each storage once, and what making it again costs.

    `name` is Megatron's where it has one (`core_attn`, `qkv_linear`, `attn_norm`, `mlp_norm`, `mlp_act`, `expert_fc1`),
    else the module's path within the layer. A tensor that several parts save belongs to the first in forward.
    """

    name: str
    bytes: PerToken
    elementwise: bool
    """Whether hostward.attach(recompute=("layernorm", "mlp_act")) or its like makes it again within the layer."""
    recompute_flops: PerToken
    """Matrix operations (a multiplication and an addition are two) to make it again."""
    recompute_traffic_bytes: PerToken
    """Device memory read and written to make it again."""


class Way(StrEnum):
    """How a layer runs."""

    KEEP = "keep"
    """What it saves stays, or goes to the host."""
    RECOMPUTE = "recompute"
    """It saves its input, and runs again in backward."""
    ELEMENTWISE = "elementwise"
    """Norms and activations run again in backward."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes that a layer holds at one moment, weights and their gradients left out; `gradients` says how many of the
    layer's gradients there are. fixed_bytes: whatever the number of tokens.
    """

    bytes: PerToken
    fixed_bytes: float = 0.0
    gradients: int = 0

    def of(self, tokens: int, sequence_tokens: int) -> float:
        """All bytes, for `tokens` tokens in sequences of `sequence_tokens`."""
        return self.fixed_bytes + self.bytes.of(tokens, sequence_tokens)


@dataclass(frozen=True, slots=True)
class Curve:
    """What a layer holds while it runs, moment by moment, what earlier layers keep left out.

    forward: its input and output included. kept: what stays of it until its backward begins. backward: what it has kept
    included. Moments that another one of the same pass surpasses in all regards are left out; the rest is in order.
    """

    forward: tuple[Moment, ...]
    kept: Moment
    backward: tuple[Moment, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the model, or one part outside of the layers (embeddings, final norm, head and loss).

    `name` is that of `inventory.Parameter.layer`.
    """

    name: str
    repeated: bool
    """Whether it is one of the model's list of layers: only these can be offloaded or checkpointed."""
    trained_weight_bytes: int
    frozen_weight_bytes: int
    input_bytes: PerToken
    """What a checkpoint of the whole layer keeps."""
    saved: tuple[Saved, ...]
    forward_flops: PerToken
    """Matrix operations of one forward. Backward has twice as many for what is trained."""
    forward_traffic_bytes: PerToken
    """Device memory that operations other than matrix products read and write in one forward."""
    workspace_bytes: PerToken
    """Most bytes that its backward holds at once beside weights, gradients of weights and saved tensors."""
    curves: Mapping[Way, Curve] = field(default_factory=dict)
    """Of the ways in which it can run. Without any, `saved` and `workspace_bytes` are all that is known."""
    gradients: tuple[str, ...] = ()
    """Names of trained parameters in the order in which its backward makes their gradients."""

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
    """A model and how it is trained: what one step computes and what it holds."""

    name: str
    """Of the recipe, or the configuration's model type."""
    inventory: Inventory
    """Trained parameters and their buckets, in order of use in forward."""
    layers: tuple[Layer, ...]
    """In order of use in forward, parts outside of the list of layers included."""
    weight_dtype: Dtype
    sequence_tokens: int
    microbatch_sequences: int
    microbatches: int
    ranks: int = 1
    """Among which parameters, gradients and state are sharded (1: this workload is one whole replica)."""
    reduced_in_fp32: bool = False
    """The ranks reduce gradients of 16-bit weights in float32, and keep them so until the step."""
    resharded: bool = False
    """Layers that the ranks share are gathered for forward and again for backward, and whole only while they run; else
    they stay whole from the first microbatch's forward to the last one's backward.
    """
    snapshot: bool = False
    """Checkpoints are written from a second copy of the state on the host, which is kept from the first save on."""
    pin_gradients: bool = True
    """Host memory where gradients of host-stepped buckets arrive is page-locked."""
    pin_weights: bool = True
    """Host memory where weights of host-stepped buckets come back from is page-locked."""

    @property
    def microbatch_tokens(self) -> int:
        return self.sequence_tokens * self.microbatch_sequences

    @property
    def step_tokens(self) -> int:
        """Of this rank."""
        return self.microbatch_tokens * self.microbatches

    @property
    def gradients_in_fp32(self) -> bool:
        """Whether gradients wait for the step in float32, whatever the weights are."""
        return self.microbatches > 1 or self.reduced_in_fp32

    @property
    def fetched_anew(self) -> bool:
        """Whether weights that lie on the host are wanted in each forward and each backward; else once a step."""
        return self.ranks == 1 or self.resharded

    @property
    def repeated(self) -> Sequence[Layer]:
        return [layer for layer in self.layers if layer.repeated]

    @property
    def weight_bytes(self) -> int:
        return sum(layer.weight_bytes for layer in self.layers)


# A workload as text, for whoever keeps what tracing found. No torch.


def to_text(workload: Workload) -> str:
    """JSON without the names of fields, which `from_text` of the same source reads back as an equal workload."""
    return json.dumps(dataclasses.astuple(workload), allow_nan=False, separators=(",", ":"))


def from_text(text: str) -> Workload:
    """Raises ValueError where `text` is not of `to_text`."""
    try:
        found = _reader(Workload)(json.loads(text))
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(found, Workload):
        raise ValueError("it is no workload")
    # Layers of a kind share their curves, as after tracing: what the memory model finds of one holds for all.
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
    """From what JSON makes of a value of this type back to the value."""
    arguments, origin = get_args(hint), get_origin(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        readers = [_reader(field) for field in get_type_hints(hint).values()]
        return lambda values: hint(*(read(value) for read, value in zip(readers, values, strict=True)))
    if origin is tuple:
        inner = _reader(arguments[0])
        return lambda values: tuple(inner(value) for value in values)
    if origin is not None and issubclass(origin, Mapping):
        key, inner = _reader(arguments[0]), _reader(arguments[1])
        return lambda values: {key(name): inner(value) for name, value in values.items()}
    if issubclass(hint, StrEnum):
        return lambda value: hint(value)
    return lambda value: value
