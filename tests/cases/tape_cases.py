"""Small causal language models, and one run of them part by part."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hostward.activations.recompute import Region, Regions
from hostward.model.layers import find_layers
from hostward.profiler.layer_profiler import PartRun, run

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "use_cache": False,
}
WINDOWS: dict[str, Any] = {"sliding_window": 8, "layer_types": [*["sliding_attention"] * 4, *["full_attention"] * 3]}
LATENT: dict[str, Any] = {
    "first_k_dense_replace": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
"""Experts behind dense layers, and attention over latent keys and values."""
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def built(kind: str, device: str, dtype: torch.dtype = torch.float32, attention: str = "eager", **more: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **more}, attn_implementation=attention)
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def tokens(device: str, sequences: int = 2, length: int = 24) -> torch.Tensor:
    return torch.zeros(sequences, length, dtype=torch.int64, device=device)


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(input_ids=ids, labels=ids, shift_labels=ids, use_cache=False).loss
    return out


def parts(model: Any, ids: torch.Tensor, way: str = "keep") -> list[PartRun]:
    layers = find_layers(model)
    if way == "recompute":
        for _, layer in layers:
            Region(layer)
    elif way == "elementwise":
        Regions(layers, ("layernorm", "moe_act" if hasattr(model.config, "num_experts") else "mlp_act"))
    return run(model, layers, ids, loss_of)
