"""Sizes in bytes as people write them. No torch."""

from __future__ import annotations

import difflib
import re

from .errors import ConfigError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
_UNITS = {
    "B": 1,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": TIB,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def size_bytes(text: str, option: str) -> int:
    """Bytes of a text like `40GiB`, `512 MB` or `1.5TiB`. Raises ConfigError, which names `option`."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{option} {text} is no size", fix=f"write, for example, {option} 40GiB")
    number, unit = match.groups()
    if unit not in _UNITS:
        near = next((u for u in _UNITS if u.lower() == unit.lower()), None)
        near = near or next(iter(difflib.get_close_matches(unit, _UNITS, n=1, cutoff=0.3)), "GiB")
        why = f"{unit!r} is no unit" if unit else "a number alone does not say its unit"
        raise ConfigError(
            f"{option} {text} is no size", why=f"{why}; units are {', '.join(_UNITS)}", fix=f"{option} {number}{near}"
        )
    return int(float(number) * _UNITS[unit])


def gib(size: float) -> str:
    """A size in GiB with one decimal, without the unit."""
    return f"{size / GIB:,.1f}"
