"""What each rank does of a pipeline, beside what `train_cases` has."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from sharded_cases import mesh_of, snapshot
from train_cases import MOE, QWEN3, launched, small, weights_of

from hostward.distributed import fsdp2
from hostward.distributed.pipeline_parallel import Part
from hostward.errors import HostwardError, MemoryLimitError
from hostward.optim.adamw import AdamW
from hostward.optim.offloaded_grad import OffloadedGrad
from hostward.trainer import checkpointing, loop, setup
from hostward.trainer.parallel import Held
from hostward.trainer.run import Run
from hostward.trainer.setup import passes_of


def leaving(words: list[str], recipe: str = QWEN3) -> dict[str, bool]:
    """By parameter of this rank's first layer: whether gradients of its last layer have left when this one comes, in
    the last backward and in those before.
    """
    launched()
    run = setup.prepare(recipe, small(*words, recipe=recipe))
    layers: list[Any] = list(run.model.model.layers)  # type: ignore[union-attr, arg-type]
    (late,) = layers[0].input_layernorm.parameters()
    early = list(layers[-1].mlp.parameters())
    found: list[bool] = []
    late.register_post_accumulate_grad_hook(
        lambda _: found.append(all(isinstance(p.grad, OffloadedGrad) for p in early))
    )
    loop.backward(run)
    return {"last": found[-1], "before": any(found[:-1]), "microbatches": len(found) == run.microbatches}


def between_passes(words: list[str], recipe: str = QWEN3) -> dict[str, Any]:
    """What is on the device between passes of two steps: in how many of them something that FSDP2 gathers is whole, or
    on its way; the most bytes of weights that leave. And what these come to, after each step.
    """
    launched()
    run = setup.prepare(recipe, small(*words, recipe=recipe))
    groups = [g for m in run.model.modules() for g in fsdp2.fsdp_groups_of(m)]
    passes: Any = run.passes
    whole: list[bool] = []
    here: list[int] = []
    passed = passes.passed

    def seen(part: Part, *, backward: bool) -> None:
        passed(part, backward=backward)
        whole.append(not all(g.is_sharded and g._all_gather_result is None for g in groups))
        here.append(weights_of(run).get("here", 0))

    passes.passed = seen
    after = []
    for _ in range(2):
        loop.train_iteration(run)
        after.append(weights_of(run))
    return {"passes": len(whole), "whole": sum(whole), "here": max(here), "after": after, "groups": len(groups)}


def scaled(words: list[str], recipe: str = QWEN3, *, until: int, save: bool = False) -> dict[str, Any]:
    """`scales_of` on this rank; afterwards the run is saved, if it is to be."""
    launched()
    run = setup.prepare(recipe, small(*words, recipe=recipe))
    found = scales_of(run, until)
    if save:
        with checkpointing.saves(run):
            checkpointing.save(run)
    return found


def scales_of(run: Run, until: int) -> dict[str, Any]:
    """Scale and growth tracker at the start and after each iteration, bits, and iterations that were skipped, if in
    iteration 2 a gradient of the second layer alone is infinite.
    """
    scaler, name = run.scaler, "model.layers.1.mlp.up_proj.weight"
    assert scaler is not None
    scaler.set_growth_interval(2)
    for weight in (p for n, p in run.model.named_parameters() if n == name):
        weight.register_hook(lambda gradient: gradient * (float("inf") if run.iteration == 2 else 1.0))  # type: ignore[no-untyped-call]
    scales = [(scaler.get_scale(), scaler.state_dict()["_growth_tracker"])]
    while run.iteration < until:
        loop.train_iteration(run)
        scales.append((scaler.get_scale(), scaler.state_dict()["_growth_tracker"]))
    loop.collect(run, everything=True)
    return {"scales": scales, "skipped": run.skipped, "bits": snapshot(run.model, run.optimizer)}


def tied_misused() -> list[str]:
    """What is said where a weight that other stages have as well is not added up, or twice, or cannot be."""
    group = mesh_of("alone").get_group()
    said: list[str] = []

    def try_to(call: Any) -> None:
        try:
            call()
            said.append("no error")
        except HostwardError as error:
            said.append(f"{type(error).__name__}: {error.what}")

    for overlap in (True, False):
        model = torch.nn.Linear(2, 2)
        optimizer = AdamW(model, stages=group, tied={"weight": group}, overlap=overlap)

        def backward(model: torch.nn.Module = model, optimizer: AdamW = optimizer) -> None:
            with optimizer.accumulate(last=True):
                model(torch.ones(1, 2)).sum().backward()

        backward()
        try_to(optimizer.step)
        optimizer.add_up_tied()
        try_to(backward)
        optimizer.zero_grad(set_to_none=overlap)
        for _ in range(2):  # in turn, and cleared by the module
            backward()
            optimizer.add_up_tied()
            try_to(optimizer.step)
            model.zero_grad()
    try_to(lambda: AdamW(model, stages=group, tied={"wait": group}))
    try_to(lambda: AdamW(model, tied={"weight": group}))
    try_to(lambda: AdamW(model, stages=group, tied={"weight": group}, gradients="host", offload_fraction=1.0))
    return said


def failing() -> str:
    """What comes out of a pipeline of one stage whose forward fails."""
    from hostward.distributed.pipeline_parallel import cut

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    run = setup.prepare(MOE, small())
    part = cut(run.model, 0, 1)
    passes = passes_of(Held(run.model, [part], mesh_of("alone").get_group()), run.share, run.device)

    def fail(*_: object) -> None:
        raise MemoryLimitError("the host is full")

    run.model.model.layers[1].register_forward_pre_hook(fail)  # type: ignore[union-attr, index, operator]
    try:
        passes.backward(run, taken=True)
    except HostwardError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()
    return "no error"


def place(words: list[str], recipe: str) -> tuple[list[str], int, tuple[int, int]]:
    """Names of this rank's parameters, the number of the whole model's, and its place in the data."""
    launched()
    run = setup.prepare(recipe, small(*words, recipe=recipe))
    names = [name for name, _ in run.model.named_parameters()]
    return names, run.model_parameters, (run.ranks.data_rank, run.ranks.data_size)
