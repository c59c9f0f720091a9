"""T11: memory of the host that runs out is told before the kernel kills."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hostward.report.schema import StepBytes
from hostward.trainer.memory_sampler import FullDevice, Watermark

KIB_PER_GIB = 1024 * 1024
GIB = 1 << 30


def machine(root: Path, available_gib: float, total_gib: int = 100) -> None:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: {total_gib * KIB_PER_GIB} kB\nMemAvailable: {int(available_gib * KIB_PER_GIB)} kB\n"
    )
    (root / "proc/self/status").write_text(f"VmRSS:\t{80 * KIB_PER_GIB} kB\n")


def test_t11_each_level_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watermark = Watermark(tmp_path, interval_s=0)
    told = []
    with caplog.at_level(logging.WARNING, logger="hostward"):
        for iteration, available_gib in enumerate((50, 6, 5, 4, 30, 4, 1.5, 1)):
            machine(tmp_path, available_gib)
            watermark.look(iteration)
            told.append(len(caplog.messages))
    assert told == [0, 0, 1, 1, 1, 1, 2, 2]
    first = caplog.messages[0]
    assert "iteration 2: 95 % of the host's memory is in use" in first
    assert "5.0 GiB left of 100.0 by the machine; this process has 80.0" in first


def test_t11_both_levels_at_once_are_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    machine(tmp_path, 0.5)
    watermark = Watermark(tmp_path, interval_s=0)
    with caplog.at_level(logging.WARNING, logger="hostward"):
        watermark.look(0)
        watermark.look(1)
    assert len(caplog.messages) == 1


def test_t11_it_looks_no_more_often_than_asked_and_not_once_all_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory that is gone cannot be looked at without an error."""
    machine(tmp_path, 50)
    seldom, told = Watermark(tmp_path, interval_s=3600), Watermark(tmp_path, interval_s=0)
    with caplog.at_level(logging.WARNING, logger="hostward"):
        seldom.look(0)
        machine(tmp_path, 0.5)
        seldom.look(1)
        assert caplog.messages == []
        told.look(1)
    assert len(caplog.messages) == 1
    (tmp_path / "proc/meminfo").unlink()
    told.look(2)
    with pytest.raises(FileNotFoundError):
        Watermark(tmp_path, interval_s=0).look(2)


def full(retries: int | None) -> StepBytes:
    return StepBytes(50 * GIB, 134 * GIB, GIB, 0, 137 * GIB, retries)


def test_an_allocator_that_gives_memory_back_in_every_iteration_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """In such a run no operation is seen to wait."""
    device, told = FullDevice(), []
    with caplog.at_level(logging.WARNING, logger="hostward"):
        for iteration, retries in enumerate((2, 3, 3, 5, 7, 8, 11, 12, 13)):
            device.look(iteration, full(retries))
            told.append(len(caplog.messages))
    assert told == [0, 0, 0, 0, 0, 0, 1, 1, 1]
    assert "iterations 3 to 6" in caplog.text
    assert "3 times in the last" in caplog.text
    assert "It holds 137.0 GiB, of which at most 134.0 are in use" in caplog.text


def test_pools_that_find_their_sizes_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    device, without = FullDevice(), FullDevice()
    with caplog.at_level(logging.WARNING, logger="hostward"):
        for iteration, retries in enumerate((1, 2, 3, 3, 4, 4, 4)):
            device.look(iteration, full(retries))
            without.look(iteration, full(None))
    assert not caplog.messages
