"""WeightWatch notices weights that other code has changed; docs/how-it-works.md has the rule for what happens then.

It sees `load_state_dict` of a known module (equal bits afterwards: nothing has changed), writes in place (the version
counter moved), assignments to `.data` (the address moved), and writes through `.data` (the fence hands out `.data`, and
its version counter has moved). Where an address was handed out, or others hold the memory of a weight when a step ends,
its bits are compared. A replaced Parameter object or layer, or one of another shape, dtype or device, raises a typed
error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from operator import is_
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hostward.errors import ModelError
from hostward.model.fence import unfenced
from hostward.model.parameters import ParamRecord, local_of, paths_of


class WeightWatch:
    """WeightWatch remembers how every tracked weight lies in memory and its version, and reports those others wrote."""

    def __init__(
        self,
        tracked: Sequence[ParamRecord],
        arrive: Callable[[], None] | None = None,
        root: torch.nn.Module | None = None,
        frozen: Set[int] = frozenset(),
    ) -> None:
        self._arrive = arrive
        self._tracked = list(tracked)
        self._structure = Structure(root, tracked, frozen)
        self._kinds = {t.name: _kind(t.parameter) for t in self._tracked}
        self._known: dict[str, tuple[int, ...]] = {}
        self._before_load: dict[str, torch.Tensor] = {}
        """Bit sums before a load."""
        self._sums: dict[str, torch.Tensor] = {}
        """Bit sums of weights that may be written without torch noticing."""
        self._handed: dict[str, list[tuple[torch.Tensor, int]]] = {}
        """Handed-out `.data`, by weight: a tensor with its version counter, and that counter at the time."""
        self._loaded: set[str] = set()
        self._moving: Collection[str] = ()
        self._sharded = frozenset(t.name for t in self._tracked if t.sharded)
        self._unlike_others: Collection[str] = self._sharded
        """Weights tracked by more than version and address: sharded ones, and those that are offloaded and reloaded."""
        self._present: Callable[[str], AbstractContextManager[None]] = _as_it_is
        self._handles: list[RemovableHandle] = []
        self._of_now: tuple[dict[str, Any], ...] = self._before_load, self._sums, self._handed
        """Records that are dropped once a weight's present contents are the optimizer's own."""
        self.remember(self._tracked)
        by_owner: dict[torch.nn.Module, list[ParamRecord]] = {}
        for t in self._tracked:
            for owner, _ in t.homes:
                by_owner.setdefault(owner, []).append(t)
        watch = weakref.ref(self)
        for owner, held in by_owner.items():
            if isinstance(owner, torch.jit.ScriptModule):
                raise ModelError(
                    f"parameter {held[0].name!r} belongs to a module of torch.jit",
                    why="its code reads weights without the hooks that make it wait for them",
                    fix="train the plain module, and torch.jit.script() what is trained; or torch.compile() it",
                )
            handle = owner.register_load_state_dict_pre_hook(_LoadHook(watch, held))  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def follow(
        self, names: Collection[str], present: Callable[[str], AbstractContextManager[None]] | None = None
    ) -> None:
        """Treat these weights as offloaded and reloaded; their storage objects stay the same.

        Within `present(name)` the weight of that name is on the device.
        """
        known = self.known()
        self._moving, self._present = names, present or _as_it_is
        self._unlike_others = self._sharded.union(names)
        self.relocated(known)

    def known(self) -> list[ParamRecord]:
        """Return the weights whose contents are still the optimizer's own, see `relocated`."""
        return [t for t in self._tracked if self.knows(t)]

    def relocated(self, known: Iterable[ParamRecord]) -> None:
        """Follow weights whose memory was freed and allocated again with the same contents.

        `known`: those of them that `known` returned before. What was written into the others is still found.
        """
        for t in known:
            self._known[t.name] = self._seen(t)

    def knows(self, t: ParamRecord) -> bool:
        """Return whether the contents of a weight are still the optimizer's own."""
        return self._known[t.name] == self._seen(t) and not self._written_unseen(t)

    def _written_unseen(self, t: ParamRecord) -> bool:
        """Return whether the weight was written through `.data` or an address."""
        if any(each._version != version for each, version in self._handed.get(t.name, ())):
            return True
        before = self._sums.get(t.name)
        if before is None:
            return False
        with self._present(t.name):
            return not before.equal(bit_sum(t.local.data))

    def _seen(self, t: ParamRecord) -> tuple[int, ...]:
        parameter = t.parameter
        moving = t.name in self._moving
        if t.name in self._sharded:
            local = t.local
            where = local.untyped_storage()._cdata if moving else local.data_ptr()
            return parameter._version, local._version, where
        if moving:
            return parameter._version, parameter.untyped_storage()._cdata
        return parameter._version, parameter.data_ptr(), *parameter.stride()

    def remember(self, tracked: Sequence[ParamRecord]) -> None:
        """Record the present contents of these weights as the optimizer's own."""
        known, unlike = self._known, self._unlike_others
        for t in tracked:
            parameter = t.parameter
            plain = t.name not in unlike
            known[t.name] = (parameter._version, parameter.data_ptr(), *parameter.stride()) if plain else self._seen(t)
            for found in self._of_now:
                if found:
                    found.pop(t.name, None)
            if self._loaded:
                self._loaded.discard(t.name)

    def before_load(self, t: ParamRecord) -> None:
        """Remember what a weight holds before a load, to compare it with what it holds afterwards."""
        if self._arrive is not None:
            self._arrive()
        if self.knows(t):
            with self._present(t.name):
                self._before_load[t.name] = bit_sum(t.local.data)
        self._loaded.add(t.name)

    def was_loaded(self, t: ParamRecord) -> bool:
        """Return whether a module's `load_state_dict` has written the weight since it was last remembered."""
        return t.name in self._loaded

    def expect_broadcast(self) -> None:
        """Expect a broadcast of the weights, and ignore it where it changes no bits.

        Weights from a checkpoint are broadcast next where a model is wrapped for data parallelism: equal bits
        afterwards change nothing. Weights that are offloaded and reloaded are left out: their bytes are elsewhere.
        """
        for t in self._tracked:
            if t.name not in self._moving:
                self._before_load[t.name] = bit_sum(t.local.data)

    @unfenced
    @torch.inference_mode(False)
    @torch.no_grad()
    def exposed(self, t: ParamRecord, alias: torch.Tensor | None) -> None:
        """Record that other code can now write the weight without its version counter.

        It writes through `alias`, which has a counter of its own, or (None) by the weight's address. The weight's
        present contents are complete.
        """
        if alias is None:
            self.compare([t])
        else:
            self._handed.setdefault(t.name, []).append((witness_of(local_of(alias)), local_of(alias)._version))

    def compare(self, tracked: Iterable[ParamRecord]) -> None:
        """Detect writes to these weights by their bits from now on."""
        for t in tracked:
            if t.name not in self._sums and self.knows(t):
                with self._present(t.name):
                    self._sums[t.name] = bit_sum(t.local.data)

    def changed(self) -> list[ParamRecord]:
        """Return the weights that others have written since they were last remembered.

        Raises:
            ModelError: a parameter was replaced by another object, or has another shape, dtype or device now.
        """
        self._structure.require_same()
        homes_may_differ = not self._structure.as_made
        found, kinds, known, unlike = [], self._kinds, self._known, self._unlike_others
        for t in self._tracked:
            name, parameter = t.name, t.parameter
            if homes_may_differ:
                _require_at_home(t)
            if (parameter.shape, parameter.dtype, parameter.device) != kinds[name]:
                raise self._changed_kind(t)
            plain = name not in unlike
            seen = (parameter._version, parameter.data_ptr(), *parameter.stride()) if plain else self._seen(t)
            if known[name] != seen:
                before = self._before_load.get(name)
                if before is not None and before.equal(bit_sum(t.local.data)):
                    self.remember([t])
                else:
                    found.append(t)
            elif (name in self._handed or name in self._sums) and self._written_unseen(t):
                found.append(t)
        return found

    def _changed_kind(self, t: ParamRecord) -> ModelError:
        return ModelError(
            f"parameter {t.name!r} is {_told(_kind(t.parameter))} now",
            why=f"it was {_told(self._kinds[t.name])} when the optimizer was made, and its state still is",
            fix="make the optimizer after .to(), .half(), .bfloat16() and resizing",
        )

    def require_no_newcomers(self) -> None:
        """Raise ModelError for a gradient of a parameter that was added to the module after the optimizer was made."""
        self._structure.require_no_newcomers()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _as_it_is(_: str) -> AbstractContextManager[None]:
    return nullcontext()


class _LoadHook:
    """_LoadHook records a module's weights before its load_state_dict copies into them, whatever other hooks do.

    A module that is copied or pickled takes its hooks along. The copy's weights are not the optimizer's, so there the
    hook watches nothing.
    """

    __slots__ = ("_held", "_watch")

    def __init__(self, watch: weakref.ref[WeightWatch] | None = None, held: Sequence[ParamRecord] = ()) -> None:
        self._watch = watch
        self._held = held

    def __call__(self, *_: object) -> None:
        alive = None if self._watch is None else self._watch()
        if alive is not None:
            for tracked in self._held:
                alive.before_load(tracked)

    def __reduce__(self) -> tuple[type[_LoadHook], tuple[()]]:
        return _LoadHook, ()


def _require_at_home(t: ParamRecord) -> None:
    for owner, attribute in t.homes:
        if owner._parameters.get(attribute) is not t.parameter:
            raise ModelError(
                f"parameter {t.name!r} was taken out of the module that held it",
                why="what forward uses instead is not what the optimizer would update",
                fix="parametrize and prune before making the optimizer, or make a new optimizer",
            )


def witness_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares the version counter of another one, and nothing else."""
    witness = tensor.detach()
    witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return witness


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit sum over the bits of a tensor and their positions, int64 [] on its device.

    Equal bits have equal sums; different bits have equal sums once in 2^64.
    """
    integer = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    flat = tensor.detach().contiguous().view(integer).view(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    at_once = _SUMMED_AT_ONCE["cpu" if tensor.device.type == "cpu" else "cuda"]
    for start in range(0, flat.numel(), at_once):
        piece = flat[start : start + at_once].to(torch.int64)
        mixed = piece * 0x1B873593CC9E2D51 + torch.arange(start, start + len(piece), device=piece.device) * _ODD
        mixed ^= mixed >> 31
        total += (mixed * _ODD).sum()
    return total


_SUMMED_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Elements: temporary results take 40 bytes for each of them. Large ones would leave holes in the host's heap."""
_ODD = 0x2545F4914F6CDD1D


def _kind(parameter: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return parameter.shape, parameter.dtype, parameter.device


def _told(kind: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    shape, dtype, device = kind
    return f"{dtype} {tuple(shape)} on {device}"


# Noticing layers replaced, added or tied in a module after its optimizer was made.
#
# The new parameters get gradients that no optimizer steps, the old ones get none, and nothing else would report it.


class Structure:
    """Structure notices layers and parameters that were replaced, added or tied after the optimizer was made.

    Args:
        root: the module without wrappers; None if it is not known: then nothing is noticed.
        tracked: the parameters that the optimizer steps.
        frozen: ids of those that it would step if they had not been frozen when it was made.
    """

    def __init__(
        self, root: torch.nn.Module | None, tracked: Sequence[ParamRecord], frozen: Set[int] = frozenset()
    ) -> None:
        self._root = root
        self._tracked = {id(t.parameter): t for t in tracked}
        paths = paths_of(root)
        self._at = {path: self._tracked[id(p)] for path, p in paths.items() if id(p) in self._tracked}
        self._others = {id(p): p for p in paths.values() if id(p) not in self._tracked}
        """Parameters that were there from the start and belong to another optimizer, or are frozen."""
        self._frozen = [(path, p) for path, p in paths.items() if id(p) in frozen and id(p) in self._others]
        self._newcomers: list[tuple[str, torch.nn.Parameter]] = []
        self.as_made = root is not None
        """True while no check has found a difference: everything is still where it was at first."""
        self._look()

    def _look(self) -> None:
        self._modules = [] if self._root is None else list(self._root.modules())
        self._parts = self._present()

    def _present(self) -> list[object]:
        """Return what the modules last looked at consist of now.

        The code is plain since every step calls it: 0.3 ms for 1,000 parameters.
        """
        parts: list[object] = []
        for module in self._modules:
            parts += module._modules.values()
            parts.append(module)
            parts += module._parameters.values()
        return parts

    def require_same(self) -> None:
        """Follow what has changed since the last check: wrapped layers, removed layers, new ones.

        Raises:
            ModelError: another parameter is now in the place of one that the optimizer steps.
        """
        present = self._present()
        if len(present) == len(self._parts) and all(map(is_, present, self._parts)):
            return
        self.as_made = False
        paths = paths_of(self._root)
        for path, t in self._at.items():
            found = paths.get(path)
            if found is not None and found is not t.parameter:
                raise self._replaced(path, found)
        self._others = {id(p): p for p in paths.values() if id(p) in self._others}
        known = self._tracked.keys() | self._others.keys()
        self._newcomers = [(path, p) for path, p in paths.items() if id(p) not in known]
        self._look()

    def _replaced(self, path: str, found: torch.nn.Parameter) -> ModelError:
        other = self._tracked.get(id(found))
        if other is not None:
            return ModelError(
                f"{path!r} is now the parameter that was {other.name!r} when the optimizer was made",
                why="weights were tied, or layers have changed places, and state is kept by name",
                fix="tie weights and put layers in order before making the optimizer, or make a new optimizer",
            )
        mine = self._at[path]
        if local_of(found) is not found and not mine.sharded:
            return ModelError(
                f"parameter {path!r} was sharded after the optimizer was made",
                why="fully_shard replaces parameters: the new ones get gradients that nobody steps",
                fix="call fully_shard first, and hostward.AdamW(model, ...) then",
            )
        if mine.sharded and local_of(found) is found:
            return ModelError(
                f"parameter {path!r} is unsharded: a forward or backward of FSDP2 has begun and not ended",
                why="a step would not reach the weights that FSDP2 has gathered",
                fix="call it after the pass; if an exception has ended that, make model and optimizer anew and load a "
                "checkpoint: torch's reset_iter_state() keeps gradients that were not reduced yet",
            )
        whole = all(owner._parameters.get(attribute) is mine.parameter for owner, attribute in mine.homes)
        return ModelError(
            f"parameter {path!r} was replaced by another Parameter object"
            + (f", together with its layer {path.rpartition('.')[0]!r}" if whole else ""),
            why="the new one gets gradients that nobody steps; the optimizer would go on updating the old one",
            fix="copy into it in place (load_state_dict without assign=True), or make a new optimizer",
        )

    def require_no_newcomers(self) -> None:
        """Raise ModelError for a gradient of a parameter that was added to the module, or is trained, only since the
        optimizer was made.
        """
        for path, parameter in self._newcomers:
            if parameter.grad is not None:
                raise ModelError(
                    f"parameter {path!r} has a gradient that nobody steps",
                    why="it came into the module after the optimizer was made",
                    fix="optimizer.add_param_group({'params': [(name, parameter), ...]}), or make a new optimizer; one "
                    "that is to be trained by another optimizer must be there first",
                )
        for path, parameter in self._frozen:
            if parameter.grad is not None and parameter.requires_grad:
                raise ModelError(
                    f"parameter {path!r} has a gradient that nobody steps",
                    why="it was frozen when the optimizer was made, which took the module's trainable parameters",
                    fix="optimizer.add_param_group({'params': [(name, parameter), ...]}) when it is to be trained, or "
                    "freeze it only after the optimizer is made; if another optimizer trains it, give this one its "
                    "parameters, not the module: [(n, p) for n, p in model.named_parameters() if p.requires_grad]",
                )
