"""Check the machine, its software and its measured rates.

Each function takes the facts and returns its findings.
"""

from __future__ import annotations

import re
from dataclasses import replace

from hostward.core.full_device import ALLOCATOR_VARIABLES
from hostward.core.units import GIB, MIB
from hostward.doctor import Finding, Severity
from hostward.errors import install
from hostward.kernels.cpu.affinity import LAUNCH_THREADS_PER_RANK, default_threads
from hostward.machine.facts import (
    LOCK_LIMIT_FIX,
    LOCK_LIMIT_WHY,
    SLOW_HALVES_FIX,
    SLOW_HALVES_WHY,
    Facts,
    has_slow_halves,
)
from hostward.plan.hardware_profile import Gpu, Hardware, LinkRate, profile_of

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE
_FEW_THREADS = 4
_SMALL_SHM_BYTES = GIB
_SMALL_MEMORY_BYTES = 4 * GIB
_SWAPPED_BYTES = GIB
_TAKEN_SHARE = 0.05


def gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:,.1f} GiB" if size_bytes >= GIB // 10 else f"{size_bytes / MIB:,.0f} MiB"


def native_library(facts: Facts) -> list[Finding]:
    if facts.native_error is None:
        return []
    why = "the CPU optimizer step, and pinned slabs, are in it"
    return [Finding(ERROR, facts.native_error, why, facts.native_fix)]


def instruction_set(facts: Facts) -> list[Finding]:
    if not facts.instruction_sets:
        return []
    best = facts.instruction_sets[-1]
    if best == "scalar":
        why = "no vector kernel of the native library runs here: CPU optimizer steps are several times slower"
        fix = (
            "take a machine with AVX2, AVX-512 or NEON, or step on the device: optimizer.offload_optimizer_states=true"
        )
        return [Finding(WARNING, "the CPU optimizer step uses scalar instructions", why, fix)]
    if best == "avx2" and "avx512f" in facts.processor_flags:
        why = "the processor has AVX-512, but the native library was built without it, or lacks a part that it needs"
        return [
            Finding(NOTE, "the CPU optimizer step uses AVX2", why, "build the library with a newer g++: pip install .")
        ]
    return []


def threads(facts: Facts) -> list[Finding]:
    found = []
    number = default_threads(facts.environ, facts.cpu)
    ranks = facts.environ.get("LOCAL_WORLD_SIZE", "1")
    quota = facts.cpu.quota_cpus
    if number < _FEW_THREADS:
        per = "" if ranks == "1" else f", shared by {ranks} ranks"
        granted = f"{facts.cpu.affinity_cpus} CPUs" + (f", a quota of {quota:g}" if quota is not None else "") + per
        found.append(
            Finding(
                WARNING,
                f"the CPU optimizer step gets {number} thread{'s' * (number > 1)}",
                f"{granted}, less {LAUNCH_THREADS_PER_RANK} for Python and autograd, or 1; a GPU wants 8 or more",
                "give the process more CPUs (docker --cpus, Slurm --cpus-per-task), offload less, or stream "
                "(optimizer.offload_mix=auto)",
            )
        )
    if quota is not None and quota < facts.cpu.affinity_cpus:
        why = "more threads than that are stopped by the scheduler in turn; hostward counts by the quota"
        what = f"the container may use {quota:g} of {facts.cpu.affinity_cpus} CPUs"
        found.append(Finding(NOTE, what, why, "raise the quota: docker --cpus, or resources.limits.cpu of a pod"))
    if facts.cpu.affinity_cpus < facts.machine_cpus:
        what = f"this process is bound to {facts.cpu.affinity_cpus} of {facts.machine_cpus} CPUs"
        why = "an affinity mask or cpuset; where a launcher binds each rank, the ranks should not be divided by again"
        fix = "nothing where it is meant; in a custom training loop with bound ranks hostward.AdamW(host_threads=N)"
        found.append(Finding(NOTE, what, why, fix))
    return found


def numa(facts: Facts) -> list[Finding]:
    if facts.numa_nodes < 2:
        return []
    found = []
    for index, gpu in enumerate(facts.devices.gpus):
        label = f"GPU {index} ({gpu.pci_address})"
        if gpu.numa_node is None or gpu.numa_node < 0:
            why = f"there are {facts.numa_nodes} nodes, and memory on the wrong one halves the rate of copies"
            fix = (
                "nvidia-smi topo -m tells the node; start with: numactl --cpunodebind=NODE --membind=NODE hostward ..."
            )
            found.append(Finding(WARNING, f"{label}: the system does not say its NUMA node", why, fix))
            continue
        own = facts.node_cpus.get(gpu.numa_node, frozenset())
        fix = f"start with: numactl --cpunodebind={gpu.numa_node} hostward ..."
        if not own & facts.affinity:
            why = "its pages come from that node, and every thread of the host step reaches them over the socket link"
            what = f"{label} is on NUMA node {gpu.numa_node}, this process runs elsewhere"
            found.append(Finding(WARNING, what, why, fix))
        elif index == 0 and not facts.affinity <= own:
            why = "pages come from the node of the GPU, but only ranks of `hostward train` bind their threads to it"
            what = f"{label} is on NUMA node {gpu.numa_node}, this process may run on others as well"
            found.append(Finding(NOTE, what, why, fix))
    return found


def memory(facts: Facts) -> list[Finding]:
    memory = facts.memory
    found = []
    if memory.available_bytes < _SMALL_MEMORY_BYTES:
        what = f"{gib(memory.available_bytes)} of host memory left of {gib(memory.total_bytes)}, by {memory.limited_by}"
        why = (
            "state, gradients and masters take 10 to 14 bytes per parameter; beyond the limit the kernel sends signal 9"
        )
        fix = "end other processes, or raise the limit: docker --memory, resources.limits.memory of a pod, Slurm --mem"
        found.append(Finding(WARNING, what, why, fix))
    elif memory.limited_by != "the machine":
        what = f"host memory is limited to {gib(memory.total_bytes)} by {memory.limited_by}"
        why = f"{gib(memory.available_bytes)} are left; tools that look at the machine's memory see more than there is"
        fix = (
            "nothing; hostward plans by this limit. To raise it: docker --memory, resources.limits.memory, Slurm --mem"
        )
        found.append(Finding(NOTE, what, why, fix))
    if facts.swap_used_bytes >= _SWAPPED_BYTES:
        what = f"{gib(facts.swap_used_bytes)} are swapped out"
        why = "a step that touches swapped state waits for the disk"
        found.append(Finding(WARNING, what, why, "end what takes the memory, then: sudo swapoff -a && sudo swapon -a"))
    return found


def limits(facts: Facts) -> list[Finding]:
    found = []
    locked, space = facts.locked_limit_bytes, facts.address_limit_bytes
    if locked is not None and facts.devices.gpus:
        found.append(Finding(NOTE, f"ulimit -l is {gib(locked)}", LOCK_LIMIT_WHY, LOCK_LIMIT_FIX))
    if space is not None:
        why = "CUDA reserves far more addresses than it uses memory, and every slab needs its own"
        found.append(Finding(WARNING, f"ulimit -v is {gib(space)}", why, "ulimit -v unlimited"))
    shm = facts.shared_memory_bytes
    if shm is None or shm < _SMALL_SHM_BYTES:
        what = "/dev/shm is missing" if shm is None else f"/dev/shm has {gib(shm)}"
        why = "hostward needs none, but data loader workers and NCCL do: bus errors, exit code -7"
        found.append(
            Finding(WARNING, what, why, "docker --shm-size=8g (or --ipc=host); of a pod: an emptyDir in memory")
        )
    if facts.transparent_huge_pages == "never":
        why = "the host step over small pages is slower, and pinning them takes longer"
        fix = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        found.append(Finding(WARNING, "transparent huge pages are off", why, fix))
    return found


def page_locking(facts: Facts) -> list[Finding]:
    found = []
    if facts.devices.pinned_error is not None:
        what = f"host memory could not be pinned: {facts.devices.pinned_error.splitlines()[0]}"
        why = "\n".join(facts.devices.pinned_error.splitlines()[1:]).strip() or "the driver refused 64 MiB"
        fix = "ulimit -l unlimited; under WSL raise memory in .wslconfig; end processes that hold pinned memory"
        found.append(Finding(ERROR, what, why, fix))
    if facts.wsl and (facts.devices.gpus or facts.devices.cuda_build):
        why = "Windows allows little pinned memory, often 1 to 2 GiB; beyond it the driver says 'out of memory'"
        fix = (
            "raise memory= in .wslconfig, train on Linux itself, or pin less: state that the host steps is not, "
            "nor are gradients and weights with optimizer.pin_cpu_grads=False and optimizer.pin_cpu_params=False"
        )
        found.append(Finding(WARNING, "this is WSL", why, fix))
    return found


def gpus(facts: Facts) -> list[Finding]:
    found = []
    for index, gpu in enumerate(facts.devices.gpus):
        label = f"GPU {index} ({gpu.name})"
        if gpu.capability < (8, 0):
            what = f"{label} has compute capability {gpu.capability[0]}.{gpu.capability[1]}"
            why = "bf16 in hardware begins with 8.0; below it bf16 models are slow or do not run"
            found.append(Finding(WARNING, what, why, "train in fp16 or fp32, or take a newer GPU"))
        if gpu.free_bytes is not None and gpu.memory_bytes - gpu.free_bytes > _TAKEN_SHARE * gpu.memory_bytes + GIB:
            what = f"{gib(gpu.memory_bytes - gpu.free_bytes)} of {label} are taken by other processes"
            why = "what they hold is missing in this run, and may change during it"
            found.append(Finding(WARNING, what, why, "nvidia-smi shows them; end them, or choose another GPU"))
        width, lanes = gpu.link_width, gpu.link_max_width
        if width and lanes and width < lanes <= 32:
            what = f"{label} uses {width} of {lanes} PCI Express lanes"
            why = "copies run at that share of their rate"
            found.append(Finding(WARNING, what, why, "seat the card in a full slot; check bifurcation in the firmware"))
    return found


def halves(facts: Facts) -> list[Finding]:
    if facts.devices.gpus or not has_slow_halves(facts.processor_flags):
        return []
    return [Finding(NOTE, "models in bf16 or fp16 compute slowly on this CPU", SLOW_HALVES_WHY, SLOW_HALVES_FIX)]


_MACHINE_CHECKS = (native_library, instruction_set, threads, numa, memory, limits, page_locking, gpus, halves)


# Checks of measured rates against what such a machine should reach.

STEP_BYTES = 26
"""Host memory traffic per parameter of a host step: 16-bit gradient and weight, split master."""
_SHARE = 0.75
"""Share expected of a rate that was measured on such a machine."""
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
    what = f"pinning takes {cost:.2f} s per GiB"
    why = "0.1 to 0.2 are usual: small pages, few threads, or a memory-starved machine; it delays each start"
    fix = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled, and more CPUs"
    return [Finding(WARNING, what, why, fix)]


def _expected_link(gpu: Gpu) -> tuple[float | None, str]:
    """Return the least rate expected of large copies in one direction, and its basis."""
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


def rates(facts: Facts) -> list[Finding]:
    """Return what is wrong with measured rates, each with the time of the measurement: the machine was perhaps busy."""
    found = [*link_rates(facts), *matmul_rate(facts), *host_rates(facts)]
    if facts.hardware is None or facts.hardware.measured_at is None:
        return found
    return [replace(each, what=f"{each.what} (measured at {facts.hardware.measured_at})") for each in found]


_RATE_CHECKS = (hardware_file, rates)


# Checks of software versions and of environment variables.

MINIMUM = {"python": (3, 11), "torch": (2, 11), "numpy": (1, 26), "transformers": (5, 17), "safetensors": (0, 4)}
"""Minimum versions, as in pyproject.toml."""
_NEEDED = ("torch", "numpy")

ALLOCATOR_OPTIONS = frozenset(
    {
        "backend",
        "expandable_segments",
        "garbage_collection_threshold",
        "graph_capture_record_stream_reuse",
        "large_segment_size_mb",
        "max_non_split_rounding_mb",
        "max_split_size_mb",
        "per_process_memory_fraction",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "release_lock_on_cudamalloc",
        "roundup_power2_divisions",
        "throw_on_cudamalloc_oom",
    }
)
"""Options that torch 2.11 to 2.13 read."""


def versions(facts: Facts) -> list[Finding]:
    found = []
    installed = {"python": facts.python, **facts.packages}
    for name, minimum in MINIMUM.items():
        least = ".".join(map(str, minimum))
        needed = name in (*_NEEDED, "python")
        use = "hostward needs it" if needed else "hostward train and hostward verify need it; the optimizer does not"
        version = installed.get(name)
        if version is None:
            command = f"pip install '{name}>={least}'" if needed else install("train")
            found.append(Finding(ERROR if needed else NOTE, f"{name} is not installed", use, command))
        elif (numbers := _numbers(version)) and numbers < minimum:
            what = f"{name} is {version}, at least {least} is needed"
            fix = "make an environment with a newer Python" if name == "python" else f"pip install '{name}>={least}'"
            found.append(Finding(ERROR if needed else WARNING, what, use, fix))
    return found


def triton(facts: Facts) -> list[Finding]:
    if not facts.devices.gpus:
        return []
    version, wanted = facts.packages.get("triton"), facts.triton_wanted
    if version is None:
        why = "the step on the device is a Triton kernel"
        fix = f"pip install triton=={wanted}" if wanted else "install torch for CUDA with its dependencies"
        return [Finding(ERROR, "triton is not installed", why, fix)]
    if wanted is not None and version.partition("+")[0] != wanted.partition("+")[0]:
        what = f"triton is {version}, torch {facts.packages.get('torch', '')} was built with {wanted}"
        why = "torch.compile, and kernels that are compiled at the first step, may fail"
        return [Finding(WARNING, what, why, f"pip install triton=={wanted}")]
    return []


def cuda(facts: Facts) -> list[Finding]:
    devices = facts.devices
    if devices.gpus and devices.error is not None:
        why = "its memory is full, another process has it for itself, or an earlier process left it broken"
        return [Finding(ERROR, devices.error, why, "nvidia-smi shows who uses it; end them, or choose another GPU")]
    hidden = _hides_all(facts.environ.get("CUDA_VISIBLE_DEVICES"))
    if devices.gpus or (hidden and devices.cuda_build is not None):
        return []
    if devices.error is not None and devices.cuda_build is None:
        return [Finding(ERROR, devices.error, "hostward works on torch", "pip install --force-reinstall torch")]
    there = facts.nvidia_addresses or facts.wsl
    if devices.cuda_build is not None:
        what = f"torch is built for CUDA {devices.cuda_build}, but sees no GPU: {devices.error}"
        if not there:
            why = "this machine has none; the device is simulated in host memory"
            return [Finding(NOTE, what, why, "nothing, to try things out; training wants a GPU")]
        fix = "nvidia-smi must work: install or update the driver; start containers with docker --gpus all"
        return [Finding(ERROR, what, "there is an NVIDIA GPU in this machine", fix)]
    if facts.nvidia_addresses and "torch" in facts.packages:
        what = f"torch {facts.packages['torch']} is a build without CUDA"
        why = f"there are NVIDIA GPUs in this machine ({', '.join(facts.nvidia_addresses)})"
        return [Finding(ERROR, what, why, "install torch for CUDA, as https://pytorch.org/get-started says")]
    why = "the device is simulated in host memory: results are right, speed says nothing"
    return [Finding(NOTE, "there is no GPU", why, "nothing, to try things out; training wants a GPU")]


def visible_devices(facts: Facts) -> list[Finding]:
    text = facts.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return []
    shown, fix = f"CUDA_VISIBLE_DEVICES={text}", "unset CUDA_VISIBLE_DEVICES, or list the GPUs that there are"
    count = len(facts.nvidia_addresses)
    if _hides_all(text):
        why = "it hides every GPU, also where it is set to nothing"
        return [Finding(WARNING if count or facts.wsl else NOTE, shown, why, fix)]
    words = [word.strip() for word in text.split(",")]
    odd = [w for w in words if not re.fullmatch(r"\d{1,4}|GPU-[0-9a-fA-F-]+|MIG-[\w/-]+", w)]
    if odd:
        why = f"{odd[0]!r} names no GPU, and what follows it is ignored"
        return [Finding(ERROR if odd[0] == words[0] else WARNING, shown, why, fix)]
    if len(set(words)) < len(words):
        return [Finding(ERROR, shown, "a GPU is named twice, and CUDA then shows none", fix)]
    beyond = [word for word in words if word.isdecimal() and int(word) >= count > 0]
    if beyond:
        why = f"there are {count} GPUs, so {beyond[0]} is none, and what follows it is ignored"
        return [Finding(ERROR if beyond[0] == words[0] else WARNING, shown, why, fix)]
    return []


def omp_threads(facts: Facts) -> list[Finding]:
    if facts.environ.get("OMP_NUM_THREADS", "").strip() != "1" or facts.cpu.affinity_cpus == 1:
        return []
    why = (
        "torchrun sets it. hostward's own threads do not follow it, but torch's do: torch optimizers on the host "
        "(use_torch_optimizer_for_cpu_offload), loading and data preparation run on one core"
    )
    ranks = facts.environ.get("LOCAL_WORLD_SIZE", "1")
    share = max(1, facts.cpu.affinity_cpus // int(ranks)) if ranks.isdecimal() and int(ranks) else 1
    return [Finding(WARNING, "OMP_NUM_THREADS=1", why, f"export OMP_NUM_THREADS={share}")]


def serial_cuda(facts: Facts) -> list[Finding]:
    found = []
    if facts.environ.get("CUDA_LAUNCH_BLOCKING", "0").strip() not in ("", "0"):
        why = "every kernel and copy waits for its end: nothing is hidden, and races do not show either"
        found.append(Finding(WARNING, "CUDA_LAUNCH_BLOCKING is on", why, "unset CUDA_LAUNCH_BLOCKING"))
    if facts.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() == "1":
        why = (
            "all streams share one queue of the device: copies wait behind kernels, and a model's own small ones "
            "behind all state that is on its way. Megatron sets it to order tensor-parallel communication"
        )
        fix = "unset CUDA_DEVICE_MAX_CONNECTIONS unless tensor parallelism asks for it"
        found.append(Finding(WARNING, "CUDA_DEVICE_MAX_CONNECTIONS=1", why, fix))
    if facts.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "").strip():
        why = "every allocation asks the driver, and every free waits for the device"
        what, fix = "PYTORCH_NO_CUDA_MEMORY_CACHING is set", "unset PYTORCH_NO_CUDA_MEMORY_CACHING"
        found.append(Finding(WARNING, what, why, fix))
    return found


def allocator(facts: Facts) -> list[Finding]:
    found = []
    texts = {name: facts.environ[name].strip() for name in ALLOCATOR_VARIABLES if facts.environ.get(name, "").strip()}
    if len(set(texts.values())) > 1:
        why = "they say different things, and torch takes some options from one and some from the other"
        found.append(
            Finding(WARNING, " and ".join(f"{k}={v}" for k, v in texts.items()), why, "unset PYTORCH_CUDA_ALLOC_CONF")
        )
    for name, text in texts.items():
        for key, value in _allocator_options(text):
            found += _allocator_option(name, key, value)
    return found


def _allocator_options(text: str) -> list[tuple[str, str]]:
    # Commas also part the entries of a list in brackets.
    parts = re.findall(r"[^,\[\]]+(?:\[[^\]]*\])?", text)
    pairs = (part.partition(":") for part in parts if part.strip())
    return [(key.strip(), value.strip()) for key, _, value in pairs]


def _allocator_option(name: str, key: str, value: str) -> list[Finding]:
    shown = f"{name}: {key}:{value}" if value else f"{name}: {key}"
    without = f"leave {key} out of {name}"
    if not value:
        return [Finding(ERROR, shown, "torch wants option:value, and refuses to start the device", without)]
    if key not in ALLOCATOR_OPTIONS:
        return [
            Finding(WARNING, shown, "no option of torch's allocator; torch may refuse to start the device", without)
        ]
    if key == "backend" and value != "native":
        why = "hostward is tested with torch's own pool; this one ignores other options, as expandable_segments"
        return [Finding(WARNING, shown, why, without)]
    if key == "max_split_size_mb" and value.isdecimal() and int(value) < 128:
        why = "blocks above this size are never split: large temporary tensors each keep their own memory"
        return [Finding(WARNING, shown, why, f"{without}; against fragmentation use expandable_segments:True")]
    if key == "per_process_memory_fraction":
        why = "torch reports out of memory at this share of the GPU, however much is free"
        return [Finding(NOTE, shown, why, f"{without} where it is not meant")]
    if key == "expandable_segments" and value.lower() == "true":
        why = "helps against fragmentation. Allocators that pause and resume memory (in colocated rollouts) refuse it"
        return [Finding(NOTE, shown, why, "nothing, unless such an allocator is in the process")]
    if key.startswith("pinned_"):
        why = "has no effect on hostward's pinned memory, which does not come from torch"
        return [Finding(NOTE, shown, why, "nothing")]
    return []


def _hides_all(text: str | None) -> bool:
    return text is not None and (not text.strip() or text.strip().startswith("-"))


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"(\d{1,6})\.(\d{1,6})", version)
    return (int(match[1]), int(match[2])) if match else ()


_ENVIRONMENT_CHECKS = (versions, triton, cuda, visible_devices, omp_threads, serial_cuda, allocator)

CHECKS = (*_MACHINE_CHECKS, *_ENVIRONMENT_CHECKS, *_RATE_CHECKS)
