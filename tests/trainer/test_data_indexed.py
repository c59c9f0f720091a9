"""Megatron's indexed data: the layout byte for byte, scattered sequences, and damaged files."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hostward.errors import DataError
from hostward.trainer.data.dataset import TokenDataset, build_dataset
from hostward.trainer.data.megatron_indexed import IndexedTokens, write_indexed


def build(path: Path | str, **changes: Any) -> TokenDataset:
    options: dict[str, Any] = {
        "data_format": "auto",
        "text_key": "text",
        "tokenizer_type": "null",
        "tokenizer_model": None,
        "seq_length": 4,
        "seed": 0,
    }
    return build_dataset(path=str(path), **(options | changes))


def refused(path: Path | str, text: str, **changes: Any) -> None:
    with pytest.raises(DataError, match=f"(?s){text}"):
        build(path, **changes)


def index_bytes(
    lengths: list[int], pointers: list[int], documents: list[int], *, code: int = 8, version: int = 1
) -> bytes:
    """An index put together by hand, apart from the writer under test."""
    n = len(lengths)
    return (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", version, code, n, len(documents))
        + struct.pack(f"<{n}i", *lengths)
        + struct.pack(f"<{n}q", *pointers)
        + struct.pack(f"<{len(documents)}q", *documents)
    )


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Three documents, 10 tokens: 0 to 9."""
    write_indexed(str(tmp_path / "c4.v1"), [[0, 1, 2], [3, 4], [5, 6, 7, 8, 9]], dtype=np.uint16)
    return tmp_path / "c4.v1"


def replace(path: Path, at: int, new: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[at : at + len(new)] = new
    path.write_bytes(raw)


def test_the_writer_writes_the_layout_byte_for_byte(prefix: Path) -> None:
    assert Path(f"{prefix}.idx").read_bytes() == index_bytes([3, 2, 5], [0, 6, 10], [0, 1, 2, 3])
    assert Path(f"{prefix}.bin").read_bytes() == struct.pack("<10H", *range(10))


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_prefix_and_either_file_name_the_data(prefix: Path, suffix: str) -> None:
    dataset = build(f"{prefix}{suffix}")
    assert (dataset.n_tokens, dataset.n_samples, dataset.vocab_size) == (10, 2, 10)
    assert dataset.description == "indexed data c4.v1 (3 documents, uint16), 10 tokens"
    inputs, labels = dataset.batch(0, 2)
    assert sorted(inputs.ravel().tolist()) == list(range(8))
    np.testing.assert_array_equal(labels, inputs + 1)


DTYPES = ["uint8", "int8", "int16", "int32", "int64", "uint16"]


@settings(deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 127), max_size=12), min_size=1, max_size=8),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_what_is_written_is_read_at_every_range(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], dtype: str, data: st.DataObject
) -> None:
    prefix = tmp_path_factory.mktemp("indexed") / "d"
    write_indexed(str(prefix), documents, dtype=dtype)
    source = IndexedTokens(str(prefix))
    flat = [token for document in documents for token in document]
    start = data.draw(st.integers(0, len(flat)))
    stop = data.draw(st.integers(start, len(flat)))
    assert len(source) == len(flat)
    assert source.n_documents == len(documents)
    assert source.read(start, stop).tolist() == flat[start:stop]
    assert source.read(start, stop).dtype == np.int64


def test_the_largest_values_of_wide_dtypes_survive(tmp_path: Path) -> None:
    for dtype, value in (("uint16", 65535), ("int32", 2**31 - 1), ("int64", 2**40)):
        write_indexed(str(tmp_path / dtype), [[0, 1, 2, 3, value]], dtype=dtype)
        assert build(tmp_path / dtype).sample(0).tolist() == [0, 1, 2, 3, value]


def test_scattered_shared_and_empty_sequences_follow_the_index(tmp_path: Path) -> None:
    """Pointers, not the order of the .bin, say where a sequence lies; a document may have several."""
    (tmp_path / "d.bin").write_bytes(b"\xff" + struct.pack("<6H", 10, 11, 12, 13, 14, 15))
    lengths, pointers = [2, 0, 3, 2, 0], [9, 1, 1, 9, 13]
    (tmp_path / "d.idx").write_bytes(index_bytes(lengths, pointers, [0, 3, 5]) + bytes(5))  # with modes
    source = IndexedTokens(str(tmp_path / "d"))
    assert source.n_documents == 2
    assert source.read(0, 7).tolist() == [14, 15, 10, 11, 12, 14, 15]
    assert source.read(1, 6).tolist() == [15, 10, 11, 12, 14]


def test_a_file_of_that_name_is_text_even_beside_indexed_data(prefix: Path) -> None:
    prefix.write_text("plain text")
    assert build(prefix, tokenizer_type="byte").n_tokens == 11
    assert build(prefix, data_format="indexed").n_tokens == 10


def test_fingerprint_sees_tokens_and_index(prefix: Path, tmp_path: Path) -> None:
    base = build(prefix).fingerprint
    write_indexed(str(tmp_path / "copy"), [[0, 1, 2], [3, 4], [5, 6, 7, 8, 9]], dtype=np.uint16)
    assert build(tmp_path / "copy").fingerprint == base
    write_indexed(str(tmp_path / "cut"), [[0, 1], [2, 3, 4], [5, 6, 7, 8, 9]], dtype=np.uint16)
    write_indexed(str(tmp_path / "ids"), [[0, 1, 2], [3, 4], [5, 6, 7, 8, 8]], dtype=np.uint16)
    assert len({base, build(tmp_path / "cut").fingerprint, build(tmp_path / "ids").fingerprint}) == 3


def test_ids_outside_the_vocabulary(prefix: Path, tmp_path: Path) -> None:
    assert build(prefix, vocab_size=10).vocab_size == 10
    refused(prefix, "hold the token id 9; the vocabulary has 9 ids.*tokenizer_type=null", vocab_size=9)
    write_indexed(str(tmp_path / "large"), [[400] * 9], dtype=np.uint16)
    refused(tmp_path / "large", "hold the token id 400; the vocabulary has 320 ids", tokenizer_type="byte")
    write_indexed(str(tmp_path / "negative"), [[5, -2, 3, 4, 5]], dtype=np.int32)
    refused(tmp_path / "negative", "hold the token id -2; the vocabulary has 6 ids")


def test_missing_and_empty_files(prefix: Path) -> None:
    refused(f"{prefix}.none", "none does not exist")
    refused(f"{prefix}.none", r"none.idx does not exist", data_format="indexed")
    index = Path(f"{prefix}.idx")
    saved = index.read_bytes()
    index.write_bytes(b"")
    refused(prefix, "c4.v1.idx is truncated: it has 0 bytes, and its index needs 34")
    index.unlink()
    refused(prefix, "c4.v1.idx does not exist")
    index.write_bytes(saved)
    Path(f"{prefix}.bin").write_bytes(b"")
    refused(prefix, "c4.v1.bin is truncated: it has 0 bytes, and its index needs 20")
    Path(f"{prefix}.bin").unlink()
    refused(prefix, "c4.v1.bin does not exist")


def test_data_without_sequences_or_tokens(tmp_path: Path) -> None:
    write_indexed(str(tmp_path / "none"), [])
    refused(
        tmp_path / "none",
        "none.idx lists no sequences: the data are empty.*fix: write them again from documents with text",
    )
    write_indexed(str(tmp_path / "blank"), [[], []])
    refused(tmp_path / "blank", "the data hold 0 tokens; one sample needs 5")


def test_every_truncation_of_the_index_is_refused(prefix: Path) -> None:
    index = Path(f"{prefix}.idx")
    whole = index.read_bytes()
    for length in range(len(whole)):
        index.write_bytes(whole[:length])
        refused(prefix, f"c4.v1.idx is truncated: it has {length} bytes, and its index needs (34|102)")


def test_every_truncation_of_the_tokens_is_refused(prefix: Path) -> None:
    data = Path(f"{prefix}.bin")
    whole = data.read_bytes()
    for length in range(len(whole)):
        data.write_bytes(whole[:length])
        refused(prefix, f"c4.v1.bin is truncated: it has {length} bytes, and its index needs 20")


DAMAGE: dict[str, tuple[int, bytes, str]] = {
    "magic": (0, b"TNTIDX", "c4.v1.idx is not an index of Megatron's format.*begins with b'TNTIDX"),
    "version": (9, b"\x02", "has version 2; only version 1 is known"),
    "dtype": (17, b"\x09", "names token dtype 9; known are 1 to 8"),
    "float dtype": (17, b"\x07", "holds float32 values, which are no token ids"),
    "sequence count": (18, struct.pack("<Q", 2), "has 12 bytes more than its header declares"),
    "huge count": (18, struct.pack("<Q", 2**63), "is truncated: it has 102 bytes"),
    "negative length": (34, struct.pack("<i", -1), "holds a negative length or offset"),
    "negative offset": (46, struct.pack("<q", -2), "holds a negative length or offset"),
    "huge offset": (46, struct.pack("<q", 2**63 - 1), "c4.v1.bin is truncated"),
    "long sequence": (34, struct.pack("<i", 11), "c4.v1.bin is truncated: it has 20 bytes, and its index needs 22"),
    "first document": (70, struct.pack("<q", 1), "document boundaries of .* do not run from 0 to its 3 sequences"),
    "falling documents": (78, struct.pack("<q", 3), "document boundaries of .* do not run from 0 to its 3 sequences"),
    "last document": (94, struct.pack("<q", 4), "document boundaries of .* do not run from 0 to its 3 sequences"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_index(prefix: Path, case: str) -> None:
    at, new, text = DAMAGE[case]
    replace(Path(f"{prefix}.idx"), at, new)
    refused(prefix, text)


@settings(deadline=None)
@given(at=st.integers(0, 101), value=st.integers(0, 255))
def test_any_byte_of_the_index_may_change_without_a_crash(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int
) -> None:
    prefix = tmp_path_factory.mktemp("indexed") / "d"
    write_indexed(str(prefix), [[0, 1, 2], [3, 4], [5, 6, 7, 8, 9]], dtype=np.uint16)
    replace(Path(f"{prefix}.idx"), at, bytes([value]))
    try:
        dataset = build(prefix, seq_length=1)
        dataset.batch(0, dataset.n_samples)
    except DataError:
        pass


def test_the_writer_refuses_what_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)document 1 holds a token id that does not fit uint16.*from 1 to 65536"):
        write_indexed(str(tmp_path / "d"), [[0], [1, 65536]], dtype=np.uint16)
    with pytest.raises(DataError, match="cannot hold tokens of dtype float32"):
        write_indexed(str(tmp_path / "d"), [[0]], dtype=np.float32)
    with pytest.raises(DataError, match=r"d\.bin does not exist"):
        write_indexed(str(tmp_path / "absent" / "d"), [[0]])
