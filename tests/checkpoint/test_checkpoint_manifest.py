"""The manifest: it parses back, and every other byte string is refused."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from hostward.checkpoint.manifest import FileRecord, Manifest
from hostward.errors import CheckpointError

json_texts = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["format", "files", "x"]), inner),
    max_leaves=10,
).map(lambda value: json.dumps(value).encode())
file_records = st.integers(0, 10**6).flatmap(
    lambda size: st.builds(
        FileRecord,
        st.just(size),
        st.lists(st.integers(0, 2**32 - 1), min_size=-(-size // 65536), max_size=-(-size // 65536)).map(tuple),
    )
)
names = st.text(st.characters(blacklist_characters="/\0", codec="utf-8"), min_size=1).filter(
    lambda n: n not in (".", "..")
)
manifests = st.builds(Manifest, st.integers(0, 10**9), st.just(65536), st.dictionaries(names, file_records, max_size=3))


@settings(deadline=None)
@given(manifests)
def test_a_manifest_parses_back(manifest: Manifest) -> None:
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


@settings(deadline=None)
@given(st.binary() | json_texts)
def test_any_other_text_is_a_damaged_manifest(text: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        Manifest.from_bytes(text)


def test_every_flipped_bit_of_a_manifest_is_found() -> None:
    text = Manifest(7, 100, {"a": FileRecord(150, (1, 2**32 - 1)), ".metadata": FileRecord(0, ())}).to_bytes()
    for position in range(8 * len(text)):
        flipped = bytearray(text)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            Manifest.from_bytes(bytes(flipped))


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "", ".", "..", "a\0b"])
def test_a_manifest_names_files_of_its_own_folder_only(name: str) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        Manifest.from_bytes(Manifest(1, 100, {name: FileRecord(1, (0,))}).to_bytes())
