"""What the numbers in a message on memory come to."""

from __future__ import annotations

import re

from hostward.sizes import GIB, KIB, MIB, size

_UNITS = {"bytes": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|kib|mib|gib)"
# Torch 2.1 wrote "capacty".
_OF_TORCH = re.compile(rf"tried to allocate {_SIZE}\..*? total capaci?ty of {_SIZE} of which {_SIZE} is free")
_OF_OLDER_TORCH = re.compile(
    rf"tried to allocate {_SIZE} \(gpu \d+; {_SIZE} total capacity; {_SIZE} already allocated; {_SIZE} free; "
    rf"{_SIZE} (?:reserved in total by pytorch|cached)\)"
)
_OF_OTHERS = re.compile(rf"process \d+ has {_SIZE} memory in use")
_ALLOCATED = re.compile(rf"{_SIZE} is allocated by pytorch")
_IN_PIECES = re.compile(rf"{_SIZE} is reserved by pytorch but unallocated")
_OF_HOSTWARD = re.compile(
    r"([\d,.]+) (bytes|b|[kmg]ib) of (host|device) memory(?: asked)?, "
    r"(?:and )?([\d,.]+)(?: (bytes|b|[kmg]ib))? (?:are )?available"
)
_CONTEXT_BYTES = GIB
"""Of a process on the GPU besides what torch allocates, at most."""


def numbers(line: str) -> str:
    """What was asked, what was there, and who has the rest; empty for a line without such numbers."""
    lowered = line.lower()
    if (found := _OF_TORCH.search(lowered)) is not None:
        asked, capacity, free = (_bytes(*found.group(i, i + 1)) for i in (1, 3, 5))
        told = [f"asked {size(asked)} where {size(free)} of {size(capacity)} were free"]
        told += _told(_ALLOCATED, lowered, "torch's tensors take {}")
        told += _told(_IN_PIECES, lowered, "torch keeps {} besides, in pieces")
        # In a container torch does not know its own number, and names itself as if it were another.
        if sum(_sum(pattern, lowered) for pattern in (_ALLOCATED, _IN_PIECES, _OF_OTHERS)) <= capacity:
            told += _told(_OF_OTHERS, lowered, "other processes have {}")
        return "; ".join(told)
    if (found := _OF_OLDER_TORCH.search(lowered)) is not None:
        asked, capacity, taken, free, reserved = (_bytes(*found.group(i, i + 1)) for i in range(1, 10, 2))
        told = [f"asked {size(asked)} where {size(free)} of {size(capacity)} were free"]
        told.append(f"torch's tensors take {size(taken)}")
        if reserved > taken:
            told.append(f"torch keeps {size(reserved - taken)} besides, in pieces")
        if (others := capacity - free - reserved) > _CONTEXT_BYTES:
            told.append(f"other processes, and what torch does not count, have {size(others)}")
        return "; ".join(told)
    if (found := _OF_HOSTWARD.search(lowered)) is not None:
        asked, there = _bytes(*found.group(1, 2)), _bytes(found.group(4), found.group(5) or "bytes")
        return f"{size(asked)} of {found.group(3)} memory asked, {size(there)} there: {size(asked - there)} too few"
    return ""


def _told(pattern: re.Pattern[str], line: str, text: str) -> list[str]:
    total = _sum(pattern, line)
    return [text.format(size(total))] if total else []


def _sum(pattern: re.Pattern[str], line: str) -> int:
    return sum(_bytes(number, unit) for number, unit in pattern.findall(line))


def _bytes(number: str, unit: str) -> int:
    return round(float(number.replace(",", "")) * _UNITS[unit])
