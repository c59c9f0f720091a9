"""Save and load checkpoints of a training run, and check what must agree before a run resumes from one."""

from __future__ import annotations

import logging
import math
import os
import random
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist

from hostward.checkpoint import api
from hostward.checkpoint.files import LATEST, complete_after, complete_checkpoints, is_checkpoint, system_errors
from hostward.config.schema import Config, to_dict
from hostward.errors import CheckpointError
from hostward.files.folder_lock import FolderLock
from hostward.model.parameters import local_of
from hostward.runtime.backend import Tier
from hostward.trainer.models import place_in_model
from hostward.trainer.offload_options import group_settings
from hostward.trainer.process_group import Ranks

if TYPE_CHECKING:
    from hostward.trainer.data.dataset import TokenDataset
    from hostward.trainer.run import Run


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
"""Model options that change its function but not the shapes of its weights."""
_STEP_OPTIONS = {
    "optimizer": ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad"),
    "scheduler": ("lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr_warmup_init"),
}
"""Options by section that a run may change, though it then does not continue as the previous run would have."""

_NEEDED = ("iteration", "consumed_samples", "data", "optimizer", "scaler", "python_rng", "numpy_rng", "config")


def saver_of(config: Config) -> api.Saver:
    """Return the saver of a run's checkpoints, for all of its processes."""
    options = config.checkpoint
    mode = options.async_save_mode if options.async_save else None
    return api.Saver(
        Path(options.save or ""),
        mode=cast("api.Mode | None", mode),
        group=processes(),
        most_recent_k=options.most_recent_k,
    )


def processes() -> dist.ProcessGroup | None:
    """Return the group of all processes of the run; None if there is only one."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def save(run: Run) -> None:
    """Save weights, optimizer, random number generators and position: synchronously, or concurrently with training."""
    if run.saver is None:
        run.saver = saver_of(run.config)
    parts = api.parts_of(run.model, run.optimizer)
    tensors = dict(parts.tensors)
    for kind, state in _torch_rng(run.device).items():
        tensors[_rng_name(kind)] = state
    plain: dict[str, Any] = {
        "iteration": run.iteration,
        "consumed_samples": run.iteration * run.config.train.global_batch_size,
        "data": run.dataset.fingerprint,
        "optimizer": _of_all_stages(run, parts.optimizer),
        "scaler": run.scaler.state_dict() if run.scaler is not None else None,
        "python_rng": _python_rng(),
        "numpy_rng": _numpy_rng(),
        "recipe": run.recipe,
        "config": to_dict(run.config),
    }
    own = {"python_rng": plain["python_rng"], "numpy_rng": plain["numpy_rng"]}
    _saved(run, run.saver.save(run.iteration, tensors=tensors, plain=plain, own=own if _ranks() > 1 else None))


def _of_all_stages(run: Run, optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the optimizer's plain values with the names of all of the model's parameters, in its order."""
    if run.ranks.stages == 1:
        return optimizer
    of_ranks = run.ranks.gather([group["params"] for group in optimizer["param_groups"]])
    of_stages = of_ranks[:: run.ranks.of_stage]
    names = ([name for stage in of_stages for name in stage[i]] for i in range(len(of_stages[0])))
    groups = [
        {**group, "params": sorted(dict.fromkeys(whole), key=place_in_model)}  # a tied weight is on two stages
        for group, whole in zip(optimizer["param_groups"], names, strict=True)
    ]
    return {**optimizer, "param_groups": groups}


def _of_this_stage(run: Run, optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of these plain values that belongs to this process."""
    if run.ranks.stages == 1:
        return optimizer
    mine = {name for group in run.optimizer.param_groups for name in group["param_names"]}
    groups = [{**g, "params": [n for n in g["params"] if n in mine]} for g in optimizer["param_groups"]]
    return {**optimizer, "param_groups": groups}


def look(run: Run) -> None:
    """Finalize an asynchronous save that has completed.

    Raises the error that it failed with.
    """
    if run.saver is not None:
        _saved(run, run.saver.poll())


def finish(run: Run) -> None:
    """Wait for an asynchronous save.

    Raises the error that it failed with.
    """
    if run.saver is not None:
        _saved(run, run.saver.finish())


def is_as_it_was(run: Run) -> bool:
    """Return whether no iteration has been made since the newest checkpoint in the folder that the run resumes in."""
    folders = run.config.checkpoint
    return run.iteration == run.first_iteration and folders.save in (None, folders.load)


@contextmanager
def saves(run: Run) -> Iterator[None]:
    """Make the last checkpoint after the block, unless it exists, then release the folders.

    If the block fails, an asynchronous save is aborted.
    """
    try:
        yield
        if run.config.checkpoint.save is not None and not is_as_it_was(run):
            save(run)
        finish(run)
    finally:
        if run.saver is not None:
            ledger = run.optimizer.backend.ledger
            held, pinned_bytes = ledger.by_owner(Tier.HOST), ledger.pinned_bytes
            run.saver.close()
            run.saver = None
            left = ledger.by_owner(Tier.HOST)
            run.save_bytes = {o: n - left.get(o, 0) for o, n in held.items() if n > left.get(o, 0)}
            run.save_pinned_bytes = pinned_bytes - ledger.pinned_bytes
        if not run.keeps_folders:
            run.release_folders()


def _saved(run: Run, path: Path | None) -> None:
    if path is not None:
        run.saved = path
        log.info("saved %s", path)


def load_weights(model: torch.nn.Module, path: Path) -> None:
    """Load the weights of a checkpoint."""
    _plain(path)
    into = {f"model/{name}": t for name, t in _model_tensors(model).items()}
    api.load(path, into, ignore={k for k in api.tensor_index(path) if not k.startswith("model/")})


def load(run: Run, path: Path, *, with_weights: bool = True) -> None:
    """Load a checkpoint; with `checkpoint.finetune` only its weights, at iteration 0.

    Without `with_weights` the model and the optimizer have been loaded already.
    """
    options = run.config.checkpoint
    plain = _plain(path)
    index = api.tensor_index(path)
    full = not options.finetune
    into: dict[str, torch.Tensor] = {}
    if with_weights:
        into |= {f"model/{name}": t for name, t in _model_tensors(run.model).items()}
    generators = _wanted_generators(run, path, index) if full and options.load_rng else {}
    into |= generators
    others: set[str] = set()
    if with_weights:
        others = {k for k in index if not k.startswith("model/")}
        if run.ranks.stages > 1:  # names that no stage has belong to another model
            others.update(*run.ranks.gather(list(into)))
    state = None
    if full and options.load_optim:
        # Without weights all files have been checked: when the weights were loaded.
        left = (others if with_weights else set(index)) - set(into)
        state = api.load_with_state(path, into, run.optimizer, ignore=left, group=processes(), checked=not with_weights)
    elif with_weights:
        api.load(path, into, ignore=others - set(into), group=processes())
    else:
        api.load_some(path, into)
    if with_weights:
        run.optimizer.reseed()
    if not full:
        log.info("loaded the weights of %s: the run starts at iteration 0", path)
        return
    run.iteration = int(plain["iteration"])
    if state is not None:
        run.optimizer.load_state_dict({**_of_this_stage(run, plain["optimizer"]), "state": state})
        for group in run.optimizer.param_groups:
            group.update(group_settings(run.config))  # this run's options, not those of the previous one
        if run.scaler is not None and plain["scaler"] is not None:
            run.scaler.load_state_dict(plain["scaler"])
    else:
        log.warning("checkpoint.load_optim=False: step counts start at 0 with zero moments")
    if options.load_rng:
        _set_generators(run, path, plain, generators)
    log.info("resumed %s at iteration %d", path, run.iteration)
    for name, before, now in _changed_options(run.config, plain, _STEP_OPTIONS):
        log.info("%s is %r, as this run's options say; the run that saved had %r", name, now, before)
    _warn_of_later(run)


def _warn_of_later(run: Run) -> None:
    """Warn (rank 0 only) about checkpoints in the folder later than the one that the run resumes from."""
    folder = run.config.checkpoint.save
    if folder is None or not run.ranks.first or not same_folder(run.config):
        return
    with system_errors(f"cannot read checkpoints in {folder}"):
        later = [path.name for path in complete_after(Path(folder), run.iteration)]
    if later:
        log.warning(
            "%s also has %s, later than the checkpoint that this run resumes from: its saves replace those of the same "
            "iterations, and the others stay. To keep all, name another checkpoint.save",
            folder,
            " to ".join(dict.fromkeys((later[0], later[-1]))),
        )


def _changed_options(
    config: Config, plain: Mapping[str, Any], names: Mapping[str, Sequence[str]]
) -> list[tuple[str, object, object]]:
    """Return the options that differ, by section: names, values when it was saved, and values now."""
    before, now = plain["config"], to_dict(config)
    found = [(f"{s}.{name}", before[s].get(name), now[s][name]) for s, of in names.items() for name in of]
    return [(name, was, is_now) for name, was, is_now in found if was != is_now]


def _wanted_generators(
    run: Run, path: Path, index: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, torch.Tensor]:
    """Return tensors for the states of this rank's generators; none for a rank that the saving run did not have."""
    if "rng/torch" not in index:
        raise CheckpointError(
            f"checkpoint {path} lacks rng/torch", fix="resume with other random numbers: checkpoint.load_rng=False"
        )
    names = [_rng_name(kind) for kind in _torch_rng(run.device)]
    return {name: torch.empty(index[name][0], dtype=index[name][1]) for name in names if name in index}


def _set_generators(run: Run, path: Path, plain: Mapping[str, Any], found: Mapping[str, torch.Tensor]) -> None:
    if not found:
        log.warning(
            "%s has no random number state of rank %d, as fewer ranks saved it: the rank keeps its own",
            path,
            _rank(),
        )
        return
    torch.set_rng_state(found[_rng_name("torch")])
    if run.device.type == "cuda" and _rng_name("cuda") in found:
        torch.cuda.set_rng_state(found[_rng_name("cuda")], run.device)
    own = api.read_own(path)[_rank()] if _rank() else plain
    _set_python_rng(own["python_rng"])
    _set_numpy_rng(own["numpy_rng"])


def _torch_rng(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"torch": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _rng_name(kind: str) -> str:
    """Return the entry's name: `rng/torch` on the first rank, `rng/torch/rank_3` on others."""
    return f"rng/{kind}/rank_{_rank()}" if _rank() else f"rng/{kind}"


def _rank() -> int:
    return dist.get_rank() if processes() is not None else 0


def _ranks() -> int:
    return dist.get_world_size() if processes() is not None else 1


def require_same_samples(config: Config, dataset: TokenDataset, path: Path) -> None:
    """Raise CheckpointError unless the samples of `dataset` continue where the checkpoint stopped."""
    plain = _plain(path)
    batch = config.train.global_batch_size
    if plain["data"] != dataset.fingerprint:
        raise CheckpointError(
            f"{path} was trained on other data, or in another order",
            why="the sources, model.seq_length, the seed or the tokenizer differ, so the samples would not continue",
            fix="restore those options, or load weights only with checkpoint.finetune=True",
        )
    if plain["consumed_samples"] != plain["iteration"] * batch:
        raise CheckpointError(
            f"{path} had consumed {plain['consumed_samples']} samples at iteration {plain['iteration']}",
            why=f"train.global_batch_size is {batch} now, so the next samples would not follow",
            fix="restore train.global_batch_size, or load weights only with checkpoint.finetune=True",
        )
    changed = [
        f"{name} was {before!r}, is {now!r}"
        for name, before, now in _changed_options(config, plain, {"model": _FUNCTION_OPTIONS})
    ]
    if changed:
        raise CheckpointError(
            f"{path} is of a model that computes another function",
            why="; ".join(changed),
            fix="restore those options, or load weights only with checkpoint.finetune=True",
        )


def _plain(path: Path) -> dict[str, Any]:
    """Return the plain values of a checkpoint that `save` wrote.

    Raises CheckpointError for one of other contents.
    """
    plain: dict[str, Any] = api.read_plain(path)
    missing = [key for key in _NEEDED if key not in plain]
    if missing:
        raise CheckpointError(
            f"checkpoint {path} was not saved by `hostward train`",
            why=f"it lacks {', '.join(missing)}",
            fix="name a folder that checkpoint.save wrote",
        )
    return plain


def _model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and saved buffers by name, tied ones once: views of the live tensors."""
    state = model.state_dict()
    first: dict[int, str] = {}
    here = {name: local_of(tensor) for name, tensor in state.items()}
    return {n: t for n, t in state.items() if first.setdefault(here[n].data_ptr() or id(t), n) == n}


def checkpoint_to_load(config: Config) -> Path | None:
    """Return the newest checkpoint in `checkpoint.load`; None for a run that starts from scratch.

    A run starts from scratch without this option, or if the folder that it both saves to and loads from has no
    checkpoint yet. Raises CheckpointError for another folder without a checkpoint, and if there are checkpoints but
    `latest` names none.

    The first save of a run may be ended between the checkpoint and its name, and a launcher starts the run again: where
    there is one checkpoint alone, that one is meant.
    """
    if config.checkpoint.load is None:
        return None
    directory = Path(config.checkpoint.load)
    found = api.latest(directory)
    if found is not None:
        return found
    if same_folder(config) and not config.checkpoint.finetune:
        names = complete_names(directory)
        if not names:
            log.info("no checkpoint in %s yet: the run starts at iteration 0", directory)
            return None
        if len(names) == 1:
            log.info("%s is complete, but its save ended before `latest` named it: the run resumes from it", names[0])
            return directory / names[0]
    raise nothing_to_load(directory)


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


# Errors for a folder that `checkpoint.load` names and that has no `latest`.


def complete_names(directory: Path) -> list[str]:
    """Return the complete checkpoints in a folder, which need not exist.

    Raises CheckpointError if it cannot be read.
    """
    with system_errors(f"cannot read checkpoints in {directory}"):
        return [path.name for path in complete_checkpoints(directory)] if directory.is_dir() else []


def nothing_to_load(directory: Path) -> CheckpointError:
    """Return the error for a folder where `checkpoint.latest` finds nothing.

    Raises CheckpointError if it cannot be read.
    """
    held = complete_names(directory)
    if held:
        return CheckpointError(
            f"checkpoint.load={directory} holds checkpoints, but no file {LATEST}",
            why="a run resumes from the one that this file names",
            fix=f"write the name of one into it, as in {_written(held[-1], directory)}",
        )
    around, name = _place(directory)
    # The content of its parent is only a hint, and listing it may be forbidden.
    beside: list[str] = []
    with suppress(CheckpointError):
        beside = complete_names(around)
    if name in beside:
        return _one_of_several(directory, around, name)
    why, folder = "no save into it was ever finished", "a folder that checkpoint.save wrote"
    if not directory.is_dir():
        why = "the folder does not exist"
    elif beside and api.latest(around) is not None:
        why, folder = "it is within a folder of checkpoints", f"checkpoint.load={around}"
    return CheckpointError(
        f"checkpoint.load={directory} holds no complete checkpoint",
        why=why,
        fix=f"name {folder}, or leave checkpoint.load out",
    )


def _one_of_several(directory: Path, around: Path, name: str) -> CheckpointError:
    what = f"checkpoint.load={directory} is a checkpoint, not a folder of them"
    try:
        newest = api.latest(around)
    except CheckpointError:
        newest, named = None, "none that is complete"
    else:
        named = "it is missing" if newest is None else newest.name
    why = f"a run resumes from the checkpoint that {around / LATEST} names: {named}"
    if newest is not None and newest.name == name:
        return CheckpointError(what, why=why, fix=f"name checkpoint.load={around}, or leave checkpoint.load out")
    return CheckpointError(what, why=why, fix=f"{_written(name, around)}, then checkpoint.load={around}")


def _place(directory: Path) -> tuple[Path, str]:
    """Return the parent of a folder, as it was written if possible, and the folder's name there."""
    real = directory.resolve()
    return directory.parent if directory.parent.resolve() == real.parent else real.parent, real.name


def _written(name: str, folder: Path) -> str:
    """Return the command that makes a run resume from this checkpoint of a folder."""
    return f"printf {name} > {shlex.quote(str(folder / LATEST))}"


# Locks of the folders that a run writes into, held from before it looks into them until it is over.


def same_folder(config: Config) -> bool:
    """Return whether the run saves to the folder that it loads from."""
    save, load = config.checkpoint.save, config.checkpoint.load
    return save is not None and load is not None and _are_same(Path(save), Path(load))


def _are_same(a: Path, b: Path) -> bool:
    """Return whether both paths are one folder; a folder that does not exist is compared by its name."""
    return os.path.samefile(a, b) if a.exists() and b.exists() else a.resolve() == b.resolve()


def lock_folders(config: Config, run_dir: Path | None, ranks: Ranks, undone: ExitStack) -> list[FolderLock]:
    """Lock the run's output folders (rank 0 only): that of `checkpoint.save`, and `run_dir`.

    Folders are made if missing, and checked to be writable. Other ranks get an empty list.

    Args:
        undone: if the run does not start after all, closing it leaves the folders as they were.

    Raises:
        CheckpointError: `checkpoint.save` cannot be written, or holds checkpoints of another run.
        ConfigError: another run has one of the folders.
    """
    save = None if config.checkpoint.save is None else Path(config.checkpoint.save)
    label = f"checkpoint.save={save}"
    # The rank may wait for two locks one after the other, and the other ranks wait for it meanwhile.
    most_s = 60 * config.dist.distributed_timeout_minutes / 4 if ranks.size > 1 else math.inf

    def locked(label: str, folder: Path) -> FolderLock:
        with system_errors(f"{label} cannot be written"):
            return undone.enter_context(FolderLock(label, folder, most_s=most_s))

    def all_locked() -> list[FolderLock]:
        if save is not None and is_checkpoint(save):
            raise CheckpointError(
                f"{label} is a checkpoint",
                why="checkpoints are siblings, and whatever is inside one is removed with it",
                fix=f"checkpoint.save={save.parent}, or another folder",
            )
        if not ranks.first:
            return []
        found = [] if save is None else [locked(label, save)]
        if run_dir is not None and (save is None or not _are_same(run_dir, save)):
            found.append(locked(f"--run-dir {run_dir}", run_dir))
        return found

    locks = ranks.agreed(all_locked)
    if save is not None:
        ranks.agreed(lambda: _require_writable(config, save))
    return locks


def _require_writable(config: Config, save: Path) -> None:
    """Raise CheckpointError now rather than at the first save."""
    with system_errors(f"checkpoint.save={save} cannot be written"):
        save.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=save).close()
    others = complete_checkpoints(save)
    if others and not same_folder(config):
        raise CheckpointError(
            f"checkpoint.save={save} already holds checkpoints, the newest of them {others[-1].name}",
            why="a second run would overwrite and outdate those of the first",
            fix=f"resume from them with checkpoint.load={save}, or name another folder",
        )
