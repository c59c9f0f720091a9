"""Declare rules on combinations of options, as data.

Texts marked `shared_with_megatron` are Megatron's, word for word.
"""

from __future__ import annotations

from hostward.config.rules.activations import OFFLOADING_RULES
from hostward.config.rules.parallelism import LAYOUT_RULES
from hostward.config.rules.table import (
    DECAY_ONLY,
    DENSE,
    EXPERTS_ONLY,
    FROM_FOLDER,
    SIZES,
    Kind,
    Rule,
    batch_sizes,
    braces,
    captured,
    changed,
    data_parallel_size,
    selective,
    serial,
    streams,
    unset_sizes,
)
from hostward.config.schema import Config

PERMANENT, UNTIL_BUILT = Kind.PERMANENT, Kind.UNTIL_BUILT
GRAPHS = "model.cuda_graph_impl"


def drawing_modules(config: Config) -> list[str]:
    """Return entries of model.recompute_modules that may draw random numbers, which a capture cannot replay."""
    return sorted(set(config.model.recompute_modules) & {"core_attn", "mlp", "moe"})


GRAPH_RULES = (
    Rule(
        "graphs-of-layers",
        UNTIL_BUILT,
        (GRAPHS,),
        lambda c, _: c.model.cuda_graph_impl not in ("none", "full_iteration"),
        "model.cuda_graph_impl={model.cuda_graph_impl} captures parts of the model, forward and backward apart, and "
        "is not built",
        "set model.cuda_graph_impl=full_iteration, which captures them together, or none",
    ),
    Rule(
        "graphs-on-a-cpu",
        PERMANENT,
        (GRAPHS, "train.device"),
        lambda c, _: captured(c) and c.train.device == "cpu",
        "model.cuda_graph_impl=full_iteration with train.device=cpu, which has no CUDA graphs",
        "set model.cuda_graph_impl=none, or train.device=cuda",
    ),
    Rule(
        "graphs-of-experts",
        UNTIL_BUILT,
        (GRAPHS, "model.architecture"),
        lambda c, _: captured(c) and c.model.architecture not in DENSE,
        "model.cuda_graph_impl=full_iteration with model.architecture={model.architecture} is not built: how many "
        "tokens each expert gets may be asked by the host",
        "set model.cuda_graph_impl=none",
    ),
    Rule(
        "graphs-attention",
        PERMANENT,
        (GRAPHS, "model.attn_implementation"),
        lambda c, _: captured(c) and c.model.attn_implementation != "sdpa",
        "model.cuda_graph_impl=full_iteration with model.attn_implementation={model.attn_implementation}, whose mask "
        "comes from the host in every forward",
        "set model.attn_implementation=sdpa",
    ),
    Rule(
        "graphs-weights",
        UNTIL_BUILT,
        (GRAPHS, "model.cpu_offloading", "model.cpu_offloading_weights"),
        lambda c, _: captured(c) and c.model.cpu_offloading and c.model.cpu_offloading_weights,
        "model.cuda_graph_impl=full_iteration with model.cpu_offloading_weights=true is not built: "
        "offloaded weights have no fixed address",
        "set model.cpu_offloading_weights=false, or model.cuda_graph_impl=none",
    ),
    Rule(
        "graphs-host-memory",
        PERMANENT,
        (
            GRAPHS,
            "model.cpu_offloading",
            "model.cpu_offloading_num_layers",
            "model.cpu_offloading_activations",
            "model.cpu_offloading_retain_pinned_cpu_buffers",
        ),
        lambda c, _: (
            captured(c)
            and c.model.cpu_offloading
            and c.model.cpu_offloading_num_layers > 0
            and c.model.cpu_offloading_activations
            and not c.model.cpu_offloading_retain_pinned_cpu_buffers
        ),
        "model.cuda_graph_impl=full_iteration with activations whose host memory is freed between iterations: "
        "replays copy to fixed addresses",
        "set model.cpu_offloading_retain_pinned_cpu_buffers=true",
    ),
    Rule(
        "graphs-gradients",
        PERMANENT,
        (GRAPHS, "optimizer.gradients"),
        lambda c, _: captured(c) and c.optimizer.gradients == "host",
        "model.cuda_graph_impl=full_iteration with optimizer.gradients=host: gradients stay where the graph writes "
        "them, until the step",
        "set optimizer.gradients=device, or model.cuda_graph_impl=none",
    ),
    Rule(
        "graphs-early",
        PERMANENT,
        (GRAPHS, "optimizer.step_early"),
        lambda c, _: captured(c) and c.optimizer.step_early > 0,
        "model.cuda_graph_impl=full_iteration with optimizer.step_early={optimizer.step_early}: gradients leave when "
        "the graph has ended, so nothing is stepped during backward",
        "leave optimizer.step_early out, or set model.cuda_graph_impl=none",
    ),
    Rule(
        "graphs-recompute",
        UNTIL_BUILT,
        (GRAPHS, "model.recompute_granularity", "model.recompute_modules"),
        lambda c, _: captured(c) and selective(c) and bool(drawing_modules(c)),
        lambda c, _: (
            f"model.cuda_graph_impl=full_iteration with {braces(drawing_modules(c))} in model.recompute_modules: they"
            " may draw random numbers"
        ),
        "recompute only layer norms and activations (layernorm, mlp_act), or whole layers",
        documented="model.cuda_graph_impl=full_iteration with {...} in model.recompute_modules: they may draw random"
        " numbers",
    ),
)


PERMANENT, UNTIL_BUILT = Kind.PERMANENT, Kind.UNTIL_BUILT
STATES, OVERLAP = "optimizer.offload_optimizer_states", "optimizer.overlap_cpu_optimizer_d2h_h2d"
TORCH_STEP = "optimizer.use_torch_optimizer_for_cpu_offload"
STATE_OPTIONS = {
    "exp_avg": "optimizer.exp_avg_dtype",
    "exp_avg_sq": "optimizer.exp_avg_sq_dtype",
    "main_param": "optimizer.main_params_dtype",
}
"""The option of each part of the optimizer's state, by its name in `state_dtypes` of AdamW."""

MODEL_RULES = (
    Rule(
        "model-sizes",
        PERMANENT,
        (
            *SIZES,
            "model.hf_model_path",
            "model.architecture",
            "model.ffn_hidden_size",
            "model.num_moe_experts",
            "model.moe_ffn_hidden_size",
        ),
        lambda c, _: c.model.hf_model_path is None and bool(unset_sizes(c)),
        lambda c, _: f"the model has no sizes: {', '.join(unset_sizes(c))} not set",
        "name a local pretrained folder with model.hf_model_path=FOLDER, or set the sizes",
        documented="the model has no sizes: ... not set",
    ),
    Rule(
        "pretrained-sizes",
        PERMANENT,
        ("model.hf_model_path", *FROM_FOLDER),
        lambda c, _: c.model.hf_model_path is not None and bool(changed(c, FROM_FOLDER)),
        lambda c, _: f"model.hf_model_path decides the sizes, but {', '.join(changed(c, FROM_FOLDER))} set as well",
        "leave those options out, or leave out model.hf_model_path",
        documented="model.hf_model_path decides the sizes, but ... set as well",
    ),
    Rule(
        "experts-of-dense-model",
        PERMANENT,
        ("model.architecture", *EXPERTS_ONLY),
        lambda c, _: c.model.architecture in DENSE and bool(changed(c, EXPERTS_ONLY)),
        lambda c, _: (
            f"{', '.join(changed(c, EXPERTS_ONLY))} set, but model.architecture={c.model.architecture} has no experts"
        ),
        "set model.architecture=qwen3_moe, or leave those options out",
        documented="... set, but model.architecture=... has no experts",
    ),
    Rule(
        "rope-scaling",
        PERMANENT,
        ("model.architecture", "model.rope_scaling"),
        lambda c, _: c.model.rope_scaling and c.model.architecture != "llama",
        "model.rope_scaling=true is Llama's, but model.architecture={model.architecture}",
        "set model.rope_scaling=false",
    ),
    Rule(
        "rope-scaling-factor",
        PERMANENT,
        ("model.rope_scaling", "model.rope_scaling_factor"),
        lambda c, _: not c.model.rope_scaling and bool(changed(c, ("model.rope_scaling_factor",))),
        "model.rope_scaling_factor={model.rope_scaling_factor} has no effect while model.rope_scaling=false",
        "set model.rope_scaling=true, or leave the factor out",
    ),
    Rule(
        "head-width",
        PERMANENT,
        ("model.hidden_size", "model.num_attention_heads", "model.kv_channels"),
        lambda c, _: (
            c.model.kv_channels is None
            and c.model.num_attention_heads > 0
            and c.model.hidden_size % c.model.num_attention_heads != 0
        ),
        "model.hidden_size ({model.hidden_size}) is not divisible by model.num_attention_heads"
        " ({model.num_attention_heads})",
        "set model.kv_channels, or choose sizes that divide",
    ),
    Rule(
        "rotary-pairs",
        PERMANENT,
        ("model.kv_channels",),
        lambda c, _: c.model.kv_channels is not None and c.model.kv_channels % 2 != 0,
        "model.kv_channels ({model.kv_channels}) must be even: the rotary embedding turns pairs",
        "set model.kv_channels to an even number",
    ),
    Rule(
        "query-groups",
        PERMANENT,
        ("model.num_attention_heads", "model.num_query_groups"),
        lambda c, _: (
            c.model.num_query_groups is not None and c.model.num_attention_heads % c.model.num_query_groups != 0
        ),
        "model.num_attention_heads ({model.num_attention_heads}) is not divisible by model.num_query_groups"
        " ({model.num_query_groups})",
        "choose model.num_query_groups so that it divides the heads",
    ),
    Rule(
        "router-topk",
        PERMANENT,
        ("model.num_moe_experts", "model.moe_router_topk"),
        lambda c, _: c.model.num_moe_experts is not None and c.model.moe_router_topk > c.model.num_moe_experts,
        "model.moe_router_topk ({model.moe_router_topk}) is more than model.num_moe_experts ({model.num_moe_experts})",
        "set model.moe_router_topk to at most {model.num_moe_experts}",
    ),
)

OPTIMIZER_RULES = (
    # Megatron does not support optimizer_cpu_offload with offload_optimizer_states; here both work (DIFFERENCES).
    Rule(
        "mix-with-states",
        PERMANENT,
        ("optimizer.offload_mix", STATES),
        lambda c, _: c.optimizer.offload_mix is not None and c.optimizer.offload_optimizer_states,
        "optimizer.offload_mix={optimizer.offload_mix} with optimizer.offload_optimizer_states=true: both say how much"
        " is streamed",
        "leave optimizer.offload_mix out, or set optimizer.offload_optimizer_states=false",
    ),
    Rule(
        "torch-optimizer-streamed",
        PERMANENT,
        (TORCH_STEP, "optimizer.offload_mix", STATES),
        lambda c, _: c.optimizer.use_torch_optimizer_for_cpu_offload and streams(c),
        "optimizer.use_torch_optimizer_for_cpu_offload=true with streamed state, which hostward's own kernel steps",
        "leave out optimizer.offload_mix and optimizer.offload_optimizer_states, or the torch optimizer",
    ),
    Rule(
        "torch-optimizer-short-state",
        PERMANENT,
        (TORCH_STEP, *STATE_OPTIONS.values()),
        lambda c, _: (
            c.optimizer.use_torch_optimizer_for_cpu_offload
            and any(getattr(c.optimizer, name.removeprefix("optimizer.")) != "fp32" for name in STATE_OPTIONS.values())
        ),
        "optimizer.use_torch_optimizer_for_cpu_offload=true with state in bf16 or fp8, which torch's step rounds to "
        "nearest, where it stalls, or does not take",
        "leave out optimizer.exp_avg_dtype, exp_avg_sq_dtype and main_params_dtype, or the torch optimizer",
    ),
    Rule(
        "bf16-main-params",
        PERMANENT,
        ("optimizer.main_params_dtype", "model.params_dtype"),
        lambda c, _: c.optimizer.main_params_dtype == "bf16" and c.model.params_dtype != "bf16",
        "optimizer.main_params_dtype=bf16 with model.params_dtype={model.params_dtype}: the main weight would have "
        "fewer bits than the weight",
        "set model.params_dtype=bf16, or leave out optimizer.main_params_dtype",
    ),
    Rule(
        "serial-sums",
        PERMANENT,
        ("optimizer.gradients", OVERLAP, TORCH_STEP),
        lambda c, _: c.optimizer.gradients == "host" and serial(c),
        "optimizer.gradients=host without the overlap: gradients accumulated on the host are offloaded during backward",
        "set optimizer.gradients=device, or leave the overlap on and the torch optimizer off",
    ),
    Rule(
        "serial-early",
        PERMANENT,
        ("optimizer.step_early", OVERLAP, TORCH_STEP),
        lambda c, _: c.optimizer.step_early > 0 and serial(c),
        "optimizer.step_early={optimizer.step_early} without the overlap: it makes CPU optimizer steps during "
        "backward, by hostward's own kernel",
        "leave optimizer.step_early out, or leave the overlap on and the torch optimizer off",
    ),
    Rule(
        "early-sums",
        PERMANENT,
        ("optimizer.step_early", "optimizer.gradients"),
        lambda c, _: c.optimizer.step_early > 0 and c.optimizer.gradients == "host",
        "optimizer.step_early={optimizer.step_early} with optimizer.gradients=host: gradients that are accumulated on "
        "the host are final only after the last addition",
        "leave optimizer.step_early out, or set optimizer.gradients=device",
    ),
    Rule(
        "early-scaled",
        PERMANENT,
        ("optimizer.step_early", "model.params_dtype"),
        lambda c, _: c.optimizer.step_early > 0 and c.model.params_dtype == "fp16",
        "optimizer.step_early={optimizer.step_early} with model.params_dtype=fp16: gradients are divided by the loss "
        "scale, and steps are guessed for gradients that are not scaled",
        "leave optimizer.step_early out, or set model.params_dtype=bf16",
    ),
    Rule(
        "overlap-of-nothing",
        PERMANENT,
        (OVERLAP, "optimizer.optimizer_cpu_offload", STATES),
        lambda c, _: (
            not c.optimizer.overlap_cpu_optimizer_d2h_h2d
            and not c.optimizer.optimizer_cpu_offload
            and not c.optimizer.offload_optimizer_states
        ),
        "optimizer.overlap_cpu_optimizer_d2h_h2d=false has no effect while nothing is offloaded",
        "set optimizer.optimizer_cpu_offload or optimizer.offload_optimizer_states too, or leave it at true",
    ),
    Rule(
        "states-adam-only",
        UNTIL_BUILT,
        ("optimizer.optimizer", STATES),
        lambda c, _: c.optimizer.offload_optimizer_states and c.optimizer.optimizer != "adam",
        "offload_optimizer_states is only supported with adam optimizer",
        "set optimizer.optimizer=adam",
        shared_with_megatron=True,
    ),
    Rule(
        "cpu-offload-decoupled",
        UNTIL_BUILT,
        ("optimizer.optimizer_cpu_offload", "optimizer.decoupled_weight_decay"),
        lambda c, _: c.optimizer.optimizer_cpu_offload and not c.optimizer.decoupled_weight_decay,
        "CPU offloading only supported with decoupled_weight_decay enabled (AdamW mode).",
        "set optimizer.decoupled_weight_decay=true",
        shared_with_megatron=True,
    ),
    Rule(
        "cpu-offload-distributed",
        PERMANENT,
        ("optimizer.optimizer_cpu_offload", "ddp.use_distributed_optimizer"),
        lambda c, world_size: (
            c.optimizer.optimizer_cpu_offload and world_size > 1 and not c.ddp.use_distributed_optimizer
        ),
        "optimizer.optimizer_cpu_offload with {world_size} processes needs ddp.use_distributed_optimizer",
        "set ddp.use_distributed_optimizer=true",
    ),
    Rule(
        "lr-order",
        PERMANENT,
        ("optimizer.lr", "optimizer.min_lr"),
        lambda c, _: c.optimizer.min_lr > c.optimizer.lr,
        "optimizer.min_lr ({optimizer.min_lr}) is more than optimizer.lr ({optimizer.lr})",
        "set optimizer.min_lr to at most optimizer.lr",
    ),
    Rule(
        "decay-needs-end",
        PERMANENT,
        ("scheduler.lr_decay_style", "scheduler.lr_decay_iters"),
        lambda c, _: c.scheduler.lr_decay_style != "constant" and c.scheduler.lr_decay_iters is None,
        "scheduler.lr_decay_style={scheduler.lr_decay_style} needs scheduler.lr_decay_iters",
        "set scheduler.lr_decay_iters, or scheduler.lr_decay_style=constant",
    ),
    Rule(
        "end-without-decay",
        PERMANENT,
        ("scheduler.lr_decay_style", "optimizer.min_lr", "scheduler.lr_decay_iters"),
        lambda c, _: c.scheduler.lr_decay_style == "constant" and bool(changed(c, DECAY_ONLY)),
        lambda c, _: f"{', '.join(changed(c, DECAY_ONLY))} set, but scheduler.lr_decay_style=constant does not decay",
        "set scheduler.lr_decay_style=cosine or linear, or optimizer.min_lr=0 and scheduler.lr_decay_iters=null",
        documented="... set, but scheduler.lr_decay_style=constant does not decay",
    ),
    Rule(
        "start-without-warmup",
        PERMANENT,
        ("scheduler.lr_warmup_iters", "scheduler.lr_warmup_init"),
        lambda c, _: c.scheduler.lr_warmup_iters == 0 and c.scheduler.lr_warmup_init != 0,
        "scheduler.lr_warmup_init={scheduler.lr_warmup_init} has no effect while scheduler.lr_warmup_iters=0",
        "set scheduler.lr_warmup_iters too, or leave scheduler.lr_warmup_init out",
    ),
    Rule(
        "warmup-before-decay",
        PERMANENT,
        ("scheduler.lr_warmup_iters", "scheduler.lr_decay_iters"),
        lambda c, _: (
            c.scheduler.lr_decay_iters is not None and c.scheduler.lr_warmup_iters >= c.scheduler.lr_decay_iters
        ),
        "scheduler.lr_warmup_iters ({scheduler.lr_warmup_iters}) is not less than scheduler.lr_decay_iters"
        " ({scheduler.lr_decay_iters})",
        "shorten the warm-up or raise scheduler.lr_decay_iters",
    ),
)

RUN_RULES = (
    Rule(
        "batch",
        PERMANENT,
        (
            "train.global_batch_size",
            "train.micro_batch_size",
            "model.tensor_model_parallel_size",
            "model.pipeline_model_parallel_size",
            "model.context_parallel_size",
        ),
        lambda c, world_size: (
            c.train.global_batch_size % (c.train.micro_batch_size * data_parallel_size(c, world_size)) != 0
        ),
        lambda c, world_size: (
            f"global batch size ({c.train.global_batch_size}) is not divisible by micro batch size"
            f" ({c.train.micro_batch_size}) times data parallel size ({data_parallel_size(c, world_size)})"
        ),
        batch_sizes,
        documented="global batch size (...) is not divisible by micro batch size (...) times data parallel size (...)",
        shared_with_megatron=True,
    ),
    Rule(
        "data-needs-path",
        PERMANENT,
        ("dataset.path", "dataset.format"),
        lambda c, _: c.dataset.path is None and c.dataset.format in ("text", "jsonl", "parquet", "indexed"),
        "dataset.format={dataset.format} needs dataset.path",
        "set dataset.path to the file, folder or prefix",
    ),
    Rule(
        "data-without-path",
        PERMANENT,
        ("dataset.path", "dataset.format"),
        lambda c, _: c.dataset.path is not None and c.dataset.format in ("stdlib", "mock"),
        "dataset.path has no effect with dataset.format={dataset.format}",
        "leave out dataset.path, or set dataset.format=auto",
    ),
    Rule(
        "text-key-unused",
        PERMANENT,
        ("dataset.path", "dataset.format", "dataset.text_key"),
        lambda c, _: (
            bool(changed(c, ("dataset.text_key",)))
            and c.dataset.format not in ("jsonl", "parquet")
            and (c.dataset.format != "auto" or c.dataset.path is None)
        ),
        "dataset.text_key={dataset.text_key} has no effect: dataset.format={dataset.format} reads no key or column",
        "leave dataset.text_key out, or name JSON lines or parquet with dataset.path",
    ),
    Rule(
        "tokenizer-folder",
        PERMANENT,
        ("tokenizer.tokenizer_type", "tokenizer.tokenizer_model", "model.hf_model_path"),
        lambda c, _: (
            c.tokenizer.tokenizer_type == "huggingface"
            and c.tokenizer.tokenizer_model is None
            and c.model.hf_model_path is None
        ),
        "tokenizer.tokenizer_type=huggingface needs a local folder",
        "set tokenizer.tokenizer_model=FOLDER, or model.hf_model_path=FOLDER where that folder has the tokenizer",
    ),
    Rule(
        "tokenizer-model-unused",
        PERMANENT,
        ("tokenizer.tokenizer_type", "tokenizer.tokenizer_model"),
        lambda c, _: c.tokenizer.tokenizer_model is not None and c.tokenizer.tokenizer_type != "huggingface",
        "tokenizer.tokenizer_model has no effect with tokenizer.tokenizer_type={tokenizer.tokenizer_type}",
        "set tokenizer.tokenizer_type=huggingface, or leave out tokenizer.tokenizer_model",
    ),
)

COMBINATIONS: tuple[Rule, ...] = (
    *MODEL_RULES,
    *OFFLOADING_RULES,
    *GRAPH_RULES,
    *OPTIMIZER_RULES,
    *LAYOUT_RULES,
    *RUN_RULES,
)
