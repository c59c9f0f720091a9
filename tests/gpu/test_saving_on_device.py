"""Saving beside training on a GPU: what is written is the state of its step, and training is as without it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hidden_step_cases import MIXES, deterministic as deterministic, everything, loss_of, make

from hostward.checkpoint import api, staging
from hostward.checkpoint.save_plan import PiecePlanner
from hostward.kernels import reference
from hostward.kernels.cpu.memory_copy import copy
from hostward.optim.bucket_state import fp8_values, same_bits
from hostward.optim.state_reader import Readers, Source, Stretch
from hostward.runtime.cuda.backend import CudaBackend
from hostward.schedule.ops import Lane

pytestmark = pytest.mark.gpu

MODES: tuple[api.Mode, ...] = ("snapshot", "stream")


def slow(call: Callable[..., Any]) -> Callable[..., Any]:
    def later(*arguments: Any, **named: Any) -> Any:
        time.sleep(0.005)
        return call(*arguments, **named)

    return later


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mix", [None, *MIXES])
def test_nothing_is_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mix: str | None, mode: api.Mode, dtype: torch.dtype
) -> None:
    """Read so slowly that training comes to its next change before all is read."""
    monkeypatch.setattr(PiecePlanner, "read", slow(PiecePlanner.read))
    monkeypatch.setattr(staging, "copy", slow(copy))
    monkeypatch.setattr(staging, "_TOGETHER_BYTES", 1)
    ends = []
    expected: dict[str, torch.Tensor] = {}
    for saves in (False, True):
        model, optimizer = make(mix, dtype)
        saver = api.Saver(tmp_path, mode=mode)
        for step in range(5):
            if step == 2 and saves:
                parts = api.parts_of(model, optimizer)
                assert saver.save(2, tensors=parts.tensors, plain={"optimizer": parts.optimizer}) is None
            elif step == 2:
                expected = everything(model, optimizer)
            with optimizer.accumulate(last=True):
                loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(everything(model, optimizer))
        if saves:
            path = saver.finish()
            assert path is not None
            other, fresh = make("mixed", dtype)
            api.restore(path, other, fresh)
            found = everything(other, fresh)
            assert [name for name in expected if not same_bits(found[name], expected[name])] == []
        saver.close()
    assert [name for name in ends[0] if not same_bits(ends[1][name], ends[0][name])] == []


@pytest.mark.parametrize("there", list(itertools.product(("cpu", "cuda"), repeat=3)))
def test_masters_whose_halves_lie_anywhere_are_put_together(there: tuple[str, str, str]) -> None:
    """Three stretches, so that each needs its own part of the room. Remainders lie where their weights do, or not."""
    backend = CudaBackend(torch.device("cuda"))
    rng = np.random.default_rng(4)
    master = reference.canonical(rng.standard_normal(3000).astype(np.float32))
    weight, remainder = reference.split_master(master)
    high, low = torch.from_numpy(weight.view(np.int16)).view(torch.bfloat16), torch.from_numpy(remainder)
    stretches = tuple(
        Stretch(1000 * i, 1000 * (i + 1), high[1000 * i : 1000 * (i + 1)].to(device), low[1000 * i :][:1000].to(lows))
        for i, (device, lows) in enumerate(zip(there, reversed(there), strict=True))
    )
    torch.cuda.synchronize()
    shape = torch.Size([3000])
    source = Source(shape, torch.float32, stretches, torch.empty(shape, device="meta"), backend, Readers())
    for start, size in ((0, 3000), (500, 2000), (999, 2), (1000, 1000)):
        expected = torch.from_numpy(master[start : start + size])
        room = torch.full([8 * size], 0x5A, dtype=torch.uint8)
        assert same_bits(source.read([start], [size], room), expected)


@pytest.mark.parametrize("there", list(itertools.product(("cpu", "cuda"), repeat=3)))
def test_state_in_stretches_that_lie_anywhere_is_put_together(there: tuple[str, str, str]) -> None:
    backend = CudaBackend(torch.device("cuda"))
    state = torch.randn(3000, generator=torch.Generator().manual_seed(4))
    stretches = tuple(
        Stretch(1000 * i, 1000 * (i + 1), state[1000 * i : 1000 * (i + 1)].to(device)) for i, device in enumerate(there)
    )
    torch.cuda.synchronize()
    source = Source(state.shape, torch.float32, stretches, torch.empty(3000, device="meta"), backend, Readers())
    for start, size in ((0, 3000), (500, 2000), (999, 2), (1000, 1000)):
        expected = state[start : start + size]
        assert same_bits(source.read([start], [size], torch.full([8 * size], 0x5A, dtype=torch.uint8)), expected)


@pytest.mark.parametrize("there", list(itertools.product(("cpu", "cuda"), repeat=2)))
def test_fp8_moments_whose_bytes_lie_anywhere_are_read_as_bf16(there: tuple[str, str]) -> None:
    backend = CudaBackend(torch.device("cuda"))
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 256, (2048,), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 130, (16,), dtype=torch.uint8, generator=generator)
    whole = fp8_values(codes, scales, "exp_avg")
    stretches = tuple(
        Stretch(
            1024 * i, 1024 * (i + 1), codes[1024 * i :][:1024].to(at), scales=scales[8 * i :][:8].to(at), role="exp_avg"
        )
        for i, at in enumerate(there)
    )
    torch.cuda.synchronize()
    source = Source(whole.shape, torch.bfloat16, stretches, torch.empty(2048, device="meta"), backend, Readers())
    for start, size in ((0, 2048), (500, 1100), (1023, 2), (130, 1)):
        room = torch.full([4 * size], 0x5A, dtype=torch.uint8)
        assert same_bits(source.read([start], [size], room), whole[start : start + size])


def test_what_is_fetched_does_not_wait_for_gradients() -> None:
    """A fetch is over while what the copy lane waits for still runs: gradients that backward has not made yet."""
    backend = CudaBackend(torch.device("cuda"))
    data, room = torch.arange(1000, device="cuda"), torch.zeros(1000, dtype=torch.int64)
    torch.cuda.synchronize()
    with torch.cuda.stream(backend.context.lanes.side[Lane.D2H]):
        torch.cuda._sleep(4_000_000_000)  # two seconds
    backend.fetch([(room, data)])
    assert not backend.context.lanes.side[Lane.D2H].query()
    assert torch.equal(room, torch.arange(1000))
