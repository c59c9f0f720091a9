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
from hostward.checkpoint.save_plan import PiecePlanner
from hostward.checkpoint.state_dict import empty_optimizer_tensors, pieces_of
from hostward.errors import CheckpointError, HostwardError
from hostward.optim.state_dict import Rows

AT_ONCE_BYTES = 8 << 20
WIDTH, DEPTH = 1024, 16
LARGE_WIDTH = 4096
ROLES = ("exp_avg", "exp_avg_sq", "main_param")
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
        for parameter in model.parameters():  # of rows in other blocks of FP8 moments, which have other scales
            parameter.grad.mul_(2.0 ** -(torch.arange(len(parameter)) % 40).view(-1, *[1] * (parameter.dim() - 1)))
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


def save_and_restore(folder: Path, at_once_bytes: int, most_bytes: int, width: int = WIDTH) -> None:
    torch.set_num_threads(1)
    model, optimizer = made(width)
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


def restore_one_large(folder: Path, uncut: bool, most_bytes: int) -> None:
    global DEPTH
    DEPTH = 1
    PiecePlanner.__init__.__kwdefaults__["piece_bytes"] = AT_ONCE_BYTES
    if uncut:
        api._in_large_chunks = lambda metadata: {"0.weight"}  # type: ignore[assignment]
    save_and_restore(folder, AT_ONCE_BYTES, most_bytes, width=LARGE_WIDTH)


def test_restoring_a_large_parameter_takes_a_few_of_its_rows(tmp_path: Path) -> None:
    """As an embedding is. The control reads it as a whole, as where other programs saved it in one chunk."""
    most = 12 * LARGE_WIDTH * LARGE_WIDTH * 3 // 4
    forked.call(restore_one_large, tmp_path / "rows", False, most, limit_s=60.0)
    with pytest.raises(RuntimeError):
        forked.call(restore_one_large, tmp_path / "whole", True, most, limit_s=60.0)


def test_restoring_takes_a_few_parameters_of_memory(tmp_path: Path) -> None:
    """With the pieces of files that threads read, and what Python imports then. The control reads the whole state."""
    most = STATE_BYTES * 7 // 8
    forked.call(save_and_restore, tmp_path / "pieces", AT_ONCE_BYTES, most, limit_s=60.0)
    with pytest.raises(RuntimeError):
        forked.call(save_and_restore, tmp_path / "whole", 8 << 30, most, limit_s=60.0)


def poisoned(*asked: Any) -> dict[str, torch.Tensor]:
    """What is not read must not be used."""
    tensors = empty_optimizer_tensors(*asked)
    for tensor in tensors.values():
        tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
    return tensors


FORMATS = [{}, {"exp_avg": torch.uint8, "exp_avg_sq": torch.bfloat16}, dict.fromkeys(ROLES, torch.bfloat16)]


@pytest.mark.parametrize("state_dtypes", FORMATS)
@pytest.mark.parametrize("options", [{"offload_fraction": 0.5, "streamed_fraction": 0.5}, {"offload_fraction": 0.0}])
def test_pieces_of_any_size_give_the_same_bits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, float],
    state_dtypes: dict[str, torch.dtype],
) -> None:
    """Seen red: rows that are read, or written, at the place of others; blocks of FP8 moments that are cut through; a
    weight that is set from rows that were not read.
    """
    # Less than one parameter has, as much as the largest tensor of its state.
    element_bytes = 2 if "main_param" in state_dtypes else 4
    monkeypatch.setattr(api, "LOADED_AT_ONCE_BYTES", 48 * 48 * element_bytes)
    monkeypatch.setattr(api, "empty_optimizer_tensors", poisoned)
    model, optimizer = made(48, state_dtypes=state_dtypes)
    stepped(model, optimizer, 2)
    path, expected = saved(tmp_path, model, optimizer), bits(model, optimizer)
    other, its = made(48, state_dtypes=state_dtypes, **options)
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
    found = pieces_of({**tensors, "model/0": torch.empty(3)}, 2500, uncut={"4"})
    cut = [[Rows("3", slice(0, 256))], [Rows("3", slice(256, 400))]]  # whole blocks of FP8 moments
    assert found == [[Rows("0"), Rows("1")], [Rows("2")], *cut, [Rows("4")]]
