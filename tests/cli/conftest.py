"""Runs of the command line in this process, on a small text."""

from __future__ import annotations

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
