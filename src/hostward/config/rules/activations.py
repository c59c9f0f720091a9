"""Declare rules on options of activations, weights and recomputation, as data; see
`hostward.config.rules.combinations`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hostward.config.rules.table import (
    OFFLOAD_MODULES,
    RECOMPUTE_MODULES,
    Kind,
    Rule,
    braces,
    layers_of_stage,
    of_other_kind,
    offloaded_experts,
    recomputed,
    selective,
    unknown_modules,
    unknown_recomputed,
)
from hostward.config.schema import nearest

PERMANENT, UNTIL_BUILT = Kind.PERMANENT, Kind.UNTIL_BUILT


def _meant(unknown: Sequence[str], known: Sequence[str]) -> str:
    """Propose the name that the first of the unknown modules was probably meant for."""
    closest = nearest(unknown[0].lower(), known)
    return f"did you mean {closest} instead of {unknown[0]}?" if closest else "choose from the allowed modules"


OFFLOADING_RULES = (
    Rule(
        "cpu-offloading-layers",
        PERMANENT,
        ("model.cpu_offloading", "model.cpu_offloading_num_layers", "model.num_layers"),
        lambda c, _: (
            c.model.cpu_offloading
            and (c.model.cpu_offloading_num_layers < 0 or 0 < c.model.num_layers <= c.model.cpu_offloading_num_layers)
        ),
        "CPU offloading can be done only for layers less than {model.num_layers}",
        "set model.cpu_offloading_num_layers, the number of first layers to offload, from 0 to model.num_layers - 1: "
        "the last layer stays, because its backward begins as soon as its forward ends",
        shared_with_megatron=True,
    ),
    Rule(
        "cpu-offloading-nothing",
        PERMANENT,
        ("model.cpu_offloading", "model.cpu_offloading_activations", "model.cpu_offloading_weights"),
        lambda c, _: (
            c.model.cpu_offloading and not c.model.cpu_offloading_activations and not c.model.cpu_offloading_weights
        ),
        "CPU Offloading is enabled while it is not mentioned what to offload (weights/activations)",
        "set model.cpu_offloading_activations or model.cpu_offloading_weights",
        shared_with_megatron=True,
    ),
    Rule(
        "cpu-offloading-weights",
        PERMANENT,
        (
            "model.cpu_offloading",
            "model.cpu_offloading_num_layers",
            "model.cpu_offloading_weights",
            "optimizer.optimizer_cpu_offload",
            "optimizer.optimizer_offload_fraction",
            "optimizer.offload_mix",
            "optimizer.offload_optimizer_states",
        ),
        lambda c, _: (
            c.model.cpu_offloading
            and c.model.cpu_offloading_weights
            and c.model.cpu_offloading_num_layers > 0
            and not (
                c.optimizer.optimizer_cpu_offload
                and c.optimizer.optimizer_offload_fraction == 1.0
                and not c.optimizer.offload_mix
                and not c.optimizer.offload_optimizer_states
            )
        ),
        "model.cpu_offloading_weights=true with optimizer state whose step is not all on the CPU: trained weights "
        "have their one copy where the CPU optimizer step writes it",
        "add optimizer.optimizer_cpu_offload=true optimizer.optimizer_offload_fraction=1.0, and leave out "
        "optimizer.offload_mix and optimizer.offload_optimizer_states",
    ),
    Rule(
        "cpu-offloading-stages",
        PERMANENT,
        (
            "model.cpu_offloading",
            "model.cpu_offloading_num_layers",
            "model.num_layers",
            "model.pipeline_model_parallel_size",
        ),
        lambda c, _: (
            c.model.cpu_offloading
            and c.model.pipeline_model_parallel_size > 1
            and 0 < layers_of_stage(c) <= c.model.cpu_offloading_num_layers < c.model.num_layers
        ),
        lambda c, _: (
            f"model.cpu_offloading_num_layers={c.model.cpu_offloading_num_layers} with {layers_of_stage(c)} layers in"
            f" each of model.pipeline_model_parallel_size={c.model.pipeline_model_parallel_size} stages"
        ),
        "set model.cpu_offloading_num_layers to less than the layers of a stage: it counts those of each",
        documented="model.cpu_offloading_num_layers=... with ... layers in each of"
        " model.pipeline_model_parallel_size=... stages",
    ),
    Rule(
        "recompute-method",
        PERMANENT,
        ("model.recompute_granularity", "model.recompute_method", "model.recompute_num_layers"),
        lambda c, _: c.model.recompute_granularity == "full" and not recomputed(c),
        "model.recompute_granularity=full without model.recompute_method and model.recompute_num_layers",
        "set model.recompute_method=uniform and model.recompute_num_layers=1 for all layers, or block for the first N",
    ),
    Rule(
        "recompute-groups",
        UNTIL_BUILT,
        ("model.recompute_method", "model.recompute_num_layers"),
        lambda c, _: c.model.recompute_method == "uniform" and (c.model.recompute_num_layers or 1) > 1,
        "model.recompute_method=uniform with model.recompute_num_layers={model.recompute_num_layers}: groups of layers",
        "set model.recompute_num_layers=1",
    ),
    Rule(
        "recompute-modules-unknown",
        PERMANENT,
        ("model.recompute_modules",),
        lambda c, _: bool(unknown_recomputed(c)),
        lambda c, _: (
            f"Invalid choices for recompute_modules: {braces(unknown_recomputed(c))}."
            f" Allowed modules are: {braces(RECOMPUTE_MODULES)}"
        ),
        lambda c, _: _meant(unknown_recomputed(c), RECOMPUTE_MODULES),
        documented=f"Invalid choices for recompute_modules: {{...}}. Allowed modules are: {braces(RECOMPUTE_MODULES)}",
        shared_with_megatron=True,
    ),
    Rule(
        "recompute-modules-none",
        PERMANENT,
        ("model.recompute_granularity", "model.recompute_modules"),
        lambda c, _: selective(c) and not c.model.recompute_modules,
        "model.recompute_granularity=selective names no module in model.recompute_modules",
        "set model.recompute_modules=[layernorm,mlp_act], or [layernorm,moe_act] for experts",
    ),
    Rule(
        "recompute-modules-full",
        PERMANENT,
        ("model.recompute_granularity", "model.recompute_modules"),
        lambda c, _: c.model.recompute_granularity == "full" and bool(c.model.recompute_modules),
        "model.recompute_granularity=full with model.recompute_modules: whole layers are recomputed",
        "set model.recompute_granularity=selective, or leave model.recompute_modules out",
    ),
    Rule(
        "recompute-selective-layers",
        PERMANENT,
        ("model.recompute_granularity", "model.recompute_num_layers"),
        lambda c, _: selective(c) and c.model.recompute_num_layers is not None,
        "When using recompute_granularity: selective recompute_num_layers must be None.",
        "leave model.recompute_num_layers out",
        shared_with_megatron=True,
    ),
    Rule(
        "recompute-selective-method",
        PERMANENT,
        ("model.recompute_granularity", "model.recompute_method"),
        lambda c, _: selective(c) and c.model.recompute_method is not None,
        "model.recompute_granularity=selective with model.recompute_method, which is about whole layers",
        "leave model.recompute_method out",
    ),
    Rule(
        "recompute-core-attn",
        PERMANENT,
        ("model.recompute_granularity", "model.recompute_modules"),
        lambda c, _: selective(c) and "core_attn" in c.model.recompute_modules,
        "core_attn in model.recompute_modules: in transformers it is a function, not a module",
        "leave it out: with model.attn_implementation=sdpa attention saves no probabilities",
    ),
    Rule(
        "recompute-moe-act",
        PERMANENT,
        ("model.recompute_granularity", "model.recompute_modules", "model.experts_implementation"),
        lambda c, _: (
            selective(c) and "moe_act" in c.model.recompute_modules and c.model.experts_implementation == "eager"
        ),
        "moe_act in recompute_modules is only supported with moe_grouped_gemm.",
        "set model.experts_implementation=grouped_mm",
        shared_with_megatron=True,
    ),
    Rule(
        "recompute-kind",
        PERMANENT,
        ("model.architecture", "model.recompute_granularity", "model.recompute_modules"),
        lambda c, _: selective(c) and bool(of_other_kind(c)),
        lambda c, _: (
            f"{braces(of_other_kind(c))} in model.recompute_modules, and model.architecture={c.model.architecture}"
            " has no such modules"
        ),
        "mlp and mlp_act are for dense layers, moe and moe_act for experts",
        documented="mlp or mlp_act with experts, moe or moe_act without",
    ),
    Rule(
        "recompute-twice",
        PERMANENT,
        ("model.recompute_granularity", "model.recompute_modules"),
        lambda c, _: selective(c) and any({a, f"{a}_act"} <= set(c.model.recompute_modules) for a in ("mlp", "moe")),
        "model.recompute_modules names a module, and its activation as well",
        "leave out mlp_act if there is mlp, moe_act if there is moe",
    ),
    Rule(
        "recompute-offloaded-experts",
        PERMANENT,
        ("model.recompute_granularity", "model.recompute_modules", "model.offload_modules"),
        lambda c, _: selective(c) and "moe" in c.model.recompute_modules and bool(offloaded_experts(c)),
        lambda c, _: f"Cannot offload {braces(offloaded_experts(c))} while recomputing the entire MoE layer.",
        "leave moe out of model.recompute_modules, or these out of model.offload_modules",
        documented="Cannot offload {...} while recomputing the entire MoE layer.",
        shared_with_megatron=True,
    ),
    Rule(
        "cpu-offloading-fine-grained",
        UNTIL_BUILT,
        ("model.cpu_offloading", "model.fine_grained_activation_offloading"),
        lambda c, _: c.model.cpu_offloading and c.model.fine_grained_activation_offloading,
        "fine_grained_activation_offloading cannot be enabled with cpu_offloading.",
        "set one of the two to false",
        shared_with_megatron=True,
    ),
    Rule(
        "fine-grained-recompute",
        PERMANENT,
        ("model.fine_grained_activation_offloading", "model.recompute_granularity", "model.recompute_method"),
        lambda c, _: (
            c.model.fine_grained_activation_offloading
            and c.model.recompute_granularity == "full"
            and c.model.recompute_method == "uniform"
        ),
        "model.fine_grained_activation_offloading=true while all layers are recomputed: their modules save nothing",
        "set model.recompute_method=block, or model.cpu_offloading=true, which offloads the layers' inputs",
    ),
    Rule(
        "cpu-offloading-graphs",
        UNTIL_BUILT,
        ("model.cpu_offloading", "model.cuda_graph_impl"),
        lambda c, _: c.model.cpu_offloading and c.model.cuda_graph_impl not in ("none", "full_iteration"),
        "CUDA graphs not supported with CPU offloading.",
        "set model.cuda_graph_impl=none or model.cpu_offloading=false",
        shared_with_megatron=True,
    ),
    Rule(
        "offload-modules-unknown",
        PERMANENT,
        ("model.offload_modules",),
        lambda c, _: bool(unknown_modules(c)),
        lambda c, _: (
            f"Invalid choices for offload_modules: {braces(unknown_modules(c))}."
            f" Allowed modules are: {braces(OFFLOAD_MODULES)}"
        ),
        lambda c, _: _meant(unknown_modules(c), OFFLOAD_MODULES),
        documented="Invalid choices for offload_modules: {...}. Allowed modules are: {...}",
        shared_with_megatron=True,
    ),
    Rule(
        "offload-modules-none",
        PERMANENT,
        ("model.fine_grained_activation_offloading", "model.offload_modules"),
        lambda c, _: c.model.fine_grained_activation_offloading and not c.model.offload_modules,
        "model.fine_grained_activation_offloading=true names no module in model.offload_modules",
        "set model.offload_modules=[core_attn], for example",
    ),
    Rule(
        "offload-attn-proj",
        PERMANENT,
        ("model.offload_modules",),
        lambda c, _: "attn_proj" in c.model.offload_modules and "core_attn" not in c.model.offload_modules,
        "attn_proj cannot be set to offload_modules alone without core_attn because the input of attn_proj is the"
        " output of core_attn, which is needed in core_attn.backward().",
        "add core_attn to model.offload_modules",
        shared_with_megatron=True,
    ),
)
