"""How much of the offloaded state is streamed: as asked, or by rates measured on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from hostward.engine.backend import Backend
from hostward.engine.rates import measure_rates
from hostward.hardware import Rates
from hostward.inventory import Bucket, state_bytes_per_element
from hostward.planner import streamed_share


class Mix:
    """`asked`: a share, or "auto"."""

    def __init__(self, asked: float | str) -> None:
        self._asked = asked
        self.rates: Rates | None = None
        """Measured once, before state is allocated; None if nothing depended on them."""

    def streamed_share(self, backend: Backend, buckets: Sequence[Bucket], offload_fraction: float) -> float:
        """The share of offloaded state to stream. On a device without a link there is nothing to overlap, and all of
        it is stepped on the host. Raises MemoryLimitError where there is no room to measure.
        """
        if isinstance(self._asked, float):
            return self._asked
        if backend.device.type != "cuda" or not offload_fraction or not buckets:
            return 0.0
        if self.rates is None:
            self.rates = measure_rates(backend)
        first = buckets[0]
        return streamed_share(
            self.rates, state_bytes=state_bytes_per_element(first.kind), weight_bytes=first.dtype.itemsize_bytes
        )
