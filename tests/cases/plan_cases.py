"""Well-known models and machines, and answers about them."""

from __future__ import annotations

from functools import cache

from workload_cases import llama

from hostward.core.units import GIB
from hostward.plan.budgets import Budgets
from hostward.plan.hardware_profile import profile
from hostward.plan.rank_partition import required_of, sharded
from hostward.plan.result import Answer, Question, answer, default_budgets
from hostward.plan.solver import Forced
from hostward.plan.workload import Workload


def llama_1b(batch: int = 4) -> Workload:
    return llama("llama-3.2-1b", layers=16, heads=32, kv_heads=8, vocab=128256, batch=batch)


def llama_8b(batch: int = 4) -> Workload:
    return llama(
        "llama-3.1-8b", layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256, batch=batch, chunk=True
    )


def llama_70b(batch: int = 8) -> Workload:
    return llama(
        "llama-3.1-70b",
        layers=80,
        hidden=8192,
        ffn=28672,
        heads=64,
        kv_heads=8,
        vocab=128256,
        batch=1,
        microbatches=batch,
        chunk=True,
    )


def qwen_30b(microbatches: int = 8) -> Workload:
    return llama(
        "qwen3-30b-a3b",
        layers=48,
        hidden=2048,
        ffn=768,
        heads=32,
        kv_heads=4,
        vocab=151936,
        experts=128,
        active=8,
        batch=1,
        microbatches=microbatches,
    )


MODELS = {"llama-1b": llama_1b, "llama-8b": llama_8b, "llama-70b": llama_70b, "qwen-30b-a3b": qwen_30b}
PAIRS = (
    ("llama-1b", "rtx-4090", 1, 60),
    ("llama-1b", "h200", 1, 120),
    ("llama-8b", "h200", 1, 120),
    ("llama-8b", "h100", 1, 120),
    ("llama-8b", "a100-80gb", 1, 240),
    ("llama-70b", "h200", 8, 2000),
    ("llama-70b-resharded", "h200", 8, 2000),
    ("qwen-30b-a3b", "h200", 1, 120),
    ("qwen-30b-a3b", "h200", 4, 500),
)
"""Model, machine, GPUs, GiB of host memory."""


@cache
def answered(model: str, machine: str, gpus: int, host_gib: int) -> Answer:
    name, resharded, _ = model.partition("-resharded")
    hardware, workload = profile(machine), sharded(MODELS[name](), gpus, resharded=bool(resharded))
    device_bytes = default_budgets(hardware, gpus).device_bytes
    budgets = Budgets(device_bytes, host_gib * GIB // gpus)
    return answer(Question(workload, hardware, gpus, budgets, Forced()), required_of(workload))
