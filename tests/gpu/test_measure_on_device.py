"""Facts and rates of a machine with a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from hostward.doctor.examine import examine
from hostward.machine.facts import gather, read_devices
from hostward.machine.measure import measure_machine, render
from hostward.plan.hardware_profile import Hardware

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


def test_a_machine_with_a_gpu_is_measured_in_full() -> None:
    torch.mm(*(torch.ones(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)))  # cuBLAS keeps a workspace
    before_bytes = torch.cuda.memory_allocated()
    hardware = measure_machine(quick=True)
    assert torch.cuda.memory_allocated() < before_bytes + (64 << 20)
    assert Hardware.from_json(hardware.to_json()) == hardware
    assert hardware.gpu is not None
    assert hardware.gpu.bf16_matmul_flops_per_s is not None
    assert 1e12 < hardware.gpu.bf16_matmul_flops_per_s < 1e16
    assert [link.copy_bytes for link in hardware.links] == sorted(link.copy_bytes for link in hardware.links)
    for link in hardware.links:
        assert link.duplex_bytes_per_s is not None
        # Both directions at once carry more than one alone, and no more than both.
        assert 0.9 * max(link.h2d_bytes_per_s, link.d2h_bytes_per_s) < link.duplex_bytes_per_s
        assert link.duplex_bytes_per_s < 1.2 * (link.h2d_bytes_per_s + link.d2h_bytes_per_s)
    assert hardware.pinned_s_per_gib is not None
    assert 0.001 < hardware.pinned_s_per_gib < 10
    assert hardware.rates is not None
    assert hardware.rates.busy_host_parameters_per_s <= 1.1 * hardware.rates.host_parameters_per_s
    assert render(hardware).row_count == len(hardware.links) + 6


def test_the_doctor_sees_the_gpu() -> None:
    devices = read_devices()
    assert devices.error is None
    assert devices.pinned_error is None
    assert len(devices.gpus) == torch.cuda.device_count()
    assert devices.gpus[0].name == torch.cuda.get_device_name(0)
    assert devices.gpus[0].free_bytes is not None
    facts = gather(os.environ, devices)
    assert all(f.what and f.why and f.fix for f in examine(facts))
