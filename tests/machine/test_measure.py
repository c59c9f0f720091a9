"""Measuring this machine, on whatever it has; and the numbers that a made-up machine of known speed gives."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from hostward.machine import measure
from hostward.machine.measure import measure_machine, render
from hostward.plan.hardware_profile import Hardware, profile
from hostward.runtime.calibrate import RMW_BYTES, ReadModifyWrite

SMALL = measure._Effort((1 << 20, 4 << 20), 16 << 20, 32 << 20, 1 << 20, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="takes pinned memory; tests/gpu measures with a GPU")
def test_a_machine_without_a_gpu_is_measured_as_far_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "QUICK", SMALL)
    stages: list[str] = []
    hardware = measure_machine(quick=True, threads=1, progress=stages.append)
    assert stages == ["host memory", "CPU optimizer step"]
    assert Hardware.from_json(hardware.to_json()) == hardware
    assert (hardware.gpu, hardware.gpu_count, hardware.links) == (None, 0, ())
    assert (hardware.pinned_s_per_gib, hardware.duplex_bytes_per_s, hardware.rates) == (None, None, None)
    assert hardware.threads == 1
    assert hardware.measured_at is not None
    assert hardware.dram_bytes_per_s is not None
    assert hardware.host_parameters_per_s is not None
    assert 1e8 < hardware.dram_bytes_per_s < 1e13
    assert 1e6 < hardware.host_parameters_per_s < 1e12
    assert hardware.cpu.instruction_sets
    assert hardware.limits.memory_bytes


class SlowFirstPasses(ReadModifyWrite):
    """A loop of 1,000 elements: the first two passes of a setting take 1 s, the others 0.5 s without prefetch and
    0.25 s with it.
    """

    def __init__(self) -> None:
        self.elements = 1000
        self.asked: list[int] = []

    def run(self, threads: int, prefetch: int) -> float:
        self.asked.append(prefetch)
        return 1.0 if self.asked.count(prefetch) <= 2 else (0.25 if prefetch else 0.5)


def test_the_roof_is_the_faster_setting_without_its_first_passes() -> None:
    loop = SlowFirstPasses()
    assert loop.fastest(1, rounds=4) == (4000.0, 1)
    assert loop.asked == [0] * 4 + [1] * 4


def test_the_roof_moves_the_bytes_of_a_step() -> None:
    # Read and write of two fp32 and two 16-bit streams, read of a 16-bit gradient.
    assert RMW_BYTES == 2 * (4 + 4 + 2 + 2) + 2


@pytest.mark.parametrize("name", ["h200", "rtx-4090"])
def test_the_table_shows_known_and_unknown_rates(name: str) -> None:
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(render(profile(name)))
    text = console.export_text()
    assert ("54.9 | 55.1 | 91.6 GB/s" in text) == (name == "h200")
    assert ("0.05 s/GiB" in text) == (name == "h200")
    assert text.count(" - ") == (0 if name == "h200" else 6)
