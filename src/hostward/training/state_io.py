"""State by parameter name: read, written, checked and re-seeded, wherever its ranges lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hostward.errors import CheckpointError, ModelError
from hostward.inspect import Tracked
from hostward.inventory import MasterKind, Range
from hostward.plan import Placement

from .state import BucketState, join_master, rounded, same_bits, slab_views, split_master

_ROLES = ("exp_avg", "exp_avg_sq")


class StateAccess:
    """Whole-parameter access over the ranges of all buckets. Lanes must be empty while it is used."""

    def __init__(
        self,
        pieces: Mapping[str, Sequence[tuple[BucketState, int, Range]]],
        tracked: Mapping[str, Tracked],
    ) -> None:
        self._pieces = pieces
        self._tracked = tracked

    def require(self, name: str) -> None:
        """Raises ModelError for a name that is not tracked."""
        if name not in self._tracked:
            raise ModelError(f"the optimizer tracks no parameter {name!r}", fix="use names of optimizer.inventory")

    def kind(self, name: str) -> MasterKind:
        pieces = self._pieces.get(name)
        return pieces[0][0].bucket.kind if pieces else MasterKind.WEIGHT

    def read(self, name: str) -> dict[str, torch.Tensor]:
        """Fresh CPU tensors: step int64 [], moments float32 [shape], master float32 [shape] for 16-bit weights."""
        parameter = self._tracked[name].parameter
        flat = {role: torch.zeros(parameter.numel(), dtype=torch.float32, device="cpu") for role in _ROLES}
        has_master = parameter.dtype is not torch.float32
        if has_master:
            flat["master"] = torch.empty(parameter.numel(), dtype=torch.float32, device="cpu")
        step = 0
        weight = _flat(parameter)
        for state, index, r in self._pieces.get(name, ()):
            views = dict(slab_views(state, index))
            for role in _ROLES:
                flat[role][r.start : r.stop] = views[role].cpu()
            if has_master:
                flat["master"][r.start : r.stop] = _master(state, views, weight[r.start : r.stop]).cpu()
            step = int(state.counts.data[index].item())
        shaped = {role: value.view(parameter.shape) for role, value in flat.items()}
        return {"step": torch.tensor(step, dtype=torch.int64, device="cpu"), **shaped}

    def write(self, name: str, saved: Mapping[str, torch.Tensor]) -> bool:
        """Take over a state that `check` has passed. Returns whether the weight was set, because it was not the
        rounded master.
        """
        parameter = self._tracked[name].parameter
        weight = _flat(parameter)
        master = saved["master"].reshape(-1) if parameter.dtype is not torch.float32 else None
        set_weight = False
        if master is not None:
            new_weight = rounded(master.to(weight.device), parameter.dtype)
            set_weight = not same_bits(new_weight, weight)
            if set_weight:
                parameter.data.copy_(new_weight.view(parameter.shape))
                weight = _flat(parameter)
        for state, index, r in self._pieces.get(name, ()):
            views = dict(slab_views(state, index))
            for role in _ROLES:
                views[role].copy_(saved[role].reshape(-1)[r.start : r.stop])
            state.counts.data[index] = int(saved["step"])
            if master is not None:
                _set_low(state, views, master[r.start : r.stop])
            _refresh_host_weight(state, index, weight[r.start : r.stop])
        return set_weight

    def reseed(self, name: str) -> None:
        """master = weight, remainder 0; moments and counts stay."""
        weight = _flat(self._tracked[name].parameter)
        for state, index, r in self._pieces.get(name, ()):
            views = dict(slab_views(state, index))
            piece = weight[r.start : r.stop]
            if "remainder" in views:
                views["remainder"].zero_()
            elif "master" in views:
                views["master"].copy_(piece.to(torch.float32))
            _refresh_host_weight(state, index, piece)

    def check(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Raises CheckpointError unless `saved` has the entries, shapes and dtypes of every tracked parameter."""
        for name, tracked in self._tracked.items():
            entry = saved.get(name)
            wanted = ["step", *_ROLES, *(["master"] if tracked.parameter.dtype is not torch.float32 else [])]
            if entry is None or any(role not in entry for role in wanted):
                raise CheckpointError(
                    f"the saved state has no {'/'.join(wanted)} for parameter {name!r}",
                    why="it is of another model, or of one with other weight dtypes",
                    fix="load a state of the same model and params_dtype",
                )
            if not _is_count(entry["step"]):
                raise CheckpointError(
                    f"step of parameter {name!r} is {entry['step']!r} in the saved state, expected a whole number >= 0",
                    fix="load what AdamW.state_dict() returned",
                )
            for role in wanted[1:]:
                value, shape = entry[role], tracked.parameter.shape
                if not isinstance(value, torch.Tensor) or value.shape != shape or value.dtype is not torch.float32:
                    found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value)
                    raise CheckpointError(
                        f"{role} of parameter {name!r} is {found} in the saved state, expected float32 {tuple(shape)}",
                        fix="load a state of the same model",
                    )


def _is_count(value: object) -> bool:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_floating_point():
        value = value.item()
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _flat(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.data.reshape(-1)


def _master(state: BucketState, views: Mapping[str, torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    if state.bucket.kind is MasterKind.SPLIT:
        return join_master(weight, views["remainder"].to(weight.device))
    return views["master"]


def _set_low(state: BucketState, views: Mapping[str, torch.Tensor], master: torch.Tensor) -> None:
    if state.bucket.kind is MasterKind.SPLIT:
        views["remainder"].copy_(split_master(master)[1])
    elif state.bucket.kind is MasterKind.PLAIN:
        views["master"].copy_(master)


def _refresh_host_weight(state: BucketState, index: int, weight: torch.Tensor) -> None:
    if state.placement is Placement.HOST:
        state.weights[index].data.copy_(weight)
