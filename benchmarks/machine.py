"""Describes the machine and the software of a measurement, without names of hosts or users."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hostward.kernels.cpu.affinity import read_cpu_facts
from hostward.kernels.cpu.library import load
from hostward.machine.facts import cpu_model

PACKAGES = ("hostward", "torch", "triton", "numpy", "transformers", "safetensors", "megatron-core")


def describe() -> dict[str, Any]:
    """Facts for the head of a result file: date (UTC), command, processor, memory, devices, versions.

    Sizes are in bytes; a fact that this machine does not tell is None.
    """
    facts = read_cpu_facts()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *_relative_arguments()]),
        "cpu_model": cpu_model(),
        "cpus": facts.affinity_cpus,
        "cpu_quota": facts.quota_cpus,
        "load_average_1min": round(os.getloadavg()[0], 2),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        "instruction_sets": [isa.name.lower() for isa in load().supported_isas()],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "transparent_hugepages": _bracketed("/sys/kernel/mm/transparent_hugepage/enabled"),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "cuda_runtime": torch.version.cuda,
        "devices": [_device(index) for index in range(torch.cuda.device_count())],
    }


def _device(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
    }


def _relative_arguments() -> list[str]:
    script = Path(sys.argv[0])
    return [str(Path(*script.parts[-2:])), *sys.argv[1:]]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def _bracketed(path: str) -> str | None:
    _, _, rest = _text(path).partition("[")
    return rest.partition("]")[0] or None
