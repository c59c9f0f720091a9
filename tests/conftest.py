"""Tensors here are tiny: a second thread of torch only waits for the first, and takes its core from another test."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
