"""Choosing placements. Pure functions of the inventory and what the user asked; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from .errors import ConfigError
from .inventory import Bucket
from .plan import Placement, Plan, placed


def checked_fraction(value: object, option: str = "offload_fraction") -> float:
    """`value` as a fraction in [0, 1]; None means 0. Raises ConfigError for anything else, strings and NaN included."""
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ConfigError(
            f"{option} must be a number in [0.0, 1.0], got {value!r}",
            why="it is the share of optimizer-state bytes that lives on the host",
            fix=f"{option}=0.5 puts half of the state on the host, 0 none, 1 all",
        )
    return abs(float(value))  # -0.0 is 0.0


def place_fraction(buckets: Sequence[Bucket], fraction: float) -> Plan:
    """Put `fraction` of the state bytes on the host, to within half of one bucket.

    Buckets used first in forward stay on the device first: the weights of the last buckets are the last that the next
    forward needs, so their step and upload have the most time.
    """
    fraction = checked_fraction(fraction)
    total = sum(b.state_bytes for b in buckets)
    cumulative = [0, *accumulate(b.state_bytes for b in reversed(buckets))]
    count = min(range(len(cumulative)), key=lambda k: (abs(cumulative[k] - fraction * total), k))
    on_device = len(buckets) - count
    return placed(buckets, [Placement.DEVICE] * on_device + [Placement.HOST] * count, fraction)
