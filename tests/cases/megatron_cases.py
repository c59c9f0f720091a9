"""Tiny GPT models that Megatron-Core itself trains: on GPUs, or, inside of `on_cpu()`, without one.

    with on_cpu():
        run = build("dp2-tp2", overlap=True)
        told = train(run, steps=3)

Every rank of a layout calls the same functions; `megatron_ranks.Ranks` starts them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import itertools
import multiprocessing.dummy
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core.tensor_parallel.random as megatron_random
import megatron.core.transformer.moe.moe_utils as moe_utils
import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
import megatron.core.utils as megatron_utils
import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class Data:
    """Random tokens: how many different ones, and the shape of a microbatch."""

    vocabulary: int = 128
    sequence: int = 32
    rows: int = 2


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORMATS = ("dp_reshardable", "fully_reshardable")
"""Of checkpoints of a distributed optimizer: those of megatron-core 0.16.1 that can be saved."""


@dataclass(frozen=True)
class Layout:
    """How many ranks divide what. Ranks that divide nothing else are data parallel."""

    world: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    chunks: int = 1
    """Of the model on each rank: more than one is a virtual pipeline."""


LAYOUTS = {
    "single": Layout(),
    "dp2": Layout(2),
    "dp4": Layout(4),
    "tp2": Layout(2, tensor=2),
    "pp2": Layout(2, pipeline=2),
    "pp2-interleaved": Layout(2, pipeline=2, chunks=2),
    "ep2": Layout(2, expert=2),
    "dp2-tp2": Layout(4, tensor=2),
    "dp2-pp2": Layout(4, pipeline=2),
    "dp2-pp2-interleaved": Layout(4, pipeline=2, chunks=2),
    "dp2-ep2": Layout(4, expert=2),
}


class _Queue:
    """In the place of a CUDA stream or event: what is issued on it is done at once, so nobody waits."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    wait = wait_stream = wait_event = synchronize = record = _nothing

    def record_event(self, *_: Any) -> _Queue:
        return self


class _CudaIsHost(TorchFunctionMode):
    """Whatever is put on a GPU stays in host memory, and says what a tensor there would."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")  # by which optimizers tell dtypes
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.to:
            args = tuple("cpu" if isinstance(a, str) and a.startswith("cuda") else a for a in args)
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


class _Placed(TorchFunctionMode):
    """Of tensors none of which is on a GPU: those that come from a `.cpu()` are on the host, all others on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._on_host: set[int] = set()
        self._kept: list[torch.Tensor] = []  # so that no address is used twice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_host = any(isinstance(a, torch.Tensor) and a.data_ptr() in self._on_host for a in args)
        if func == torch.Tensor.is_cuda.__get__:  # another object each time, and equal
            return not on_host
        made = func(*args, **(kwargs or {}))
        if func is torch.Tensor.cpu:
            made, on_host = made.clone(), True
        if on_host and isinstance(made, torch.Tensor):
            self._on_host.add(made.data_ptr())
            self._kept.append(made)
        return made


@contextlib.contextmanager
def without_transformer_engine() -> Iterator[None]:
    """What megatron-core 0.16.1 lacks where Transformer Engine is not installed, on a GPU too."""
    with pytest.MonkeyPatch.context() as patch:
        _without_transformer_engine(patch)
        yield


def _without_transformer_engine(patch: pytest.MonkeyPatch) -> None:
    if megatron_utils.get_te_version() is None:
        patch.setattr(megatron_utils, "_te_version", Version("0"))  # None is compared with versions
    if not hasattr(moe_utils, "te_general_gemm"):
        patch.setattr(moe_utils, "te_general_gemm", None, raising=False)  # the router asks whether it is None
    # torch's norms are refused where ranks have parts of the sequence: their gradients must be marked as parts, too.
    make = WrappedTorchNorm.__new__

    def made(cls: type, config: TransformerConfig, *args: Any, **how: Any) -> Any:
        whole = copy.copy(config)
        whole.sequence_parallel = False
        norm = make(cls, whole, *args, **how)
        for weight in norm.parameters():
            weight.sequence_parallel = config.sequence_parallel
        return norm

    patch.setattr(WrappedTorchNorm, "__new__", made)
    if USING_PYTORCH_OPTIMIZER:
        # torch's AdamW counts steps in the state of each weight: checkpoints leave them out, or put old ones there.
        loaded = DistributedOptimizer._set_main_param_and_optimizer_states

        def load(self: Any, weight: Any, tensors: dict[str, Any]) -> None:
            group, place = self.model_param_group_index_map[weight]
            state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
            steps = {"step": state["step"]} if "step" in state else {}
            loaded(self, weight, {k: v for k, v in tensors.items() if k != "step"} | steps)

        patch.setattr(DistributedOptimizer, "_set_main_param_and_optimizer_states", load)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Lets Megatron-Core run without a GPU, in this process and thread, until it is left."""
    with pytest.MonkeyPatch.context() as patch, without_transformer_engine(), _CudaIsHost() as mode:
        # torch leaves the mode while it runs backward, in which Megatron recomputes.
        run_backward = torch.autograd._engine_run_backward

        def in_mode(*args: Any, **how: Any) -> Any:
            with mode:
                return run_backward(*args, **how)

        patch.setattr(torch.autograd, "_engine_run_backward", in_mode)
        # Where tensors are made: it is passed as `device`, to `_CudaIsHost` too.
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        # Order between streams, and waiting for them: everything is done when it returns.
        for name in ("Stream", "Event", "current_stream", "default_stream"):
            patch.setattr(torch.cuda, name, _Queue)
        patch.setattr(torch.cuda, "stream", contextlib.nullcontext)
        for name in ("synchronize", "empty_cache", "set_device"):
            patch.setattr(torch.cuda, name, lambda *_, **__: None)
        # Random numbers of tensor-parallel regions and of recomputation: from the CPU's generator.
        for module in (torch.cuda, torch.cuda.random):
            patch.setattr(module, "get_rng_state", lambda *_, **__: torch.get_rng_state())
            patch.setattr(module, "manual_seed", torch.manual_seed)
        patch.setattr(megatron_random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state))
        # The fraction is one of what is on the GPU.
        divided = HybridDeviceOptimizer._get_sub_optimizer_param_groups

        def divide(self: Any, fraction: float) -> Any:
            with _Placed():
                return divided(self, fraction)

        patch.setattr(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", divide)
        # How many tokens go to which expert is copied, and made a list, only from a GPU.
        patch.setattr(
            token_dispatcher,
            "maybe_move_tensor_to_cpu",
            lambda counts, as_numpy=False, **_: counts.numpy() if as_numpy and torch.is_tensor(counts) else counts,
        )
        # Checkpoints are written by new processes, which takes seconds, and which ranks of tests may not start.
        threads = SimpleNamespace(get_context=lambda kind: multiprocessing.dummy)
        patch.setattr(filesystem_async, "mp", threads)
        patch.setattr(filesystem_async, "_results_queue", None)
        yield


@dataclass
class Run:
    """A model that is trained, on this rank."""

    layout: Layout
    chunks: list[DistributedDataParallel]
    """Each wraps a GPTModel; one, if the pipeline is not virtual."""
    config: OptimizerConfig
    optimizer: Any
    """What `get_megatron_optimizer` returned."""
    data: Data


def build(
    layout: Layout | str, *, before_optimizer: Callable[[list[Any]], Any] = lambda chunks: None, **how: Any
) -> Run:
    """A model in `layout` and its optimizer; `how`: options of `make_chunks` and `make_optimizer`.

    Each chunk has one layer, but for models of two layers in one chunk.
    `before_optimizer` gets the model chunks before `get_megatron_optimizer` does.
    """
    layout = LAYOUTS[layout] if isinstance(layout, str) else layout
    of_model = {name: how.pop(name) for name in OF_MODEL if name in how}
    shared = {name: how.get(name, default) for name, default in SHARED.items()}
    chunks = make_chunks(layout, **of_model, **shared)
    before_optimizer(chunks)
    config, optimizer = make_optimizer(chunks, **how)
    return Run(layout, chunks, config, optimizer, of_model.get("data", Data()))


OF_MODEL = ("model", "ddp", "bucket_size", "seed", "data", "attention")
"""Options that are the model's alone."""

SHARED = {"precision": "bf16", "distributed": True, "overlap": False}
"""Options that are both the model's and the optimizer's, with what they are if they are not said."""


def make_chunks(
    layout: Layout,
    *,
    precision: str = "bf16",
    distributed: bool = True,
    overlap: bool = False,
    bucket_size: int = 20_000,
    seed: int = 1,
    model: dict[str, Any] | None = None,
    ddp: dict[str, Any] | None = None,
    data: Data = Data(),
    attention: type[torch.nn.Module] | None = None,
) -> list[DistributedDataParallel]:
    """This rank's model chunks. `bucket_size` counts elements, and Megatron minds it with `overlap` only; `model` and
    `ddp` set further fields of TransformerConfig and of DistributedDataParallelConfig; `attention` takes the place of
    Megatron's, which keeps all scores.
    """
    _initialise(layout)
    dtype, size = DTYPES[precision], layout.expert
    torch.manual_seed(seed)
    megatron_random.model_parallel_cuda_manual_seed(seed)
    experts: dict[str, Any] = {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": size,
    }
    config = TransformerConfig(
        **{
            "num_layers": max(2, layout.pipeline * layout.chunks),
            "hidden_size": 64,
            "ffn_hidden_size": 128,
            "num_attention_heads": 4,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "use_cpu_initialization": True,
            "params_dtype": dtype,
            "bf16": precision == "bf16",
            "fp16": precision == "fp16",
            "pipeline_dtype": dtype,
            "tensor_model_parallel_size": layout.tensor,
            "pipeline_model_parallel_size": layout.pipeline,
            "virtual_pipeline_model_parallel_size": layout.chunks if layout.chunks > 1 else None,
            # Of two stages each is before the other as well: messages that are sent in one batch get mixed up.
            "overlap_p2p_comm": layout.chunks > 1,
            "batch_p2p_comm": layout.chunks == 1,
            # These are compiled, or CUDA kernels of Apex and of Transformer Engine.
            "bias_dropout_fusion": False,
            "bias_activation_fusion": False,
            "masked_softmax_fusion": False,
            "gradient_accumulation_fusion": False,
            **(experts if size > 1 else {}),
            **(model or {}),
        }
    )
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization=config.normalization)
    if attention is not None:
        spec.submodules.self_attention.submodules.core_attention = attention
    wrapped = DistributedDataParallelConfig(
        **{
            "grad_reduce_in_fp32": precision != "fp32",
            "use_distributed_optimizer": distributed,
            "overlap_grad_reduce": overlap,
            "overlap_param_gather": overlap and distributed,
            "bucket_size": bucket_size,
            **(ddp or {}),
        }
    )
    chunks = []
    for index in range(layout.chunks):
        stage = {"vp_stage": index} if layout.chunks > 1 else {}
        network = GPTModel(
            config,
            spec,
            data.vocabulary,
            data.sequence,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=layout.chunks == 1, **stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=layout.chunks == 1, **stage),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            **stage,
        )
        network = network.to(torch.cuda.current_device(), dtype)
        # As Megatron's own program does it; each chunk gets a configuration that it may change.
        chunks.append(
            DistributedDataParallel(config, dataclasses.replace(wrapped), network, disable_bucketing=index > 0)
        )
    fill(chunks, seed)
    return chunks


@torch.no_grad()
def fill(chunks: list[Any], seed: int) -> None:
    """Gives each matrix the random numbers that it has in every layout: those of its place in the whole model."""
    states: dict[str, Any] = {str(index): chunk.module.sharded_state_dict() for index, chunk in enumerate(chunks)}
    apply_factories(states)
    for part in nested_values(states):
        if not isinstance(part, ShardedTensor) or part.data.ndim < 2:
            continue  # norms are ones
        of = torch.Generator(part.data.device).manual_seed(seed + zlib.crc32(part.key.encode()))
        whole = torch.randn(part.global_shape, generator=of, device=part.data.device)
        sizes = (1,) * part.prepend_axis_num + tuple(part.local_shape)
        mine = tuple(slice(start, start + size) for start, size in zip(part.global_offset, sizes, strict=True))
        part.data.copy_(0.02 * whole[mine].reshape(part.data.shape))


_layouts: list[Layout] = []
"""Whose process groups there are, if any."""


def _initialise(layout: Layout) -> None:
    """Megatron's process groups for `layout`, in the world that runs, instead of those of another layout."""
    if parallel_state.model_parallel_is_initialized():
        if _layouts == [layout]:
            return
        parallel_state.destroy_model_parallel()
    assert dist.get_world_size() == layout.world
    _layouts[:] = [layout]
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        layout.chunks if layout.chunks > 1 else None,
        expert_model_parallel_size=layout.expert,
    )


def make_optimizer(
    chunks: list[DistributedDataParallel],
    *,
    precision: str = "bf16",
    distributed: bool = True,
    overlap: bool = False,
    offload_fraction: float | None = None,
    **fields: Any,
) -> tuple[OptimizerConfig, Any]:
    """Megatron's optimizer of these chunks, with `optimizer_cpu_offload` if a fraction is given. `fields` are further
    ones of OptimizerConfig, for example `use_precision_aware_optimizer`, `clip_grad` or `loss_scale`.
    """
    config = OptimizerConfig(
        **{
            "optimizer": "adam",
            "lr": 1e-3,
            "min_lr": 1e-4,
            "weight_decay": 0.1,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "clip_grad": 0.5,
            "params_dtype": DTYPES[precision],
            "bf16": precision == "bf16",
            "fp16": precision == "fp16",
            "initial_loss_scale": 2.0**16,
            "loss_scale_window": 4,
            "hysteresis": 1,
            "use_distributed_optimizer": distributed,
            "overlap_param_gather": overlap and distributed,
            "optimizer_cpu_offload": offload_fraction is not None,
            "optimizer_offload_fraction": offload_fraction or 0.0,
            **fields,
        }
    )
    return config, get_megatron_optimizer(config, chunks)


@dataclass
class Told:
    """What each step of a training told this rank."""

    losses: list[float | None]
    """Of this rank's microbatches, on the last stage of a pipeline; None on others."""
    grad_norms: list[float | None]
    updated: list[bool]
    """False where the loss scaler skipped a step."""


def train(
    run: Run,
    steps: int,
    *,
    microbatches: int = 4,
    first: int = 0,
    before_step: Callable[[int], Any] = lambda step: None,
) -> Told:
    """Trains as Megatron's program does, from step `first` of the data and of the learning rate's schedule.

    `before_step` gets the number of the step when gradients are final, and before the optimizer's.
    """
    _set_hooks(run)
    scheduler = OptimizerParamScheduler(
        run.optimizer,
        init_lr=0.0,
        max_lr=run.config.lr,
        min_lr=run.config.min_lr,
        lr_warmup_steps=2,
        lr_decay_steps=20,
        lr_decay_style="cosine",
        start_wd=run.config.weight_decay,
        end_wd=run.config.weight_decay,
        wd_incr_steps=20,
        wd_incr_style="constant",
    )
    scheduler.step(first + 1)
    told = Told([], [], [])
    for step in range(first, first + steps):
        for chunk in run.chunks:
            chunk.zero_grad_buffer()
        run.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=[batches(step, run) for _ in run.chunks] if len(run.chunks) > 1 else batches(step, run),
            model=run.chunks if len(run.chunks) > 1 else run.chunks[0],
            num_microbatches=microbatches,
            seq_length=run.data.sequence,
            micro_batch_size=run.data.rows,
            forward_only=False,
        )
        before_step(step)
        updated, norm, _ = run.optimizer.step()
        scheduler.step(1)
        told.losses.append(sum(float(part["loss"]) for part in losses) / len(losses) if losses else None)
        told.grad_norms.append(None if norm is None else float(norm))
        told.updated.append(bool(updated))
    gather(run)
    return told


def _set_hooks(run: Run) -> None:
    """What the schedule calls: Megatron's program sets it in the model's configuration."""
    config = run.chunks[0].config
    config.grad_scale_func = run.optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if run.chunks[0].ddp_config.overlap_grad_reduce:
        each = [chunk.no_sync for chunk in run.chunks]
        config.no_sync_func = each if len(each) > 1 else each[0]


def _forward(data: Iterator[Any], chunk: Any) -> tuple[torch.Tensor, Any]:
    tokens, labels, positions = next(data)
    losses = chunk(tokens, positions, None, labels=labels)

    def loss(output: torch.Tensor) -> tuple[Any, ...]:
        if not chunk.config.calculate_per_token_loss:
            mean = output.float().mean()
            return mean, {"loss": mean.detach().clone()}
        total, count = output.float().sum(), torch.tensor(output.numel(), dtype=torch.int, device=output.device)
        return total, count, {"loss": (total / count).detach()}

    return losses, loss


def batches(step: int, run: Run) -> Iterator[tuple[torch.Tensor, ...]]:
    """Tokens, labels and positions of each microbatch, each (rows, sequence): those of this data parallel rank."""
    data = run.data
    device, rank = torch.cuda.current_device(), parallel_state.get_data_parallel_rank()
    for microbatch in itertools.count():
        of = torch.Generator().manual_seed(1000 + 101 * step + 11 * microbatch + 100_003 * rank)
        tokens = torch.randint(0, data.vocabulary, (data.rows, data.sequence + 1), generator=of).to(device)
        positions = torch.arange(data.sequence).expand(data.rows, data.sequence).to(device)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions


def gather(run: Run) -> None:
    """Waits for weights that the next forward would gather, as Megatron's program does before it saves."""
    for chunk in run.chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.disable_forward_pre_hook(param_sync=True)
            chunk.enable_forward_pre_hook()


def named_weights(chunks: list[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """This rank's parameters; with several chunks names begin with the number of the chunk."""
    for index, chunk in enumerate(chunks):
        for name, weight in chunk.module.named_parameters():
            yield (f"{index}.{name}" if len(chunks) > 1 else name), weight


def weights(chunks: list[Any]) -> dict[str, np.ndarray[Any, Any]]:
    """This rank's weights by name, as float32."""
    return {name: weight.detach().float().cpu().numpy().copy() for name, weight in named_weights(chunks)}


def digest(chunks: list[Any]) -> str:
    """Of all bits of this rank's weights, and of their names."""
    found = hashlib.sha256()
    for name, weight in named_weights(chunks):
        found.update(name.encode())
        found.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def save(run: Run, folder: str | Path, form: str = "fully_reshardable") -> None:
    """Model and optimizer into an empty folder, by Megatron's dist checkpointing; `form`: one of FORMATS."""
    metadata = _metadata(run, form)
    gather(run)
    states = _sharded_states(run, metadata, is_loading=False)
    dist_checkpointing.save(states, str(folder), content_metadata=metadata)


def load(run: Run, folder: str | Path) -> None:
    """What `save` of a run in this layout, or in one that Megatron can load here, has written."""
    for part in inner_optimizers(run):
        _first_step(part)
    with torch.serialization.safe_globals([torch.optim.AdamW]):  # named in parameter groups of the hybrid optimizer
        metadata = dist_checkpointing.load_content_metadata(str(folder))
        states = dist_checkpointing.load(_sharded_states(run, metadata, is_loading=True), str(folder))
    for index, chunk in enumerate(run.chunks):
        chunk.module.load_state_dict(states[f"model{index}"])
    run.optimizer.load_state_dict(states["optimizer"])
    for part in inner_optimizers(run):
        if type(part) in (torch.optim.AdamW, HybridDeviceOptimizer):
            for state in part.state.values():
                state["step"] = state["step"].clone()  # Megatron gives all weights one, which each then counts up


def inner_optimizers(run: Run) -> list[torch.optim.Optimizer]:
    """Those of torch's interface that Megatron's wrap; more than one with experts."""
    return [part.optimizer for part in run.optimizer.chained_optimizers if part.optimizer is not None]


@torch.no_grad()
def _first_step(optimizer: Any) -> None:
    """Gives an optimizer its state: without Transformer Engine Megatron cannot load into one that has none."""
    if optimizer.state:
        return
    if isinstance(optimizer, HybridDeviceOptimizer):
        optimizer.dummy_step()
        return
    for weight in itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups):
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad()


def _metadata(run: Run, form: str) -> dict[str, Any]:
    told = {"distrib_optim_sharding_type": form} if run.config.use_distributed_optimizer else {}
    return {"singleton_local_shards": False, "chained_optim_avoid_prefix": True, **told}


def _sharded_states(run: Run, metadata: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
    states: dict[str, Any] = {
        f"model{index}": chunk.module.sharded_state_dict(metadata=metadata) for index, chunk in enumerate(run.chunks)
    }
    states["optimizer"] = run.optimizer.sharded_state_dict(states, is_loading=is_loading, metadata=metadata)
    return states
