"""Forward and backward with offloaded activations, captured in a CUDA graph: every replay has the gradients of the
eager run without offloading, whatever lane is slow, and the graph's memory is less.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attached_cases import MIB, WIDTH, Net, churn, deterministic_algorithms, put_to_sleep, same

import hostward
from hostward.errors import ModelError
from hostward.runtime.backend import Tier
from hostward.schedule.ops import Lane

pytestmark = pytest.mark.gpu

ROWS = 8192
TOKENS, HIDDEN = 1024, 512
ELEMENTWISE = ("layernorm", "mlp_act")
BOTH = (Lane.D2H, Lane.H2D)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    # Lanes and host memory of earlier tests are not to be collected in the middle of a capture: that waits on the host.
    gc.collect()
    gc.disable()
    with deterministic_algorithms(warn_only=False):
        yield
    gc.enable()


class Decoder(torch.nn.Module):
    """The layers of a model of transformers. The model itself makes another mask in a capture than outside of it, and
    so uses another kernel of attention.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        import transformers

        config = getattr(transformers, f"{kind}Config")(
            hidden_size=HIDDEN, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=8, head_dim=64, vocab_size=64, attn_implementation="sdpa", use_cache=False,
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device("cuda"):
            model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.layers, self.rotary = model.train().model.layers, model.model.rotary_emb

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        rotary = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        return x


def build(kind: str) -> torch.nn.Module:
    if kind in ("blocks", "checkpointed"):
        return Net(depth=5, recompute=kind == "checkpointed", keep_rng=False)
    return Decoder(kind)


def batch(model: torch.nn.Module, seed: int, rows: int = ROWS) -> torch.Tensor:
    shape = (2, TOKENS, HIDDEN) if isinstance(model, Decoder) else (rows, WIDTH)
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)


def backward(model: torch.nn.Module, x: torch.Tensor, microbatches: int = 1) -> None:
    for i in range(microbatches):
        model(x * (i + 1)).float().square().mean().backward()


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def eager(model: torch.nn.Module, x: torch.Tensor, microbatches: int = 1) -> list[torch.Tensor]:
    model.zero_grad()
    backward(model, x, microbatches)
    return gradients(model)


def attach(model: torch.nn.Module, optimizer: Any = None, **options: Any) -> hostward.Attachment:
    recompute = options.pop("recompute", None)
    how = hostward.Activations(**{"min_bytes": 4096, "retain_pinned_buffers": True, **options})
    return hostward.attach(model, optimizer, activations=how, recompute=recompute)


def warm_up(model: torch.nn.Module, x: torch.Tensor, microbatches: int = 1) -> torch.cuda.Stream:
    """Three iterations on a side stream, which is returned; no gradient is left."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad()
            backward(model, x, microbatches)
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad()
    return side


def captured(model: torch.nn.Module, x: torch.Tensor, microbatches: int = 1) -> torch.cuda.CUDAGraph:
    warm_up(model, x, microbatches)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backward(model, x, microbatches)
    return graph


def forget_failures() -> None:
    """Let go of the graph that autograd failed in last: its nodes are bound to the stream of the capture."""
    gc.collect()
    torch.ones(1, device="cuda", requires_grad=True).sum().backward()


def require_replays(
    model: torch.nn.Module, run: hostward.Attachment, replays: int, *, x: torch.Tensor, plain: torch.nn.Module,
    microbatches: int = 1,
) -> None:  # fmt: skip
    """Gradients of every replay are those of `plain`, and nothing is allocated meanwhile. Detaches."""
    graph = captured(model, x, microbatches)
    report, held = run.report(), run.backend.ledger.by_owner(Tier.HOST)
    assert report.offloaded_bytes == report.reloaded_bytes > 0
    assert report.on_demand_bytes == 0
    for seed in range(replays):
        x.copy_(batch(model, seed))
        graph.replay()
        churn()
        assert same(gradients(model), eager(plain, x, microbatches)), f"replay {seed}"
    assert (run.report(), run.backend.ledger.by_owner(Tier.HOST)) == (report, held)
    torch.cuda.synchronize()
    del graph
    run.detach()
    assert run.report().host_bytes == 0
    assert "saved activations" not in run.backend.ledger.by_owner(Tier.HOST)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "blocks", "checkpointed"])
def test_t44_h25_gradients_of_100_replays(kind: str) -> None:
    model = build(kind)
    require_replays(model, attach(model), 100, x=batch(model, 0), plain=build(kind))


@pytest.mark.parametrize("slow", [(Lane.D2H,), (Lane.H2D,), BOTH], ids=str)
@pytest.mark.parametrize("kind", ["Llama", "blocks", "checkpointed"])
def test_t30_t31_t44_replays_with_sleeping_lanes(kind: str, slow: tuple[Lane, ...]) -> None:
    model = build(kind)
    run = attach(model)
    put_to_sleep(run, slow)
    require_replays(model, run, 8, x=batch(model, 0), plain=build(kind))


OPTIONS: dict[str, dict[str, Any]] = {
    "two layers": {"num_layers": 2},
    "double buffering": {"num_layers": 3, "double_buffering": True},
    "none in flight": {"max_in_flight": 0},
    "modules": {"modules": ("linear",)},
}


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("options", OPTIONS)
def test_t44_options_and_microbatches(options: str, microbatches: int) -> None:
    model = build("blocks")
    run = attach(model, **OPTIONS[options])
    put_to_sleep(run, BOTH)
    require_replays(model, run, 4, x=batch(model, 0), plain=build("blocks"), microbatches=microbatches)


def test_t44_with_elementwise_recomputation() -> None:
    model = build("Llama")
    require_replays(model, attach(model, recompute=ELEMENTWISE), 20, x=batch(model, 0), plain=build("Llama"))


def test_t44_eager_iterations_and_a_second_graph_between_replays() -> None:
    """Each has host memory of its own; another shape needs its own iterations before its capture."""
    model, plain = build("blocks"), build("blocks")
    run = attach(model)
    put_to_sleep(run, BOTH)
    graphs = []
    for rows in (ROWS, ROWS // 2):
        x = batch(model, 0, rows)
        graph = captured(model, x)
        graphs.append((graph, x, [p.grad for p in model.parameters()]))
        model.zero_grad()
    for seed in range(10):
        for graph, x, found in graphs:
            x.copy_(batch(model, seed, len(x)))
            graph.replay()
            assert same(eager(model, x), eager(plain, x)), seed
            churn()
            assert same([g for g in found if g is not None], gradients(plain)), seed
    run.detach()


def test_h19_the_graph_takes_less_memory() -> None:
    pools, freed = [], 0
    for offloaded in (False, True):
        gc.collect()
        model = Net(depth=12)
        run = attach(model, num_layers=10) if offloaded else None
        x = batch(model, 0)
        side = warm_up(model, x)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before, freed = torch.cuda.memory_reserved(), 0 if run is None else run.report().freed_bytes
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):  # where cuBLAS has its workspace already
            backward(model, x)
        torch.cuda.empty_cache()
        pools.append(torch.cuda.memory_reserved() - before)
        graph.replay()
        torch.cuda.synchronize()
        if run is not None:
            freed = run.report().freed_bytes - freed
            run.detach()
        del graph, model, run
    assert freed > 96 * MIB
    assert pools[0] - pools[1] > freed // 2


@pytest.mark.parametrize("mix", [(1.0, 0.0), (1.0, 0.5)], ids=["host", "half streamed"])
def test_t44_steps_between_replays(mix: tuple[float, float]) -> None:
    """Three eager steps, then one after each of 50 replays: weights are those of the eager loop without offloading."""
    results = []
    for offloaded in (False, True):
        model = build("blocks")
        optimizer = hostward.AdamW(
            model, lr=1e-2, max_grad_norm=1.0, offload_fraction=mix[0], streamed_fraction=mix[1]
        )  # fmt: skip
        run = attach(model, optimizer) if offloaded else None
        x = batch(model, 0)
        for seed in range(3):
            x.copy_(batch(model, seed))
            backward(model, x)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.wait_for_weights()
        graph = torch.cuda.CUDAGraph()
        if offloaded:
            with torch.cuda.graph(graph):
                backward(model, x)
        for seed in range(50):
            x.copy_(batch(model, seed))
            if offloaded:
                graph.replay()
            else:
                optimizer.zero_grad()
                backward(model, x)
            churn()
            optimizer.step()
        optimizer.wait()
        results.append([p.detach().clone() for p in model.parameters()])
        if run is not None:
            run.detach()
    assert same(*results)


def test_t44_weights_on_their_way_are_refused() -> None:
    model = build("blocks")
    optimizer = hostward.AdamW(model, offload_fraction=1.0, streamed_fraction=0.0)
    x = batch(model, 0)
    backward(model, x)
    optimizer.step()
    optimizer.zero_grad()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x * 2
        with pytest.raises(ModelError, match="are still to arrive, and a CUDA graph is captured"):
            model(x)
    optimizer.wait()


def test_t44_what_cannot_be_captured_is_refused_and_eager_training_goes_on() -> None:
    model, plain = build("blocks"), build("blocks")
    x = batch(model, 0)
    expected = eager(plain, x)
    unfit = {"retain_pinned_buffers": False}
    for how, told in ((unfit, "retain_pinned_buffers"), ({}, "do not suffice for a CUDA graph")):
        run = attach(model, **how)
        if how:
            warm_up(model, x)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x * 2
            with pytest.raises(ModelError, match=told):
                model(x)
        forget_failures()
        assert same(eager(model, x), expected)
        run.detach()


def test_t44_backward_of_another_capture_is_refused() -> None:
    model = build("blocks")
    run = attach(model)
    x = batch(model, 0)
    warm_up(model, x)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        loss = model(x).float().square().mean()
    with pytest.raises(ModelError, match="backward outside of any CUDA graph of a forward in the capture"):
        loss.backward()
    del loss
    forget_failures()
    assert same(eager(model, x), eager(build("blocks"), x))
    run.detach()


@pytest.mark.filterwarnings("ignore")  # the graph of backward is empty
def test_t44_make_graphed_callables_is_refused() -> None:
    """It captures forward and backward apart."""
    model = build("blocks")
    run = attach(model)
    with pytest.raises(ModelError, match="make_graphed_callables captures forward and backward separately"):
        torch.cuda.make_graphed_callables(model, (batch(model, 0),))
    run.detach()
