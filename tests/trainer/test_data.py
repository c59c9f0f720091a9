"""The order of samples, batches, fingerprints, the default source, and what the options may ask for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hostward.errors import DataError
from hostward.trainer.data.dataset import MemoryTokens, TokenDataset, build_dataset, epoch_permutation
from hostward.trainer.data.documents import STDLIB_LIMIT_BYTES, stdlib_files

OPTIONS: dict[str, Any] = {
    "data_format": "auto",
    "text_key": "text",
    "tokenizer_type": "byte",
    "tokenizer_model": None,
    "seq_length": 8,
    "seed": 7,
}


def build(path: Path | str | None, **changes: Any) -> TokenDataset:
    return build_dataset(**{"path": None if path is None else str(path), **OPTIONS, **changes})


def counting(n_tokens: int, *, seq_length: int, seed: int = 7) -> TokenDataset:
    """A dataset whose token i is i, so that tokens tell positions."""
    source = MemoryTokens(np.arange(n_tokens, dtype=np.uint32), "counting")
    return TokenDataset(source, vocab_size=max(n_tokens, 1), seq_length=seq_length, seed=seed)


@settings(deadline=None)
@given(n_samples=st.integers(1, 500), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**40))
def test_an_epoch_is_a_permutation_and_repeats(n_samples: int, seed: int, epoch: int) -> None:
    order = epoch_permutation(n_samples, seed=seed, epoch=epoch)
    assert order.dtype == np.uint32
    assert sorted(order.tolist()) == list(range(n_samples))
    np.testing.assert_array_equal(order, epoch_permutation(n_samples, seed=seed, epoch=epoch))


def test_the_permutation_is_this_one_on_every_machine() -> None:
    assert epoch_permutation(8, seed=1234, epoch=0).tolist() == [7, 3, 0, 1, 4, 2, 5, 6]
    assert epoch_permutation(8, seed=1234, epoch=1).tolist() == [0, 5, 6, 4, 2, 1, 7, 3]


def test_epochs_and_seeds_give_other_orders() -> None:
    orders = {tuple(epoch_permutation(64, seed=seed, epoch=epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_samples_follow_the_permutation_of_their_epoch() -> None:
    dataset = counting(300, seq_length=8)
    for epoch in (0, 1, 2):
        inputs, _ = dataset.batch(epoch * dataset.n_samples, dataset.n_samples)
        order = epoch_permutation(dataset.n_samples, seed=7, epoch=epoch)
        assert (inputs[:, 0] // 8).tolist() == order.tolist()


@settings(deadline=None)
@given(n_tokens=st.integers(2, 300), seq_length=st.integers(1, 40), epoch=st.integers(0, 3))
def test_every_token_is_an_input_once_per_epoch(n_tokens: int, seq_length: int, epoch: int) -> None:
    if n_tokens <= seq_length:
        return
    dataset = counting(n_tokens, seq_length=seq_length)
    inputs, labels = dataset.batch(epoch * dataset.n_samples, dataset.n_samples)
    assert sorted(inputs.ravel().tolist()) == list(range(dataset.n_samples * seq_length))
    assert n_tokens - 1 - dataset.n_samples * seq_length < seq_length
    np.testing.assert_array_equal(labels, inputs + 1)


def test_labels_are_the_inputs_shifted_by_one_and_arrays_are_int64() -> None:
    inputs, labels = build(None, seq_length=64).batch(3, 5)
    assert inputs.shape == labels.shape == (5, 64)
    assert inputs.dtype == labels.dtype == np.int64
    assert inputs.flags.c_contiguous
    assert labels.flags.c_contiguous
    np.testing.assert_array_equal(inputs[:, 1:], labels[:, :-1])


@settings(deadline=None)
@given(first=st.integers(0, 200), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_the_stream_does_not_depend_on_batches_or_where_one_resumes(first: int, sizes: list[int]) -> None:
    """Also across epochs: 300 tokens make 37 samples."""
    whole = counting(300, seq_length=8)
    expected, _ = whole.batch(first, sum(sizes))
    resumed = counting(300, seq_length=8)
    parts = [resumed.batch(first + sum(sizes[:i]), size)[0] for i, size in enumerate(sizes)]
    np.testing.assert_array_equal(np.concatenate(parts), expected)


def test_two_instances_agree_and_reading_back_and_forth_changes_nothing() -> None:
    left, right = build(None, seq_length=128), build(None, seq_length=128)
    assert left.fingerprint == right.fingerprint
    far = left.n_samples * 2 + 3
    np.testing.assert_array_equal(left.sample(far), right.sample(far))
    np.testing.assert_array_equal(left.sample(0), right.sample(0))
    np.testing.assert_array_equal(left.sample(far), right.sample(far))


def test_a_negative_index_is_refused() -> None:
    with pytest.raises(DataError, match="the sample index -1 is negative"):
        counting(30, seq_length=8).sample(-1)


def test_the_fingerprint_changes_with_data_length_and_seed_but_not_with_the_place(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("the quick brown fox jumps over the lazy dog")
    base = build(text).fingerprint
    (tmp_path / "elsewhere").mkdir()
    moved = text.rename(tmp_path / "elsewhere" / "b.txt")
    assert build(moved).fingerprint == base
    others = {build(moved, seed=8).fingerprint, build(moved, seq_length=9).fingerprint}
    moved.write_text("the quick brown fox jumps over the lazy dig")
    others.add(build(moved).fingerprint)
    assert len(others | {base}) == 4


def test_the_standard_library_is_real_text_and_quick_to_build() -> None:
    start_s = time.perf_counter()
    dataset = build(None, seq_length=256)
    assert time.perf_counter() - start_s < 2
    files = stdlib_files()
    assert dataset.description.startswith(f"byte-level text of {len(files)} Python files, ")
    assert dataset.vocab_size == 320
    assert dataset.n_tokens == sum(path.stat().st_size + 1 for path in files if path.stat().st_size)
    assert 1_000_000 < dataset.n_tokens < STDLIB_LIMIT_BYTES + len(files)


def test_the_standard_library_leaves_out_packages_and_tests() -> None:
    files = stdlib_files()
    parts = {part for path in files for part in path.parts[-4:-1]}
    assert not parts & {"site-packages", "test", "tests", "__pycache__"}
    assert {"argparse.py", "dataclasses.py"} <= {path.name for path in files}
    assert files == stdlib_files()


def test_mock_data_need_no_files_and_any_part_can_be_read() -> None:
    dataset = build(None, data_format="mock", seq_length=33)
    assert dataset.description == "mock tokens, uniform over 320 ids, 16.8 M tokens"
    tokens, _ = dataset.batch(0, 300)
    assert (tokens.min(), tokens.max()) == (0, 319)
    source = dataset.source
    whole = source.read(0, 200)
    for start in range(30):
        np.testing.assert_array_equal(source.read(start, start + 50), whole[start : start + 50])
    assert (
        build(None, data_format="mock", seed=8).sample(0).tolist() != build(None, data_format="mock").sample(0).tolist()
    )


def test_a_vocabulary_that_is_given_counts() -> None:
    assert build(None, vocab_size=512).vocab_size == 512
    assert build(None, data_format="mock", tokenizer_type="null", vocab_size=11).vocab_size == 11
    assert build(None, data_format="mock", tokenizer_type="null", vocab_size=11).batch(0, 50)[0].max() == 10


def test_ids_outside_the_vocabulary_are_refused() -> None:
    source = MemoryTokens(np.arange(100, dtype=np.uint32), "counting")
    with pytest.raises(DataError, match="hold the token id 99; the vocabulary has 50 ids"):
        TokenDataset(source, vocab_size=50, seq_length=8, seed=0)


REFUSED_OPTIONS: dict[str, tuple[str | None, dict[str, Any], str]] = {
    "unknown format": (None, {"data_format": "csv"}, "dataset.format=csv is unknown.*fix: use one of: auto, text"),
    "format without a path": (None, {"data_format": "jsonl"}, "dataset.format=jsonl needs a path.*set dataset.path"),
    "path in vain": ("x", {"data_format": "mock"}, "dataset.path=x is set, but dataset.format=mock reads no path"),
    "unknown tokenizer": (
        None,
        {"tokenizer_type": "bpe"},
        "tokenizer_type=bpe is unknown.*use one of: byte, huggingface",
    ),
    "null tokenizer for text": (None, {"tokenizer_type": "null"}, "tokenizer_type=null cannot read text"),
    "no tokenizer folder": (None, {"tokenizer_type": "huggingface"}, "needs a tokenizer folder.*tokenizer_model"),
    "tokenizer in vain": (None, {"tokenizer_model": "x"}, "tokenizer_model=x is set, but .*=byte does not use it"),
    "small vocabulary": (None, {"vocab_size": 256}, "model.vocab_size=256 is smaller than the tokenizer's 257 ids"),
    "mock without vocabulary": (
        None,
        {"data_format": "mock", "tokenizer_type": "null"},
        "mock data .* need a positive",
    ),
    "sequence of no tokens": (None, {"seq_length": 0}, "model.seq_length=0 is not positive"),
    "negative seed": (None, {"seed": -1}, r"the data seed -1 is outside \[0, 2\*\*64\)"),
    "negative seed of mock": (None, {"data_format": "mock", "seed": -1}, "the data seed -1 is outside"),
}


@pytest.mark.parametrize("case", REFUSED_OPTIONS)
def test_contradictory_options_are_refused(case: str) -> None:
    path, changes, text = REFUSED_OPTIONS[case]
    with pytest.raises(DataError, match=f"(?s){text}"):
        build(path, **changes)
