"""Configurations of models that people have, by family: what their config.json says, and how many parameters they have.

Each is the model's own file on Hugging Face without what sizes do not depend on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Published:
    """Hold a configuration, its count of parameters as it is published, and where.

    billions: with as many decimals as the source has; None where the source counts otherwise. less: entries that make a
    small version of it, with two layers of each kind; none for a model whose layers are those of another one here.
    wide: entries that leave two layers of each kind at the real widths, with fewer experts, for a GPU of 80 GB.
    """

    config: dict[str, Any]
    billions: str | None
    source: str
    less: dict[str, Any] = field(default_factory=dict)
    wide: dict[str, Any] = field(default_factory=lambda: {"num_hidden_layers": 2})


_SMALL = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
_PAGE = "the model's page on Hugging Face, from its safetensors files"
_WINDOWED = ["sliding_attention", "full_attention"]

_GEMMA = {
    "model_type": "gemma3_text",
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "vocab_size": 262208,
    "sliding_window": 1024,
    "query_pre_attn_scalar": 168,
}

PUBLISHED: dict[str, Published] = {
    "llama 3.1 8b": Published(
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "tie_word_embeddings": False,
        },
        "8.03",
        _PAGE,
        {**_SMALL, **_HEADS},
    ),
    "mistral 7b v0.3": Published(
        {
            "model_type": "mistral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32768,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
        "7.25",
        _PAGE,
        {**_SMALL, **_HEADS},
    ),
    "qwen2.5 32b": Published(
        {
            "model_type": "qwen2",
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "vocab_size": 152064,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
        },
        "32.8",
        _PAGE,
        {**_SMALL, "num_attention_heads": 8, "num_key_value_heads": 2},
    ),
    "qwen3 32b": Published(
        {
            "model_type": "qwen3",
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
        },
        "32.8",
        "model card of Qwen3-32B",
        {**_SMALL, **_HEADS},
    ),
    "qwen3 235b": Published(
        {
            "model_type": "qwen3_moe",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
        "235",
        "model card of Qwen3-235B-A22B",
        {**_SMALL, **_HEADS, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128},
        {"num_hidden_layers": 2, "num_experts": 32},
    ),
    "gemma 3 27b": Published(
        {
            "model_type": "gemma3",
            "mm_tokens_per_image": 256,
            "text_config": _GEMMA,
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_attention_heads": 16,
                "num_hidden_layers": 27,
                "patch_size": 14,
                "image_size": 896,
                "vision_use_head": False,
            },
        },
        "27.4",
        "Gemma 3 technical report, table 1: 25,600 M, 1,416 M of embeddings and 417 M of the vision encoder",
    ),
    "gemma 3 27b, text": Published(
        _GEMMA,
        "27.0",
        "the same table, without the vision encoder",
        {**_SMALL, **_HEADS, "num_hidden_layers": 4, "layer_types": 2 * _WINDOWED, "sliding_window": 64},
        {"num_hidden_layers": 4, "layer_types": 2 * _WINDOWED},
    ),
    "gpt-oss 20b": Published(
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 201088,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "layer_types": 12 * _WINDOWED,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        "20.91",
        "gpt-oss model card, table 1",
        {
            **_SMALL,
            **_HEADS,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "layer_types": 2 * _WINDOWED,
            "num_local_experts": 16,
            "sliding_window": 64,
        },
        {"num_hidden_layers": 4, "layer_types": 2 * _WINDOWED, "num_local_experts": 8},
    ),
    "deepseek-v3": Published(
        {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 129280,
            "tie_word_embeddings": False,
        },
        "671",
        "DeepSeek-V3 technical report, without the module that predicts a second token",
        {
            **_SMALL,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 128,
            "q_lora_rank": 96,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,  # as wide as queries and keys: a CPU has no fused attention for two widths
        },
        {"num_hidden_layers": 4, "first_k_dense_replace": 2, "n_routed_experts": 16, "vocab_size": 32768},
    ),
    "phi-4": Published(
        {
            "model_type": "phi3",
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "vocab_size": 100352,
            "pad_token_id": None,
            "tie_word_embeddings": False,
        },
        "14.7",
        _PAGE,
        {**_SMALL, "num_attention_heads": 8, "num_key_value_heads": 2},
    ),
    "glm-4 9b 0414": Published(
        {
            "model_type": "glm4",
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "attention_bias": True,
            "vocab_size": 151552,
            "pad_token_id": None,
            "tie_word_embeddings": False,
        },
        "9.40",
        _PAGE,
        {**_SMALL, **_HEADS},
    ),
    "glm-4.5 air": Published(
        {
            "model_type": "glm4_moe",
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "vocab_size": 151552,
            "tie_word_embeddings": False,
        },
        None,
        "GLM-4.5 report, table 1: 106 B, counted with the module that predicts a second token and without embeddings",
        {
            **_SMALL,
            **_HEADS,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 2,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 128,
        },
        {"num_hidden_layers": 4, "first_k_dense_replace": 2, "n_routed_experts": 32},
    ),
}
