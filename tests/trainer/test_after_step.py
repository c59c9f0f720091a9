"""What `hostward verify` does with weights after each step: each reader sees a wrong weight, each writer a lost write.

Seen red: averages that were never updated, a deep copy of the first step, clamps of no matrix, one order of actions.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hostward.trainer.verify.after_step import CLAMPED_AT, AfterStep, claims_after_steps

Model = torch.nn.Sequential
READERS = {
    "swa_utils averages equal",
    "hand-made averages equal",
    "norms of weights equal",
    "deep copies of the model equal",
    "weights copied to a second model equal",
}
TENSOR, DATA = "weights clamped through the tensor equal", "weights clamped through .data equal"


def model() -> Model:
    torch.manual_seed(1)
    made = Model(torch.nn.Linear(16, 24), torch.nn.LayerNorm(24), torch.nn.Linear(24, 24))
    for i in (0, 2):  # torch's own have a uniform distribution, of which nothing is beyond two standard deviations
        torch.nn.init.normal_(made[i].weight, std=0.02)
    return made


def train(
    steps: int = 0,
    spoil: Callable[[Model, int], None] = lambda *_: None,
    lose: str = "",
    dtype: torch.dtype | None = None,
) -> AfterStep:
    """A loop with a plain optimizer. `spoil`: called after each step, before the weights are used. `lose`: the weight
    whose writes are lost.
    """
    trained = model().to(dtype or torch.float32)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    after = AfterStep(trained)
    for step in range(1, (steps or after.steps) + 1):
        torch.manual_seed(step)
        optimizer.zero_grad()
        trained(torch.randn(4, 16, dtype=dtype)).square().mean().backward()
        optimizer.step()
        spoil(trained, step)
        kept = dict(trained.state_dict()).get(lose, torch.empty(0)).clone()
        after.act()
        if lose:
            trained.get_parameter(lose).data.copy_(kept)
    return after


def broken(base: AfterStep, other: AfterStep) -> dict[str, str]:
    return {claim.name: claim.detail for claim in claims_after_steps(base, other) if not claim.held}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_runs_are_equal(dtype: torch.dtype) -> None:
    claims = claims_after_steps(train(dtype=dtype), train(dtype=dtype))
    assert {claim.name for claim in claims if claim.held} == {*READERS, TENSOR, DATA}
    assert {claim.detail for claim in claims} == {f"after each of 7 steps, {n} values" for n in (1, 6)}


def test_every_reader_sees_one_bit_of_a_stale_weight() -> None:
    """The last element of the last bias, which nothing clamps, in the last step."""

    def spoil(spoilt: Model, step: int) -> None:
        if step == 7:
            spoilt[2].bias.data[-1:].view(torch.int32).bitwise_xor_(1 << 12)

    found = broken(train(), train(spoil=spoil))
    assert found.keys() == READERS
    named = "first after step 7 of 7: 1 of 6 differ: 2.bias"
    assert found == dict.fromkeys(READERS, named) | {
        "norms of weights equal": "first after step 7 of 7: 1 of 1 differ: norm"
    }


@pytest.mark.parametrize(("weight", "name"), [("0.weight", TENSOR), ("2.weight", DATA)])
def test_a_lost_clamp_is_seen_after_the_next_step_and_named(weight: str, name: str) -> None:
    found = broken(train(), train(lose=weight))
    assert found[name] == f"first after step 2 of 7: 1 of 1 differ: {weight}"


def test_matrices_are_clamped_and_others_are_not() -> None:
    trained = model()
    limits = [CLAMPED_AT * trained[i].weight.std().item() for i in (0, 2)]
    with torch.no_grad():
        for p in trained.parameters():
            p.mul_(10)
    bias = trained[0].bias.clone()
    versions = [trained[i].weight._version for i in (0, 2)]
    after = AfterStep(trained)
    after._limits = dict(zip(("0.weight", "2.weight"), limits, strict=True))
    after.act()
    assert [trained[i].weight.abs().max().item() for i in (0, 2)] == pytest.approx(limits)
    assert [trained[i].weight._version - v for i, v in zip((0, 2), versions, strict=True)] == [1, 0]
    assert torch.equal(trained[0].bias, bias)


def test_each_action_is_the_first_after_some_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes later may find that the first has waited for the weights."""
    after = AfterStep(model())
    order: list[str] = []
    for name in after._actions:
        monkeypatch.setitem(after._actions, name, lambda name=name: order.append(name) or {})
    for _ in range(after.steps):
        after.act()
    assert set(order[:: after.steps]) == set(after._actions)
    assert len(order) == after.steps**2
