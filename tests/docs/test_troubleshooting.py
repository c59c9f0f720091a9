"""docs/troubleshooting.md: the tests that it names exist, and messages that it quotes are recognised."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from run_fixtures import Cli

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
OF_MEGATRON = re.findall(r"^\*\*`([^`]*)`", PAGE.partition("## Messages of Megatron")[2].partition("\n## ")[0], re.M)


def test_every_symptom_names_its_test() -> None:
    """Seen red: three of them named none."""
    symptoms = [text for text in PAGE.split("\n\n") if text.startswith("**")]
    assert len(symptoms) > 18
    assert [text for text in symptoms if "\n*Test:* `tests/" not in text] == []


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)
    assert len(named) > 12
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not (ROOT / file).exists() or f"def {test}" not in (ROOT / file).read_text(encoding="utf-8")
    ]
    assert missing == []


@pytest.mark.parametrize("message", OF_MEGATRON)
def test_a_log_with_a_message_of_megatron_is_explained(cli: Cli, tmp_path: Path, message: str) -> None:
    log = tmp_path / "train.log"
    log.write_text(f"ValueError: {message}\n")
    outcome = cli("doctor", "--log", log)
    assert outcome.code == 1
    assert "line 1" in outcome.out or "fix" in outcome.out


def test_all_four_messages_of_megatron_are_quoted() -> None:
    assert len(OF_MEGATRON) == 4
