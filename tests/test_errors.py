"""Errors state the fact, the reason and the cure."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path

import pytest

from hostward import errors
from hostward.errors import (
    EXIT_CODES,
    ConfigError,
    ExitCode,
    HostwardError,
    MemoryLimitError,
    NotBuiltError,
    UnknownNameError,
)

CLASSES = [
    c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == "hostward.errors" and c is not ExitCode
]


def test_text_has_one_line_each_for_fact_reason_and_cure() -> None:
    assert str(HostwardError("fact", why="reason", fix="cure")) == "fact\n  why: reason\n  fix: cure"


def test_parts_that_are_not_given_leave_no_line() -> None:
    assert str(HostwardError("fact")) == "fact"
    assert str(HostwardError("fact", fix="cure")) == "fact\n  fix: cure"


def test_parts_can_be_read() -> None:
    error = MemoryLimitError("fact", why="reason", fix="cure")
    assert (error.what, error.why, error.fix) == ("fact", "reason", "cure")


@pytest.mark.parametrize("error_class", CLASSES, ids=lambda c: c.__name__)
def test_every_class_is_a_hostward_error_that_exits_with_2_and_says_what_it_is_for(
    error_class: type[HostwardError],
) -> None:
    assert issubclass(error_class, HostwardError)
    assert error_class.exit_code == 2
    assert error_class.__doc__


def test_t15_a_bad_option_is_also_a_value_error() -> None:
    for error_class in (ConfigError, UnknownNameError, NotBuiltError):
        assert issubclass(error_class, ValueError)


def test_an_error_crosses_a_process_boundary() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("fact", why="reason", fix="cure")))
    assert type(error) is ConfigError
    assert str(error) == "fact\n  why: reason\n  fix: cure"
    assert (error.what, error.why, error.fix) == ("fact", "reason", "cure")


def test_the_page_lists_every_exit_code() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "command-line.md").read_text(encoding="utf-8")
    table = page.partition("## Exit codes\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert rows == [[str(code.value), EXIT_CODES[code]] for code in ExitCode]
