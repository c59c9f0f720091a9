"""Build the part of a model that this process holds: build without memory, shard, fill.

Each pipeline stage has its own layers. With `ddp.use_distributed_optimizer` FSDP2 shards weights, gradients
and state, layer by layer, over the ranks of a stage, or over all. Without it each of these has all of them: the same
FSDP2, on a mesh of copies (docs/decisions/0011-ranks-of-a-run.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch

from hostward.checkpoint.collective import patience_s
from hostward.trainer.deferred_init import build_on_cpu, fill, without_memory
from hostward.trainer.models import build_model, layers_of

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from hostward.config.schema import Config
    from hostward.distributed.pipeline_parallel import Part
    from hostward.trainer.process_group import Ranks


@dataclass(frozen=True, slots=True)
class Held:
    """Holds this process's part of a model.

    Args:
        model: all of it; parameters have the names that they have in the whole model.
        parts: the pipeline stages on this process.
        stages: the processes with the same position in each stage, in order; None: there are no stages.
        tied: by name, the weights shared with another stage, and the processes that have this part of each.
    """

    model: torch.nn.Module
    parts: Sequence[Part] = ()
    stages: dist.ProcessGroup | None = None
    tied: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)


def hold(
    ranks: Ranks,
    config: Config,
    *,
    vocab_size: int | None,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    on_cpu: bool = False,
) -> Held:
    """Build the part of the model that this process holds.

    Its initial weights are bitwise identical to those that one process would have. A pretrained folder is read into
    host memory by every rank.

    Args:
        on_cpu: build a model of one process on the CPU, for `hostward.move`.

    Raises:
        ConfigError, ModelError: as `build_model`, or the model cannot be sharded as the options say.
    """
    if ranks.size == 1:
        build = build_on_cpu if on_cpu else build_model
        return Held(build(config, vocab_size=vocab_size, device=device, dtype=dtype, seed=seed))
    model, draws = without_memory(config, vocab_size, device, dtype)
    models, named = [model], list(model.named_parameters()) if draws is not None else []
    parts: list[Part] = []
    if ranks.stages > 1:
        parts = _stages(model, ranks, config, vocab_size=vocab_size, device=device, dtype=dtype)
        models = [part.model for part in parts]
    for here in models:
        if ranks.of_stage > 1:
            _divide(here, config, device.type, ranks)
        elif draws is None:
            here.to(device)
    held = _held(parts, ranks, device.type) if parts else Held(model)
    if draws is not None:
        fill(models, draws, named, device, seed)
    for here in models:
        here.train()
    return held


def _stages(
    model: Any, ranks: Ranks, config: Config, *, vocab_size: int | None, device: torch.device, dtype: torch.dtype
) -> list[Part]:
    """Cut this process's stages out of `model`, and further ones out of copies of it.

    With P processes the first has stages 0, P, 2 P, and so on.
    """
    from hostward.distributed.pipeline_parallel import cut

    rounds = config.model.virtual_pipeline_model_parallel_size or 1
    count = rounds * ranks.stages
    parts = [cut(model, ranks.stage, count)]
    for i in range(1, rounds):  # one whole model at a time
        whole, _ = without_memory(config, vocab_size, device, dtype)
        parts.append(cut(whole, i * ranks.stages + ranks.stage, count))
    return parts


def _held(parts: Sequence[Part], ranks: Ranks, device_type: str) -> Held:
    """Return these sharded stages as the part that this process holds."""
    from hostward.distributed.pipeline_parallel import TIED, name_tied, together

    for part in parts:
        name_tied(part)
    stages = _mesh(device_type, 1, {"stages": ranks.stages, "ranks": ranks.of_stage})["stages"].get_group()
    ends = _ends_of(stages, ranks) if parts[0].tied else None
    tied = {} if ends is None else {TIED: ends}
    return Held(parts[0].model if len(parts) == 1 else together(parts), parts, stages, tied)


def _ends_of(stages: dist.ProcessGroup, ranks: Ranks) -> dist.ProcessGroup | None:
    """Return the group of the first and last stage at this position; None if this process is in neither."""
    import torch.distributed as dist

    if ranks.stages == 2:
        return stages
    limit, behind = timedelta(seconds=patience_s(stages)), (ranks.stages - 1) * ranks.of_stage
    # Every process has to create all groups.
    made = {place: dist.new_group([place, behind + place], timeout=limit) for place in range(ranks.of_stage)}
    return made[ranks.rank % ranks.of_stage] if ranks.stage in (0, ranks.stages - 1) else None


def _mesh(device_type: str, stages: int, dims: Mapping[str, int]) -> DeviceMesh:
    """Build a mesh of all ranks, one per stage with these dimensions, whose groups use the run's own timeout."""
    from torch.distributed import group as groups
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.distributed_c10d import _set_pg_timeout

    named = {"stages": stages, **dims} if stages > 1 else dict(dims)
    mesh = init_device_mesh(device_type, tuple(named.values()), mesh_dim_names=tuple(named))
    limit = timedelta(seconds=patience_s(cast("dist.ProcessGroup", groups.WORLD)))
    for group in mesh.get_all_groups():  # which would otherwise use torch's default timeout
        _set_pg_timeout(limit, group)
    return mesh


def _divide(model: Any, config: Config, device_type: str, ranks: Ranks) -> None:
    """Shard the model over the ranks of a stage, with FSDP2.

    Each layer is gathered by itself and stays unsharded from its forward to its backward, as in Megatron, unless it is
    to be resharded in between. Experts are gathered by themselves, from the ranks that have the same experts.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from hostward.distributed.tensor_parallel import divide_matrices, has_weights

    options, size, sharing = config.model, ranks.of_stage, ranks.sharing
    layers: list[Any] = [layer for _, layer in layers_of(model)]
    gathered = [*layers, *_ends(model)]
    apart = _divide_experts(layers, options.expert_model_parallel_size, device_type, ranks)
    if sharing > 1:
        grid = _mesh(device_type, ranks.stages, {"data": size // sharing, "matrices": sharing})
        divide_matrices(model, grid["matrices"], sequences=options.sequence_parallel)
        mesh = grid["data"]
    elif config.ddp.use_distributed_optimizer:
        mesh = _mesh(device_type, ranks.stages, {"data": size})["data"]
    else:
        mesh = _mesh(device_type, ranks.stages, {"copies": size, "data": 1})["copies", "data"]
    if options.virtual_pipeline_model_parallel_size is not None:
        # With several parts none is the root of all: a search for FSDP2's modules sees the parts' modules.
        gathered += [model.model.norm] if has_weights(model.model.norm) else []
    reduced = MixedPrecisionPolicy(reduce_dtype=torch.float32 if config.ddp.grad_reduce_in_fp32 else None)
    for module, over in [*apart, *((module, mesh) for module in [*gathered, model])]:
        fully_shard(module, mesh=over, mp_policy=reduced, reshard_after_forward=ranks.resharded)
    if ranks.stages > 1 and ranks.resharded:
        from hostward.distributed.pipeline_parallel import gather_in_passes

        gather_in_passes(model)


def _divide_experts(
    layers: Sequence[Any], parts: int, device_type: str, ranks: Ranks
) -> list[tuple[torch.nn.Module, DeviceMesh]]:
    """Return the layers' experts and the mesh of ranks that have the same ones.

    There are none if each layer has all experts and every rank its own samples: they are then gathered with the rest of
    the layer.
    """
    from hostward.distributed.expert_parallel import divide_experts

    found = [layer.mlp.experts for layer in layers if hasattr(layer.mlp, "experts")]
    if not found or parts * ranks.sharing == 1:
        return []
    grid = _mesh(device_type, ranks.stages, {"data": ranks.of_stage // parts, "experts": parts})
    for experts in found:
        divide_experts(experts, grid["experts"], sharing=ranks.sharing)
    return [(experts, grid["data"]) for experts in found]


def _ends(model: Any) -> list[torch.nn.Module]:
    """Return the embedding and output layer on this process, unless they share a weight.

    The root's own parameters are gathered before its first layer, and until the output layer has been stepped forward
    could not start.
    """
    from hostward.distributed.tensor_parallel import has_weights

    ends = [module for module in (model.model.embed_tokens, model.lm_head) if has_weights(module)]
    return [] if len({id(module.weight) for module in ends}) < len(ends) else ends


def synchronise_gradients(model: Any, *, last: bool, resharded: bool) -> None:
    """Announce whether the coming backward is that of the last microbatch.

    Weights stay unsharded until then, unless they are `resharded` anyway. Gradients are reduced in every backward, so
    that only a rank's part of them is accumulated.
    """
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):  # with pipeline parallelism alone each process has a whole stage
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last or resharded)
