"""What each rank does: recipes trained by the loop of `hostward train`. Results are digests of bits."""

from __future__ import annotations

import gc
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_cases import digest, gradient_of, snapshot, whole_of

from hostward import Activations, recipes
from hostward.config.overrides import apply_overrides
from hostward.config.schema import Config
from hostward.core.placement import Placement
from hostward.distributed import expert_parallel, fsdp2
from hostward.errors import HostwardError, MemoryLimitError
from hostward.optim.adamw import AdamW
from hostward.plan.plan_file import PlanFile
from hostward.report.schema import Ended
from hostward.runtime.backend import Tier
from hostward.trainer import loop, offload_options, setup
from hostward.trainer.process_group import Ranks
from hostward.trainer.report import report
from hostward.trainer.run import Run

SMALL = (
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.seq_length=16",
    "train.global_batch_size=8",
    "train.micro_batch_size=1",
    "train.train_iters=2",
    "train.device=cpu",
    "train.num_threads=1",
    f"dataset.path={Path(__file__).resolve().parents[2] / 'LICENSE'}",
    "optimizer.clip_grad=0.5",
    "optimizer.lr=1e-2",
)
"""Norms of its gradients are above the limit. Two microbatches on each of four ranks; of two ranks, with `BATCH`. The
text is read in no time: to shuffle mock data takes a second on each rank."""
BATCH = "train.global_batch_size=4"


MOE, LLAMA, QWEN3 = "qwen3_moe_tiny_pretrain_config", "llama32_1b_pretrain_config", "qwen3_8b_pretrain_config"
DENSE = [
    "model.ffn_hidden_size=96",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "model.kv_channels=16",
    "model.vocab_size=320",
    "model.params_dtype=fp32",
]
SIZES = {
    MOE: ["model.moe_ffn_hidden_size=32", "model.num_moe_experts=4"],
    LLAMA: DENSE,
    QWEN3: DENSE,
}


def small(*words: str, recipe: str = MOE) -> Config:
    return apply_overrides(recipes.load(recipe), [*SMALL, *SIZES[recipe], *words])


def launched() -> None:
    """As torchrun would have set it."""
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}


def train(
    words: list[str],
    recipe: str = MOE,
    *,
    slow: int | None = None,
    plan: str | None = None,
    min_bytes: int | None = None,
) -> Any:
    """Losses, norms and bits of a run, and what its ranks say of themselves.

    Args:
        slow: the rank whose samples come late.
        plan: the text of a plan to train by.
        min_bytes: of what layers save, what is smaller stays; None: the limit that options have.
    """
    launched()
    planned = None if plan is None else PlanFile.from_json(plan)
    with pytest.MonkeyPatch.context() as patched:
        if min_bytes is not None:
            patched.setattr(offload_options, "Activations", partial(Activations, min_bytes=min_bytes))
        run = setup.prepare(recipe, small(*words, recipe=recipe), plan=planned)
    if slow == dist.get_rank():
        run.dataset = _LateSamples(run.dataset)  # type: ignore[assignment]
    loop.train(run, metered=1)
    moved, left, weights = run.optimizer.plan.offloaded_bytes, 0, weights_of(run)
    if run.attachment is not None:
        left = run.attachment.report().offloaded_bytes
        run.attachment.detach()
    return {
        "told": (run.losses, run.grad_norms, run.skipped),
        "bits": snapshot(run.model, run.optimizer),
        "offloaded_bytes": moved,
        "state": state_of(run.optimizer),
        "left_bytes": left,
        "weights": weights,
        "ranks": run.of_ranks,
        "microbatches": run.microbatches,
    }


def weights_of(run: Run) -> dict[str, int]:
    """Bytes of weights that leave, by what became of them."""
    report = None if run.attachment is None else run.attachment.report().weights
    names = ("offloaded", "here", "fetched", "on_demand", "held")
    return {} if report is None else {name: getattr(report, f"{name}_bytes") for name in names}


STATE = ("exp_avg", "exp_avg_sq", "remainder", "master")


def state_of(optimizer: AdamW) -> dict[str, Any]:
    """Where the optimizer's state is, and the bytes that it has taken there."""
    held, plan = optimizer.backend.ledger.held_bytes, optimizer.plan
    elements = dict.fromkeys(Placement, 0)
    for placed in plan.buckets:
        elements[placed.placement] += placed.numel
    layers = [bucket.layer for bucket in optimizer.inventory.buckets]
    return {
        "elements": elements,
        "placed": sorted((layer, b.placement.value) for layer, b in zip(layers, plan.buckets, strict=True)),
        "layers": list(dict.fromkeys(layers)),
        "asked": plan.asked_fraction,
        "host_bytes": sum(held.get((Tier.HOST, role), 0) for role in STATE),
        "device_bytes": sum(held.get((Tier.DEVICE, role), 0) for role in STATE),
        "landing_bytes": held.get((Tier.HOST, "gradients"), 0),
        "partial_bytes": held.get((Tier.HOST, "norm partials"), 0),
    }


class _LateSamples:
    """Samples of another dataset, half a second late."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.seq_length = dataset.seq_length

    def batch(self, first: int, count: int) -> Any:
        import time

        time.sleep(0.5)
        return self._dataset.batch(first, count)


def initial(words: list[str], recipe: str) -> dict[str, str]:
    """Digests of the whole weights that a run begins with."""
    launched()
    run = setup.prepare(recipe, small(*words, recipe=recipe))
    return {name: digest(whole_of(p)) for name, p in run.model.named_parameters()}


def one_fails() -> tuple[str, bool]:
    """What every rank is told when the last may lock no pages."""
    launched()
    ranks = Ranks.of(os.environ)

    def check() -> int:
        if ranks.rank == ranks.size - 1:
            raise MemoryLimitError("no page can be locked", why="the limit is 0", fix="ulimit -l unlimited")
        return ranks.rank

    try:
        ranks.agreed(check)
    except HostwardError as error:
        return f"{type(error).__name__}: {error}", error.everywhere
    return "no error", False


def gradients(config: Config, recipe: str = MOE) -> dict[str, Any]:
    """The loss of the first step and its whole gradients, before clipping."""
    run = setup.prepare(recipe, config)
    loss = run.ranks.mean(loop.backward(run, taken=False))
    found = {name: whole_of(p.grad).numpy() for name, p in run.model.named_parameters() if p.grad is not None}
    return {"loss": float(loss), "gradients": found}


def gradients_of(words: list[str], recipe: str = MOE) -> dict[str, Any]:
    """The same on every rank, and whether its experts had tokens in every layer."""
    launched()
    had: list[bool] = []
    exchanged = expert_parallel.exchange_tokens

    def watched(compute: Any, *rest: Any) -> torch.Tensor:
        def computed(tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            had.append(bool(tokens.any()))
            found: torch.Tensor = compute(tokens, chosen)
            return found

        return exchanged(computed, *rest)

    expert_parallel.exchange_tokens = watched
    try:
        return {**gradients(small(*words, recipe=recipe), recipe), "had_tokens": all(had)}
    finally:
        expert_parallel.exchange_tokens = exchanged


def norm_of_given_gradients(run: Run) -> str:
    """The norm of the first step, in hexadecimal, if all whole gradients are those of `gradient_of`."""
    for name, p in run.model.named_parameters():
        whole = gradient_of(name, p.shape, 0)
        p.grad = fsdp2.like(fsdp2.part_of_saved(name, whole, p).clone(), p) if fsdp2.is_sharded(p) else whole
    run.optimizer.step()
    return run.optimizer.grad_norm.hex()


def norm_of_given(words: list[str], recipe: str = MOE) -> str:
    """The same on every rank."""
    launched()
    return norm_of_given_gradients(setup.prepare(recipe, small(*words, recipe=recipe)))


def stacked(words: list[str], recipe: str = MOE) -> dict[str, Any]:
    """What a run's report stacks at each sampled moment, beside the bytes of all tensors of this process then."""
    launched()
    gc.collect()
    gc.freeze()  # what is there already is neither searched nor counted
    run = setup.prepare(recipe, small(*words, recipe=recipe))
    sample, measured = run.sampler.sample, []

    def measuring(iteration: int, moment: str) -> None:
        measured.append(tensor_bytes())
        sample(iteration, moment)

    before = tensor_bytes() - run.optimizer.backend.ledger.total_bytes(Tier.DEVICE)
    run.sampler.sample = measuring  # type: ignore[method-assign]
    loop.train(run)
    told = report(run, {"date": "", "command": "", "versions": {}}, ended=Ended.FINISHED)
    samples = told.memory_over_time
    return {
        "moments": samples.moments,
        "owners": [sum(column) for column in zip(*samples.device_by_owner_bytes.values(), strict=True)],
        "gradients": samples.device_by_owner_bytes.get("gradients", ()),
        "most_gradients": told.memory.device_by_owner_bytes["gradients"],
        "measured": [n - before for n in measured],
        "parameters": (told.model_parameters, told.parameters),
    }


def tensor_bytes() -> int:
    """Bytes of every storage that a tensor of this process has, those of the host's buffers too. A DTensor's elements
    are in a tensor of their own, and what stands for a gradient has none.
    """
    gc.collect()
    storages = [o.untyped_storage() for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
