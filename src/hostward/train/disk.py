"""Whether the checkpoints of a run have room on their disk: refused, or told, before any weight is allocated."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from hostward import checkpoint, checkpoint_files as files
from hostward.config import Config
from hostward.errors import CheckpointError
from hostward.inventory import Dtype
from hostward.sizes import size, sizes_apart

from .models import parameter_count

log = logging.getLogger("hostward")

STATE_BYTES = {Dtype.FP32: 8, Dtype.BF16: 12, Dtype.FP16: 12}
"""Per parameter beside its weight: two moments, and the fp32 master of a 16-bit weight."""


def require_room(config: Config, vocab_size: int, resume_from: Path | None, *, first: bool = True) -> None:
    """Weigh the next checkpoint against what is free; the first rank tells if those that are to be kept together find
    no room. Ranks weigh the same: they write into one folder, what they hold alike once.

    Raises:
        CheckpointError: not even one finds room. Retention gives none: older checkpoints stay until a new one is whole.
    """
    options = config.checkpoint
    if options.save is None:
        return
    saves = saves_to_come(config, resume_from)
    if not saves:
        return
    save, one_bytes = Path(options.save), checkpoint_bytes(config, vocab_size)
    with files.system_errors(f"checkpoint.save={save} cannot be weighed"):
        free_bytes = room_bytes(save)
        if free_bytes is None:
            return
        free_bytes += files.leftover_bytes(save)
        # Retention removes none of later iterations, as of a run that this one is finetuned from.
        kept = options.most_recent_k is not None
        older_bytes = files.complete_bytes(save, config.train.train_iters) if kept else 0
    if one_bytes > free_bytes:
        asked, there = sizes_apart(one_bytes, free_bytes)
        raise CheckpointError(
            f"checkpoint.save={save} has room for {there}; a checkpoint takes at least {asked}",
            why="older checkpoints are removed when a new one is complete, not before",
            fix="free space there, or set checkpoint.save to a folder on another disk; --force starts anyway",
        )
    together = saves if options.most_recent_k is None else min(saves, options.most_recent_k + 1)
    if first and together * one_bytes > free_bytes + older_bytes:
        log.warning(
            "checkpoint.save=%s would hold %d checkpoints of this run at once, of %s each at least, and has room for "
            "%d; the save that finds none ends the run (checkpoint.most_recent_k keeps fewer, one more during a save)",
            save,
            together,
            size(one_bytes),
            (free_bytes + older_bytes) // one_bytes,
        )


def checkpoint_bytes(config: Config, vocab_size: int) -> int:
    """Of one checkpoint of the whole model, without tables of contents and the like."""
    dtype = Dtype(config.model.params_dtype)
    return parameter_count(config, vocab_size) * (dtype.itemsize_bytes + STATE_BYTES[dtype])


def saves_to_come(config: Config, resume_from: Path | None) -> int:
    """Checkpoints that a run writes until its end: those at intervals before the last iteration, and one behind it,
    which is there already where a run that is over goes on in its own folder.
    """
    options, until, begun = config.checkpoint, config.train.train_iters, 0
    if resume_from is not None and not options.finetune:
        begun = int(str(checkpoint.read_plain(resume_from)["iteration"]))
    if begun >= until:
        return int(options.save != options.load)
    interval = options.save_interval
    return 1 + (0 if interval is None else (until - 1) // interval - begun // interval)


def room_bytes(folder: Path) -> int | None:
    """What this user may still write where the folder is, or will be; None: the file system does not say."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    found = os.statvfs(there)
    blocks = found.f_bfree if os.geteuid() == 0 else found.f_bavail
    return blocks * found.f_frsize if found.f_blocks else None
