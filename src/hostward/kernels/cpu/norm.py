"""Make partial squared norms of gradients on the host; `hostward.kernels.reference` defines and finishes the norm."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hostward.errors import ConfigError
from hostward.kernels.cpu.library import Dtype, Isa, NormItem, check, load
from hostward.kernels.cpu.operand import FLOATS, Memory, host_operand, require_threads
from hostward.kernels.reference import NORM_CHUNK


def chunk_count(elements: int) -> int:
    """Return the number of chunks of a parameter of `elements` elements."""
    return -(-elements // NORM_CHUNK)


def norm_partials(
    grads: Sequence[Memory], *, threads: int = 1, isa: Isa = Isa.BEST
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Return the partials of all chunks of `grads`, in the order given.

    Order, number of threads and instruction set do not change the norm that `norm_from_partials` makes of them.

    Args:
        grads: contiguous host gradients of one dtype (fp32, bf16, fp16), each the whole gradient of a parameter, or
            a part that begins at a multiple of 4,096 elements.
        threads: at most this many threads, the calling one included.
        isa: instruction set.

    Returns:
        (sums int64 [chunks], exponents int32 [chunks]).

    Raises:
        PlacementError: a gradient on a device, strided, or of another dtype.
        ConfigError: gradients of several dtypes, or fewer than one thread.
        NativeError: the processor lacks `isa`.
    """
    operands = [host_operand(grad, f"grads[{i}]", tuple(FLOATS)) for i, grad in enumerate(grads)]
    require_threads(threads)
    items = (NormItem * len(grads))()
    dtypes: set[str] = set()
    chunks = 0
    for i, operand in enumerate(operands):
        dtypes.add(operand.dtype)
        items[i] = NormItem(operand.address, operand.elements, chunks)
        chunks += -(-operand.elements // NORM_CHUNK)
    if len(dtypes) > 1:
        raise ConfigError(
            f"the gradients have dtypes {', '.join(sorted(dtypes))}",
            why="one call runs one kernel",
            fix="call once for each dtype and concatenate the partials",
        )
    sums, exponents = np.empty(chunks, dtype=np.int64), np.empty(chunks, dtype=np.int32)
    dtype = FLOATS[dtypes.pop()] if dtypes else Dtype.FP32
    code = load().norm_partials(
        items, len(grads), int(dtype), sums.ctypes.data, exponents.ctypes.data, threads, int(isa)
    )
    if code:
        check(code, "hostward_norm_partials")
    return sums, exponents
