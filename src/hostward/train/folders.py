"""The folders that a run writes into: they are its own from before it looks what is there until it is over."""

from __future__ import annotations

import math
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

from hostward.checkpoint_files import complete_checkpoints, is_checkpoint, system_errors
from hostward.config import Config
from hostward.errors import CheckpointError
from hostward.folder_lock import FolderLock

from .ranks import Ranks


def same_folder(config: Config) -> bool:
    """Whether the run saves where it loads from."""
    save, load = config.checkpoint.save, config.checkpoint.load
    return save is not None and load is not None and _are_same(Path(save), Path(load))


def _are_same(a: Path, b: Path) -> bool:
    """Whether these are one folder, by whatever names; of one that is not there yet its name tells."""
    return os.path.samefile(a, b) if a.exists() and b.exists() else a.resolve() == b.resolve()


def lock_folders(config: Config, run_dir: Path | None, ranks: Ranks, undone: ExitStack) -> list[FolderLock]:
    """Have the folders that a run writes into for it alone: that of `checkpoint.save`, and its own. They are made, if
    need be, and tried. The first rank has them for all, and the others get none.

    Args:
        undone: where the run is refused after all, its end leaves the folders as they were.

    Raises:
        CheckpointError: `checkpoint.save` is none that checkpoints can be saved to, or has some of another run.
        ConfigError: another run has one of the folders.
    """
    save = None if config.checkpoint.save is None else Path(config.checkpoint.save)
    told = f"checkpoint.save={save}"
    # Of two locks that ranks wait for one after the other, and others for this rank meanwhile.
    most_s = 60 * config.dist.distributed_timeout_minutes / 4 if ranks.size > 1 else math.inf

    def locked(told: str, folder: Path) -> FolderLock:
        with system_errors(f"{told} cannot be written"):
            return undone.enter_context(FolderLock(told, folder, most_s=most_s))

    def all_locked() -> list[FolderLock]:
        if save is not None and is_checkpoint(save):
            raise CheckpointError(
                f"{told} is a checkpoint",
                why="checkpoints lie beside each other, and what is within one is removed with it",
                fix=f"checkpoint.save={save.parent}, or another folder",
            )
        if not ranks.first:
            return []
        found = [] if save is None else [locked(told, save)]
        if run_dir is not None and (save is None or not _are_same(run_dir, save)):
            found.append(locked(f"--run-dir {run_dir}", run_dir))
        return found

    locks = ranks.agreed(all_locked)
    if save is not None:
        ranks.agreed(lambda: _require_writable(config, save))
    return locks


def _require_writable(config: Config, save: Path) -> None:
    """Raises CheckpointError now rather than at the first save."""
    with system_errors(f"checkpoint.save={save} cannot be written"):
        save.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=save).close()
    others = complete_checkpoints(save)
    if others and not same_folder(config):
        raise CheckpointError(
            f"checkpoint.save={save} already holds checkpoints, the newest of them {others[-1].name}",
            why="a second run would overwrite and outdate those of the first",
            fix=f"go on from them with checkpoint.load={save}, or name another folder",
        )
