"""Checkpoints of a training run: what is saved, and what must agree before a run goes on from one."""

from __future__ import annotations

import logging
import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hostward import checkpoint
from hostward.checkpoint_files import complete_checkpoints
from hostward.config import Config, to_dict
from hostward.errors import CheckpointError

if TYPE_CHECKING:
    from .data import TokenDataset
    from .loop import Run

log = logging.getLogger("hostward")

_FUNCTION_OPTIONS = (
    "architecture",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "moe_router_topk",
    "moe_aux_loss_coeff",
    "rotary_base",
    "rope_scaling",
    "rope_scaling_factor",
    "layernorm_epsilon",
    "share_embeddings_and_output_weights",
)
"""What changes the model's function and leaves the shapes of its weights as they are."""

_NEEDED = ("iteration", "consumed_samples", "data", "optimizer", "scaler", "python_rng", "numpy_rng", "config")


def save(run: Run) -> Path:
    """Save weights, optimizer, random number generators and position; returns the checkpoint's folder."""
    directory = Path(run.config.checkpoint.save or "")
    state = run.optimizer.state_dict(copy=False)  # all is written before the next step
    tensors = {f"model/{name}": t for name, t in _model_tensors(run.model).items()}
    tensors |= {f"optimizer/{n}/{role}": t for n, entry in state["state"].items() for role, t in entry.items()}
    tensors["rng/torch"] = torch.get_rng_state()
    if run.device.type == "cuda":
        tensors["rng/cuda"] = torch.cuda.get_rng_state(run.device)
    plain: dict[str, Any] = {
        "iteration": run.iteration,
        "consumed_samples": run.iteration * run.config.train.global_batch_size,
        "data": run.dataset.fingerprint,
        "optimizer": {"format": state["format"], "param_groups": state["param_groups"]},
        "scaler": run.scaler.state_dict() if run.scaler is not None else None,
        "python_rng": _python_rng(),
        "numpy_rng": _numpy_rng(),
        "recipe": run.recipe,
        "config": to_dict(run.config),
    }
    path = checkpoint.save(
        directory, run.iteration, tensors=tensors, plain=plain, most_recent_k=run.config.checkpoint.most_recent_k
    )
    log.info("saved %s", path)
    return path


def load(run: Run, path: Path) -> None:
    """Take over a checkpoint; with `checkpoint.finetune` its weights only, at iteration 0."""
    options = run.config.checkpoint
    plain = _plain(path)
    index = checkpoint.tensor_index(path)
    full = not options.finetune
    weights = {f"model/{name}": t for name, t in _model_tensors(run.model).items()}
    into = dict(weights)
    wanted = {k for k in index if k.startswith("optimizer/")} if full and options.load_optim else set()
    wanted |= {k for k in index if k.startswith("rng/")} if full and options.load_rng else set()
    if full and options.load_rng and "rng/torch" not in index:
        raise CheckpointError(
            f"checkpoint {path} lacks rng/torch", fix="go on with other random numbers: checkpoint.load_rng=False"
        )
    into |= {k: torch.empty(index[k][0], dtype=index[k][1]) for k in wanted}
    checkpoint.load(path, into, ignore={k for k in index if not k.startswith("model/")} - wanted)
    run.optimizer.reseed()
    if not full:
        return
    run.iteration = int(plain["iteration"])
    if options.load_optim:
        run.optimizer.load_state_dict(_optimizer_state(plain, into))
        for group in run.optimizer.param_groups:
            group.update(group_settings(run.config))  # what this run was asked for, not what the last one was
        if run.scaler is not None and plain["scaler"] is not None:
            run.scaler.load_state_dict(plain["scaler"])
    else:
        log.warning("checkpoint.load_optim=False: step counts start at 0 with zero moments")
    if options.load_rng:
        torch.set_rng_state(into["rng/torch"])
        if run.device.type == "cuda" and "rng/cuda" in into:
            torch.cuda.set_rng_state(into["rng/cuda"], run.device)
        _set_python_rng(plain["python_rng"])
        _set_numpy_rng(plain["numpy_rng"])
    log.info("resumed %s at iteration %d", path, run.iteration)


def require_same_samples(config: Config, dataset: TokenDataset, path: Path) -> None:
    """Raises CheckpointError unless the samples of `dataset` go on where the checkpoint stopped."""
    plain = _plain(path)
    batch = config.train.global_batch_size
    if plain["data"] != dataset.fingerprint:
        raise CheckpointError(
            f"{path} was trained on other data, or in another order",
            why="the sources, model.seq_length, the seed or the tokenizer differ, so the samples would not go on",
            fix="restore those options, or load weights only with checkpoint.finetune=True",
        )
    if plain["consumed_samples"] != plain["iteration"] * batch:
        raise CheckpointError(
            f"{path} had consumed {plain['consumed_samples']} samples at iteration {plain['iteration']}",
            why=f"train.global_batch_size is {batch} now, so the next samples would not follow",
            fix="restore train.global_batch_size, or load weights only with checkpoint.finetune=True",
        )
    before, now = plain["config"]["model"], to_dict(config)["model"]
    changed = [
        f"model.{name} was {before.get(name)!r}, is {now[name]!r}"
        for name in _FUNCTION_OPTIONS
        if before.get(name) != now[name]
    ]
    if changed:
        raise CheckpointError(
            f"{path} is of a model that computes another function",
            why="; ".join(changed),
            fix="restore those options, or load weights only with checkpoint.finetune=True",
        )


def group_settings(config: Config) -> dict[str, Any]:
    """Settings of the parameter group that no schedule changes."""
    o = config.optimizer
    return {"betas": (o.adam_beta1, o.adam_beta2), "eps": o.adam_eps, "weight_decay": o.weight_decay}


def _plain(path: Path) -> dict[str, Any]:
    """The plain values of a checkpoint that `save` wrote. Raises CheckpointError for one of other contents."""
    plain: dict[str, Any] = checkpoint.read_plain(path)
    missing = [key for key in _NEEDED if key not in plain]
    if missing:
        raise CheckpointError(
            f"checkpoint {path} was not saved by `hostward train`",
            why=f"it lacks {', '.join(missing)}",
            fix="name a folder that checkpoint.save wrote",
        )
    return plain


def _optimizer_state(plain: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    state: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith("optimizer/"):
            name, role = key.removeprefix("optimizer/").rsplit("/", 1)
            state.setdefault(name, {})[role] = tensor
    return {**plain["optimizer"], "state": state}


def _model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers by name, tied ones once: views of the live tensors."""
    state = model.state_dict()
    first: dict[int, str] = {}
    return {n: t for n, t in state.items() if first.setdefault(t.data_ptr() if t.numel() else id(t), n) == n}


def checkpoint_to_load(config: Config) -> Path | None:
    """The checkpoint that `checkpoint.load` names; None without one. Raises CheckpointError where there is none."""
    if config.checkpoint.load is None:
        return None
    directory = Path(config.checkpoint.load)
    found = checkpoint.latest(directory)
    if found is None:
        raise CheckpointError(
            f"checkpoint.load={directory} holds no complete checkpoint",
            why="the folder is missing, empty, or the first save into it was never finished",
            fix="name a folder that checkpoint.save wrote (the one above iter_NNNNNNN), or leave checkpoint.load out",
        )
    return found


def require_writable(config: Config) -> None:
    """Make the folder of `checkpoint.save` and try it. Raises CheckpointError now rather than at the first save."""
    if config.checkpoint.save is None:
        return
    save, load = Path(config.checkpoint.save), config.checkpoint.load
    others = complete_checkpoints(save) if save.is_dir() else []
    if others and (load is None or Path(load).resolve() != save.resolve()):
        raise CheckpointError(
            f"checkpoint.save={save} already holds checkpoints, the newest of them {others[-1].name}",
            why="a second run would overwrite and outdate those of the first",
            fix=f"go on from them with checkpoint.load={save}, or name another folder",
        )
    try:
        Path(config.checkpoint.save).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=config.checkpoint.save).close()
    except OSError as error:
        raise CheckpointError(
            f"checkpoint.save={config.checkpoint.save} cannot be written", why=str(error), fix="name a writable folder"
        ) from error


def _python_rng() -> list[Any]:
    version, words, gauss = random.getstate()
    return [version, list(words), gauss]


def _set_python_rng(saved: list[Any]) -> None:
    random.setstate((saved[0], tuple(saved[1]), saved[2]))


def _numpy_rng() -> list[Any]:
    name, words, *rest = np.random.get_state(legacy=True)
    return [name, [int(w) for w in words], *rest]


def _set_numpy_rng(saved: list[Any]) -> None:
    name, words, *rest = saved
    np.random.set_state((name, np.array(words, dtype=np.uint32), *rest))
