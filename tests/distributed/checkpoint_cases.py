"""What ranks do with checkpoints of ours: saved by some of them, loaded by others. Results are digests of bits."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sharded_cases import (
    DTYPES,
    Net,
    adamw,
    backward,
    digest,
    gradient_of,
    loss_of,
    mesh_of,
    snapshot,
    whole_of,
)
from torch.distributed.fsdp import fully_shard

import hostward
from hostward import recipes
from hostward.checkpoint import api, staging
from hostward.checkpoint.save_plan import PiecePlanner
from hostward.config.overrides import apply_overrides
from hostward.distributed import fsdp2
from hostward.kernels.cpu.memory_copy import copy
from hostward.trainer import checkpointing
from hostward.trainer.process_group import Ranks

RANKS = (1, 2, 4)
FRACTIONS = ("device", "mixed", "host")
DTYPE = "bf16"


def mesh_for(ranks: int) -> str | None:
    """The name of the mesh of so many ranks; None: of one."""
    if ranks == dist.get_world_size():
        return "all"
    return None if ranks == 1 else "pairs"


def made(ranks: int, mix: str, **options: Any) -> tuple[Any, hostward.AdamW]:
    """The network and its optimizer on so many ranks, which may be all; other ranks have their own."""
    model: Any = Net().to(DTYPES[DTYPE])
    model.blocks = model.blocks[:1]
    mesh = mesh_for(ranks)
    if mesh is not None:
        fully_shard(model.blocks[0], mesh=mesh_of(mesh))
        fully_shard(model, mesh=mesh_of(mesh))
    return model, adamw(model, mix, **options)


def group_of(ranks: int) -> dist.ProcessGroup | None:
    mesh = mesh_for(ranks)
    return None if mesh is None else mesh_of(mesh).get_group()


def step_given(model: Any, optimizer: hostward.AdamW, step: int) -> None:
    """One step from gradients that depend on the name, the shape and the step alone."""
    for name, p in model.named_parameters():
        whole = gradient_of(name, p.shape, step).to(p.dtype)
        p.grad = fsdp2.like(fsdp2.part_of_saved(name, whole, p).clone(), p) if fsdp2.is_sharded(p) else whole
    optimizer.step()


def bits(model: Any, optimizer: hostward.AdamW) -> dict[str, str]:
    """Digests of whole weights and state."""
    optimizer.wait()
    found = {f"weight {name}": digest(whole_of(p)) for name, p in model.named_parameters()}
    for name, entry in optimizer.state_dict()["state"].items():
        found |= {f"{role} {name}": digest(whole_of(value).view(-1)) for role, value in entry.items()}
    return found


def save_all(folder: str) -> dict[str, str]:
    """Save at every fraction and number of ranks, after two steps of given gradients; returns the bits of one rank, and
    those after a third step.
    """
    found: dict[str, str] = {}
    for mesh in ("pairs", "all"):
        mesh_of(mesh)  # by all ranks
    for ranks in RANKS:
        for mix in FRACTIONS:
            if dist.get_rank() < ranks:
                model, optimizer = made(ranks, mix)
                for step in (0, 1):
                    step_given(model, optimizer, step)
                parts = api.parts_of(model, optimizer)
                plain = {"optimizer": parts.optimizer, "consumed_samples": 16}
                path = Path(folder) / f"{ranks}-{mix}"
                api.save(path, 2, tensors=parts.tensors, plain=plain, group=group_of(ranks))
                if ranks == 1 and mix == "device":
                    found = bits(model, optimizer)
                    step_given(model, optimizer, 2)
                    found |= {f"later {name}": value for name, value in bits(model, optimizer).items()}
            dist.barrier()
    return found


def saver_for(ranks: int, mix: str) -> str:
    """The checkpoint that is loaded by so many ranks at this fraction. Of the nine by nine pairs of who saves and who
    loads these are nine, in which any two of the four properties take all their values together.
    """
    i, j = RANKS.index(ranks), FRACTIONS.index(mix)
    return f"{RANKS[(i + j) % 3]}-{FRACTIONS[(i + 2 * j) % 3]}"


def load(folder: str, ranks: int, mix: str) -> dict[str, str]:
    """What is loaded here of the checkpoint of `saver_for`, over other weights and state, and after a step."""
    group_of(ranks)  # by all ranks
    if dist.get_rank() >= ranks:
        return {}
    model, optimizer = made(ranks, mix)
    step_given(model, optimizer, 3)
    path = Path(folder) / saver_for(ranks, mix) / "iter_0000002"
    with pytest.MonkeyPatch.context() as patched:  # shards of large parameters are read some rows at a time
        patched.setattr(api, "LOADED_AT_ONCE_BYTES", 4096)
        patched.setattr(api, "_in_large_chunks", lambda metadata: set())
        api.restore(path, model, optimizer, group=group_of(ranks))
    assert api.read_plain(path)["consumed_samples"] == 16
    found = bits(model, optimizer)
    step_given(model, optimizer, 2)
    return found | {f"later {name}": value for name, value in bits(model, optimizer).items()}


@contextlib.contextmanager
def slow_reads(delay_s: float) -> Iterator[None]:
    """The state is read slowly, so that training comes to its next step before all is read."""
    from time import sleep

    def slow(call: Callable[..., Any]) -> Callable[..., Any]:
        def later(*arguments: Any, **named: Any) -> Any:
            sleep(delay_s)
            return call(*arguments, **named)

        return later

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PiecePlanner, "read", slow(PiecePlanner.read))
        patched.setattr(staging, "copy", slow(copy))
        patched.setattr(staging, "_TOGETHER_BYTES", 1)
        yield


def saved_beside(folder: str, mode: str, mix: str) -> tuple[dict[str, str], dict[str, str], list[Any], list[Any]]:
    """Train, save after two steps beside three more; returns the bits of that step and of what was saved, and how it
    went on with and without a save.
    """
    told: list[list[Any]] = [[], []]
    expected: dict[str, str] = {}
    for saves in (False, True):
        model, optimizer = made(dist.get_world_size(), mix, order="late")
        saver = api.Saver(Path(folder), mode=mode, group=dist.group.WORLD)  # type: ignore[arg-type]
        with slow_reads(0.002):
            for step in range(5):
                if step == 2 and saves:
                    parts = api.parts_of(model, optimizer)
                    saver.save(2, tensors=parts.tensors, plain={"optimizer": parts.optimizer})
                elif step == 2:
                    expected = snapshot(model, optimizer)
                optimizer.zero_grad()
                backward(model, optimizer, step, 1, True, True, False)
                optimizer.step()
                told[saves].append(optimizer.grad_norm.hex())
            told[saves].append(snapshot(model, optimizer))
            path = saver.finish()
        saver.close()
    assert path is not None
    model, optimizer = made(dist.get_world_size(), "device")
    api.restore(path, model, optimizer, group=dist.group.WORLD)
    return expected, snapshot(model, optimizer), told[0], told[1]


def refused(folder: str, what: str) -> str:
    """What every rank is told if one of them cannot take part."""
    model, optimizer = made(4, "mixed")
    loss_of(model, 0).backward()
    optimizer.step()
    parts = api.parts_of(model, optimizer)
    tensors, plain = dict(parts.tensors), {"optimizer": parts.optimizer}
    if what == "value" and dist.get_rank() == 2:
        tensors["no tensor"] = 3  # type: ignore[assignment]
    path = Path(folder)
    if what == "lock" and dist.get_rank() == 1:
        path.mkdir(parents=True, exist_ok=True)
        held = api.files.locked(path)
        held.__enter__()
    dist.barrier()
    try:
        api.save(path, 1, tensors=tensors, plain=plain, group=dist.group.WORLD)
    except hostward.HostwardError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()
        if what == "lock" and dist.get_rank() == 1:
            held.__exit__(None, None, None)
    return "no error"


def load_damaged(path: str) -> str:
    """What every rank is told about a checkpoint of which one chunk is damaged; nothing may be loaded."""
    model, optimizer = made(4, "device")
    before = snapshot(model, optimizer)
    try:
        api.restore(Path(path), model, optimizer, group=dist.group.WORLD)
    except hostward.HostwardError as error:
        assert snapshot(model, optimizer) == before
        return f"{type(error).__name__}: {error}"
    return "no error"


def run_of(folder: str, mode: str | None) -> Any:
    """What `hostward train` would hold of a run on all ranks, as far as its checkpoints go."""
    words = [f"checkpoint.save={folder}", f"checkpoint.load={folder}"]
    words += [] if mode is None else ["checkpoint.async_save=true", f"checkpoint.async_save_mode={mode}"]
    config = apply_overrides(recipes.load("qwen3_moe_tiny_pretrain_config"), words)
    model, optimizer = made(dist.get_world_size(), "mixed")
    return SimpleNamespace(
        recipe="tiny",
        config=config,
        device=torch.device("cpu"),
        dataset=SimpleNamespace(fingerprint="words"),
        model=model,
        optimizer=optimizer,
        ranks=Ranks(dist.get_rank(), dist.get_world_size()),
        scaler=None,
        iteration=2,
        saver=None,
        saved=None,
        keeps_folders=True,
    )


def draws() -> tuple[Any, ...]:
    return random.random(), float(np.random.rand()), torch.rand(3).tolist()


def resumed_run(folder: str, mode: str | None) -> tuple[bool, bool, int]:
    """Save a run on all ranks, each with random numbers of its own; whether state and random numbers go on."""
    run, rank = run_of(folder, mode), dist.get_rank()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(100 + rank)
    step_given(run.model, run.optimizer, 0)
    with checkpointing.saves(run):
        checkpointing.save(run)
        expected, drawn = bits(run.model, run.optimizer), draws()
        if run.saver is not None:
            run.saver.finish()
        run.config.checkpoint.save = None
    again = run_of(folder, mode)
    checkpointing.load(again, api.latest(Path(folder)))  # type: ignore[arg-type]
    return bits(again.model, again.optimizer) == expected, draws() == drawn, again.iteration
