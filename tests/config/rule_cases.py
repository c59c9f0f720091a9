"""One configuration per rule on combinations that breaks it, with the exact message."""

from __future__ import annotations

TINY = "qwen3_moe_tiny_pretrain_config"
DENSE = "qwen3_8b_pretrain_config"
SFT = "qwen3_600m_sft_config"

# rule id: (recipe, overrides, processes, exact message)
COMBINATION_CASES: dict[str, tuple[str, str, int, str]] = {
    "model-sizes": (
        DENSE,
        "model.num_layers=0 model.ffn_hidden_size=null",
        1,
        "the model has no sizes: model.num_layers, model.ffn_hidden_size not set",
    ),
    "pretrained-sizes": (
        SFT,
        "model.hf_model_path=/folder model.num_layers=3",
        1,
        "model.hf_model_path decides the sizes, but model.num_layers set as well",
    ),
    "experts-of-dense-model": (
        DENSE,
        "model.num_moe_experts=8",
        1,
        "model.num_moe_experts set, but model.architecture=qwen3 has no experts",
    ),
    "rope-scaling": (
        DENSE,
        "model.rope_scaling=true",
        1,
        "model.rope_scaling=true is Llama's, but model.architecture=qwen3",
    ),
    "rope-scaling-factor": (
        DENSE,
        "model.rope_scaling_factor=32",
        1,
        "model.rope_scaling_factor=32.0 has no effect while model.rope_scaling=false",
    ),
    "head-width": (
        TINY,
        "model.kv_channels=null model.hidden_size=258",
        1,
        "model.hidden_size (258) is not divisible by model.num_attention_heads (4)",
    ),
    "rotary-pairs": (
        TINY,
        "model.kv_channels=65",
        1,
        "model.kv_channels (65) must be even: the rotary embedding turns pairs",
    ),
    "query-groups": (
        TINY,
        "model.num_query_groups=3",
        1,
        "model.num_attention_heads (4) is not divisible by model.num_query_groups (3)",
    ),
    "router-topk": (
        TINY,
        "model.moe_router_topk=9",
        1,
        "model.moe_router_topk (9) is more than model.num_moe_experts (8)",
    ),
    "cpu-offloading-layers": (
        TINY,
        "model.cpu_offloading=true model.cpu_offloading_num_layers=4",
        1,
        "CPU offloading can be done only for layers less than 4",
    ),
    "cpu-offloading-nothing": (
        TINY,
        "model.cpu_offloading=true model.cpu_offloading_activations=false",
        1,
        "CPU Offloading is enabled while it is not mentioned what to offload (weights/activations)",
    ),
    "cpu-offloading-weights": (
        TINY,
        (
            "model.cpu_offloading=true model.cpu_offloading_num_layers=2 model.cpu_offloading_weights=true "
            "optimizer.optimizer_cpu_offload=true optimizer.optimizer_offload_fraction=0.5"
        ),
        1,
        (
            "model.cpu_offloading_weights=true with optimizer state whose step is not all on the CPU: trained "
            "weights have their one copy where the CPU optimizer step writes it"
        ),
    ),
    "cpu-offloading-stages": (
        TINY,
        "model.cpu_offloading=true model.cpu_offloading_num_layers=2 model.pipeline_model_parallel_size=2",
        2,
        ("model.cpu_offloading_num_layers=2 with 2 layers in each of model.pipeline_model_parallel_size=2 stages"),
    ),
    "recompute-method": (
        TINY,
        "model.recompute_granularity=full",
        1,
        "model.recompute_granularity=full without model.recompute_method and model.recompute_num_layers",
    ),
    "recompute-groups": (
        TINY,
        "model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=2",
        1,
        "model.recompute_method=uniform with model.recompute_num_layers=2: groups of layers",
    ),
    "recompute-modules-unknown": (
        TINY,
        "model.recompute_granularity=selective model.recompute_modules=[zebra,layernorm,apple]",
        1,
        (
            "Invalid choices for recompute_modules: {'apple', 'zebra'}. Allowed modules are: {'core_attn', "
            "'layernorm', 'mlp', 'mlp_act', 'moe', 'moe_act'}"
        ),
    ),
    "recompute-modules-none": (
        TINY,
        "model.recompute_granularity=selective",
        1,
        "model.recompute_granularity=selective names no module in model.recompute_modules",
    ),
    "recompute-modules-full": (
        TINY,
        (
            "model.recompute_granularity=full model.recompute_method=block model.recompute_num_layers=1 "
            "model.recompute_modules=[layernorm]"
        ),
        1,
        "model.recompute_granularity=full with model.recompute_modules: whole layers are recomputed",
    ),
    "recompute-selective-layers": (
        TINY,
        "model.recompute_granularity=selective model.recompute_modules=[layernorm] model.recompute_num_layers=1",
        1,
        "When using recompute_granularity: selective recompute_num_layers must be None.",
    ),
    "recompute-selective-method": (
        TINY,
        "model.recompute_granularity=selective model.recompute_modules=[layernorm] model.recompute_method=block",
        1,
        "model.recompute_granularity=selective with model.recompute_method, which is about whole layers",
    ),
    "recompute-core-attn": (
        TINY,
        "model.recompute_granularity=selective model.recompute_modules=[core_attn]",
        1,
        "core_attn in model.recompute_modules: in transformers it is a function, not a module",
    ),
    "recompute-moe-act": (
        TINY,
        ("model.recompute_granularity=selective model.recompute_modules=[moe_act] model.experts_implementation=eager"),
        1,
        "moe_act in recompute_modules is only supported with moe_grouped_gemm.",
    ),
    "recompute-kind": (
        TINY,
        "model.recompute_granularity=selective model.recompute_modules=[mlp_act]",
        1,
        "{'mlp_act'} in model.recompute_modules, and model.architecture=qwen3_moe has no such modules",
    ),
    "recompute-twice": (
        TINY,
        "model.recompute_granularity=selective model.recompute_modules=[moe,moe_act]",
        1,
        "model.recompute_modules names a module, and its activation as well",
    ),
    "recompute-offloaded-experts": (
        TINY,
        (
            "model.recompute_granularity=selective model.recompute_modules=[moe] "
            "model.fine_grained_activation_offloading=true model.offload_modules=[moe_act,core_attn]"
        ),
        1,
        "Cannot offload {'moe_act'} while recomputing the entire MoE layer.",
    ),
    "cpu-offloading-fine-grained": (
        TINY,
        "model.cpu_offloading=true model.fine_grained_activation_offloading=true model.offload_modules=[core_attn]",
        1,
        "fine_grained_activation_offloading cannot be enabled with cpu_offloading.",
    ),
    "fine-grained-recompute": (
        TINY,
        (
            "model.fine_grained_activation_offloading=true model.offload_modules=[core_attn] "
            "model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1"
        ),
        1,
        "model.fine_grained_activation_offloading=true while all layers are recomputed: their modules save nothing",
    ),
    "cpu-offloading-graphs": (
        TINY,
        "model.cpu_offloading=true model.cuda_graph_impl=local",
        1,
        "CUDA graphs not supported with CPU offloading.",
    ),
    "graphs-of-layers": (
        DENSE,
        "model.cuda_graph_impl=transformer_engine",
        1,
        (
            "model.cuda_graph_impl=transformer_engine captures parts of the model, forward and backward apart, and is "
            "not built"
        ),
    ),
    "graphs-on-a-cpu": (
        DENSE,
        "model.cuda_graph_impl=full_iteration train.device=cpu",
        1,
        "model.cuda_graph_impl=full_iteration with train.device=cpu, which has no CUDA graphs",
    ),
    "graphs-of-experts": (
        TINY,
        "model.cuda_graph_impl=full_iteration",
        1,
        (
            "model.cuda_graph_impl=full_iteration with model.architecture=qwen3_moe is not built: how many tokens each "
            "expert gets may be asked by the host"
        ),
    ),
    "graphs-attention": (
        DENSE,
        "model.cuda_graph_impl=full_iteration model.attn_implementation=eager",
        1,
        (
            "model.cuda_graph_impl=full_iteration with model.attn_implementation=eager, whose mask comes from the host "
            "in every forward"
        ),
    ),
    "graphs-weights": (
        DENSE,
        (
            "model.cuda_graph_impl=full_iteration model.cpu_offloading=true model.cpu_offloading_num_layers=1 "
            "model.cpu_offloading_weights=true model.cpu_offloading_activations=false "
            "optimizer.optimizer_cpu_offload=true optimizer.optimizer_offload_fraction=1.0"
        ),
        1,
        (
            "model.cuda_graph_impl=full_iteration with model.cpu_offloading_weights=true is not built: "
            "offloaded weights have no fixed address"
        ),
    ),
    "graphs-host-memory": (
        DENSE,
        "model.cuda_graph_impl=full_iteration model.cpu_offloading=true model.cpu_offloading_num_layers=1",
        1,
        (
            "model.cuda_graph_impl=full_iteration with activations whose host memory is freed between iterations: "
            "replays copy to fixed addresses"
        ),
    ),
    "graphs-early": (
        DENSE,
        (
            "model.cuda_graph_impl=full_iteration optimizer.optimizer_cpu_offload=true "
            "optimizer.optimizer_offload_fraction=1.0 optimizer.step_early=1"
        ),
        1,
        (
            "model.cuda_graph_impl=full_iteration with optimizer.step_early=1.0: gradients leave when the graph has "
            "ended, so nothing is stepped during backward"
        ),
    ),
    "graphs-gradients": (
        DENSE,
        (
            "model.cuda_graph_impl=full_iteration optimizer.optimizer_cpu_offload=true "
            "optimizer.optimizer_offload_fraction=1.0 optimizer.gradients=host"
        ),
        1,
        (
            "model.cuda_graph_impl=full_iteration with optimizer.gradients=host: gradients stay where the graph writes "
            "them, until the step"
        ),
    ),
    "graphs-recompute": (
        DENSE,
        (
            "model.cuda_graph_impl=full_iteration model.recompute_granularity=selective "
            "model.recompute_modules=[layernorm,mlp]"
        ),
        1,
        "model.cuda_graph_impl=full_iteration with {'mlp'} in model.recompute_modules: they may draw random numbers",
    ),
    "offload-modules-unknown": (
        TINY,
        "model.fine_grained_activation_offloading=true model.offload_modules=[zebra,core_attn,apple]",
        1,
        (
            "Invalid choices for offload_modules: {'apple', 'zebra'}. Allowed modules are: {'attn_norm', 'attn_proj', "
            "'core_attn', 'expert_fc1', 'mlp_norm', 'moe_act', 'qkv_linear'}"
        ),
    ),
    "offload-modules-none": (
        TINY,
        "model.fine_grained_activation_offloading=true",
        1,
        "model.fine_grained_activation_offloading=true names no module in model.offload_modules",
    ),
    "offload-attn-proj": (
        TINY,
        "model.fine_grained_activation_offloading=true model.offload_modules=[attn_proj]",
        1,
        (
            "attn_proj cannot be set to offload_modules alone without core_attn because the input of attn_proj is the "
            "output of core_attn, which is needed in core_attn.backward()."
        ),
    ),
    "mix-with-states": (
        TINY,
        "optimizer.optimizer_cpu_offload=true optimizer.offload_optimizer_states=true optimizer.offload_mix=auto",
        1,
        ("optimizer.offload_mix=auto with optimizer.offload_optimizer_states=true: both say how much is streamed"),
    ),
    "torch-optimizer-streamed": (
        TINY,
        (
            "optimizer.optimizer_cpu_offload=true optimizer.use_torch_optimizer_for_cpu_offload=true "
            "optimizer.offload_mix=0.5"
        ),
        1,
        ("optimizer.use_torch_optimizer_for_cpu_offload=true with streamed state, which hostward's own kernel steps"),
    ),
    "torch-optimizer-short-state": (
        TINY,
        (
            "optimizer.optimizer_cpu_offload=true optimizer.use_torch_optimizer_for_cpu_offload=true "
            "optimizer.exp_avg_sq_dtype=bf16"
        ),
        1,
        (
            "optimizer.use_torch_optimizer_for_cpu_offload=true with state in bf16 or fp8, which torch's step "
            "rounds to nearest, where it stalls, or does not take"
        ),
    ),
    "bf16-main-params": (
        TINY,
        "model.params_dtype=fp16 optimizer.main_params_dtype=bf16",
        1,
        (
            "optimizer.main_params_dtype=bf16 with model.params_dtype=fp16: the main weight would have fewer bits than "
            "the weight"
        ),
    ),
    "serial-sums": (
        TINY,
        ("optimizer.optimizer_cpu_offload=true optimizer.gradients=host optimizer.overlap_cpu_optimizer_d2h_h2d=false"),
        1,
        "optimizer.gradients=host without the overlap: gradients accumulated on the host are offloaded during backward",
    ),
    "serial-early": (
        TINY,
        ("optimizer.optimizer_cpu_offload=true optimizer.step_early=0.5 optimizer.overlap_cpu_optimizer_d2h_h2d=false"),
        1,
        (
            "optimizer.step_early=0.5 without the overlap: it makes CPU optimizer steps during backward, by hostward's "
            "own kernel"
        ),
    ),
    "early-sums": (
        TINY,
        "optimizer.optimizer_cpu_offload=true optimizer.step_early=0.5 optimizer.gradients=host",
        1,
        (
            "optimizer.step_early=0.5 with optimizer.gradients=host: gradients that are accumulated on the host are "
            "final only after the last addition"
        ),
    ),
    "early-scaled": (
        TINY,
        "optimizer.optimizer_cpu_offload=true optimizer.step_early=0.5 model.params_dtype=fp16",
        1,
        (
            "optimizer.step_early=0.5 with model.params_dtype=fp16: gradients are divided by the loss scale, and steps "
            "are guessed for gradients that are not scaled"
        ),
    ),
    "overlap-of-nothing": (
        TINY,
        "optimizer.overlap_cpu_optimizer_d2h_h2d=false",
        1,
        "optimizer.overlap_cpu_optimizer_d2h_h2d=false has no effect while nothing is offloaded",
    ),
    "states-adam-only": (
        TINY,
        "optimizer.optimizer=sgd optimizer.offload_optimizer_states=true",
        1,
        "offload_optimizer_states is only supported with adam optimizer",
    ),
    "cpu-offload-decoupled": (
        TINY,
        "optimizer.optimizer_cpu_offload=true optimizer.decoupled_weight_decay=false",
        1,
        "CPU offloading only supported with decoupled_weight_decay enabled (AdamW mode).",
    ),
    "cpu-offload-distributed": (
        TINY,
        "optimizer.optimizer_cpu_offload=true ddp.use_distributed_optimizer=false train.micro_batch_size=1",
        2,
        "optimizer.optimizer_cpu_offload with 2 processes needs ddp.use_distributed_optimizer",
    ),
    "lr-order": (
        TINY,
        "optimizer.min_lr=0.5 optimizer.lr=0.25",
        1,
        "optimizer.min_lr (0.5) is more than optimizer.lr (0.25)",
    ),
    "decay-needs-end": (
        TINY,
        "scheduler.lr_decay_iters=null",
        1,
        "scheduler.lr_decay_style=cosine needs scheduler.lr_decay_iters",
    ),
    "end-without-decay": (
        TINY,
        "scheduler.lr_decay_style=constant",
        1,
        ("optimizer.min_lr, scheduler.lr_decay_iters set, but scheduler.lr_decay_style=constant does not decay"),
    ),
    "start-without-warmup": (
        TINY,
        "scheduler.lr_warmup_iters=0 scheduler.lr_warmup_init=1e-6",
        1,
        "scheduler.lr_warmup_init=1e-06 has no effect while scheduler.lr_warmup_iters=0",
    ),
    "warmup-before-decay": (
        TINY,
        "scheduler.lr_warmup_iters=50",
        1,
        "scheduler.lr_warmup_iters (50) is not less than scheduler.lr_decay_iters (50)",
    ),
    "batch": (
        "qwen3_30b_a3b_pretrain_config",
        "",
        16,
        "global batch size (8) is not divisible by micro batch size (1) times data parallel size (16)",
    ),
    "matrices-of-experts": (
        TINY,
        "model.tensor_model_parallel_size=2",
        2,
        (
            "model.tensor_model_parallel_size=2 with model.architecture=qwen3_moe needs model.sequence_parallel: else"
            " each of those ranks would give the same tokens to the experts"
        ),
    ),
    "matrices-over-ranks": (
        "llama32_1b_pretrain_config",
        "model.tensor_model_parallel_size=3",
        3,
        (
            "model.tensor_model_parallel_size=3 does not divide model.num_attention_heads, model.num_query_groups and,"
            " of a dense model, model.ffn_hidden_size"
        ),
    ),
    "sequences-without-matrices": (
        "llama32_1b_pretrain_config",
        "model.sequence_parallel=true",
        2,
        "model.sequence_parallel=true has no effect while model.tensor_model_parallel_size=1",
    ),
    "sequences-over-ranks": (
        "llama32_1b_pretrain_config",
        "model.sequence_parallel=true model.tensor_model_parallel_size=2 model.seq_length=33",
        2,
        "model.seq_length (33) is not divisible by model.tensor_model_parallel_size (2)",
    ),
    "ranks-for-matrices": (
        "llama32_1b_pretrain_config",
        "model.tensor_model_parallel_size=4",
        2,
        (
            "world size (2) is not divisible by model.tensor_model_parallel_size (4) times"
            " model.pipeline_model_parallel_size (1)"
        ),
    ),
    "matrices-distributed": (
        "llama32_1b_pretrain_config",
        "model.tensor_model_parallel_size=2 ddp.use_distributed_optimizer=false",
        2,
        "model.tensor_model_parallel_size=2 needs ddp.use_distributed_optimizer",
    ),
    "experts-over-ranks": (
        TINY,
        "model.expert_model_parallel_size=3",
        3,
        "model.expert_model_parallel_size=3 does not divide the experts of a layer (8)",
    ),
    "ranks-for-experts": (
        TINY,
        "model.expert_model_parallel_size=4 model.pipeline_model_parallel_size=2",
        4,
        (
            "world size (4) is not divisible by model.expert_model_parallel_size (4) times"
            " model.pipeline_model_parallel_size (2)"
        ),
    ),
    "experts-distributed": (
        TINY,
        "model.expert_model_parallel_size=2 ddp.use_distributed_optimizer=false",
        2,
        "model.expert_model_parallel_size=2 needs ddp.use_distributed_optimizer",
    ),
    "ranks-for-stages": (
        TINY,
        "model.pipeline_model_parallel_size=2",
        3,
        "world size (3) is not divisible by model.pipeline_model_parallel_size (2)",
    ),
    "layers-over-stages": (
        TINY,
        "model.pipeline_model_parallel_size=3",
        3,
        "model.num_layers (4) is not divisible by model.pipeline_model_parallel_size (3)",
    ),
    "rounds-without-stages": (
        TINY,
        "model.virtual_pipeline_model_parallel_size=2",
        1,
        ("model.virtual_pipeline_model_parallel_size=2 has no effect while model.pipeline_model_parallel_size=1"),
    ),
    "microbatches-for-rounds": (
        TINY,
        "model.virtual_pipeline_model_parallel_size=2 model.pipeline_model_parallel_size=2 train.global_batch_size=12",
        2,
        (
            "3 microbatches in a step are no multiple of model.pipeline_model_parallel_size=2, by which interleaved"
            " stages take them"
        ),
    ),
    "stages-of-tied-embeddings": (
        "llama32_1b_pretrain_config",
        "model.pipeline_model_parallel_size=2 optimizer.optimizer_cpu_offload=True optimizer.gradients=host",
        2,
        (
            "optimizer.gradients=host with model.share_embeddings_and_output_weights=true and"
            " model.pipeline_model_parallel_size=2: the gradient of a weight that the first and the last stage have is"
            " accumulated on the device"
        ),
    ),
    "microbatches-for-stages": (
        TINY,
        "model.pipeline_model_parallel_size=4 train.micro_batch_size=2",
        4,
        "2 microbatches in a step, and model.pipeline_model_parallel_size=4 stages: some would be idle",
    ),
    "data-needs-path": (TINY, "dataset.format=jsonl", 1, "dataset.format=jsonl needs dataset.path"),
    "data-without-path": (
        TINY,
        "dataset.format=mock dataset.path=/text",
        1,
        "dataset.path has no effect with dataset.format=mock",
    ),
    "text-key-unused": (
        TINY,
        "dataset.text_key=body",
        1,
        "dataset.text_key=body has no effect: dataset.format=auto reads no key or column",
    ),
    "tokenizer-folder": (
        TINY,
        "tokenizer.tokenizer_type=huggingface",
        1,
        "tokenizer.tokenizer_type=huggingface needs a local folder",
    ),
    "tokenizer-model-unused": (
        TINY,
        "tokenizer.tokenizer_model=/folder",
        1,
        "tokenizer.tokenizer_model has no effect with tokenizer.tokenizer_type=byte",
    ),
}
