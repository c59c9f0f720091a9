"""Elements that are kept for the norm over ranks."""

from __future__ import annotations

import torch

from hostward.optim.op_binding import KeepFragments
from hostward.runtime.backend import Tier
from hostward.runtime.simulated.backend import SimulatedBackend


def test_elements_are_counted_in_the_flattened_gradient_and_kept_in_float32() -> None:
    backend = SimulatedBackend(threads=1)
    gradient = backend.adopt(torch.arange(12, dtype=torch.bfloat16).view(3, 4), "gradients")
    (kept,) = backend.allocate(Tier.DEVICE, [5], torch.float32, "norm partials")
    work = KeepFragments(backend, "kept", [(kept, gradient, slice(3, 8))])
    work.issue()
    # Issued for the gradient that there was then.
    gradient.point_to(torch.zeros(12, dtype=torch.bfloat16))
    backend.synchronise()
    assert torch.equal(kept.data, torch.arange(3.0, 8.0))
