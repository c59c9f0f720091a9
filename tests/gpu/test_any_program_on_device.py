"""What a program reads and writes after `step()` on a GPU, with copies that are late: the bits of no offloading.

Seen red: each of these without the fence (a test of its own).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

import hostward
from hostward.errors import ModelError
from hostward.optim.bucket_state import same_bits
from hostward.schedule.ops import Lane

pytestmark = pytest.mark.gpu

MIXES: dict[str, dict[str, Any]] = {
    "device": {"offload_fraction": 0.0},
    "host": {"offload_fraction": 1.0, "streamed_fraction": 0.0},
    "streamed": {"offload_fraction": 1.0, "streamed_fraction": 1.0},
    "mixed": {"offload_fraction": 0.7, "streamed_fraction": 0.5},
}
SLEEP_CYCLES = int(4e7)
Kept = dict[str, Any]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Limited(torch.nn.Linear):
    """Limits its own weight, behind torch's back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-0.02, 0.02)
        return super().forward(x)


class LimitedInTheUsualWay(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.02, 0.02)
        return super().forward(x)


def network(dtype: torch.dtype, linear: type[torch.nn.Linear] = torch.nn.Linear) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(linear(512, 512), torch.nn.Tanh()) for _ in range(6)]
    return torch.nn.Sequential(*layers).to("cuda", dtype)


def see(kept: Kept, *tensors: torch.Tensor) -> None:
    kept.setdefault("seen", []).extend(t.detach().clone() for t in tensors)


def average(model: torch.nn.Module, kept: Kept) -> None:
    kept["average"] = kept.get("average") or AveragedModel(model)
    kept["average"].update_parameters(model)
    see(kept, *kept["average"].parameters())


def norms(model: torch.nn.Module, kept: Kept) -> None:
    see(kept, *[p.norm() for p in model.parameters()], *torch._foreach_norm(list(model.parameters())))


def deep_copy(model: torch.nn.Module, kept: Kept) -> None:
    see(kept, *copy.deepcopy(model).parameters())


@torch.no_grad()
def clamp(model: torch.nn.Module, kept: Kept) -> None:
    for p in model.parameters():
        p.clamp_(-0.02, 0.02)


def clamp_of_data(model: torch.nn.Module, kept: Kept) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.02, 0.02)


def on_the_host(model: torch.nn.Module, kept: Kept) -> None:
    see(kept, *[p.detach().cpu() for p in model.parameters()], torch.tensor(model[0][0].bias.tolist()))


def vectors(model: torch.nn.Module, kept: Kept) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()) * 0.99, model.parameters())


def views_kept(model: torch.nn.Module, kept: Kept) -> None:
    see(kept, *kept["views"])


def on_another_stream(model: torch.nn.Module, kept: Kept) -> None:
    stream = kept.setdefault("stream", torch.cuda.Stream())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = [p.detach() * 2 for p in model.parameters()]
    torch.cuda.current_stream().wait_stream(stream)
    see(kept, *found)


def in_another_thread(model: torch.nn.Module, kept: Kept) -> None:
    stream, found = kept.setdefault("stream", torch.cuda.Stream()), []
    behind = torch.cuda.current_stream().record_event()

    def read() -> None:
        with torch.cuda.stream(stream):
            stream.wait_event(behind)
            found.extend(p.detach() * 2 for p in model.parameters())

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    torch.cuda.current_stream().wait_stream(stream)
    see(kept, *found)


def evaluated_functionally(model: torch.nn.Module, kept: Kept) -> None:
    x = torch.ones(4, 512, device="cuda", dtype=model[0][0].weight.dtype)
    with torch.inference_mode():
        see(kept, torch.nn.functional.linear(x, model[5][0].weight, model[5][0].bias))


PROGRAMS: dict[str, Callable[[Any, Kept], None]] = {
    p.__name__: p
    for p in (
        average, norms, deep_copy, clamp, clamp_of_data, on_the_host, vectors, views_kept, on_another_stream,
        in_another_thread, evaluated_functionally,
    )
}  # fmt: skip


def run(
    program: str,
    mix: str,
    dtype: torch.dtype = torch.bfloat16,
    *,
    context: bool = True,
    away: bool = False,
    linear: type[torch.nn.Linear] = torch.nn.Linear,
    **options: Any,
) -> list[torch.Tensor]:
    """What the program saw, and the weights at the end."""
    model = network(dtype, linear)
    optimizer = hostward.AdamW(model, lr=1e-2, max_grad_norm=1.0, **MIXES[mix], **options)
    kept: Kept = {"views": [p.data for p in model.parameters()]} if program == "views_kept" else {}
    attached = hostward.attach(model, optimizer, weights=4, layers=list(model)) if away else None
    sleeping = [optimizer.backend.context.lanes.side[lane] for lane in (Lane.H2D, Lane.UPDATE)]  # type: ignore[attr-defined]
    for step in range(4):
        x = torch.randn(16, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(step)).to(dtype)
        if context:
            with optimizer.accumulate(last=True):
                model(x).float().square().mean().backward()
        else:
            model(x).float().square().mean().backward()
        for stream in sleeping:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLEEP_CYCLES)
        optimizer.step()
        PROGRAMS[program](model, kept)
        optimizer.zero_grad()
    if attached is not None:
        attached.detach()
    optimizer.wait()
    return [*kept.get("seen", []), *[p.detach().clone() for p in model.parameters()]]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_bits_are_those_without_offloading(program: str, dtype: torch.dtype) -> None:
    expected = run(program, "device", dtype)
    for mix in MIXES:
        for context in (True, False):
            assert same(run(program, mix, dtype, context=context), expected), (mix, context)


@pytest.mark.parametrize("program", PROGRAMS)
def test_with_weights_away(program: str) -> None:
    if program == "vectors":
        with pytest.raises(ModelError, match="was replaced"):
            run(program, "host", away=True)
        return
    assert same(run(program, "host", away=True), run(program, "device"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_without_the_fence_they_are_not(program: str) -> None:
    assert not same(run(program, "host", fence=False), run(program, "device"))


def test_layers_may_write_their_own_weights_in_forward() -> None:
    expected = run("norms", "device", linear=LimitedInTheUsualWay)
    assert not same(run("norms", "device"), expected)
    for mix in MIXES:
        assert same(run("norms", mix, linear=Limited), expected), mix
    assert same(run("norms", "host", away=True, linear=Limited), expected)


def test_reading_waits_on_the_device_alone(no_host_waits: Callable[[], Any]) -> None:
    model = network(torch.bfloat16)
    optimizer = hostward.AdamW(model, **MIXES["host"])
    for _ in range(3):
        model(torch.ones(2, 512, device="cuda", dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with no_host_waits():
        model(torch.ones(2, 512, device="cuda", dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        torch._foreach_norm(list(model.parameters()))
        with torch.no_grad():
            model[0][0].weight.mul_(0.5)
            model[1][0].weight.data.mul_(0.5)
    optimizer.wait()


def test_a_capture_that_reads_what_is_on_its_way_is_refused_and_one_after_arrive_is_right() -> None:
    model = network(torch.bfloat16)
    optimizer = hostward.AdamW(model, **MIXES["host"])
    reference = network(torch.bfloat16)
    other = hostward.AdamW(reference, **MIXES["device"])
    x = torch.ones(2, 512, device="cuda", dtype=torch.bfloat16)
    seen = torch.zeros_like(model[3][0].weight)
    graph = torch.cuda.CUDAGraph()

    def step() -> None:
        for m, o in ((model, optimizer), (reference, other)):
            m(x).float().sum().backward()
            o.step()
            o.zero_grad()

    step()

    def captured() -> None:
        with torch.cuda.graph(graph), torch.no_grad():
            seen.zero_()  # an empty graph would warn
            seen.copy_(model[3][0].weight)

    with pytest.raises(ModelError, match="still to arrive, and a CUDA graph is captured"):
        captured()
    optimizer.wait_for_weights()
    graph = torch.cuda.CUDAGraph()
    captured()
    for _ in range(3):
        step()
        graph.replay()
        assert same_bits(seen, reference[3][0].weight.detach())
