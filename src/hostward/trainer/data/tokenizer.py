"""Turn raw bytes of documents into token ids.

Two exist: bytes as they are, and a local Hugging Face tokenizer folder. Nothing is ever downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt

from hostward.errors import DataError, needed_for

TOKENIZER_TYPES = ("byte", "huggingface", "null")


@dataclass(frozen=True, slots=True)
class Document:
    """Holds one document before tokenization.

    Attributes:
        raw: the bytes of the text; UTF-8 where a tokenizer needs characters.
        origin: where it comes from, for error texts: a file, or a file and a line or row.
    """

    raw: bytes
    origin: str


class Tokenizer(Protocol):
    """Turns documents into token ids.

    Attributes:
        label: what it is, for the description of a dataset.
        n_ids: token ids are in [0, n_ids).
        vocab_size: rows of the embedding that a model needs; at least `n_ids`.
        end_of_document: the id that follows each document.
        typecode: `array` code of the smallest unsigned integer that holds every id.
    """

    label: str
    n_ids: int
    vocab_size: int
    end_of_document: int
    typecode: str

    def encode(self, documents: Sequence[Document]) -> list[npt.NDArray[np.integer[Any]]]:
        """Return token ids [n] of each document, without the end of document.

        Raises DataError for text it cannot take.
        """
        ...


@final
class ByteTokenizer:
    """Every byte is its own token, 0 to 255; 256 ends a document. Takes any bytes.

    The vocabulary is padded from 257 to 320, the next multiple of 64: the output projection of an odd width falls off
    the fast path of matrix units. The 63 spare ids never occur in the data.
    """

    label = "byte-level"
    n_ids = 257
    vocab_size = 320
    end_of_document = 256
    typecode = "H"

    def encode(self, documents: Sequence[Document]) -> list[npt.NDArray[np.integer[Any]]]:
        return [np.frombuffer(document.raw, dtype=np.uint8) for document in documents]


@final
class HuggingFaceTokenizer:
    """Uses the tokenizer in a local folder, as `save_pretrained` writes it.

    Documents must be UTF-8.

    Args:
        folder: the folder.

    Raises:
        DataError: the folder is missing, holds no tokenizer that can be loaded, or names no end-of-sequence token.
    """

    typecode = "I"

    def __init__(self, folder: str) -> None:
        self._tokenizer = _load(folder)
        eos = self._tokenizer.eos_token_id
        if eos is None:
            raise DataError(
                f"the tokenizer in {folder} names no end-of-sequence token",
                why="documents are joined into one stream, and that token marks where one ends",
                fix="set eos_token in its tokenizer_config.json",
            )
        self.label = f"{Path(folder).name}-tokenized"
        self.end_of_document = int(eos)
        # Added tokens may leave holes in the numbering, where the count is less than the largest id.
        self.n_ids = max(len(self._tokenizer), 1 + max(self._tokenizer.get_vocab().values()))
        self.vocab_size = self.n_ids

    def encode(self, documents: Sequence[Document]) -> list[npt.NDArray[np.integer[Any]]]:
        if not documents:
            return []
        texts = [_decode(document) for document in documents]
        ids = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [np.asarray(row, dtype=np.uint32) for row in ids]


def load_tokenizer(tokenizer_type: str, tokenizer_model: str | None) -> Tokenizer | None:
    """Load the tokenizer that the options ask for; None for `null` (the data are token ids already).

    Raises:
        MissingPackageError: transformers is not installed.
        DataError: unknown type, a folder that is missing, not given, given in vain, or that does not load.
    """
    if tokenizer_type not in TOKENIZER_TYPES:
        raise DataError(
            f"tokenizer.tokenizer_type={tokenizer_type} is unknown",
            fix=f"use one of: {', '.join(TOKENIZER_TYPES)}",
        )
    if tokenizer_type == "huggingface":
        if tokenizer_model is None:
            raise DataError(
                "tokenizer.tokenizer_type=huggingface needs a tokenizer folder",
                fix="set tokenizer.tokenizer_model to a local folder with tokenizer.json",
            )
        return HuggingFaceTokenizer(tokenizer_model)
    if tokenizer_model is not None:
        raise DataError(
            f"tokenizer.tokenizer_model={tokenizer_model} is set, but tokenizer.tokenizer_type={tokenizer_type} "
            "does not use it",
            fix="set tokenizer.tokenizer_type=huggingface, or leave tokenizer.tokenizer_model out",
        )
    return ByteTokenizer() if tokenizer_type == "byte" else None


def _load(folder: str) -> Any:
    if not Path(folder).is_dir():
        raise DataError(
            f"tokenizer.tokenizer_model={folder} is not a local folder",
            why="tokenizers are read from disk; nothing is downloaded",
            fix="give the path of a folder with tokenizer.json or the tokenizer's own vocabulary files",
        )
    with needed_for("tokenizer.tokenizer_type=huggingface", "train"):
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoTokenizer
    wrong = OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, StrictDataclassError
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except wrong as error:
        lines = (
            str(error).split("\n") if isinstance(error, StrictDataclassError) else str(error).strip().splitlines()[:1]
        )
        raise DataError(
            f"the tokenizer in {folder} cannot be loaded",
            why=f"{type(error).__name__}: {' '.join(map(str.strip, lines)) or 'no detail'}",
            fix="write the folder again with save_pretrained of the tokenizer",
        ) from error


def _decode(document: Document) -> str:
    try:
        return document.raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{document.origin} is not UTF-8: byte 0x{document.raw[error.start]:02x} at offset {error.start}",
            why="this tokenizer reads characters, not bytes",
            fix="convert the file to UTF-8, or set tokenizer.tokenizer_type=byte, which takes any bytes",
        ) from error
