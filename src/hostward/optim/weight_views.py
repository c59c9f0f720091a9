"""A step writes weights to flat device buffers, one per range."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from hostward.model.deferred_weights import is_away
from hostward.model.parameters import ParamRecord
from hostward.optim.bucket_state import BucketState
from hostward.runtime.backend import Backend, Buffer, empty_buffer
from hostward.schedule.ops import Lane


class ParamViews:
    """ParamViews holds the weights as steps write them: `weights[bucket][range]`.

    A parameter that is not contiguous is written to a flat copy, which is scattered back once its H2D copy is complete.
    """

    def __init__(
        self,
        backend: Backend,
        states: Sequence[BucketState],
        tracked: Mapping[str, ParamRecord],
        holders: Callable[[ParamRecord], int],
    ) -> None:
        """Bind the weights.

        `holders`: how many tensors always use the memory of a parameter's local part, itself among them.
        """
        self._backend = backend
        self._tracked = tracked
        self._always = holders
        self.weights: list[list[Buffer]] = [[empty_buffer("weights") for _ in s.bucket.ranges] for s in states]
        self._pieces: dict[str, list[tuple[Buffer, slice]]] = {}
        for state, buffers in zip(states, self.weights, strict=True):
            for r, buffer in zip(state.bucket.ranges, buffers, strict=True):
                self._pieces.setdefault(r.name, []).append((buffer, slice(r.start, r.stop)))
        self._addresses: dict[str, int] = {}
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._holders: dict[int, int] = {}
        """Holder counts of weights' storage objects, by their address.

        Counted are the tensors of ours, and of the parameters, that use it, and the object's own hold.
        """
        self._flat: dict[str, torch.Tensor] = {}
        self._elsewhere: Collection[str] = frozenset(n for n in self._pieces if is_away(tracked[n].parameter))
        for name in self._pieces:
            if name not in self._elsewhere:
                self._bind(name)

    def leave_out(self, names: Collection[str]) -> None:
        """Exclude these weights, and only these, from steps: they are reloaded when they are used, and no step writes
        them.
        """
        back, self._elsewhere = set(self._elsewhere) - set(names), frozenset(names)
        for name in names:
            self._storages.pop(name, None)
            for buffer, _ in self._pieces[name]:
                buffer.point_to(torch.empty(0, dtype=buffer.data.dtype, device=buffer.data.device))
        for name in back:
            self._bind(name)

    def shared(self) -> frozenset[str]:
        """Return names of weights whose memory other tensors hold besides the parameter and ours: views, `.data`."""
        if not self._holders:
            self._count_holders()
        count, holders = torch._C._storage_Use_Count, self._holders
        return frozenset(n for n, s in self._storages.items() if count(s._cdata) > holders[s._cdata])

    def _count_holders(self) -> None:
        for name, storage in self._storages.items():
            at = storage._cdata
            self._holders[at] = self._holders.get(at, 1) + self.ours(name) + self._always(self._tracked[name])

    def ours(self, name: str) -> int:
        """Return how many tensors of ours use a weight's memory; 0 for one that is left out of steps."""
        storage = self._storages.get(name)
        if storage is None:
            return 0
        views = [b.data for b, _ in self._pieces[name] if b.data.untyped_storage()._cdata == storage._cdata]
        return len({t._cdata for v in views for t in (v, v._base) if t is not None})

    def refresh(self, names: Iterable[str]) -> bool:
        """Follow weights whose memory has changed; flat copies are made anew.

        Returns whether any of these weights has one.
        """
        self._flat.clear()
        tracked, addresses, elsewhere = self._tracked, self._addresses, self._elsewhere
        for name in names:
            t = tracked[name]
            weight = t.local if t.sharded else t.parameter
            if name not in elsewhere and (weight.data_ptr() != addresses[name] or not weight.is_contiguous()):
                self._bind(name)
        return bool(self._flat)

    def woken(self) -> None:
        """Look at all weights anew in the next step, because their device memory was allocated again.

        Other memory may by then be where theirs was before: an address does not tell.
        """
        self._addresses = dict.fromkeys(self._addresses, 0)

    def scatter(self) -> None:
        """Copy flat weights back into parameters that are not contiguous. Their H2D copies are complete."""
        for name, flat in self._flat.items():
            parameter = self._tracked[name].local
            data, shaped = parameter.data, flat.view(parameter.shape)
            reads = [buffer for buffer, _ in self._pieces[name]]
            writes = [self._backend.adopt(data, "weights")]
            self._backend.launch("offload/scatter", _copying(data, shaped), reads=reads, writes=writes).issue()
        self._flat.clear()
        self._backend.mark("offload/scatter", Lane.COMPUTE).issue()  # nobody waits for these weights later

    def _bind(self, name: str) -> None:
        data = self._tracked[name].local.data
        flat = data.contiguous().view(-1)
        if not data.is_contiguous():
            self._flat[name] = flat
        # A copy is no place to find the weight in once it is contiguous again.
        self._addresses[name] = data.data_ptr() if data.is_contiguous() else 0
        self._storages[name] = data.untyped_storage()
        self._holders.clear()
        for buffer, span in self._pieces[name]:
            self._backend.refill(buffer, flat[span])


def _copying(to: torch.Tensor, from_: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        to.copy_(from_)

    return run
