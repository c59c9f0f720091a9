"""Describe the parameters of an optimizer, cut into buckets, as frozen data. No torch.

Glossary:
    parameter   one tensor that the optimizer updates, flattened in row-major order
    range       elements [start, stop) of one parameter
    bucket      consecutive ranges of one layer, dtype and parameter group, in order of use in forward; the unit of
                placement, copies and optimizer steps. Buckets never change a result
                    (docs/exactness.md), only when and
                where it is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Any

from hostward.errors import ConfigError

SPLIT_ELEMENTS = 4096
"""Tensors are split only at multiples of this, so that the chunks of the gradient norm never straddle two ranges."""

SMALLEST_BUCKET_CAP = 64 * 1024
LARGEST_BUCKET_CAP = 64 * 1024 * 1024
RANGE_ALIGNMENT_ELEMENTS = 128
"""Ranges start at a multiple of this within their bucket: 256 bytes of 16-bit elements, for vector code."""
FP8_BLOCK = RANGE_ALIGNMENT_ELEMENTS
"""So many elements of an FP8 moment share a scale, counted from the parameter's first. Ranges are whole blocks."""


class Dtype(StrEnum):
    """Name the element types of weights, gradients and moments."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    """Moments of matrices only: 8 bits per element, and 8 bits per block of FP8_BLOCK elements."""

    @property
    def itemsize_bytes(self) -> int:
        """Return the bytes per element, without those of blocks."""
        return _ITEMSIZES[self]


_ITEMSIZES = {Dtype.FP32: 4, Dtype.BF16: 2, Dtype.FP16: 2, Dtype.FP8: 1}


class MasterKind(StrEnum):
    """Say how the main weight is stored."""

    WEIGHT = "weight"
    """The weight is itself the main weight: fp32, or bf16 that each step rounds at random."""
    SPLIT = "split"
    """bf16 weight (high half) and int16 low bits, which are together the fp32 main weight, losslessly."""
    PLAIN = "plain"
    """Separate fp32 main weight in addition to a 16-bit weight."""


MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the moments."""
MAIN_PARAM = "main_param"
"""`state_dtypes` names the main weight so."""


@dataclass(frozen=True, slots=True)
class StateFormat:
    """Say how the optimizer stores state: the one value that bytes, buffers, copies and kernels follow from.

    The dtypes of the moments are fp32, bf16 or fp8, each by itself. `main_param` is that of the main weights of bf16
    weights: fp32, or bf16, where the weight is all there is. `split_master`: of an fp32 main weight of a bf16 weight
    only the low 16 bits are stored, besides the weight. What is asked for is one format; `of` says that of a parameter.
    """

    exp_avg: Dtype = Dtype.FP32
    exp_avg_sq: Dtype = Dtype.FP32
    main_param: Dtype = Dtype.FP32
    split_master: bool = True

    def __post_init__(self) -> None:
        for name, dtype in self.dtypes.items():
            if dtype is Dtype.FP16 or (dtype is Dtype.FP8 and name == MAIN_PARAM):
                raise ConfigError(
                    f"{name} in {dtype}",
                    why="fp16 has too few exponents for squares of gradients, and fp8 too few bits for weights",
                    fix=f"{name} in fp32 or bf16",
                )

    def __str__(self) -> str:
        return ", ".join(f"{name} in {dtype}" for name, dtype in self.dtypes.items())

    @property
    def dtypes(self) -> dict[str, Dtype]:
        """Return the dtype of each part of the state, by its name in `state_dtypes` of AdamW."""
        return {**self.moments, MAIN_PARAM: self.main_param}

    def at_most(self, other: StateFormat) -> StateFormat:
        """Return the format in which each part has the smaller dtype of the two."""

        def smaller(ours: Dtype, others: Dtype) -> Dtype:
            return min(ours, others, key=lambda dtype: dtype.itemsize_bytes)

        return StateFormat(
            smaller(self.exp_avg, other.exp_avg),
            smaller(self.exp_avg_sq, other.exp_avg_sq),
            smaller(self.main_param, other.main_param),
            self.split_master,
        )

    @property
    def is_fp32(self) -> bool:
        """Return whether all of the state is fp32."""
        return all(dtype is Dtype.FP32 for dtype in self.dtypes.values())

    def of(self, dims: int) -> StateFormat:
        """Return the format of a parameter that has so many dimensions as a whole: FP8 takes two, and is else bf16."""
        if dims > 1 or not self.fp8_moments:
            return self
        first, second = (Dtype.BF16 if dtype is Dtype.FP8 else dtype for dtype in self.moments.values())
        return replace(self, exp_avg=first, exp_avg_sq=second)

    def master_kind(self, dtype: Dtype) -> MasterKind:
        """Return how the main weight of a weight of this dtype is stored.

        Raises:
            ConfigError: an fp16 weight whose main weight is asked for in bf16.
        """
        if dtype is Dtype.FP16 and self.main_param is Dtype.BF16:
            raise ConfigError(
                "main weights in bf16 of fp16 weights",
                why="an fp16 weight and a bf16 one have different bits, so each step would round twice",
                fix="bf16 weights, or main weights in fp32",
            )
        if dtype is Dtype.FP32 or self.main_param is Dtype.BF16:
            return MasterKind.WEIGHT
        return MasterKind.SPLIT if dtype is Dtype.BF16 and self.split_master else MasterKind.PLAIN

    @property
    def moments(self) -> dict[str, Dtype]:
        """Return the dtype of each moment, by its name."""
        return dict(zip(MOMENTS, (self.exp_avg, self.exp_avg_sq), strict=True))

    @property
    def fp32_moments(self) -> bool:
        """Return whether both moments are fp32."""
        return self.exp_avg is self.exp_avg_sq is Dtype.FP32

    @property
    def fp8_moments(self) -> int:
        """Return how many of the two moments are FP8."""
        return (self.exp_avg is Dtype.FP8) + (self.exp_avg_sq is Dtype.FP8)

    def scale_bytes(self, elements: int) -> int:
        """Return the bytes of the blocks of so many elements of one parameter, in all moments together."""
        return self.fp8_moments * -(-elements // FP8_BLOCK)

    def saved_element_bytes(self, dtype: Dtype) -> int:
        """Return the bytes per element of a saved state of weights of this dtype. FP8 moments are saved in bf16.

        Raises:
            ConfigError: see `master_kind`.
        """
        moments = sum(max(moment.itemsize_bytes, 2) for moment in self.moments.values())
        return moments + (0 if self.master_kind(dtype) is MasterKind.WEIGHT else 4)

    def parts(self, kind: MasterKind) -> tuple[int, ...]:
        """Return the bytes per element of exp_avg, exp_avg_sq and, if any, what is stored of the main weight.

        Those of blocks come besides.
        """
        return tuple(
            size for size in (self.exp_avg.itemsize_bytes, self.exp_avg_sq.itemsize_bytes, _LOW_BYTES[kind]) if size
        )


_LOW_BYTES = {MasterKind.WEIGHT: 0, MasterKind.SPLIT: 2, MasterKind.PLAIN: 4}
FP32_STATE = StateFormat()


def stored_elements(dtype: Dtype, elements: int) -> int:
    """Return the length of the buffer of a moment of this many elements, which are whole blocks: FP8 ends in scales."""
    return elements + elements // FP8_BLOCK if dtype is Dtype.FP8 else elements


def state_bytes_per_element(kind: MasterKind, form: StateFormat = FP32_STATE) -> int:
    """Return the bytes of optimizer state per offloaded element: moments, and low 16 bits 2 or main weight 4 if any."""
    return sum(form.parts(kind))


def host_bytes_per_element(dtype: Dtype, kind: MasterKind, form: StateFormat = FP32_STATE) -> int:
    """Return the host bytes of one offloaded element, without gradients: its state and its weight as upload source."""
    return state_bytes_per_element(kind, form) + dtype.itemsize_bytes


@dataclass(frozen=True, slots=True)
class Parameter:
    """Describe one trainable tensor, or the part of it that this process has.

    The part has `numel` elements from `first` on. `layer` names the part of the model that uses the tensor, `group` its
    optimizer parameter group. `rows` is the first dimension of the unsharded tensor, by which ranks divide it; 0: not
    known. `dims` is the number of its dimensions.
    """

    name: str
    numel: int
    dtype: Dtype
    layer: str
    group: int = 0
    first: int = 0
    rows: int = 0
    dims: int = 2


@dataclass(frozen=True, slots=True)
class Range:
    """Identify elements [start, stop) of the flattened parameter `name`, counted from the first one that this process
    has.
    """

    name: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Bucket:
    """Hold consecutive ranges that are placed, copied and stepped together.

    The class has no slots, so that it can cache sums over its ranges: planning reads them a million times.
    """

    index: int
    layer: str
    dtype: Dtype
    group: int
    kind: MasterKind
    ranges: tuple[Range, ...]
    form: StateFormat = FP32_STATE

    @cached_property
    def name(self) -> str:
        return f"{self.index:04d}.{self.layer}"

    @cached_property
    def numel(self) -> int:
        return sum(r.numel for r in self.ranges)

    @cached_property
    def parts(self) -> dict[str, int]:
        """Return the bucket's elements of each parameter, by name."""
        found: dict[str, int] = {}
        for r in self.ranges:
            found[r.name] = found.get(r.name, 0) + r.numel
        return found

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Return the first element of each range within the bucket's slabs; the last entry is the padded length."""
        offsets = [0]
        for r in self.ranges:
            offsets.append(align(offsets[-1] + r.numel, RANGE_ALIGNMENT_ELEMENTS))
        return tuple(offsets)

    @cached_property
    def state_element_bytes(self) -> int:
        """Return the bytes of optimizer state of one element."""
        return state_bytes_per_element(self.kind, self.form)

    @cached_property
    def host_element_bytes(self) -> int:
        """Return the host bytes of one offloaded element, without gradients: its state and its weight."""
        return host_bytes_per_element(self.dtype, self.kind, self.form)

    @cached_property
    def scale_bytes(self) -> int:
        """Return the bytes of the blocks of FP8 moments."""
        return sum(self.form.scale_bytes(r.numel) for r in self.ranges)

    @cached_property
    def state_bytes(self) -> int:
        return self.numel * self.state_element_bytes + self.scale_bytes

    @cached_property
    def host_bytes(self) -> int:
        return self.numel * self.host_element_bytes + self.scale_bytes

    @cached_property
    def padded_parts(self) -> tuple[int, ...]:
        """Return the bytes of each buffer of the state: exp_avg, exp_avg_sq and, if any, the master's part."""
        padded = self.offsets[-1]
        sizes = list(self.form.parts(self.kind))
        moments = zip(self.form.moments.values(), sizes, strict=False)
        return (*(stored_elements(dtype, padded) * size for dtype, size in moments), *(padded * n for n in sizes[2:]))

    @cached_property
    def padded_state_bytes(self) -> int:
        return sum(self.padded_parts)

    @cached_property
    def rows(self) -> dict[str, Any]:
        """Rows of plans for this bucket by placement, which `hostward.core.placement` makes once."""
        return {}


@dataclass(frozen=True)
class Inventory:
    """Hold the trainable parameters and their buckets, in order of use in forward."""

    parameters: tuple[Parameter, ...]
    buckets: tuple[Bucket, ...]

    @cached_property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)

    @cached_property
    def state_bytes(self) -> int:
        return sum(b.state_bytes for b in self.buckets)

    @cached_property
    def as_asked(self) -> Bucket | None:
        """Return `bucket_as_asked` of its buckets, if there are any."""
        return bucket_as_asked(self.buckets) if self.buckets else None

    @property
    def form(self) -> StateFormat:
        """Return the format that is asked for; that of vectors where there is no matrix."""
        return FP32_STATE if self.as_asked is None else self.as_asked.form

    @property
    def saved_bytes(self) -> list[int]:
        """Return the bytes of each parameter's state in a checkpoint."""
        sizes = {dtype: self.form.saved_element_bytes(dtype) for dtype in {p.dtype for p in self.parameters}}
        return [p.numel * sizes[p.dtype] for p in self.parameters]


def align(value: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `value`."""
    return -(-value // unit) * unit


def layer_of(name: str) -> str:
    """Return the layer of a parameter by its dotted name: up to the first number, else the module that owns it.

    >>> layer_of("model.layers.3.mlp.down_proj.weight"), layer_of("model.embed_tokens.weight"), layer_of("bias")
    ('model.layers.3', 'model.embed_tokens', '')
    """
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1])


def bucket_as_asked(buckets: Sequence[Bucket]) -> Bucket:
    """Return the first bucket whose state has the format that is asked for; the first one if there are no matrices."""
    form = None
    for bucket in buckets:
        if bucket.form is not form:  # thousands of buckets share a few formats
            form = bucket.form
            if form.fp8_moments:
                return bucket
    return buckets[0]


def bucket_cap(numel: int) -> int:
    """Return the elements of the largest bucket for a model of `numel`: a 64th of it, from 64 Ki to 64 Mi."""
    return max(SMALLEST_BUCKET_CAP, min(LARGEST_BUCKET_CAP, numel // 64)) // SPLIT_ELEMENTS * SPLIT_ELEMENTS


def cut_buckets(
    parameters: Iterable[Parameter], *, cap: int | None = None, first_index: int = 0, form: StateFormat = FP32_STATE
) -> tuple[Bucket, ...]:
    """Cut parameters, given in order of use in forward, into buckets of at most `cap` elements.

    Parameters of a layer that follow one another are taken group by group, and matrices before vectors where their
    formats differ, so that a layer has few buckets: each has one format, and FP8 moments are of matrices alone. Tensors
    above `cap` are split at multiples of 4,096, into equal pieces of about the size of the largest unsplit one:
    a GPU staging buffer is as large as the largest bucket that uses it. Smaller tensors are not split. A part that
    begins within a chunk of the gradient norm is cut where the next chunk begins. Zero-size parameters belong to no
    bucket. Raises ConfigError for a `cap` that is not a positive multiple of 4,096.
    """
    layers = groupby(parameters, key=attrgetter("layer"))
    parameters = tuple(
        p for _, of_layer in layers for p in sorted(of_layer, key=lambda p: (p.group, -form.of(p.dims).fp8_moments))
    )
    cap = bucket_cap(sum(p.numel for p in parameters)) if cap is None else cap
    if cap < SPLIT_ELEMENTS or cap % SPLIT_ELEMENTS:
        raise ConfigError(
            f"a bucket cap of {cap} elements",
            why=f"tensors are split at multiples of {SPLIT_ELEMENTS}, so that no chunk of the norm is cut in two",
            fix=f"choose a positive multiple of {SPLIT_ELEMENTS}",
        )
    largest = max((p.numel for p in parameters if p.numel <= cap), default=cap)
    buckets: list[Bucket] = []
    open_ranges: list[Range] = []
    open_key: tuple[str, Dtype, int, StateFormat] | None = None

    def close() -> None:
        if open_ranges and open_key is not None:
            layer, dtype, group, own = open_key
            kind = own.master_kind(dtype)
            buckets.append(Bucket(first_index + len(buckets), layer, dtype, group, kind, tuple(open_ranges), own))
            open_ranges.clear()

    for parameter in (p for p in parameters if p.numel):
        key = (parameter.layer, parameter.dtype, parameter.group, form.of(parameter.dims))
        if key != open_key:
            close()
            open_key = key
        for piece in _pieces(parameter, cap, largest):
            if sum(r.numel for r in open_ranges) + piece.numel > cap:
                close()
            open_ranges.append(piece)
    close()
    return tuple(buckets)


def _pieces(parameter: Parameter, cap: int, largest: int) -> Sequence[Range]:
    name, numel = parameter.name, parameter.numel
    head = min(-parameter.first % SPLIT_ELEMENTS, numel)
    step = cap
    if numel - head > cap:
        about = largest if 2 * largest >= cap else cap
        step = min(cap, align(-(-(numel - head) // -(-(numel - head) // about)), SPLIT_ELEMENTS))
    before = [Range(name, 0, head)] if head else []
    return [*before, *(Range(name, start, min(start + step, numel)) for start in range(head, numel, step))]
