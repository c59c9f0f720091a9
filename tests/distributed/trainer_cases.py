"""What each rank does in a Trainer, with DDP or FSDP2 around the model."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hostward.integrations.transformers import offloading
from hostward.runtime.simulated.backend import LATEST, SimulatedBackend


class Sharding(Trainer):
    """Shards by FSDP2 on CPUs, where accelerate wraps in DDP whatever it is told."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        state.distributed_type = accelerate.DistributedType.FSDP
        accelerate.PartialState().distributed_type = state.distributed_type
        state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        self.is_fsdp_enabled = True


def trained(
    folder: str, *, fraction: float | None, sharded: bool, resume: str | None = None, **options: Any
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, norms and whole weights after two epochs of three batches in windows of two and one."""
    warnings.simplefilter("ignore")
    count, rank = str(dist.get_world_size()), str(dist.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    try:
        return _trained(Path(folder), fraction, sharded, resume, options)
    finally:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()


def _trained(
    folder: Path, fraction: float | None, sharded: bool, resume: str | None, options: dict[str, Any]
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=32))
    kind: Any = Sharding if sharded else Trainer
    if fraction is not None:
        backend = SimulatedBackend(order=LATEST, threads=1)
        kind = offloading(kind, offload_fraction=fraction, backend=backend, **options)
    sharding = {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT",
        },
    }
    args = TrainingArguments(
        str(folder), num_train_epochs=2, per_device_train_batch_size=1, gradient_accumulation_steps=2,
        learning_rate=1e-2, max_grad_norm=0.5, logging_steps=1, save_strategy="steps", save_steps=2, report_to=[],
        use_cpu=True, ddp_backend="gloo", disable_tqdm=True, **(sharding if sharded else {}),
    )  # fmt: skip
    ids = torch.randint(0, 128, (3 * dist.get_world_size(), 8), generator=torch.Generator().manual_seed(1))
    trainer = kind(model=model, args=args, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    trainer.train(resume_from_checkpoint=resume)
    assert any(isinstance(p.data, DTensor) for p in trainer.model.parameters()) is sharded
    found = {n: p.data.full_tensor() if sharded else p.data.clone() for n, p in trainer.model.named_parameters()}
    history = trainer.state.log_history
    norms = [entry["grad_norm"] for entry in history if "grad_norm" in entry]
    return [entry["loss"] for entry in history if "loss" in entry], norms, found
