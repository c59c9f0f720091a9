"""Which share of the optimizer's state the options place where. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from hostward.config import Config


@dataclass(frozen=True, slots=True)
class Shares:
    """What `hostward.AdamW` is asked for: the share of state off the device, and how much of that is streamed."""

    offload_fraction: float
    streamed_fraction: float | str

    @property
    def host_share(self) -> tuple[float, float]:
        """Share of all state that is stepped on the host: at least and at most, since measured rates may decide."""
        if isinstance(self.streamed_fraction, str):
            return 0.0, self.offload_fraction
        share = self.offload_fraction * (1 - self.streamed_fraction)
        return share, share


def shares(config: Config) -> Shares:
    """The host steps optimizer_offload_fraction of all state; of the rest, optimizer_state_offload_fraction is
    streamed. `offload_mix` streams a part of the first instead.
    """
    options = config.optimizer
    on_host = options.optimizer_offload_fraction if options.optimizer_cpu_offload else 0.0
    if options.offload_mix is not None:
        return Shares(
            on_host, options.offload_mix if isinstance(options.offload_mix, str) else float(options.offload_mix)
        )
    streamed = (1 - on_host) * options.optimizer_state_offload_fraction if options.offload_optimizer_states else 0.0
    total = min(1.0, on_host + streamed)
    return Shares(total, min(1.0, streamed / total) if total else 0.0)
