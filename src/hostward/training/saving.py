"""Saving and loading of the optimizer's state, by parameter name and independent of placement."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._compile import _disable_dynamo

from hostward.engine.pools import require_host_memory
from hostward.errors import ModelError
from hostward.fence import unfenced
from hostward.names import matched

from .control import Control
from .groups import check_members, check_same_names, checked_settings, plain, require_known, saved_parts, shown
from .prepared import Unmoved, is_being_wrapped
from .sources import Describer, Readers, StateSources

if TYPE_CHECKING:
    from hostward.inspect import Places, Tracked

    from .state_io import StateAccess
    from .weights import WeightWatch

log = logging.getLogger("hostward")

STATE_FORMAT = 1
OWNER = "hostward.AdamW"
"""Whose a state dict is."""


class Saving(Control):
    """The part of `hostward.AdamW` that goes to checkpoints and comes from them."""

    _access: StateAccess
    _by_name: Mapping[str, Tracked]
    _places: Places
    _watch: WeightWatch
    _tracked: Sequence[Tracked]
    _readers: Readers
    _unchanged: bool
    """No step was made and no state loaded: moments and counts are 0, masters are the weights."""
    _told_of_writes: bool

    @unfenced
    def reseed(self, names: Iterable[str] | None = None) -> None:
        """Take the master anew from the weight: needed with `fence=False` after writes through `.data`, which nothing
        else sees then.

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
            self._tell_changed(changed)
            self.reseed([t.name for t in changed])

    def _tell_changed(self, changed: Sequence[Tracked]) -> None:
        """Loads, and whatever comes before the first step (DDP's broadcast, initialisation), are in order. Another
        write may be a mistake, and is warned of once.
        """
        written = [] if self._unchanged else [t for t in changed if not self._watch.was_loaded(t)]
        level = logging.INFO if self._told_of_writes or not written else logging.WARNING
        self._told_of_writes |= bool(written)
        log.log(
            level,
            "%d weights were %s; their masters are taken anew from them: %s",
            len(changed),
            "changed outside the optimizer" if written else "loaded or initialised",
            shown([t.name for t in changed]),
        )

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
            {"format": 1, "optimizer": "hostward.AdamW", "state": {name: {"step": int64 [], "exp_avg", "exp_avg_sq":
            float32 [shape], "master": float32 [shape] for 16-bit weights}}, "param_groups": [{"params": [names],
            "param_names": [names], "lr", "betas", "eps", "weight_decay", ...}]}. accelerate, which would move the state
            to the device and load it back where it wraps an optimizer, is given a token for the state that is there.

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

    @unfenced
    def _state(self, copy: bool) -> dict[str, Any]:
        self._settle()
        # Hooks of others expect tensors.
        if not self._optimizer_state_dict_post_hooks and is_being_wrapped(self):
            state: object = Unmoved(self)
        else:
            if copy:
                require_host_memory(self._access.copied_bytes(), owner="a copy of the optimizer state")
            state = {t.name: self._access.read(t.name, copy=copy) for t in self._tracked}
        groups = [{**group, "param_names": list(group["params"])} for group in self._settings()]
        return {"format": STATE_FORMAT, "optimizer": OWNER, "state": state, "param_groups": groups}

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
    @unfenced
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
            CheckpointError: the state of another optimizer; names, shapes or groups that differ.
        """
        given = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, given)
            given = given if changed is None else changed
        self._load(given)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @unfenced
    @torch.no_grad()
    def _load(self, given: Mapping[str, Any]) -> None:
        check_members(self.param_groups, self._tracked)
        state = given.get("state")
        if isinstance(state, Unmoved) and state.is_of(self):
            self._set_groups(self._checked({**given, "state": {}})[1])
            return
        self._readers.wait()
        if not self._issuer.torn:
            self._issuer.use_all()
        self.backend.drain()
        state, settings = self._checked(given)
        require_known(state, self._by_name)
        self._access.check(state)
        if self._issuer.torn:
            # What was taken for the step that was cut short must not be stepped with.
            self._issuer.abort()
            self._handover.forget()
        self._issuer.torn = True  # until all of it is written
        set_from_master = [t.name for t in self._tracked if self._access.write(t.name, state[t.name])]
        self._set_groups(settings)
        if set_from_master:
            log.warning(
                "%d weights were set from the masters of the loaded state: %s",
                len(set_from_master),
                shown(set_from_master),
            )
        self._issuer.forget_step_bound()
        self._issuer.state_changed()
        self._watch.remember(self._tracked)
        self._watch.expect_broadcast()
        self._unchanged = False
        self._issuer.torn = False
        self.backend.synchronise()

    def _checked(self, given: Mapping[str, Any]) -> tuple[Mapping[str, Mapping[str, Any]], list[dict[str, Any]]]:
        """The state by the names of this optimizer, and what the groups set. Raises CheckpointError."""
        state, groups = self._in_my_names(*saved_parts(given, STATE_FORMAT, OWNER))
        names = [g["param_names"] for g in self.param_groups]
        check_same_names("parameter group", [g["params"] for g in groups], names)
        return state, [checked_settings(theirs, mine) for theirs, mine in zip(groups, self.param_groups, strict=True)]

    def _set_groups(self, settings: Sequence[Mapping[str, Any]]) -> None:
        for mine, theirs in zip(self.param_groups, settings, strict=True):
            mine.update(theirs)

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
