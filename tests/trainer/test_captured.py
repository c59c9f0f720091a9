"""Iterations as one CUDA graph, on a fake graph that keeps its rules: the bits are those of the run without.

Seen red: `.grad` left as zero_grad() leaves it; batches that are not copied in; weights that have not arrived at the
capture, or at a replay; a step that takes gradients away; a capture beside a save; a graph that outlives its run;
staging slots for memory that no backward frees.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import different, iterations_saved, offloaded
from run_fixtures import Cli

from hostward import recipes
from hostward.config.overrides import apply_overrides
from hostward.config.schema import Config
from hostward.core.units import MIB
from hostward.errors import ConfigError, MemoryLimitError, ModelError, NotBuiltError
from hostward.trainer import cuda_graph, loop, setup
from hostward.trainer.cuda_graph import WARM_UP_ITERATIONS, Captured, capture_error, require_capturable
from hostward.trainer.offload_options import (
    gradient_bytes,
    gradients_offloaded_in_backward,
    staging_bytes,
    staying_gradients,
)
from hostward.trainer.run import Run

LLAMA = "llama32_1b_pretrain_config"
NAN = float("nan")
DENSE = (
    *("model.num_layers=3", "model.hidden_size=64", "model.ffn_hidden_size=96", "model.num_attention_heads=4"),
    *("model.num_query_groups=2", "model.kv_channels=16", "model.seq_length=32", "model.vocab_size=300"),
    *("model.rope_scaling=false", "model.rope_scaling_factor=8", "train.device=cpu", "train.num_threads=1"),
    *("train.train_iters=8", "train.micro_batch_size=2", "train.global_batch_size=8"),
)
GRAPHS = "model.cuda_graph_impl=full_iteration"


class FakeGraph:
    """Stands for a CUDA graph on a CPU. What it recorded runs again at each replay, and its results go to memory that
    is always the same and that holds nothing between recording and the first replay. Nothing in it waits for weights.
    """

    def __init__(self, run: Run) -> None:
        self.nbytes = 0
        self.replays = 0
        self.closed = False
        self._run = run
        self._function: Callable[[], torch.Tensor]
        self._result: torch.Tensor
        self.gradients: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def record(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        assert all(p.grad is None for p in self._run.model.parameters()), "gradients would be added to what is there"
        assert not self._run.optimizer._executor.pending, "weights have not arrived"
        self._function = function
        self._result = torch.full_like(function(), NAN)
        for p in self._run.model.parameters():
            if p.grad is not None:
                p.grad = torch.full_like(p.grad, NAN)
                self.gradients.append((p, p.grad))
        self.nbytes = 1000 + sum(g.nbytes for _, g in self.gradients)
        return self._result

    def replay(self) -> None:
        assert not self.closed
        assert not self._run.optimizer._executor.pending, "weights have not arrived"
        for p, _ in self.gradients:
            p.grad = None
        self._result.copy_(self._function())
        for p, gradient in self.gradients:
            assert p.grad is not None
            gradient.copy_(p.grad)
            p.grad = None  # the device knows nothing of `.grad`
        self.replays += 1

    def close(self) -> None:
        self.closed = True


def configured(text: Path, *words: str, recipe: str = LLAMA) -> Config:
    return apply_overrides(recipes.load(recipe), [*DENSE, f"dataset.path={text}", *words])


def capture(run: Run) -> list[FakeGraph]:
    """Let the run capture its iterations; returns the graphs that it will have made."""
    made: list[FakeGraph] = []

    def new() -> FakeGraph:
        made.append(FakeGraph(run))
        return made[-1]

    run.passes = Captured(new)
    return made


def bits(run: Run) -> dict[str, torch.Tensor]:
    run.optimizer.wait()
    found = {name: weight.clone() for name, weight in run.model.state_dict().items()}
    for name, state in run.optimizer.state_dict()["state"].items():
        found |= {f"{name}/{role}": t.clone() for role, t in state.items()}
    return found


def both(
    text: Path,
    *words: str,
    recipe: str = LLAMA,
    progress: Callable[[Run], None] | None = None,
    init_scale: float | None = None,
) -> tuple[Run, Run, list[FakeGraph]]:
    """Train twice, without graphs and with them; everything that they made must be the same."""
    runs, made = [], []
    for with_graphs in (False, True):
        run = setup.prepare(recipe, configured(text, *words, recipe=recipe))
        made = capture(run) if with_graphs else []
        if init_scale is not None:
            run.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        loop.train(run, progress=progress)
        runs.append(run)
    plain, graphed = runs
    assert graphed.losses == plain.losses
    assert graphed.grad_norms == plain.grad_norms
    assert graphed.skipped == plain.skipped
    assert different(bits(plain), bits(graphed)) == []
    return plain, graphed, made


STREAMED = ("optimizer.offload_optimizer_states=True",)
PLACEMENTS: dict[str, tuple[str, ...]] = {
    "device": (),
    "host": tuple(offloaded(1)),
    "streamed": STREAMED,
    "mixed": (*offloaded(0.7), "optimizer.offload_mix=0.5"),
    "serial": (*offloaded(1), "optimizer.overlap_cpu_optimizer_d2h_h2d=False"),
    "by torch": (*offloaded(1), "optimizer.use_torch_optimizer_for_cpu_offload=True"),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_t44_captured_iterations_train_the_same_bits(text: Path, placement: str) -> None:
    microbatches = 1 if placement in ("host", "streamed", "by torch") else 4
    words = (*PLACEMENTS[placement], f"train.global_batch_size={2 * microbatches}")
    _, run, (graph,) = both(text, *words)
    assert graph.replays == 8 - WARM_UP_ITERATIONS
    assert len(graph.gradients) == len(list(run.model.parameters()))


@pytest.mark.parametrize("placement", ["mixed", "serial"])
def test_t44_fp32_of_another_model(text: Path, placement: str) -> None:
    both(text, "model.params_dtype=fp32", *PLACEMENTS[placement], recipe="qwen3_8b_pretrain_config")


@pytest.mark.parametrize("placement", ["mixed", "by torch"])
def test_t44_a_scaler_whose_first_steps_are_skipped(text: Path, placement: str) -> None:
    """Replayed ones among them: the graph reads the scale that the step before has set."""
    words = ("model.params_dtype=fp16", "train.train_iters=10", *PLACEMENTS[placement])
    plain, *_ = both(text, *words, init_scale=2.0**28)
    assert WARM_UP_ITERATIONS + 1 in plain.skipped
    assert len(plain.skipped) < 10


ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "modules leave": (
        *("model.fine_grained_activation_offloading=true", "model.offload_modules=[core_attn,attn_proj]"),
        "model.min_offloaded_tensor_size=16",
    ),
    "norms again": ("model.recompute_granularity=selective", "model.recompute_modules=[layernorm,mlp_act]"),
    "layers again": (
        *("model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1"),
    ),
}


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_t44_with_activations_that_leave_or_are_made_again(text: Path, activations: str) -> None:
    _, run, _ = both(text, *ACTIVATIONS[activations], *offloaded(1))
    if activations == "modules leave":
        assert run.attachment is not None
        assert run.attachment.report().offloaded_bytes > 0


def test_t44_evaluation_between_replays(text: Path) -> None:
    """Forward alone, and forward and backward of one's own: the next replay and its step know nothing of them."""
    found: dict[int, list[float]] = {}

    def evaluate(run: Run) -> None:
        tokens = torch.arange(32).view(1, 32)
        run.model.eval()
        with torch.no_grad():
            loss = run.model(input_ids=tokens, labels=tokens).loss
        run.model.train()
        run.model(input_ids=tokens, labels=tokens).loss.backward()
        run.optimizer.zero_grad()
        found.setdefault(id(run), []).append(float(loss))

    both(text, *PLACEMENTS["mixed"], progress=evaluate)
    plain, graphed = found.values()
    assert plain == graphed
    assert len(plain) == 8


@pytest.mark.parametrize("placement", ["host", "mixed"])
def test_t44_ordinary_iterations_between_replays(text: Path, placement: str) -> None:
    """Their weights arrive in the next forward, which a replay does not have."""
    found = []
    for with_graphs in (False, True):
        run = setup.prepare(LLAMA, configured(text, *PLACEMENTS[placement]))
        graphs = capture(run) if with_graphs else []
        for i in range(10):
            loop.step(run, loop.backward(run, taken=i % 3 != 2))
            run.optimizer.zero_grad()
        assert [graph.replays for graph in graphs] == ([10 - 3 - WARM_UP_ITERATIONS] if with_graphs else [])
        found.append(bits(run))
        run.passes.close()
    assert different(*found) == []


@pytest.mark.parametrize("mode", ["at once", "stream"])
def test_t44_saved_and_resumed(text: Path, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save is under way when the capture begins: the capture waits for it. The run that goes on captures anew."""
    saving: list[bool] = []
    real = FakeGraph.record

    def record(graph: FakeGraph, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        saving.append(bool(run.saver and run.saver.saving))
        return real(graph, function)

    monkeypatch.setattr(FakeGraph, "record", record)
    options = () if mode == "at once" else ("checkpoint.async_save=true", f"checkpoint.async_save_mode={mode}")
    words = (*PLACEMENTS["mixed"], "train.train_iters=12")
    plain = setup.prepare(LLAMA, configured(text, *words))
    loop.train(plain)
    expected = bits(plain)
    folder = f"checkpoint.save={tmp_path}/run"
    run = setup.prepare(
        LLAMA, configured(text, *words[:-1], "train.train_iters=6", folder, "checkpoint.save_interval=3", *options)
    )
    capture(run)
    loop.train(run)
    losses = list(run.losses)
    run = setup.prepare(LLAMA, configured(text, *words, folder, f"checkpoint.load={tmp_path}/run"))
    made = capture(run)
    loop.train(run)
    assert run.first_iteration == 6
    assert [graph.replays for graph in made] == [6 - WARM_UP_ITERATIONS]
    assert losses + run.losses == plain.losses
    assert different(expected, bits(run)) == []
    assert saving == [False, False]


def test_t44_nothing_is_left_of_a_graph(text: Path) -> None:
    run = setup.prepare(LLAMA, configured(text, *PLACEMENTS["host"]))
    made = capture(run)
    loop.train(run)
    assert [graph.closed for graph in made] == [True]
    assert all(p.grad is None for p in run.model.parameters())
    assert run.graph_bytes == 1000


def test_t44_a_run_that_fails_leaves_nothing_of_its_graph(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = setup.prepare(LLAMA, configured(text, *PLACEMENTS["host"]))
    made = capture(run)
    real = loop.step

    def step(run: Run, loss: torch.Tensor) -> None:
        if made and made[0].replays == 3:
            assert all(p.grad is not None for p in run.model.parameters())
            raise KeyboardInterrupt
        real(run, loss)

    monkeypatch.setattr(loop, "step", step)
    with pytest.raises(KeyboardInterrupt):
        loop.train(run)
    assert run.iteration == WARM_UP_ITERATIONS + 2
    assert [graph.closed for graph in made] == [True]
    assert all(p.grad is None for p in run.model.parameters())


def test_t44_a_run_that_is_asked_to_stop_saves_and_ends(text: Path, tmp_path: Path) -> None:
    words = (f"checkpoint.save={tmp_path}/run", "train.exit_signal_handler=true", *PLACEMENTS["mixed"])
    run = setup.prepare(LLAMA, configured(text, *words))
    made = capture(run)

    def ask(run: Run) -> None:
        run.stop_asked = run.iteration >= WARM_UP_ITERATIONS + 2

    loop.train(run, progress=ask)
    assert run.stopped
    assert iterations_saved(tmp_path / "run") == [f"iter_{WARM_UP_ITERATIONS + 3:07}"]
    assert [graph.closed for graph in made] == [True]


def test_t44_gradients_stay_where_they_are_and_leave_in_the_step(text: Path) -> None:
    """Of eager iterations they leave in backward; nothing of a replayed one is hidden."""
    run = setup.prepare(LLAMA, configured(text, *PLACEMENTS["host"], "train.global_batch_size=2"))
    (graphs, seen) = capture(run), []
    for _ in range(WARM_UP_ITERATIONS + 2):
        loss = loop.backward(run)
        seen.append(len(run.optimizer._grad_hooks.taken))
        if graphs:
            assert all(p.grad is g for p, g in graphs[0].gradients)
        loop.step(run, loss)
        assert not graphs or not run.optimizer._executor.pending
        run.optimizer.zero_grad()
    count = len(list(run.model.parameters()))
    assert seen == [count] * WARM_UP_ITERATIONS + [0, 0]
    run.passes.close()


def test_t44_too_few_iterations_are_told(text: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = setup.prepare(LLAMA, configured(text, "train.train_iters=3"))
    made = capture(run)
    with caplog.at_level(logging.WARNING, "hostward"):
        loop.train(run)
    assert made == []
    assert "has no effect in 3 iterations" in caplog.text


def test_t44_what_a_captured_run_is_weighed_with(text: Path) -> None:
    """Gradients stay in any case, and slots have no memory that backward has freed."""
    words = (*PLACEMENTS["mixed"], "train.global_batch_size=2", "train.device=cuda")
    plain, graphed = configured(text, *words), configured(text, *words, GRAPHS)
    run = setup.prepare(LLAMA, configured(text, *words[:-1]))
    inventory, plan = run.optimizer.inventory, run.optimizer.plan
    assert gradients_offloaded_in_backward(plain)
    assert not gradients_offloaded_in_backward(graphed)
    assert gradient_bytes(graphed, inventory, plan) == 2 * inventory.numel
    assert staying_gradients(graphed, inventory, plan) == {p.name for p in inventory.parameters}
    assert staying_gradients(plain, inventory, plan) < staying_gradients(graphed, inventory, plan)
    assert staging_bytes(plain, lambda: inventory) is None
    largest = max(bucket.offsets[-1] for bucket in inventory.buckets)
    assert staging_bytes(graphed, lambda: inventory) == 2 * 10 * largest
    graphed.optimizer.optimizer_state_offload_chunk_size_mb = 3
    assert staging_bytes(graphed, lambda: inventory) == 3 * MIB


# -------------------------------------------------------------------- refused


def test_there_are_no_graphs_on_a_cpu(refused: Cli, text: Path) -> None:
    words = ["model.architecture=qwen3", "model.num_moe_experts=null", "model.moe_ffn_hidden_size=null"]
    assert "which has no CUDA graphs" in refused(*words, GRAPHS).err
    config = configured(text, GRAPHS, "train.device=auto")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="a machine without a GPU"):
            setup.prepare(LLAMA, config)


def test_what_torch_raises_of_a_capture_is_told() -> None:
    """Of two errors the first; an error of hostward's own as it is."""

    def failed(first: Exception) -> RuntimeError:
        try:
            try:
                raise first
            finally:
                raise RuntimeError("operation failed due to a previous error during capture")
        except RuntimeError as error:
            return error

    own = ModelError("ours")
    assert capture_error(failed(own)) is own
    told = capture_error(failed(RuntimeError("operation not permitted when stream is capturing\nmore")))
    assert isinstance(told, ModelError)
    assert told.why == "RuntimeError: operation not permitted when stream is capturing"
    assert isinstance(capture_error(failed(torch.OutOfMemoryError("none left"))), MemoryLimitError)
    assert isinstance(capture_error(torch.OutOfMemoryError("none left")), MemoryLimitError)


def test_plans_and_graphs_exclude_each_other(cli: Cli) -> None:
    plan: Any = object()
    with pytest.raises(NotBuiltError, match="--plan with model"):
        cuda_graph.require_graphs(torch.device("cuda"), plan)
    outcome = cli("plan", "--recipe", LLAMA, GRAPHS)
    assert outcome.code == 2
    assert "hostward plan with model.cuda_graph_impl=full_iteration" in outcome.err


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"attention_dropout": 0.1}, "it uses dropout"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "attend within windows"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rotary embedding"),
    ],
)
def test_pretrained_models_that_cannot_be_captured_are_refused(changes: dict[str, Any], told: str) -> None:
    from transformers import Qwen3Config

    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 64}
    require_capturable(Qwen3Config(**sizes))
    with pytest.raises(ConfigError, match="with this model") as error:
        require_capturable(Qwen3Config(**sizes, **changes))
    assert told in str(error.value)
