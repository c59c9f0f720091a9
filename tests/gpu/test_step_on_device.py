"""The hidden step on a GPU: the same bits at every placement and order, no wait on the host, memory that stays level.

Seen red on the simulated backend with each edge deleted (tests/schedule); here with a copy lane put to sleep and the
wait of an arrival left out.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from conftest import device_shared

import hostward
from hostward.optim.bucket_state import same_bits
from hostward.runtime.backend import Tier

pytestmark = pytest.mark.gpu

MIXES = {
    "device": {"offload_fraction": 0.0},
    "half": {"offload_fraction": 0.5, "streamed_fraction": 0.0},
    "host": {"offload_fraction": 1.0, "streamed_fraction": 0.0},
    "streamed": {"offload_fraction": 1.0, "streamed_fraction": 1.0},
    "mixed": {"offload_fraction": 0.8, "streamed_fraction": 0.5},
}
SLEEP_CYCLES = int(2e7)
CLOCKS_S = 1e-3
"""By which two clocks may differ here; it is some microseconds."""
EARLY = ("early", "early, sleeping lanes")
SUMMED = ("summed on the host", "summed, sums at the step", "summed, sleeping lanes")


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


class Net(torch.nn.Module):
    def __init__(self, dtype: torch.dtype, width: int = 1024, depth: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Linear(32, width)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(depth)])
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, 777)
        self.to("cuda", dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        out: torch.Tensor = self.head(self.norm(x))
        return out


def batch(seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def make(dtype: torch.dtype, **options: Any) -> tuple[Net, hostward.AdamW]:
    model = Net(dtype)
    grad_dtype = torch.float32 if dtype is not torch.float32 else None
    # The norm is above 1.0 in some steps and below it in others: clipping works in some.
    return model, hostward.AdamW(model, lr=1e-2, max_grad_norm=1.0, grad_dtype=grad_dtype, **options)


def step(model: Net, optimizer: hostward.AdamW, number: int, microbatches: int = 2, *, context: bool = True) -> None:
    dtype = next(model.parameters()).dtype
    for j in range(microbatches):
        x = batch(number * 10 + j, dtype)
        if context:
            with optimizer.accumulate(last=j == microbatches - 1):
                model(x).float().square().mean().backward()
        else:
            model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def result(model: Net, optimizer: hostward.AdamW) -> dict[str, torch.Tensor]:
    found = {"out": model(batch(99, next(model.parameters()).dtype)).detach().clone()}
    for name, entry in optimizer.state_dict()["state"].items():
        found |= {f"{role} {name}": value for role, value in entry.items()}
    return found | {name: value.clone() for name, value in model.state_dict().items()}


def trained(dtype: torch.dtype, *, steps: int = 8, sleep: bool = False, context: bool = True, **options: Any) -> Any:
    model, optimizer = make(dtype, **options)
    norms = []
    for i in range(steps):
        if sleep:
            for stream in optimizer.backend.context.lanes.side.values():  # type: ignore[attr-defined]
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(SLEEP_CYCLES)
        step(model, optimizer, i, context=context)
        norms.append(optimizer.grad_norm)
    return result(model, optimizer), norms


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=str)
def reference(request: pytest.FixtureRequest) -> tuple[torch.dtype, Any]:
    with device_shared(alone=False):  # a fixture of the module is set up before the test's own hold of the device
        return request.param, trained(request.param, **MIXES["device"])


@pytest.mark.parametrize(
    ("reference", "way"),
    [
        *((torch.bfloat16, w) for w in ("context", "at the step", "serial", "t30 t31 sleeping lanes", *EARLY, *SUMMED)),
        (torch.float32, "context"),  # the order of operations does not depend on the dtype
    ],
    ids=str,
    indirect=["reference"],
)
@pytest.mark.parametrize("mix", MIXES)
def test_t28_every_mix_gives_the_same_bits(reference: tuple[torch.dtype, Any], mix: str, way: str) -> None:
    dtype, (expected, norms) = reference
    options: dict[str, Any] = {**MIXES[mix], "context": "at the step" not in way, "sleep": "sleeping" in way}
    if way in SUMMED:
        options["gradients"] = "host"
    if way in EARLY:
        options["step_early"] = True
    if way == "serial":
        options["overlap"] = False
    found, found_norms = trained(dtype, **options)
    assert [name for name in expected if not same_bits(expected[name], found[name])] == []
    assert found_norms == norms
    assert min(norms) < 1.0 < max(norms)


@pytest.mark.filterwarnings("ignore")  # the profiler talks
@pytest.mark.parametrize("mix", ["host", "streamed", "mixed"])
def test_h65_nothing_waits_on_the_host_from_backward_to_forward(
    mix: str, no_host_waits: Callable[[], AbstractContextManager[None]]
) -> None:
    model, optimizer = make(torch.bfloat16, **MIXES[mix])
    batches = [batch(i, torch.bfloat16) for i in range(12)]
    for i in range(6):
        step(model, optimizer, i, 1)
    torch.cuda.synchronize()
    with (
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        ) as p,
        no_host_waits(),
        torch.profiler.record_function("region"),
    ):
        for x in batches[:3]:
            with optimizer.accumulate(last=True):
                model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model(batches[4])
    optimizer.wait()
    region = next(e.time_range for e in p.events() if e.name == "region")
    waits = [e for e in p.events() if "Synchronize" in e.name]
    # The profiler waits too, before and after.
    assert [e.name for e in waits if region.start <= e.time_range.start <= region.end] == []


@pytest.mark.alone
@pytest.mark.parametrize("traced", [False, True], ids=["", "traced"])
@pytest.mark.parametrize("mix", ["host", "streamed", "mixed"])
def test_h65_a_step_of_many_buckets_is_issued_while_the_device_is_busy(mix: str, traced: bool) -> None:
    """Timed or not: what is measured must not be another step. Timed events beside host functions kept the caller."""
    model = torch.nn.ModuleList(torch.nn.Linear(256, 256, bias=False) for _ in range(160)).to("cuda", torch.bfloat16)
    optimizer = hostward.AdamW(model, lr=1e-3, max_grad_norm=1.0, **MIXES[mix])
    assert len(optimizer.plan.buckets) == 160

    def took_s(cycles: int) -> tuple[float, float]:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        torch.cuda._sleep(cycles)
        began_s = time.perf_counter()
        optimizer.step()
        issued_s = time.perf_counter() - began_s
        optimizer.wait_for_weights()
        torch.cuda.synchronize()
        return issued_s, time.perf_counter() - began_s

    for _ in range(6):
        took_s(0)
    optimizer.wait()
    with optimizer.trace() if traced else contextlib.nullcontext():
        issued_s, passed_s = took_s(int(1e9))
    assert issued_s < 0.5 * passed_s


@pytest.mark.alone  # in turns with other processes, the anchor of the two clocks is as far off as a turn is long
def test_what_the_host_has_clocked_lies_between_the_copies_before_and_behind_it() -> None:
    """One clock is the host's, the other the device's."""
    model, optimizer = make(torch.bfloat16, **MIXES["host"])
    for i in range(6):
        step(model, optimizer, i, 1)
    with optimizer.trace() as trace:
        for i in range(3):
            step(model, optimizer, i, 1)
    spans = {(s.step, s.name.removeprefix("offload/")): s for s in trace.spans}
    host = [(turn, name) for turn, name in spans if name.startswith("host/")]
    assert len(host) == 3 * len(optimizer.plan.buckets)
    for turn, name in host:
        bucket, stepped = name.rpartition("/")[2], spans[turn, name]
        assert spans[turn, "d2h/scalars"].end_s < stepped.start_s + CLOCKS_S
        assert spans[turn, f"d2h/grad/{bucket}"].end_s < stepped.start_s + CLOCKS_S
        assert stepped.end_s < spans[turn, f"h2d/weight/{bucket}"].start_s + CLOCKS_S


@pytest.mark.alone
@pytest.mark.parametrize("mix", ["host", "streamed", "mixed"])
def test_h15_memory_stays_level(mix: str) -> None:
    model, optimizer = make(torch.bfloat16, **MIXES[mix])
    levels = []
    for i in range(60):
        step(model, optimizer, i % 7, 1)
        if i in (20, 59):
            optimizer.wait()
            levels.append(
                (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), optimizer.backend.ledger.pinned_bytes)
            )
    assert levels[0] == levels[1]


@pytest.mark.parametrize("mix", ["host", "streamed", "mixed"])
def test_h12_gradients_and_slots_are_not_reused_too_early(reference: tuple[torch.dtype, Any], mix: str) -> None:
    """Freed memory is taken again at once and filled with NaN, while the copy lanes sleep."""
    dtype, (expected, _) = reference
    model, optimizer = make(dtype, **MIXES[mix])
    sizes = sorted({p.numel() * 4 for p in model.parameters()})
    for i in range(8):
        for stream in optimizer.backend.context.lanes.side.values():  # type: ignore[attr-defined]
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLEEP_CYCLES // 2)
        step(model, optimizer, i)
        for _ in range(3):
            churn = [torch.empty(size, dtype=torch.uint8, device="cuda").fill_(0xFF) for size in sizes]
            del churn
    found = result(model, optimizer)
    assert [name for name in expected if not same_bits(expected[name], found[name])] == []


@pytest.mark.parametrize("mix", ["host", "streamed", "mixed"])
def test_h2_a_model_trained_on_a_side_stream(reference: tuple[torch.dtype, Any], mix: str) -> None:
    dtype, (expected, _) = reference
    model, optimizer = make(dtype, **MIXES[mix])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for i in range(8):
        # Sometimes on one stream, sometimes on the other: the compute lane follows.
        with torch.cuda.stream(side if i % 3 else torch.cuda.default_stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream() if i % 3 else side)
            step(model, optimizer, i)
    torch.cuda.synchronize()
    found = result(model, optimizer)
    assert [name for name in expected if not same_bits(expected[name], found[name])] == []


def test_an_owner_clears_gradients_on_another_stream() -> None:
    """That stream waits until borrowed gradients have been read; the compute stream neither waits nor changes."""

    def trained(fraction: float) -> torch.Tensor:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(1 << 24, device="cuda").bfloat16())
        gradient = torch.zeros(1 << 24, device="cuda")
        optimizer = hostward.AdamW(
            [("weight", weight)],
            offload_fraction=fraction,
            streamed_fraction=1.0,
            grad_dtype=torch.float32,
            waits="manual",
        )
        side = torch.cuda.Stream()
        for i in range(4):
            gradient.add_(weight.detach(), alpha=i + 1)
            optimizer.take_gradient("weight", gradient, borrowed=True)
            optimizer.step()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                optimizer.wait_for_gradients()
                gradient.zero_()
            assert optimizer.backend.at_compute()
            optimizer.wait_for_weights(["weight"])
            torch.cuda.current_stream().wait_stream(side)
        optimizer.wait()
        return weight.detach().clone()

    assert torch.equal(trained(1.0), trained(0.0))


@pytest.mark.parametrize("mix", MIXES)
def test_h2_steps_from_threads_that_have_never_used_the_device(reference: tuple[torch.dtype, Any], mix: str) -> None:
    dtype, (expected, _) = reference
    model, optimizer = make(dtype, **MIXES[mix])
    for i in range(8):
        for j in range(2):
            with optimizer.accumulate(last=j == 1):
                model(batch(i * 10 + j, dtype)).float().square().mean().backward()
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()
        optimizer.zero_grad()
    found = result(model, optimizer)
    assert [name for name in expected if not same_bits(expected[name], found[name])] == []


@pytest.mark.parametrize("mix", MIXES)
def test_t44_a_captured_forward_and_backward(mix: str) -> None:
    """100 replays with a step after each: the weights are those of the eager loop."""
    results = []
    for captured in (False, True):
        model, optimizer = make(torch.float32, **MIXES[mix])
        x = batch(0, torch.float32)
        if captured:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                model(x).float().square().mean().backward()
            torch.cuda.current_stream().wait_stream(side)
            optimizer.zero_grad()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                model(x).float().square().mean().backward()
        for i in range(100):
            x.copy_(batch(i, torch.float32))
            if captured:
                graph.replay()
                optimizer.step()
            else:
                optimizer.zero_grad()
                model(x).float().square().mean().backward()
                optimizer.step()
        optimizer.wait()
        results.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert [name for name in results[0] if not same_bits(results[0][name], results[1][name])] == []


def test_gradient_scaler_skips_and_goes_on() -> None:
    results = []
    for options in (MIXES["device"], MIXES["mixed"]):
        model, optimizer = make(torch.float16, **options)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**18)
        for i in range(8):
            with optimizer.accumulate(last=True):
                scaler.scale(model(batch(i, torch.float16)).float().square().mean()).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append(({n: p.detach().clone() for n, p in model.state_dict().items()}, scaler.get_scale()))
    assert results[0][1] == results[1][1]
    assert [n for n in results[0][0] if not same_bits(results[0][0][n], results[1][0][n])] == []


@pytest.mark.filterwarnings("ignore")  # the compiler looks at .grad of everything
def test_t43_compiled_layers_and_a_compiled_model() -> None:
    def run(how: str) -> dict[str, torch.Tensor]:
        model, optimizer = make(torch.float32, **MIXES["mixed"])
        call: Any = model
        if how == "layers":
            for layer in model.layers:
                layer.compile(backend="aot_eager")
        elif how == "model":
            call = torch.compile(model, backend="aot_eager")
        for i in range(5):
            with optimizer.accumulate(last=True):
                call(batch(i, torch.float32)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.wait()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    expected = run("eager")
    for how in ("layers", "model"):
        found = run(how)
        assert [name for name in expected if not same_bits(expected[name], found[name])] == []


@pytest.mark.alone
def test_slots_go_back_and_the_peak_is_bounded() -> None:
    """Staging takes what backward has freed, and two slots besides."""
    peaks = {}
    for mix in ("device", "streamed"):
        gc.collect()
        before = torch.cuda.memory_allocated()
        model, optimizer = make(torch.bfloat16, **MIXES[mix])
        for i in range(5):
            step(model, optimizer, i, 1)
        optimizer.wait()
        torch.cuda.reset_peak_memory_stats()
        for i in range(5):
            step(model, optimizer, i, 1)
        optimizer.wait()
        peaks[mix] = torch.cuda.max_memory_allocated() - before
        moved = optimizer.plan.offloaded_bytes
        slots = optimizer._executor._slots
        assert optimizer.backend.ledger.by_owner(Tier.DEVICE).get("staging slots", 0) == 0
        del model, optimizer
        torch.cuda.empty_cache()
    assert peaks["streamed"] <= peaks["device"] - moved + 2 * slots.slot_bytes + (8 << 20)
