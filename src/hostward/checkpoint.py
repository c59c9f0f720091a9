"""Save and load checkpoints: tensors through torch.distributed.checkpoint (DCP), made atomic and checked.

DCP is neither. It writes into the final folder, so a killed save can leave one that loads, and it checks nothing. Here
each save goes to a hidden folder, which gets a manifest with a checksum per chunk, is made durable, is renamed, and is
then named by `DIR/latest`. `checkpoint_files` holds the layout and these steps; this module holds what touches tensors.

Trust: DCP keeps its table of contents as a pickle. It is read only after its checksum agreed, with an unpickler that
knows nothing but DCP's own data classes, and tensors are read with torch's `weights_only`. So loading runs no code from
a checkpoint. The checksums find damage, not forgery: whoever can write the files can change the numbers.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hostward import checkpoint_files as files
from hostward.errors import CheckpointError
from hostward.inspect import local_of
from hostward.names import by_plain_name, matched

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"

PLAIN = "plain.json"
METADATA = ".metadata"
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
    tensors: Mapping[str, torch.Tensor],
    plain: Mapping[str, JSON],
    most_recent_k: int | None = None,
) -> Path:
    """Save a checkpoint as `directory/iter_NNNNNNN` and point `directory/latest` at it.

    A save that fails, is interrupted or is killed leaves the earlier checkpoints and the pointer as they were, and
    nothing that loads; what a killed save left on disk, the next save removes. An existing checkpoint of the same
    iteration is replaced, with one complete at every instant. The tensors must not change until this returns. Besides
    them, host memory holds a copy of one tensor at a time (device tensors and views of larger storages), never of all.

    Args:
        directory: created if missing; one process at a time saves into it.
        iteration: number of finished training steps, at least 0.
        tensors: by unique name; any shape, dtype and device. A view is saved without the rest of its storage. What
            torch.compile puts into names (`_orig_mod.`) is left out.
        plain: numbers, strings, lists and mappings. Tuples come back as lists.
        most_recent_k: afterwards keep the newest k checkpoints up to this iteration (at least 1); None keeps all.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: a value that cannot be saved, names that become equal, no permission, disk full, another
            process saving there.
    """
    directory = Path(directory)
    _check_request(iteration, tensors, most_recent_k)
    tensors = {plain: tensors[name] for plain, name in by_plain_name(tensors).items()}
    plain_text = _plain_to_bytes(plain)
    what = f"cannot save checkpoint {directory / files.folder_name(iteration)}"
    with files.system_errors(what):
        directory.mkdir(parents=True, exist_ok=True)
        with files.locked(directory):
            files.clear_leftovers(directory)
            partial = files.hidden_path(directory, files.folder_name(iteration), "partial")
            try:
                partial.mkdir()
                with _typed_failures(what):
                    _save_tensors(partial, tensors)
                (partial / PLAIN).write_bytes(plain_text)
                files.seal(partial, iteration)
                final = files.publish(directory, partial, iteration)
            except BaseException:
                files.clear_leftovers(directory)
                raise
            with files.system_errors(f"checkpoint {final} is saved, but older ones cannot be removed"):
                if most_recent_k is not None:
                    files.discard_older(directory, iteration, most_recent_k)
                files.clear_leftovers(directory)
    return final


def _check_request(iteration: int, tensors: Mapping[str, torch.Tensor], most_recent_k: int | None) -> None:
    if iteration < 0:
        raise CheckpointError(f"cannot save iteration {iteration}", why="iterations count from 0")
    if most_recent_k is not None and most_recent_k < 1:
        raise CheckpointError(
            f"checkpoint.most_recent_k is {most_recent_k}",
            why="the checkpoint just saved must stay",
            fix="use 1 or more, or leave it out to keep all",
        )
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"cannot save {name!r} as a tensor",
                why=f"it is a {type(tensor).__name__}",
                fix="put numbers, strings, lists and mappings into `plain`",
            )
        if local_of(tensor) is not tensor:
            raise CheckpointError(
                f"cannot save {name!r}",
                why="it is sharded, and this checkpoint is written by one process",
                fix="torch.distributed.checkpoint.save of model.state_dict() and optimizer.state_dict(), on all ranks",
            )
        if tensor.is_meta or tensor.layout != torch.strided:
            raise CheckpointError(f"cannot save {name!r}", why="only dense tensors that hold data can be saved")
        # Offloaded weights keep their tensor while the storage is empty; reading one would end the process.
        plain_kind = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if plain_kind and tensor.numel() and not tensor.untyped_storage().nbytes():
            raise CheckpointError(
                f"cannot save {name!r}", why="its storage is empty: the weight is offloaded", fix="save its host copy"
            )


def _plain_to_bytes(plain: Mapping[str, JSON]) -> bytes:
    _check_plain(plain, "plain")
    return json.dumps(plain, separators=(",", ":")).encode()


def _check_plain(value: object, where: str) -> None:
    """Refuse what JSON would change in silence or not take: other types, and keys that are not strings."""
    if value is None or type(value) in (bool, int, float, str):
        return
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]")
        return
    if isinstance(value, dict) and all(type(key) is str for key in value):
        for key, item in value.items():
            _check_plain(item, f"{where}[{key!r}]")
        return
    kind = "a mapping with keys that are no strings" if isinstance(value, dict) else f"a {type(value).__name__}"
    raise CheckpointError(
        f"cannot save {where}",
        why=f"it is {kind}",
        fix="use None, bool, int, float, str, lists and mappings with string keys; tensors go into `tensors`",
    )


def _save_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    # `seal` makes all files durable at once, so the writer need not.
    writer = _OneTensorWriter(str(folder), sync_files=False)
    dcp_save(dict(tensors), storage_writer=writer, no_dist=True)


class _OneTensorWriter(FileSystemWriter):
    """DCP's file writer and file format, with one staged tensor in memory at a time.

    The inherited `write_data` keeps every staged copy until its file ends, which doubles host memory when the tensors
    are views of slabs or lie on the device; and with several threads it loses what a thread raised.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        results = []
        with (Path(self.path) / name).open("wb") as stream:
            for item in plan.items:
                start = stream.tell()
                tensor = cast(torch.Tensor, planner.resolve_data(item)).detach().cpu()
                if tensor.untyped_storage().nbytes() != tensor.nbytes:
                    tensor = tensor.clone(memory_format=torch.contiguous_format)
                torch.save(tensor, stream)
                length = stream.tell() - start
                info = _StorageInfo(name, start, length)
                results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=info))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def storage_meta(self) -> StorageMeta:
        # Without the path: that of the hidden folder means nothing once it is renamed.
        return StorageMeta(save_id=self.save_id)


@contextmanager
def _typed_failures(what: str) -> Iterator[None]:
    """Bring out what DCP and torch's zip writer wrap (Ctrl-C, a full disk); drop DCP's advice on process groups."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as failure:
        causes = [cause for error, _ in failure.failures.values() for cause in _chain(error)]
        for cause in causes:
            if not isinstance(cause, Exception):
                raise cause from None
        for cause in causes:
            if isinstance(cause, OSError):
                raise files.system_error(what, cause) from cause
        first = causes[0]
        raise CheckpointError(what, why=f"{type(first).__name__}: {first}") from first


def _chain(error: BaseException | None) -> list[BaseException]:
    """Return an error and those it replaced: a failed write shows as `unexpected pos` with the real one behind it."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


# --- loading ---


def latest(directory: Path) -> Path | None:
    """Return the checkpoint that `directory/latest` names, or None where nothing has been saved.

    Sizes are checked here, contents by `load` and `verify`.

    Raises:
        CheckpointError: the pointer is malformed, or names a folder that is missing or incomplete; the text names the
            newest complete one. `directory` is not a folder or cannot be read.
    """
    with files.system_errors(f"cannot read checkpoints in {directory}"):
        return files.read_latest(Path(directory))


def verify(path: Path) -> None:
    """Check the size of every file of a checkpoint and the checksum of every chunk.

    Raises:
        CheckpointError: names the file and the chunk, and the newest other complete checkpoint.
    """
    files.verify_files(Path(path))


def read_plain(path: Path) -> dict[str, JSON]:
    """Return what was saved as `plain`, after checking its file.

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


def load(path: Path, into: Mapping[str, torch.Tensor], *, ignore: Collection[str] = ()) -> None:
    """Load a checkpoint into existing tensors, in place, whatever their device.

    Every chunk and every name, shape and dtype is checked first; `into` is not touched unless all agree. Host memory
    holds one tensor besides `into`.

    Args:
        path: the folder of the checkpoint, as `latest` returns it.
        into: the tensors by name: all that the checkpoint holds besides `ignore`, no others. A name means the same
            with and without what torch.compile (`_orig_mod.`) and data parallelism (`module.`) put into it.
        ignore: names that the checkpoint may hold and that are not loaded, such as optimizer state.

    Raises:
        CheckpointError: as `verify`; or the checkpoint is of another model (names, shapes or dtypes differ). A disk
            that fails between check and read raises it too, and leaves `into` partly filled.
    """
    path = Path(path)
    verify(path)
    metadata = _read_metadata(path)
    found = _index(metadata)
    saved_names = matched(into, found)
    into = {saved_names.get(name, name): tensor for name, tensor in into.items()}
    ignored = {*ignore, *matched(ignore, found).values()}
    index = {name: entry for name, entry in found.items() if name in into or name not in ignored}
    _check_same_model(path, index, into)
    with _typed_failures(f"cannot load checkpoint {path}"):
        dcp_load(dict(into), storage_reader=_CheckedReader(str(path), metadata), no_dist=True)


class _CheckedReader(FileSystemReader):
    """DCP's file reader with a table of contents that was checked and read without running code."""

    def __init__(self, path: str | os.PathLike[str], metadata: Metadata) -> None:
        super().__init__(path)
        self._checked_metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._checked_metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Knows DCP's data classes and torch's dtypes; anything else in the pickle is refused."""

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
    content = _read_verified(path, METADATA)
    try:
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
    except (pickle.UnpicklingError, AttributeError, TypeError, ValueError, EOFError, IndexError, ImportError) as error:
        raise CheckpointError(
            f"checkpoint {path}: cannot read {METADATA}",
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
    differing = [
        f"{name} (saved {_describe(*index[name])}, wanted {_describe(tuple(tensor.shape), tensor.dtype)})"
        for name, tensor in into.items()
        if name in index and (tensor.is_meta or index[name] != (tuple(tensor.shape), tensor.dtype))
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
            fix="build the model with the options of the run that saved it, or point checkpoint.load at another folder",
        )


def _describe(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more
