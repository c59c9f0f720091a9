"""A bound on copies in flight: the same gradients, and device memory that goes early.

Seen red: a bound that is not kept.
"""

from __future__ import annotations

import pytest
import torch
from activation_cases import NETWORKS, ORDERS, left_over, loss_of, offloading, same, trained, trained_alone, transformer

from hostward.activations import module_hooks
from hostward.errors import ConfigError


@pytest.fixture(params=[4096, 1 << 30], ids=["several groups in a layer", "one group a layer"])
def group_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module_hooks, "GROUP_BYTES", request.param)
    found: int = request.param
    return found


@pytest.mark.usefixtures("group_bytes")
@pytest.mark.parametrize("most", [0, 1, 3])
@pytest.mark.parametrize("num_layers", [2, 3])
def test_gradients_keep_their_bits(most: int, num_layers: int) -> None:
    expected = trained_alone("Qwen3")
    for order in ORDERS[most::4]:
        model = transformer("Qwen3")
        with offloading(model, order, num_layers=num_layers, max_in_flight=most) as run:
            assert same(trained(model), expected), order
            report = run.report()
            assert left_over(run) == 0
        assert report.offloaded_bytes == report.reloaded_bytes > 0
        assert report.on_demand_bytes == 0


def held_after_each_layer(most: int | None) -> list[int]:
    """Groups that have left and are still on the device, after each of four layers, of which one is offloaded less."""
    model = transformer("Llama")
    found = []
    with offloading(model, num_layers=2, max_in_flight=most) as run:
        seen = run._layer_calls
        assert seen is not None

        def count(*_: object) -> None:
            groups = [group for visit in seen._unreleased for group in visit.alive()]
            found.append(sum(not group.released for group in groups))

        handles = [layer.register_forward_hook(count) for layer in model.model.layers]  # type: ignore[union-attr]
        loss_of(model, 0).backward()
        for handle in handles:
            handle.remove()
    return found


def test_device_memory_goes_early() -> None:
    assert held_after_each_layer(None) == [1, 2, 1, 0]
    assert held_after_each_layer(3) == [1, 2, 1, 0]
    assert held_after_each_layer(1) == [1, 1, 1, 0]
    assert held_after_each_layer(0) == [0, 0, 0, 0]


def test_microbatches_whose_backward_comes_in_between() -> None:
    def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
        first, second = loss_of(model, 0), loss_of(model, 1)
        second.backward(retain_graph=True)
        third = loss_of(model, 2)
        first.backward()
        second.backward()
        third.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for name in ("Llama", "convolutions"):
        expected = gradients(NETWORKS[name]())
        for order in ORDERS[::3]:
            model = NETWORKS[name]()
            with offloading(model, order, num_layers=2, max_in_flight=1):
                assert same(gradients(model), expected)


def test_a_negative_bound_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="max_in_flight must not be negative"),
        offloading(transformer("Llama"), max_in_flight=-1),
    ):
        pass
