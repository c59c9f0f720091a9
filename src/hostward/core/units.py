"""Sizes in bytes, and numbers of parameters, as people write and read them. No torch."""

from __future__ import annotations

import re

from hostward.errors import ConfigError

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
UNKNOWN = "–"
"""Shown where a figure is not known."""
_MOST_BYTES = 1 << 70
"""More than all machines have together; a float counts much further, but not without end."""
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def billions(number: int) -> str:
    """Format a number of parameters: 8.19 B from a billion on, else all digits."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number:,}"


def size_bytes(text: str, option: str) -> int:
    """Parse a size like `40GiB`, `512 MB` or `1.5TiB` to bytes. Raises ConfigError, which names `option`."""
    match = _SIZE.fullmatch(text)
    if match is None:
        why = f"a size is a number and a unit; units are {', '.join(_UNITS)}"
        raise ConfigError(f"{option} {text} is no size", why=why, fix=f"write, for example, {option} 40GiB")
    number, unit = match.groups()
    if unit not in _UNITS:
        near = next((u for u in _UNITS if u.lower() == unit.lower()), None)
        near = near or next((u for u in ("KiB", "MiB", "GiB", "TiB") if u[0] == unit[:1].upper()), "GiB")
        why = f"{unit!r} is no unit" if unit else "a number alone does not say its unit"
        fix = f"{option} {number}{near}" if float(number) else f"write, for example, {option} 40{near}"
        raise ConfigError(f"{option} {text} is no size", why=f"{why}; units are {', '.join(_UNITS)}", fix=fix)
    if (nbytes := float(number) * _UNITS[unit]) > _MOST_BYTES:
        why = f"no machine has {_MOST_BYTES >> 40:,}TiB"
        raise ConfigError(f"{option} {text[:40]} is no size", why=why, fix=f"write, for example, {option} 40GiB")
    return int(nbytes)


def size_option(nbytes: int) -> str:
    """Format bytes as `size_bytes` parses them, rounded up to a MiB, or to a tenth of a GiB from one GiB on."""
    if nbytes <= GIB - MIB:
        return f"{-(-nbytes // MIB)}MiB"
    return f"{-(-nbytes * 10 // GIB) / 10:.1f}".removesuffix(".0") + "GiB"


def gib(size: float) -> str:
    """Format a size in GiB with one decimal, without the unit."""
    return f"{size / GIB:,.1f}"


def size(nbytes: float | None) -> str:
    """Format bytes for people, with three digits or so."""
    if nbytes is None:
        return UNKNOWN
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1023.95:
            return f"{nbytes:,.0f} {unit}" if unit == "B" or nbytes >= 1000 else f"{nbytes:,.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.0f} GiB" if nbytes >= 1000 else f"{nbytes:,.1f} GiB"


def unit_of(most_bytes: float) -> tuple[int, str]:
    """Return the unit, up to GiB, in which `most_bytes` is a figure of at least 1."""
    units = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
    return next((unit for unit in units if most_bytes >= unit[0]), (1, "B"))


def sizes_apart(asked_bytes: int, there_bytes: int) -> tuple[str, str]:
    """Format two sizes as `size` does, or to the byte where they would look equal."""
    asked, there = size(asked_bytes), size(there_bytes)
    return (asked, there) if asked != there else (f"{asked_bytes:,} bytes", f"{there_bytes:,} bytes")
