"""When Python looks for garbage: a full collection takes some tenths of a second in a process of this size. The calling
thread stands still meanwhile, and so does a device whose queue runs dry.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from hostward.config.schema import TrainConfig


@contextmanager
def collected_by_hand(config: TrainConfig) -> Iterator[None]:
    """With train.manual_gc a collection now, and none of Python's own inside the block."""
    if not config.manual_gc:
        yield
        return
    with uncollected():
        gc.collect()
        yield


def collect_garbage(config: TrainConfig, iteration: int) -> None:
    """Collect, if it is time: every train.manual_gc_interval iterations, on all ranks in the same one; not behind the
    last.
    """
    interval = config.manual_gc_interval if config.manual_gc else 0
    if interval and iteration % interval == 0 and iteration < config.train_iters:
        gc.collect()


# Python's garbage collector, held still. No torch.


@contextmanager
def uncollected() -> Iterator[None]:
    """No collection but those that are asked for inside; behind it the collector is as it was."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
