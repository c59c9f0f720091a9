"""The workload of a length that was not traced, from those of lengths around it, is the one that tracing finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from tape_cases import EXPERTS, WINDOWS, built, loss_of

from hostward.plan.lengths import at_length, lengths_around
from hostward.plan.workload import Workload
from hostward.profiler.workload import workload_of, workloads_of

SIZES: dict[str, Any] = {"num_hidden_layers": 7, "max_position_embeddings": 4096}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "sdpa", {}),
    "experts": ("Qwen3Moe", "sdpa", {**EXPERTS, "output_router_logits": True}),
    "windows": ("Gemma3Text", "sdpa", WINDOWS),
}


def traced(name: str, *lengths: int) -> list[Workload]:
    kind, attention, more = CASES[name]
    model = built(kind, "meta", torch.bfloat16, attention, **{**SIZES, **more})
    return workloads_of(model, lengths=lengths, loss=loss_of, microbatch_sequences=2)


def require_equal(found: Any, wanted: Any, place: str) -> None:
    if is_dataclass(found):
        for f in fields(found):
            require_equal(getattr(found, f.name), getattr(wanted, f.name), f"{place}.{f.name}")
    elif isinstance(found, Mapping):
        assert list(found) == list(wanted), place
        for key in found:
            require_equal(found[key], wanted[key], f"{place}[{key}]")
    elif isinstance(found, tuple):
        assert len(found) == len(wanted), place
        for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
            require_equal(one, other, f"{place}[{i}]")
    else:
        assert found == (pytest.approx(wanted, rel=1e-6, abs=1e-3) if isinstance(wanted, (int, float)) else wanted), (
            place
        )


@pytest.mark.parametrize("name", CASES)
def test_another_length_is_as_if_it_had_been_traced(name: str) -> None:
    around = traced(name, *lengths_around(64))
    for length in (48, 256):
        found = at_length(around, length)
        assert found is not None
        (wanted,) = traced(name, length)
        require_equal(found, wanted, name)
        kinds = [{id(layer.curves) for layer in work.repeated} for work in (found, wanted)]
        assert len(kinds[0]) == len(kinds[1])


def test_lengths_that_are_far_away_or_behind_a_threshold_are_traced() -> None:
    around = traced("windows", *lengths_around(64))
    assert [at_length(around, length) for length in (31, 257)] == [None, None]
    assert at_length(around[:1], 64) is None
    # At 4 and 8 tokens a window of 8 leaves nothing out, and there is no mask of it.
    assert at_length(traced("windows", *lengths_around(8)), 12) is None


def test_each_length_is_the_workload_of_it_alone() -> None:
    found = traced("llama", 64, 32)
    model = built("Llama", "meta", torch.bfloat16, "sdpa", **SIZES)
    alone = [workload_of(model, sequence_tokens=n, microbatch_sequences=2, loss=loss_of) for n in (64, 32)]
    assert found == alone
