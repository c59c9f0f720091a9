"""How fast a machine does each kind of work of a training step, from its hardware file. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hostward.errors import ConfigError
from hostward.hardware import Rates
from hostward.hardware_profile import Hardware, profile_of
from hostward.inventory import MasterKind, state_bytes_per_element
from hostward.planner import host_step_bytes, streamed_share
from hostward.workload import Workload

from .lanes import Queue, Slowdown

# Of forward and backward of decoder models in benchmarks/results (1.7 G at 8 K and 32 K tokens, 8 G at 16 K), as a
# share of one large matrix product's rate and of the device memory's peak rate.
MATMUL_SHARE = 0.877
TRAFFIC_SHARE = 0.81
GROUPED_SHARE = 0.36
"""Rate of experts' matrix products over that of others, the way of tokens to the experts and back included. From how
forward and backward grow with the tokens: Qwen3-30B-A3B, 12 layers on two GPUs, 8 K to 32 K (benchmarks/results,
2026-11-22-scaling-two-8k-fractions.json, 16k and 32k). Rows of one GPU had no part in it; they are 2 % below to 12 %
below.
"""
EXCHANGE_TRAFFIC = 7.0
"""Traffic in device memory that compute loses by one gathering of a layer, or by one reduction of its gradient, over
the layer's bytes. Writing what is gathered and copying it to its place and back are 3 to 4; the rest are kernels that
share the device with those of the exchange. From the steps without offloading of the same runs, of which this is what
does not grow with the tokens; with layers whole one at a time, and on H100s, it gives what was measured within 6 %.
Links between GPUs are taken to be fast enough to hide behind a layer, as NVLink is.
"""
LAYER_S = 150e-6
"""What one pass over a layer takes beyond its operations and its traffic: kernels that do not fill the device."""
COPY_S = 13e-6
"""What a copy takes beyond its bytes."""
HOST_STEP_BYTES = host_step_bytes(state_bytes=state_bytes_per_element(MasterKind.SPLIT), weight_bytes=2)
"""Host memory that the step of the hardware file's rate, of bf16 weights, reads and writes per parameter."""

# What stands in for rates that a hardware file does not know. Each use is said in `Speeds.assumed`.
_MATMUL_OF_PEAK = 0.7
_LINK_OF_PEAK = 0.85
_DUPLEX_OF_LINK = 1.6
_HOST_PARAMETERS_PER_S = 2.0e9
_BUSY_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Speeds:
    """Rates of one GPU and its share of the node, each for work that runs alone; `slowdown` says what sharing costs."""

    flops_per_s: float
    """Of a model's matrix products."""
    traffic_bytes_per_s: float
    """Of its other operations, in device memory."""
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    host_parameters_per_s: float
    slowdown: Slowdown
    assumed: tuple[str, ...]
    """Rates that the hardware file does not know, and what was taken in their place."""

    def copy_s(self, size_bytes: float, rate_bytes_per_s: float) -> float:
        """Seconds of one copy."""
        return COPY_S + size_bytes / rate_bytes_per_s if size_bytes else 0.0


def balanced_share(speeds: Speeds, workload: Workload, ahead: float | None = None) -> float:
    """The share of offloaded state to stream for the shortest step: see `hostward.planner.streamed_share`.

    Args:
        ahead: share of the offloaded state that can be read while backward runs.
    """
    buckets = workload.inventory.buckets
    if not buckets:
        return 0.0

    def duplex(speed: Sequence[float]) -> float:
        return speed[Queue.H2D] * speeds.h2d_bytes_per_s + speed[Queue.D2H] * speeds.d2h_bytes_per_s

    alone, busy = speeds.slowdown[3], speeds.slowdown[7]
    host = speeds.host_parameters_per_s
    rates = Rates(host, duplex(alone), busy[Queue.HOST] * host, duplex(busy), speeds.d2h_bytes_per_s)
    first = buckets[0]
    state_bytes, weight_bytes = state_bytes_per_element(first.kind), first.dtype.itemsize_bytes
    return streamed_share(rates, state_bytes=state_bytes, weight_bytes=weight_bytes, ahead=ahead)


def measured(speeds: Speeds, rates: Rates) -> Speeds:
    """`speeds` with the host and the link as they were measured on the machine, by all of its ranks at once. The
    direction to the device counts as fast as the other.
    """
    link, host = rates.d2h_bytes_per_s, rates.host_parameters_per_s
    slowdown = _slowdown(
        link, link, rates.duplex_bytes_per_s, rates.busy_duplex_bytes_per_s, host, rates.busy_host_parameters_per_s
    )
    return replace(
        speeds,
        h2d_bytes_per_s=link,
        d2h_bytes_per_s=link,
        host_parameters_per_s=host,
        slowdown=slowdown,
        assumed=tuple(name for name in speeds.assumed if name.startswith("gpu.")),
    )


def speeds_of(hardware: Hardware, gpus: int = 1) -> Speeds:
    """Speeds of one of `gpus` GPUs of a machine that all do the same.

    Raises ConfigError for a machine without a GPU, and where not even the vendor's rates of it are known.
    """
    gpu = hardware.gpu
    if gpu is None:
        raise ConfigError(
            f"the hardware file {hardware.name!r} has no GPU",
            why="a plan is about the time and the memory of a GPU",
            fix="name a shipped profile or a file that was measured on a GPU machine: --hardware h200",
        )
    assumed: list[str] = []

    def known(value: float | None, name: str, instead: float | None) -> float:
        if value is not None and value <= 0:
            raise ConfigError(
                f"the hardware file {hardware.name!r} says {name} is {value:g}",
                fix="measure it (hostward bench machine --json FILE), or write null where it is not known",
            )
        if value is not None:
            return value
        if instead is None:
            raise ConfigError(
                f"the hardware file {hardware.name!r} does not say {name}",
                fix="measure it (hostward bench machine --json FILE) or write it into the file, if it is the vendor's",
            )
        assumed.append(f"{name} {instead:.3g}")
        return instead

    peak, link_peak = gpu.bf16_peak_flops_per_s, gpu.link_peak_bytes_per_s
    matmul = known(gpu.bf16_matmul_flops_per_s, "gpu.bf16_matmul_flops_per_s", peak and peak * _MATMUL_OF_PEAK)
    shipped = profile_of(gpu.name)  # a measured file knows no figures of the vendor
    vendors = shipped.gpu.memory_peak_bytes_per_s if shipped is not None and shipped.gpu is not None else None
    memory = known(gpu.memory_peak_bytes_per_s, "gpu.memory_peak_bytes_per_s", vendors)
    largest = hardware.links[-1] if hardware.links else None
    link = link_peak and link_peak * _LINK_OF_PEAK
    h2d = largest.h2d_bytes_per_s if largest else known(None, "link bytes/s in each direction", link)
    d2h = largest.d2h_bytes_per_s if largest else h2d
    duplex = known(hardware.duplex_bytes_per_s, "duplex_bytes_per_s", _DUPLEX_OF_LINK * min(h2d, d2h))
    busy_duplex = known(hardware.busy_duplex_bytes_per_s, "busy_duplex_bytes_per_s", duplex)
    host = known(hardware.host_parameters_per_s, "host_parameters_per_s", _HOST_PARAMETERS_PER_S)
    busy_host = known(hardware.busy_host_parameters_per_s, "busy_host_parameters_per_s", host * _BUSY_SHARE)
    if gpus > 1:
        # All GPUs of a node share its memory: a rank has its part where that is less than it reaches alone.
        node_host = known(hardware.node_host_parameters_per_s, "node_host_parameters_per_s", host * 1.6)
        node_duplex = known(hardware.node_duplex_bytes_per_s, "node_duplex_bytes_per_s", duplex * 2)
        alone_bytes_per_s = busy_host * HOST_STEP_BYTES + busy_duplex
        shared_host, shared_duplex = min(host, node_host / gpus), min(duplex, node_duplex / gpus)
        busy_host *= shared_host / host
        busy_duplex *= shared_duplex / duplex
        # One direction alone is held up by memory as well, at the node's rate for both.
        h2d, d2h = min(h2d, shared_duplex), min(d2h, shared_duplex)
        # What memory gives to host and link of all ranks together is not in the file. Taken for it: the most that one
        # of them alone draws, or all of one kind.
        given = max(node_host * HOST_STEP_BYTES, node_duplex, alone_bytes_per_s) / gpus
        part = min(1.0, given / (busy_host * HOST_STEP_BYTES + busy_duplex))
        busy_host, busy_duplex = busy_host * part, busy_duplex * part
        host, duplex = shared_host, shared_duplex
    return Speeds(
        matmul * (hardware.matmul_share or MATMUL_SHARE),
        memory * (hardware.traffic_share or TRAFFIC_SHARE),
        h2d,
        d2h,
        host,
        _slowdown(h2d, d2h, duplex, busy_duplex, host, busy_host),
        tuple(assumed),
    )


def _slowdown(h2d: float, d2h: float, duplex: float, busy_duplex: float, host: float, busy_host: float) -> Slowdown:
    """Speeds by which lanes run. Beside copies in both directions the host goes at its busy rate; beside one copy it
    loses as much of that as that copy's part of the bytes.
    """
    both = min(1.0, duplex / (h2d + d2h))
    busy_both = min(both, busy_duplex / (h2d + d2h))
    lost = max(0.0, 1.0 - busy_host / host)
    table = []
    for bits in range(8):
        copies, steps = bits & 3, bits & 4
        moved = {0: 0.0, 1: d2h, 2: h2d, 3: busy_duplex if steps else duplex}[copies]
        link = both if copies == 3 else 1.0
        if steps and copies:  # one direction gets no more than both would
            link = busy_both if copies == 3 else min(1.0, busy_duplex / moved)
        table.append((1.0, link, link, 1.0 - lost * min(1.0, moved / busy_duplex)))
    return tuple(table)
