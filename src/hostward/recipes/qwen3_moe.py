"""Qwen3 mixture-of-experts recipes."""

from __future__ import annotations

from hostward.config.schema import Config


def qwen3_30b_a3b_pretrain_config() -> Config:
    """Qwen3-30B-A3B from random weights: 30.53 G parameters, 3.3 G of them active per token.

    Whole, bf16 weights take 61 GB and the optimizer state 305 GB more: shrink it by overrides (`model.num_layers=4`),
    or use several devices. Every size can be overridden, so a shrunk model also trains on a CPU.
    """
    config = Config()
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
    model.params_dtype = "bf16"

    optimizer = config.optimizer
    optimizer.lr = 3e-4
    optimizer.min_lr = 3e-5
    optimizer.weight_decay = 0.033
    optimizer.adam_beta1 = 0.9
    optimizer.adam_beta2 = 0.95
    optimizer.adam_eps = 1e-8
    optimizer.clip_grad = 1.0
    config.ddp.use_distributed_optimizer = True

    config.scheduler.lr_decay_style = "cosine"
    config.scheduler.lr_warmup_iters = 40
    config.scheduler.lr_decay_iters = 100
    config.train.train_iters = 100
    config.train.manual_gc = True
    config.train.global_batch_size = 8
    config.train.micro_batch_size = 1
    config.rng.seed = 1234
    config.logger.log_interval = 1
    return config


def qwen3_moe_tiny_pretrain_config() -> Config:
    """The same architecture, small enough for two CPU cores: 13.5 M parameters, bytes as tokens, 50 steps.

    fp32, because bf16 matrix products can be many times slower on a CPU without instructions for them.
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
    config.train.manual_gc = True
    config.train.global_batch_size = 4
    config.train.micro_batch_size = 4
    config.logger.log_interval = 5
    return config
