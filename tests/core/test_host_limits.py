"""Host memory of this process, from made-up proc and sys trees."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hostward.core.host_limits import HostMemory, host_memory, resident_bytes

GIB = 1024**3
MACHINE = HostMemory(64 * GIB, 48 * GIB, "the machine")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 64 GiB, 48 of them available, whose process is in no cgroup."""
    write(
        tmp_path / "proc/meminfo",
        f"MemTotal:       {64 * GIB // 1024} kB\nMemFree:  123 kB\n"
        f"MemAvailable:   {48 * GIB // 1024} kB\nHugePages_Total:       0\nEmpty:\n",
    )
    return tmp_path


def cgroup_v2(directory: Path, limit: str | int, used: int, stat: str = "anon 1\ninactive_file 0\n") -> None:
    write(directory / "memory.max", f"{limit}\n")
    write(directory / "memory.current", f"{used}\n")
    write(directory / "memory.stat", stat)


def cgroup_v1(directory: Path, limit: int, used: int, stat: str = "total_inactive_file 0\n") -> None:
    write(directory / "memory.limit_in_bytes", f"{limit}\n")
    write(directory / "memory.usage_in_bytes", f"{used}\n")
    write(directory / "memory.stat", stat)


def test_t01_no_cgroup_file(root: Path) -> None:
    assert host_memory(root) == MACHINE


def test_t01_no_cgroup_file_system(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/user.slice\n")
    assert host_memory(root) == MACHINE


def test_t01_v2_limit(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/box\n")
    cgroup_v2(root / "sys/fs/cgroup/box", 8 * GIB, 3 * GIB)
    assert host_memory(root) == HostMemory(8 * GIB, 5 * GIB, "the container's cgroup")


def test_t01_v1_limit(root: Path) -> None:
    write(root / "proc/self/cgroup", "9:name=systemd:/\n5:cpu,cpuacct:/x\n4:hugetlb,memory:/docker/box\n0::/\n")
    cgroup_v1(root / "sys/fs/cgroup/memory/docker/box", 8 * GIB, 3 * GIB)
    assert host_memory(root) == HostMemory(8 * GIB, 5 * GIB, "the container's cgroup")


def test_t01_no_limit_in_v2_and_v1(root: Path) -> None:
    write(root / "proc/self/cgroup", "4:memory:/box\n0::/box\n")
    cgroup_v2(root / "sys/fs/cgroup/box", "max", 3 * GIB)
    cgroup_v1(root / "sys/fs/cgroup/memory/box", 9223372036854771712, 3 * GIB)
    assert host_memory(root) == MACHINE


@pytest.mark.parametrize("outer_gib", [4, 30])
def test_t01_the_tightest_of_nested_limits_counts(root: Path, outer_gib: int) -> None:
    write(root / "proc/self/cgroup", "0::/pod/box\n")
    cgroup_v2(root / "sys/fs/cgroup/pod/box", 16 * GIB, 2 * GIB)
    cgroup_v2(root / "sys/fs/cgroup/pod", outer_gib * GIB, 3 * GIB)
    expected = min(14, outer_gib - 3)
    assert host_memory(root).available_bytes == expected * GIB
    assert host_memory(root).total_bytes == (outer_gib if expected < 14 else 16) * GIB


def test_t01_the_container_mount_shows_its_own_group_at_the_root(root: Path) -> None:
    write(root / "proc/self/cgroup", "4:memory:/kubepods/pod1/abc\n")
    cgroup_v1(root / "sys/fs/cgroup/memory", 8 * GIB, 3 * GIB)
    assert host_memory(root).available_bytes == 5 * GIB


def test_t01_a_namespace_path_that_climbs_still_reaches_the_mount(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/../../other\n")
    cgroup_v2(root / "sys/fs/cgroup", 8 * GIB, 3 * GIB)
    assert host_memory(root).available_bytes == 5 * GIB


def test_t01_page_cache_counts_as_available(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/box\n")
    stat = f"anon {GIB}\nfile {6 * GIB}\ninactive_file {2 * GIB}\nactive_file {4 * GIB}\ninactive_anon {GIB}\n"
    cgroup_v2(root / "sys/fs/cgroup/box", 8 * GIB, 7 * GIB, stat)
    assert host_memory(root).available_bytes == 7 * GIB


def test_t01_v1_counts_the_page_cache_of_its_children_too(root: Path) -> None:
    write(root / "proc/self/cgroup", "4:memory:/box\n")
    stat = f"inactive_file 1\nactive_file 1\ntotal_inactive_file {2 * GIB}\ntotal_active_file {GIB}\n"
    cgroup_v1(root / "sys/fs/cgroup/memory/box", 8 * GIB, 7 * GIB, stat)
    assert host_memory(root).available_bytes == 4 * GIB


def test_t01_a_limit_without_statistics_still_counts(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/box\n")
    cgroup_v2(root / "sys/fs/cgroup/box", 8 * GIB, 3 * GIB)
    (root / "sys/fs/cgroup/box/memory.stat").unlink()
    assert host_memory(root).available_bytes == 5 * GIB


def test_t01_use_above_the_limit_leaves_nothing(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/box\n")
    cgroup_v2(root / "sys/fs/cgroup/box", GIB, 2 * GIB)
    assert host_memory(root).available_bytes == 0


def test_t01_a_limit_above_the_machine_changes_nothing(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/box\n")
    cgroup_v2(root / "sys/fs/cgroup/box", 999 * GIB, GIB)
    assert host_memory(root) == MACHINE


def test_an_old_kernel_without_memavailable(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemTotal: 1024 kB\nMemFree: 512 kB\n")
    assert host_memory(tmp_path) == HostMemory(1024**2, 1024**2, "the machine")


@given(
    limits=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100), st.integers(0, 50)), min_size=1, max_size=3),
)
def test_t01_available_is_the_least_over_machine_and_all_groups(
    tmp_path_factory: pytest.TempPathFactory, limits: list[tuple[int, int, int]]
) -> None:
    root = tmp_path_factory.mktemp("root")
    write(root / "proc/meminfo", f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {48 * GIB // 1024} kB\n")
    directory = root / "sys/fs/cgroup"
    for depth, (limit, used, cache) in enumerate(limits):
        directory /= f"g{depth}"
        cgroup_v2(directory, limit * GIB, used * GIB, f"inactive_file {cache * GIB}\n")
    write(root / "proc/self/cgroup", f"0::/{directory.relative_to(root / 'sys/fs/cgroup')}\n")
    found = host_memory(root)
    assert found.available_bytes == min(48, *(max(0, a - b + c) for a, b, c in limits)) * GIB
    assert found.total_bytes <= 64 * GIB


def test_this_machine() -> None:
    memory = host_memory()
    assert 0 < memory.available_bytes <= memory.total_bytes
    assert 1024**2 < resident_bytes() < memory.total_bytes


def test_resident_bytes(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/status", "Name:\tpython\nVmHWM:\t   99 kB\nVmRSS:\t   12 kB\n")
    assert resident_bytes(tmp_path) == 12 * 1024
    write(tmp_path / "proc/self/status", "Name:\tkthread\n")
    assert resident_bytes(tmp_path) == 0
