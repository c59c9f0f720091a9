"""skills/perf-cpu-offloading: its commands run, and its card says what the files say that it names."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from networks import Net
from run_fixtures import Cli

import hostward
from hostward import recipes
from hostward.config.overrides import apply_overrides
from hostward.config.rules import combinations
from hostward.config.validate import check
from hostward.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SKILL = (ROOT / "skills/perf-cpu-offloading/SKILL.md").read_text(encoding="utf-8")
CARD: dict[str, Any] = yaml.safe_load((ROOT / "skills/perf-cpu-offloading/card.yaml").read_text(encoding="utf-8"))
SMALLER = shlex.split(
    "model.hidden_size=32 model.ffn_hidden_size=32 model.num_attention_heads=2 model.num_query_groups=2 "
    "model.kv_channels=16 model.seq_length=32 model.vocab_size=257 model.params_dtype=fp32 train.train_iters=1 "
    "train.global_batch_size=2 train.micro_batch_size=2 train.device=cpu train.num_threads=1"
)
FEW_EXPERTS = ["model.num_moe_experts=2", "model.moe_ffn_hidden_size=32", "model.moe_router_topk=1"]


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```", SKILL, flags=re.DOTALL | re.MULTILINE)
    return [block.replace("\\\n", " ") for block in found]


COMMANDS = [shlex.split(line) for block in blocks("bash") for line in block.splitlines()]


def smaller(words: list[str]) -> list[str]:
    """The words of a command, and sizes for a test after them."""
    if words[1] not in ("train", "verify", "plan"):
        return words[1:]
    large = any("30b_a3b" in word for word in words)
    offloaded = [int(word.partition("=")[2]) for word in words if word.startswith("model.cpu_offloading_num_layers=")]
    layers = f"model.num_layers={max([1, *offloaded]) + 1}"
    sizes = SMALLER if "--recipe" in words else [word for word in SMALLER if "ffn" not in word]
    if words[1] == "plan":
        sizes = [word for word in sizes if "train." not in word]
    iterations = ["train.train_iters=3"] if words[1] == "verify" else []  # the first has a learning rate of zero
    return [*words[1:], *sizes, layers, *(FEW_EXPERTS if large else []), *iterations]


def test_the_commands_run_in_their_order(cli: Cli, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.log").write_text("ValueError: CUDA graphs not supported with CPU offloading.\n")
    assert len(COMMANDS) == 12
    for command in COMMANDS:
        assert command[0] == "hostward"
        words = smaller(command)
        data = [f"dataset.path={text}"] if words[0] in ("train", "verify") else []
        outcome = cli(*words, *data)
        known = words[:2] == ["doctor", "--log"]
        assert outcome.code == (1 if known else 0), (command, outcome.err)
        if words[0] == "verify":
            assert outcome.out.startswith("PASS: ")
        if "first-run" in words and words[0] == "train":
            assert json.loads(Path("first-run/report.json").read_text())["asked_fraction"] == 0.5
        if known:
            assert "CUDA graphs" in outcome.out


def test_the_lines_of_python_run() -> None:
    on_a_recipe, in_a_loop = blocks("python")
    config = recipes.load("qwen3_8b_pretrain_config")
    exec(on_a_recipe, {"cfg": config})
    check(config, world_size=1)
    names: dict[str, Any] = {"hostward": hostward, "model": Net()}
    exec(in_a_loop, names)
    names["run"].detach()


def test_without_the_last_two_words_the_error_says_them() -> None:
    commands = [words for words in COMMANDS if "model.cpu_offloading_weights=True" in words]
    assert len(commands) == 2
    for words in commands:
        config = apply_overrides(recipes.load(words[3]), words[4:-2])
        with pytest.raises(ConfigError) as caught:
            check(config, world_size=1)
        assert f"fix: add {' '.join(words[-2:]).lower()}" in str(caught.value)


@pytest.mark.parametrize("measured", CARD["measured_results"], ids=lambda measured: measured["case"])
def test_measurements_of_the_card_are_those_of_its_files(measured: dict[str, Any]) -> None:
    rows = json.loads((ROOT / measured["result"]).read_text(encoding="utf-8"))["rows"]
    base, row = (next(r for r in rows if measured[key].items() <= r.items()) for key in ("base", "row"))
    peaks = [r.get("device_peak_bytes", r.get("device_bytes")) / 2**30 for r in (base, row)]
    assert f"{row['step_s'] / base['step_s']:.2f}" == f"{measured['slowdown']:.2f}"
    assert [f"{peak:.1f}" for peak in peaks] == [f"{peak:.1f}" for peak in measured["peak_gib"]]


def test_names_of_the_card_exist() -> None:
    known = [entry[key] for entries in CARD["validation_status"].values() for entry in entries for key in entry]
    assert [path for path in (*known, *CARD["evidence"]) if not (ROOT / path).exists()] == []
    config = recipes.load("qwen3_8b_pretrain_config")
    for key in CARD["config_keys"]:
        namespace, _, option = key.partition(".")
        assert hasattr(getattr(config, namespace), option), key


def test_symptoms_are_messages_of_rules() -> None:
    rules = {rule.id: rule for rule in combinations.COMBINATIONS}
    for failure in CARD["failure_modes"]:
        rule = rules[failure["rule"]]
        assert str(rule.message).startswith(failure["symptom"]), failure["name"]
    table = SKILL.partition("## Diagnosis")[2]
    assert all(failure["symptom"].rstrip(".") in table for failure in CARD["failure_modes"][:3])
