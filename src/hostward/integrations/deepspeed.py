"""Translate what a DeepSpeed configuration says about offloading into options of hostward. DeepSpeed is not needed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hostward.attachment import Activations
from hostward.errors import ConfigError
from hostward.weights.offload import Weights

_LOOP = "the loop and its data loader decide it"
_ELSEWHERE: Mapping[str, tuple[str, str]] = {
    "train_batch_size": (_LOOP, "take it out; set batch size and accumulation there"),
    "train_micro_batch_size_per_gpu": (_LOOP, "take it out; TrainingArguments(per_device_train_batch_size=...)"),
    "gradient_accumulation_steps": (
        _LOOP,
        "take it out; Accelerator or TrainingArguments have an argument of that name",
    ),
    "scheduler": ("a scheduler of torch is used", "take it out; TrainingArguments(lr_scheduler_type=...), or make one"),
    "bf16": ("accelerate casts", 'take it out; Accelerator(mixed_precision="bf16"), TrainingArguments(bf16=True)'),
    "fp16": ("accelerate scales", 'take it out; Accelerator(mixed_precision="fp16"), TrainingArguments(fp16=True)'),
    "optimizer": (
        "its values belong to torch.optim.AdamW",
        "take it out; torch.optim.AdamW(...), or TrainingArguments",
    ),
}
"""Sections that say something about training for which hostward is not the place: why, and what to do."""
_SILENT = frozenset({"steps_per_print", "wall_clock_breakdown", "dump_state", "comms_logger", "flops_profiler"})
"""Sections about what is printed."""
_TUNING = frozenset(
    {
        *("overlap_comm", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "allgather_partitions"),
        *("allgather_bucket_size", "round_robin_gradients", "sub_group_size", "stage3_prefetch_bucket_size"),
        *("stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
        *("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
    }
)
"""Keys of zero_optimization that size buffers of DeepSpeed's own, which hostward does not have."""
_OF_NVME = frozenset(
    {"nvme_path", "buffer_count", "buffer_size", "fast_init", "pipeline_read", "pipeline_write", "max_in_cpu"}
)
"""Keys of offload_optimizer and offload_param that have a meaning with device "nvme" alone."""
_SECTIONS = ("zero_optimization", "activation_checkpointing")
_NVME = (
    'is "nvme"',
    'hostward offloads to host memory: "cpu"; less of it is needed with more processes and FSDP2, whose hosts share it',
)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is no DeepSpeed configuration", why=str(error), fix="name its JSON file, or pass the dictionary"
        ) from error
    return found


def from_deepspeed(config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Return options of `offload` and `offloading` that offload what a DeepSpeed configuration offloads.

        offloading(Trainer, **from_deepspeed("ds_config.json"))

    | DeepSpeed | hostward |
    |---|---|
    | offload_optimizer.device "cpu", ratio r | offload_fraction=r (1.0 without a ratio) |
    | offload_optimizer.pin_memory | pin_gradients and pin_weights; left out: both |
    | offload_param.device "cpu" | weights=Weights(), streamed_fraction=0.0 |
    | activation_checkpointing.cpu_checkpointing | activations=Activations(); the trainer checkpoints |
    | gradient_clipping | max_grad_norm; "auto": as the trainer says |

    ZeRO's stages shard over processes. With one process they change nothing; with more, hostward leaves sharding to
    FSDP2 and refuses the key. "auto" is always what the trainer says.

    Args:
        config: the dictionary, or the path of its JSON file.

    Raises:
        ConfigError: naming every key that is not translated, with the reason and the fix.
    """
    content = _read(Path(config)) if isinstance(config, (str, Path)) else config
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"from_deepspeed() of {content!r}, which is no DeepSpeed configuration",
            fix="pass its dictionary, or the path of its JSON file",
        )
    found = _Translation()
    readers: Mapping[str, Callable[[Any], None]] = {
        "zero_optimization": found.zero,
        "activation_checkpointing": found.checkpointing,
        "gradient_clipping": found.clipping,
        "zero_allow_untested_optimizer": lambda _: None,
        "zero_force_ds_cpu_optimizer": lambda _: None,
    }
    for key, value in content.items():
        if value is None:
            continue  # as if it were left out
        if key in _SECTIONS and not isinstance(value, Mapping):
            found.refuse(key, f"is {value!r}", "a dictionary")
        elif key in readers:
            readers[key](value)
        elif key in _ELSEWHERE and not _is_auto(value):
            found.refuse(key, *_ELSEWHERE[key])
        elif key not in _ELSEWHERE and key not in _SILENT:
            found.refuse(key, "has no counterpart", "take it out")
    if found.refused:
        raise ConfigError(
            f"{len(found.refused)} keys of the DeepSpeed configuration are not translated",
            why="; ".join(f"{key}: {why}" for key, why, _ in found.refused),
            fix="; ".join(f"{key}: {fix}" for key, _, fix in found.refused),
        )
    return found.options


def _is_auto(value: Any) -> bool:
    """Return whether a section leaves everything to the trainer: "auto", or switched off, or only such values."""
    if isinstance(value, Mapping):
        if value.get("enabled", True) in (False, "auto"):
            return True
        inner = {k: v for k, v in value.items() if k != "type" or v != "AdamW"}
        return all(_is_auto(v) for v in inner.values())
    return bool(value == "auto")


class _Translation:
    """Collects options, and the keys that are refused: (key, why, fix)."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {"offload_fraction": 0.0}
        self.refused: list[tuple[str, str, str]] = []

    def refuse(self, key: str, why: str, fix: str) -> None:
        self.refused.append((key, why, fix))

    def zero(self, section: Mapping[str, Any]) -> None:
        for key, value in section.items():
            name = f"zero_optimization.{key}"
            if value is None:
                continue
            if key in ("offload_optimizer", "offload_param") and not isinstance(value, Mapping):
                self.refuse(name, f"is {value!r}", 'a dictionary, as {"device": "cpu"}')
            elif key == "stage":
                self._stage(name, value)
            elif key == "offload_optimizer" or (key == "cpu_offload" and value):
                self._optimizer(
                    name.replace("cpu_offload", "offload_optimizer"), {"device": "cpu"} if value is True else value
                )
            elif key == "offload_param" or (key == "cpu_offload_params" and value):
                self._weights(name, {"device": "cpu"} if value is True else value)
            elif key not in _TUNING and value not in (False, None):
                self.refuse(name, "has no counterpart", "take it out")

    def _stage(self, name: str, stage: object) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        if stage in (1, 2, 3) and ranks > 1:
            reshard = "True" if stage == 3 else "False"
            fix = f"take it out; FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward={reshard})"
            self.refuse(name, f"shards over {ranks} processes, which FSDP2 does here", fix)
        elif stage not in (0, 1, 2, 3):
            self.refuse(name, f"is {stage!r}", "0, 1, 2 or 3")

    def _optimizer(self, name: str, section: Mapping[str, Any]) -> None:
        if not self._on_host(name, section, {"pin_memory", "ratio"}):
            return
        ratio = section.get("ratio", 1.0)
        self.options["offload_fraction"] = 1.0 if ratio == "auto" else float(ratio)
        if "pin_memory" in section and section["pin_memory"] != "auto":
            self.options |= dict.fromkeys(("pin_gradients", "pin_weights"), bool(section["pin_memory"]))

    def _weights(self, name: str, section: Mapping[str, Any]) -> None:
        if not self._on_host(name, section, {"pin_memory"}):
            return
        if section.get("pin_memory", True) is False:
            fix = f"take {name}.pin_memory out, or True"
            self.refuse(f"{name}.pin_memory", "weights are reloaded while layers run, from pinned memory", fix)
        self.options |= {"weights": Weights(), "streamed_fraction": 0.0}

    def _on_host(self, name: str, section: Mapping[str, Any], known: set[str]) -> bool:
        """Return whether a section offloads to host memory; refuse its other devices and unknown keys."""
        device = section.get("device", "none")
        if device == "nvme":
            self.refuse(f"{name}.device", *_NVME)
        elif device not in ("cpu", "none"):
            self.refuse(f"{name}.device", f"is {device!r}", '"cpu" or "none"')
        for key in section.keys() - known - _OF_NVME - {"device"}:
            self.refuse(f"{name}.{key}", "has no counterpart", "take it out")
        return bool(device == "cpu")

    def checkpointing(self, section: Mapping[str, Any]) -> None:
        for key, value in section.items():
            if key == "cpu_checkpointing":
                self.options |= {"activations": Activations()} if value else {}
            elif value not in (False, None):
                self.refuse(f"activation_checkpointing.{key}", "has no counterpart", "take it out")

    def clipping(self, value: Any) -> None:
        if value != "auto":
            self.options["max_grad_norm"] = float(value)
