"""Tell from the code of forward, without running it, whether it takes `.data` of a tensor.

A write in place through `.data` moves no version counter, and within forward of a layer the fence is down
(`hostward.optim.forward_hooks`), as it is in backward for offloaded weights. Where code takes `.data`, it reports what
is handed out there, too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch

_Layer = TypeVar("_Layer")
_NOT_FOLLOWED = {"torch", "hostward"}


def layers_that_take_data(root: torch.nn.Module, layers: Mapping[int, _Layer]) -> frozenset[_Layer]:
    """Return the layers with a weight whose module, or one around it, may take `.data` in forward.

    Args:
        root: the module that is trained.
        layers: the layer of each parameter, by its id.
    """
    known: dict[type, bool] = {}
    found: set[_Layer] = set()
    for module in root.modules():
        if _takes_data(module, known):
            found |= {layers[id(p)] for p in module.parameters() if id(p) in layers}
    return frozenset(found)


def _takes_data(module: torch.nn.Module, known: dict[type, bool]) -> bool:
    """Return whether forward of a module or its hooks may take `.data`; `known`: the answers of classes so far."""
    kind = type(module)
    if kind not in known:
        known[kind] = _Walk(module).reaches(_of_class(kind, {"forward"}))
    forward = module.__dict__.get("forward"), *module._forward_pre_hooks.values(), *module._forward_hooks.values()
    backward = *module._backward_pre_hooks.values(), *module._backward_hooks.values()
    return known[kind] or _Walk(module).reaches((*forward, *backward))


class _Walk:
    """Follow functions to those that they name: methods of the same module, of its attributes, and of other modules of
    Python. Those of torch and of hostward are not followed.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._seen: set[CodeType] = set()

    def reaches(self, functions: Iterable[Any]) -> bool:
        """Return whether one of these functions, or one that they call, takes `.data`."""
        left = [found for function in functions for found in _plain(function)]
        while left:
            function = left.pop()
            code = function.__code__
            if code in self._seen or _is_known(function.__module__):
                continue
            self._seen.add(code)
            names = set(_names(code))
            if "data" in names:
                return True
            for called in self._named(function, names):
                left += _plain(called)
        return False

    def _named(self, function: FunctionType, names: set[str]) -> Iterator[Any]:
        """Yield what a function's names may stand for."""
        yield from (cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
        module, held = self._module, {**self._module.__dict__, **self._module._modules}
        yield from _of_class(type(module), names)
        for found in (known.get(name) for known in (held, function.__globals__) for name in names):
            yield found
            kind = type(found)  # not isinstance(), which asks the object: a weak reference may be dead
            if issubclass(kind, ModuleType):
                parts: dict[str, Any] = vars(found)
                yield from (parts.get(name) for name in names if not _is_known(parts.get("__name__")))
            elif found is not None and not issubclass(kind, (torch.Tensor, FunctionType)):
                yield from _of_class(found if issubclass(kind, type) else kind, names)


def _of_class(kind: type, names: set[str]) -> Iterator[Any]:
    """Yield what these names are in a class and in all that it inherits from."""
    yield from (vars(base).get(name) for base in kind.__mro__ for name in names)


def _plain(found: Any) -> Iterator[FunctionType]:
    """Yield the functions of Python behind a callable: of a method, a partial, a property, a decorator, an object."""
    for _ in range(8):
        kind = type(found)
        if kind is FunctionType:
            yield found
            found = getattr(found, "__wrapped__", None)
        elif issubclass(kind, (MethodType, staticmethod, classmethod)):
            found = found.__func__
        elif issubclass(kind, functools.partial):
            found = found.func
        elif issubclass(kind, property):
            found = found.fget
        elif found is None or issubclass(kind, (type, torch.Tensor, torch.nn.Module)):
            return
        else:
            found = inspect.getattr_static(kind, "__call__", None)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str) and constant == "data":  # getattr(weight, "data")
            yield constant


def _is_known(name: str | None) -> bool:
    return name is not None and name.partition(".")[0] in _NOT_FOLLOWED


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # not assigned yet
        return False
