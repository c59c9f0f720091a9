"""What tracing found of a model is kept between calls, and given again for the same question alone.

Seen red: a key without the question, the source, the packages or the variables; an option that is traced counted among
those that are not; a broken file that is an error; a folder that cannot be made that is one; no limit to files; layers
that share no curves.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest

import hostward
from hostward.cli import main
from hostward.config.schema import ModelConfig
from hostward.plan.workload import Way, Workload, from_text, to_text
from hostward.recipes import load
from hostward.trainer import workload as workload_cache
from hostward.trainer.meta_trace import trace_recipe
from hostward.trainer.workload import NOT_TRACED, config_workload, read_model_file, recipe_workload

TINY = "qwen3_moe_tiny_pretrain_config"


@pytest.fixture(autouse=True)
def one_length_is_traced() -> None:
    """Not here."""


@pytest.fixture(scope="module")
def workload() -> Workload:
    return recipe_workload(load(TINY))


class Asked:
    """What traces, and how often it was asked to."""

    def __init__(self, answer: Workload) -> None:
        self.answer = answer
        self.times = 0

    def __call__(self, lengths: Sequence[int]) -> list[Workload]:
        self.times += 1
        return [self.answer]


def test_a_workload_reads_back_equal(workload: Workload) -> None:
    again = from_text(to_text(workload))
    assert again == workload
    assert len({id(layer.curves[Way.KEEP]) for layer in again.repeated}) == 1
    assert again.inventory.buckets[0].state_bytes == workload.inventory.buckets[0].state_bytes
    assert type(next(iter(again.repeated[0].curves))) is type(next(iter(workload.repeated[0].curves)))


@pytest.mark.parametrize("text", ["", "[]", "{}", "3", '["a"]', json.dumps([["x"]] * 9)])
def test_what_is_no_workload_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        from_text(text)


def test_the_same_question_is_answered_once(tmp_path: Path, workload: Workload) -> None:
    asked = Asked(workload)
    for _ in range(2):
        assert workload_cache.cached_workload(tmp_path / "new", {"model": 1}, 256, asked) == workload
    assert asked.times == 1
    workload_cache.cached_workload(tmp_path / "new", {"model": 2}, 256, asked)
    assert asked.times == 2
    workload_cache.cached_workload(None, {"model": 1}, 256, asked)
    assert asked.times == 3


def test_what_the_answer_depends_on_is_in_the_key(
    tmp_path: Path, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(workload)

    def times() -> int:
        workload_cache.cached_workload(tmp_path / "kept", {"model": 1}, 256, asked)
        return asked.times

    assert times() == times() == 1
    monkeypatch.setenv("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    assert times() == 2
    packages = tmp_path / "packages"
    (packages / "transformers-99.0.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(packages))
    assert times() == 3
    (packages / "transformers-99.0.dist-info").rename(packages / "transformers-99.1.dist-info")
    assert times() == 4
    source = tmp_path / "hostward"
    source.mkdir()
    (source / "__init__.py").write_text("")
    monkeypatch.setattr(hostward, "__file__", str(source / "__init__.py"))
    assert times() == 5
    (source / "tape.py").write_text("")
    assert times() == 6
    (source / "tape.py").write_text("#")
    assert times() == 7
    assert times() == 7


def test_a_file_that_is_broken_is_written_again(tmp_path: Path, workload: Workload) -> None:
    asked = Asked(workload)
    workload_cache.cached_workload(tmp_path, {}, 256, asked)
    (file,) = tmp_path.glob("*.json")
    file.write_text(file.read_text()[:-100])
    assert workload_cache.cached_workload(tmp_path, {}, 256, asked) == workload
    assert asked.times == 2
    assert from_text(file.read_text()) == workload


def test_where_nothing_can_be_written_the_answer_is_the_same(tmp_path: Path, workload: Workload) -> None:
    (tmp_path / "file").write_text("")
    assert workload_cache.cached_workload(tmp_path / "file" / "below", {}, 256, Asked(workload)) == workload


def test_the_oldest_files_go(tmp_path: Path, workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload_cache, "MOST_FILES", 2)
    few = replace(workload, layers=())
    asked = Asked(few)
    for question in range(4):
        workload_cache.cached_workload(tmp_path, {"q": question}, 256, asked)
        for file in tmp_path.glob("*.json"):
            os.utime(file, (file.stat().st_mtime - 10,) * 2)
    assert len(list(tmp_path.glob("*.json"))) == 2
    workload_cache.cached_workload(tmp_path, {"q": 3}, 256, asked)
    assert asked.times == 4


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert workload_cache.usual_folder() == tmp_path / "hostward" / "workloads"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert workload_cache.usual_folder() == tmp_path / "home" / ".cache" / "hostward" / "workloads"


def shadow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source tree of transformers that Python would import first."""
    (folder / "transformers").mkdir()
    (folder / "transformers" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "transformers", raising=False)  # what is imported hides what would be


def test_nothing_is_kept_of_a_tree_in_front_of_the_installed_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert workload_cache.usual_folder() is not None
    shadow(tmp_path, monkeypatch)
    assert workload_cache.usual_folder() is None


def test_nothing_is_kept_of_packages_that_are_edited_where_they_lie(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    info = tmp_path / "transformers-99.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: transformers\nVersion: 99.0\n")
    shadow(tmp_path, monkeypatch)
    assert workload_cache.usual_folder() is not None
    (info / "direct_url.json").write_text(json.dumps({"url": "file:///x", "dir_info": {"editable": True}}))
    assert workload_cache.usual_folder() is None


def test_tracing_looks_at_no_option_that_is_left_out_of_the_question() -> None:
    assert {field.name for field in fields(ModelConfig)} >= NOT_TRACED
    seen = set()

    class Watched(ModelConfig):
        def __getattribute__(self, name: str) -> object:
            seen.add(name)
            return super().__getattribute__(name)

    config = load(TINY)
    model = Watched()
    for field in fields(ModelConfig):
        setattr(model, field.name, getattr(config.model, field.name))
    seen.clear()
    config.model = model
    trace_recipe(config, 300, (256,))
    assert "num_layers" in seen
    assert not seen & NOT_TRACED


def test_a_run_counts_its_own_microbatches(tmp_path: Path) -> None:
    config = load(TINY)
    first = recipe_workload(config, folder=tmp_path)
    config.train.global_batch_size = 12
    config.checkpoint.async_save, config.checkpoint.async_save_mode = True, "snapshot"
    second = recipe_workload(config, name="mine", folder=tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 1
    assert second == replace(first, name="mine", microbatches=3, snapshot=True)
    assert second == recipe_workload(config, name="mine")
    config.model.seq_length *= 2
    assert recipe_workload(config, folder=tmp_path).sequence_tokens == config.model.seq_length


def test_a_configuration_that_was_edited_is_another_question(tmp_path: Path) -> None:
    file, folder = tmp_path / "config.json", tmp_path / "kept"
    content = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
               "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 100}  # fmt: skip
    numels = []
    for rows in (100, 100, 200):
        file.write_text(json.dumps({**content, "vocab_size": rows, "task_specific_params": {"limit": math.inf}}))
        numels.append(config_workload(read_model_file(file), sequence_tokens=8, folder=folder).inventory.numel)
    assert numels == [numels[0], numels[0], numels[0] + 2 * 64 * 100]
    assert len(list(folder.glob("*.json"))) == 2


def test_a_length_near_one_that_was_traced_needs_no_trace(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 100, **sizes, **heads}))
    files = []
    for length in (64, 96, 256, 31, 64, 96):
        assert (
            config_workload(read_model_file(tmp_path), sequence_tokens=length, folder=folder).sequence_tokens == length
        )
        files.append(len(list(folder.glob("*.json"))))
    assert files == [1, 1, 1, 2, 2, 2]


def test_a_model_that_was_traced_before_is_planned_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is asked of it then."""
    pytest.importorskip("scipy", reason="planning needs SciPy")
    words = ["plan", "model.num_layers=2", "model.hidden_size=64", "model.seq_length=64", "optimizer.offload_mix=auto"]
    moved = ["optimizer.optimizer_cpu_offload=True", "optimizer.optimizer_offload_fraction=0.5"]
    code = (
        "import sys; from hostward.cli import main; "
        "main({!r}); print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )

    def planned(*more: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", code.format([*words, *more])],
            env={**os.environ, "PYTHONPATH": str(Path(hostward.__file__).parents[1]), "XDG_CACHE_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.splitlines()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # setuptools, which other tests have imported, puts packages of its own on the path.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not entry.endswith("_vendor")])
    assert main([*words, *moved]) == 0
    first = capsys.readouterr().out.splitlines()
    assert planned(*moved) == [*first, "[]"]
    other = planned("model.recompute_granularity=selective", "model.recompute_modules=[layernorm]", "--gpus", "2")
    assert other[-1] == "[]"
