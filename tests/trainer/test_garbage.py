"""train.manual_gc: the garbage collector stands still between collections of its own interval."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from run_fixtures import Cli

from hostward.config.schema import TrainConfig
from hostward.errors import DataError
from hostward.trainer import loop
from hostward.trainer.garbage_collection import manual_gc_enabled
from hostward.trainer.run import Run


@contextmanager
def collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, bool]]]:
    """Of each full collection during a run: iterations done, and whether the collector is on."""
    seen: list[tuple[int, bool]] = []
    done = -1

    def one(run: Run) -> None:
        nonlocal done
        done = run.iteration
        original(run)
        done += 1

    def told(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            seen.append((done, gc.isenabled()))

    original = loop.train_iteration
    monkeypatch.setattr(loop, "train_iteration", one)
    gc.callbacks.append(told)
    try:
        yield seen
    finally:
        gc.callbacks.remove(told)


def test_it_collects_at_the_interval_and_at_the_start(train: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    with collections(monkeypatch) as seen:
        train("train.train_iters=5", "train.manual_gc=true", "train.manual_gc_interval=2")
    assert [done for done, on in seen if not on] == [-1, 2, 4]
    assert all(done in (-1, 5) for done, on in seen if on)  # before training and behind it
    assert gc.isenabled()


def test_without_an_interval_there_is_none(train: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    with collections(monkeypatch) as seen:
        train("train.train_iters=3", "train.manual_gc=true", "train.manual_gc_interval=0")
    assert [done for done, on in seen if not on] == [-1]


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1"),
        (
            "optimizer.optimizer_cpu_offload=True",
            "optimizer.optimizer_offload_fraction=1.0",
            "optimizer.offload_mix=0.5",
        ),
        ("model.cpu_offloading=True", "model.cpu_offloading_num_layers=1"),
        ("model.fine_grained_activation_offloading=True", "model.offload_modules=[attn_norm,core_attn]"),
    ],
    ids=["plain", "recompute", "state", "activations", "modules"],
)
def test_an_iteration_leaves_no_tensor_to_the_collector(
    train: Cli, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """Else memory would grow from one collection to the next."""
    original, left = loop.train_iteration, [-1]

    def one(run: Run) -> None:
        gc.collect()
        original(run)
        if run.iteration == 3:  # what is made once is there
            run.optimizer.wait()
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                gc.collect()
                left[0] = sum(isinstance(thing, torch.Tensor) for thing in gc.garbage)
            finally:
                gc.set_debug(0)
                gc.garbage.clear()

    monkeypatch.setattr(loop, "train_iteration", one)
    train("train.train_iters=3", "train.manual_gc=true", "train.manual_gc_interval=0", *words)
    assert left == [0]


def test_an_error_leaves_the_collector_as_it_was() -> None:
    config = TrainConfig(manual_gc=True)

    def fails() -> None:
        with manual_gc_enabled(config):
            assert not gc.isenabled()
            raise DataError("the file ends here")

    with pytest.raises(DataError):
        fails()
    assert gc.isenabled()
    gc.disable()
    try:
        with manual_gc_enabled(config):
            pass
        assert not gc.isenabled()  # whoever switched it off before
    finally:
        gc.enable()
