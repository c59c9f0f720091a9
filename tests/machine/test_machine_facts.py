"""Facts of a machine, from made-up proc, sys and dev trees."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hostward.core.host_limits import HostMemory
from hostward.errors import NativeError
from hostward.kernels.cpu.affinity import CpuFacts
from hostward.kernels.cpu.library import Library
from hostward.machine.facts import NO_DEVICES, Facts, cpu_list, gather, read_devices, read_pci

KIB, GIB = 1 << 10, 1 << 30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """64 GiB, two NUMA nodes, two NVIDIA GPUs and another display, in a container of 8 GiB and 1.5 CPUs."""
    write(
        tmp_path / "proc/cpuinfo",
        "processor\t: 0\ncpu family\t: 6\nmodel\t\t: 207\nmodel name\t: Xeon of a test\nflags\t\t: fpu avx2 avx512f\n"
        "\nprocessor\t: 1\nmodel name\t: another\n",
    )
    write(
        tmp_path / "proc/meminfo",
        f"MemTotal: {64 * GIB // KIB} kB\nMemAvailable: {48 * GIB // KIB} kB\nSwapCached: 7 kB\n"
        f"SwapTotal: {8 * GIB // KIB} kB\nSwapFree: {5 * GIB // KIB} kB\n",
    )
    write(tmp_path / "proc/self/cgroup", "0::/box\n")
    write(tmp_path / "proc/sys/kernel/osrelease", "6.18.1-generic\n")
    box = tmp_path / "sys/fs/cgroup/box"
    write(box / "memory.max", f"{8 * GIB}\n")
    write(box / "memory.current", f"{3 * GIB}\n")
    write(box / "cpu.max", "150000 100000\n")
    write(tmp_path / "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    write(tmp_path / "sys/devices/system/node/node0/cpulist", "0-3,8\n")
    write(tmp_path / "sys/devices/system/node/node1/cpulist", "4-7\n")
    write(tmp_path / "sys/devices/system/node/node2/cpulist", "\n")
    devices = tmp_path / "sys/bus/pci/devices"
    for address, vendor, kind in (
        ("0000:3b:00.0", "0x10de", "0x030200"),
        ("0000:1b:00.0", "0x10de", "0x030000"),
        ("0000:1b:00.1", "0x10de", "0x040300"),
        ("0000:00:02.0", "0x8086", "0x030000"),
    ):
        write(devices / address / "vendor", f"{vendor}\n")
        write(devices / address / "class", f"{kind}\n")
    write(devices / "0000:3b:00.0/numa_node", "1\n")
    write(devices / "0000:3b:00.0/current_link_width", "8\n")
    write(devices / "0000:3b:00.0/max_link_width", "16\n")
    write(devices / "0000:1b:00.0/numa_node", "-1\n")
    write(devices / "0000:1b:00.0/max_link_width", "Unknown\n")
    (tmp_path / "dev/shm").mkdir(parents=True)
    return tmp_path


def facts_below(root: Path) -> Facts:
    return gather({"OMP_NUM_THREADS": "1", "HOME": "/root"}, NO_DEVICES, root=root)


def test_facts_of_a_made_up_machine(root: Path) -> None:
    facts = facts_below(root)
    assert facts.cpu_model == "Xeon of a test (family 6 model 207)"
    assert facts.processor_flags == {"fpu", "avx2", "avx512f"}
    assert facts.cpu == CpuFacts(len(os.sched_getaffinity(0)), 1.5)
    assert facts.node_cpus == {0: frozenset({0, 1, 2, 3, 8}), 1: frozenset({4, 5, 6, 7})}
    assert facts.numa_nodes == 3
    assert facts.memory == HostMemory(8 * GIB, 5 * GIB, "the container's cgroup")
    assert facts.swap_used_bytes == 3 * GIB
    assert facts.transparent_huge_pages == "madvise"
    assert facts.nvidia_addresses == ("0000:1b:00.0", "0000:3b:00.0")
    assert facts.environ == {"OMP_NUM_THREADS": "1"}
    assert facts.shared_memory_bytes is not None
    assert facts.native_error is None
    assert not facts.wsl
    assert facts.packages.keys() >= {"torch", "numpy"}


def test_t01_v1_limits_are_read_too(root: Path) -> None:
    write(root / "proc/self/cgroup", "4:memory:/old\n5:cpu,cpuacct:/old\n")
    memory, cpu = root / "sys/fs/cgroup/memory/old", root / "sys/fs/cgroup/cpu,cpuacct/old"
    write(memory / "memory.limit_in_bytes", f"{4 * GIB}\n")
    write(memory / "memory.usage_in_bytes", f"{GIB}\n")
    write(cpu / "cpu.cfs_quota_us", "50000\n")
    write(cpu / "cpu.cfs_period_us", "100000\n")
    facts = facts_below(root)
    assert facts.memory == HostMemory(4 * GIB, 3 * GIB, "the container's cgroup")
    assert facts.cpu.quota_cpus == 0.5


@pytest.mark.parametrize("how", ["kernel", "device"])
def test_wsl_is_seen(root: Path, how: str) -> None:
    if how == "kernel":
        write(root / "proc/sys/kernel/osrelease", "5.15.167.4-Microsoft-standard-WSL2\n")
    else:
        write(root / "dev/dxg", "")
    assert facts_below(root).wsl


def test_a_machine_that_tells_little(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemTotal: 1024 kB\n")
    facts = facts_below(tmp_path)
    assert facts.cpu_model is None
    assert facts.processor_flags == frozenset()
    assert (facts.node_cpus, facts.numa_nodes) == ({}, 0)
    assert facts.swap_used_bytes == 0
    assert facts.shared_memory_bytes is None
    assert facts.transparent_huge_pages is None
    assert facts.nvidia_addresses == ()


def test_t77_pci_facts_go_by_address(root: Path) -> None:
    assert read_pci("0000:3B:00.0", root) == (1, 8, 16)
    assert read_pci("0000:1b:00.0", root) == (-1, None, None)
    assert read_pci("0000:99:00.0", root) == (None, None, None)


def test_a_missing_library_is_a_fact(root: Path) -> None:
    def missing() -> Library:
        raise NativeError("the native library x.so does not exist", why="it has not been built", fix="build it")

    facts = gather({}, NO_DEVICES, root=root, native=missing)
    assert facts.native_error == "the native library x.so does not exist; it has not been built"
    assert facts.native_fix == "build it"
    assert facts.instruction_sets == ()


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0", {0}), ("0-2,5\n", {0, 1, 2, 5}), ("", set()), ("x,3", {3}), ("5-3", set()), ("1-", set())],
)
def test_cpu_lists(text: str, cpus: set[int]) -> None:
    assert cpu_list(text) == cpus


@given(text=st.text(st.sampled_from("0123456789-, \nx"), max_size=12))
def test_any_cpu_list_is_read(text: str) -> None:
    assert all(cpu >= 0 for cpu in cpu_list(text))


def test_this_machine_has_facts() -> None:
    devices = read_devices()
    facts = gather(os.environ, devices)
    assert facts.memory.available_bytes > 0
    assert facts.instruction_sets
    assert facts.affinity
