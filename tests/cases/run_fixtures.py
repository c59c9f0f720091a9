"""Fixtures of runs, which conftest.py of a folder takes: a small text, and the command line called in this process."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cli_runs import SMALL, Outcome, read_json

from hostward.cli import main
from hostward.trainer import workload

Cli = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variables of a launcher, and on a terminal wide enough that tables do not wrap."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "240")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What commands keep between calls, in place of the user's cache folder: one folder for all workers of a test run,
    which trace each model once.
    """
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.fixture(autouse=True)
def one_length_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model at the length that is asked for, and not at two more for plans of other lengths: those take twice as
    long, and tests/trainer/test_workload_cache.py is about them.
    """
    monkeypatch.setattr(workload, "lengths_around", lambda sequence_tokens: (sequence_tokens,))


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """`train.num_threads` is a setting of the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 kB of words, the same on every machine."""
    choose = random.Random(7)
    words = ["host", "device", "bucket", "moment", "gradient", "lane", "step", "\n", "the", "of", "weight"]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(choose.choice(words) for _ in range(16_000)))
    return path


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """`main([...])`; keyword `json=True` asks for the JSON report as well."""

    def call(*arguments: object, json: bool = False) -> Outcome:
        report = tmp_path / "report.json"
        report.unlink(missing_ok=True)
        capsys.readouterr()
        code = main([*map(str, arguments), *(["--json", str(report)] if json else [])])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err, read_json(report) if report.exists() else {})

    return call


@pytest.fixture
def train(cli: Cli, text: Path) -> Cli:
    """`hostward train` of the small model on the small text, which must succeed."""

    def call(*words: object) -> Outcome:
        outcome = cli("train", *SMALL, f"dataset.path={text}", *words, json=True)
        assert outcome.code == 0, outcome.err
        return outcome

    return call


@pytest.fixture
def refused(cli: Cli, text: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`hostward train` of the small model with input that must be refused, before weights are allocated.

    Words that come later win, so a test may replace the data. Returns the outcome after checking its form.
    """

    def weights_were_allocated(*_: object, **__: object) -> None:
        raise AssertionError("the input was not refused before the weights were allocated")

    monkeypatch.setattr("hostward.trainer.parallel.build_model", weights_were_allocated)

    def call(*words: object, command: str = "train") -> Outcome:
        outcome = cli(command, *SMALL, f"dataset.path={text}", "train.train_iters=2", *words)
        assert outcome.code == 2, outcome.err
        assert outcome.err.startswith("error: ")
        assert "Traceback" not in outcome.err
        assert "  fix: " in outcome.err or "     fix: " in outcome.err
        assert outcome.out == ""
        return outcome

    return call
