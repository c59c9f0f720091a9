"""The number of threads of the host step, from affinity, cgroup quota and local ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hostward.kernels.cpu.affinity import CpuFacts, default_threads, read_cpu_facts, read_quota_cpus


@pytest.mark.parametrize(
    ("cpus", "quota", "ranks", "threads"),
    [
        (64, None, "1", 62),
        (64, None, "8", 6),
        (64, 16.0, "8", 1),
        (64, 24.0, "4", 4),
        (64, 3.5, "1", 1),
        (2, None, "1", 1),
        (1, None, "8", 1),
        (8, 16.0, "1", 6),
        (16, None, "", 14),
        (16, None, "nonsense", 14),
        (16, None, "0", 14),
    ],
)
def test_share_of_one_rank(cpus: int, quota: float | None, ranks: str, threads: int) -> None:
    assert default_threads({"LOCAL_WORLD_SIZE": ranks}, CpuFacts(cpus, quota)) == threads


def test_h52_omp_num_threads_is_not_read() -> None:
    assert default_threads({"OMP_NUM_THREADS": "1"}, CpuFacts(32, None)) == 30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_quota_of_cgroup_version_2_is_the_smallest_on_the_way_up(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/pod/container\n")
    write(tmp_path / "sys/fs/cgroup/pod/container/cpu.max", "max 100000\n")
    write(tmp_path / "sys/fs/cgroup/pod/cpu.max", "1650000 100000\n")
    assert read_quota_cpus(tmp_path) == 16.5
    write(tmp_path / "sys/fs/cgroup/pod/container/cpu.max", "400000 100000\n")
    assert read_quota_cpus(tmp_path) == 4.0


def test_quota_of_cgroup_version_2_mounted_at_the_container(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/a/path/of/the/host\n")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "200000 100000\n")
    assert read_quota_cpus(tmp_path) == 2.0


def test_quota_of_cgroup_version_1(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "5:memory:/x\n4:cpu,cpuacct:/job\n")
    write(tmp_path / "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "300000\n")
    write(tmp_path / "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n")
    assert read_quota_cpus(tmp_path) == 3.0
    write(tmp_path / "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "-1\n")
    assert read_quota_cpus(tmp_path) is None


def test_no_cgroup_no_quota(tmp_path: Path) -> None:
    assert read_quota_cpus(tmp_path) is None


def test_this_process() -> None:
    facts = read_cpu_facts()
    assert facts.affinity_cpus == len(os.sched_getaffinity(0))
    assert facts.quota_cpus is None or facts.quota_cpus > 0
