"""Control when Python's garbage collector runs.

A full collection takes some tenths of a second in a process of this size. It blocks the calling thread, and the GPU
idles if its queue runs dry.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from hostward.config.schema import TrainConfig


@contextmanager
def manual_gc_enabled(config: TrainConfig) -> Iterator[None]:
    """Collect now and disable automatic collections inside the block, if train.manual_gc is set."""
    if not config.manual_gc:
        yield
        return
    with gc_disabled():
        gc.collect()
        yield


def collect_if_due(config: TrainConfig, iteration: int) -> None:
    """Collect every train.manual_gc_interval iterations, on all ranks in the same one, but not after the last."""
    interval = config.manual_gc_interval if config.manual_gc else 0
    if interval and iteration % interval == 0 and iteration < config.train_iters:
        gc.collect()


# Disabling Python's garbage collector. No torch.


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable automatic collections inside the block and restore the collector's state after it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
