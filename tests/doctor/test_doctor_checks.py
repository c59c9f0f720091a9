"""Each check finds its own trouble on a machine that is sound otherwise, and nothing on one that is sound."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hostward.core.host_limits import HostMemory
from hostward.doctor import Finding, Severity
from hostward.doctor.checks import CHECKS
from hostward.doctor.examine import examine, is_bad, render, to_dict
from hostward.kernels.cpu.affinity import CpuFacts
from hostward.machine.facts import NO_DEVICES, DeviceFacts, Facts
from hostward.plan.hardware_profile import Hardware, profile

from machine_cases import GIB, H200, ONE_GPU, SOUND, sound, with_gpu

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE
MIB = 1 << 20


def test_a_sound_machine_has_nothing_to_mend() -> None:
    assert examine(SOUND) == []


def env(**variables: str) -> Facts:
    return sound(environ=variables)


def measured(**changes: Any) -> Hardware:
    """The rates of the H200 machine, but for `changes`."""
    return dataclasses.replace(profile("h200"), measured_at="2026-11-21T12:00:00+00:00", **changes)


def with_rates(**changes: Any) -> Facts:
    return sound(hardware=measured(**changes))


TWO_NODES = {0: frozenset(range(8)), 1: frozenset(range(8, 16))}
EIGHT = tuple(f"0000:{i:02x}:00.0" for i in range(8))
NO_GPU = dataclasses.replace(NO_DEVICES, cuda_build="13.0", error="no CUDA-capable device is detected")
SLOW_LINK = tuple(dataclasses.replace(link, h2d_bytes_per_s=12e9) for link in profile("h200").links)
GPU_OF_H200 = profile("h200").gpu
assert GPU_OF_H200 is not None

# (check, facts, severity, words of what, words of fix)
CASES = [
    (
        "native_library",
        sound(native_error="the native library x.so does not exist", native_fix="pip install ."),
        ERROR,
        "x.so does not exist",
        "pip install .",
    ),
    (
        "instruction_set",
        sound(instruction_sets=("scalar",)),
        WARNING,
        "scalar instructions",
        "offload_optimizer_states",
    ),
    ("instruction_set", sound(instruction_sets=("scalar", "avx2")), NOTE, "AVX2", "g++"),
    ("threads", sound(cpu=CpuFacts(5, None), machine_cpus=5), WARNING, "gets 3 threads", "--cpus"),
    ("threads", sound(cpu=CpuFacts(1, None), machine_cpus=1), WARNING, "gets 1 thread", "--cpus"),
    ("threads", env(LOCAL_WORLD_SIZE="8"), WARNING, "gets 1 thread", "--cpus-per-task"),
    ("threads", sound(cpu=CpuFacts(16, 8.5)), NOTE, "may use 8.5 of 16 CPUs", "docker --cpus"),
    ("threads", sound(cpu=CpuFacts(8, None)), NOTE, "bound to 8 of 16 CPUs", "host_threads"),
    (
        "numa",
        dataclasses.replace(with_gpu(numa_node=-1), numa_nodes=2, node_cpus=TWO_NODES),
        WARNING,
        "does not say its NUMA node",
        "numactl",
    ),
    (
        "numa",
        dataclasses.replace(with_gpu(numa_node=None), numa_nodes=2, node_cpus=TWO_NODES),
        WARNING,
        "0000:1b:00.0",
        "nvidia-smi topo",
    ),
    (
        "numa",
        dataclasses.replace(
            with_gpu(numa_node=1), numa_nodes=2, node_cpus=TWO_NODES, affinity=TWO_NODES[0], machine_cpus=16
        ),
        WARNING,
        "on NUMA node 1, this process runs elsewhere",
        "numactl --cpunodebind=1",
    ),
    (
        "numa",
        dataclasses.replace(with_gpu(numa_node=1), numa_nodes=2, node_cpus=TWO_NODES),
        NOTE,
        "may run on others as well",
        "numactl --cpunodebind=1",
    ),
    ("memory", sound(memory=HostMemory(64 * GIB, 3 * GIB, "the machine")), WARNING, "3.0 GiB of host memory", "--mem"),
    (
        "memory",
        sound(memory=HostMemory(32 * GIB, 30 * GIB, "the container's cgroup")),
        NOTE,
        "limited to 32.0 GiB by the container's cgroup",
        "docker --memory",
    ),
    ("memory", sound(swap_used_bytes=2 * GIB), WARNING, "2.0 GiB are swapped out", "swapoff"),
    ("limits", sound(locked_limit_bytes=64 * 1024), NOTE, "ulimit -l is", "ulimit -l unlimited"),
    ("limits", sound(address_limit_bytes=100 * GIB), WARNING, "ulimit -v is 100.0 GiB", "ulimit -v unlimited"),
    ("limits", sound(shared_memory_bytes=64 * MIB), WARNING, "/dev/shm has 64 MiB", "--shm-size"),
    ("limits", sound(shared_memory_bytes=None), WARNING, "/dev/shm is missing", "--shm-size"),
    ("limits", sound(transparent_huge_pages="never"), WARNING, "huge pages are off", "transparent_hugepage/enabled"),
    (
        "page_locking",
        sound(devices=dataclasses.replace(ONE_GPU, pinned_error="probe: 67,108,864 bytes\n  why: CUDA_ERROR")),
        ERROR,
        "could not be pinned: probe",
        "ulimit -l",
    ),
    ("page_locking", sound(wsl=True), WARNING, "this is WSL", ".wslconfig"),
    ("gpus", with_gpu(capability=(7, 5)), WARNING, "compute capability 7.5", "fp16"),
    ("gpus", with_gpu(free_bytes=100 * GIB), WARNING, "40.0 GiB of GPU 0", "nvidia-smi"),
    ("gpus", with_gpu(link_width=8), WARNING, "8 of 16 PCI Express lanes", "slot"),
    (
        "halves",
        sound(devices=NO_DEVICES, processor_flags=frozenset({"fpu", "avx2"})),
        NOTE,
        "bf16 or fp16 compute slowly",
        "model.params_dtype=fp32",
    ),
    ("versions", sound(python="3.10.12"), ERROR, "python is 3.10.12, at least 3.11", "newer Python"),
    ("versions", sound(packages={**SOUND.packages, "torch": "2.9.1+cu128"}), ERROR, "torch is 2.9.1", "torch>=2.11"),
    ("versions", sound(packages={**SOUND.packages, "transformers": "4.57.0"}), WARNING, "transformers is 4", "5.17"),
    (
        "versions",
        sound(packages={k: v for k, v in SOUND.packages.items() if k != "numpy"}),
        ERROR,
        "numpy is not installed",
        "numpy>=1.26",
    ),
    (
        "versions",
        sound(packages={k: v for k, v in SOUND.packages.items() if k != "safetensors"}),
        NOTE,
        "safetensors is not installed",
        "hostward[train]",
    ),
    (
        "triton",
        sound(packages={k: v for k, v in SOUND.packages.items() if k != "triton"}),
        ERROR,
        "triton is not installed",
        "triton==3.6.0",
    ),
    ("triton", sound(packages={**SOUND.packages, "triton": "3.5.1"}), WARNING, "triton is 3.5.1", "triton==3.6.0"),
    ("cuda", sound(devices=NO_DEVICES, nvidia_addresses=()), NOTE, "there is no GPU", "nothing"),
    ("cuda", sound(devices=NO_GPU, nvidia_addresses=()), NOTE, "built for CUDA 13.0, but sees no GPU", "nothing"),
    ("cuda", sound(devices=NO_GPU), ERROR, "no CUDA-capable device", "--gpus all"),
    ("cuda", sound(devices=NO_DEVICES), ERROR, "build without CUDA", "pytorch.org"),
    (
        "cuda",
        sound(devices=DeviceFacts(None, "torch cannot be imported: libgomp", (), None)),
        ERROR,
        "cannot be imported: libgomp",
        "pip install",
    ),
    (
        "cuda",
        sound(devices=dataclasses.replace(ONE_GPU, error="GPU 0 cannot be used: CUDA error: out of memory")),
        ERROR,
        "GPU 0 cannot be used",
        "nvidia-smi",
    ),
    (
        "visible_devices",
        sound(environ={"CUDA_VISIBLE_DEVICES": ""}, devices=NO_GPU),
        WARNING,
        "CUDA_VISIBLE_DEVICES=",
        "unset",
    ),
    (
        "visible_devices",
        sound(environ={"CUDA_VISIBLE_DEVICES": "-1"}, devices=NO_GPU, nvidia_addresses=()),
        NOTE,
        "CUDA_VISIBLE_DEVICES=-1",
        "unset",
    ),
    ("visible_devices", env(CUDA_VISIBLE_DEVICES="cuda:0"), ERROR, "cuda:0", "list the GPUs"),
    ("visible_devices", env(CUDA_VISIBLE_DEVICES="0,-1"), WARNING, "0,-1", "list the GPUs"),
    ("visible_devices", env(CUDA_VISIBLE_DEVICES="0,0"), ERROR, "0,0", "list the GPUs"),
    ("visible_devices", env(CUDA_VISIBLE_DEVICES="5"), ERROR, "CUDA_VISIBLE_DEVICES=5", "list the GPUs"),
    ("visible_devices", env(CUDA_VISIBLE_DEVICES="1"), ERROR, "CUDA_VISIBLE_DEVICES=1", "list the GPUs"),
    ("visible_devices", env(CUDA_VISIBLE_DEVICES="0,5"), WARNING, "CUDA_VISIBLE_DEVICES=0,5", "list the GPUs"),
    ("omp_threads", env(OMP_NUM_THREADS="1"), WARNING, "OMP_NUM_THREADS=1", "export OMP_NUM_THREADS=16"),
    ("omp_threads", env(OMP_NUM_THREADS="1", LOCAL_WORLD_SIZE="2"), WARNING, "=1", "export OMP_NUM_THREADS=8"),
    ("serial_cuda", env(CUDA_LAUNCH_BLOCKING="1"), WARNING, "CUDA_LAUNCH_BLOCKING", "unset"),
    ("serial_cuda", env(CUDA_DEVICE_MAX_CONNECTIONS="1"), WARNING, "CUDA_DEVICE_MAX_CONNECTIONS=1", "unset"),
    ("serial_cuda", env(PYTORCH_NO_CUDA_MEMORY_CACHING="1"), WARNING, "NO_CUDA_MEMORY_CACHING", "unset"),
    ("allocator", env(PYTORCH_ALLOC_CONF="max_split_size_mb"), ERROR, "max_split_size_mb", "leave"),
    ("allocator", env(PYTORCH_ALLOC_CONF="expandable_segment:True"), WARNING, "expandable_segment:True", "leave"),
    ("allocator", env(PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync"), WARNING, "cudaMallocAsync", "leave backend"),
    ("allocator", env(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:32"), WARNING, "max_split_size_mb:32", "expandable"),
    ("allocator", env(PYTORCH_ALLOC_CONF="per_process_memory_fraction:0.5"), NOTE, "per_process", "leave"),
    ("allocator", env(PYTORCH_ALLOC_CONF="expandable_segments:True"), NOTE, "expandable_segments:True", "nothing"),
    ("allocator", env(PYTORCH_ALLOC_CONF="pinned_use_background_threads:True"), NOTE, "pinned_use", "nothing"),
    (
        "allocator",
        env(PYTORCH_ALLOC_CONF="max_split_size_mb:512", PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:256"),
        WARNING,
        "PYTORCH_ALLOC_CONF=max_split_size_mb:512 and",
        "unset PYTORCH_CUDA_ALLOC_CONF",
    ),
    (
        "hardware_file",
        sound(hardware_error="hardware.json is no hardware file"),
        WARNING,
        "no hardware",
        "bench machine",
    ),
    (
        "hardware_file",
        with_rates(cpu=dataclasses.replace(profile("h200").cpu, model="EPYC")),
        WARNING,
        "of another machine: processor EPYC",
        "bench machine",
    ),
    (
        "hardware_file",
        with_rates(gpu=dataclasses.replace(GPU_OF_H200, name="NVIDIA H20")),
        WARNING,
        "of another machine: GPU NVIDIA H20",
        "bench machine",
    ),
    ("rates", with_rates(links=SLOW_LINK), WARNING, "copies to the GPU run at 12.0 GB/s", "lanes"),
    (
        "rates",
        sound(
            devices=NO_DEVICES,
            nvidia_addresses=(),
            hardware=measured(gpu=profile("rtx-4090").gpu, links=SLOW_LINK, duplex_bytes_per_s=None),
        ),
        WARNING,
        "copies to the GPU run at 12.0 GB/s",
        "lanes",
    ),
    (
        "rates",
        with_rates(gpu=dataclasses.replace(GPU_OF_H200, bf16_matmul_flops_per_s=300e12)),
        WARNING,
        "run at 300 TFLOP/s",
        "nvidia-smi",
    ),
    (
        "rates",
        sound(
            devices=dataclasses.replace(ONE_GPU, gpus=(dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3"),)),
            hardware=dataclasses.replace(
                profile("h100"),
                gpu=dataclasses.replace(profile("h100").gpu, bf16_matmul_flops_per_s=200e12),  # type: ignore[type-var]
            ),
        ),
        WARNING,
        "run at 200 TFLOP/s",
        "nvidia-smi",
    ),
    ("rates", with_rates(host_parameters_per_s=1e9), WARNING, "steps 1.00 G parameters/s", "bench machine"),
    (
        "rates",
        with_rates(dram_bytes_per_s=40e9, host_parameters_per_s=1.4e9),
        WARNING,
        "move 40.0 GB/s of host memory, the link 94.0",
        "CPUs",
    ),
    ("rates", with_rates(pinned_s_per_gib=0.7), WARNING, "0.70 s per GiB", "transparent_hugepage"),
]


@pytest.mark.parametrize(
    ("check", "facts", "severity", "what", "fix"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)]
)
def test_trouble_is_found_and_named(check: str, facts: Facts, severity: Severity, what: str, fix: str) -> None:
    found = next(c for c in CHECKS if c.__name__ == check)(facts)
    matching = [f for f in found if f.severity is severity and what in f.what and fix in f.fix]
    assert len(matching) == 1, found
    assert matching[0].why
    if check == "rates" and facts.hardware is not None and facts.hardware.measured_at is not None:
        assert f"(measured at {facts.hardware.measured_at})" in matching[0].what
    assert matching[0] in examine(facts)


def test_every_check_has_cases() -> None:
    assert {c.__name__ for c in CHECKS} == {case[0] for case in CASES}


# Facts that look like trouble and are none.
@pytest.mark.parametrize(
    "facts",
    [
        sound(hardware=measured()),
        sound(instruction_sets=("scalar", "avx2"), processor_flags=frozenset({"fpu", "avx2"})),
        sound(instruction_sets=("scalar", "neon"), processor_flags=frozenset({"asimd"})),
        sound(memory=HostMemory(64 * GIB, 4 * GIB, "the machine")),
        sound(transparent_huge_pages=None),
        sound(swap_used_bytes=GIB - 1),
        env(CUDA_VISIBLE_DEVICES="0"),
        env(CUDA_VISIBLE_DEVICES="GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"),
        env(CUDA_VISIBLE_DEVICES="MIG-GPU-8932f937/1/2"),
        sound(environ={"CUDA_VISIBLE_DEVICES": "5, 7"}, nvidia_addresses=EIGHT),
        env(OMP_NUM_THREADS="4"),
        env(CUDA_LAUNCH_BLOCKING="0", CUDA_DEVICE_MAX_CONNECTIONS="32"),
        env(PYTORCH_ALLOC_CONF="backend:native,max_split_size_mb:512"),
        env(PYTORCH_ALLOC_CONF="roundup_power2_divisions:[256:1,512:2,>:4],garbage_collection_threshold:0.8"),
        env(PYTORCH_ALLOC_CONF="max_split_size_mb:512", PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:512"),
        with_gpu(link_width=16, link_max_width=255),
        with_gpu(numa_node=-1),
        with_gpu(free_bytes=None),
        sound(packages={**SOUND.packages, "torch": "2.13.0+cu130"}),
        sound(packages={**SOUND.packages, "torch": "unknown"}),
        sound(triton_wanted=None),
        sound(cpu=CpuFacts(16, 16.0)),
        sound(environ={"CUDA_VISIBLE_DEVICES": "5"}, nvidia_addresses=()),
    ],
)
def test_what_only_looks_like_trouble_is_none(facts: Facts) -> None:
    assert examine(facts) == []


@pytest.mark.parametrize(
    "changes",
    [{}, {"locked_limit_bytes": 1 << 16}, {"wsl": True}, {"packages": {**SOUND.packages, "triton": "3.0.0"}}],
)
def test_t81_what_concerns_gpus_is_not_held_against_a_machine_without(changes: dict[str, Any]) -> None:
    found = examine(sound(devices=NO_DEVICES, nvidia_addresses=(), **changes))
    assert [f.what for f in found] == ["there is no GPU"]


def test_a_gpu_that_is_hidden_on_purpose_is_not_called_broken() -> None:
    facts = sound(environ={"CUDA_VISIBLE_DEVICES": ""}, devices=NO_GPU)
    assert [f.severity for f in examine(facts)] == [WARNING]


def test_t78_a_cpuset_of_one_core_warns_and_runs() -> None:
    found = examine(sound(cpu=CpuFacts(1, None), affinity=frozenset({3}), environ={"OMP_NUM_THREADS": "1"}))
    assert [f.severity for f in found] == [WARNING, NOTE]
    assert not is_bad(found)


def test_errors_come_first_and_alone_are_bad() -> None:
    facts = sound(native_error="x", native_fix="y", locked_limit_bytes=1, transparent_huge_pages="never")
    found = examine(facts)
    assert [f.severity for f in found] == [ERROR, WARNING, NOTE]
    assert is_bad(found)
    assert not is_bad(found[1:])


WORDS = st.text(max_size=12) | st.sampled_from(["1", "0,1", "-1", "backend:", "a:b,", "[", "]:", "max_split_size_mb:x"])


@given(
    environ=st.dictionaries(
        st.sampled_from(
            [
                "CUDA_VISIBLE_DEVICES",
                "OMP_NUM_THREADS",
                "LOCAL_WORLD_SIZE",
                "PYTORCH_ALLOC_CONF",
                "CUDA_LAUNCH_BLOCKING",
            ]
        ),
        WORDS,
    ),
    versions=st.dictionaries(st.sampled_from(sorted(SOUND.packages)), WORDS),
    cpus=st.integers(1, 300),
    quota=st.none() | st.floats(0.01, 300),
    memory=st.integers(0, 1 << 45),
)
def test_no_environment_is_too_odd(
    environ: dict[str, str], versions: dict[str, str], cpus: int, quota: float | None, memory: int
) -> None:
    facts = sound(
        environ=environ,
        packages={**SOUND.packages, **versions},
        cpu=CpuFacts(cpus, quota),
        memory=HostMemory(memory, memory // 2, "the container's cgroup"),
    )
    found = examine(facts)
    assert all(isinstance(f, Finding) and f.what and f.why and f.fix for f in found)
    assert len(render(facts, found)) == (2 if found else 1)
    json.dumps(to_dict(facts, found), allow_nan=False)
