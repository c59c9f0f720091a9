"""`hostward verify` on every rank, with a step that one of them gets wrong."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from train_cases import MOE, launched, small

from hostward.errors import HostwardError
from hostward.runtime.backend import Tier
from hostward.runtime.simulated import backend
from hostward.trainer import loop
from hostward.trainer.run import Run
from hostward.trainer.verify.cases import choose
from hostward.trainer.verify.command import verify


def _flipping(real: Any, steps: int) -> Any:
    """A bit of each buffer, in the last step alone: what flips in two of them may round back to what it was. Not the
    last bit, which the step rounds away.
    """
    seen = Counter[int]()

    def host_task(operands: Any, *rest: Any) -> Any:
        task = real(operands, *rest)
        if operands.exp_avg.tier is Tier.HOST:
            found = operands.exp_avg_sq.data.view(-1)[:1]
            seen[found.data_ptr()] += 1
            if seen[found.data_ptr()] == steps:
                found.view(torch.int32).bitwise_xor_(16)
        return task

    return host_task


def flip_a_bit_on_rank_1() -> None:
    """From now on every host step of this process flips one, if it is that rank."""
    if os.environ["RANK"] == "1":
        backend.host_task = _flipping(backend.host_task, small().train.train_iters)


def verdict(
    words: list[str],
    recipe: str = MOE,
    *,
    fractions: tuple[float, ...] = (1.0,),
    placements: tuple[str, ...] = (),
    microbatches: tuple[int, ...] = (),
    wrong: int | None = None,
    undeterministic: bool = False,
) -> Any:
    """What `verify` returns, as plain values, and its sentence; or the error.

    Args:
        wrong: the rank whose last host step flips a bit of the second moment.
        undeterministic: an operator of every rank has no deterministic form.
    """
    launched()
    config = small(*words, recipe=recipe)
    real_task, real_iteration = backend.host_task, loop.train_iteration

    def iteration(run: Run) -> None:
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError("some_backward does not have a deterministic implementation")
        real_iteration(run)

    if wrong == dist.get_rank():
        backend.host_task = _flipping(real_task, config.train.train_iters)
    if undeterministic:
        loop.train_iteration = iteration
    try:
        cases = choose(config, fractions, placements, (), microbatches, world_size=dist.get_world_size())
        found = verify(recipe, config, cases)
    except HostwardError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        backend.host_task, loop.train_iteration = real_task, real_iteration
    return {**found.to_dict(), "sentence": found.sentence}


def started_otherwise() -> str:
    """What the ranks say where the last one is to compare something else."""
    return str(verdict([], fractions=(1.0,) if dist.get_rank() < dist.get_world_size() - 1 else (0.5,)))
