"""Launches of compiled Triton kernels without the cost of looking up what to compile: a step has hundreds of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_ALIGNMENT_BYTES = 16
"""Triton compiles one kernel for pointers that are multiples of this, and another for those that are not."""


class Launcher:
    """One Triton kernel whose integers are all `do_not_specialize`, compiled once per kind of operands.

    What a compilation depends on, and is therefore looked up here: compile-time parameters, dtypes and alignment of
    pointers, which arguments are None, and the device.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel = kernel
        self._options = options
        self._compiled: dict[tuple[object, ...], Any] = {}

    def bind(
        self, programs: int, arguments: Sequence[Any], constants: Sequence[Any], keep: Sequence[torch.Tensor]
    ) -> Callable[[], None]:
        """A function that launches `programs` programs on the stream that is current then; arguments and constants in
        the kernel's order. Their device must be the current one.

        It keeps `keep` alive, and the others only until it is called first: they may be freed and made again at the
        same address in between.
        """
        key = (torch.cuda.current_device(), *constants, *map(_kind, arguments))
        held: tuple[Any, ...] = tuple(arguments)
        # Addresses as numbers: given a tensor, the launch asks the driver about it each time.
        raw = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments)
        runner: Any = None

        def launch() -> None:
            nonlocal runner, held
            if runner is None:
                compiled = self._compiled.get(key)
                if compiled is None:
                    compiled = self._kernel[(programs,)](*held, *constants, **self._options)
                    # The interpreter, which tests use, compiles nothing.
                    if hasattr(compiled, "run"):
                        self._compiled[key] = compiled
                    return
                runner = compiled[programs, 1, 1]
                held = tuple(keep)
            runner(*raw, *constants)

        return launch


def _kind(argument: Any) -> object:
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % _ALIGNMENT_BYTES == 0
    return None if argument is None else type(argument)
