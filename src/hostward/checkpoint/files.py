"""Write and read the folder of a checkpoint atomically, with every chunk of every file checked. No torch.

DIR/latest                        text: the name of the folder to resume from; replacing it commits a save
DIR/iter_0000050/                 a complete checkpoint
    .metadata  __R_T.distcp       tensors, in the format of torch.distributed.checkpoint: by thread T of rank R
    plain.json                    numbers, strings, lists, mappings
    ranks.json                    the same, of each rank's own; where there are any
    manifest.json                 size and CRC-32 per chunk of each file above, and a checksum of itself
DIR/.save.lock                    advisory lock: one process saves at a time
DIR/.run.lock                     the same of `hostward train`: one run has the folder, from its start to its end
DIR/.iter_0000050.WORD-1a2b3c4d   part of a running or killed save. WORD is `partial` (being written), `discarded`
                                  (being removed) or `replaced` (the old checkpoint of the same iteration, until
                                  the new one is in place)
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from hostward.checkpoint.manifest import CHUNK_BYTES, MANIFEST, FileRecord, Manifest, count_chunks, read_checksums
from hostward.errors import CheckpointError
from hostward.files.folder_lock import lock, unlock

METADATA = ".metadata"
"""Table of contents, of torch.distributed.checkpoint."""
LATEST = "latest"
LOCK = ".save.lock"

_COMPLETE_NAME = re.compile(r"iter_(\d{7,})")
_HIDDEN_NAME = re.compile(r"\.(iter_\d{7,}|latest)\.(partial|replaced|discarded)-[0-9a-f]{8}")
_CHOOSE = "save into"
_FIXES = {
    errno.ENOSPC: "free space on that disk, or {} a folder on another one",
    errno.EDQUOT: "free space within the quota, or {} a folder elsewhere",
    errno.EFBIG: "raise the file size limit (ulimit -f), or {} a folder on another file system",
    errno.EACCES: "give this user permission there, or use another folder",
    errno.EPERM: "give this user permission there, or use another folder",
    errno.EROFS: "use a folder on a file system that is mounted for writing",
    errno.ENOTDIR: "use a folder whose parents are all folders",
    errno.ENOENT: "use a folder on a file system where folders can be made",
    errno.EEXIST: "use a folder, or remove the file of that name",
}


# --- writing ---


def system_error(what: str, error: OSError, choose: str = _CHOOSE) -> CheckpointError:
    """Return the typed error of a failed system call, with the fix that fits its errno.

    Args:
        what: the fact.
        error: the error of the system call.
        choose: words for choosing another folder, such as "save into".
    """
    fix = _FIXES.get(error.errno or 0, "check that the disk and the folder are sound, and try again").format(choose)
    where = f" ({error.filename})" if error.filename else ""
    return CheckpointError(what, why=f"{error.strerror or error}{where}", fix=fix)


@contextlib.contextmanager
def system_errors(what: str, choose: str = _CHOOSE) -> Iterator[None]:
    """Turn an OSError of the block into a CheckpointError that begins with `what`."""
    try:
        yield
    except OSError as error:
        raise system_error(what, error, choose) from error


def sync_directory(directory: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no such call for folders and keep names durable by themselves.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file and make its content durable."""
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def seal(folder: Path, iteration: int, durable: Mapping[str, FileRecord] | None = None) -> None:
    """Write the manifest of a folder, last of all files, when all of them are durable.

    Args:
        folder: the hidden folder of the save.
        iteration: of the checkpoint.
        durable: records of the files that are durable already; the other files, which are small, are read back.

    Raises:
        CheckpointError: a file that was written is missing here, or has another size.
    """
    files = dict(durable or {})
    for path in sorted(folder.iterdir()):
        size_bytes = path.stat().st_size
        if path.name not in files:
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
            files[path.name] = FileRecord(
                size_bytes, tuple(read_checksums(path, range(count_chunks(size_bytes, CHUNK_BYTES)), CHUNK_BYTES))
            )
    manifest = Manifest(iteration, CHUNK_BYTES, files)
    _check_sizes(folder, manifest)
    write_file(folder / MANIFEST, manifest.to_bytes())
    sync_directory(folder)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the folder's lock, so that one process saves at a time; the lock ends with the process.

    Raises:
        CheckpointError: another process (or thread) holds it.
    """
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if not lock(descriptor, directory):
            raise CheckpointError(
                f"cannot save into {directory}",
                why="another process is saving there",
                fix="give each run a folder of its own to save into, or wait until the other save ends",
            )
        yield
        unlock(descriptor)
    finally:
        os.close(descriptor)


def folder_name(iteration: int) -> str:
    """Return the name of the checkpoint folder of an iteration."""
    return f"iter_{iteration:07d}"


def hidden_path(directory: Path, name: str, word: str) -> Path:
    """Return a fresh path for `name` in the state `word` (partial, replaced or discarded)."""
    return directory / f".{name}.{word}-{secrets.token_hex(4)}"


def clear_leftovers(directory: Path) -> None:
    """Remove the files of failed or killed saves; restore a replaced checkpoint if its successor is missing.

    Call with the lock held. Only names of this module's own pattern are touched.
    """
    for path in sorted(directory.iterdir()):
        match = _HIDDEN_NAME.fullmatch(path.name)
        if match is None:
            continue
        name, word = match.groups()
        if word == "replaced" and not (directory / name).exists():
            os.rename(path, directory / name)
        else:
            _remove(path)


def _remove(path: Path) -> None:
    # The next save tries again to remove the rest, which never loads, so that a failure does no harm.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def publish(directory: Path, partial: Path, iteration: int) -> Path:
    """Rename a sealed folder to its final name, then point `latest` at it.

    An older checkpoint of this iteration is replaced. Between the two renames of a replacement the old checkpoint has
    its `replaced` name, by which `read_latest` finds it; so a complete one exists at every instant.
    """
    final = directory / folder_name(iteration)
    if os.path.lexists(final):
        os.rename(final, hidden_path(directory, final.name, "replaced"))
    os.rename(partial, final)
    sync_directory(directory)
    pointer = hidden_path(directory, LATEST, "partial")
    write_file(pointer, f"{final.name}\n".encode())
    os.replace(pointer, directory / LATEST)
    sync_directory(directory)
    return final


def discard_older(directory: Path, iteration: int, keep: int) -> None:
    """Mark all complete checkpoints up to `iteration` but the newest `keep` for removal by `clear_leftovers`."""
    older = [path for path in complete_checkpoints(directory) if _iteration_of(path) <= iteration]
    for path in older[: max(0, len(older) - keep)]:
        os.rename(path, hidden_path(directory, path.name, "discarded"))


# --- reading ---


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint, damaged or not.

    A folder of checkpoints, a folder with another manifest, and a folder that cannot be read are not checkpoints;
    reading or writing there raises the reason.
    """
    try:
        return (path / MANIFEST).exists() and (path / METADATA).exists()
    except OSError:
        return False


def _iteration_of(path: Path) -> int:
    match = _COMPLETE_NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, by iteration: intact manifest, all files of the right size."""
    named = [path for path in directory.iterdir() if _COMPLETE_NAME.fullmatch(path.name)]
    return [path for path in sorted(named, key=_iteration_of) if _is_complete(path)]


def complete_after(directory: Path, iteration: int) -> list[Path]:
    """Return the complete checkpoints of later iterations in a folder."""
    return [path for path in complete_checkpoints(directory) if _iteration_of(path) > iteration]


def complete_bytes(directory: Path, until: int) -> int:
    """Return the bytes of the complete checkpoints up to an iteration in a folder, which need not exist."""
    complete = complete_checkpoints(directory) if directory.is_dir() else ()
    return sum(_size_bytes(path) for path in complete if _iteration_of(path) <= until)


def leftover_bytes(directory: Path) -> int:
    """Return the most bytes that `clear_leftovers` can free in a folder."""
    names = directory.iterdir() if directory.is_dir() else ()
    return sum(_size_bytes(path) for path in names if _HIDDEN_NAME.fullmatch(path.name))


def _size_bytes(path: Path) -> int:
    total = 0
    for file in (path, *path.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # another process may have removed it meanwhile
            total += file.stat().st_size if file.is_file() else 0
    return total


def _is_complete(path: Path) -> bool:
    try:
        _check_sizes(path, _parse_manifest(path))
    except (CheckpointError, OSError):
        return False
    return True


def read_latest(directory: Path) -> Path | None:
    """Return the checkpoint that `latest` names, or None where there is no pointer.

    Raises:
        CheckpointError: the pointer is malformed, or its checkpoint is missing or incomplete.
        OSError: the folder cannot be read.
    """
    pointer = directory / LATEST
    try:
        name = pointer.read_bytes().decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    if _COMPLETE_NAME.fullmatch(name) is None:
        raise CheckpointError(f"{pointer} holds {name[:80]!r}, which names no checkpoint", fix=_recovery(directory))
    path = directory / name
    if path.exists():
        try:
            _check_sizes(path, _parse_manifest(path))
        except CheckpointError as error:
            why = "; ".join(filter(None, (error.what, error.why)))
            raise CheckpointError(
                f"{pointer} names {name}, which is not complete", why=why, fix=error.fix or _recovery(directory, name)
            ) from error
        return path
    for aside in sorted(directory.glob(f".{name}.replaced-*")):
        if _HIDDEN_NAME.fullmatch(aside.name) and _is_complete(aside):
            return aside
    raise CheckpointError(f"{pointer} names {name}, which does not exist", fix=_recovery(directory, name))


def _recovery(directory: Path, damaged: str = "") -> str:
    """Return the fix that names the newest complete checkpoint before a damaged one, else a later one.

    A later one may be of an abandoned run, if training resumed from an older checkpoint.

    Args:
        directory: the folder of the checkpoints.
        damaged: name of the damaged checkpoint; empty if not known.
    """
    complete = complete_checkpoints(directory) if directory.is_dir() else []
    others = [path for path in complete if path.name != damaged]
    iteration = _iteration_of(directory / damaged)
    before = [path for path in others if _iteration_of(path) < iteration or iteration < 0]
    if not others:
        return "restore the checkpoint from a copy; there is no other complete one in the folder"
    one = "the newest complete one" if iteration < 0 else "the newest complete one before it"
    if not before:
        one = "a later one, as there is no complete one before it"
    return f"to go on from {one}, write {(before or others)[-1].name} into {directory / LATEST}"


def file_names(path: Path) -> list[str]:
    """Return the names of the files of a checkpoint. Raises CheckpointError as `verify_files`."""
    names: list[str] = []
    _verified(path, lambda manifest: names.extend(manifest.files))
    return names


def verify_ranges(path: Path, ranges: Mapping[str, Iterable[tuple[int, int]]]) -> None:
    """Check the size of every file of a checkpoint, and the chunks that hold the given bytes.

    Args:
        path: the folder of the checkpoint.
        ranges: bytes [start, stop) by file name.

    Raises:
        CheckpointError: as `verify_files`.
    """

    def check(manifest: Manifest) -> None:
        for name, parts in ranges.items():
            size = manifest.chunk_bytes
            chunks = {c for start, stop in parts for c in range(start // size, -(-stop // size))}
            _check_chunks(path, name, manifest, chunks)

    _verified(path, check)


def verify_files(path: Path, names: Iterable[str] | None = None) -> None:
    """Check the size of every file of a checkpoint, and every chunk of the named ones (None: of all).

    Raises:
        CheckpointError: no checkpoint, no manifest or a damaged one, or one of a newer format; or a file that is
            missing, of another size or damaged: the text names it, its first damaged chunk and the newest complete
            checkpoint before it.
    """

    def check(manifest: Manifest) -> None:
        for name in manifest.files if names is None else names:
            _check_chunks(path, name, manifest)

    _verified(path, check)


def _verified(path: Path, check: Callable[[Manifest], None]) -> None:
    try:
        with system_errors(f"cannot read checkpoint {path}"):
            manifest = _parse_manifest(path)
            _check_sizes(path, manifest)
            check(manifest)
    except CheckpointError as error:
        fix = error.fix or _recovery(path.parent, path.name)
        raise CheckpointError(error.what, why=error.why, fix=fix) from error


def _parse_manifest(path: Path) -> Manifest:
    if not path.is_dir():
        why, fix = "there is no such folder", "pass a folder DIR/iter_..., or check DIR"
        if path.exists():
            within = is_checkpoint(path.parent)
            why = f"it is a file{' of one' if within else ''}, and a checkpoint is a folder"
            fix = f"name {path.parent}" if within else "name a folder DIR/iter_..."
        raise CheckpointError(f"{path} is not a checkpoint", why=why, fix=fix)
    try:
        text = (path / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        of_a_run = (path / LATEST).is_file()
        raise CheckpointError(
            f"{path} is not a complete checkpoint",
            why=f"it has no {MANIFEST}, which a save writes last",
            fix=f"checkpoint.latest({str(path)!r}) names the newest one in it" if of_a_run else "",
        ) from error
    try:
        return Manifest.from_bytes(text)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path}: {error.what}", why=error.why, fix=error.fix) from error


def _check_sizes(path: Path, manifest: Manifest) -> None:
    for name, record in manifest.files.items():
        try:
            size_bytes = (path / name).stat().st_size
        except FileNotFoundError as error:
            raise CheckpointError(f"checkpoint {path}: file {name} is missing") from error
        if size_bytes != record.size_bytes:
            raise CheckpointError(
                f"checkpoint {path}: file {name} has {size_bytes} bytes instead of {record.size_bytes}",
                why="it was truncated or written to after the save",
            )


def _check_chunks(path: Path, name: str, manifest: Manifest, chunks: Iterable[int] | None = None) -> None:
    if name not in manifest.files:
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} lists no file {name}")
    record = manifest.files[name]
    chosen = sorted(range(len(record.crc32)) if chunks is None else chunks)
    found = read_checksums(path / name, chosen, manifest.chunk_bytes)
    for chunk, crc32 in zip(chosen, found, strict=True):
        if crc32 != record.crc32[chunk]:
            start = chunk * manifest.chunk_bytes
            stop = min(start + manifest.chunk_bytes, record.size_bytes)
            raise CheckpointError(
                f"checkpoint {path}: file {name} is damaged in chunk {chunk + 1} of {len(record.crc32)}",
                why=f"bytes {start} to {stop} have another checksum than when they were saved",
            )
