"""The state of one parameter whose tensors may lie on the host: who reads one of them gets it on the device."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Hashable, ItemsView, Iterator, Mapping, MutableMapping, ValuesView
from typing import Any, Protocol

import torch

State = MutableMapping[torch.Tensor, Any]
"""`optimizer.state`."""

_MISSING = object()


class Bringer(Protocol):
    """Where state that is away is brought from."""

    def bring(self, parameter: torch.Tensor) -> None: ...

    def made(self) -> None: ...


class Entry(dict[Hashable, Any]):
    """A dict of one parameter's state, in which tensors that are away come to the device when they are read.

    What can be asked without a tensor (length, keys, values that never leave) moves nothing. `away` holds the keys
    whose values are host tensors now. Every way to such a value goes through `bring`, C code's included: dict() and **
    read through `keys` and `__getitem__` where a subclass has an `__iter__` of its own.
    """

    __slots__ = ("away", "owner", "parameter")

    def __init__(self, values: Mapping[Hashable, Any] | None = None) -> None:
        super().__init__(values or {})
        self.away: Collection[Hashable] = ()
        self.owner: weakref.ref[Bringer] | None = None
        self.parameter: torch.Tensor | None = None

    def belongs_to(self, owner: Bringer, parameter: torch.Tensor) -> None:
        """`owner` brings what is away of the state of `parameter`."""
        # The owner has the entries: a strong reference back would let host memory wait for the garbage collector.
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
        if key in self.away:  # then it is taken back to where the old value lay
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
    """Makes the entries of parameters that have none yet, in place of `dict` as the factory of `optimizer.state`."""

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
    """The values where they lie now, host tensors among them; nothing is brought."""
    return dict(dict.items(entry)) if isinstance(entry, dict) else entry


# ------------------------------------------------------------------------ who else has a tensor


def _references(holder: dict[Any, Any], key: Any) -> int:
    """Of an object that a dict has, by which it is given: a variable here would count as well."""
    return sys.getrefcount(dict.__getitem__(holder, key))


def _uses(holder: dict[Any, Any], key: Any) -> int:
    """Of a tensor by C++, autograd's graphs among it."""
    return int(dict.__getitem__(holder, key)._use_count())


def _memory_uses(holder: dict[Any, Any], key: Any) -> int:
    """Of its memory, by tensors, views and storage objects: those without a base (`detach`, `.data`) show here only."""
    return int(torch._C._storage_Use_Count(dict.__getitem__(holder, key).untyped_storage()._cdata))


def alias(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The first bytes of a tensor's memory, uint8 [nbytes], as a tensor that neither keeps it nor counts as a use."""
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


_PROBE: dict[Any, Any] = {0: torch.empty(1)}
_REFERENCES, _USES, _MEMORY_USES = _references(_PROBE, 0), _uses(_PROBE, 0), _memory_uses(_PROBE, 0)
"""Of what nobody has but one dict. Counted, since Python versions count differently."""


def only_here(holder: dict[Any, Any], key: Any) -> bool:
    """Whether nobody but this dict has the object under `key`: no variable, list, attribute, or view of a tensor."""
    if _references(holder, key) > _REFERENCES:
        return False
    if isinstance(dict.__getitem__(holder, key), torch.Tensor):
        return _uses(holder, key) <= _USES and _memory_uses(holder, key) <= _MEMORY_USES
    return True


def had_elsewhere(entry: dict[Hashable, Any], given: dict[Hashable, torch.Tensor]) -> bool:
    """Whether somebody has a tensor of `given`, or one that `entry` has in its place, besides these two dicts."""
    for key in given:
        if _references(given, key) > _REFERENCES + _times(entry, given, key):
            return True
        if _uses(given, key) > _USES or _memory_uses(given, key) > _MEMORY_USES:
            return True
        if _replaced(entry, given, key) and not only_here(entry, key):
            return True
    return False


def _times(entry: dict[Hashable, Any], given: dict[Hashable, torch.Tensor], key: Hashable) -> int:
    return sum(value is given[key] for value in dict.values(entry))


def _replaced(entry: dict[Hashable, Any], given: dict[Hashable, torch.Tensor], key: Hashable) -> bool:
    now = dict.get(entry, key)
    return isinstance(now, torch.Tensor) and not any(now is tensor for tensor in given.values())
