"""The debug mode that finds code which reads weights before they have arrived.

Seen red: views let through for good, pending layers not asked for, operands inside lists not looked at, the engine's
own copies taken for readers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from networks import LATEST, OFFLOADED, Net, loss_of, make, stepped, tokens
from optimizer_cases import assert_equal, snapshot

from hostward.errors import OrderingError

offloaded = pytest.mark.parametrize("mix", OFFLOADED)

UNFENCED: dict[str, Callable[[Net], object]] = {
    "an average kept by hand": lambda model: torch.zeros(10, 32).lerp_(model.head.weight.detach(), 0.1),
    "a norm for the log": lambda model: torch.linalg.vector_norm(model.blocks[2].up.weight),
    "a list of weights": lambda model: torch._foreach_norm([p.detach() for p in model.parameters()]),
    "a view": lambda model: model.embed.weight.detach().view(-1)[:5].sum(),
    "deepcopy": copy.deepcopy,
    "a write": lambda model: model.head.weight.data.clamp_(-1.0, 1.0),
    "forward without hooks": lambda model: model.forward(tokens(0)),
}


@pytest.mark.parametrize("use", UNFENCED)
@offloaded
def test_unfenced_reads_are_found(mix: str, use: str) -> None:
    model, optimizer, _ = stepped(mix, fence=False)
    with optimizer.find_unfenced_reads():
        with pytest.raises(OrderingError, match="before it has arrived") as caught:
            UNFENCED[use](model)
        assert "optimizer.wait_for_weights()" in caught.value.fix
        optimizer.wait_for_weights()
        UNFENCED[use](model)
    assert len(optimizer.param_groups) == 1


def test_a_view_alone_reads_nothing() -> None:
    model, optimizer, heard = stepped("host", fence=False)
    with optimizer.find_unfenced_reads():
        flat = model.head.weight.detach().view(-1)[3:]
        with pytest.raises(OrderingError):
            flat.sum()
        optimizer.wait_for_weights()
        assert flat.sum().isfinite()
    assert heard.arrived()


@offloaded
def test_a_loop_that_waits_where_it_must_has_no_unfenced_read(mix: str) -> None:
    model, optimizer = make(mix, order=LATEST)
    with optimizer.find_unfenced_reads():
        for step in range(3):
            optimizer.zero_grad()
            with optimizer.accumulate(last=True):
                loss_of(model, step).backward()
            optimizer.step()
            if step == 1:
                model.state_dict()
                optimizer.state_dict()
            with torch.no_grad():
                model.eval()(tokens(9))
            model.train()
    other_model, other = make("device")
    for step in range(3):
        other.zero_grad()
        loss_of(other_model, step).backward()
        other.step()
    assert_equal(snapshot(model, optimizer), snapshot(other_model, other))
