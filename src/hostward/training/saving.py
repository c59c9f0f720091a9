"""Saving and loading of the optimizer's state, by parameter name and independent of placement."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from hostward.errors import ModelError

from .control import Control
from .groups import check_same_names, checked_settings, plain, saved_parts

if TYPE_CHECKING:
    from .state_io import StateAccess
    from .weights import WeightWatch

log = logging.getLogger("hostward")

STATE_FORMAT = 1


class Saving(Control):
    """The part of `hostward.AdamW` that goes to checkpoints and comes from them."""

    _access: StateAccess
    _watch: WeightWatch

    def _follow_weights(self) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """State by parameter name, independent of placement; copies on the CPU, tensors and plain values only.

        Returns:
            {"format": 1, "state": {name: {"step": int64 [], "exp_avg", "exp_avg_sq": float32 [shape], "master":
            float32 [shape] for 16-bit weights}}, "param_groups": [{"params": [names], "lr", "betas", "eps",
            "weight_decay", ...}]}
        """
        self._follow_weights()
        self._issuer.require_whole()
        self.wait()
        groups = []
        for group in self.param_groups:
            settings = {key: plain(key, value) for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({**settings, "params": list(group["param_names"])})
        return {
            "format": STATE_FORMAT,
            "state": {t.name: self._access.read(t.name) for t in self._tracked},
            "param_groups": groups,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state of `state_dict`, saved at any placement. Checked as a whole before anything is changed.

        A master whose rounded bits differ from the present weight sets the weight (logged): model and optimizer may
        so be loaded in either order.

        Raises:
            CheckpointError: names, shapes or groups that differ.
        """
        if not self._issuer.torn:
            self._issuer.use_all()
        self.backend.drain()
        state, groups = saved_parts(state_dict, STATE_FORMAT)
        check_same_names(
            "parameter group", [g["params"] for g in groups], [g["param_names"] for g in self.param_groups]
        )
        settings = [checked_settings(theirs, mine) for theirs, mine in zip(groups, self.param_groups, strict=True)]
        self._access.check(state)
        if self._issuer.torn:
            # What was taken for the step that was cut short must not be stepped with.
            self._issuer.abort()
            self._handover.forget()
        self._issuer.torn = True  # until all of it is written
        set_from_master = [t.name for t in self._tracked if self._access.write(t.name, state[t.name])]
        for mine, theirs in zip(self.param_groups, settings, strict=True):
            mine.update(theirs)
        if set_from_master:
            log.warning(
                "%d weights were set from the masters of the loaded state: %s",
                len(set_from_master),
                ", ".join(set_from_master[:5]) + (", ..." if len(set_from_master) > 5 else ""),
            )
        self._issuer.forget_step_bound()
        self._issuer.state_changed()
        self._watch.remember(self._tracked)
        self._issuer.torn = False
        self.backend.synchronise()

    def __getstate__(self) -> NoReturn:
        raise ModelError(
            "hostward.AdamW cannot be copied or pickled",
            why="its state lies in page-locked memory that belongs to this process",
            fix="use state_dict() and load_state_dict()",
        )
