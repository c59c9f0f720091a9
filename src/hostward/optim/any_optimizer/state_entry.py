"""Reading a state tensor of a parameter gives it on the device, even if it is stored on the host."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Hashable, ItemsView, Iterator, Mapping, MutableMapping, ValuesView
from typing import Any, Protocol

import torch

from hostward.model.parameters import local_of, sharding_of

State = MutableMapping[torch.Tensor, Any]
"""`optimizer.state` has this type."""

_MISSING = object()


class Bringer(Protocol):
    """Bringer reloads offloaded state."""

    def bring(self, parameter: torch.Tensor) -> None: ...

    def made(self) -> None: ...


class Entry(dict[Hashable, Any]):
    """Entry is a dict of one parameter's state whose offloaded tensors are reloaded when they are read.

    What can be asked without a tensor (length, keys, values that are never offloaded) moves nothing. `away` holds the
    keys whose values are host tensors now. Every way to such a value goes through `bring`, C code's included: dict()
    and ** read through `keys` and `__getitem__` where a subclass has an `__iter__` of its own.
    """

    __slots__ = ("away", "owner", "parameter")

    def __init__(self, values: Mapping[Hashable, Any] | None = None) -> None:
        super().__init__(values or {})
        self.away: Collection[Hashable] = ()
        self.owner: weakref.ref[Bringer] | None = None
        self.parameter: torch.Tensor | None = None

    def belongs_to(self, owner: Bringer, parameter: torch.Tensor) -> None:
        """Let `owner` reload what is offloaded of the state of `parameter`."""
        # The owner has the entries: a strong reference back would keep host memory until the garbage collector runs.
        self.owner, self.parameter = weakref.ref(owner), parameter

    def _bring(self) -> None:
        if self.away and self.owner is not None and self.parameter is not None:
            owner = self.owner()
            if owner is not None:
                owner.bring(self.parameter)

    def __getitem__(self, key: Hashable) -> Any:
        if key in self.away:
            self._bring()
        return super().__getitem__(key)

    def get(self, key: Hashable, default: Any = None) -> Any:
        if key in self.away:
            self._bring()
        return super().get(key, default)

    def __setitem__(self, key: Hashable, value: Any) -> None:
        if key in self.away:  # then it is offloaded again to where the old value was stored
            self._bring()
        super().__setitem__(key, value)

    def setdefault(self, key: Hashable, default: Any = None) -> Any:
        if key in self.away:
            self._bring()
        return super().setdefault(key, default)

    def pop(self, key: Hashable, default: Any = _MISSING) -> Any:
        if key in self.away:
            self._bring()
        return super().pop(key) if default is _MISSING else super().pop(key, default)

    def popitem(self) -> tuple[Hashable, Any]:
        self._bring()
        return super().popitem()

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._bring()
        super().update(*args, **kwargs)

    def __iter__(self) -> Iterator[Hashable]:
        return super().__iter__()

    def values(self) -> Any:
        return ValuesView(self)

    def items(self) -> Any:
        return ItemsView(self)

    def copy(self) -> dict[Hashable, Any]:
        return dict(self)

    def __eq__(self, other: object) -> bool:
        return dict(self) == other

    def __ne__(self, other: object) -> bool:
        return dict(self) != other

    __hash__ = None

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


class Maker:
    """Maker creates entries for parameters that have none.

    It replaces `dict` as the default factory of `optimizer.state`.
    """

    def __init__(self, owner: Bringer) -> None:
        self._owner = weakref.ref(owner)

    def __call__(self) -> Entry:
        owner = self._owner()
        if owner is not None:
            owner.made()
        return Entry()

    def __reduce__(self) -> Any:
        return type, ({},)  # of a copy: dict, as it was


def at_rest(entry: Mapping[Hashable, Any]) -> Mapping[Hashable, Any]:
    """Return the values where they are stored now, host tensors among them; nothing is reloaded."""
    return dict(dict.items(entry)) if isinstance(entry, dict) else entry


# ------------------------------------------------------------------------ who else refers to a tensor


def _references(holder: dict[Any, Any], key: Any) -> int:
    """Return the number of references to the object under `key` of a dict.

    It is given by dict and key: a variable here would count as well.
    """
    return sys.getrefcount(dict.__getitem__(holder, key))


def _uses(holder: dict[Any, Any], key: Any) -> int:
    """Return the number of references to a tensor from C++, autograd's graphs among it."""
    return int(dict.__getitem__(holder, key)._use_count())


def _memory_uses(holder: dict[Any, Any], key: Any) -> int:
    """Return the number of references to a tensor's memory, by tensors, views and storage objects.

    Those without a base (`detach`, `.data`) show here only.
    """
    return int(torch._C._storage_Use_Count(local_of(dict.__getitem__(holder, key)).untyped_storage()._cdata))


def _part_in_use(holder: dict[Any, Any], key: Any) -> bool:
    """Return whether anything besides a sharded tensor refers to this rank's part of it; False for a plain tensor."""
    tensor = dict.__getitem__(holder, key)
    if sharding_of(tensor) is None:
        return False
    part = {0: local_of(tensor)}
    return _references(part, 0) > _REFERENCES + 1 or _uses(part, 0) > _USES


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that grows when the tensor is written, or this rank's part of it if it is sharded."""
    return tensor._version + local_of(tensor)._version


def alias(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return the first bytes of a tensor's memory, uint8 [nbytes], as a tensor.

    It neither keeps the memory nor counts as a use of it.
    """
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


_PROBE: dict[Any, Any] = {0: torch.empty(1)}
_REFERENCES, _USES, _MEMORY_USES = _references(_PROBE, 0), _uses(_PROBE, 0), _memory_uses(_PROBE, 0)
"""Counts for a tensor that only one dict refers to. They are measured, since Python versions count differently."""


def only_here(holder: dict[Any, Any], key: Any) -> bool:
    """Return whether only this dict refers to the object under `key`.

    There is no variable, list, attribute, or view of a tensor then.
    """
    if _references(holder, key) > _REFERENCES:
        return False
    if isinstance(dict.__getitem__(holder, key), torch.Tensor):
        alone = _uses(holder, key) <= _USES and _memory_uses(holder, key) <= _MEMORY_USES
        return alone and not _part_in_use(holder, key)
    return True


def had_elsewhere(entry: dict[Hashable, Any], given: dict[Hashable, torch.Tensor]) -> bool:
    """Return whether anything besides these two dicts refers to a tensor of `given`.

    A tensor that `entry` has in place of one of `given` counts as well.
    """
    for key in given:
        if _references(given, key) > _REFERENCES + _times(entry, given, key):
            return True
        if _uses(given, key) > _USES or _memory_uses(given, key) > _MEMORY_USES or _part_in_use(given, key):
            return True
        if _replaced(entry, given, key) and not only_here(entry, key):
            return True
    return False


def _times(entry: dict[Hashable, Any], given: dict[Hashable, torch.Tensor], key: Hashable) -> int:
    return sum(value is given[key] for value in dict.values(entry))


def _replaced(entry: dict[Hashable, Any], given: dict[Hashable, torch.Tensor], key: Hashable) -> bool:
    now = dict.get(entry, key)
    return isinstance(now, torch.Tensor) and not any(now is tensor for tensor in given.values())
