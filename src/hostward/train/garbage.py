"""When Python looks for garbage: at a full collection, which takes a tenth of a second or two in a process of this
size, the calling thread stands still, and so does a device whose queue runs dry meanwhile.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from hostward.config import TrainConfig


@contextmanager
def collected_by_hand(config: TrainConfig) -> Iterator[None]:
    """With train.manual_gc there is a collection now, and then none but those of `collect_garbage`."""
    if not config.manual_gc or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        gc.collect()
        yield
    finally:
        gc.enable()


def collect_garbage(config: TrainConfig, iteration: int) -> None:
    """Collect, if it is time: every train.manual_gc_interval iterations, on all ranks in the same one."""
    if config.manual_gc and config.manual_gc_interval and iteration % config.manual_gc_interval == 0:
        gc.collect()
