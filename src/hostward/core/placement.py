"""Hold a plan, one placement per bucket, as data that can be printed and written as JSON. No torch."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from hostward.core.host_limits import Rates
from hostward.core.inventory import Bucket, Dtype, MasterKind, state_bytes_per_element
from hostward.errors import ConfigError


class Placement(StrEnum):
    """Say where the optimizer state of a bucket is stored and where it is stepped."""

    DEVICE = "device"
    """State and step are on the device."""
    STREAMED = "streamed"
    """State offload with a GPU step: the state is prefetched for each step and written back."""
    HOST = "host"
    """CPU optimizer step: the gradient is offloaded and the updated weight is copied back."""

    @property
    def offloaded(self) -> bool:
        """Return whether the state is stored on the host."""
        return self is not Placement.DEVICE


@dataclass(frozen=True, slots=True)
class PlacedBucket:
    """Hold a bucket's name, size and placement."""

    name: str
    numel: int
    state_bytes: int
    host_bytes: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class Plan:
    """Hold placements of all buckets, in order of use in forward, and the requested share of offloaded state bytes."""

    asked_fraction: float
    buckets: tuple[PlacedBucket, ...]

    @property
    def state_bytes(self) -> int:
        return sum(b.state_bytes for b in self.buckets)

    @property
    def offloaded_bytes(self) -> int:
        """Return the state bytes that are offloaded."""
        return sum(b.state_bytes for b in self.buckets if b.placement.offloaded)

    @property
    def host_bytes(self) -> int:
        """Return the host bytes of the offloaded buckets, with upload sources and without gradients."""
        streamed = sum(b.state_bytes for b in self.buckets if b.placement is Placement.STREAMED)
        return streamed + sum(b.host_bytes for b in self.buckets if b.placement is Placement.HOST)

    def count(self, placement: Placement) -> int:
        """Return the number of buckets with this placement."""
        return sum(b.placement is placement for b in self.buckets)

    @property
    def placed_fraction(self) -> float:
        return self.offloaded_bytes / self.state_bytes if self.state_bytes else 0.0

    def explain(self) -> str:
        """Describe in one line the requested share, the placed share, and its parts."""
        on_host, streamed = self.count(Placement.HOST), self.count(Placement.STREAMED)
        text = (
            f"optimizer state on the host: asked {self.asked_fraction:.4f}, placed {self.placed_fraction:.4f} "
            f"({self.offloaded_bytes:,} of {self.state_bytes:,} bytes, "
            f"{on_host + streamed} of {len(self.buckets)} buckets"
        )
        text += f": {on_host} stepped on the host, {streamed} streamed)" if streamed else ")"
        return text if on_host + streamed else text + "; no state is offloaded"

    def to_json(self) -> str:
        rows = [
            {
                "name": b.name,
                "numel": b.numel,
                "state_bytes": b.state_bytes,
                "host_bytes": b.host_bytes,
                "placement": b.placement.value,
            }
            for b in self.buckets
        ]
        return json.dumps({"asked_fraction": self.asked_fraction, "buckets": rows}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Parse a plan. Raises ConfigError if `text` is none."""
        try:
            data = json.loads(text)
            fraction, rows = data["asked_fraction"], data["buckets"]
            if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
                raise ValueError(f"asked_fraction is {fraction!r}, not a number in [0.0, 1.0]")
            if not isinstance(rows, list):
                raise TypeError("buckets is not a list")
            return cls(float(fraction), tuple(_placed_bucket(row) for row in rows))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            why = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError("not a plan file", why=why, fix="write one with Plan.to_json()") from error


def _placed_bucket(row: dict[str, object]) -> PlacedBucket:
    name = row["name"]
    if not isinstance(name, str):
        raise TypeError(f"a bucket's name is {name!r}")
    numel, state_bytes, host_bytes = (_count(row, key) for key in ("numel", "state_bytes", "host_bytes"))
    return PlacedBucket(name, numel, state_bytes, host_bytes, Placement(str(row["placement"])))


def _count(row: dict[str, object], key: str) -> int:
    value = row[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{key} of bucket {row['name']!r} is {value!r}, not a count")
    return value


def placed(buckets: Sequence[Bucket], placements: Sequence[Placement], asked_fraction: float) -> Plan:
    """Return the plan that gives `placements[i]` to `buckets[i]`."""
    return Plan(asked_fraction, tuple(_row(b, p) for b, p in zip(buckets, placements, strict=True)))


def _row(bucket: Bucket, placement: Placement) -> PlacedBucket:
    found: PlacedBucket | None = bucket.rows.get(placement)
    if found is None:
        found = PlacedBucket(bucket.name, bucket.numel, bucket.state_bytes, bucket.host_bytes, placement)
        bucket.rows[placement] = found
    return found


# Choosing placements: pure functions of the inventory and the user's request.


LARGEST_STREAMED = 1.25
"""Buckets above this many times the median size have a CPU optimizer step, where both ways are in use."""


_SHARE_OF = {
    "offload_fraction": "of optimizer-state bytes that lives on the host",
    "streamed_fraction": "of the state on the host that is streamed through the device for its step",
    "step_early": "of the state that the CPU steps which it steps during backward",
}
_OR = {"offload_fraction": ' or "auto" with device_memory', "step_early": " or a bool"}
_HALF_OF = {
    "offload_fraction": "puts half of the state on the host",
    "streamed_fraction": "streams half of it",
    "step_early": "steps half of it then",
}


def checked_fraction(value: object, option: str = "offload_fraction") -> float:
    """Return `value` as a fraction in [0, 1]; None means 0. Raises ConfigError for anything else, strings and NaN
    included.
    """
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ConfigError(
            f"{option} must be a number in [0.0, 1.0]{_OR.get(option, '')}, got {value!r}",
            why=f"it is the share {_SHARE_OF.get(option, _SHARE_OF['offload_fraction'])}",
            fix=f"{option}=0.5 {_HALF_OF.get(option, _HALF_OF['offload_fraction'])}, 0 none, 1 all",
        )
    return abs(float(value))  # -0.0 is 0.0


def place_fraction(buckets: Sequence[Bucket], fraction: float, streamed_fraction: float = 0.0) -> Plan:
    """Return the plan with `placements_of` these shares."""
    return placed(buckets, placements_of(buckets, fraction, streamed_fraction), checked_fraction(fraction))


def placements_of(buckets: Sequence[Bucket], fraction: float, streamed_fraction: float = 0.0) -> list[Placement]:
    """Offload `fraction` of the state bytes, to within half of one bucket.

    Of those bytes, `streamed_fraction` is streamed and the rest has a CPU optimizer step, to within one bucket.

    Buckets used first in forward stay on the device first: the weights of the last buckets are the last that the next
    forward needs, so their step and upload have the most time. Streamed and host buckets alternate, a streamed one
    first: its state can be prefetched while the norm is not yet known, so that the next forward starts without a stall.
    """
    sizes = [b.state_bytes for b in buckets]
    count = offloaded_count([0, *accumulate(reversed(sizes))], fraction)
    stay = len(sizes) - count
    return [Placement.DEVICE] * stay + alternating(sizes[stay:], streamed_fraction)


def offloaded_count(cumulative: Sequence[int], fraction: float) -> int:
    """Return how many of the last buckets are offloaded for this share of the state bytes, to within half of one.

    Args:
        cumulative: state bytes of none of the buckets, of the last one, of the last two, and so on to all of them.
    """
    wanted = checked_fraction(fraction) * cumulative[-1]
    above = min(bisect_left(cumulative, wanted), len(cumulative) - 1)
    return min(max(0, above - 1), above, key=lambda k: abs(cumulative[k] - wanted))


def alternating(sizes: Sequence[int], streamed_fraction: float) -> list[Placement]:
    """Return the placements of offloaded buckets with these state bytes, of which this share is streamed."""
    share = checked_fraction(streamed_fraction, "streamed_fraction")
    on_host, by_stream, placements = Placement.HOST, Placement.STREAMED, list[Placement]()
    if share in (0.0, 1.0):
        return [by_stream if share else on_host] * len(sizes)
    # A GPU staging buffer holds the largest streamed bucket: a few large ones would make every buffer as large.
    largest = LARGEST_STREAMED * sorted(sizes)[len(sizes) // 2] if sizes else 0
    small_bytes = sum([size for size in sizes if size <= largest])
    asked_bytes = share * sum(sizes)
    among_small = asked_bytes <= small_bytes
    if among_small and small_bytes:
        share = asked_bytes / small_bytes
    tolerance = min(share, 1 - share)
    seen = streamed = 0
    for size in sizes:
        if among_small and size > largest:
            placements.append(on_host)
            continue
        seen += size
        if share * seen - streamed >= tolerance * size:
            placements.append(by_stream)
            streamed += size
        else:
            placements.append(on_host)
    return placements


def stepped_early(buckets: Sequence[Bucket], placements: Sequence[Placement], share: float) -> frozenset[int]:
    """Return the positions of the host buckets that are stepped during backward: this share of their state bytes.

    They are the last ones in order of use in forward, to within half of one bucket: their gradients come first, and
    forward needs the weights of the others first, which are stepped in that order once the norm is known.
    """
    if not share:
        return frozenset()
    on_host = [b for b, placement in enumerate(placements) if placement is Placement.HOST]
    return frozenset(last_of(on_host, [buckets[b].state_bytes for b in on_host], share))


def last_of(positions: Sequence[int], sizes: Sequence[int], share: float) -> Sequence[int]:
    """Return the last of these positions that have this share of all sizes, to within half of one."""
    cumulative = [0, *accumulate(reversed(sizes))]
    count = min(range(len(cumulative)), key=lambda k: abs(cumulative[k] - share * cumulative[-1]))
    return positions[len(positions) - count :]


def summed_on_host(buckets: Sequence[Bucket], placements: Sequence[Placement]) -> frozenset[int]:
    """Return the positions of the buckets whose gradients can be accumulated on the host.

    A gradient is accumulated in one place, so a bucket is left out if it shares a parameter with a bucket elsewhere, or
    with a bucket that does.
    """
    return summed_among(sharing(buckets), placements)


def sharing(buckets: Sequence[Bucket]) -> Sequence[Sequence[int]]:
    """Return the positions of the buckets of each parameter that several of them share."""
    having: dict[str, list[int]] = {}
    for b, bucket in enumerate(buckets):
        for name in bucket.parts:
            having.setdefault(name, []).append(b)
    return [positions for positions in having.values() if len(positions) > 1]


def summed_among(shared: Sequence[Sequence[int]], placements: Sequence[Placement]) -> frozenset[int]:
    """Return what `summed_on_host` does, of buckets whose `sharing` is known."""
    host, before = Placement.HOST, -1
    found = {b for b, placement in enumerate(placements) if placement is host}
    while before != len(found):
        before = len(found)
        for positions in shared:
            if not found.issuperset(positions):
                found.difference_update(positions)
    return frozenset(found)


def host_step_bytes(*, state_bytes: int, weight_bytes: int) -> int:
    """Return the host memory traffic of the CPU optimizer step, in bytes per parameter.

    The step reads and writes the state, reads the gradient, and writes the weight, whose cache lines are read before.
    """
    return 2 * state_bytes + 3 * weight_bytes


HOST_STEP_BYTES = host_step_bytes(state_bytes=state_bytes_per_element(MasterKind.SPLIT), weight_bytes=2)
"""Host memory that the CPU optimizer step at a measured rate, of bf16 weights with fp32 moments, reads and writes per
parameter.
"""


ARITHMETIC_BYTES = 14
"""The arithmetic of the CPU step takes as long as the memory traffic of so many bytes per parameter.

In a training step, beside copies, 4 bytes of state per parameter were stepped 1.49 (FP8 moments) and 1.36 times (all in
bf16) as fast as the rate of fp32 moments measured before it (benchmarks/results/2026-11-28-step-fp8-kernel-h200.json);
this constant says 1.43.
"""


def step_speed(bucket: Bucket, *, gradients_in_fp32: bool = False) -> float:
    """Return how many times as fast as bf16 weights with fp32 moments a bucket is stepped on the CPU.

    Of a machine whose rate with that state is not measured: memory bandwidth decides it, and arithmetic.
    """
    weight_bytes = bucket.dtype.itemsize_bytes
    moved_bytes = host_step_bytes(state_bytes=bucket.state_element_bytes, weight_bytes=weight_bytes)
    if gradients_in_fp32:
        moved_bytes += Dtype.FP32.itemsize_bytes - weight_bytes
    return (HOST_STEP_BYTES + ARITHMETIC_BYTES) / (moved_bytes + ARITHMETIC_BYTES)


def streamed_share_of(
    bucket: Bucket, rates: Rates, ahead: float | None = None, early: tuple[float, float] = (0.0, 0.0)
) -> float:
    """Return `streamed_share` of buckets like this one, whose CPU step has these rates."""
    weight_bytes = bucket.dtype.itemsize_bytes
    state_bytes = bucket.state_element_bytes
    return streamed_share(rates, state_bytes=state_bytes, weight_bytes=weight_bytes, ahead=ahead, early=early)


def streamed_share(
    rates: Rates,
    *,
    state_bytes: int,
    weight_bytes: int,
    ahead: float | None = None,
    early: tuple[float, float] = (0.0, 0.0),
) -> float:
    """Return the share s of offloaded parameters to stream for the shortest step (bytes are per parameter).

    Once the norm is known the CPU step and the copies start together, and slow one another down until one of them has
    ended; from then on the other goes at the rate that it has alone. The CPU steps 1 - s. The copies write back the
    state of s, prefetch the state that was not prefetched during backward, and upload the weights of the CPU step. One
    direction alone gets the bandwidth of both, up to its own limit. CPU and copies end together at one s: the best s is
    that one, or one at which either gains enough while the other is idle.

    Args:
        ahead: share of the offloaded state that can be prefetched during backward. None: not known; then prefetch
            and
            weights are left out, which compensate one another in part.
        early: share of the CPU steps that is made during backward (`step_early`), and the largest share of the
            parameters for which there is time then.
    """
    early_bytes = 0.0 if ahead is None else ahead * state_bytes

    def seconds(s: float, host_per_s: float, duplex_per_s: float) -> tuple[float, float]:
        """Return the seconds per parameter of CPU step and copies, each by itself."""
        reads, writes = max(0.0, s * state_bytes - early_bytes), s * state_bytes
        if ahead is not None:
            reads += (1 - s) * weight_bytes
        one_way_s = 0.0 if ahead is None else max(reads, writes) / rates.d2h_bytes_per_s
        stepped = (1 - s) - min(early[0] * (1 - s), early[1])
        return stepped / host_per_s, max((reads + writes) / duplex_per_s, one_way_s)

    def until_both_end_s(s: float) -> float:
        beside = seconds(s, rates.busy_host_parameters_per_s, rates.busy_duplex_bytes_per_s)
        alone = seconds(s, rates.host_parameters_per_s, rates.duplex_bytes_per_s)
        together_s = min(beside)
        left = (a * (1 - together_s / b) if b else 0.0 for a, b in zip(alone, beside, strict=True))
        return together_s + max(left)

    busy_link = rates.busy_duplex_bytes_per_s / 2 / state_bytes
    together = busy_link / (busy_link + rates.busy_host_parameters_per_s)  # while no state is prefetched
    return min((together, 0.0, 1.0, *(k / 100 for k in range(1, 100))), key=until_both_end_s)
