"""What the first of two ranks allocates in forward and backward, and what the memory model predicts of it.

The other rank is torch's "fake" process group, which
sends nothing: gloo makes copies of its own of whatever it exchanges, as NCCL does not. A case is six words: "ends",
"layers", or what these have "saved", which are nearly all of the model, "tied" or "apart", dtype of weights, "whole" or
"one" layer at a time, dtype in which gradients are reduced, microbatches. A seventh are the treatments of layers, a
letter for each; without it they keep all.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from workload_cases import treatments

import hostward
from hostward import recipes
from hostward.attachment import recompute_whole, recomputed_parts
from hostward.config.overrides import apply_overrides
from hostward.config.schema import Config
from hostward.core.placement import Placement
from hostward.plan.decisions import ELEMENTWISE, LEAVES, RECOMPUTED, Choice, Keep
from hostward.plan.memory_model import STEADY_STEP, required
from hostward.plan.plan_file import PlannedLayers
from hostward.plan.rank_partition import sharded
from hostward.plan.workload import Workload
from hostward.runtime.backend import Buffer, Event
from hostward.runtime.simulated.backend import Order, SimulatedBackend
from hostward.runtime.simulated.race_detector import Operation
from hostward.schedule.ops import Lane
from hostward.trainer.models import build_model, layers_of, training_loss
from hostward.trainer.parallel import synchronise_gradients
from hostward.trainer.workload import recipe_workload

SIZES = (
    "model.hidden_size=256",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "model.kv_channels=64",
    "model.seq_length=16",
    "train.micro_batch_size=1",
)
MOST = {
    "ends": ("model.num_layers=2", "model.ffn_hidden_size=512", "model.vocab_size=32768"),
    "layers": ("model.num_layers=3", "model.ffn_hidden_size=8192", "model.vocab_size=2048"),
    "saved": ("model.num_layers=8", "model.ffn_hidden_size=1024", "model.vocab_size=512", "model.seq_length=512"),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COUNTED = ("weights", "gathered weights", "gradients", "activations", "logits and loss")


def divided(config: Config, *, resharded: bool, reduced: torch.dtype) -> Any:
    """The model as `hostward train` divides it over two ranks."""
    dtype = DTYPES[config.model.params_dtype]
    model: Any = build_model(
        config, vocab_size=config.model.vocab_size, device=torch.device("cpu"), dtype=dtype, seed=1
    )
    mesh, policy = init_device_mesh("cpu", (2,)), MixedPrecisionPolicy(reduce_dtype=reduced)
    tied = config.model.share_embeddings_and_output_weights
    ends = [] if tied else [model.model.embed_tokens, model.lm_head]
    for module in [*(layer for _, layer in layers_of(model)), *ends, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=resharded)
    return model


class Forgetful(SimulatedBackend):
    """Frees what was offloaded when it is released, as a GPU does: no rule about bytes holds it to look at it later."""

    def __init__(self) -> None:
        super().__init__(order=Order(eager=True), threads=1)

    def _issue(
        self,
        lane: Lane,
        name: str,
        run: Callable[[], None] | None,
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
        waits: Sequence[Event],
        nbytes: int = 0,
    ) -> Operation:
        return super()._issue(lane, name, run, (), (), waits, nbytes)


def treated(model: Any, keeps: Sequence[Keep]) -> hostward.Attachment | None:
    """Treat layers as `attach` does by a plan; of what is offloaded, small tensors too."""
    layers = layers_of(model)
    whole = frozenset(i for i, keep in enumerate(keeps) if keep in RECOMPUTED)
    away, parts = (sum(keep in kinds for keep in keeps) for kinds in (LEAVES, ELEMENTWISE))
    run, planned = None, PlannedLayers(away, 0, parts, whole)
    if away or parts:
        activations = hostward.Activations(num_layers=away, min_bytes=0) if away else None
        again = recomputed_parts(planned, layers)
        run = hostward.attach(model, activations=activations, recompute=again, backend=Forgetful())
    recompute_whole(model, [layer for _, layer in layers], whole)
    return run


def measured(model: Any, microbatches: int, length: int, *, resharded: bool) -> int:
    """Bytes of torch's CPU allocator at their most, parts of the weights included."""
    tokens = torch.zeros((1, length), dtype=torch.int64)

    def passes() -> None:
        for i in range(microbatches):
            synchronise_gradients(model, last=i == microbatches - 1, resharded=resharded)
            training_loss(model, tokens, tokens).backward()

    passes()
    model.zero_grad()
    gc.collect()  # what an earlier case has left must not be freed while this one is measured
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        passes()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    parts = sum(p.to_local().nbytes for p in model.parameters())
    return int(parts + max(accumulate(nbytes for _, nbytes in changes)))


@cache
def described(most: str, tied: str, dtype: str, microbatches: int) -> tuple[Config, Workload]:
    """Options and their traced workload, which several cases have in common."""
    words = [f"model.share_embeddings_and_output_weights={tied == 'tied'}", f"model.params_dtype={dtype}"]
    words += [f"train.global_batch_size={2 * microbatches}"]
    config = apply_overrides(recipes.load("llama32_1b_pretrain_config"), [*SIZES, *MOST[most], *words])
    return config, recipe_workload(config)


def case(name: str) -> tuple[int, int]:
    most, tied, dtype, whole, reduced, count, *letters = name.split()
    microbatches, resharded = int(count), whole == "one"
    config, traced = described(most, tied, dtype, microbatches)
    keeps = treatments(*letters) if letters else (Keep.KEEP,) * len(traced.repeated)
    model = divided(config, resharded=resharded, reduced=DTYPES[reduced])
    run = treated(model.train(), keeps)
    found = measured(model, microbatches, config.model.seq_length, resharded=resharded)
    if run is not None:
        run.detach()
    work = sharded(traced, 2, reduced_in_fp32=reduced != dtype, resharded=resharded)
    choice = Choice((Placement.DEVICE,) * len(work.inventory.buckets), keeps)
    needs = required(work, choice).phase(STEADY_STEP).device
    return found, sum(needs.get(owner, 0) for owner in COUNTED)


def measure(names: list[str], file: Path) -> None:
    """Write [measured bytes, predicted bytes] of each case as JSON, and end this process."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    file.write_text(json.dumps({name: case(name) for name in names}))
    os._exit(0)  # the fake group has nothing to take leave of
