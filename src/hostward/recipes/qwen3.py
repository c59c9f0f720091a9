"""Qwen3 dense recipes."""

from __future__ import annotations

from hostward.config.schema import Config


def qwen3_8b_pretrain_config() -> Config:
    """Qwen3-8B from random weights: 8.19 G parameters.

    16 GB of bf16 weights and 82 GB of optimizer state: on one 80 GB device, offload the optimizer.
    """
    config = Config()
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
    model.params_dtype = "bf16"

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


def qwen3_600m_sft_config() -> Config:
    """Further training of a pretrained Qwen3-0.6B (or another Qwen3) from a local folder: `model.hf_model_path=FOLDER`.

    The sizes, the weights and, unless `tokenizer.tokenizer_model` says otherwise, the tokenizer come from that folder.
    """
    config = Config()
    config.model.architecture = "qwen3"
    config.model.seq_length = 2048
    config.model.params_dtype = "bf16"
    config.tokenizer.tokenizer_type = "huggingface"

    config.optimizer.lr = 5e-6
    config.optimizer.min_lr = 0.0
    config.optimizer.weight_decay = 0.1
    config.optimizer.adam_beta2 = 0.98
    config.ddp.use_distributed_optimizer = True
    config.scheduler.lr_decay_style = "cosine"
    config.scheduler.lr_warmup_iters = 10
    config.scheduler.lr_decay_iters = 100
    config.train.train_iters = 100
    config.train.manual_gc = True
    config.train.global_batch_size = 8
    config.train.micro_batch_size = 1
    config.logger.log_interval = 1
    return config
