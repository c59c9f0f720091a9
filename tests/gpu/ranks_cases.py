"""A program for torchrun: recipes trained on all ranks, each layout at several placements. Its results are digests.

    torchrun --nproc-per-node 2 tests/gpu/ranks_cases.py FOLDER

writes FOLDER/RANK.json: by name of a case, what the rank found. Ranks that have no GPU of their own share one, and
exchange through gloo, as far as it can: `SHARED` are the cases without anything else.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# Equal runs have equal bits only so: cuBLAS reads its variable when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hostward import recipes
from hostward.config.overrides import apply_overrides
from hostward.distributed import fsdp2
from hostward.trainer import loop, setup
from hostward.trainer.models import training_loss
from hostward.trainer.run import Run

MOE, LLAMA, QWEN3 = "qwen3_moe_tiny_pretrain_config", "llama32_1b_pretrain_config", "qwen3_8b_pretrain_config"
COMMON = (
    "model.num_layers=4",
    "model.hidden_size=512",
    "model.seq_length=256",
    "model.params_dtype=bf16",
    "model.deterministic_mode=True",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "train.train_iters=4",
    "train.device=cuda",
    "dataset.format=mock",
    "optimizer.clip_grad=0.5",
    "optimizer.lr=1e-3",
)
"""Two microbatches on each of two ranks. Some norms are above the limit."""
DENSE = (
    "model.ffn_hidden_size=1536",
    "model.num_attention_heads=8",
    "model.num_query_groups=4",
    "model.kv_channels=64",
    "model.vocab_size=16384",
)
SIZES = {MOE: ("model.moe_ffn_hidden_size=256", "model.num_moe_experts=16"), LLAMA: DENSE, QWEN3: DENSE}

HOST = ("optimizer.optimizer_cpu_offload=True", "optimizer.optimizer_offload_fraction=1.0")
PLACED = {
    "device": (),
    "host": HOST,
    "half": (HOST[0], "optimizer.optimizer_offload_fraction=0.5"),
    "streamed": ("optimizer.offload_optimizer_states=True",),
    "mixed": (*HOST, "optimizer.offload_mix=0.5"),
}
LAYOUTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "data": (QWEN3, ()),
    "one microbatch": (QWEN3, ("train.global_batch_size=2",)),
    "copies": (QWEN3, ("ddp.use_distributed_optimizer=False",)),
    "mixture": (MOE, ()),
    "experts": (MOE, ("model.expert_model_parallel_size=2",)),
    "matrices": (QWEN3, ("model.tensor_model_parallel_size=2", "model.sequence_parallel=True")),
    "matrices and experts": (
        MOE,
        (
            "model.tensor_model_parallel_size=2",
            "model.sequence_parallel=True",
            "model.expert_model_parallel_size=2",
        ),
    ),
    "reduced in float32": (QWEN3, ("ddp.grad_reduce_in_fp32=True", "train.global_batch_size=2")),
    "tied matrices": (LLAMA, ("model.tensor_model_parallel_size=2",)),
    "stages": (QWEN3, ("model.pipeline_model_parallel_size=2",)),
    "tied stages": (LLAMA, ("model.pipeline_model_parallel_size=2",)),
    "stages in fp16": (
        QWEN3,
        ("model.pipeline_model_parallel_size=2", "model.params_dtype=fp16", "train.train_iters=8"),
    ),
}
AWAY = (*HOST, "model.cpu_offloading=True", "model.cpu_offloading_num_layers=2")
WEIGHTS = (*AWAY, "model.cpu_offloading_weights=True", "model.cpu_offloading_activations=False")
RESHARDED = "ddp.data_parallel_sharding_strategy=optim_grads_params"
SHARED = ("data", "one microbatch", "reduced in float32", "activations_leave", "weights_leave")
"""None of them sends tokens or activations to certain ranks."""


def prepared(recipe: str, *words: str) -> Run:
    config = apply_overrides(recipes.load(recipe), [*COMMON, *SIZES[recipe], *words])
    return setup.prepare(recipe, config)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def digest(tensor: torch.Tensor) -> str:
    raw = local(tensor).detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]


def bits(run: Run) -> str:
    """Of weights and state of this rank."""
    run.optimizer.wait()
    found = {name: digest(p) for name, p in run.model.named_parameters()}
    for name, entry in run.optimizer.state_dict()["state"].items():
        found |= {f"{role} {name}": digest(value) for role, value in entry.items()}
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def trained(recipe: str, *words: str) -> dict[str, Any]:
    run = prepared(recipe, *words)
    loop.train(run)
    weights = None if run.attachment is None else run.attachment.report().weights
    if run.attachment is not None:
        run.attachment.detach()  # weights that leave come back
    told = {
        "weights_away_bytes": 0 if weights is None else weights.offloaded_bytes,
        "weights_unforeseen_bytes": 0 if weights is None else weights.on_demand_bytes,
        "weights_fetched_bytes": 0 if weights is None else weights.fetched_bytes,
        "bits": bits(run),
        "losses": run.losses,
        "norms": run.grad_norms,
        "skipped": run.skipped,
        "offloaded_bytes": run.optimizer.plan.offloaded_bytes,
        "pinned_bytes": run.optimizer.backend.ledger.pinned_bytes,
    }
    del run
    gc.collect()
    torch.cuda.empty_cache()
    return told


def layout(name: str) -> dict[str, Any]:
    recipe, words = LAYOUTS[name]
    placed = PLACED
    if name == "copies":  # the host would step the same state once for each rank
        placed = {placement: PLACED[placement] for placement in ("device", "streamed")}
    return {placement: trained(recipe, *words, *more) for placement, more in placed.items()}


def activations_leave() -> dict[str, Any]:
    words = ("train.global_batch_size=2",)
    return {"device": trained(QWEN3, *words), "away": trained(QWEN3, *words, *AWAY)}


def weights_leave() -> dict[str, Any]:
    """By whether layers are whole one at a time, and what is attached besides."""
    found = {"device": trained(QWEN3), "resharded": trained(QWEN3, RESHARDED)}
    for name, words in {"whole": (), "one at a time": (RESHARDED,)}.items():
        found |= {name: trained(QWEN3, *words, *WEIGHTS)}
        found |= {f"{name}, with activations": trained(QWEN3, *words, *WEIGHTS[:-1])}
    return found


def weights_of_stages_leave() -> dict[str, Any]:
    """By schedule: three of the four layers that a rank has, with what they save and without."""
    found = {}
    for name, turns in {"1F1B": (), "in turns": ("model.virtual_pipeline_model_parallel_size=2",)}.items():
        words = ("model.num_layers=8", "model.pipeline_model_parallel_size=2", *turns)
        three = "model.cpu_offloading_num_layers=3"
        found[name] = {
            "device": trained(QWEN3, *words),
            "away": trained(QWEN3, *words, *WEIGHTS, three),
            "away, with activations": trained(QWEN3, *words, *WEIGHTS[:-1], three),
        }
    return found


def saved() -> dict[str, Any]:
    """Four steps at once; two, and two more from the checkpoint, stepped elsewhere, with experts divided otherwise."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    save = f"checkpoint.save={folder[0]}"
    straight = trained(MOE, *HOST)
    trained(MOE, *HOST, save, "train.train_iters=2")
    resumed = trained(MOE, *PLACED["streamed"], f"checkpoint.load={folder[0]}")
    otherwise = prepared(
        MOE, "model.expert_model_parallel_size=2", f"checkpoint.load={folder[0]}", "train.train_iters=5"
    )
    return {"straight": straight, "resumed": resumed, "iteration": otherwise.iteration}


def norm_of_given() -> dict[str, str]:
    """The norm of gradients of known bits, by layout, and in one process."""

    def norm(run: Run) -> str:
        for number, (name, p) in enumerate(run.model.named_parameters()):
            generator = torch.Generator(device="cuda").manual_seed(number)
            whole = torch.randn(p.shape, generator=generator, device="cuda").to(p.dtype)
            p.grad = fsdp2.like(fsdp2.part_of_saved(name, whole, p).clone(), p) if run.ranks.size > 1 else whole
        run.optimizer.step()
        return run.optimizer.grad_norm.hex()

    found = {}
    batch = "train.global_batch_size=2"
    for name, words in {"data": (), "experts": ("model.expert_model_parallel_size=2",)}.items():
        found[name] = norm(prepared(MOE, batch, *words, *HOST))
    kept = {key: os.environ.pop(key) for key in ("WORLD_SIZE", "RANK")}
    try:
        found["alone"] = norm(prepared(MOE, "train.global_batch_size=1"))
    finally:
        os.environ |= kept
    return found


def no_waits() -> dict[str, Any]:
    """An iteration, in which torch raises where it would wait for the device, behind one that is kept busy: the host's
    seconds, and the device's.
    """
    batch = "train.global_batch_size=2"
    run = prepared(QWEN3, *PLACED["mixed"], batch, "model.deterministic_mode=False", "train.train_iters=9")
    for _ in range(4):
        loop.train_iteration(run)
    run.optimizer.wait()
    torch.cuda.synchronize()
    gc.collect()
    ids = torch.zeros(1, 256, dtype=torch.int64, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(int(2e9))
        began_s = time.perf_counter()
        with run.optimizer.accumulate(last=True):
            loss = training_loss(run.model, ids, ids)
            loss.backward()
        loop.step(run, loss.detach())
        issued_s = time.perf_counter() - began_s
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return {"issued_s": issued_s, "passed_s": time.perf_counter() - began_s}


CASES: dict[str, Callable[[], Any]] = {name: partial(layout, name) for name in LAYOUTS} | {
    f.__name__: f for f in (activations_leave, weights_leave, weights_of_stages_leave, saved, norm_of_given, no_waits)
}


def main(folder: Path) -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)  # it adds in any order
    if alone := torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
        os.environ["LOCAL_RANK"] = "0"
        dist.init_process_group("gloo")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    wanted = sys.argv[2:] or (SHARED if alone else list(CASES))
    found: dict[str, Any] = {}
    for name in wanted:
        began_s = time.perf_counter()
        found[name] = CASES[name]()
        print(f"{name}: {time.perf_counter() - began_s:.1f} s", flush=True)
        (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
