"""The report of a run on a GPU: what torch's allocator says is in it, and taking it waits for nothing."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from hostward.cli import main
from hostward.cli.output import Progress
from hostward.config.overrides import apply_overrides
from hostward.recipes import load
from hostward.report.schema import Ended, read_report
from hostward.trainer import loop, setup
from hostward.trainer.report import report

pytestmark = pytest.mark.gpu

TINY = "qwen3_moe_tiny_pretrain_config"
WORDS = [
    *("model.num_layers=2", "model.hidden_size=64", "model.moe_ffn_hidden_size=64", "model.seq_length=64"),
    *("optimizer.optimizer_cpu_offload=True", "optimizer.optimizer_offload_fraction=0.5", "train.device=cuda"),
]


class FakeTerminal(io.StringIO):
    """A stream that says it is a terminal, and keeps what is written."""

    def isatty(self) -> bool:
        return True


def test_a_run_on_a_gpu_reports_what_the_allocator_says(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert main(["train", *WORDS, "train.train_iters=16", "--run-dir", str(folder)]) == 0
    found = read_report(folder)
    assert not found.simulated
    assert found.machine["device"] == torch.cuda.get_device_name()
    assert found.machine["device_memory_bytes"] > 10**9
    rows, samples = found.steps(), found.memory_over_time
    assert len(rows) == 16
    assert all(0 < (row.device_allocated_bytes or 0) <= (row.device_peak_bytes or 0) for row in rows)
    assert found.measured.device_peak_bytes == found.memory.device_peak_bytes
    rest = samples.rest_of_device_bytes
    assert rest is not None
    # At the end of forward the layers' saved activations are there; at the end of backward they are gone.
    forward, backward = (
        [n for n, moment in zip(rest, samples.moments, strict=True) if moment == wanted]
        for wanted in ("forward", "backward")
    )
    assert min(forward[3:]) > max(backward[3:])
    assert found.offload is not None
    assert found.measured.exposed_s == found.offload.exposed_s
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "activations and workspaces" in page
    assert "the GPU was idle for it" in page


def test_taking_a_report_waits_for_nothing(no_host_waits: Callable[[], AbstractContextManager[None]]) -> None:
    run = setup.prepare(TINY, apply_overrides(load(TINY), [*WORDS, "train.train_iters=4"]))
    loop.train(run)
    with no_host_waits(), Progress(FakeTerminal()) as progress:
        torch.cuda._sleep(int(2e9))  # about a second of work
        busy = torch.cuda.Event()
        busy.record()
        run.sampler.issued(4)
        progress.show(run)
        made = report(run, {"date": "", "command": "", "versions": {}}, ended=Ended.RUNNING)
        assert not busy.query()
    assert len(made.losses) == 4
    torch.cuda.synchronize()
