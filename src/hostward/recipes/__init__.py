"""Return whole configurations from functions named `<model>_<task>_config`, as in Megatron Bridge."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hostward.config.schema import Config, nearest
from hostward.errors import UnknownNameError


def qwen3_moe_tiny_pretrain_config() -> Config:
    """Configure the architecture of Qwen3-30B-A3B, small enough for two CPU cores: 13.5 M parameters.

    Tokens are bytes, and a run has 50 steps. Weights are fp32, because bf16 matrix products can be many times slower on
    a CPU without instructions for them.
    """
    config = qwen3_30b_a3b_pretrain_config()
    model = config.model
    model.num_layers = 4
    model.hidden_size = 256
    model.ffn_hidden_size = 1024
    model.num_moe_experts = 8
    model.moe_ffn_hidden_size = 512
    model.moe_router_topk = 2
    model.num_attention_heads = 4
    model.num_query_groups = 2
    model.kv_channels = 64
    model.seq_length = 256
    model.vocab_size = None
    model.params_dtype = "fp32"

    config.optimizer.lr = 1e-3
    config.optimizer.min_lr = 1e-4
    config.scheduler.lr_warmup_iters = 5
    config.scheduler.lr_decay_iters = 50
    config.train.train_iters = 50
    config.train.global_batch_size = 4
    config.train.micro_batch_size = 4
    config.logger.log_interval = 5
    return config


def qwen3_600m_sft_config() -> Config:
    """Configure further training of a pretrained Qwen3-0.6B (or another Qwen3) from `model.hf_model_path=FOLDER`.

    The sizes, the weights and, unless `tokenizer.tokenizer_model` says otherwise, the tokenizer come from that local
    folder.
    """
    config = _bf16_with_cosine()
    config.model.architecture = "qwen3"
    config.model.seq_length = 2048
    config.tokenizer.tokenizer_type = "huggingface"

    config.optimizer.lr = 5e-6
    config.optimizer.min_lr = 0.0
    config.optimizer.weight_decay = 0.1
    config.optimizer.adam_beta2 = 0.98
    config.scheduler.lr_warmup_iters = 10
    return config


def llama32_1b_pretrain_config() -> Config:
    """Configure Llama 3.2 1B from random weights: 1.24 B parameters, tied embeddings."""
    config = _bf16_with_cosine()
    model = config.model
    model.architecture = "llama"
    model.num_layers = 16
    model.hidden_size = 2048
    model.ffn_hidden_size = 8192
    model.num_attention_heads = 32
    model.num_query_groups = 8
    model.kv_channels = 64
    model.seq_length = 8192
    model.vocab_size = 128256
    model.rotary_base = 500000.0
    model.rope_scaling = True
    model.rope_scaling_factor = 32.0
    model.layernorm_epsilon = 1e-5
    model.share_embeddings_and_output_weights = True
    config.optimizer.weight_decay = 0.1
    return config


def qwen3_8b_pretrain_config() -> Config:
    """Configure Qwen3-8B from random weights: 8.19 B parameters.

    It has 16 GB of bf16 weights and 82 GB of optimizer state: on one 80 GB device, offload the optimizer.
    """
    config = _bf16_with_cosine()
    model = config.model
    model.architecture = "qwen3"
    model.num_layers = 36
    model.hidden_size = 4096
    model.ffn_hidden_size = 12288
    model.num_attention_heads = 32
    model.num_query_groups = 8
    model.kv_channels = 128
    model.seq_length = 4096
    model.vocab_size = 151936
    model.rotary_base = 1e6
    model.layernorm_epsilon = 1e-6
    return config


def qwen3_30b_a3b_pretrain_config() -> Config:
    """Configure Qwen3-30B-A3B from random weights: 30.53 B parameters, 3.3 B of them active per token.

    Unsharded bf16 weights take 61 GB and the optimizer state 305 GB more: shrink the model by overrides
    (`model.num_layers=4`), or use several devices. Every size can be overridden, so a shrunk model also trains on a
    CPU.
    """
    config = _bf16_with_cosine()
    model = config.model
    model.architecture = "qwen3_moe"
    model.num_layers = 48
    model.hidden_size = 2048
    model.ffn_hidden_size = 6144
    model.num_moe_experts = 128
    model.moe_ffn_hidden_size = 768
    model.moe_router_topk = 8
    model.moe_aux_loss_coeff = 1e-3
    model.num_attention_heads = 32
    model.num_query_groups = 4
    model.kv_channels = 128
    model.seq_length = 4096
    model.vocab_size = 151936
    model.rotary_base = 1e6
    model.layernorm_epsilon = 1e-6
    return config


def _bf16_with_cosine() -> Config:
    """Return the settings that all recipes begin with: Megatron Bridge's for 100 iterations of pretraining in bf16."""
    config = Config()
    config.model.params_dtype = "bf16"
    config.optimizer.lr = 3e-4
    config.optimizer.min_lr = 3e-5
    config.optimizer.weight_decay = 0.033
    config.optimizer.adam_beta2 = 0.95
    config.ddp.use_distributed_optimizer = True
    config.scheduler.lr_decay_style = "cosine"
    config.scheduler.lr_warmup_iters = 40
    config.scheduler.lr_decay_iters = 100
    config.train.train_iters = 100
    config.train.manual_gc = True
    config.train.global_batch_size = 8
    config.train.micro_batch_size = 1
    config.logger.log_interval = 1
    return config


RECIPES: Mapping[str, Callable[[], Config]] = {
    recipe.__name__: recipe
    for recipe in (
        qwen3_moe_tiny_pretrain_config,
        qwen3_600m_sft_config,
        llama32_1b_pretrain_config,
        qwen3_8b_pretrain_config,
        qwen3_30b_a3b_pretrain_config,
    )
}


def names() -> list[str]:
    """Return the names of all recipes, smallest model first."""
    return list(RECIPES)


def load(name: str) -> Config:
    """Return the configuration of the recipe `name`, fresh on each call.

    Raises:
        UnknownNameError: no such recipe; the text proposes the nearest one.
    """
    if name not in RECIPES:
        begun = [known for known in RECIPES if name and known.startswith(name)]
        closest = " or ".join(begun) or nearest(name, RECIPES)
        raise UnknownNameError(
            f"there is no recipe {name!r}",
            fix=f"did you mean {closest}?" if closest else f"the recipes are {', '.join(RECIPES)}",
        )
    return RECIPES[name]()
