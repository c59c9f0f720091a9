"""Checks of the machine and of the limits on this process. Each takes the facts and returns what it finds."""

from __future__ import annotations

from hostward.core.units import GIB, MIB
from hostward.doctor.finding import Finding, Severity
from hostward.kernels.cpu.affinity import LAUNCH_THREADS_PER_RANK, default_threads
from hostward.machine.facts import (
    LOCK_LIMIT_FIX,
    LOCK_LIMIT_WHY,
    SLOW_HALVES_FIX,
    SLOW_HALVES_WHY,
    Facts,
    has_slow_halves,
)

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
    why = "the host step, and page-locked slabs, are in it"
    return [Finding(ERROR, facts.native_error, why, facts.native_fix)]


def instruction_set(facts: Facts) -> list[Finding]:
    if not facts.instruction_sets:
        return []
    best = facts.instruction_sets[-1]
    if best == "scalar":
        why = "no vector kernel of the native library runs on this processor, and the host step is several times slower"
        fix = (
            "take a machine with AVX2, AVX-512 or NEON, or step on the device: optimizer.offload_optimizer_states=true"
        )
        return [Finding(WARNING, "the host step uses scalar instructions", why, fix)]
    if best == "avx2" and "avx512f" in facts.processor_flags:
        why = "the processor has AVX-512, but the native library was built without it, or lacks a part that it needs"
        return [Finding(NOTE, "the host step uses AVX2", why, "build the library with a newer g++: pip install .")]
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
                f"the host step gets {number} thread{'s' * (number > 1)}",
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
        fix = "nothing where it is meant; in a loop of one's own with bound ranks hostward.AdamW(host_threads=N)"
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
        why = "the host step over small pages is slower, and page-locking them takes longer"
        fix = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        found.append(Finding(WARNING, "transparent huge pages are off", why, fix))
    return found


def page_locking(facts: Facts) -> list[Finding]:
    found = []
    if facts.devices.pinned_error is not None:
        what = f"host memory could not be page-locked: {facts.devices.pinned_error.splitlines()[0]}"
        why = "\n".join(facts.devices.pinned_error.splitlines()[1:]).strip() or "the driver refused 64 MiB"
        fix = "ulimit -l unlimited; under WSL raise memory in .wslconfig; end processes that hold page-locked memory"
        found.append(Finding(ERROR, what, why, fix))
    if facts.wsl and (facts.devices.gpus or facts.devices.cuda_build):
        why = "Windows allows little page-locked memory, often 1 to 2 GiB; beyond it the driver says 'out of memory'"
        fix = (
            "raise memory= in .wslconfig, train on Linux itself, or page-lock less: state that the host steps is not, "
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


MACHINE_CHECKS = (native_library, instruction_set, threads, numa, memory, limits, page_locking, gpus, halves)
