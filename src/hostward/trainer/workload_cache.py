"""What tracing found of models, kept between calls: a model that was traced before is planned without importing torch.

Whatever the answer depends on is in the key: the question, hostward's own source, every installed package with its
version, Python's version, and the variables that torch and transformers read. No torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import hostward
from hostward.errors import ConfigError
from hostward.files.atomic_file import replace_text
from hostward.plan.workload import Workload, from_text, to_text

log = logging.getLogger("hostward")

MOST_FILES = 64
"""Of a folder; the oldest go."""
_TRACING = ("torch", "transformers")
_VARIABLES = ("TORCH", "TRANSFORMERS_", "USE_", "XLA_")


def usual_folder() -> Path | None:
    """`hostward/workloads` in the user's cache folder; None where there is no such user, or where torch or transformers
    may change without a new version: installed from a folder that somebody edits, or imported from elsewhere.
    """
    try:
        if any('"editable": true' in _origin(p) or _shadowed(p) for p in _TRACING):
            return None
        named = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (named if named.is_absolute() else Path.home() / ".cache") / "hostward" / "workloads"
    except (metadata.PackageNotFoundError, RuntimeError):
        return None


def recalled(folder: Path | None, question: Mapping[str, Any], trace: Callable[[], Workload]) -> Workload:
    """What `trace` returns, or returned when it was asked the same question here.

    Args:
        folder: where answers are; None: `trace` is called.
        question: JSON values. `trace` may depend on nothing else but installed software.
    """
    if folder is None:
        return trace()
    path = folder / f"{_key(question)}.json"
    with suppress(OSError, ValueError):
        return from_text(path.read_text(encoding="utf-8"))
    found = trace()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(path, to_text(found), what="trace of a model")
        for old in sorted(folder.glob("*.json"), key=lambda p: p.stat().st_mtime)[:-MOST_FILES]:
            old.unlink(missing_ok=True)
    except (OSError, ValueError, ConfigError) as error:
        # The next call takes as long as this one.
        log.info("what was found of the model is not kept: %s", error)
    return found


def _key(question: Mapping[str, Any]) -> str:
    known = {
        "question": question,
        "source": _source(),
        "packages": sorted(set(_packages())),
        "origins": [_origin(package) for package in _TRACING],
        "python": platform.python_version(),
        "variables": {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)},
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


def _origin(package: str) -> str:
    """Where a package was installed from, down to the commit, if not from an index."""
    return metadata.distribution(package).read_text("direct_url.json") or ""


def _shadowed(package: str) -> bool:
    """Whether Python would import it from another folder than the one it is installed in."""
    found = importlib.util.find_spec(package)
    installed = Path(str(metadata.distribution(package).locate_file(""))).resolve()
    return found is None or found.origin is None or not Path(found.origin).resolve().is_relative_to(installed)


def _source() -> str:
    """A digest of hostward's own modules: tracing changes more often than the version."""
    root = Path(hostward.__file__).parent
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def _packages() -> Iterator[str]:
    """Names with versions, as they stand in the folders that Python imports from."""
    for entry in sys.path:
        with suppress(OSError):
            yield from (name for name in os.listdir(entry or ".") if name.endswith((".dist-info", ".egg-info")))
