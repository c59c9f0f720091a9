"""Saving and loading of the optimizer's state, by parameter name and independent of placement."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._compile import _disable_dynamo

from hostward.engine.pools import require_host_memory
from hostward.errors import ModelError
from hostward.names import matched

from .control import Control
from .groups import check_members, check_same_names, checked_settings, plain, saved_parts
from .sources import Describer, Readers, StateSources

if TYPE_CHECKING:
    from hostward.inspect import Places, Tracked

    from .state_io import StateAccess
    from .weights import WeightWatch

log = logging.getLogger("hostward")

STATE_FORMAT = 1


class Saving(Control):
    """The part of `hostward.AdamW` that goes to checkpoints and comes from them."""

    _access: StateAccess
    _by_name: Mapping[str, Tracked]
    _places: Places
    _watch: WeightWatch
    _tracked: Sequence[Tracked]
    _readers: Readers

    def reseed(self, names: Iterable[str] | None = None) -> None:
        """Take the master anew from the weight: needed after writes through `.data`, which nothing else can see.

        Args:
            names: parameters to take; None for all. Moments and step counts stay.

        Raises:
            ModelError: a name that the optimizer does not track.
        """
        self._readers.wait()
        self.wait()
        names = [t.name for t in self._tracked] if names is None else list(names)
        for name in names:
            self._access.require(name)
        self._issuer.state_changed()
        for name in names:
            self._access.reseed(name)
        self._watch.remember([self._by_name[name] for name in names])
        self.backend.synchronise()

    def _follow_weights(self) -> None:
        if self._places.sharding is not None:
            self._places.sharding.reshard()
        changed = self._watch.changed()
        if changed:
            names = [t.name for t in changed]
            log.warning(
                "%d weights were changed outside the optimizer; their masters are taken anew from them: %s%s",
                len(names),
                ", ".join(names[:5]),
                ", ..." if len(names) > 5 else "",
            )
            self.reseed(names)

    @_disable_dynamo
    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """State by parameter name, independent of placement; tensors on the CPU and plain values only.

        The tensors are copies: 12 bytes of host memory per parameter, 8 for fp32 weights. torch.optim hands out its own
        tensors instead. Here they would change under a writer in the background, and each is a part of a slab that
        torch.save would write as a whole.

        Args:
            copy: False: moments that lie on the host in one piece are views of the state itself, 8 bytes per parameter
                less. They change with the next step. For writers that are done before it and take views as they are,
                such as `hostward.checkpoint.save`; not for torch.save.

        Hooks run as in torch.optim.Optimizer: those of `register_state_dict_pre_hook` before anything is read, those of
        `register_state_dict_post_hook` on the result, which they may change or replace.

        Returns:
            {"format": 1, "state": {name: {"step": int64 [], "exp_avg", "exp_avg_sq": float32 [shape], "master":
            float32 [shape] for 16-bit weights}}, "param_groups": [{"params": [names], "lr", "betas", "eps",
            "weight_decay", ...}]}

        Raises:
            ModelError: a step was cut short, or module or groups are not as they were. MemoryLimitError: the host has
                no room for the copies.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        saved = self._state(copy)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, saved)
            saved = saved if changed is None else changed
        return saved

    def _state(self, copy: bool) -> dict[str, Any]:
        self._settle()
        if copy:
            require_host_memory(self._access.copied_bytes(), owner="a copy of the optimizer state")
        state = {t.name: self._access.read(t.name, copy=copy) for t in self._tracked}
        return {"format": STATE_FORMAT, "state": state, "param_groups": self._settings()}

    def _settle(self) -> None:
        """The state is that of the last step, whole, and lanes are empty."""
        check_members(self.param_groups, self._tracked)
        self._follow_weights()
        self._issuer.require_whole()
        self.wait()

    def _settings(self) -> list[dict[str, Any]]:
        groups = []
        for group in self.param_groups:
            settings = {key: plain(key, value) for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({**settings, "params": list(group["param_names"])})
        return groups

    @_disable_dynamo
    def sources(self) -> StateSources:
        """State and weights as they lie, by parameter name, to be read from other threads; nothing is copied.

        They are those of this moment until the next `step()`, which waits for registered readers, as everything does
        that changes them. `hostward.checkpoint` writes from them.

        Raises:
            ModelError: a step was cut short, or module or groups are not as they were.
        """
        self._settle()
        describer = Describer(self.backend, self._readers)
        found = {t.name: self._access.pieces(t.name) for t in self._tracked}
        return StateSources(
            STATE_FORMAT,
            {t.name: describer.weight(t, found[t.name]) for t in self._tracked},
            {t.name: describer.state(t, found[t.name]) for t in self._tracked},
            {t.name: torch.tensor(self._access.count(t.name), dtype=torch.int64) for t in self._tracked},
            self._settings(),
            {id(t.parameter): t.name for t in self._tracked},
        )

    def empty_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Host tensors of the names, shapes, dtypes and divisions of the state, to load a checkpoint into; their
        contents are arbitrary. `load_state_dict` takes them over.

        Raises:
            MemoryLimitError: the host has no room for them.
        """
        require_host_memory(self._access.copied_bytes(), owner="a copy of the optimizer state")
        return {t.name: self._access.empty(t.name) for t in self._tracked}

    @_disable_dynamo
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state of `state_dict`, saved at any placement. Checked as a whole before anything is changed.

        A master whose rounded bits differ from the present weight sets the weight (logged): model and optimizer may
        so be loaded in either order. Names may carry what `torch.compile` or data parallelism put into them.

        Hooks run as in torch.optim.Optimizer: those of `register_load_state_dict_pre_hook` on a shallow copy of
        `state_dict`, which they may change or replace, those of `register_load_state_dict_post_hook` at the end.

        Raises:
            CheckpointError: names, shapes or groups that differ.
        """
        given = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, given)
            given = given if changed is None else changed
        self._load(given)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @torch.no_grad()
    def _load(self, given: Mapping[str, Any]) -> None:
        check_members(self.param_groups, self._tracked)
        self._readers.wait()
        if not self._issuer.torn:
            self._issuer.use_all()
        self.backend.drain()
        state, groups = self._in_my_names(*saved_parts(given, STATE_FORMAT))
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

    def _in_my_names(
        self, state: Mapping[str, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
    ) -> tuple[Mapping[str, Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
        """A saved state under the names of this optimizer; names that mean none of its parameters stay."""
        saved = [*state, *(name for group in groups for name in group["params"])]
        mine = {theirs: name for name, theirs in matched([t.name for t in self._tracked], saved).items()}
        renamed = [{**group, "params": [mine.get(name, name) for name in group["params"]]} for group in groups]
        return {mine.get(name, name): entry for name, entry in state.items()}, renamed

    def __getstate__(self) -> NoReturn:
        raise ModelError(
            "hostward.AdamW cannot be copied or pickled",
            why="its state lies in memory of the host and the device that belongs to this process",
            fix="use state_dict() and load_state_dict()",
        )
