"""The fix for a full device follows from torch's own message. The allocator's option was named for each of the lines,
and for none of them, in one run of the tests each: red.
"""

from __future__ import annotations

import os

import pytest

from hostward.cli import app
from hostward.core.full_device import fix_of

OPTION = "PYTORCH_ALLOC_CONF=expandable_segments:True"
OLDER = "PYTORCH_CUDA_ALLOC_CONF"
MESSAGE = (
    "CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 139.80 GiB of which {free} is free. "
    "Process 16627 has 806.00 MiB memory in use. Including non-PyTorch memory, this process has 138.48 GiB memory in "
    "use. Of the allocated memory 131.06 GiB is allocated by PyTorch, and {pieces} is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF="
    "expandable_segments:True to avoid fragmentation."
)
OFFLOAD = "raise optimizer.optimizer_offload_fraction"


@pytest.fixture(autouse=True)
def _no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PYTORCH_ALLOC_CONF", OLDER):
        monkeypatch.setenv(variable, "")  # so that what a test sets is taken back
        monkeypatch.delenv(variable)


def full(asked: str, free: str, pieces: str) -> RuntimeError:
    return RuntimeError(MESSAGE.format(asked=asked, free=free, pieces=pieces))


@pytest.mark.parametrize(
    ("asked", "free", "pieces"),
    [
        ("620.00 MiB", "317.44 MiB", "6.62 GiB"),
        ("2.32 GiB", "2.12 GiB", "5.30 GiB"),
        ("4.00 GiB", "3.00 GiB", "1.00 GiB"),
    ],
)
def test_pieces_that_add_up_to_what_was_asked(asked: str, free: str, pieces: str) -> None:
    told = fix_of(full(asked, free, pieces), OFFLOAD)
    assert OPTION in told
    assert f"torch keeps {pieces[:3]}" in told
    assert told.endswith(f"or {OFFLOAD}")


@pytest.mark.parametrize(
    ("asked", "free", "pieces"), [("1.45 GiB", "459.44 MiB", "12.00 MiB"), ("2.00 GiB", "55.00 MiB", "1003.78 MiB")]
)
def test_pieces_that_do_not(asked: str, free: str, pieces: str) -> None:
    assert fix_of(full(asked, free, pieces), OFFLOAD) == OFFLOAD


def test_other_messages_say_nothing_of_pieces() -> None:
    assert fix_of(MemoryError("std::bad_alloc"), OFFLOAD) == OFFLOAD
    assert fix_of(RuntimeError("CUDA error: out of memory"), OFFLOAD) == OFFLOAD


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_option_that_is_set_is_not_proposed(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "max_split_size_mb:512, expandable_segments: True")
    assert fix_of(full("620.00 MiB", "317.44 MiB", "6.62 GiB"), OFFLOAD) == OFFLOAD


def test_a_command_that_ends_so_says_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def end(words: list[str]) -> None:
        raise full("620.00 MiB", "317.44 MiB", "6.62 GiB")

    monkeypatch.setattr(app, "_parsed", lambda words: lambda: end(words))
    assert app.main(["train"]) == 2
    assert OPTION in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "verify"])
@pytest.mark.parametrize(("variable", "option"), [(None, None), ("PYTORCH_ALLOC_CONF", ""), (OLDER, "backend:native")])
def test_a_command_that_trains_sets_the_option_where_none_is_set(
    command: str, variable: str | None, option: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None and option is not None:
        monkeypatch.setenv(variable, option)
    assert app.main([command, "dataset.path=nowhere", "dataset.format=jsonl"]) == 2
    expected = OPTION.partition("=")[2] if variable is None else None if variable == OLDER else option
    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected


def test_a_cuda_graph_keeps_the_default() -> None:
    words = ["--recipe", "qwen3_8b_pretrain_config", "dataset.path=nowhere", "dataset.format=jsonl"]
    assert app.main(["train", *words, "model.cuda_graph_impl=full_iteration"]) == 2
    assert "PYTORCH_ALLOC_CONF" not in os.environ
