"""Which CPUs ranks get, on made-up machines, and that a process can be bound with all its threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hostward.kernels.cpu.affinity import CpuFacts, RankCpus, bind, cpus_for, default_threads
from hostward.trainer import process_group
from hostward.trainer.process_group import Ranks, bind_beside_gpu

ALL = frozenset(range(16))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two NUMA nodes of four cores each, of two threads each: CPU 0 and 8 are one core, 1 and 9 the next."""
    for node in (0, 1):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{4 * node}-{4 * node + 3},{4 * node + 8}-{4 * node + 11}\n")
    for cpu in ALL:
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    return tmp_path


def on(*numa_nodes: int | None, machine: str = "a", allowed: frozenset[int] = ALL) -> list[RankCpus]:
    return [RankCpus(machine, node, allowed) for node in numa_nodes]


def given(told: list[RankCpus], root: Path) -> list[set[int] | None]:
    found = [cpus_for(rank, told, root) for rank in range(len(told))]
    return [None if cpus is None else set(cpus) for cpus in found]


def test_ranks_share_the_whole_cores_beside_their_gpus(root: Path) -> None:
    assert given(on(0, 0, 1, 1), root) == [{0, 8, 1, 9}, {2, 10, 3, 11}, {4, 12, 5, 13}, {6, 14, 7, 15}]
    assert given(on(1, 0, 1), root) == [{4, 12, 5, 13}, {0, 8, 1, 9, 2, 10, 3, 11}, {6, 14, 7, 15}]


def test_no_core_is_lost_and_none_is_given_twice(root: Path) -> None:
    for ranks in range(2, 5):
        found = given(on(*[0] * ranks), root)
        assert sorted(cpu for cpus in found for cpu in cpus or ()) == [0, 1, 2, 3, 8, 9, 10, 11]


def test_machines_are_divided_each_by_its_own_ranks(root: Path) -> None:
    told = [*on(0, 1), *on(0, 1, machine="b")]
    assert given(told, root) == 2 * [{0, 8, 1, 9, 2, 10, 3, 11}, {4, 12, 5, 13, 6, 14, 7, 15}]
    assert given([*on(0), *on(0, machine="b")], root) == [None, None]  # one rank has the machine to itself


def test_t78_without_a_known_node_or_enough_cores_nothing_is_bound(root: Path) -> None:
    assert given(on(None, None), root) == [None, None]
    assert given(on(0, 0, allowed=frozenset({0, 8})), root) == [None, None]  # one core
    assert given(on(1, 1, allowed=frozenset({0, 8, 1, 9})), root) == [None, None]  # all of them far from the GPU
    assert given(on(0, 1), root / "nothing is there") == [None, None]


def test_what_a_launcher_has_bound_stays_and_is_not_divided_again(root: Path) -> None:
    mine, theirs = frozenset({0, 1, 4}), frozenset({2, 3, 6})
    known = [RankCpus("a", 0, mine), RankCpus("a", 0, theirs)]
    assert given(known, root) == [{0, 1}, {2, 3}]
    unknown = [RankCpus("a", None, mine), RankCpus("a", None, theirs)]
    assert given(unknown, root) == [set(mine), set(theirs)]


BOUND = """
import os, sys, threading
from hostward.kernels.cpu.affinity import bind
ended = threading.Event()
before = threading.Thread(target=ended.wait)
before.start()
bind({int(sys.argv[1])})
after = threading.Thread(target=ended.wait)
after.start()
masks = {frozenset(os.sched_getaffinity(int(t))) for t in os.listdir("/proc/self/task")}
ended.set()
assert masks == {frozenset({int(sys.argv[1])})}, masks
"""


def test_all_threads_of_a_process_are_bound() -> None:
    cpu = max(os.sched_getaffinity(0))
    done = subprocess.run([sys.executable, "-c", BOUND, str(cpu)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class OneOfTwo(Ranks):
    """The first of two ranks of one machine, whose neighbour has told the same of its CPUs and GPU."""

    def gather(self, value: object) -> list[object]:  # type: ignore[override]
        return [value, value]


def test_threads_are_counted_by_the_cpus_that_a_rank_was_bound_to(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[object] = []
    monkeypatch.setattr(process_group.os, "sched_getaffinity", lambda _: set(ALL))
    monkeypatch.setattr(process_group, "_numa_node", lambda *_: 1)
    monkeypatch.setattr(process_group, "bind", bound.append)
    ranks = OneOfTwo(0, 2, 0, 2)
    facts = bind_beside_gpu(ranks, torch.device("cpu"), root)
    assert bound == [{4, 12, 5, 13}]
    assert facts == CpuFacts(8, None)
    assert ranks.torch_threads(facts) == 4
    assert default_threads({"LOCAL_WORLD_SIZE": "2"}, facts) == 2


def test_t78_a_system_that_allows_no_binding_is_told(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(cpus: object) -> None:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(process_group.os, "sched_getaffinity", lambda _: set(ALL))
    monkeypatch.setattr(process_group, "_numa_node", lambda *_: 1)
    monkeypatch.setattr(process_group, "bind", refused)
    assert bind_beside_gpu(OneOfTwo(0, 2, 0, 2), torch.device("cpu"), root) is None
    assert "could not be bound to the CPUs on the NUMA node of the GPU (not permitted)" in caplog.text


def test_one_process_is_not_bound() -> None:
    assert bind_beside_gpu(Ranks(), torch.device("cpu")) is None
    with pytest.raises(OSError, match="Invalid argument"):
        bind(frozenset({1023}))
