"""The norm as the simulated backend takes it: by the definition in numpy."""

from __future__ import annotations

import numpy as np

from hostward.host import reference

from .across import Across
from .operands import Clipping, Partials, Scalars


def finish_norm(partials: Partials, out: Scalars, clipping: Clipping, across: Across | None) -> None:
    """Write norm, skip flag and factor of the gradients (docs/exactness.md)."""
    inv_scale, found_inf = clipping.inv_scale, clipping.found_inf
    if across is None:
        sums, exponents = partials.sums.data.numpy(), partials.exponents.data.numpy()
        norm, finite = reference.norm_from_partials(sums, exponents)
    else:
        totals, top, found_inf = across.totals(partials, found_inf)
        high, low = totals.tolist()
        norm, finite = reference.norm_of_total(high, low, int(top.item()))
    inverse = np.float32(1.0) if inv_scale is None else np.float32(inv_scale.item())
    overflow = not finite or (found_inf is not None and found_inf.item() != 0)
    out.norm.data[0] = float(norm * inverse)
    out.skip.data[0] = int(overflow)
    scale = reference.clip_scale(float(norm), clipping.max_norm or None, float(inverse))
    out.scale.data[0] = float(scale) if finite else 0.0
    if clipping.overflow_out is not None:
        clipping.overflow_out.add_(int(overflow))
