"""Methods of other people's objects that tell somebody that they are called."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Told(ABC, Generic[T]):
    """Before a method of an object, and after it, somebody is told. Both are held weakly."""

    def __init__(self, to: weakref.ref[T], owner: Any) -> None:
        self.to = to
        self._owner = weakref.ref(owner)

    def before(self, *args: Any, **options: Any) -> None:
        to, owner = self.to(), self._owner()
        if to is not None and owner is not None:
            self._before(to, owner, *args, **options)

    def after(self) -> None:
        to, owner = self.to(), self._owner()
        if to is not None and owner is not None:
            self._after(to, owner)

    @abstractmethod
    def _before(self, to: T, owner: Any, /, *args: Any, **options: Any) -> None:
        """The method is about to be called with these arguments."""

    def _after(self, to: T, owner: Any, /) -> None:
        """It has been called."""


class _Announced:
    """Stands for a method: tells whoever listens, calls it, and tells them again."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.told: list[Told[Any]] = []

    def __call__(self, *args: Any, **options: Any) -> Any:
        told = tuple(self.told)
        for each in told:
            each.before(*args, **options)
        returned = self._method(*args, **options)
        for each in told:
            each.after()
        return returned


def announce(owner: Any, method: str, told: Told[Any]) -> Callable[[], None]:
    """Let the object's method tell; returns what ends that."""
    announced = owner.__dict__.get(method)
    if not isinstance(announced, _Announced):
        announced = owner.__dict__[method] = _Announced(getattr(owner, method))
    announced.told = [t for t in announced.told if t.to() is not None] + [told]

    def remove() -> None:
        if told in announced.told:
            announced.told.remove(told)

    return remove
