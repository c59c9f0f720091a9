"""The few CUDA driver calls that torch does not offer: host functions on a stream, and locking pages of our own.

Through ctypes, because a failed driver call leaves no sticky error behind for torch's next runtime call to trip over.
"""

from __future__ import annotations

import ctypes
import functools

from hostward.errors import DeviceError, MemoryLimitError

_PORTABLE = 1
REGISTER_PIECE_BYTES = 64 << 30
"""Pages are locked in pieces: a single registration of 512 GiB or more fails."""


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(
            "the CUDA driver library libcuda.so.1 cannot be loaded", why=str(error), fix="install the NVIDIA driver"
        ) from error
    pointer, size, flags = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
    library.cuLaunchHostFunc.argtypes = [pointer, pointer, pointer]
    library.cuMemHostRegister_v2.argtypes = [pointer, size, flags]
    library.cuMemHostUnregister.argtypes = [pointer]
    library.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return library


def _error_name(code: int) -> str:
    name = ctypes.c_char_p()
    _library().cuGetErrorName(code, ctypes.byref(name))
    return name.value.decode() if name.value else f"code {code}"


def launch_host_function(stream: int, function: int, argument: int) -> None:
    """Enqueue the C function at address `function` with `argument` on the stream with handle `stream`.

    Raises DeviceError. The memory behind `argument` must stay as it is until the stream has run the function.
    """
    code = _library().cuLaunchHostFunc(stream, function, argument)
    if code:
        raise DeviceError("a host function could not be enqueued", why=f"cuLaunchHostFunc: {_error_name(code)}")


def lock_pages(address: int, size_bytes: int, *, owner: str) -> None:
    """Page-lock [address, address + size_bytes) for all devices. On failure nothing stays locked; raises
    MemoryLimitError.
    """
    locked: list[int] = []
    for offset in range(0, size_bytes, REGISTER_PIECE_BYTES):
        piece_bytes = min(REGISTER_PIECE_BYTES, size_bytes - offset)
        code = _library().cuMemHostRegister_v2(address + offset, piece_bytes, _PORTABLE)
        if code:
            for start in locked:
                _library().cuMemHostUnregister(start)
            raise MemoryLimitError(
                f"{owner}: {size_bytes:,} bytes could not be page-locked",
                why=f"cuMemHostRegister: {_error_name(code)}; this is host memory, not GPU memory",
                fix="lower optimizer.optimizer_offload_fraction, or raise the limit on locked memory (ulimit -l, WSL)",
            )
        locked.append(address + offset)


def unlock_pages(address: int, size_bytes: int) -> None:
    """Undo `lock_pages`. The caller has drained every stream that copies through these pages."""
    for offset in range(0, size_bytes, REGISTER_PIECE_BYTES):
        _library().cuMemHostUnregister(address + offset)
