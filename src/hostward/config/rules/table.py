"""Declare the rules of a configuration, as data; `hostward.config.validate` evaluates them.

Texts marked (M) are Megatron's, word for word, so that a search for the message of one finds the other.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hostward.config.schema import Config, get_option, options

Text = str | Callable[[Config, int], str]

DENSE = ("qwen3", "llama")
RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp", "mlp_act", "moe", "moe_act")
OFFLOAD_MODULES = ("attn_norm", "attn_proj", "core_attn", "expert_fc1", "mlp_norm", "moe_act", "qkv_linear")
SIZES = ("model.num_layers", "model.hidden_size", "model.num_attention_heads")
# Options that a pretrained folder decides: with model.hf_model_path they stay at their defaults.
FROM_FOLDER = (
    *SIZES,
    "model.ffn_hidden_size",
    "model.num_moe_experts",
    "model.moe_ffn_hidden_size",
    "model.moe_router_topk",
    "model.num_query_groups",
    "model.kv_channels",
    "model.vocab_size",
    "model.rotary_base",
    "model.rope_scaling",
    "model.rope_scaling_factor",
    "model.layernorm_epsilon",
    "model.share_embeddings_and_output_weights",
    "model.init_method_std",
)
EXPERTS_ONLY = (
    "model.num_moe_experts",
    "model.moe_ffn_hidden_size",
    "model.moe_router_topk",
    "model.moe_aux_loss_coeff",
)
DECAY_ONLY = ("optimizer.min_lr", "scheduler.lr_decay_iters")


class Kind(enum.Enum):
    """Say why a rule exists: PERMANENT rules stay; UNTIL_BUILT rules go when the combination is built."""

    PERMANENT = "permanent"
    UNTIL_BUILT = "until built"


@dataclass(frozen=True, slots=True)
class Range:
    """Hold the bounds of a number; without `high` any finite number above `low` will do.

    Args:
        message: replaces the standard text.
    """

    low: float
    high: float | None = None
    low_excluded: bool = False
    high_excluded: bool = False
    message: str = ""

    def holds(self, value: float) -> bool:
        """Return whether `value` is inside; NaN and infinities never are."""
        if value == self.low:
            return not self.low_excluded
        if value == self.high:
            return not self.high_excluded
        return self.low < value < (float("inf") if self.high is None else self.high)

    @property
    def text(self) -> str:
        """Return the bounds in words."""
        if self.high is None:
            return f"{'greater than' if self.low_excluded else 'at least'} {self.low}"
        return f"in {'(' if self.low_excluded else '['}{self.low}, {self.high}{')' if self.high_excluded else ']'}"


NOT_NEGATIVE = Range(low=0)
POSITIVE = Range(low=0, low_excluded=True)
AT_LEAST_ONE = Range(low=1)
SEED = Range(low=0, high=2**63 - 1)

RANGES: Mapping[str, Range] = {
    "model.num_layers": Range(low=0, high=4096),
    "model.hidden_size": NOT_NEGATIVE,
    "model.ffn_hidden_size": AT_LEAST_ONE,
    "model.num_moe_experts": Range(low=1, high=1 << 16),
    "model.moe_ffn_hidden_size": AT_LEAST_ONE,
    "model.moe_router_topk": AT_LEAST_ONE,
    "model.moe_aux_loss_coeff": NOT_NEGATIVE,
    "model.num_attention_heads": NOT_NEGATIVE,
    "model.num_query_groups": AT_LEAST_ONE,
    "model.kv_channels": AT_LEAST_ONE,
    "model.seq_length": AT_LEAST_ONE,
    "model.vocab_size": Range(low=1, high=1 << 28),
    "model.rotary_base": POSITIVE,
    "model.rope_scaling_factor": AT_LEAST_ONE,
    "model.layernorm_epsilon": POSITIVE,
    "model.init_method_std": NOT_NEGATIVE,
    "model.tensor_model_parallel_size": AT_LEAST_ONE,
    "model.pipeline_model_parallel_size": AT_LEAST_ONE,
    "model.virtual_pipeline_model_parallel_size": AT_LEAST_ONE,
    "model.context_parallel_size": AT_LEAST_ONE,
    "model.expert_model_parallel_size": AT_LEAST_ONE,
    "model.expert_tensor_parallel_size": AT_LEAST_ONE,
    "model.recompute_num_layers": AT_LEAST_ONE,
    "model.min_offloaded_tensor_size": Range(low=0, message="min_offloaded_tensor_size must be non-negative."),  # (M)
    "model.activation_offload_fraction": Range(
        low=0, high=1, message="activation_offload_fraction must be in range [0, 1]."
    ),  # (M)
    "model.fine_grained_offloading_max_inflight_offloads": NOT_NEGATIVE,
    "optimizer.lr": NOT_NEGATIVE,
    "optimizer.min_lr": NOT_NEGATIVE,
    "optimizer.weight_decay": NOT_NEGATIVE,
    "optimizer.adam_beta1": Range(low=0, high=1, high_excluded=True),
    "optimizer.adam_beta2": Range(low=0, high=1, high_excluded=True),
    "optimizer.adam_eps": NOT_NEGATIVE,
    "optimizer.clip_grad": NOT_NEGATIVE,
    "optimizer.optimizer_offload_fraction": Range(low=0.0, high=1.0),
    "optimizer.offload_mix": Range(low=0.0, high=1.0),
    "optimizer.step_early": Range(low=0.0, high=1.0),
    "optimizer.optimizer_state_offload_fraction": Range(
        low=0, high=1, message="optimizer_state_offload_fraction must be in [0.0, 1.0]"
    ),  # (M)
    "optimizer.optimizer_state_offload_chunk_size_mb": Range(
        low=0, message="optimizer_state_offload_chunk_size_mb must be non-negative"
    ),  # (M)
    "optimizer.host_threads": AT_LEAST_ONE,
    "scheduler.lr_decay_iters": AT_LEAST_ONE,
    "scheduler.lr_warmup_iters": NOT_NEGATIVE,
    "scheduler.lr_warmup_init": NOT_NEGATIVE,
    "train.train_iters": AT_LEAST_ONE,
    "train.global_batch_size": AT_LEAST_ONE,
    "train.micro_batch_size": AT_LEAST_ONE,
    "train.num_threads": AT_LEAST_ONE,
    "train.manual_gc_interval": NOT_NEGATIVE,
    "dist.distributed_timeout_minutes": POSITIVE,
    "dataset.random_seed": SEED,
    "rng.seed": SEED,
    "checkpoint.save_interval": AT_LEAST_ONE,
    "checkpoint.most_recent_k": AT_LEAST_ONE,
    "logger.log_interval": AT_LEAST_ONE,
}

# Options that mean something only while a switch has a value: {switch: options}. Set without it, they would do nothing.
DEPENDENT: Mapping[str, tuple[str, ...]] = {
    "model.cpu_offloading": (
        "model.cpu_offloading_num_layers",
        "model.cpu_offloading_activations",
        "model.cpu_offloading_weights",
        "model.cpu_offloading_double_buffering",
        "model.cpu_offloading_retain_pinned_cpu_buffers",
    ),
    "model.fine_grained_activation_offloading": (
        "model.offload_modules",
        "model.min_offloaded_tensor_size",
        "model.activation_offload_fraction",
        "model.fine_grained_offloading_max_inflight_offloads",
    ),
    "model.recompute_granularity": (
        "model.recompute_method",
        "model.recompute_num_layers",
        "model.recompute_modules",
    ),
    "optimizer.optimizer_cpu_offload": (
        "optimizer.optimizer_offload_fraction",
        "optimizer.use_torch_optimizer_for_cpu_offload",
        "optimizer.pin_cpu_grads",
        "optimizer.pin_cpu_params",
        "optimizer.gradients",
        "optimizer.offload_mix",
        "optimizer.step_early",
    ),
    "optimizer.offload_optimizer_states": (
        "optimizer.optimizer_state_offload_fraction",
        "optimizer.optimizer_state_offload_chunk_size_mb",
    ),
    "checkpoint.save": (
        "checkpoint.save_interval",
        "checkpoint.most_recent_k",
        "checkpoint.async_save",
        "train.exit_signal_handler",
    ),
    "checkpoint.async_save": ("checkpoint.async_save_mode",),
    "train.manual_gc": ("train.manual_gc_interval",),
    "ddp.use_distributed_optimizer": ("ddp.data_parallel_sharding_strategy",),
    "checkpoint.load": ("checkpoint.finetune", "checkpoint.load_optim", "checkpoint.load_rng"),
}

# Switches that are on and do nothing while another option has its default, as in Megatron: {switch: (that option, a
# value that does something)}. Allowed with a warning, so that a size may be swept from zero.
IDLE: Mapping[str, tuple[str, str]] = {
    "model.cpu_offloading": ("model.cpu_offloading_num_layers", "1"),
    "optimizer.optimizer_cpu_offload": ("optimizer.optimizer_offload_fraction", "1.0"),
}

# Options that are known and not carried out yet: {option: (the one value that works, why no other does)}.
NOT_BUILT: Mapping[str, tuple[object, str]] = {
    "model.context_parallel_size": (1, "attention takes whole sequences: no process has a part of one"),
    "model.expert_tensor_parallel_size": (1, "each matrix of an expert is unsharded in its process"),
    "optimizer.optimizer": ("adam", "AdamW is the only step that the host and the device have"),
    "optimizer.decoupled_weight_decay": (True, "the step is that of AdamW, which decays weights apart from gradients"),
    "ddp.overlap_grad_reduce": (True, "FSDP2 always overlaps its reductions with backward"),
    "ddp.overlap_param_gather": (True, "FSDP2 always overlaps its gathers with forward"),
}

# The same, with several processes.
NOT_BUILT_FOR_RANKS: Mapping[str, object] = {
    "model.cuda_graph_impl": "none",
}

# What Megatron does not support or does otherwise, and what happens here: shown in docs/options.md.
DIFFERENCES: Mapping[str, str] = {
    "offload_optimizer_states can not be used with optimizer_cpu_offload.": (
        "Both work together: optimizer_offload_fraction of all state has a CPU optimizer step, and "
        "optimizer_state_offload_fraction of the rest is streamed."
    ),
    "overlap_cpu_optimizer_d2h_h2d is false unless it is set": (
        "It is true: the overlapped schedule is bitwise identical, and faster. false is there for comparison."
    ),
    "overlap_grad_reduce and overlap_param_gather are false unless they are set": (
        "They are true: FSDP2 reduces and gathers layer by layer, overlapped with compute."
    ),
    "data_parallel_sharding_strategy is no_shard unless it is set, and Megatron-FSDP reads it": (
        "It is optim_grads, what use_distributed_optimizer does without it; PyTorch's FSDP2 carries it out."
    ),
    "There is no optimizer.offload_mix": (
        "A part of the share of optimizer_cpu_offload may be streamed instead, so that memory and PCIe are both busy."
    ),
    "There is no optimizer.step_early": (
        "Steps of the CPU may be made during backward, on the guess that nothing clips, where the host has the memory."
    ),
    "CPU offloading does not work when activation recomputation is enabled": (
        "It does: inputs of recomputed layers are offloaded, and so are saved tensors of the others."
    ),
    "recompute_modules are core_attn unless they are set": (
        "They have to be set: fused attention saves nothing that its recomputation would spare."
    ),
    "fine_grained_offloading_max_inflight_offloads counts by name of module": "It counts all groups of a layer.",
    "cuda_graph_warmup_steps": "Three iterations come before the capture of cuda_graph_impl=full_iteration.",
    "fine_grained_offloading_max_inflight_offloads must be a non-negative integer [...] with full-iteration CUDA "
    "graphs": "It may be None.",
    "There is no checkpoint.async_save_mode": (
        "Saving during training needs a second host copy of the state, or makes the next step wait for the disk."
    ),
    "manual_gc_interval is 0 where nothing is said": "It is 100, what Megatron's recipes set. 0 is still none.",
    "exit_signal_handler ends with exit code 0": "It is 143, for the run is not at its end (training/scaling-out.md).",
    "A folder in checkpoint.load without a checkpoint starts from random weights": (
        "It does where checkpoint.save names the same folder; any other is an error, for its name may be misspelt."
    ),
    "There is no optimizer.gradients": (
        "Gradients of several microbatches may be accumulated on the host, in fp32: the device keeps none of those."
    ),
    "pin_cpu_params is accepted and not read": "It decides if the host memory of reloaded weights is pinned.",
    "Currently there is no support for Pipeline parallelism with CPU offloading": (
        "There is: model.cpu_offloading_num_layers counts the layers of each rank, recompute_num_layers those of each"
        " stage."
    ),
    "optimizer_state_offload_chunk_size_mb bounds the moments alone": (
        "It bounds all streamed state, fp32 main weights included."
    ),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """Declare one condition on a combination of options.

    `reads` names the options involved; the rule is skipped while one of them is wrong by itself. A text is formatted
    with the namespaces by name and `world_size`, or computed; `documented` says in general what a computed one says.
    """

    id: str
    kind: Kind
    reads: tuple[str, ...]
    broken: Callable[[Config, int], bool]
    message: Text
    fix: Text
    documented: str = field(default="", kw_only=True)
    shared_with_megatron: bool = field(default=False, kw_only=True)


def data_parallel_size(config: Config, world_size: int) -> int:
    """Return the number of processes that hold copies of the model."""
    model = config.model
    sharing = model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size
    return max(1, world_size // sharing)


def batch_sizes(config: Config, world_size: int) -> str:
    """Return options, as one types them, that make the batch a whole number of microbatches."""
    train, copies = config.train, data_parallel_size(config, world_size)
    whole = train.micro_batch_size * copies
    below = train.global_batch_size // whole * whole
    near = " or ".join(str(size) for size in (below, below + whole) if size)
    of_rank, rest = divmod(train.global_batch_size, copies)
    fits = [
        str(size) for size in range(1, min(of_rank, train.micro_batch_size) + 1) if not rest and of_rank % size == 0
    ]
    smaller = f", or train.micro_batch_size={' or '.join(fits[-3:])}" if fits else ""
    return f"set train.global_batch_size={near} (any multiple of {whole}){smaller}"


def layers_of_stage(config: Config) -> int:
    """Return the layers of one process, where their number is known; 0 for a pretrained folder."""
    return config.model.num_layers // config.model.pipeline_model_parallel_size


def microbatches(config: Config, world_size: int) -> int:
    """Return the microbatches of one step in a process."""
    return config.train.global_batch_size // (config.train.micro_batch_size * data_parallel_size(config, world_size))


def divided_sizes(config: Config) -> list[int]:
    """Return the sizes that tensor parallelism divides, as far as they are set."""
    model = config.model
    dense = (model.ffn_hidden_size,) if model.architecture in DENSE else ()
    return [size for size in (model.num_attention_heads, model.num_query_groups, *dense) if size]


def widened(config: Config, world_size: int) -> bool:
    """Return whether gradients are reduced in a wider dtype than that of the weights."""
    return world_size > 1 and config.ddp.grad_reduce_in_fp32 and config.model.params_dtype != "fp32"


def serial(config: Config) -> bool:
    """Return whether the step runs alone, between backward and forward."""
    options = config.optimizer
    return not options.overlap_cpu_optimizer_d2h_h2d or options.use_torch_optimizer_for_cpu_offload


def resharded(config: Config) -> bool:
    """Return whether layers that are sharded over processes are unsharded only while they run."""
    return config.ddp.data_parallel_sharding_strategy == "optim_grads_params"


def captured(config: Config) -> bool:
    """Return whether forward and backward of an iteration become a CUDA graph."""
    return config.model.cuda_graph_impl == "full_iteration"


def streams(config: Config) -> bool:
    """Return whether the options stream state."""
    return config.optimizer.offload_mix is not None or config.optimizer.offload_optimizer_states


def recomputed(config: Config) -> bool:
    """Return whether the options name the layers that are recomputed."""
    return config.model.recompute_method is not None and config.model.recompute_num_layers is not None


def changed(config: Config, names: tuple[str, ...]) -> list[str]:
    """Return those of `names` whose value is not the default."""
    return [name for name in names if get_option(config, name) != options()[name].default]


def unset_sizes(config: Config) -> list[str]:
    """Return the sizes that a model built from random weights needs and does not have."""
    model = config.model
    needed = [name for name in SIZES if get_option(config, name) == 0]
    if model.architecture in DENSE:
        needed += [] if model.ffn_hidden_size else ["model.ffn_hidden_size"]
    else:
        needed += [n for n in ("model.num_moe_experts", "model.moe_ffn_hidden_size") if get_option(config, n) is None]
    return needed


def unknown_modules(config: Config) -> list[str]:
    """Return entries of model.offload_modules that name no module."""
    return sorted(set(config.model.offload_modules) - set(OFFLOAD_MODULES))


def unknown_recomputed(config: Config) -> list[str]:
    """Return entries of model.recompute_modules that name no module."""
    return sorted(set(config.model.recompute_modules) - set(RECOMPUTE_MODULES))


def of_other_kind(config: Config) -> list[str]:
    """Return entries of model.recompute_modules that layers of this architecture do not have."""
    return sorted(set(config.model.recompute_modules) & other_kind(config))


def other_kind(config: Config) -> set[str]:
    """Return the RECOMPUTE_MODULES that layers of this architecture do not have."""
    return {"moe", "moe_act"} if config.model.architecture in DENSE else {"mlp", "mlp_act"}


def offloaded_experts(config: Config) -> list[str]:
    """Return entries of model.offload_modules that are inside of a layer of experts."""
    return sorted(set(config.model.offload_modules) & {"expert_fc1", "moe_act"})


def selective(config: Config) -> bool:
    """Return whether parts of layers are recomputed."""
    return config.model.recompute_granularity == "selective"


def braces(names: list[str] | tuple[str, ...]) -> str:
    """Format names as Python writes a set, sorted."""
    return "{" + ", ".join(repr(name) for name in names) + "}"
