"""`hostward train` with forward and backward of an iteration as one CUDA graph: every loss, norm, weight and moment has
the bits of the run without, wherever the state is, and whatever lane is slow.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from hidden_step_cases import SIDE_LANES, slow

from hostward import recipes
from hostward.config.overrides import apply_overrides
from hostward.config.schema import Config
from hostward.optim.bucket_state import same_bits
from hostward.trainer import loop, setup
from hostward.trainer.cuda_graph import WARM_UP_ITERATIONS, CudaGraph
from hostward.trainer.run import Run

pytestmark = pytest.mark.gpu

RECIPES = {"Llama": "llama32_1b_pretrain_config", "Qwen3": "qwen3_8b_pretrain_config"}
SMALL = (
    *("model.num_layers=4", "model.hidden_size=256", "model.ffn_hidden_size=512", "model.num_attention_heads=4"),
    *("model.num_query_groups=2", "model.kv_channels=64", "model.seq_length=128", "model.vocab_size=512"),
    *("model.deterministic_mode=true", "train.device=cuda", "train.train_iters=20", "train.micro_batch_size=2"),
    *("train.global_batch_size=4", "dataset.format=mock", "tokenizer.tokenizer_type=null"),
)
GRAPHS = "model.cuda_graph_impl=full_iteration"
ON_HOST = ("optimizer.optimizer_cpu_offload=true", "optimizer.optimizer_offload_fraction=1.0")
PLACEMENTS: dict[str, tuple[str, ...]] = {
    "device": (),
    "host": ON_HOST,
    "streamed": ("optimizer.offload_optimizer_states=true",),
    "mixed": (*ON_HOST[:1], "optimizer.optimizer_offload_fraction=0.7", "optimizer.offload_mix=0.5"),
    "serial": (*ON_HOST, "optimizer.overlap_cpu_optimizer_d2h_h2d=false"),
}
LEAVING = (
    *("model.cpu_offloading=true", "model.cpu_offloading_num_layers=3"),
    "model.cpu_offloading_retain_pinned_cpu_buffers=true",
)
ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "layers": LEAVING,
    "double buffering": (*LEAVING, "model.cpu_offloading_double_buffering=true"),
    "modules": (
        *("model.fine_grained_activation_offloading=true", "model.offload_modules=[core_attn,attn_proj]"),
        "model.min_offloaded_tensor_size=1024",
    ),
    "norms again": ("model.recompute_granularity=selective", "model.recompute_modules=[layernorm,mlp_act]"),
    "layers again": (
        *("model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1"),
    ),
    "layers again, leaving": (
        *("model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1"),
        *LEAVING,
    ),
}


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    gc.collect()  # of earlier tests
    yield
    gc.collect()


def config_of(model: str, *words: str) -> Config:
    rope = ("model.rope_scaling=false", "model.rope_scaling_factor=8") if model == "Llama" else ()
    return apply_overrides(recipes.load(RECIPES[model]), [*SMALL, *rope, *words])


def trained(model: str, *words: str) -> Run:
    run = setup.prepare(RECIPES[model], config_of(model, *words))
    loop.train(run)
    return run


def bits(run: Run) -> dict[str, torch.Tensor]:
    run.optimizer.wait()
    found = {name: weight.clone() for name, weight in run.model.state_dict().items()}
    for name, state in run.optimizer.state_dict()["state"].items():
        found |= {f"{name}/{role}": t.clone() for role, t in state.items()}
    return found


def require_same(plain: Run, graphed: Run) -> None:
    assert len(plain.losses) == 20
    assert graphed.graph_bytes > 0, "nothing was captured"
    assert graphed.losses == plain.losses
    assert graphed.grad_norms == plain.grad_norms
    assert graphed.skipped == plain.skipped
    expected, found = bits(plain), bits(graphed)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not same_bits(expected[name].cpu(), found[name].cpu())] == []


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("model", RECIPES)
def test_t44_captured_training_has_the_same_bits(model: str, placement: str, microbatches: int) -> None:
    words = (*PLACEMENTS[placement], f"train.global_batch_size={2 * microbatches}")
    require_same(trained(model, *words), trained(model, *words, GRAPHS))


@pytest.mark.parametrize("placement", ["host", "streamed", "mixed"])
def test_t30_t44_with_slow_lanes(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next replay waits for weights that are late, and none overwrites gradients that are still to leave."""
    words = (*PLACEMENTS[placement], "train.global_batch_size=2")
    plain = trained("Llama", *words)
    slow(SIDE_LANES, monkeypatch)
    require_same(plain, trained("Llama", *words, GRAPHS))


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_t44_with_activations_that_leave_or_are_made_again(activations: str) -> None:
    words = (*PLACEMENTS["mixed"], "model.seq_length=1024")  # smaller tensors would stay
    plain = trained("Qwen3", *words)
    graphed = trained("Qwen3", *words, *ACTIVATIONS[activations], GRAPHS)
    require_same(plain, graphed)
    assert (graphed.attachment is None) == (activations == "layers again")
    if graphed.attachment is not None and activations != "norms again":
        assert graphed.attachment.report().offloaded_bytes > 0


def test_t44_fp16_and_its_scale() -> None:
    words = ("model.params_dtype=fp16", *PLACEMENTS["host"])
    require_same(trained("Llama", *words), trained("Llama", *words, GRAPHS))


def test_t44_saved_beside_training_and_resumed(tmp_path: Path) -> None:
    """A save is under way when the capture begins, and others while the graph is replayed."""
    words = PLACEMENTS["mixed"]
    plain = trained("Llama", *words)
    folder = f"checkpoint.save={tmp_path}/run"
    saving = ("checkpoint.async_save=true", "checkpoint.save_interval=3")
    half = trained("Llama", *words, GRAPHS, folder, *saving, "train.train_iters=10")
    rest = trained("Llama", *words, GRAPHS, folder, *saving, f"checkpoint.load={tmp_path}/run")
    assert rest.first_iteration == 10
    assert half.losses + rest.losses == plain.losses
    expected, found = bits(plain), bits(rest)
    assert [name for name in expected if not same_bits(expected[name].cpu(), found[name].cpu())] == []


def test_h65_a_replayed_iteration_waits_on_nothing(
    no_host_waits: Callable[[], AbstractContextManager[None]],
) -> None:
    run = setup.prepare(RECIPES["Llama"], config_of("Llama", *PLACEMENTS["mixed"], GRAPHS))
    with loop.deterministic(True):
        for _ in range(WARM_UP_ITERATIONS + 2):
            loop.train_iteration(run)
        with no_host_waits():
            loop.train_iteration(run)
            loop.train_iteration(run)
        run.optimizer.wait()
    run.passes.close()


def test_h19_what_a_graph_keeps_is_less_with_offloaded_activations() -> None:
    long = ("model.seq_length=2048", "train.train_iters=6", "model.num_layers=8")
    trained("Llama", "train.train_iters=6", GRAPHS)  # cuBLAS takes its workspace in the first graph of a process
    kept = trained("Llama", *long, GRAPHS)
    away = trained("Llama", *long, GRAPHS, *LEAVING, "model.cpu_offloading_num_layers=7")
    assert away.losses == kept.losses
    assert away.attachment is not None
    freed_bytes = away.attachment.report().freed_bytes // (2 * (WARM_UP_ITERATIONS + 1))  # of each of two microbatches
    assert freed_bytes > 32 * 2**20
    assert kept.graph_bytes - away.graph_bytes > freed_bytes // 2


def test_t44_nothing_is_left_of_a_graph() -> None:
    """Neither device memory nor gradients, and the model attends by the same implementation as before its capture."""
    levels = []
    for _ in range(3):
        run = setup.prepare(RECIPES["Llama"], config_of("Llama", *PLACEMENTS["host"], GRAPHS))
        attention = run.model.config._attn_implementation  # type: ignore[union-attr]
        loop.train(run)
        assert all(p.grad is None for p in run.model.parameters())
        assert run.model.config._attn_implementation == attention  # type: ignore[union-attr]
        del run
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        levels.append(torch.cuda.memory_allocated())
    assert levels[1] == levels[2]


ASKING = """
import sys
from hostward.cli import main
from hostward.trainer import cuda_graph
real = cuda_graph.training_loss
def asking(*arguments):
    loss = real(*arguments)
    float(loss)
    return loss
cuda_graph.training_loss = asking
sys.exit(main(["train", *sys.argv[1:]]))
"""


def test_t44_what_cannot_be_captured_is_told() -> None:
    """In a process of its own: torch's allocator and generators do not forget a capture that has failed."""
    words = ["--recipe", RECIPES["Llama"], *SMALL, "model.rope_scaling=false", "model.rope_scaling_factor=8", GRAPHS]
    ended = subprocess.run([sys.executable, "-c", ASKING, *words], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2, ended.stderr
    assert "forward and backward cannot be captured in a CUDA graph" in ended.stderr
    assert "fix: set model.cuda_graph_impl=none" in ended.stderr


def test_t44_a_trace_of_replayed_iterations() -> None:
    """As many bytes go to and fro as without; no gradient leaves while backward runs, and the replay waits for all."""
    words = (*PLACEMENTS["host"], "train.global_batch_size=2")
    plain, graphed = (
        setup.prepare(RECIPES["Llama"], config_of("Llama", *words, *graphs)) for graphs in ((), (GRAPHS,))
    )
    for run in (plain, graphed):
        loop.train(run, metered=5)
    require_same(plain, graphed)
    assert plain.offload is not None
    assert graphed.offload is not None
    assert graphed.offload.transfer_bytes == plain.offload.transfer_bytes
    assert graphed.offload.exposed_s > 0


def test_a_graph_knows_its_memory() -> None:
    """12 MiB are returned to the pool when their sum is taken."""
    x = torch.ones(1024, 1024, device="cuda")
    graph = CudaGraph(x.device)
    result = graph.record(lambda: torch.cat([x, x + 1, x + 2]).sum())
    assert 12 * 2**20 <= graph.nbytes <= 64 * 2**20
    graph.replay()
    assert result.item() == 6 * 2**20
    graph.close()
