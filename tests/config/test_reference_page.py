"""docs/options.md is what the declarations say."""

from __future__ import annotations

import runpy
from pathlib import Path

from hostward.config.overrides import DROPPED
from hostward.config.rules.combinations import COMBINATIONS
from hostward.config.rules.table import DIFFERENCES
from hostward.config.schema import options

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file())
PAGE = ROOT / "docs" / "options.md"
GENERATOR = runpy.run_path(str(ROOT / "scripts" / "options_page.py"))
option_row, render, rule_row, status = (GENERATOR[name] for name in ("option_row", "render", "rule_row", "status"))


def test_committed_page_equals_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python scripts/options_page.py docs/options.md"


def test_every_option_rule_and_dropped_name_is_listed() -> None:
    page = render()
    for info in options().values():
        assert f"| `{info.name}` |" in page
    for rule in COMBINATIONS:
        assert f"| {rule.id} |" in page
    for name in DROPPED:
        assert f"| `{name}` |" in page
    for megatron in DIFFERENCES:
        assert f"| {megatron} |" in page


def test_other_spellings_are_listed() -> None:
    for info in options().values():
        row = option_row(info)
        assert all(f"`{other}`" in row for other in info.aliases)
    assert "`float16`" in option_row(options()["model.params_dtype"])


def test_every_rule_shows_a_text() -> None:
    for rule in COMBINATIONS:
        message = rule_row(rule).split(" | ")[1]
        assert len(message) > 10
        assert "{model" not in message


def test_status() -> None:
    assert status("optimizer.optimizer_cpu_offload") == "works"
    assert status("optimizer.offload_optimizer_states") == status("optimizer.pin_cpu_grads") == "works"
    assert status("model.cpu_offloading") == "works"
    assert status("model.cpu_offloading_num_layers") == "works"
    assert status("model.cuda_graph_impl") == "works with one process"
    assert status("model.cpu_offloading_weights") == "works"
    assert status("model.offload_modules") == "works"
    assert status("model.activation_offload_fraction") == status("model.recompute_modules") == "works"
    assert status("checkpoint.save_interval") == "works"
