"""The plan: one placement per bucket, as data that prints, and goes to JSON and back. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from .errors import ConfigError
from .inventory import Bucket


class Placement(StrEnum):
    """Where the optimizer state of a bucket lives and where it is stepped."""

    DEVICE = "device"
    """State and step on the device."""
    STREAMED = "streamed"
    """State on the host, step on the device: the state comes and goes at every step."""
    HOST = "host"
    """State and step on the host; the gradient goes there and the weight comes back."""

    @property
    def offloaded(self) -> bool:
        """Whether the state lives on the host."""
        return self is not Placement.DEVICE


@dataclass(frozen=True, slots=True)
class PlacedBucket:
    """A bucket's name, size and placement."""

    name: str
    numel: int
    state_bytes: int
    host_bytes: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class Plan:
    """Placements of all buckets, in order of use in forward, and the share of state bytes that was asked for the
    host.
    """

    asked_fraction: float
    buckets: tuple[PlacedBucket, ...]

    @property
    def state_bytes(self) -> int:
        return sum(b.state_bytes for b in self.buckets)

    @property
    def offloaded_bytes(self) -> int:
        """State bytes that leave the device."""
        return sum(b.state_bytes for b in self.buckets if b.placement.offloaded)

    @property
    def host_bytes(self) -> int:
        """Host bytes of the offloaded buckets, upload sources included, gradients not."""
        streamed = sum(b.state_bytes for b in self.buckets if b.placement is Placement.STREAMED)
        return streamed + sum(b.host_bytes for b in self.buckets if b.placement is Placement.HOST)

    def count(self, placement: Placement) -> int:
        """How many buckets have this placement."""
        return sum(b.placement is placement for b in self.buckets)

    @property
    def placed_fraction(self) -> float:
        return self.offloaded_bytes / self.state_bytes if self.state_bytes else 0.0

    def explain(self) -> str:
        """One line: the share asked, the share placed, and what it is made of."""
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
        """Raises ConfigError if `text` is not a plan."""
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
    """The plan that gives `placements[i]` to `buckets[i]`."""
    rows = tuple(
        PlacedBucket(b.name, b.numel, b.state_bytes, b.host_bytes, p) for b, p in zip(buckets, placements, strict=True)
    )
    return Plan(asked_fraction, rows)
