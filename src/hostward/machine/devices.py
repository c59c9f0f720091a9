"""What torch and the CUDA driver say about the GPUs."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

from hostward.errors import HostwardError
from hostward.machine.facts import NO_DEVICES, DeviceFacts, GpuFacts, read_pci

PROBE_BYTES = 64 << 20
"""Page-locked once, to see that it works."""


def read_devices(root: Path = Path("/")) -> DeviceFacts:
    """Ask torch, and page-lock a little host memory where there is a GPU. Never raises: what fails is a fact."""
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
        host_blocks(device, 1, None, [PROBE_BYTES], torch.uint8, "probe of page-locked memory", True)
    except (HostwardError, RuntimeError) as error:
        return str(error)
    return None
