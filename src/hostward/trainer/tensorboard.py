"""Scalars of a run for TensorBoard, under Megatron's names where it has one."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from hostward.errors import ConfigError
from hostward.trainer.report import newest_row

if TYPE_CHECKING:
    from hostward.trainer.run import Run


class ScalarWriter(Protocol):
    """What is used of torch's SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...

    def close(self) -> None: ...


def require_tensorboard(folder: str) -> None:
    """Raises ConfigError where TensorBoard is missing: before a run rather than in it."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"logger.tensorboard_dir={folder} needs the package {error.name}, which is not installed",
            fix="pip install tensorboard, or leave logger.tensorboard_dir at null",
        ) from error


def open_writer(folder: str) -> ScalarWriter:
    """Torch's writer into a folder that is there; `require_tensorboard` holds."""
    from torch.utils.tensorboard import SummaryWriter

    writer: ScalarWriter = SummaryWriter(folder)
    return writer


class Scalars:
    """Writes each iteration once its numbers have arrived. A context: the writer is closed at its end."""

    def __init__(self, writer: ScalarWriter) -> None:
        self._writer = writer

    def __enter__(self) -> Scalars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._writer.close()

    def write(self, run: Run) -> None:
        """The newest iteration that has arrived. Steps count from 1, as Megatron's do."""
        row = newest_row(run)
        values: dict[str, float | None] = {
            "lm loss": row.loss,
            "grad-norm": row.grad_norm,
            "learning-rate": row.learning_rate,
            "iteration-time": row.step_s,
            "tokens-per-second": row.tokens_per_s,
            "skipped": float(row.skipped),
            "mem-allocated-bytes": row.device_allocated_bytes,
            "mem-max-allocated-bytes": row.device_peak_bytes,
            "mem-reserved-bytes": row.device_reserved_bytes,
            "host-resident-bytes": row.host_resident_bytes,
            "pinned-bytes": row.pinned_bytes,
            "offload-hidden-seconds": None if run.offload is None else run.offload.hidden_s,
            "offload-exposed-seconds": None if run.offload is None else run.offload.exposed_s,
        }
        for tag, value in values.items():
            if value is not None:
                self._writer.add_scalar(tag, value, row.iteration + 1)
