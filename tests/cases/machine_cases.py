"""A machine with nothing to fix, and parts to spoil."""

from __future__ import annotations

import dataclasses
from typing import Any

from hostward.core.host_limits import HostMemory
from hostward.kernels.cpu.affinity import CpuFacts
from hostward.machine.facts import DeviceFacts, Facts, GpuFacts

GIB = 1 << 30

H200 = GpuFacts("NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB, "0000:1b:00.0", 0, 16, 16)
ONE_GPU = DeviceFacts("13.0", None, (H200,), None)
SOUND = Facts(
    cpu_model="Xeon of a test",
    processor_flags=frozenset({"avx2", "avx512f"}),
    cpu=CpuFacts(16, None),
    machine_cpus=16,
    node_cpus={0: frozenset(range(16))},
    numa_nodes=1,
    affinity=frozenset(range(16)),
    instruction_sets=("scalar", "avx2", "avx512"),
    native_error=None,
    native_fix="",
    memory=HostMemory(128 * GIB, 120 * GIB, "the machine"),
    swap_used_bytes=0,
    locked_limit_bytes=None,
    address_limit_bytes=None,
    shared_memory_bytes=64 * GIB,
    transparent_huge_pages="madvise",
    wsl=False,
    nvidia_addresses=("0000:1b:00.0",),
    environ={},
    python="3.12.3",
    packages={"torch": "2.11.0", "numpy": "2.5.2", "triton": "3.6.0", "transformers": "5.17.0", "safetensors": "0.8.0"},
    triton_wanted="3.6.0",
    devices=ONE_GPU,
    hardware=None,
    hardware_error=None,
)


def sound(**changes: Any) -> Facts:
    """The machine with nothing to fix, but for `changes`."""
    return dataclasses.replace(SOUND, **changes)


def with_gpu(**changes: Any) -> Facts:
    """The same with another GPU."""
    return sound(devices=dataclasses.replace(ONE_GPU, gpus=(dataclasses.replace(H200, **changes),)))
