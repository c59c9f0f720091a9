"""Save and load checkpoints: tensors through torch.distributed.checkpoint (DCP), made atomic and checked.

DCP writes into the final folder, so a killed save can leave a partial checkpoint that loads, and DCP checks nothing.
Here each save goes to a hidden folder, which gets a manifest with a checksum per chunk, is made durable, is renamed,
and is then named by `DIR/latest`. Plans, file format and table of contents are DCP's, which can read these folders.

    files, manifest              the folder and its manifest (no torch)
    validate                     checks of what is to be saved
    save_plan, writer            pieces of tensors, and the files that they are written to
    collective                   processes that save together
    saving, async_saver          one save; the saves of a run, synchronous or concurrent with training
    staging                      the copy that is written while training continues
    state_dict                   the state of a model and its optimizer, by name

Trust: DCP stores its table of contents as a pickle. The pickle is read only after its checksum agreed, with an
unpickler that knows nothing but DCP's own data classes, and tensors are read with torch's `weights_only`. So loading
runs no code from a checkpoint. The checksums find damage, not forgery: anybody who can write the files can change the
numbers.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from hostward.checkpoint import files
from hostward.checkpoint.async_saver import MODES as MODES, Mode as Mode, Saver as Saver
from hostward.checkpoint.collective import Ranks, Stop
from hostward.checkpoint.save_plan import Value
from hostward.checkpoint.saving import PLAIN, RANKS, typed_failures
from hostward.checkpoint.state_dict import (
    OPTIMIZER,
    empty_optimizer_tensors as empty_optimizer_tensors,
    is_master,
    is_moment,
    optimizer_state as optimizer_state,
    parts_of as parts_of,
    pieces_of,
)
from hostward.checkpoint.validate import JSON
from hostward.checkpoint.writer import in_threads
from hostward.core.inventory import MOMENTS
from hostward.errors import CheckpointError
from hostward.model.parameter_names import matched
from hostward.optim.state_dict import (
    PiecewiseState,
    Rows,
    checked_dtypes,
    drops_masters,
    loads,
    require_fp8,
    rounds,
    would_round,
)
from hostward.plan.memory_model import LOADED_AT_ONCE_BYTES, writer_count

_SHOWN_NAMES = 3

_METADATA_CLASSES = {
    *(("torch.distributed.checkpoint.metadata", name) for name in (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata",
        "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}  # fmt: skip


# --- saving ---


def save(
    directory: Path,
    iteration: int,
    *,
    tensors: Mapping[str, Value],
    plain: Mapping[str, JSON],
    most_recent_k: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Save one checkpoint and wait for it, as `Saver(directory, ...).save(...)` does.

    The tensors must not change until this returns. Besides the tensors, host memory holds copies of a few pieces at a
    time (of device tensors and views that are not contiguous), never of all.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError, MemoryLimitError: as `Saver.save`.
    """
    saver = Saver(directory, group=group, most_recent_k=most_recent_k)
    try:
        path = saver.save(iteration, tensors=tensors, plain=plain)
    finally:
        saver.close()
    return cast(Path, path)


# --- loading ---


def latest(directory: Path) -> Path | None:
    """Return the checkpoint that `directory/latest` names, or None where nothing has been saved.

    Sizes are checked here, contents by `load` and `verify`.

    Raises:
        CheckpointError: the pointer is malformed, or names a folder that is missing or incomplete; the text names the
            newest complete one before it. `directory` is not a folder or cannot be read.
    """
    with files.system_errors(f"cannot read checkpoints in {directory}"):
        return files.read_latest(Path(directory))


def verify(path: Path) -> None:
    """Check the size of every file of a checkpoint and the checksum of every chunk.

    Raises:
        CheckpointError: names the file and the chunk, and the newest complete checkpoint before it.
    """
    files.verify_files(Path(path))


def read_plain(path: Path) -> dict[str, JSON]:
    """Return the values that were saved as `plain`, after checking their file.

    Raises:
        CheckpointError: as `verify`.
    """
    return cast(dict[str, JSON], json.loads(_read_verified(Path(path), PLAIN)))


def tensor_index(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of every tensor by name, after checking the table of contents; reads no tensor.

    Raises:
        CheckpointError: as `verify`.
    """
    return _index(_read_metadata(Path(path)))


def read_own(path: Path) -> list[Any]:
    """Return the values that each rank saved as `own`, by rank, after checking their file; empty if none did.

    Raises:
        CheckpointError: as `verify`.
    """
    path = Path(path)
    if RANKS not in files.file_names(path):
        return []
    return cast(list[Any], json.loads(_read_verified(path, RANKS)))


def load(
    path: Path,
    into: Mapping[str, torch.Tensor],
    *,
    ignore: Collection[str] = (),
    group: dist.ProcessGroup | None = None,
) -> None:
    """Load a checkpoint into existing tensors, in place, on any device and with any sharding.

    Every name, shape and dtype is checked first, and every chunk: of all files, or with `group` of the bytes that this
    rank reads. `into` is not written unless all checks pass on all ranks. Host memory holds a few pieces besides `into`
    (a whole tensor of a checkpoint that an earlier version saved).

    Args:
        path: the folder of the checkpoint, as `latest` returns it.
        into: the tensors by name: all that the checkpoint holds besides `ignore`, no others. A name means the same
            with and without the parts that torch.compile (`_orig_mod.`) and data parallelism (`module.`) add to it.
        ignore: names that the checkpoint may hold and that are not loaded, such as optimizer state.
        group: process group of the ranks that load together, all of which call this; their number need not be that of
            the ranks that saved. None: one process.

    Raises:
        CheckpointError: as `verify`; or the checkpoint is of another model (names, shapes or dtypes differ); or another
            rank failed. A disk that fails between check and read raises it too, and leaves `into` partly filled.
    """
    _carry_out(_Reading(Path(path), into, ignore), (), Ranks(group))


def load_with_state(
    path: Path,
    into: Mapping[str, torch.Tensor],
    optimizer: Any,
    *,
    ignore: Collection[str] = (),
    group: dist.ProcessGroup | None = None,
    checked: bool = False,
) -> PiecewiseState:
    """Load tensors as `load`, and return the optimizer's state of the same checkpoint without having read it.

    Both are checked before anything is written. `optimizer.load_state_dict` reads the state a piece at a time, so no
    second copy of it exists (512 MiB; the state of one parameter where another program saved it whole).

    Args:
        optimizer: a `hostward.AdamW`, for whose parameters the checkpoint has state.
        checked: the checksums of all files have been compared already, by each process: `group` is not used.

    Raises:
        CheckpointError: as `load`; reading the state may raise it, too.
    """
    path = Path(path)
    if optimizer.state_format.fp8_moments:  # in a checkpoint all short moments are bf16
        said = cast("Mapping[str, Any]", read_plain(path).get("optimizer", {}))
        require_fp8(checked_dtypes(said, optimizer.state_format), optimizer.state_format)
    known = {name for settings in optimizer.param_groups for name in settings["param_names"]}
    # Not written to, and so no memory of the host yet.
    state = empty_optimizer_tensors(optimizer, known)
    steps = {name: tensor for name, tensor in state.items() if name.endswith("/step")}
    metadata = _read_metadata(path)
    names = set(_index(metadata))
    # Saved with main weights in bf16, which are the weights, there is none: the optimizer takes it from the weight.
    without = {name for name in state if is_master(name)} if not any(map(is_master, names)) else set()
    later = {name: tensor for name, tensor in state.items() if name not in steps and name not in without}
    pieces = pieces_of(state, LOADED_AT_ONCE_BYTES, _in_large_chunks(metadata))
    reading = _Reading(path, {**into, **steps, **later}, ignore, metadata)
    _carry_out(reading, later, None if checked else Ranks(group))
    del state, later, reading

    def read(piece: Sequence[Rows]) -> Mapping[str, Mapping[str, torch.Tensor]]:
        # Of rows that are not read no memory of the host is written to, and so none is taken.
        tensors = empty_optimizer_tensors(optimizer, {rows.name for rows in piece})
        wanted = {name: t for name, t in tensors.items() if not name.endswith("/step") and name not in without}
        reading = _Reading(path, wanted, names - set(wanted), metadata)
        reading.plan()
        reading.read(rows=piece[0].rows)
        return cast("Mapping[str, Mapping[str, torch.Tensor]]", optimizer_state({}, wanted)["state"])

    return PiecewiseState({name: steps[f"{OPTIMIZER}{name}/step"] for name in known}, read, pieces)


def _carry_out(reading: _Reading, later: Collection[str], ranks: Ranks | None) -> None:
    """Check everything, and then read it but for `later`; without ranks only names, shapes and dtypes are checked."""
    if ranks is None:
        reading.plan()
        reading.read(but=later)
        return
    what, stop = f"cannot load checkpoint {reading.path}", Stop()
    try:
        ranks.together(what, lambda: reading.check(whole=ranks.size == 1), stop, arriving=True)
        ranks.together(what, lambda: reading.read(but=later), stop)
    finally:
        ranks.close()


def _rows_of(item: ReadItem, rows: slice) -> Iterator[ReadItem]:
    """Yield what reads only these rows of the tensor that `item` fills; nothing where it fills none of them."""
    into, source, count = item.dest_offsets[0], item.storage_offsets[0], item.lengths[0]
    first, stop = max(into, rows.start), min(into + count, rows.stop)
    if first < stop:
        yield replace(
            item,
            dest_offsets=torch.Size((first, *item.dest_offsets[1:])),
            storage_offsets=torch.Size((source + first - into, *item.storage_offsets[1:])),
            lengths=torch.Size((stop - first, *item.lengths[1:])),
        )


def _in_large_chunks(metadata: Metadata) -> set[str]:
    """Return the parameters of whose state a chunk is larger than what is read at a time: each row would read it."""
    large = set()
    for name, entry in metadata.state_dict_metadata.items():
        if name.startswith(OPTIMIZER) and isinstance(entry, TensorStorageMetadata):
            most = max((math.prod(chunk.sizes) for chunk in entry.chunks), default=0)
            if most * entry.properties.dtype.itemsize > LOADED_AT_ONCE_BYTES:
                large.add(name.removeprefix(OPTIMIZER).rsplit("/", 1)[0])
    return large


def load_some(path: Path, into: Mapping[str, torch.Tensor]) -> None:
    """Load these tensors of a checkpoint and no others, in place, after checking the chunks that hold them.

    Raises:
        CheckpointError: as `load`.
    """
    index = tensor_index(Path(path))
    reading = _Reading(Path(path), into, set(index) - set(into))
    reading.check(whole=False)
    reading.read()


class _Reading:
    """Carry out one load by this process."""

    def __init__(
        self,
        path: Path,
        into: Mapping[str, torch.Tensor],
        ignore: Collection[str],
        metadata: Metadata | None = None,
    ) -> None:
        self.path, self._into, self._ignore, self._metadata = path, into, ignore, metadata
        self._planner = DefaultLoadPlanner()
        self._reader: _CheckedReader
        self._plan: LoadPlan
        self._names: Mapping[str, str] = {}
        """Names in the checkpoint, where they differ."""

    def check(self, *, whole: bool) -> None:
        """Check names, shapes, dtypes and checksums before anything is loaded.

        Args:
            whole: check all files, else the chunks that will be read.
        """
        if whole:
            verify(self.path)
        self.plan()
        if not whole:
            files.verify_ranges(self.path, self._reader.ranges(self._plan))

    @property
    def metadata(self) -> Metadata:
        """Return the table of contents, whose checksum is compared when it is read."""
        if self._metadata is None:
            self._metadata = _read_metadata(self.path)
        return self._metadata

    def plan(self) -> None:
        """Check names, shapes and dtypes, and find what to read. Raises CheckpointError."""
        path, metadata = self.path, self.metadata
        found = _index(metadata)
        saved_names = matched(self._into, found)
        into = {saved_names.get(name, name): tensor for name, tensor in self._into.items()}
        ignored = {*self._ignore, *matched(self._ignore, found).values()}
        index = {name: entry for name, entry in found.items() if name in into or name not in ignored}
        _check_same_model(path, index, into)
        _require_no_masters_dropped(path, found, into)
        self._reader = _CheckedReader(str(path), metadata)
        with typed_failures(f"cannot load checkpoint {path}"):
            self._planner.set_up_planner(into, metadata, True)
            self._reader.set_up_storage_reader(metadata, True)
            self._plan = self._planner.create_local_plan()
        self._names = saved_names

    def read(self, *, but: Collection[str] = (), rows: slice | None = None) -> None:
        """Fill the tensors, besides those with the names of `but`, and of this process's parts only these rows."""
        left = {self._names.get(name, name) for name in but}
        items = [item for item in self._plan.items if item.dest_index.fqn not in left]
        items = items if rows is None else [part for item in items for part in _rows_of(item, rows)]
        shares = self._reader.by_file(replace(self._plan, items=items), writer_count())
        with typed_failures(f"cannot load checkpoint {self.path}"):
            in_threads([partial(self._read, share) for share in shares], Stop())

    def _read(self, plan: LoadPlan) -> None:
        with torch.no_grad():
            self._reader.read_data(plan, self._planner).wait()


def restore(
    path: Path | None,
    model: torch.nn.Module,
    optimizer: Any,
    *,
    with_state: bool = True,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Restore a model and its optimizer from a checkpoint of `parts_of`, at any placement and number of ranks.

    The checkpoint must have been saved with `plain={"optimizer": parts.optimizer, ...}`. Call this before weights are
    offloaded (`attach(weights=)`).

    Args:
        with_state: False: weights only; moments and step counts stay as they are.

    Raises:
        CheckpointError: as `load`; or `path` is None, which `latest` returns where there is no checkpoint. Where
            reading fails after all checks the optimizer's `step()` refuses, until a load succeeds.
    """
    if path is None:
        raise CheckpointError(
            "there is no checkpoint to restore",
            why="the path is None, which checkpoint.latest returns for a folder without one",
            fix="train from the start where the path is None, as in the first run",
        )
    plain = read_plain(path)
    index = tensor_index(path)
    into = {f"model/{name}": t for name, t in model.state_dict().items()}
    saved_names = matched(into, index)  # of tied weights the first alone
    into = {name: t for name, t in into.items() if name in saved_names}
    others = {name for name in index if not name.startswith("model/")}
    state = None
    if with_state:
        state = load_with_state(path, into, optimizer, ignore=others, group=group)
    else:
        load(path, into, ignore=others, group=group)
    optimizer.reseed()
    if state is not None:
        optimizer.load_state_dict({**cast("Mapping[str, Any]", plain["optimizer"]), "state": state})


class _CheckedReader(FileSystemReader):
    """Read files as DCP does, with a table of contents that was checked and read without running code."""

    def __init__(self, path: str | os.PathLike[str], metadata: Metadata) -> None:
        super().__init__(path)
        self._checked_metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._checked_metadata

    def ranges(self, plan: LoadPlan) -> dict[str, list[tuple[int, int]]]:
        """Return the bytes [start, stop) that a plan reads, by file."""
        found: dict[str, list[tuple[int, int]]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            found.setdefault(info.relative_path, []).append((info.offset, info.offset + info.length))
        return found

    def by_file(self, plan: LoadPlan, most: int) -> list[LoadPlan]:
        """Split the plan into at most `most` parts of different files."""
        names = {name: i % most for i, name in enumerate(self.ranges(plan))}
        shares: list[list[Any]] = [[] for _ in range(max(1, min(most, len(names))))]
        for item in plan.items:
            shares[names[self.storage_data[item.storage_index].relative_path]].append(item)
        return [replace(plan, items=share) for share in shares]


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickle DCP's data classes and torch's dtypes only; anything else in the pickle raises."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in _METADATA_CLASSES:
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which no table of contents needs")


def _read_verified(path: Path, name: str) -> bytes:
    files.verify_files(path, [name])
    with files.system_errors(f"cannot read checkpoint {path}"):
        return (path / name).read_bytes()


def _read_metadata(path: Path) -> Metadata:
    content = _read_verified(path, files.METADATA)
    try:
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
    except (pickle.UnpicklingError, AttributeError, TypeError, ValueError, EOFError, IndexError, ImportError) as error:
        raise CheckpointError(
            f"checkpoint {path}: cannot read {files.METADATA}",
            why=str(error),
            fix="load it with the version of torch that saved it",
        ) from error
    return cast(Metadata, metadata)


def _index(metadata: Metadata) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _check_same_model(
    path: Path, index: Mapping[str, tuple[tuple[int, ...], torch.dtype]], into: Mapping[str, torch.Tensor]
) -> None:
    shared = {name: tensor for name, tensor in into.items() if name in index}
    rounded = [name for name, tensor in shared.items() if is_moment(name) and would_round(index[name][1], tensor.dtype)]
    if rounded:
        raise rounds(f"checkpoint {path}: {_first(rounded)}")
    differing = [
        f"{name} (saved {_describe(*index[name])}, wanted {_describe(tuple(tensor.shape), tensor.dtype)})"
        for name, tensor in shared.items()
        if tensor.is_meta or index[name][0] != tuple(tensor.shape) or not _loads(name, index[name][1], tensor.dtype)
    ]
    groups = {
        "missing in the checkpoint": [name for name in into if name not in index],
        "only in the checkpoint": [name for name in index if name not in into],
        "of another shape or dtype": differing,
    }
    found = [f"{len(names)} {kind}: {_first(names)}" for kind, names in groups.items() if names]
    if found:
        raise CheckpointError(
            f"checkpoint {path} is of another model",
            why="; ".join(found),
            fix="build the model as the run did that saved it, or load a checkpoint of this model",
        )


def _require_no_masters_dropped(path: Path, found: Collection[str], into: Collection[str]) -> None:
    """Raise CheckpointError for fp32 main weights of a checkpoint whose moments alone are to be loaded."""
    dropped = [name for name in found if is_master(name) and name not in into]
    dropped = [name for name in dropped if name.removesuffix("master") + MOMENTS[0] in into]
    if dropped:
        raise drops_masters(f"checkpoint {path}: {_first(dropped)}")


def _loads(name: str, saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a tensor of a checkpoint loads into one of dtype `wanted`: as it is, or a moment exactly."""
    return loads(saved, wanted, name.rsplit("/", 1)[-1]) if is_moment(name) else saved is wanted


def _describe(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more
