"""Measure this machine for `hostward bench machine`."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import torch

from hostward.core.host_limits import Rates
from hostward.core.units import GIB, MIB
from hostward.machine.facts import NO_DEVICES, Facts, gather
from hostward.plan.hardware_profile import VERSION, Cpu, Gpu, Hardware, Limits, LinkRate
from hostward.runtime.backend import Backend, Tier
from hostward.runtime.backend_choice import backend_for
from hostward.runtime.calibrate import (
    RMW_BYTES,
    RMW_ELEMENTS,
    Links,
    ReadModifyWrite,
    measure_host_step,
    measure_rates,
    recorded,
)
from hostward.runtime.host_tasks import own_threads

if TYPE_CHECKING:
    from rich.table import Table

_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class _Effort:
    copy_bytes: tuple[int, ...]
    span_bytes: int
    """Span that is copied repeatedly, in each direction."""
    copied_bytes: int
    """Bytes per direction, for one rate."""
    elements: int
    """Elements used for the memory bandwidth limit and the CPU optimizer step."""
    matmuls: int


FULL = _Effort(tuple(n * MIB for n in (1, 4, 16, 64, 256)), GIB, 8 * GIB, RMW_ELEMENTS, 40)
QUICK = _Effort((MIB, 16 * MIB, 64 * MIB), 256 * MIB, GIB, RMW_ELEMENTS // 4, 10)
_MATMUL_SIZE = 8192


def measure_machine(
    *, quick: bool = False, threads: int | None = None, progress: Callable[[str], None] | None = None
) -> Hardware:
    """Measure host memory and the CPU optimizer step, and the first GPU where there is one; all memory is released.

    Args:
        quick: fewer sizes and rounds.
        threads: threads of the CPU optimizer step; None: as many as training would take.
        progress: called with the name of each measurement.

    Raises:
        MemoryLimitError: less host memory (2.4 GB; 1 GB without a GPU) or device memory (2.3 GB) is left than it
            takes.
        NativeError: the native library is missing.
    """
    effort = QUICK if quick else FULL
    say = progress or (lambda stage: None)
    on_gpu = torch.cuda.is_available()
    threads = own_threads() if threads is None else threads
    backend = backend_for(torch.device("cuda" if on_gpu else "cpu"), threads)
    say("host memory")
    elements_per_s, _ = ReadModifyWrite(threads, effort.elements).fastest(threads)
    rates: Rates | None = None
    pinned_s_per_gib: float | None = None
    links: tuple[LinkRate, ...] = ()
    if on_gpu:
        say("CPU optimizer step and copies, alone and together")
        rates = measure_rates(backend)
        host_parameters_per_s = rates.host_parameters_per_s
        say("pinning")
        pinned_s_per_gib = _pinned_s_per_gib(backend)
        say("PCIe / NVLink")
        links = _link_rates(backend, effort)
        say("matrix products")
    else:
        say("CPU optimizer step")
        host_parameters_per_s = measure_host_step(backend, effort.elements)
    facts = gather(os.environ, NO_DEVICES)
    gpu = _gpu(backend.device, effort) if on_gpu else None
    return Hardware(
        version=VERSION,
        name=" + ".join(filter(None, (facts.cpu_model, None if gpu is None else gpu.name))) or "unknown",
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        threads=threads,
        gpu=gpu,
        gpu_count=torch.cuda.device_count() if on_gpu else 0,
        cpu=_cpu(facts),
        limits=_limits(facts),
        links=links,
        pinned_s_per_gib=pinned_s_per_gib,
        dram_bytes_per_s=elements_per_s * RMW_BYTES,
        host_parameters_per_s=host_parameters_per_s,
        duplex_bytes_per_s=None if rates is None else rates.duplex_bytes_per_s,
        busy_host_parameters_per_s=None if rates is None else rates.busy_host_parameters_per_s,
        busy_duplex_bytes_per_s=None if rates is None else rates.busy_duplex_bytes_per_s,
        node_host_parameters_per_s=None,
        node_duplex_bytes_per_s=None,
        sources={},
    )


def _cpu(facts: Facts) -> Cpu:
    return Cpu(
        facts.cpu_model, facts.cpu.affinity_cpus, facts.cpu.quota_cpus, facts.numa_nodes or None, facts.instruction_sets
    )


def _limits(facts: Facts) -> Limits:
    return Limits(
        facts.memory.total_bytes,
        facts.memory.limited_by,
        facts.locked_limit_bytes,
        facts.address_limit_bytes,
        facts.shared_memory_bytes,
    )


def _pinned_s_per_gib(backend: Backend) -> float:
    seconds = []
    for _ in range(_ROUNDS):
        started_s = time.perf_counter()
        block = backend.allocate(Tier.HOST, [GIB], torch.uint8, "cost of pinning", pinned=True)
        seconds.append(time.perf_counter() - started_s)
        backend.free(block)
    return statistics.median(seconds)


def _link_rates(backend: Backend, effort: _Effort) -> tuple[LinkRate, ...]:
    links = Links(backend, effort.span_bytes)
    try:
        links.rate(["h2d", "d2h"], count=2, rounds=1)
        found = []
        for copy_bytes in effort.copy_bytes:
            count = max(4, min(1000, effort.copied_bytes // copy_bytes))
            h2d, d2h, each = (
                links.rate(directions, count, copy_bytes) for directions in (["h2d"], ["d2h"], ["h2d", "d2h"])
            )
            found.append(LinkRate(copy_bytes, h2d, d2h, 2 * each))
        return tuple(found)
    finally:
        backend.free(links.host)


def _gpu(device: torch.device, effort: _Effort) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    rate = _matmul_flops_per_s(device, effort.matmuls)
    return Gpu(properties.name, properties.total_memory, rate, None, None, None)


def _matmul_flops_per_s(device: torch.device, count: int) -> float:
    """Return the median rate of three runs of `count` bf16 products of square matrices."""
    with torch.cuda.device(device), torch.no_grad():
        a, b = (torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, device=device).to(torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        stream = torch.cuda.current_stream(device)
        rates = []
        for _ in range(_ROUNDS + 1):
            start = recorded(stream)
            for _ in range(count):
                torch.mm(a, b, out=out)
            end = recorded(stream)
            end.synchronize()
            rates.append(2 * _MATMUL_SIZE**3 * count / (float(start.elapsed_time(end)) / 1e3))
        return statistics.median(rates[1:])


def render(hardware: Hardware) -> Table:
    """Render a table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=hardware.name)
    table.add_column("what")
    table.add_column("rate", justify="right")
    rows = [(f"copies, {link.copy_bytes // MIB} MiB, H2D | D2H | both", _link_text(link)) for link in hardware.links]
    gpu = hardware.gpu
    rows += [
        ("pinning", _text(hardware.pinned_s_per_gib, 1, "s/GiB")),
        (f"host memory, threads: {hardware.threads}", _text(hardware.dram_bytes_per_s, 1e9, "GB/s")),
        ("CPU optimizer step", _text(hardware.host_parameters_per_s, 1e9, "B parameters/s")),
        ("CPU optimizer step during copies", _text(hardware.busy_host_parameters_per_s, 1e9, "B parameters/s")),
        ("copies during the CPU optimizer step", _text(hardware.busy_duplex_bytes_per_s, 1e9, "GB/s")),
        ("bf16 matrix products", _text(None if gpu is None else gpu.bf16_matmul_flops_per_s, 1e12, "TFLOP/s")),
    ]
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table


def _text(rate: float | None, unit: float, name: str) -> str:
    return "-" if rate is None else f"{rate / unit:,.2f} {name}"


def _link_text(link: LinkRate) -> str:
    both = "-" if link.duplex_bytes_per_s is None else f"{link.duplex_bytes_per_s / 1e9:.1f}"
    return f"{link.h2d_bytes_per_s / 1e9:.1f} | {link.d2h_bytes_per_s / 1e9:.1f} | {both} GB/s"
