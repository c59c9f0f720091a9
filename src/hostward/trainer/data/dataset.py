"""Build training data: one stream of tokens, cut into samples, in an endless order.

The order is a pure function of seed and index.

A sample is `seq_length` + 1 tokens; sample i of the stream begins at token i * seq_length. Inputs are its first
`seq_length` tokens, labels the next token of each, so every token is an input once per epoch (but for a tail shorter
than a sample) and the order needs no state: a resume needs the number of samples consumed, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt

from hostward.errors import DataError
from hostward.trainer.data.documents import (
    JSONL_SUFFIXES,
    PARQUET_SUFFIXES,
    find_files,
    jsonl_documents,
    parquet_documents,
    stdlib_files,
    text_documents,
)
from hostward.trainer.data.megatron_indexed import IndexedTokens, is_indexed
from hostward.trainer.data.tokenizer import Document, Tokenizer, load_tokenizer

DATA_FORMATS = ("auto", "text", "jsonl", "parquet", "indexed", "stdlib", "mock")
DEFAULT_TEXT_KEY = "text"
MOCK_TOKENS = 2**24

# Documents handed to the tokenizer at once: a fast tokenizer works on many, and memory stays bounded.
_BATCH_DOCUMENTS = 1024
_BATCH_BYTES = 16 * 2**20
_SCAN_TOKENS = 2**22
# Streams up to this length are checked against the vocabulary at the start; longer ones as they are read.
_CHECKED_AT_START_TOKENS = 2**26

Tokens = npt.NDArray[np.int64]


class TokenSource(Protocol):
    """Provides a finite stream of token ids.

    Attributes:
        description: what it is, without the number of tokens.
        identity: text that is equal for equal streams only.
    """

    description: str
    identity: str

    def __len__(self) -> int:
        """Return the number of tokens."""
        ...

    def read(self, start: int, stop: int) -> Tokens:
        """Return tokens [stop - start], int64, with 0 <= start <= stop <= len."""
        ...


@final
class MemoryTokens:
    """Holds a stream in memory, as unsigned integers of 16 or 32 bits.

    Args:
        tokens: token ids [n].
        description: see `TokenSource`.
    """

    def __init__(self, tokens: npt.NDArray[np.unsignedinteger[Any]], description: str) -> None:
        self._tokens = tokens
        self.description = description
        digest = hashlib.blake2b(np.ascontiguousarray(tokens).data, digest_size=16)
        self.identity = f"memory:{tokens.dtype.name}:{len(tokens)}:{digest.hexdigest()}"

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, start: int, stop: int) -> Tokens:
        return self._tokens[start:stop].astype(np.int64)


@final
class MockTokens:
    """Generates uniform random token ids by a counter-based generator; any part is made when it is read.

    Args:
        vocab_size: ids are in [0, vocab_size).
        seed: see `build_dataset`.
        n_tokens: length of the stream.
    """

    def __init__(self, vocab_size: int, seed: int, n_tokens: int) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._n_tokens = n_tokens
        self.description = f"mock tokens, uniform over {vocab_size:,} ids"
        self.identity = f"mock:{vocab_size}:{seed}:{n_tokens}"

    def __len__(self) -> int:
        return self._n_tokens

    def read(self, start: int, stop: int) -> Tokens:
        first_block = start // 4  # Philox makes four words per count
        words = np.random.Philox(key=_key(self._seed, 2**63), counter=first_block).random_raw(stop - 4 * first_block)
        return (words[start - 4 * first_block :] % np.uint64(self._vocab_size)).astype(np.int64)


@final
class TokenDataset:
    """Yields samples of a token stream in an endless shuffled order.

    Args:
        source: the stream.
        vocab_size: every id read must be below it.
        seq_length: tokens per sample.
        seed: seed of the order, in [0, 2**64).

    Attributes:
        vocab_size: rows of the embedding that a model needs.
        seq_length: tokens per sample.
        n_samples: samples per epoch.
        n_tokens: tokens of the stream.
        description: one line for people.
        fingerprint: hash of all that defines the order: stream, seq_length and seed. A resume on data with another
            fingerprint would silently train on other samples. Paths do not enter it: data may be moved.

    Raises:
        DataError: seq_length or seed out of range, fewer than seq_length + 1 tokens, ids outside the vocabulary.
    """

    def __init__(self, source: TokenSource, *, vocab_size: int, seq_length: int, seed: int) -> None:
        if seq_length < 1:
            raise DataError(f"model.seq_length={seq_length} is not positive", fix="set it to 1 or more")
        if not 0 <= seed < 2**64:
            raise DataError(f"the data seed {seed} is outside [0, 2**64)", fix="set rng.seed in that range")
        self.source = source
        self._seed = seed
        self.vocab_size = vocab_size
        self.seq_length = seq_length
        self.n_tokens = len(source)
        self.n_samples = (self.n_tokens - 1) // seq_length
        self.description = f"{source.description}, {_quantity(self.n_tokens)} tokens"
        if self.n_samples < 1:
            raise DataError(
                f"the data hold {self.n_tokens:,} tokens; one sample needs {seq_length + 1:,}",
                why=f"{self.description}; a sample is model.seq_length tokens and the label of the last",
                fix="give more data in dataset.path, or lower model.seq_length",
            )
        if self.n_tokens <= _CHECKED_AT_START_TOKENS:
            for tokens in _chunks(source):
                self._check_ids(tokens)
        order = {"order": 1, "source": source.identity, "seq_length": seq_length, "seed": seed}
        self.fingerprint = hashlib.blake2b(json.dumps(order, sort_keys=True).encode(), digest_size=16).hexdigest()
        self._epoch = -1
        self._permutation: npt.NDArray[np.unsignedinteger[Any]] = np.zeros(0, np.uint32)

    def sample(self, index: int) -> Tokens:
        """Return tokens [seq_length + 1], int64, of the sample at `index` >= 0 of the endless order."""
        if index < 0:
            raise DataError(f"the sample index {index} is negative", fix="count samples from 0")
        epoch, position = divmod(index, self.n_samples)
        if epoch != self._epoch:
            self._permutation = epoch_permutation(self.n_samples, seed=self._seed, epoch=epoch)
            self._epoch = epoch
        start = int(self._permutation[position]) * self.seq_length
        tokens = self.source.read(start, start + self.seq_length + 1)
        self._check_ids(tokens)
        return tokens

    def batch(self, first: int, count: int) -> tuple[Tokens, Tokens]:
        """Return inputs and labels, each [count, seq_length] int64, of samples `first` to `first + count` of the
        order.
        """
        samples = np.empty((count, self.seq_length + 1), dtype=np.int64)
        for row in range(count):
            samples[row] = self.sample(first + row)
        return np.ascontiguousarray(samples[:, :-1]), np.ascontiguousarray(samples[:, 1:])

    def _check_ids(self, tokens: Tokens) -> None:
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            raise DataError(
                f"the data hold the token id {low if low < 0 else high}; the vocabulary has {self.vocab_size:,} ids",
                why=f"reading {self.source.description}",
                fix="use the tokenizer that wrote the data, set tokenizer.tokenizer_type=null to take the vocabulary "
                "from the data, or set model.vocab_size",
            )


def build_dataset(
    *,
    path: str | None,
    data_format: str,
    text_key: str,
    tokenizer_type: str,
    tokenizer_model: str | None,
    seq_length: int,
    seed: int,
    vocab_size: int | None = None,
) -> TokenDataset:
    """Build the dataset that the options ask for.

    Text, JSON lines and parquet are tokenized here, into memory.

    Args:
        path: file, folder, or prefix of indexed data; None takes the sources of the Python standard library.
        data_format: one of `DATA_FORMATS`; `auto` goes by the suffix.
        text_key: key or column of the text, for jsonl and parquet.
        tokenizer_type: `byte`, `huggingface` or `null`.
        tokenizer_model: folder of the huggingface tokenizer.
        seq_length: tokens per sample.
        seed: seed of the order (and of mock tokens), in [0, 2**64).
        vocab_size: the model's vocabulary; None takes the tokenizer's, or the largest id + 1 of indexed data.

    Raises:
        DataError: anything about the data that is missing, empty, unreadable, malformed or contradictory.
    """
    data_format = _resolve_format(path, data_format)
    if text_key != DEFAULT_TEXT_KEY and data_format not in ("jsonl", "parquet"):
        raise DataError(
            f"dataset.text_key={text_key} has no effect: {path} is read as {data_format}, which has no keys",
            fix="leave dataset.text_key out, or set dataset.format",
        )
    tokenizer = load_tokenizer(tokenizer_type, tokenizer_model)
    if tokenizer is not None and vocab_size is not None and vocab_size < tokenizer.n_ids:
        raise DataError(
            f"model.vocab_size={vocab_size} is smaller than the tokenizer's {tokenizer.n_ids:,} ids",
            fix=f"set model.vocab_size to at least {tokenizer.n_ids}, or leave it out",
        )
    if vocab_size is None and tokenizer is not None:
        vocab_size = tokenizer.vocab_size
    source: TokenSource
    if data_format == "mock":
        if vocab_size is None or vocab_size < 1:
            raise DataError(
                "mock data with tokenizer.tokenizer_type=null need a positive vocabulary size",
                fix="set model.vocab_size, or tokenizer.tokenizer_type=byte",
            )
        source = MockTokens(vocab_size, seed, max(MOCK_TOKENS, 64 * seq_length + 1))
    elif data_format == "indexed":
        source = IndexedTokens(str(path))
    else:
        source = _tokenize(path, data_format, text_key, tokenizer)
    if vocab_size is None:
        vocab_size = 1 + max(int(tokens.max()) for tokens in _chunks(source)) if len(source) else 0
    return TokenDataset(source, vocab_size=vocab_size, seq_length=seq_length, seed=seed)


def epoch_permutation(n_samples: int, *, seed: int, epoch: int) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Return a permutation [n_samples] of range(n_samples), uint32 (uint64 from 2**32 samples on).

    It sorts words of Philox, keyed by (seed, epoch): the words are the same in every numpy version, which is not
    promised for `Generator.permutation`. Costs some 20 bytes per sample while it runs.
    """
    words = np.random.Philox(key=_key(seed, epoch)).random_raw(n_samples)
    order = np.argsort(words, kind="stable")
    return order.astype(np.uint32 if n_samples < 2**32 else np.uint64)


def _resolve_format(path: str | None, data_format: str) -> str:
    """Return the format without `auto`.

    Raises DataError if path and format contradict each other.
    """
    if data_format not in DATA_FORMATS:
        raise DataError(f"dataset.format={data_format} is unknown", fix=f"use one of: {', '.join(DATA_FORMATS)}")
    if path is None:
        if data_format in ("auto", "stdlib", "mock"):
            return "stdlib" if data_format == "auto" else data_format
        raise DataError(f"dataset.format={data_format} needs a path", fix="set dataset.path")
    if data_format in ("stdlib", "mock"):
        raise DataError(
            f"dataset.path={path} is set, but dataset.format={data_format} reads no path",
            fix="leave dataset.path out, or set dataset.format=auto",
        )
    if data_format != "auto":
        return data_format
    suffix = Path(path).suffix.lower()
    if suffix in JSONL_SUFFIXES:
        return "jsonl"
    if suffix in PARQUET_SUFFIXES:
        return "parquet"
    return "indexed" if is_indexed(path) else "text"


def _tokenize(path: str | None, data_format: str, text_key: str, tokenizer: Tokenizer | None) -> MemoryTokens:
    suffixes = {"jsonl": JSONL_SUFFIXES, "parquet": PARQUET_SUFFIXES}.get(data_format)
    files = stdlib_files() if path is None else find_files(Path(path), suffixes)
    if tokenizer is None:
        raise DataError(
            f"tokenizer.tokenizer_type=null cannot read text (dataset.format={data_format})",
            why="it means that the data are token ids already",
            fix="set tokenizer.tokenizer_type=byte or huggingface",
        )
    if data_format == "jsonl":
        documents = jsonl_documents(files, text_key)
    elif data_format == "parquet":
        documents = parquet_documents(files, text_key)
    else:
        documents = text_documents(files)
    tokens = array(tokenizer.typecode)
    end = array(tokenizer.typecode, [tokenizer.end_of_document]).tobytes()
    dtype = np.dtype(tokenizer.typecode)
    for batch in _document_batches(documents):
        for ids in tokenizer.encode(batch):
            tokens.frombytes(ids.astype(dtype).tobytes())
            tokens.frombytes(end)
    if not tokens:
        raise DataError(f"{path} is empty: it holds no text", fix="set dataset.path to data with text in it")
    if path is None:
        what = f"{len(files):,} Python files"
    else:
        what = Path(path).name + (f" ({len(files):,} files)" if len(files) > 1 else "")
    return MemoryTokens(np.frombuffer(tokens, dtype), f"{tokenizer.label} text of {what}")


def _document_batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield groups of documents, without the empty ones."""
    batch: list[Document] = []
    size_bytes = 0
    for document in documents:
        if not document.raw:
            continue
        batch.append(document)
        size_bytes += len(document.raw)
        if len(batch) == _BATCH_DOCUMENTS or size_bytes >= _BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _chunks(source: TokenSource) -> Iterator[Tokens]:
    for start in range(0, len(source), _SCAN_TOKENS):
        yield source.read(start, min(start + _SCAN_TOKENS, len(source)))


def _key(seed: int, stream: int) -> npt.NDArray[np.uint64]:
    return np.array([seed, stream], dtype=np.uint64)


def _quantity(count: int) -> str:
    """Format a count, as 1234567 to "1.2 M"."""
    for limit, unit in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return str(count)
