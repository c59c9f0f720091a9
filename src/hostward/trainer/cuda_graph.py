"""Iterations whose forward and backward are one CUDA graph: recorded once, and replayed with each batch.

What the graph writes has fixed addresses: `.grad` of every parameter, and the loss. The optimizer's step comes after
the replay, outside of the graph, and weights have arrived before the next one.
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
from hostward.trainer.garbage_collection import uncollected
from hostward.trainer.memory_sampler import BACKWARD
from hostward.trainer.microbatches import WholeModel, samples
from hostward.trainer.models import training_loss
from hostward.trainer.plan_request import unplanned_graphs

if TYPE_CHECKING:
    from hostward.plan.plan_file import PlanFile
    from hostward.trainer.run import Run

log = logging.getLogger("hostward")

WARM_UP_ITERATIONS = 3
"""Before the capture: libraries take their workspaces, offloaded activations the host memory that the graph will have,
and staging slots settle.
"""


class Graph(Protocol):
    """What a device does in one function, recorded."""

    nbytes: int
    """Device memory that recording has taken, and that nothing else gets until `close`."""

    def record(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Record `function` instead of running it. The tensor that it returns, and gradients that it makes, have memory
        that `replay` fills.
        """

    def replay(self) -> None:
        """Do what was recorded, behind what the current stream has been given. Not waited for."""

    def close(self) -> None:
        """Forget the recording, once the device is done with it."""


class CudaGraph:
    """A torch.cuda.CUDAGraph with a memory pool of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()
        self.nbytes = 0

    def record(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Raises ModelError for what cannot be captured, MemoryLimitError where the pool does not fit."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        with uncollected():  # what dies may free page-locked memory or destroy events, which would end the capture
            torch.cuda.empty_cache()  # what eager iterations left would stand beside the pool
            before_bytes, stream = torch.cuda.memory_reserved(self._device), torch.cuda.current_stream(self._device)
            try:
                with torch.cuda.graph(self._graph):
                    result = function()
            except RuntimeError as error:
                raise capture_error(error) from error
            finally:
                torch.cuda.set_stream(stream)  # where the end of a capture fails it stays on that of the capture
        self.nbytes = torch.cuda.memory_reserved(self._device) - before_bytes
        return result

    def replay(self) -> None:
        self._graph.replay()

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self._graph.reset()


def capture_error(error: RuntimeError) -> HostwardError:
    """Return the error for a capture that has failed, from what torch raised."""
    cause = error.__context__ or error  # what ended the capture, not what the end of it found
    why = f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
    if isinstance(cause, HostwardError):
        return cause
    if isinstance(cause, torch.OutOfMemoryError):
        return MemoryLimitError(
            "the device has no room for a CUDA graph of forward and backward",
            why=why,
            fix="offload more, or set model.cuda_graph_impl=none: a graph keeps its memory between replays",
        )
    return ModelError(
        "forward and backward cannot be captured in a CUDA graph", why=why, fix="set model.cuda_graph_impl=none"
    )


class Captured:
    """As WholeModel, from the fourth iteration on by a graph.

    Args:
        new_graph: makes a graph that has recorded nothing.
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
        """As `Passes.backward`. Without `taken` it is an ordinary one."""
        if not taken:
            return self._eager.backward(run, taken=False)
        if not self._begun:
            self._begun = True
            _say_if_too_few(run)
        if self._seen < WARM_UP_ITERATIONS:
            self._seen += 1
            return self._eager.backward(run, taken=True)
        if self._graph is None or self._loss is None:
            self._graph, self._loss = self._record(run)
        for microbatch, (inputs, labels) in enumerate(self._batches):
            new_inputs, new_labels = samples(run, microbatch)
            inputs.copy_(new_inputs)
            labels.copy_(new_labels)
        run.optimizer.arrive()
        self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient  # zero_grad() has taken it out
        run.optimizer.replayed()
        run.sampler.sample(run.iteration, BACKWARD)
        return self._loss

    def close(self) -> None:
        """Forget the graph; eager iterations may follow."""
        if self._graph is not None:
            self._graph.close()
        for parameter, gradient in self._gradients:
            if parameter.grad is gradient:
                parameter.grad = None
        self._graph = self._loss = None
        self._batches, self._gradients = [], []
        self._seen, self._begun = 0, False

    def _record(self, run: Run) -> tuple[Graph, torch.Tensor]:
        checkpointing.finish(run)  # copies of a save from another thread would end the capture
        run.optimizer.zero_grad(set_to_none=True)
        run.optimizer.arrive()
        self._batches = [samples(run, microbatch) for microbatch in range(run.microbatches)]
        graph = self._new_graph()
        try:
            loss = graph.record(lambda: self._passes(run))
        except BaseException:
            run.optimizer.zero_grad(set_to_none=True)  # what is there has never been computed
            raise
        self._gradients = [(p, p.grad) for p in run.model.parameters() if p.grad is not None]
        run.graph_bytes = max(0, graph.nbytes - sum(gradient.nbytes for _, gradient in self._gradients))
        log.info(
            "iteration %d: forward and backward are captured in a CUDA graph of %s GiB, gradients included",
            run.iteration,
            gib(graph.nbytes),
        )
        return graph, loss

    def _passes(self, run: Run) -> torch.Tensor:
        """What is recorded. Order and dtype of every addition are those of `WholeModel`."""
        total = torch.zeros((), dtype=torch.float32, device=run.device)
        for inputs, labels in self._batches:
            mean = training_loss(run.model, inputs, labels) / run.microbatches
            total += mean.detach().float()
            (mean if run.scaler is None else run.scaler.scale(mean)).backward()  # type: ignore[no-untyped-call]
        return total


def _say_if_too_few(run: Run) -> None:
    left = run.config.train.train_iters - run.iteration
    if left <= WARM_UP_ITERATIONS:
        log.warning(
            "model.cuda_graph_impl=full_iteration does nothing in %d iterations: the first %d run without a graph",
            left,
            WARM_UP_ITERATIONS,
        )


def require_graphs(device: torch.device, plan: PlanFile | None) -> None:
    """Raises ConfigError where iterations cannot be captured, NotBuiltError with a plan."""
    if device.type != "cuda":
        raise ConfigError(
            "model.cuda_graph_impl=full_iteration on a machine without a GPU, which has no CUDA graphs",
            fix="set model.cuda_graph_impl=none",
        )
    if plan is not None:
        raise unplanned_graphs("--plan")


def require_capturable(described: Any) -> None:
    """Raises ConfigError for a pretrained folder, given its transformers configuration, whose model cannot be captured
    with the bits of the run without.
    """
    rope = (getattr(described, "rope_parameters", None) or {}).get("rope_type", "default")
    kinds = set(getattr(described, "layer_types", None) or ("full_attention",))
    problem = None
    if described.attention_dropout > 0:
        problem = "it drops out at random, and generators in a graph are not those of the run without"
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
