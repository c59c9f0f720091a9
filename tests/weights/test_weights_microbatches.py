"""Weights that leave while passes of several microbatches alternate: whatever is expected, bits stay.

Seen red: a fetch that copies nothing; a run that nobody checks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from activation_cases import FEW, ORDERS, loss_of, same
from optimizer_cases import snapshot
from weight_cases import ALL, ON_HOST, SAVED, network

import hostward
from hostward.errors import ConfigError
from hostward.model.layers import Runs
from hostward.runtime.simulated.backend import Order, SimulatedBackend

PASSES = ("F0", "F1", "B0", "F2", "B1", "B2")
"""1F1B on the first of two stages."""
EXPECTED: dict[str, tuple[list[int], list[tuple[int, bool]]]] = {
    "nothing": ([4], []),
    "what comes": ([4], [(0, name[0] == "B") for name in PASSES]),
    "something else": ([1, 2, 1], [(2, False), (1, True), (0, True), (1, False), (2, True), (0, False)]),
}


def trained(order: Order, lengths: list[int], expected: list[tuple[int, bool]], **attached: Any) -> Any:
    """Losses, weights and state after two steps, and bytes that nobody had foreseen."""
    model = network("encoder")
    backend = SimulatedBackend(threads=1, order=order)
    optimizer = hostward.AdamW(model, lr=1e-2, max_grad_norm=1.0, backend=backend, host_threads=1, **ON_HOST)
    run = hostward.attach(model, optimizer, **attached) if attached else None
    if run is not None:
        run.in_runs(lengths)
    losses: dict[str, torch.Tensor] = {}
    torch.manual_seed(1)
    for step in range(2):
        for number, (kind, microbatch) in enumerate(PASSES):
            if run is not None and expected:
                place, backward = expected[number]
                run.expect(place, backward=backward)
            if kind == "F":
                losses[f"{step}.{microbatch}"] = loss_of(model, 3 * step + int(microbatch))
                continue
            with optimizer.accumulate(last=microbatch == "2"):
                losses[f"{step}.{microbatch}"].backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    unforeseen = None
    if run is not None:
        report = run.report().weights
        assert report is not None
        assert report.held_bytes == 0
        unforeseen = report.on_demand_bytes // (report.offloaded_bytes // 3)
        run.detach()
    optimizer.wait()
    return [loss.detach() for loss in losses.values()], snapshot(model, optimizer), unforeseen


@pytest.mark.parametrize("which", EXPECTED)
@pytest.mark.parametrize("both", [False, True])
def test_bits_do_not_depend_on_what_was_expected(which: str, both: bool) -> None:
    lengths, expected = EXPECTED[which]
    reference = trained(Order(eager=True), [4], [])
    attached = {"weights": ALL, **({"activations": SAVED} if both else {})}
    for order in FEW if both else ORDERS:
        found = trained(order, lengths, expected, **attached)
        assert same(found[0], reference[0]), order
        assert same(list(found[1].values()), list(reference[1].values())), order
        assert (found[2] == 0) == (which == "what comes")


def test_a_run_that_is_not_there_is_refused() -> None:
    model = network("encoder")
    optimizer = hostward.AdamW(model, backend=SimulatedBackend(threads=1), host_threads=1, **ON_HOST)
    with hostward.attach(model, optimizer, weights=ALL) as run:
        for lengths in ([2, 1], [4, 1], [4, 0]):
            with pytest.raises(ConfigError, match="layers, of 4 in all"):
                run.in_runs(lengths)
        run.in_runs([1, 3])
        for place in (-1, 2):
            with pytest.raises(ConfigError, match="there are 2 runs"):
                run.expect(place, backward=False)


def test_runs_follow_on_one_another() -> None:
    runs = Runs((2, 3))
    assert [runs.run(number) for number in range(2)] == [range(2), range(2, 5)]
    assert [runs.beside(layer) for layer in (-1, 1, 4, 5)] == [range(0), range(2), range(2, 5), range(0)]
