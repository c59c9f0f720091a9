"""Text, JSON lines, parquet and tokenizer folders: what they give, and each bad input with its text."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hostward.errors import DataError, MissingPackageError
from hostward.trainer.data.dataset import TokenDataset, build_dataset
from hostward.trainer.data.documents import jsonl_documents
from hostward.trainer.data.tokenizer import ByteTokenizer, Document

END = ByteTokenizer.end_of_document


def build(path: Path, **changes: Any) -> TokenDataset:
    options: dict[str, Any] = {
        "data_format": "auto",
        "text_key": "text",
        "tokenizer_type": "byte",
        "tokenizer_model": None,
        "seq_length": 2,
        "seed": 0,
    }
    return build_dataset(path=str(path), **(options | changes))


def stream(dataset: TokenDataset) -> list[int]:
    return dataset.source.read(0, dataset.n_tokens).tolist()


def refused(path: Path, text: str, **changes: Any) -> None:
    with pytest.raises(DataError, match=f"(?s){text}"):
        build(path, **changes)


def write_jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A word-level tokenizer whose numbering has a hole: six tokens, largest id 9."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocabulary = {"<eos>": 0, "<unk>": 1, "hello": 2, "world": 3, "the": 4, "fox": 9}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    # Adds <eos> by itself when asked for special tokens, which must not double the end of a document.
    words.post_processor = tokenizers.processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 0)])
    folder = tmp_path_factory.mktemp("tokenizer") / "words"
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(folder)
    return folder


@contextmanager
def without_privileges() -> Iterator[None]:
    """Runs the block as a user to whom permissions apply; root may read everything."""
    if os.geteuid() != 0:
        yield
        return
    try:
        os.seteuid(65534)
    except OSError:
        pytest.skip("cannot give up root here")
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter, as `tmp_path` is not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_text_file_is_one_document_of_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"ab\xff\x00c")
    dataset = build(path)
    assert stream(dataset) == [97, 98, 255, 0, 99, 256]
    assert dataset.description == "byte-level text of a.txt, 6 tokens"


def test_a_folder_is_read_by_relative_path_without_hidden_and_empty_files(tmp_path: Path) -> None:
    for name, text in {"b.txt": "B", "a/z.md": "A", ".hidden": "H", ".git/x": "G", "a-b": "-", "empty": ""}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    dataset = build(tmp_path)
    assert stream(dataset) == [ord("-"), END, ord("A"), END, ord("B"), END]
    assert dataset.description == f"byte-level text of {tmp_path.name} (4 files), 6 tokens"


@settings(deadline=None)
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=8))
def test_json_lines_give_back_each_text(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = write_jsonl(tmp_path_factory.mktemp("jsonl") / "a.jsonl", *({"id": 1, "body": text} for text in texts))
    documents = list(jsonl_documents([path], "body"))
    assert [document.raw.decode() for document in documents] == texts
    assert [document.origin for document in documents] == [f"{path} line {i + 1}" for i in range(len(texts))]


@settings(deadline=None)
@given(line=st.binary(max_size=40))
def test_any_line_is_a_document_or_a_data_error(tmp_path_factory: pytest.TempPathFactory, line: bytes) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    path.write_bytes(line)
    try:
        documents = list(jsonl_documents([path], "text"))
    except DataError as error:
        documents = [Document(b"", error.what)]
    assert all(document.origin.startswith(f"{path} line ") for document in documents)


def test_json_lines_by_suffix_folder_and_key(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.json", {"body": "B"})
    write_jsonl(tmp_path / "a.jsonl", {"body": "A"}, {"body": ""}, {"body": "é"})
    (tmp_path / "README").write_text("not data")
    assert stream(build(tmp_path / "a.jsonl", text_key="body")) == [65, END, 0xC3, 0xA9, END]
    assert stream(build(tmp_path, data_format="jsonl", text_key="body")) == [65, END, 0xC3, 0xA9, END, 66, END]


def test_parquet_gives_the_column_over_row_groups(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    texts = [f"document {i}" for i in range(2500)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": range(2500), "body": texts}), path, row_group_size=700)
    expected = [token for text in texts for token in [*text.encode(), END]]
    assert stream(build(path, text_key="body")) == expected


def test_parquet_bad_input(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": [1, 2], "body": ["x", None]}), path)
    refused(path, "a.parquet has no column 'text'; its columns are: body, n.*dataset.text_key")
    refused(path, "the column 'n' of .*a.parquet holds int64, not text", text_key="n")
    refused(path, "a.parquet row 2 holds null in 'body', not text", text_key="body")
    path.write_bytes(path.read_bytes()[:-10])
    refused(path, "a.parquet is not a readable parquet file.*why: .*fix: ", text_key="body")
    path.write_bytes(b"")
    refused(path, "a.parquet is not a readable parquet file")
    path.unlink()
    refused(path, "a.parquet does not exist")


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingPackageError, match=r"needs the package pyarrow, .*\n.*\n.*'hostward\[train\]'"):
        build(tmp_path / "a.parquet")


def test_a_tokenizer_folder_gives_its_ids_and_its_end_of_document(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", {"text": "hello world"}, {"text": "the nobody fox"})
    dataset = build(path, tokenizer_type="huggingface", tokenizer_model=str(tokenizer_folder))
    assert stream(dataset) == [2, 3, 0, 4, 1, 9, 0]
    assert dataset.vocab_size == 10  # the largest id counts, not the number of tokens
    assert dataset.description == "words-tokenized text of a.jsonl, 7 tokens"
    assert dataset.fingerprint != build(path).fingerprint


def test_many_documents_are_tokenized_in_batches_in_order(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", *({"text": "hello " * (i % 3 + 1)} for i in range(2100)))
    dataset = build(path, tokenizer_type="huggingface", tokenizer_model=str(tokenizer_folder))
    assert stream(dataset) == [token for i in range(2100) for token in [2] * (i % 3 + 1) + [0]]


def test_tokenizer_folder_bad_input(tmp_path: Path, tokenizer_folder: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(b"hello \xff world")
    options: dict[str, Any] = {"tokenizer_type": "huggingface", "tokenizer_model": str(tokenizer_folder)}
    refused(text, r"a.txt is not UTF-8: byte 0xff at offset 6.*reads characters.*tokenizer_type=byte", **options)
    refused(text, "is not a local folder.*nothing is downloaded", **(options | {"tokenizer_model": "gpt2"}))
    (tmp_path / "empty").mkdir()
    refused(
        text, "the tokenizer in .*empty cannot be loaded", **(options | {"tokenizer_model": str(tmp_path / "empty")})
    )
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (broken / name).write_bytes((tokenizer_folder / name).read_bytes())
    config = json.loads((broken / "tokenizer_config.json").read_text())
    (broken / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "eos_token"}))
    refused(text, "names no end-of-sequence token.*set eos_token", **(options | {"tokenizer_model": str(broken)}))
    (broken / "tokenizer.json").write_text("{garbage")
    refused(text, "broken cannot be loaded.*why: JSONDecodeError", **(options | {"tokenizer_model": str(broken)}))


BAD_LINES: dict[str, tuple[bytes, str]] = {
    "malformed": (
        b'{"text": "a"}\n\n{"text": \n',
        "a.jsonl line 3 is not valid JSON.*Expecting value.*one JSON object",
    ),
    "not UTF-8": (b'{"text": "a"}\n{"text": "\xff"}\n', "a.jsonl line 2 is not valid JSON.*'utf-8' codec"),
    "too deep": (b"[" * 100_000 + b"\n", "a.jsonl line 1 is not valid JSON.*recursion"),
    "not an object": (b'["text"]\n', "a.jsonl line 1 is a JSON list, not an object"),
    "no such key": (b'{"b": 1, "a": 2}\n', "line 1 has no key 'text'; its keys are: a, b.*dataset.text_key"),
    "no keys": (b"{}\n", "line 1 has no key 'text'; its keys are: none"),
    "not text": (b'{"text": 3}\n', "line 1 holds a value of type int in 'text', not text"),
    "null": (b'{"text": null}\n', "line 1 holds null in 'text', not text"),
    "half a surrogate pair": (b'{"text": "\\ud800"}\n', "line 1 has half a surrogate pair in 'text'"),
    "only empty texts": (b'{"text": ""}\n', "a.jsonl is empty: it holds no text"),
    "empty file": (b"", "a.jsonl is empty: it holds no text"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_json_lines(tmp_path: Path, case: str) -> None:
    content, text = BAD_LINES[case]
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    refused(path, text)


def test_files_and_folders_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = "fix: set dataset.path to a file or folder that is there, or to PREFIX where PREFIX.bin and PREFIX.idx are"
    refused(tmp_path / "absent.txt", f"absent.txt does not exist\n  {there}")
    monkeypatch.chdir(tmp_path)
    refused(Path("absent.txt"), f"^absent.txt does not exist\n  why: the path is relative to {tmp_path}\n  {there}")
    (tmp_path / "empty.txt").touch()
    refused(tmp_path / "empty.txt", "empty.txt is empty: it holds no text.*fix: set dataset.path to data with text")
    refused(tmp_path, "is empty: it holds no text")
    refused(
        tmp_path, "holds no .parquet file.*fix: set dataset.path to a folder with such files, or", data_format="parquet"
    )
    (tmp_path / "empty.txt").unlink()
    refused(tmp_path, "holds no files.*fix: put text into it, or set dataset.path to")
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    refused(
        tmp_path / "loop.txt", "loop.txt cannot be read: Too many levels of symbolic links.*fix: repair the file, or"
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.bin"])
def test_a_folder_of_another_format_is_not_read_as_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x")
    refused(tmp_path, f"holds {name}, which is not plain text.*set dataset.format")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.idx"])
def test_no_permission_to_read(name: str, open_folder: Path) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow.parquet")
    path = open_folder / name
    path.write_text("text")
    path.chmod(0)
    with without_privileges():
        refused(path, f"{name} cannot be read: permission denied.*fix: give this user the right to read it, or set")


def test_no_permission_to_list_a_folder(open_folder: Path) -> None:
    (open_folder / "closed").mkdir(mode=0)
    with without_privileges():
        refused(open_folder, "closed cannot be read: permission denied")


def test_fewer_tokens_than_a_sample(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x" * 7)
    refused(path, "the data hold 8 tokens; one sample needs 9.*lower model.seq_length", seq_length=8)
    assert build(path, seq_length=7).n_samples == 1
    np.testing.assert_array_equal(build(path, seq_length=7).sample(0), [120] * 7 + [END])
