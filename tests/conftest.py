"""Tensors here are tiny: a second thread of torch only waits for the first, and takes its core from another test."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
from recent_memory import read_seldom


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Before each test: Lightning, for one, leaves as many as there are cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def host_memory_is_read_seldom() -> None:
    read_seldom()


@pytest.fixture(autouse=True, scope="module")
def old_objects_are_not_searched() -> None:
    """A collection of garbage looks at all that there is, and the libraries imported here are most of that."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def loggers_are_as_they_were() -> None:
    """Other libraries that tests import, and commands that tests cut short, leave loggers quieter than they were."""
    log = logging.getLogger("hostward")
    log.setLevel(logging.NOTSET)
    log.disabled, log.propagate = False, True
    logging.disable(logging.NOTSET)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile` in the order of folders, where tests/distributed is one file: its tests share four processes,
    which take long to start. In xdist's own order files of few tests come last, and some of those are the longest: one
    of two processes would wait for the other at the end.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OneWorld(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            folder = file.rpartition("/")[0]
            return folder if folder.endswith("tests/distributed") else file

    config.option.loadscopereorder = False
    return OneWorld(config, log)
