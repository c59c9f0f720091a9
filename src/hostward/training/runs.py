"""Which layers are called one after another: all, or, of a pipeline, those of each stage that a process has."""

from __future__ import annotations

from dataclasses import dataclass

from hostward.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of layers, or of what is gathered of them, in the order in which they are counted.

    lengths: of each.
    """

    lengths: tuple[int, ...]

    def run(self, number: int) -> range:
        """That run: its layers. Raises ConfigError: there is none of that number."""
        if not 0 <= number < len(self.lengths):
            raise ConfigError(
                f"run {number} of layers is expected, and there are {len(self.lengths)}",
                fix="attachment.in_runs(lengths) says how many there are; they count from 0",
            )
        first = sum(self.lengths[:number])
        return range(first, first + self.lengths[number])

    def beside(self, layer: int) -> range:
        """The run that a layer is in; none for what is no layer."""
        runs = (self.run(number) for number in range(len(self.lengths)))
        return next((run for run in runs if layer in run), range(0))
