"""Runs of the command line in this process, on a small text."""

from __future__ import annotations

from functools import partial

import pytest
from run_fixtures import (
    cache as cache,
    cli as cli,
    one_length_is_traced as one_length_is_traced,
    one_process as one_process,
    own_cache as own_cache,
    refused as refused,
    text as text,
    threads_as_before as threads_as_before,
    train as train,
)

from hostward import Activations
from hostward.trainer import offload_options


@pytest.fixture
def small_ones_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer saves is worth a copy from 1 MiB on, which so few tokens do not reach."""
    monkeypatch.setattr(offload_options, "Activations", partial(Activations, min_bytes=0))
