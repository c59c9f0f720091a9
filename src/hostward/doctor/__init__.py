"""Run `hostward doctor`: find problems of this machine, process and environment, and known failures in logs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """Rates a finding.

    ERROR: hostward, or a part of it, does not work. WARNING: slow, or about to fail. NOTE: good to know.
    """

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """Holds one finding: the fact, the reason why it matters, and the command or option that fixes it."""

    severity: Severity
    what: str
    why: str
    fix: str
