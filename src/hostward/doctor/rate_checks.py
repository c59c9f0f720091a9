"""Checks of measured rates against what such a machine should reach."""

from __future__ import annotations

from hostward.doctor.finding import Finding, Severity
from hostward.machine.facts import Facts
from hostward.plan.hardware_profile import Gpu, Hardware, LinkRate, profile_of

WARNING = Severity.WARNING

STEP_BYTES = 26
"""Host memory traffic per parameter of a host step: 16-bit gradient and weight, split master."""
_SHARE = 0.75
"""Of a rate that was measured on such a machine."""
_LINK_SHARE_OF_PEAK = 0.6
_MATMUL_SHARE_OF_PEAK = 0.5
_STEP_SHARE_OF_ROOF = 0.6
_PINNED_S_PER_GIB = 0.4
_AGAIN = "hostward bench machine"


def hardware_file(facts: Facts) -> list[Finding]:
    if facts.hardware_error is not None:
        why = "rates measured earlier cannot be looked at"
        return [Finding(WARNING, facts.hardware_error, why, _AGAIN)]
    hardware = facts.hardware
    if hardware is None:
        return []
    pairs = [("processor", hardware.cpu.model, facts.cpu_model)]
    if hardware.gpu is not None and facts.devices.gpus:
        pairs.append(("GPU", hardware.gpu.name, facts.devices.gpus[0].name))
    return [
        Finding(WARNING, f"the hardware file is of another machine: {kind} {theirs}", f"this one has {mine}", _AGAIN)
        for kind, theirs, mine in pairs
        if theirs is not None and mine is not None and theirs != mine
    ]


def link_rates(facts: Facts) -> list[Finding]:
    hardware = facts.hardware
    if hardware is None or hardware.gpu is None or not hardware.links:
        return []
    expected, basis = _expected_link(hardware.gpu)
    if expected is None:
        return []
    link, found = hardware.links[-1], []
    for direction, rate in (("to", link.h2d_bytes_per_s), ("from", link.d2h_bytes_per_s)):
        if rate < expected:
            what = f"copies {direction} the GPU run at {_gb(rate)}"
            why = f"at least {_gb(expected)} are expected ({basis}); everything that is offloaded takes longer"
            fix = (
                "check PCI Express lanes and speed (nvidia-smi -q -d PCIE, under load), run on the GPU's own NUMA "
                f"node (numactl), end other jobs; then again: {_AGAIN}"
            )
            found.append(Finding(WARNING, what, why, fix))
    return found


def matmul_rate(facts: Facts) -> list[Finding]:
    gpu = None if facts.hardware is None else facts.hardware.gpu
    if gpu is None or gpu.bf16_matmul_flops_per_s is None:
        return []
    shipped = _shipped(gpu)
    if shipped is None:
        return []
    if shipped.bf16_matmul_flops_per_s is not None:
        expected, basis = _SHARE * shipped.bf16_matmul_flops_per_s, "measured on such a GPU"
    elif shipped.bf16_peak_flops_per_s is not None:
        expected, basis = _MATMUL_SHARE_OF_PEAK * shipped.bf16_peak_flops_per_s, "half of the vendor's figure"
    else:
        return []
    if gpu.bf16_matmul_flops_per_s >= expected:
        return []
    what = f"bf16 matrix products run at {gpu.bf16_matmul_flops_per_s / 1e12:.0f} TFLOP/s"
    why = f"at least {expected / 1e12:.0f} are expected ({basis}): clocks are held down, or the GPU is shared"
    return [Finding(WARNING, what, why, f"nvidia-smi -q -d PERFORMANCE,CLOCK tells why; then again: {_AGAIN}")]


def host_rates(facts: Facts) -> list[Finding]:
    hardware = facts.hardware
    if hardware is None:
        return []
    return [*_step_below_roof(hardware), *_memory_below_link(hardware), *_slow_locking(hardware)]


def _step_below_roof(hardware: Hardware) -> list[Finding]:
    step, roof = hardware.host_parameters_per_s, hardware.dram_bytes_per_s
    if step is None or roof is None or step * STEP_BYTES >= _STEP_SHARE_OF_ROOF * roof:
        return []
    what = f"the host steps {step / 1e9:.2f} G parameters/s, {_gb(step * STEP_BYTES)} of host memory"
    why = f"a plain loop moves {_gb(roof)} there: other processes, a scalar kernel, or a quota stand between"
    return [Finding(WARNING, what, why, f"look at the findings on CPUs and instruction sets; then again: {_AGAIN}")]


def _memory_below_link(hardware: Hardware) -> list[Finding]:
    roof, duplex = hardware.dram_bytes_per_s, hardware.duplex_bytes_per_s
    if roof is None or duplex is None or roof >= duplex:
        return []
    what = f"{hardware.threads} threads move {_gb(roof)} of host memory, the link {_gb(duplex)}"
    why = "the host step is slower than the copies: few threads, or memory on another NUMA node"
    return [
        Finding(WARNING, what, why, "give the process more CPUs of the GPU's own node, or stream more of the state")
    ]


def _slow_locking(hardware: Hardware) -> list[Finding]:
    cost = hardware.pinned_s_per_gib
    if cost is None or cost <= _PINNED_S_PER_GIB:
        return []
    what = f"page-locking takes {cost:.2f} s per GiB"
    why = "0.1 to 0.2 are usual: small pages, few threads, or a memory-starved machine; it delays each start"
    fix = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled, and more CPUs"
    return [Finding(WARNING, what, why, fix)]


def _expected_link(gpu: Gpu) -> tuple[float | None, str]:
    """The least rate of large copies in one direction, and what that rests on."""
    shipped = profile_of(gpu.name)
    if shipped is None or shipped.gpu is None:
        return None, ""
    if shipped.links:
        return _SHARE * _slower(shipped.links[-1]), "measured on such a machine"
    peak = shipped.gpu.link_peak_bytes_per_s
    return (None, "") if peak is None else (_LINK_SHARE_OF_PEAK * peak, f"its link carries {_gb(peak)}")


def _shipped(gpu: Gpu) -> Gpu | None:
    shipped = profile_of(gpu.name)
    return None if shipped is None else shipped.gpu


def _slower(link: LinkRate) -> float:
    return min(link.h2d_bytes_per_s, link.d2h_bytes_per_s)


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s"


RATE_CHECKS = (hardware_file, link_rates, matmul_rate, host_rates)
