"""A state is loaded where it is: a few parameters at a time, and no second copy of it is made."""

from __future__ import annotations

import ctypes
import gc
import re
import shutil
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

import hostward
import hostward.checkpoint as checkpoint
from hostward.checkpoint import api
from hostward.checkpoint.state_dict import pieces_of
from hostward.errors import CheckpointError, HostwardError

AT_ONCE_BYTES = 8 << 20
WIDTH, DEPTH = 1024, 16
STATE_BYTES = 12 * DEPTH * WIDTH * (WIDTH + 1)


def made(width: int = WIDTH, **options: Any) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(width, width, dtype=torch.bfloat16) for _ in range(DEPTH)]
    model = torch.nn.Sequential(*layers)
    return model, hostward.AdamW(model, **{"offload_fraction": 1.0, **options})


def stepped(model: torch.nn.Module, optimizer: Any, steps: int = 1) -> None:
    for step in range(steps):
        x = torch.full((4, model[0].in_features), 0.01 * (step + 1), dtype=torch.bfloat16)  # type: ignore[index]
        model(x).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()


def saved(folder: Path, model: torch.nn.Module, optimizer: Any) -> Path:
    parts = checkpoint.parts_of(model, optimizer)
    return api.save(folder, 1, tensors=parts.tensors, plain={"optimizer": parts.optimizer})


def bits(model: torch.nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    state = {f"{n}/{k}": v for n, entry in optimizer.state_dict()["state"].items() for k, v in entry.items()}
    return {**{n: p.detach().clone() for n, p in model.named_parameters()}, **state}


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def peak_bytes() -> int:
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


def save_and_restore(folder: Path, at_once_bytes: int, most_bytes: int) -> None:
    torch.set_num_threads(1)
    model, optimizer = made()
    stepped(model, optimizer)
    path, expected = saved(folder, model, optimizer), bits(model, optimizer)
    stepped(model, optimizer)
    api.LOADED_AT_ONCE_BYTES = at_once_bytes  # type: ignore[misc]
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that was given back is no longer this process's
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = peak_bytes()
    checkpoint.restore(path, model, optimizer)
    assert peak_bytes() - before < most_bytes
    assert_same(bits(model, optimizer), expected)


def test_restoring_takes_a_few_parameters_of_memory(tmp_path: Path) -> None:
    """With the pieces of files that threads read, and what Python imports then. The control reads the whole state."""
    most = STATE_BYTES * 7 // 8
    forked.call(save_and_restore, tmp_path / "pieces", AT_ONCE_BYTES, most, limit_s=60.0)
    with pytest.raises(RuntimeError):
        forked.call(save_and_restore, tmp_path / "whole", 8 << 30, most, limit_s=60.0)


@pytest.mark.parametrize("options", [{"offload_fraction": 0.5, "streamed_fraction": 0.5}, {"offload_fraction": 0.0}])
def test_pieces_of_any_size_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, float]
) -> None:
    monkeypatch.setattr(api, "LOADED_AT_ONCE_BYTES", 5000)  # less than one parameter has
    model, optimizer = made(40)
    stepped(model, optimizer, 2)
    path, expected = saved(tmp_path, model, optimizer), bits(model, optimizer)
    other, its = made(40, **options)
    stepped(other, its)
    checkpoint.restore(path, other, its)
    assert_same(bits(other, its), expected)
    stepped(model, optimizer)
    stepped(other, its)
    assert_same(bits(other, its), bits(model, optimizer))


def test_damage_is_found_before_anything_is_written(tmp_path: Path) -> None:
    model, optimizer = made(40)
    stepped(model, optimizer)
    path = saved(tmp_path, model, optimizer)
    stepped(model, optimizer)
    expected = bits(model, optimizer)
    file = max(path.glob("*.distcp"), key=lambda f: f.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError):
        checkpoint.restore(path, model, optimizer)
    assert_same(bits(model, optimizer), expected)


def test_a_disk_that_fails_meanwhile_leaves_no_optimizer_that_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "LOADED_AT_ONCE_BYTES", 5000)
    model, optimizer = made(40)
    stepped(model, optimizer)
    path, expected = saved(tmp_path / "run", model, optimizer), bits(model, optimizer)
    kept = tmp_path / "kept"
    shutil.copytree(path, kept)
    read, calls = api._Reading.read, []

    def failing(self: Any, **how: Any) -> None:
        calls.append(how)
        if len(calls) == 4:  # weights, and two pieces
            for file in path.glob("*.distcp"):
                file.unlink()
        read(self, **how)

    monkeypatch.setattr(api._Reading, "read", failing)
    with pytest.raises(CheckpointError):
        checkpoint.restore(path, model, optimizer)
    with pytest.raises(HostwardError):
        stepped(model, optimizer)
    monkeypatch.undo()
    checkpoint.restore(kept, model, optimizer)
    assert_same(bits(model, optimizer), expected)


def test_pieces_hold_each_parameter_once() -> None:
    tensors = {f"optimizer/{n}/{r}": torch.empty(100 * (n + 1)) for n in range(5) for r in ("exp_avg", "exp_avg_sq")}
    found = pieces_of({**tensors, "model/0": torch.empty(3)}, 2500)
    assert found == [["0", "1"], ["2"], ["3"], ["4"]]
