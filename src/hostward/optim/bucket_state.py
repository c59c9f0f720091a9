"""This module allocates the optimizer state of buckets, and reads and writes it by parameter name.

Tensors of one bucket, all flat and padded to `bucket.offsets[-1]` elements:
    exp_avg, exp_avg_sq   float32 or bfloat16 (by `bucket.form`), the moments; or uint8, FP8 moments, a byte for each
                          element and then one for each block of 128
    remainder             int16, low 16 bits of the fp32 main weight (split main weights)
    master                float32, the fp32 main weight (plain main weights)
    counts                int64 [ranges], finished steps of each range; where the step runs
Host buckets also hold
    weight                the weight's dtype: output of the CPU optimizer step and source of the upload; for fp32 the
                          main weight itself
    gradient              landing buffer of this step's gradient, or float32, its sum over the microbatches
and, where their step is guessed, a second set of all of these but the gradient, and
    guess                 int64 [7], record of the guess
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import torch

from hostward.core.inventory import FP8_BLOCK, Bucket, Dtype, MasterKind, Range, stored_elements
from hostward.core.placement import Placement, summed_on_host
from hostward.errors import HostwardError, PageLockError
from hostward.kernels import reference
from hostward.kernels.cpu.adamw import GUESS_WORDS
from hostward.runtime.backend import (
    LOW_DTYPES,
    STATE_DTYPES,
    TORCH_DTYPES,
    Backend,
    Buffer,
    Partials,
    Scalars,
    Tier,
    chunks_of,
)
from hostward.runtime.pinned_memory import require_host_memory
from hostward.schedule.optimizer import landing_buffer_bytes

_MASTER_NAN = 0x7FC00000
_IN_BOTH_SETS = ("exp_avg", "exp_avg_sq", "counts", "low", "weight", "weights")


@dataclass(slots=True, eq=False)
class BucketState:
    """BucketState holds one bucket's buffers.

    `weights` and `gradients` have one buffer per range, for host buckets only.
    """

    bucket: Bucket
    placement: Placement
    exp_avg: Buffer
    exp_avg_sq: Buffer
    counts: Buffer
    low: Buffer | None = None
    """Low 16 bits of the fp32 main weight (int16), or the plain main weight (float32), by `bucket.kind`."""
    weight: Buffer | None = None
    gradient: Buffer | None = None
    weights: list[Buffer] = field(default_factory=list)
    gradients: list[Buffer] = field(default_factory=list)
    twin: BucketState | None = None
    """Where the step of this bucket is guessed, the second set; between two steps it holds nothing of use."""
    guess: Buffer | None = None
    turn: bool = False
    """The two sets have been exchanged an odd number of times."""
    sets: tuple[tuple[Any, ...], ...] = ((), ())
    """What state and twin had at first, by `_IN_BOTH_SETS`; empty without a twin."""

    def exchange(self) -> None:
        """Let the second set be the state, because a step has written it. Nothing but the step reads the twin."""
        self.turn = not self.turn
        self.settle()

    def settle(self) -> None:
        """Let state and twin be the sets that `turn` says, also after an exchange that was interrupted."""
        if self.twin is None:
            return
        for name, mine, others in zip(_IN_BOTH_SETS, *(reversed(self.sets) if self.turn else self.sets), strict=True):
            setattr(self, name, mine)
            setattr(self.twin, name, others)

    def give_twin(self, twin: BucketState, guess: Buffer) -> None:
        """Let the step of this bucket be guessed, in a second set of its state."""
        self.twin, self.guess = twin, guess
        self.sets = tuple(tuple(getattr(each, name) for name in _IN_BOTH_SETS) for each in (self, twin))

    @property
    def tier(self) -> Tier:
        return Tier.HOST if self.placement.offloaded else Tier.DEVICE

    def streamed(self) -> list[Buffer]:
        """Return the buffers that are copied when the state is offloaded and stepped on the GPU."""
        return [self.exp_avg, self.exp_avg_sq, *([] if self.low is None else [self.low])]

    def count_of(self, index: int) -> Buffer:
        """Return the step count of one range, int64 [1], where the step runs."""
        counts = self.counts
        return Buffer(counts.tier, counts.data[index : index + 1], counts.owner, counts.pinned)

    @property
    def remainder(self) -> torch.Tensor | None:
        return self.low.data if self.low is not None and self.bucket.kind is MasterKind.SPLIT else None

    @property
    def master(self) -> torch.Tensor | None:
        return self.low.data if self.low is not None and self.bucket.kind is MasterKind.PLAIN else None

    def buffers(self) -> list[Buffer]:
        own = (self.exp_avg, self.exp_avg_sq, self.counts, self.low, self.weight, self.gradient)
        return [b for b in own if b is not None]


def landing_dtypes(
    buckets: Sequence[Bucket], parameters: Mapping[str, torch.nn.Parameter], grad_dtype: torch.dtype | None
) -> list[torch.dtype]:
    """Return, by bucket, the dtype of its gradients on the host. `grad_dtype` overrides what the parameters say."""
    firsts = [parameters[bucket.ranges[0].name] for bucket in buckets]
    return [grad_dtype or p.grad_dtype or p.dtype for p in firsts]


def host_bytes(buckets: Sequence[Bucket], placements: Sequence[Placement], gradients: Sequence[torch.dtype]) -> int:
    """Return all host bytes of these buckets, padding and landing buffers included; `gradients` holds their dtypes."""
    total = 0
    for b, placement, dtype in zip(buckets, placements, gradients, strict=True):
        if placement is Placement.HOST:
            beside = b.dtype.itemsize_bytes + dtype.itemsize
            total += b.padded_state_bytes + b.offsets[-1] * beside + 8 * len(b.ranges)
        elif placement is Placement.STREAMED:
            total += b.padded_state_bytes
    return total


def twin_bytes(bucket: Bucket) -> int:
    """Return the host bytes of the second set of a host bucket's state, padding and the record of guesses included."""
    weights = bucket.offsets[-1] * bucket.dtype.itemsize_bytes
    return bucket.padded_state_bytes + weights + 8 * (len(bucket.ranges) + GUESS_WORDS)


def allocate_states(
    backend: Backend,
    buckets: Sequence[Bucket],
    placements: Sequence[Placement],
    taken: list[Buffer],
    *,
    pin_weights: bool = True,
) -> list[BucketState]:
    """Allocate zero state for every bucket: exact-size slabs per placement and role, also appended to `taken`.

    Pinned is what copies reach: state stepped on the GPU while offloaded (streamed), and with `pin_weights` the weights
    that host buckets upload. Other state of host buckets is read and written by CPU cores only, and is not pinned.

    Raises MemoryLimitError; what was allocated until then stays allocated.
    """

    def take(tier: Tier, sizes: Sequence[int], dtype: torch.dtype, owner: str, pinned: bool = False) -> list[Buffer]:
        found = backend.allocate(tier, sizes, dtype, owner, pinned=pinned) if sizes else []
        taken.extend(found)
        return found

    states: list[BucketState | None] = [None] * len(buckets)
    for placement in Placement:
        chosen = [i for i, p in enumerate(placements) if p is placement]
        tier = Tier.HOST if placement.offloaded else Tier.DEVICE
        pinned = placement is Placement.STREAMED
        moments: dict[str, dict[int, Buffer]] = {"exp_avg": {}, "exp_avg_sq": {}}
        for role, found in moments.items():
            for dtype, torch_dtype in STATE_DTYPES.items():
                of_dtype = [i for i in chosen if getattr(buckets[i].form, role) is dtype]
                sizes = [stored_elements(dtype, buckets[i].offsets[-1]) for i in of_dtype]
                found.update(zip(of_dtype, take(tier, sizes, torch_dtype, role, pinned), strict=True))
        stepping = Tier.HOST if placement is Placement.HOST else Tier.DEVICE
        counts = take(stepping, [len(buckets[i].ranges) for i in chosen], torch.int64, "step counts")
        for k, i in enumerate(chosen):
            states[i] = BucketState(buckets[i], placement, moments["exp_avg"][i], moments["exp_avg_sq"][i], counts[k])
        for kind, owner in ((MasterKind.SPLIT, "remainder"), (MasterKind.PLAIN, "master")):
            with_low = [s for i in chosen if (s := states[i]) is not None and s.bucket.kind is kind]
            lows = take(tier, [s.bucket.offsets[-1] for s in with_low], LOW_DTYPES[kind], owner, pinned)
            for state, low in zip(with_low, lows, strict=True):
                state.low = low
    done = [s for s in states if s is not None]
    for weight_dtype, torch_dtype in TORCH_DTYPES.items():
        on_host = [s for s in done if s.placement is Placement.HOST and s.bucket.dtype is weight_dtype]
        sizes = [s.bucket.offsets[-1] for s in on_host]
        weights = take(Tier.HOST, sizes, torch_dtype, "weights for upload", pin_weights)
        for state, weight in zip(on_host, weights, strict=True):
            state.weight = weight
            state.weights = range_buffers(state.bucket, weight)
    return done


def allocate_twins(
    backend: Backend, states: Sequence[BucketState], taken: list[Buffer], *, pin_weights: bool = True
) -> None:
    """Give these host buckets a second set of their state, zero, also appended to `taken`. Raises MemoryLimitError."""
    if not states:
        return
    buckets, placements = [state.bucket for state in states], [state.placement for state in states]
    twins = allocate_states(backend, buckets, placements, taken, pin_weights=pin_weights)
    guesses = backend.allocate(Tier.HOST, [GUESS_WORDS] * len(states), torch.int64, "step counts")
    taken.extend(guesses)
    for state, twin, guess in zip(states, twins, guesses, strict=True):
        state.give_twin(twin, guess)


def allocate_partials(
    backend: Backend, states: Sequence[BucketState], *, on_host: bool
) -> tuple[Partials, Partials | None, list[list[int]]]:
    """Allocate memory for the partial sums of every range's norm, on the device and, if asked for, on the host.

    Also returns, by bucket and range, the index of its first chunk in both.
    """
    firsts: list[list[int]] = []
    total = 0
    for state in states:
        firsts.append([])
        for r in state.bucket.ranges:
            firsts[-1].append(total)
            total += chunks_of(r.numel)

    def allocate(tier: Tier) -> Partials:
        pinned = tier is Tier.HOST
        (sums,) = backend.allocate(tier, [total], torch.int64, "norm partials", pinned=pinned)
        (exponents,) = backend.allocate(tier, [total], torch.int32, "norm partials", pinned=pinned)
        return Partials(sums, exponents)

    return allocate(Tier.DEVICE), allocate(Tier.HOST) if on_host else None, firsts


def allocate_scalars(backend: Backend, tier: Tier) -> Scalars:
    """Allocate the scalars of a step on one tier."""
    pinned = tier is Tier.HOST
    scale, norm = backend.allocate(tier, [1, 1], torch.float32, "step scalars", pinned=pinned)
    (skip,) = backend.allocate(tier, [1], torch.int32, "step scalars", pinned=pinned)
    return Scalars(scale, skip, norm)


def allocate_gradients(
    backend: Backend, states: Sequence[BucketState], dtypes: Sequence[torch.dtype], *, pinned: bool = True
) -> None:
    """Give each host bucket a landing buffer for gradients of its dtype.

    One slab is allocated per dtype; buffers that fit already are kept.
    """
    wanted = [
        (s, d) for s, d in zip(states, dtypes, strict=True) if s.gradient is None or s.gradient.data.dtype is not d
    ]
    backend.free([s.gradient for s, _ in wanted if s.gradient is not None])
    for dtype in TORCH_DTYPES.values():
        chosen = [s for s, d in wanted if d is dtype]
        if chosen:
            sizes = [s.bucket.offsets[-1] for s in chosen]
            landing = backend.allocate(Tier.HOST, sizes, dtype, "gradients", pinned=pinned)
            for state, gradient in zip(chosen, landing, strict=True):
                state.gradient = gradient
                state.gradients = range_buffers(state.bucket, gradient)


def range_buffers(bucket: Bucket, buffer: Buffer) -> list[Buffer]:
    """Return one buffer per range over a bucket's buffer; copies and kernels take these as operands."""
    return [
        Buffer(buffer.tier, buffer.data[o : o + r.numel], buffer.owner, buffer.pinned)
        for r, o in zip(bucket.ranges, bucket.offsets, strict=False)
    ]


def pieces(states: Sequence[BucketState]) -> dict[str, list[tuple[BucketState, int, Range]]]:
    """Return, by parameter name, its (bucket state, index within the bucket, range) tuples in order of start."""
    found: dict[str, list[tuple[BucketState, int, Range]]] = {}
    for state in states:
        for i, r in enumerate(state.bucket.ranges):
            found.setdefault(r.name, []).append((state, i, r))
    return found


def slab_views(state: BucketState, index: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (role, flat view) of one range's moments, and of its fp32 main weight's own bytes where it has any.

    Those of FP8 moments are their bytes, and "exp_avg_scales" or "exp_avg_sq_scales" those of their blocks.
    """
    start, stop = list(pairwise(state.bucket.offsets))[index]
    stop = start + state.bucket.ranges[index].numel
    for role, moment in (("exp_avg", state.exp_avg.data), ("exp_avg_sq", state.exp_avg_sq.data)):
        yield role, moment[start:stop]
        if getattr(state.bucket.form, role) is Dtype.FP8:
            scales = moment[state.bucket.offsets[-1] :]
            yield f"{role}_scales", scales[start // FP8_BLOCK : -(-stop // FP8_BLOCK)]
    if state.low is not None:
        yield ("remainder" if state.bucket.kind is MasterKind.SPLIT else "master"), state.low.data[start:stop]


def fp8_values(codes: torch.Tensor, scales: torch.Tensor, role: str, first: int = 0) -> torch.Tensor:
    """Return the values of elements of an FP8 moment on the CPU, bfloat16, exactly.

    Args:
        codes: uint8 [n], the bytes of elements that follow one another, of which the first is element `first` of its
            block.
        scales: uint8, the bytes of all blocks that they are in.
        role: "exp_avg" or "exp_avg_sq".
    """
    whole = np.zeros(len(scales) * (FP8_BLOCK + 1), dtype=np.uint8)
    # Copied by torch: a tensor that numpy shares could never give its memory back, as `AdamW.sleep` does.
    torch.from_numpy(whole)[first : first + len(codes)].copy_(codes)
    torch.from_numpy(whole)[len(scales) * FP8_BLOCK :].copy_(scales)
    values = reference.float_of_fp8(whole, signed=role == "exp_avg")[first : first + len(codes)]
    return torch.from_numpy(values).to(torch.bfloat16)


def fp8_stored(values: torch.Tensor, role: str, *, nearest: bool = False) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return bytes of elements and of blocks that store a moment in FP8; None where some value would change.

    Args:
        values: flat, bfloat16 or float32, from the first element of a block on.
        role: "exp_avg" or "exp_avg_sq".
        nearest: round to nearest instead of returning None.
    """
    given = reference.canonical(values.to("cpu", torch.float32).numpy())
    random = np.full(given.size, 0x8000 if nearest else 0, dtype=np.uint32)
    stored = reference.fp8_at_random(given, random, signed=role == "exp_avg")
    codes, scales = (torch.from_numpy(part.reshape(-1)) for part in reference.fp8_parts(stored))
    codes = codes[: len(values)]
    if not nearest:
        kept = reference.float_of_fp8(stored, signed=role == "exp_avg")[: given.size]
        if not np.array_equal(kept.view(np.uint32), given.view(np.uint32)):
            return None
    return codes, scales


def join_master(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the fp32 main weight of a bf16 weight and its int16 low bits, equal shapes, bit for bit."""
    high = weight.view(torch.int16).to(torch.int32) << 16
    return (high + remainder.to(torch.int32)).view(torch.float32)


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split fp32 main weights into bf16 weights and their int16 low 16 bits.

    Weights are rounded to nearest, ties away from zero; NaN becomes 0x7fc0.
    """
    bits = torch.where(master.isnan(), _MASTER_NAN, master.view(torch.int32))
    weight = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return weight, bits.to(torch.int16)


def rounded(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight that the step would write for `master`.

    bf16 rounds ties away from zero, fp16 ties to even; fp32 is returned as it is.
    """
    if dtype is torch.bfloat16:
        return split_master(master)[0]
    return master.to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype and shape are bitwise identical.

    NaN equals itself, 0.0 differs from -0.0.
    """
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


# Memory for the state of new buckets: all of it or none; where pinning failed, the options that need less of it.


_CHANGES = ("streamed_fraction=0.0", "pin_gradients=False", "pin_weights=False", "step_early=False")
_OPTIONS = (
    "no optimizer.offload_mix and no optimizer.offload_optimizer_states, optimizer.pin_cpu_grads=False, "
    "optimizer.pin_cpu_params=False"
)


@dataclass(frozen=True, slots=True)
class AllocationRequest:
    """AllocationRequest describes the memory that new buckets need, and what of it is pinned.

    It holds the buckets, their placements, the dtypes in which their gradients land on the host, whether gradients are
    accumulated on the host, whether gradients and weights there are pinned besides streamed state, and which host
    buckets have two sets of their state.
    """

    buckets: Sequence[Bucket]
    placements: Sequence[Placement]
    gradients: Sequence[torch.dtype]
    sums: bool
    pin_gradients: bool
    pin_weights: bool
    twins: frozenset[int] = frozenset()

    @property
    def summed(self) -> frozenset[int]:
        """Return the buckets whose gradients are accumulated on the host."""
        return summed_on_host(self.buckets, self.placements) if self.sums else frozenset()

    def host_bytes(self) -> int:
        """Return the bytes needed on the host, padding and landing buffers included."""
        found = host_bytes(self.buckets, self.placements, self.gradients) + self._inbox_bytes()
        return found + sum(twin_bytes(self.buckets[b]) for b in self.twins)

    def locked_bytes(self) -> int:
        """Return how many of the host bytes are pinned."""
        found = self._inbox_bytes() if self.pin_gradients else 0
        pairs = zip(self.buckets, self.placements, self.gradients, strict=True)
        for b, (bucket, placement, gradient) in enumerate(pairs):
            per_element = 0
            if placement is Placement.STREAMED:
                found += bucket.padded_state_bytes
            elif placement is Placement.HOST:
                per_element = gradient.itemsize * self.pin_gradients
                per_element += bucket.dtype.itemsize_bytes * self.pin_weights * (2 if b in self.twins else 1)
            found += bucket.offsets[-1] * per_element
        return found

    def _inbox_bytes(self) -> int:
        return sum(landing_buffer_bytes([self.buckets[b] for b in self.summed]))

    def _changed(self, changes: Sequence[str]) -> AllocationRequest:
        stepped, gradients, weights, once = (change in changes for change in _CHANGES)
        placements = [Placement.HOST if stepped and p.offloaded else p for p in self.placements]
        return replace(
            self,
            placements=placements,
            pin_gradients=self.pin_gradients and not gradients,
            pin_weights=self.pin_weights and not weights,
            twins=frozenset() if once else self.twins,
        )

    def smaller(self) -> dict[str, int]:
        """Return changes of options that pin fewer bytes, fewest changes first, with the bytes they leave.

        Each one pins fewer bytes than those before it.
        """
        found: dict[str, int] = {}
        least = self.locked_bytes()
        for count in range(1, len(_CHANGES) + 1):
            for changes in combinations(_CHANGES, count):
                locked = self._changed(changes).locked_bytes()
                if locked < least:
                    found[", ".join(changes)] = least = locked
        return found


def take_states(backend: Backend, asked: AllocationRequest) -> list[BucketState]:
    """Allocate zero state for these buckets, with the landing buffers of their gradients.

    Raises MemoryLimitError; nothing stays allocated then.
    """
    # Check the total before the first allocation: slab by slab, only the last one would fail.
    require_host_memory(asked.host_bytes(), owner="optimizer state")
    taken: list[Buffer] = []
    states: list[BucketState] = []
    try:
        with explained(backend, asked):
            states = allocate_states(backend, asked.buckets, asked.placements, taken, pin_weights=asked.pin_weights)
            allocate_twins(backend, [states[b] for b in sorted(asked.twins)], taken, pin_weights=asked.pin_weights)
            # Landing buffers are allocated now rather than in the first step, where pinning would stall it.
            pairs = zip(states, asked.gradients, strict=True)
            landing = [(s, dtype) for s, dtype in pairs if s.placement is Placement.HOST]
            allocate_gradients(backend, [s for s, _ in landing], [d for _, d in landing], pinned=asked.pin_gradients)
    except HostwardError:
        backend.free([*taken, *(s.gradient for s in states if s.gradient is not None)])
        raise
    return states


def free_states(backend: Backend, states: Sequence[BucketState]) -> None:
    """Free what `take_states` has allocated."""
    sets = [each for state in states for each in (state, state.twin) if each is not None]
    guesses = [state.guess for state in states if state.guess is not None]
    backend.free([*(buffer for each in sets for buffer in each.buffers()), *guesses])


@contextmanager
def explained(backend: Backend, asked: AllocationRequest) -> Iterator[None]:
    """Extend a PageLockError raised inside by the bytes pinned so far and the options that pin fewer."""
    try:
        yield
    except PageLockError as error:
        there = f"the optimizer pins {asked.locked_bytes():,} bytes, and {backend.ledger.pinned_bytes:,} were locked"
        smaller = "; ".join(f"{changes} leaves {size:,} bytes" for changes, size in asked.smaller().items())
        cures = [f"{smaller} (in a run: {_OPTIONS})"] if smaller else []
        raise PageLockError(
            error.what,
            why="; ".join(filter(None, (error.why, there))),
            fix="; or ".join(filter(None, (*cures, error.fix))),
        ) from error
