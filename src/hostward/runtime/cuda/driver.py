"""Call CUDA driver functions that torch does not offer cheaply: events as handles, contexts, and pinning of pages.

The calls go through ctypes, because a failed driver call leaves no sticky error for torch's next runtime call. All but
the page calls need a current context on the calling thread; torch makes one with its first use of a device.
"""

from __future__ import annotations

import ctypes
import functools

from hostward.errors import DeviceError, PageLockError

_PORTABLE = 1
_PCI_ADDRESS_BYTES = 32
_EVENT_DEFAULT = 0
_EVENT_DISABLE_TIMING = 2
_CAPTURE_ACTIVE = 1
_SUCCESS = 0
_NOT_READY = 600


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(
            "the CUDA driver library libcuda.so.1 cannot be loaded", why=str(error), fix="install the NVIDIA driver"
        ) from error
    pointer, size, flags = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
    library.cuMemHostRegister_v2.argtypes = [pointer, size, flags]
    library.cuMemHostUnregister.argtypes = [pointer]
    library.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    library.cuCtxGetCurrent.argtypes = [ctypes.POINTER(pointer)]
    library.cuEventCreate.argtypes = [ctypes.POINTER(pointer), flags]
    library.cuEventDestroy_v2.argtypes = [pointer]
    library.cuEventQuery.argtypes = [pointer]
    library.cuEventSynchronize.argtypes = [pointer]
    library.cuStreamSynchronize.argtypes = [pointer]
    status, number = ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_uint64)
    library.cuStreamGetCaptureInfo_v2.argtypes = [pointer, status, number, pointer, pointer, pointer]
    return library


@functools.cache
def _elapsed_time() -> ctypes._NamedFuncPointer:
    # Drivers of CUDA 12.8 and later export the second form beside the first.
    name = "cuEventElapsedTime_v2" if hasattr(_library(), "cuEventElapsedTime_v2") else "cuEventElapsedTime"
    function = _library()[name]
    function.argtypes = [ctypes.POINTER(ctypes.c_float), ctypes.c_void_p, ctypes.c_void_p]
    return function


def error_name(code: int) -> str:
    """Return the driver's name of a CUresult, such as "CUDA_ERROR_INVALID_VALUE"."""
    name = ctypes.c_char_p()
    _library().cuGetErrorName(code, ctypes.byref(name))
    return name.value.decode() if name.value else f"code {code}"


def current_context() -> int:
    """Return the handle (CUcontext) of the context that is current on this thread. Raises DeviceError."""
    context = ctypes.c_void_p()
    _require(_library().cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent", "no context could be asked for")
    return int(context.value or 0)


def function_address(name: str) -> int:
    """Return the address of a driver function, for native code. Raises DeviceError if the driver lacks it."""
    try:
        function = _library()[name]
    except AttributeError as error:
        raise DeviceError(f"the CUDA driver has no {name}", why=str(error), fix="install a newer driver") from error
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def _require(code: int, call: str, what: str) -> None:
    if code != _SUCCESS:
        raise DeviceError(what, why=f"{call}: {error_name(code)}")


def event_create(timing: bool) -> int:
    """Create an event of the current context, timed or not, and return its handle. Raises DeviceError."""
    handle = ctypes.c_void_p()
    code = _library().cuEventCreate(ctypes.byref(handle), _EVENT_DEFAULT if timing else _EVENT_DISABLE_TIMING)
    _require(code, "cuEventCreate", "an event could not be made")
    return int(handle.value or 0)


def event_destroy(handle: int) -> None:
    """Destroy an event; enqueued waits for it still hold. Raises DeviceError."""
    _require(_library().cuEventDestroy_v2(handle), "cuEventDestroy", "an event could not be destroyed")


def event_query(handle: int) -> bool:
    """Return whether all work before the event's last record is complete; True if it was never recorded.

    Raises DeviceError, also for an error that earlier work on the device has left.
    """
    code = int(_library().cuEventQuery(handle))
    if code == _NOT_READY:
        return False
    _require(code, "cuEventQuery", "an event could not be asked")
    return True


def event_synchronize(handle: int) -> None:
    """Block this thread, without the GIL, until the event's last record is reached. Raises DeviceError as
    `event_query` does.
    """
    _require(_library().cuEventSynchronize(handle), "cuEventSynchronize", "an event could not be waited for")


def stream_synchronize(handle: int) -> None:
    """Block this thread, without the GIL, until the stream is empty. Raises DeviceError as `event_query` does."""
    _require(_library().cuStreamSynchronize(handle), "cuStreamSynchronize", "a stream could not be waited for")


def capture_number(stream: int) -> int:
    """Return the unique number (above 0) of the capture that the stream is part of; 0: none.

    Raises:
        DeviceError: the call failed, or the capture has failed.
    """
    status, number = ctypes.c_int(), ctypes.c_uint64()
    code = _library().cuStreamGetCaptureInfo_v2(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    _require(code, "cuStreamGetCaptureInfo", "a stream could not be asked for its capture")
    if status.value > _CAPTURE_ACTIVE:
        raise DeviceError("the capture of a CUDA graph has failed", why="an operation in it cannot be captured")
    return number.value + 1 if status.value else 0


def event_elapsed_ms(start: int, end: int) -> float:
    """Return the milliseconds from `start` to `end`, two completed timed events.

    Raises:
        DeviceError: the call failed, with CUDA_ERROR_NOT_READY if an event is not complete yet.
    """
    elapsed_ms = ctypes.c_float()
    code = _elapsed_time()(ctypes.byref(elapsed_ms), start, end)
    _require(code, "cuEventElapsedTime", "the time between two events could not be read")
    return elapsed_ms.value


def pci_address(ordinal: int) -> str:
    """Return the PCI address of a visible device, such as `0000:1b:00.0`. Raises DeviceError."""
    device, text = ctypes.c_int(), ctypes.create_string_buffer(_PCI_ADDRESS_BYTES)
    _require(_library().cuDeviceGet(ctypes.byref(device), ordinal), "cuDeviceGet", "find the device")
    code = _library().cuDeviceGetPCIBusId(text, len(text), device)
    _require(code, "cuDeviceGetPCIBusId", "find the device's PCI address")
    return text.value.decode().lower()


def lock_pages(address: int, size_bytes: int, *, owner: str) -> None:
    """Pin [address, address + size_bytes) for all devices, as one registration.

    The driver cannot copy across two registrations. Raises PageLockError; nothing is pinned then.
    """
    code = _library().cuMemHostRegister_v2(address, size_bytes, _PORTABLE)
    if code != _SUCCESS:
        raise PageLockError(
            f"{owner}: {size_bytes:,} bytes could not be pinned",
            why=f"cuMemHostRegister: {error_name(code)}; this is host memory, not GPU memory",
            fix="ulimit -l unlimited; under WSL memory= in .wslconfig",
        )


def unlock_pages(address: int, size_bytes: int) -> None:
    """Undo `lock_pages(address, size_bytes)`. The caller has drained every stream that copies through these pages."""
    _library().cuMemHostUnregister(address)
