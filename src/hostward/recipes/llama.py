"""Llama recipes."""

from __future__ import annotations

from hostward.config.schema import Config


def llama32_1b_pretrain_config() -> Config:
    """Llama 3.2 1B from random weights: 1.24 G parameters, tied embeddings."""
    config = Config()
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
    model.params_dtype = "bf16"

    config.optimizer.lr = 3e-4
    config.optimizer.min_lr = 3e-5
    config.optimizer.weight_decay = 0.1
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
