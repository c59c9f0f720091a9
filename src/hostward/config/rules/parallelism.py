"""Declare rules on how several processes share a model, as data; see `hostward.config.rules.combinations`."""

from __future__ import annotations

from hostward.config.rules.table import DENSE, Kind, Rule, divided_sizes, microbatches
from hostward.config.schema import Config

PERMANENT, UNTIL_BUILT = Kind.PERMANENT, Kind.UNTIL_BUILT

EXPERTS, MATRICES = "model.expert_model_parallel_size", "model.tensor_model_parallel_size"
PIPELINE, ROUNDS = "model.pipeline_model_parallel_size", "model.virtual_pipeline_model_parallel_size"
BATCH = (MATRICES, "train.global_batch_size", "train.micro_batch_size", "model.context_parallel_size")


def stages(config: Config) -> int:
    """Return the number of stages of the whole pipeline."""
    return config.model.pipeline_model_parallel_size * (config.model.virtual_pipeline_model_parallel_size or 1)


def product_of_stages(config: Config) -> str:
    """Describe the number of stages in terms of the options."""
    model, rounds = config.model, config.model.virtual_pipeline_model_parallel_size
    times = "" if rounds is None else f" times {ROUNDS} ({rounds})"
    return f"{PIPELINE} ({model.pipeline_model_parallel_size}){times}"


_STAGE_RULES = (
    Rule(
        "ranks-for-stages",
        PERMANENT,
        (PIPELINE,),
        lambda c, world_size: world_size % c.model.pipeline_model_parallel_size != 0,
        "world size ({world_size}) is not divisible by model.pipeline_model_parallel_size"
        " ({model.pipeline_model_parallel_size})",
        "start as many processes as it says, or a multiple: torchrun --nproc-per-node",
    ),
    Rule(
        "layers-over-stages",
        PERMANENT,
        (PIPELINE, ROUNDS, "model.num_layers"),
        lambda c, _: c.model.num_layers % stages(c) != 0,
        lambda c, _: f"model.num_layers ({c.model.num_layers}) is not divisible by {product_of_stages(c)}",
        "choose stages that divide model.num_layers equally",
        documented="model.num_layers (...) is not divisible by model.pipeline_model_parallel_size (...)"
        " [times model.virtual_pipeline_model_parallel_size (...)]",
    ),
    Rule(
        "rounds-without-stages",
        PERMANENT,
        (PIPELINE, ROUNDS),
        lambda c, _: (
            c.model.virtual_pipeline_model_parallel_size is not None and c.model.pipeline_model_parallel_size == 1
        ),
        "model.virtual_pipeline_model_parallel_size={model.virtual_pipeline_model_parallel_size} has no effect while"
        " model.pipeline_model_parallel_size=1",
        "set model.pipeline_model_parallel_size too, or leave model.virtual_pipeline_model_parallel_size out",
    ),
    Rule(
        "microbatches-for-rounds",
        PERMANENT,
        (PIPELINE, ROUNDS, *BATCH),
        lambda c, world_size: (
            (c.model.virtual_pipeline_model_parallel_size or 1) > 1
            and microbatches(c, world_size) % c.model.pipeline_model_parallel_size != 0
        ),
        lambda c, world_size: (
            f"{microbatches(c, world_size)} microbatches in a step are no multiple of"
            f" model.pipeline_model_parallel_size={c.model.pipeline_model_parallel_size}, by which interleaved stages"
            " take them"
        ),
        "choose train.global_batch_size so, or leave model.virtual_pipeline_model_parallel_size out",
        documented="... microbatches in a step are no multiple of model.pipeline_model_parallel_size=..., by which"
        " interleaved stages take them",
    ),
    Rule(
        "stages-of-tied-embeddings",
        UNTIL_BUILT,
        (PIPELINE, "model.share_embeddings_and_output_weights", "optimizer.gradients"),
        lambda c, _: (
            c.model.pipeline_model_parallel_size > 1
            and c.model.share_embeddings_and_output_weights
            and c.optimizer.gradients == "host"
        ),
        "optimizer.gradients=host with model.share_embeddings_and_output_weights=true and"
        " model.pipeline_model_parallel_size={model.pipeline_model_parallel_size}: the gradient of a weight that the"
        " first and the last stage have is accumulated on the device",
        "set optimizer.gradients=device, or model.pipeline_model_parallel_size=1",
    ),
    Rule(
        "microbatches-for-stages",
        PERMANENT,
        (PIPELINE, *BATCH),
        lambda c, world_size: (
            c.model.pipeline_model_parallel_size > 1
            and 0 < microbatches(c, world_size) < c.model.pipeline_model_parallel_size
        ),
        lambda c, world_size: (
            f"{microbatches(c, world_size)} microbatches in a step, and"
            f" model.pipeline_model_parallel_size={c.model.pipeline_model_parallel_size} stages: some would be idle"
        ),
        "raise train.global_batch_size, or lower train.micro_batch_size",
        documented="... microbatches in a step, and model.pipeline_model_parallel_size=... stages: some would be idle",
    ),
)
_DIVIDED_RULES = (
    Rule(
        "matrices-of-experts",
        PERMANENT,
        (MATRICES, "model.architecture", "model.sequence_parallel"),
        lambda c, _: (
            c.model.tensor_model_parallel_size > 1
            and c.model.architecture not in DENSE
            and not c.model.sequence_parallel
        ),
        "model.tensor_model_parallel_size={model.tensor_model_parallel_size} with"
        " model.architecture={model.architecture} needs model.sequence_parallel: else each of those ranks would give"
        " the same tokens to the experts",
        "set model.sequence_parallel=true",
    ),
    Rule(
        "matrices-over-ranks",
        PERMANENT,
        (
            MATRICES,
            "model.architecture",
            "model.num_attention_heads",
            "model.num_query_groups",
            "model.ffn_hidden_size",
        ),
        lambda c, _: any(size % c.model.tensor_model_parallel_size for size in divided_sizes(c)),
        "model.tensor_model_parallel_size={model.tensor_model_parallel_size} does not divide model.num_attention_heads,"
        " model.num_query_groups and, of a dense model, model.ffn_hidden_size",
        "set model.tensor_model_parallel_size to a common divisor of them",
    ),
    Rule(
        "sequences-without-matrices",
        PERMANENT,
        (MATRICES, "model.sequence_parallel"),
        lambda c, _: c.model.sequence_parallel and c.model.tensor_model_parallel_size == 1,
        "model.sequence_parallel=true has no effect while model.tensor_model_parallel_size=1",
        "set model.tensor_model_parallel_size too, or model.sequence_parallel=false",
    ),
    Rule(
        "sequences-over-ranks",
        PERMANENT,
        (MATRICES, "model.sequence_parallel", "model.seq_length"),
        lambda c, _: c.model.sequence_parallel and c.model.seq_length % c.model.tensor_model_parallel_size != 0,
        "model.seq_length ({model.seq_length}) is not divisible by model.tensor_model_parallel_size"
        " ({model.tensor_model_parallel_size})",
        "set model.seq_length to a multiple, or model.sequence_parallel=false",
    ),
    Rule(
        "ranks-for-matrices",
        PERMANENT,
        (MATRICES, PIPELINE),
        lambda c, world_size: (
            c.model.tensor_model_parallel_size > 1
            and world_size % (c.model.tensor_model_parallel_size * c.model.pipeline_model_parallel_size) != 0
        ),
        "world size ({world_size}) is not divisible by model.tensor_model_parallel_size"
        " ({model.tensor_model_parallel_size}) times model.pipeline_model_parallel_size"
        " ({model.pipeline_model_parallel_size})",
        "start as many processes as it says, or a multiple: torchrun --nproc-per-node",
    ),
    Rule(
        "matrices-distributed",
        PERMANENT,
        (MATRICES, "ddp.use_distributed_optimizer"),
        lambda c, _: c.model.tensor_model_parallel_size > 1 and not c.ddp.use_distributed_optimizer,
        "model.tensor_model_parallel_size={model.tensor_model_parallel_size} needs ddp.use_distributed_optimizer",
        "set ddp.use_distributed_optimizer=true",
    ),
    Rule(
        "experts-over-ranks",
        PERMANENT,
        (EXPERTS, "model.architecture", "model.hf_model_path", "model.num_moe_experts"),
        lambda c, _: (
            c.model.expert_model_parallel_size > 1
            and (
                c.model.architecture in DENSE
                or (c.model.num_moe_experts or 0) % c.model.expert_model_parallel_size != 0
            )
        ),
        lambda c, _: (
            f"model.expert_model_parallel_size={c.model.expert_model_parallel_size} does not divide the experts of a"
            f" layer ({0 if c.model.architecture in DENSE else c.model.num_moe_experts})"
        ),
        "set model.expert_model_parallel_size to a divisor of model.num_moe_experts",
        documented="model.expert_model_parallel_size=... does not divide the experts of a layer (...)",
    ),
    Rule(
        "ranks-for-experts",
        PERMANENT,
        (EXPERTS, PIPELINE),
        lambda c, world_size: (
            c.model.expert_model_parallel_size > 1
            and world_size % (c.model.expert_model_parallel_size * c.model.pipeline_model_parallel_size) != 0
        ),
        "world size ({world_size}) is not divisible by model.expert_model_parallel_size"
        " ({model.expert_model_parallel_size}) times model.pipeline_model_parallel_size"
        " ({model.pipeline_model_parallel_size})",
        "start as many processes as it says, or a multiple: torchrun --nproc-per-node",
    ),
    Rule(
        "experts-distributed",
        PERMANENT,
        (EXPERTS, "ddp.use_distributed_optimizer"),
        lambda c, _: c.model.expert_model_parallel_size > 1 and not c.ddp.use_distributed_optimizer,
        "model.expert_model_parallel_size={model.expert_model_parallel_size} needs ddp.use_distributed_optimizer",
        "set ddp.use_distributed_optimizer=true",
    ),
)

LAYOUT_RULES = (*_DIVIDED_RULES, *_STAGE_RULES)
