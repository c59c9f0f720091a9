"""What each rank does whose parameters are flat parts of larger ones, as owners of flat buffers cut them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sharded_cases import MIXES, ORDERS, mesh_of

import hostward
from hostward.errors import HostwardError
from hostward.runtime.simulated.backend import SimulatedBackend

CHUNK = 4096
DENSE = {"embed.weight": 70_001, "layers.0.weight": 12_345, "layers.0.bias": 77, "layers.1.weight": 9_999}
EXPERTS = {"layers.0.expert": 5_001, "layers.1.expert": 9_001}
"""Of each pair of ranks, which has others than the other pair."""
REPLICA = {"layers.1.norm": 4_500}
"""Of each pair of ranks, and the same on both."""
BORDER = 11
"""A chunk of the first parameter within which the border between two ranks is, and the middle one of four."""
STEPS = 4


def cut(wholes: Mapping[str, int], ranks: int, rank: int) -> dict[str, hostward.FlatPart]:
    """The parts that a rank has of a buffer in which the parameters lie one after another: an equal run for each."""
    each, begin, found = -(-sum(wholes.values()) // ranks), 0, {}
    for name, numel in wholes.items():
        start, stop = (min(max(at - begin, 0), numel) for at in (rank * each, (rank + 1) * each))
        if start < stop:
            found[name] = hostward.FlatPart(name, start, stop, numel)
        begin += numel
    return found


def whole(name: str, numel: int, step: int) -> torch.Tensor:
    """The whole weight of a parameter before step 0 (-1), or its gradient in a step.

    In step 0 the sum of squares is half-way between those of two fp32 norms, but for values that are too small to be
    counted in a chunk that has the others in it. In step 2 one value is not finite.
    """
    of = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    if step == 0:
        made = torch.zeros(numel)
        if name == "embed.weight":
            made[BORDER * CHUNK : BORDER * CHUNK + 4] = torch.tensor([1.0, 2.0**-12, 2.0**-12, 2.0**-24])
            made[(BORDER + 1) * CHUNK - 2000 : (BORDER + 1) * CHUNK] = 2.0**-26
        return made
    made = torch.randn(numel, generator=of) * 0.1
    if step > 0:
        made *= torch.exp2(torch.randint(-20, 4, (numel,), generator=of).float())
    if step == 2 and name == "embed.weight":
        made[(BORDER + 1) * CHUNK - 1] = float("nan")
    return made.to(torch.bfloat16).float()  # for those that are added up in fp32, from gradients in bf16


def stepped(
    ways: str = "one", mix: str = "device", order: str = "late", told: bool = True, **options: Any
) -> dict[str, Any]:
    """Norms, skipped steps, and what becomes of the elements that this rank has, by the names of one process.

    Args:
        ways: "one": this process has all of `DENSE`; "all": ranks have parts of it. "one with pairs": it has what
            both pairs have, too; "pairs": as "all", and pairs of ranks have parts of what is theirs.
        told: whether the optimizer knows how parameters are cut.
    """
    size, rank = (1, 0) if ways.startswith("one") else (dist.get_world_size(), dist.get_rank())
    parts, uncounted, alias = cut(DENSE, size, rank), [], {}
    shards = [hostward.FlatShards(parts, None if ways.startswith("one") else dist.group.WORLD)]
    if ways == "one with pairs":
        own = {f"{name} {pair}": numel for name, numel in EXPERTS.items() for pair in range(2)} | REPLICA
        shards.append(hostward.FlatShards(cut(own, 1, 0)))
    if ways == "pairs":
        pair, group = rank % 2, mesh_of("hybrid").get_group("copy")
        shards.append(hostward.FlatShards(cut({**EXPERTS, **REPLICA}, 2, rank // 2), group))
        alias = {name: f"{name} {pair}" for name in EXPERTS}
        uncounted = [name for name in REPLICA if pair and name in shards[-1].parts]
        options["stages"] = dist.group.WORLD
    parts = {name: part for each in shards for name, part in each.parts.items()}
    named = {}
    for name, part in parts.items():
        weight = whole(alias.get(name, name), part.numel, -1)[part.start : part.stop]
        named[name] = torch.nn.Parameter(weight.to(torch.bfloat16))
    if not told:
        options["stages"] = dist.group.WORLD
    optimizer = hostward.AdamW(
        named.items(),
        lr=1e-2,
        max_grad_norm=0.5,
        waits="manual",
        grad_dtype=None if options.get("gradients") else torch.float32,
        backend=SimulatedBackend(order=ORDERS[order], threads=1),
        shards=shards if told else (),
        uncounted=uncounted,
        **MIXES[mix],
        **options,
    )
    norms, skipped = [], []
    for step in range(STEPS):
        for name, part in parts.items():
            gradient = whole(alias.get(name, name), part.numel, step)[part.start : part.stop]
            optimizer.wait_for_weights([name])
            optimizer.take_gradient(name, gradient.to(named[name].grad_dtype, copy=True))
        optimizer.step()
        norms.append(optimizer.grad_norm)
        skipped.append(optimizer.last_step_skipped)
    pieces = []
    for name, part in parts.items():
        state = {key: value.numpy().copy() for key, value in optimizer.state_of(name).items()}
        pieces.append((alias.get(name, name), optimizer.parts.get(name, part), state))
    return {"norms": norms, "skipped": skipped, "pieces": pieces}


def joined(pieces: Iterable[tuple[str, hostward.FlatPart, Mapping[str, Any]]]) -> dict[str, bytes]:
    """The bits of whole state tensors, of pieces from all ranks."""
    found: dict[str, Any] = {}
    for name, part, state in pieces:
        for key in ("exp_avg", "exp_avg_sq", "master"):
            tensor = found.setdefault(f"{key} {name}", np.full(part.numel, np.inf, dtype=np.float32))
            tensor[part.start : part.stop] = state[key]
        assert int(state["step"]) == STEPS - 1  # one is skipped
    return {name: tensor.tobytes() for name, tensor in found.items()}


def refused(parts: list[Mapping[str, tuple[Any, ...]]]) -> str:
    """What making shards of these parts, one mapping for each rank, raises here."""
    try:
        mine = {name: hostward.FlatPart(*of) for name, of in parts[dist.get_rank()].items()}
        hostward.FlatShards(mine, dist.group.WORLD)
    except HostwardError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
