"""Tensors are cut into pieces of bounded size, written by several threads, and come back whole."""

from __future__ import annotations

import errno
import fcntl
import io
import math
import mmap
import os
import tempfile
import zipfile
import zlib
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings

from hostward.checkpoint import api, files, writer
from hostward.checkpoint.manifest import CHUNK_BYTES, FileRecord, read_checksums
from hostward.checkpoint.save_plan import boxes_of
from hostward.checkpoint.writer import BLOCK_BYTES, STAGED_BYTES, CheckedFile, DirectFile, new_file, save_tensor
from hostward.errors import CheckpointError
from hostward.plan.memory_model import PIECE_BYTES, writer_count


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 400), st.sampled_from([2, 8, 64]))
def test_boxes_begin_at_blocks_where_they_hold_one(sizes: list[int], most: int, block: int) -> None:
    """So that the disk reads them from where they lie. Where whole rows make none, they are cut as without."""
    found = list(boxes_of(sizes, most, block))
    assert all(math.prod(lengths) <= most for _, lengths in found)
    for axis, size in enumerate(sizes):
        below = math.prod(sizes[axis + 1 :])
        if math.prod(sizes) > most and below <= most:  # this is the axis that is cut
            rows = block // math.gcd(block, below)
            if rows * below <= most:
                assert all(offsets[axis] % rows == 0 for offsets, _ in found)
            elif axis == 0:
                assert found == list(boxes_of(sizes, most))
            assert sum(lengths[axis] for offsets, lengths in found if not any(offsets[:axis])) == size
            break


@settings(deadline=None)
@given(st.lists(st.integers(0, 7), max_size=4), st.integers(1, 40))
def test_boxes_cover_a_tensor_in_runs_of_bounded_size(sizes: list[int], most: int) -> None:
    numbers = torch.arange(math.prod(sizes)).view(sizes)
    found = []
    for offsets, lengths in boxes_of(sizes, most):
        box = numbers[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
        assert list(box.shape) == lengths
        assert box.numel() <= most
        found += box.flatten().tolist()
    assert found == list(range(numbers.numel()))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint whose first tensor is of three pieces, and a view without all of its columns."""
    whole = torch.arange(3 * PIECE_BYTES // 4, dtype=torch.int32).view(6, -1)
    tensors = {"rows": whole, "view": whole[:, 5:105], "one": torch.tensor(3)}
    return api.save(tmp_path_factory.mktemp("large"), 1, tensors=tensors, plain={}), tensors


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pieces_come_back_and_dcp_reads_them(large: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = large
    assert len(list(path.glob("*.distcp"))) == min(3, writer_count())
    for load in (api.load, lambda p, into: dcp.load(into, checkpoint_id=p, no_dist=True)):
        into = {name: torch.zeros_like(t, memory_format=torch.contiguous_format) for name, t in tensors.items()}
        load(path, into)
        assert all(torch.equal(into[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("ranks", "cores", "writers"), [(1, 64, 8), (2, 64, 4), (8, 64, 2), (4, 2, 2), (2, 1, 1), (1, 3, 3)]
)
def test_ranks_of_a_machine_share_its_writers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, cores: int, writers: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    pieces = torch.empty(9, PIECE_BYTES, dtype=torch.uint8)
    path = api.save(tmp_path, 1, tensors={"t": pieces}, plain={})
    assert len(list(path.glob("*.distcp"))) == writers


def members(path: Path) -> dict[str, bytes]:
    """Of an archive whose members are stored as they are; their checksums are not looked at."""
    data = path.read_bytes()
    found = {}
    for member in zipfile.ZipFile(io.BytesIO(data)).infolist():
        names = int.from_bytes(data[member.header_offset + 26 :][:2], "little")
        extra = int.from_bytes(data[member.header_offset + 28 :][:2], "little")
        start = member.header_offset + 30 + names + extra
        found[member.filename.partition("/")[2]] = data[start : start + member.file_size]
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int16, torch.float8_e4m3fn])
def test_a_piece_is_what_torch_saves(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randn(300, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    for name in ("piece", "again"):
        with new_file(tmp_path / name, direct=False) as file:
            save_tensor(tensor, file)
    saved = io.BytesIO()  # as a file's, its archive would have the file's name
    torch.save(tensor, saved)
    (tmp_path / "saved").write_bytes(saved.getvalue())
    piece, whole = members(tmp_path / "piece"), members(tmp_path / "saved")
    for found in (piece, whole):
        del found[".data/serialization_id"]  # made of checksums, and read by nothing
    assert list(piece) == list(whole)
    assert piece == whole
    assert (tmp_path / "piece").read_bytes() == (tmp_path / "again").read_bytes()
    assert zipfile.ZipFile(tmp_path / "piece").testzip() is not None  # has no checksums of its own
    loaded = torch.load(tmp_path / "piece", weights_only=True)
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


def test_checksums_are_those_of_zlib(tmp_path: Path) -> None:
    """Of earlier checkpoints, and of who checks them without hostward."""
    data = os.urandom(2 * CHUNK_BYTES + 12345)
    with new_file(tmp_path / "file", direct=False) as file:
        for first in range(0, len(data), 5_000_011):
            file.write(data[first : first + 5_000_011])
    chunks = [data[first : first + CHUNK_BYTES] for first in range(0, len(data), CHUNK_BYTES)]
    assert list(file.record().crc32) == [zlib.crc32(chunk) for chunk in chunks]
    assert read_checksums(tmp_path / "file", range(len(chunks)), CHUNK_BYTES) == [zlib.crc32(c) for c in chunks]


def test_the_disk_begins_chunk_by_chunk_and_memory_lets_go_of_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: all of it left to `fsync`; each byte asked for once, when the disk has not yet written it."""
    asked: list[tuple[int, int]] = []
    there: list[int] = []

    def advise(descriptor: int, start: int, size_bytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        there.append(os.fstat(descriptor).st_size)
        asked.append((start, start + size_bytes))

    monkeypatch.setattr("hostward.checkpoint.writer.os.posix_fadvise", advise)
    with new_file(tmp_path / "file", direct=False) as file:
        for size_bytes in (5, CHUNK_BYTES, 3, CHUNK_BYTES - 8, *[CHUNK_BYTES] * 10, 1):
            file.write(bytes(size_bytes))
    assert [stop for _, stop in asked] == there
    new = [stop - before for stop, before in zip(there, [0, *there], strict=False)]
    assert min(new) >= CHUNK_BYTES
    assert file.size_bytes - there[-1] < CHUNK_BYTES
    first = there[0]
    assert sum(start < first for start, _ in asked) >= 5  # again, behind 4 other chunks
    assert asked[-1][0] > first  # and then no more
    with new_file(tmp_path / "settled", direct=False) as file:
        file.write(bytes(5))
        file.settle()
    assert asked[-1] == (0, 5)


class Writes:
    """What a file is asked to write, in place of the disk's own rules: those of O_DIRECT are checked on any disk."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = DirectFile(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        self.addresses: list[int] = []
        self.lengths: list[int] = []
        self._write = writer.write_all
        monkeypatch.setattr(writer, "write_all", self._note)

    def _note(self, descriptor: int, data: memoryview) -> None:
        self.addresses.append(writer.address_of(data) if data else 0)
        self.lengths.append(len(data))
        self._write(descriptor, data)


@given(
    sizes=st.lists(
        st.one_of(st.integers(0, 5000), st.integers(STAGED_BYTES - 2, STAGED_BYTES + 4100), st.integers(0, 5 << 20)),
        max_size=8,
    ),
    shift=st.sampled_from([0, 64, 4095]),
    begin=st.booleans(),
)
@settings(max_examples=30)
def test_past_the_page_cache_all_is_written_in_whole_blocks(sizes: list[int], shift: int, begin: bool) -> None:
    data = memoryview(mmap.mmap(-1, (6 << 20) + BLOCK_BYTES))
    data[:] = (os.urandom(BLOCK_BYTES - 1) * 2000)[: len(data)]
    expected = bytearray()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        path = Path(folder) / "file"
        writes = Writes(path, monkeypatch)
        with writes.file as file:
            for size_bytes in sizes:
                if begin:
                    expected += bytes(file.begin(size_bytes) - len(expected))
                    assert size_bytes < STAGED_BYTES or len(expected) % BLOCK_BYTES == 0
                assert file.write(data[shift : shift + size_bytes]) == size_bytes
                expected += data[shift : shift + size_bytes]
            file.settle()
        assert path.read_bytes() == expected
        starts = range(0, len(expected), CHUNK_BYTES)
        chunks = [expected[start : start + CHUNK_BYTES] for start in starts]
        assert file.record() == FileRecord(len(expected), tuple(zlib.crc32(chunk) for chunk in chunks))
        assert all(length % BLOCK_BYTES == 0 for length in writes.lengths[:-1])  # and the last has a file that takes it
        assert all(address % BLOCK_BYTES == 0 for address in writes.addresses)


def test_past_the_page_cache_much_is_written_from_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.frombuffer(mmap.mmap(-1, 4 << 20), dtype=torch.float32)
    torch.randn(tensor.shape, out=tensor)
    writes = Writes(tmp_path / "file", monkeypatch)
    archives = []
    with writes.file as file:
        file.write(b"something before")
        for _ in range(2):
            start = file.begin(tensor.nbytes)
            save_tensor(tensor, file)
            archives.append((start, file.size_bytes))
        file.settle()
    assert writes.addresses.count(tensor.data_ptr()) == 2
    assert writes.lengths.count(tensor.nbytes) == 2
    content = (tmp_path / "file").read_bytes()
    for start, end in archives:
        loaded = torch.load(io.BytesIO(content[start:end]), weights_only=True)
        assert torch.equal(loaded, tensor)


def test_small_pieces_are_not_spread_over_blocks(tmp_path: Path) -> None:
    sizes = {}
    for direct in (False, True):
        with new_file(tmp_path / f"{direct}", direct=direct) as file:
            for _ in range(10):
                file.begin(400)
                save_tensor(torch.zeros(100), file)
            file.settle()
        sizes[direct] = file.size_bytes
    assert sizes[True] == sizes[False] == (tmp_path / "True").stat().st_size


def test_a_file_system_that_takes_none_past_its_cache_gets_a_plain_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some make the file, and then refuse."""
    opened, fails_with = os.open, errno.EINVAL

    def refuses(path: Path, flags: int, mode: int = 0o777) -> int:
        descriptor = opened(path, flags & ~os.O_DIRECT, mode)
        if flags & os.O_DIRECT:
            os.close(descriptor)
            raise OSError(fails_with, os.strerror(fails_with), str(path))
        return descriptor

    monkeypatch.setattr("hostward.checkpoint.writer.os.open", refuses)
    with new_file(tmp_path / "file", direct=True) as file:
        assert type(file) is CheckedFile
        file.write(b"bits")
    assert (tmp_path / "file").read_bytes() == b"bits"
    fails_with = errno.EACCES
    with pytest.raises(PermissionError):
        new_file(tmp_path / "other", direct=True)


def test_a_disk_of_larger_blocks_is_written_through_the_cache(tmp_path: Path) -> None:
    with new_file(tmp_path / "file", direct=True) as file:
        if not isinstance(file, DirectFile):
            pytest.skip("this file system takes none past its cache")
        file.write(bytes(STAGED_BYTES))
        writer.write_all(file.fileno(), memoryview(b"bits"))  # no block of this disk either
        file.write(b"more")
        file.settle()
    assert (tmp_path / "file").read_bytes() == bytes(STAGED_BYTES) + b"bitsmore"


def test_a_disk_that_takes_nothing_is_not_asked_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr("hostward.checkpoint.writer.os.write", refuses)
    for direct in (False, True):
        with (
            new_file(tmp_path / f"{direct}", direct=direct) as file,
            pytest.raises(OSError, match="Invalid argument"),
        ):
            file.write(bytes(STAGED_BYTES))


def test_files_pass_the_page_cache_where_they_can(tmp_path: Path) -> None:
    with new_file(tmp_path / "file", direct=True) as file:
        flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
        assert bool(flags & os.O_DIRECT) == isinstance(file, DirectFile)


def test_only_the_chunks_that_are_read_have_to_be_sound(large: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, _ = large
    name = "__0_0.distcp"
    size_bytes = (path / name).stat().st_size
    with (path / name).open("r+b") as file:
        file.seek(size_bytes - 5)
        byte = file.read(1)
        file.seek(size_bytes - 5)
        file.write(bytes([byte[0] ^ 1]))
    try:
        files.verify_ranges(path, {name: [(0, 100)]})
        with pytest.raises(CheckpointError, match=f"{name} is damaged in chunk"):
            files.verify_ranges(path, {name: [(0, 100), (size_bytes - 10, size_bytes)]})
        with pytest.raises(CheckpointError, match=f"{name} is damaged in chunk"):
            api.verify(path)
    finally:
        with (path / name).open("r+b") as file:
            file.seek(size_bytes - 5)
            file.write(byte)
