"""`hostward doctor`: what of this machine, process and environment gets in the way, and what a log complains of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """ERROR: hostward, or a part of it, does not work. WARNING: slow, or about to fail. NOTE: good to know."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing: the fact, the reason why it matters, and the command or option that mends it."""

    severity: Severity
    what: str
    why: str
    fix: str
