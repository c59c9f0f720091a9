"""What a plan says about layers, on models whose layers are not all alike.

Seen red: experts asked for in dense layers, gated names taken at their word, checkpoints left where a plan keeps
everything.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tape_cases import EXPERTS, built, loss_of

import hostward
from hostward.activations.recompute import Regions
from hostward.attachment import PlannedLayers, recompute_whole
from hostward.errors import ConfigError, ModelError
from hostward.model.layers import find_layers
from hostward.profiler.workload import workload_of

pytest.importorskip("transformers")
NO_LAYERS: frozenset[int] = frozenset()


def in_parts(count: int) -> PlannedLayers:
    return PlannedLayers(activations=0, weights=0, parts=count, whole=NO_LAYERS)


def test_only_the_layers_that_a_plan_recomputes_in_part_are_asked() -> None:
    model = built("Qwen3Moe", "cpu", **EXPERTS, mlp_only_layers=[0, 1])
    model.config._experts_implementation = "grouped_mm"
    layers = find_layers(model)
    assert in_parts(2).recompute(layers) == {"layernorm": 2, "mlp_act": 2}
    assert in_parts(3).recompute(layers) == {"layernorm": 3, "mlp_act": 3, "moe_act": 3}
    assert in_parts(0).recompute(layers) is None
    hostward.attach(model, recompute=in_parts(2).recompute(layers)).detach()


def doubled(device: str) -> Any:
    """Its MLPs have the parts of a gated one, and another forward."""
    model = built("Llama", device)
    kind: Any = type(model.model.layers[0].mlp)

    class Doubled(kind):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)  # type: ignore[no-any-return]

    for layer in model.model.layers:
        layer.mlp.__class__ = Doubled
    return model


def test_planning_and_attach_agree_on_what_can_be_recomputed(caplog: pytest.LogCaptureFixture) -> None:
    model = doubled("cpu")
    model.model.layers[0].gradient_checkpointing = True
    layers = find_layers(model)
    assert in_parts(3).recompute(layers) == {"layernorm": 3}
    assert not caplog.records
    Regions(layers, {"layernorm": 3}).undo()
    work = workload_of(model, sequence_tokens=24, loss=loss_of)
    plain = workload_of(built("Llama", "meta"), sequence_tokens=24, loss=loss_of)
    again = [{part.name for part in w.repeated[0].saved if part.elementwise} for w in (work, plain)]
    assert "mlp_act" not in again[0]
    assert again[0]
    assert "mlp_act" in again[1]


def test_what_cannot_be_recomputed_says_why() -> None:
    layers = find_layers(built("Llama", "cpu"))
    with pytest.raises(ConfigError, match="layers have none that can be"):
        in_parts(3).recompute([(name, torch.nn.Linear(2, 2)) for name, _ in layers])
    layers[0][1].compile()
    with pytest.raises(ModelError, match=r"layer model.layers.0 is compiled"):
        in_parts(3).recompute(layers)


def switches(model: Any) -> list[bool]:
    return [layer.gradient_checkpointing for layer in model.model.layers]


@pytest.mark.parametrize("chosen", [NO_LAYERS, frozenset({1})])
def test_layers_that_a_plan_keeps_lose_their_checkpoint(chosen: frozenset[int]) -> None:
    model = built("Llama", "cpu")
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": True})
    recompute_whole(model, [layer for _, layer in find_layers(model)], chosen)
    assert switches(model) == [i in chosen for i in range(3)]


def test_a_model_that_cannot_be_told_is_left_alone_where_nothing_is_chosen() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    recompute_whole(model, list(model), NO_LAYERS)
    assert not any(hasattr(layer, "gradient_checkpointing") for layer in model)
    with pytest.raises(ConfigError, match="recomputes 1 layers of a Sequential"):
        recompute_whole(model, list(model), frozenset({0}))
