"""What tests of attached models on a GPU share: a network of little work, slow lanes, memory filled with garbage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import hostward
from hostward.schedule.ops import Lane

SLEEP_CYCLES = int(2e7)
MIB = 1024 * 1024
WIDTH = 256


@contextmanager
def deterministic_algorithms(*, warn_only: bool) -> Iterator[None]:
    """With `warn_only` fused attention adds in any order."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    yield
    torch.use_deterministic_algorithms(before)


class Block(torch.nn.Module):
    """Little work on many bytes: copies last longer than what they hide behind."""

    def __init__(self, *, recompute: bool, keep_rng: bool) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.recompute, self.keep_rng = recompute, keep_rng

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.recompute:
            return self.run(x)
        found = checkpoint(self.run, x, use_reentrant=False, preserve_rng_state=self.keep_rng)
        assert isinstance(found, torch.Tensor)
        return found

    def run(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(self.norm(x))
        return x + torch.tanh(y) * torch.sigmoid(y)


class Net(torch.nn.Module):
    """`keep_rng`: checkpoints keep the state of the generators, which cannot be read in a capture."""

    def __init__(self, *, depth: int = 6, recompute: bool = False, keep_rng: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Block(recompute=recompute, keep_rng=keep_rng) for _ in range(depth))
        self.to("cuda", torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Whether these are the same bits of 16-bit numbers, and there are any."""
    return len(a) == len(b) > 0 and all(
        torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in zip(a, b, strict=True)
    )


def churn() -> None:
    """Who frees too early, or reads what was freed, meets these."""
    for n in (1, 2, 4, 8, 16, 32):
        torch.full((n * MIB // 2,), float("nan"), device="cuda", dtype=torch.bfloat16)


def put_to_sleep(run: hostward.Attachment, lanes: tuple[Lane, ...]) -> None:
    """Every copy of these lanes comes after a sleep, in graphs as well (T30, T31)."""
    copy = run.backend.copy

    def slow(lane: Lane, *arguments: Any, **options: Any) -> Any:
        if lane in lanes:
            side = run.backend.context.lanes.side[lane]  # type: ignore[attr-defined]
            if torch.cuda.is_current_stream_capturing():
                side.wait_stream(torch.cuda.current_stream())  # the lane joins the graph here
            with torch.cuda.stream(side):
                torch.cuda._sleep(SLEEP_CYCLES)
        return copy(lane, *arguments, **options)

    run.backend.copy = slow  # type: ignore[method-assign]


class Slow:
    """A work that comes after a sleep on its lane."""

    def __init__(self, work: Any, stream: torch.cuda.Stream) -> None:
        self._work, self._stream = work, stream

    @property
    def done(self) -> Any:
        return self._work.done

    def issue(self) -> Any:
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(SLEEP_CYCLES)
        return self._work.issue()


def slow_fetches(run: hostward.Attachment) -> None:
    """Every fetch comes after a sleep (T30, T31)."""
    assert run._weights is not None
    backend: Any = run.backend
    for layer in run._weights.residency.layers:
        if layer is not None:
            layer.fetch = Slow(layer.fetch, backend.context.lanes.side[Lane.H2D])  # type: ignore[assignment]
