"""Capture forward and backward of an iteration in one CUDA graph, and replay it with each batch.

The graph writes to fixed addresses: `.grad` of every parameter, and the loss. The optimizer's step comes after
the replay, outside of the graph, and all weights are on the device before the next one.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hostward.core.units import gib
from hostward.errors import ConfigError, HostwardError, MemoryLimitError, ModelError
from hostward.trainer import checkpointing
from hostward.trainer.garbage_collection import gc_disabled
from hostward.trainer.memory_sampler import BACKWARD
from hostward.trainer.microbatches import WholeModel, samples
from hostward.trainer.models import training_loss
from hostward.trainer.plan_request import unplanned_graphs

if TYPE_CHECKING:
    from hostward.plan.plan_file import PlanFile
    from hostward.trainer.run import Run

log = logging.getLogger("hostward")

WARM_UP_ITERATIONS = 3
"""Eager iterations before the capture.

Libraries allocate their workspaces, activation offloading its pinned memory, and the GPU staging buffers settle.
"""


class Graph(Protocol):
    """Records the work that a device does in one function."""

    nbytes: int
    """Device memory that recording has allocated and that is unavailable to others until `close`."""

    def record(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Record `function` instead of running it; `replay` fills the tensor that it returns and the gradients that it
        makes.
        """

    def replay(self) -> None:
        """Enqueue the recorded work on the current stream, without waiting for it."""

    def close(self) -> None:
        """Drop the recording, once the device has finished it."""


class CudaGraph:
    """Records into a torch.cuda.CUDAGraph with a memory pool of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()
        self.nbytes = 0

    def record(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Record `function`.

        Raises ModelError if it cannot be captured, MemoryLimitError if the pool does not fit.
        """
        torch.cuda.synchronize(self._device)
        gc.collect()
        with gc_disabled():  # a collected object may free pinned memory or destroy events, which would end the capture
            torch.cuda.empty_cache()  # blocks cached by eager iterations would take memory besides the pool
            before_bytes, stream = torch.cuda.memory_reserved(self._device), torch.cuda.current_stream(self._device)
            try:
                with torch.cuda.graph(self._graph):
                    result = function()
            except RuntimeError as error:
                raise capture_error(error) from error
            finally:
                torch.cuda.set_stream(stream)  # if ending a capture fails, its stream stays current
        self.nbytes = torch.cuda.memory_reserved(self._device) - before_bytes
        return result

    def replay(self) -> None:
        self._graph.replay()

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self._graph.reset()


def capture_error(error: RuntimeError) -> HostwardError:
    """Return the error for a failed capture, from the error that torch raised."""
    cause = error.__context__ or error  # the error that ended the capture, not the one from ending it
    why = f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
    if isinstance(cause, HostwardError):
        return cause
    if isinstance(cause, torch.OutOfMemoryError):
        return MemoryLimitError(
            "the device has not enough memory for a CUDA graph of forward and backward",
            why=why,
            fix="offload more, or set model.cuda_graph_impl=none: a graph keeps its memory between replays",
        )
    return ModelError(
        "forward and backward cannot be captured in a CUDA graph", why=why, fix="set model.cuda_graph_impl=none"
    )


class Captured:
    """Runs batches like WholeModel, from the fourth iteration on by a CUDA graph.

    Args:
        new_graph: makes an empty graph.
    """

    def __init__(self, new_graph: Callable[[], Graph]) -> None:
        self._new_graph = new_graph
        self._eager = WholeModel()
        self._seen = 0
        self._graph: Graph | None = None
        self._batches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._loss: torch.Tensor | None = None
        self._gradients: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._begun = False

    def backward(self, run: Run, *, taken: bool) -> torch.Tensor:
        """Run the batch by graph, as `Passes.backward`; without `taken` run it eagerly."""
        if not taken:
            return self._eager.backward(run, taken=False)
        if not self._begun:
            self._begun = True
            _warn_if_too_few(run)
        if self._seen < WARM_UP_ITERATIONS:
            self._seen += 1
            return self._eager.backward(run, taken=True)
        if self._graph is None or self._loss is None:
            self._graph, self._loss = self._record(run)
        for microbatch, (inputs, labels) in enumerate(self._batches):
            new_inputs, new_labels = samples(run, microbatch)
            inputs.copy_(new_inputs)
            labels.copy_(new_labels)
        run.optimizer.wait_for_weights()
        self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient  # zero_grad() has removed it
        run.optimizer.replayed()
        run.sampler.sample(run.iteration, BACKWARD)
        return self._loss

    def close(self) -> None:
        """Drop the graph; eager iterations may follow."""
        if self._graph is not None:
            self._graph.close()
        for parameter, gradient in self._gradients:
            if parameter.grad is gradient:
                parameter.grad = None
        self._graph = self._loss = None
        self._batches, self._gradients = [], []
        self._seen, self._begun = 0, False

    def _record(self, run: Run) -> tuple[Graph, torch.Tensor]:
        checkpointing.finish(run)  # copies that a save makes in another thread would end the capture
        run.optimizer.zero_grad(set_to_none=True)
        run.optimizer.wait_for_weights()
        self._batches = [samples(run, microbatch) for microbatch in range(run.microbatches)]
        graph = self._new_graph()
        try:
            loss = graph.record(lambda: self._passes(run))
        except BaseException:
            run.optimizer.zero_grad(set_to_none=True)  # the gradients there have never been computed
            raise
        self._gradients = [(p, p.grad) for p in run.model.parameters() if p.grad is not None]
        run.graph_bytes = max(0, graph.nbytes - sum(gradient.nbytes for _, gradient in self._gradients))
        log.info(
            "iteration %d: forward and backward were captured in a CUDA graph of %s GiB, gradients included",
            run.iteration,
            gib(graph.nbytes),
        )
        return graph, loss

    def _passes(self, run: Run) -> torch.Tensor:
        """Run the passes to record.

        Order and dtype of every addition are those of `WholeModel`.
        """
        total = torch.zeros((), dtype=torch.float32, device=run.device)
        for inputs, labels in self._batches:
            mean = training_loss(run.model, inputs, labels) / run.microbatches
            total += mean.detach().float()
            (mean if run.scaler is None else run.scaler.scale(mean)).backward()  # type: ignore[no-untyped-call]
        return total


def _warn_if_too_few(run: Run) -> None:
    left = run.config.train.train_iters - run.iteration
    if left <= WARM_UP_ITERATIONS:
        log.warning(
            "model.cuda_graph_impl=full_iteration has no effect in %d iterations: the first %d run without a graph",
            left,
            WARM_UP_ITERATIONS,
        )


def require_graphs(device: torch.device, plan: PlanFile | None) -> None:
    """Raise ConfigError if iterations cannot be captured, NotBuiltError with a plan."""
    if device.type != "cuda":
        raise ConfigError(
            "model.cuda_graph_impl=full_iteration on a machine without a GPU, which has no CUDA graphs",
            fix="set model.cuda_graph_impl=none",
        )
    if plan is not None:
        raise unplanned_graphs("--plan")


def require_capturable(described: Any) -> None:
    """Raise ConfigError for a pretrained model whose capture fails or is not bitwise identical to eager execution.

    `described` is its transformers configuration.
    """
    rope = (getattr(described, "rope_parameters", None) or {}).get("rope_type", "default")
    kinds = set(getattr(described, "layer_types", None) or ("full_attention",))
    problem = None
    if described.attention_dropout > 0:
        problem = "it uses dropout, and a graph's random numbers differ from those of eager execution"
    elif kinds != {"full_attention"}:
        problem = f"its layers attend within windows ({', '.join(sorted(kinds))}), which needs a mask"
    elif rope in ("dynamic", "longrope"):
        problem = f"its rotary embedding ({rope}) asks the device for the length of each batch"
    if problem is not None:
        raise ConfigError(
            "model.cuda_graph_impl=full_iteration with this model.hf_model_path",
            why=problem,
            fix="set model.cuda_graph_impl=none",
        )
