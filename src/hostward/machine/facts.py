"""Gather once what can be read about this machine and this process without measuring. Loads no torch."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import resource
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hostward.core.full_device import ALLOCATOR_VARIABLES
from hostward.core.host_limits import HostMemory, host_memory
from hostward.errors import HostwardError, NativeError
from hostward.kernels.cpu.affinity import CpuFacts, cpu_list, read_cpu_facts
from hostward.kernels.cpu.library import Library, load
from hostward.plan.hardware_profile import Hardware

PACKAGES = ("torch", "numpy", "triton", "transformers", "safetensors")
VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "LOCAL_WORLD_SIZE",
    "OMP_NUM_THREADS",
    *ALLOCATOR_VARIABLES,
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
)
"""Environment variables that findings are about."""
LOCK_LIMIT_WHY = "memory locked by the NVIDIA driver is normally not counted; look here first if pinning fails"
LOCK_LIMIT_FIX = "ulimit -l unlimited, or docker --ulimit memlock=-1"
SLOW_HALVES_WHY = "torch multiplies 16-bit matrices with AVX-512 or newer, and in plain loops without it"
SLOW_HALVES_FIX = "model.params_dtype=fp32"
_NVIDIA, _DISPLAY_CLASS = "0x10de", "0x03"


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """Describe a GPU that torch sees.

    `numa_node` is -1 where the system has none for it, None where the system does not report one.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    free_bytes: int | None
    """Read for the first GPU only: reading makes a context."""
    pci_address: str
    numa_node: int | None
    link_width: int | None
    link_max_width: int | None
    """PCI Express lanes in use, and lanes that the GPU has."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Hold what torch and the driver report."""

    cuda_build: str | None
    """CUDA version that torch was built for; None: a build without CUDA, or no torch."""
    error: str | None
    """Reason why torch sees no GPU, or cannot be imported."""
    gpus: tuple[GpuFacts, ...]
    pinned_error: str | None
    """Reason why a small block of host memory could not be pinned."""


NO_DEVICES = DeviceFacts(None, None, (), None)


@dataclass(frozen=True, slots=True)
class Facts:
    """Hold everything that the checks of `hostward doctor` read, with sizes in bytes; None: unknown, or no limit."""

    cpu_model: str | None
    processor_flags: frozenset[str]
    cpu: CpuFacts
    machine_cpus: int
    node_cpus: Mapping[int, frozenset[int]]
    """CPUs by NUMA node, for nodes that have some."""
    numa_nodes: int
    affinity: frozenset[int]
    """CPUs that this process may run on."""
    instruction_sets: tuple[str, ...]
    native_error: str | None
    native_fix: str
    memory: HostMemory
    swap_used_bytes: int
    locked_limit_bytes: int | None
    address_limit_bytes: int | None
    shared_memory_bytes: int | None
    transparent_huge_pages: str | None
    wsl: bool
    nvidia_addresses: tuple[str, ...]
    """PCI addresses of NVIDIA GPUs in this machine, hidden ones included."""
    environ: Mapping[str, str]
    """Set variables among `VARIABLES`, by name."""
    python: str
    packages: Mapping[str, str]
    triton_wanted: str | None
    """Triton version that the installed torch requires."""
    devices: DeviceFacts
    hardware: Hardware | None
    """Rates measured earlier."""
    hardware_error: str | None


def gather(
    environ: Mapping[str, str],
    devices: DeviceFacts,
    *,
    root: Path = Path("/"),
    native: Callable[[], Library] = load,
    hardware: Hardware | None = None,
    hardware_error: str | None = None,
) -> Facts:
    """Read the facts of this process; `proc`, `sys` and `dev` are looked up below `root`."""
    try:
        isas, native_error, native_fix = tuple(i.name.lower() for i in native().supported_isas()), None, ""
    except NativeError as error:
        isas, native_error, native_fix = (), "; ".join(filter(None, (error.what, error.why))), error.fix
    node_cpus, numa_nodes = _nodes(root)
    return Facts(
        cpu_model=cpu_model(root),
        processor_flags=processor_flags(root),
        cpu=read_cpu_facts(root),
        machine_cpus=os.cpu_count() or 1,
        node_cpus=node_cpus,
        numa_nodes=numa_nodes,
        affinity=frozenset(os.sched_getaffinity(0)),
        instruction_sets=isas,
        native_error=native_error,
        native_fix=native_fix,
        memory=host_memory(root),
        swap_used_bytes=_swap_used_bytes(root),
        locked_limit_bytes=lock_limit_bytes(),
        address_limit_bytes=_limit(resource.RLIMIT_AS),
        shared_memory_bytes=_file_system_bytes(root / "dev/shm"),
        transparent_huge_pages=_chosen(_read(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        wsl="microsoft" in _read(root / "proc/sys/kernel/osrelease").lower() or (root / "dev/dxg").exists(),
        nvidia_addresses=_nvidia_addresses(root),
        environ={name: environ[name] for name in VARIABLES if name in environ},
        python=platform.python_version(),
        packages=_versions(),
        triton_wanted=_triton_wanted(),
        devices=devices,
        hardware=hardware,
        hardware_error=hardware_error,
    )


def cpu_model(root: Path = Path("/")) -> str | None:
    """Return the name and numbers of the processor as the kernel reports them."""
    fields = _processor(root)
    name = fields.get("model name") or fields.get("CPU part")
    family, model = fields.get("cpu family"), fields.get("model")
    return f"{name} (family {family} model {model})" if name and family and model else name


def processor_flags(root: Path = Path("/")) -> frozenset[str]:
    """Return the processor's features by the kernel's names; empty where it reports none."""
    fields = _processor(root)
    return frozenset((fields.get("flags") or fields.get("Features") or "").split())


def has_slow_halves(flags: frozenset[str]) -> bool:
    """Return whether torch multiplies 16-bit matrices by its own loops: oneDNN does it on x86 from AVX-512 on."""
    return "fpu" in flags and "avx512f" not in flags


def read_pci(pci_address: str, root: Path = Path("/")) -> tuple[int | None, int | None, int | None]:
    """Return (NUMA node, PCI Express lanes in use, lanes of the device) of the device at `pci_address`."""
    folder = root / "sys/bus/pci/devices" / pci_address.lower()
    node, width, max_width = (
        _number(_read(folder / name)) for name in ("numa_node", "current_link_width", "max_link_width")
    )
    return node, width, max_width


def _processor(root: Path) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, separator, value = line.partition(":")
        if not separator:
            break  # the first processor represents all
        fields[key.strip()] = value.strip()
    return fields


def _nodes(root: Path) -> tuple[dict[int, frozenset[int]], int]:
    folders = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    cpus = {int(f.name[4:]): cpu_list(_read(f / "cpulist")) for f in folders if f.name[4:].isdecimal()}
    return {node: found for node, found in sorted(cpus.items()) if found}, len(folders)


def _swap_used_bytes(root: Path) -> int:
    fields = dict(re.findall(r"^(Swap\w+):\s*(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE))
    return max(0, int(fields.get("SwapTotal", "0")) - int(fields.get("SwapFree", "0"))) * 1024


def _nvidia_addresses(root: Path) -> tuple[str, ...]:
    return tuple(
        sorted(
            folder.name
            for folder in (root / "sys/bus/pci/devices").glob("*")
            if _read(folder / "vendor").strip() == _NVIDIA and _read(folder / "class").startswith(_DISPLAY_CLASS)
        )
    )


def lock_limit_bytes() -> int | None:
    """Return the bytes of pages that this process may lock; None: no limit."""
    return _limit(resource.RLIMIT_MEMLOCK)


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _file_system_bytes(path: Path) -> int | None:
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_frsize * status.f_blocks


def _chosen(text: str) -> str | None:
    """Return the word in brackets."""
    return text.partition("[")[2].partition("]")[0] or None


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _triton_wanted() -> str | None:
    try:
        wanted = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return None
    matches = (re.match(r"triton\s*\(?==\s*([\w.+!-]+)", line) for line in wanted)
    return next((match[1] for match in matches if match), None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d{1,9}\s*", text) else None


# Facts about the GPUs from torch and the CUDA driver.

PROBE_BYTES = 64 << 20
"""Bytes pinned once, to see that pinning works."""


def read_devices(root: Path = Path("/")) -> DeviceFacts:
    """Ask torch, and pin a little host memory where there is a GPU. Never raises: a failure is a fact."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library that torch needs cannot be loaded
        return DeviceFacts(None, f"torch cannot be imported: {error}", (), None)
    if torch.version.cuda is None:
        return NO_DEVICES
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        if not torch.cuda.is_available():
            return DeviceFacts(torch.version.cuda, _reason(heard), (), None)
    gpus = tuple(_gpu(index, root) for index in range(torch.cuda.device_count()))
    try:
        free_bytes, _ = torch.cuda.mem_get_info(0)  # makes a context
    except RuntimeError as error:
        return DeviceFacts(torch.version.cuda, f"GPU 0 cannot be used: {_first_line(error)}", gpus, None)
    gpus = (dataclasses.replace(gpus[0], free_bytes=free_bytes), *gpus[1:])
    return DeviceFacts(torch.version.cuda, None, gpus, _pinned_error())


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _reason(heard: list[warnings.WarningMessage]) -> str:
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return _first_line(error)
    return str(heard[-1].message).splitlines()[0] if heard else "torch.cuda.is_available() is false"


def _gpu(index: int, root: Path) -> GpuFacts:
    import torch

    from hostward.runtime.cuda.driver import pci_address

    properties = torch.cuda.get_device_properties(index)
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        address = pci_address(index)
    except (HostwardError, RuntimeError):
        address = "unknown"
    node, width, max_width = read_pci(address, root)
    return GpuFacts(
        name=properties.name,
        capability=(properties.major, properties.minor),
        memory_bytes=properties.total_memory,
        free_bytes=None,
        pci_address=address,
        numa_node=node,
        link_width=width,
        link_max_width=max_width,
    )


def _pinned_error() -> str | None:
    import torch

    from hostward.runtime.cuda.memory import host_blocks

    try:
        device = torch.device("cuda", torch.cuda.current_device())
        host_blocks(device, 1, None, [PROBE_BYTES], torch.uint8, "probe of pinned memory", True)
    except (HostwardError, RuntimeError) as error:
        return str(error)
    return None
