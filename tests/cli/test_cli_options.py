"""`hostward options`, help, and what a shell completes."""

from __future__ import annotations

from typing import Any

import pytest
import typer.main
from run_fixtures import Cli

from hostward.cli import main
from hostward.cli.app import app
from hostward.config.schema import options
from hostward.config.validate import shown


def test_every_option_is_listed_within_80_columns(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli("options").out.splitlines()
    heads = [line for line in lines if not line.startswith(" ")]
    assert heads == [f"{i.dotted}  {i.type_text}, default {shown(i.default)}" for i in options().values()]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("optimizer_offload_fraction", ["optimizer.optimizer_offload_fraction"]),
        ("--Micro-Batch-Size", ["train.micro_batch_size"]),  # a flag of Megatron's, after `--`
        ("One fraction for all", []),
        (
            "float16",
            ["model.params_dtype", *(f"optimizer.{o}_dtype" for o in ("exp_avg", "exp_avg_sq", "main_params"))],
        ),  # of the meaning: another spelling of a value
    ],
)
def test_a_word_finds_options_by_name_and_meaning(cli: Cli, word: str, names: list[str]) -> None:
    told = cli("options", "--", word)
    assert [line.split()[0] for line in told.out.splitlines() if not line.startswith(" ")] == names
    assert told.code == (0 if names else 2)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("off_fraktion", "did you mean optimizer.optimizer_offload_fraction"),
        ("xyzzy", "`hostward options` lists all of them"),
        ("zero_optimization.offload_optimizer.ratio", "the name is DeepSpeed's"),
        ("model.transformer_impl", "hostward has no option model.transformer_impl"),
    ],
)
def test_a_word_that_no_option_has_is_an_error_with_near_names(cli: Cli, word: str, said: str) -> None:
    told = cli("options", word)
    assert (told.code, told.out) == (2, "")
    assert said in told.err


def commands(command: Any, *words: str) -> list[tuple[str, ...]]:
    """Return the words of this command and of all below it."""
    return [
        words,
        *(found for name, each in getattr(command, "commands", {}).items() for found in commands(each, *words, name)),
    ]


@pytest.mark.parametrize("words", commands(typer.main.get_command(app)), ids=" ".join)
def test_h_is_help(cli: Cli, words: tuple[str, ...]) -> None:
    short, long = cli(*words, "-h"), cli(*words, "--help")
    assert (short.code, short.out) == (0, long.out)
    assert "Usage: hostward" in short.out


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("hostward ch", ["checkpoint"]),
        ("hostward checkpoint in", ["inspect"]),
        ("hostward train --recipe llama32", ["llama32_1b_pretrain_config"]),
        ("hostward plan optimizer.lr", ["optimizer.lr=", "optimizer.lr=0.0003"]),
        (
            "hostward verify optimizer.optimizer_cpu",
            ["optimizer.optimizer_cpu_offload=true", "optimizer.optimizer_cpu_offload=false"],
        ),
    ],
)
def test_a_shell_completes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, offered: list[str]
) -> None:
    for name, value in {
        "_HOSTWARD_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": line.count(" "),
    }.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    assert capsys.readouterr().out.split() == offered
