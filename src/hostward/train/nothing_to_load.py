"""What is wrong with a folder that `checkpoint.load` names and that has no `latest`, and what to do about it."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path

from hostward import checkpoint
from hostward.checkpoint_files import LATEST, complete_checkpoints, system_errors
from hostward.errors import CheckpointError


def complete_names(directory: Path) -> list[str]:
    """The complete checkpoints in a folder, which need not exist. Raises CheckpointError if it cannot be read."""
    with system_errors(f"cannot read checkpoints in {directory}"):
        return [path.name for path in complete_checkpoints(directory)] if directory.is_dir() else []


def nothing_to_load(directory: Path) -> CheckpointError:
    """The error for a folder where `checkpoint.latest` finds nothing. Raises CheckpointError if it cannot be read."""
    held = complete_names(directory)
    if held:
        return CheckpointError(
            f"checkpoint.load={directory} holds checkpoints, and no file {LATEST}",
            why="a run goes on from the one that this file names",
            fix=f"write the name of one into it, as in {_written(held[-1], directory)}",
        )
    around, name = _place(directory)
    # What the folder around it holds is a hint; it may be one that only its owner may list.
    beside: list[str] = []
    with suppress(CheckpointError):
        beside = complete_names(around)
    if name in beside:
        return _one_of_several(directory, around, name)
    why, folder = "no save into it was ever finished", "a folder that checkpoint.save wrote"
    if not directory.is_dir():
        why = "there is no such folder"
    elif beside and checkpoint.latest(around) is not None:
        why, folder = "it is within a folder of checkpoints", f"checkpoint.load={around}"
    return CheckpointError(
        f"checkpoint.load={directory} holds no complete checkpoint",
        why=why,
        fix=f"name {folder}, or leave checkpoint.load out",
    )


def _one_of_several(directory: Path, around: Path, name: str) -> CheckpointError:
    what = f"checkpoint.load={directory} is a checkpoint, not a folder of them"
    try:
        newest = checkpoint.latest(around)
    except CheckpointError:
        newest, named = None, "none that is complete"
    else:
        named = "it is missing" if newest is None else newest.name
    why = f"a run goes on from what {around / LATEST} names: {named}"
    if newest is not None and newest.name == name:
        return CheckpointError(what, why=why, fix=f"name checkpoint.load={around}, or leave checkpoint.load out")
    return CheckpointError(what, why=why, fix=f"{_written(name, around)}, then checkpoint.load={around}")


def _place(directory: Path) -> tuple[Path, str]:
    """The folder that a folder lies in, as it was written where that is it, and its name there."""
    real = directory.resolve()
    return directory.parent if directory.parent.resolve() == real.parent else real.parent, real.name


def _written(name: str, folder: Path) -> str:
    """The command that makes a run go on from this checkpoint of a folder."""
    return f"printf {name} > {shlex.quote(str(folder / LATEST))}"
