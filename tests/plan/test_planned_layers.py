"""What a plan says about layers, on models whose layers, or treatments of layers, are not all alike.

Seen red: experts asked for in dense layers, gated names taken at their word, checkpoints left where a plan keeps
everything.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from activation_cases import FEW, left_over, loss_of as trained_loss, transformer
from optimizer_cases import assert_equal, snapshot
from tape_cases import EXPERTS, built, loss_of
from workload_cases import treatments

import hostward
from hostward import attachment
from hostward.activations.recompute import Regions
from hostward.attachment import recompute_whole, recomputed_parts
from hostward.core.placement import Placement
from hostward.errors import ConfigError, ModelError
from hostward.model.layers import find_layers
from hostward.plan.budgets import Budgets
from hostward.plan.cost_model import Costs, speeds_of
from hostward.plan.decisions import LEAVES, Choice
from hostward.plan.hardware_profile import profile
from hostward.plan.memory_model import required
from hostward.plan.plan_file import PlanFile, PlannedLayers, plan_of
from hostward.plan.search import Candidate
from hostward.plan.workload import Workload
from hostward.profiler.workload import workload_of
from hostward.runtime.simulated.backend import Order, SimulatedBackend

pytest.importorskip("transformers")
NO_LAYERS: frozenset[int] = frozenset()


def in_parts(count: int) -> PlannedLayers:
    return PlannedLayers(activations=0, weights=0, parts=count, whole=NO_LAYERS)


def test_only_the_layers_that_a_plan_recomputes_in_part_are_asked() -> None:
    model = built("Qwen3Moe", "cpu", **EXPERTS, mlp_only_layers=[0, 1])
    model.config._experts_implementation = "grouped_mm"
    layers = find_layers(model)
    assert recomputed_parts(in_parts(2), layers) == {"layernorm": 2, "mlp_act": 2}
    assert recomputed_parts(in_parts(3), layers) == {"layernorm": 3, "mlp_act": 3, "moe_act": 3}
    assert recomputed_parts(in_parts(0), layers) is None
    hostward.attach(model, recompute=recomputed_parts(in_parts(2), layers)).detach()


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
    assert recomputed_parts(in_parts(3), layers) == {"layernorm": 3}
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
        recomputed_parts(in_parts(3), [(name, torch.nn.Linear(2, 2)) for name, _ in layers])
    layers[0][1].compile()
    with pytest.raises(ModelError, match=r"layer model.layers.0 is compiled"):
        recomputed_parts(in_parts(3), layers)


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


LAYERS = 6
MIXES = ("EERRKK", "EEKKRR", "eEERRK", "eOORRK", "errRKK", "eeOrRK")


def model_of(kind: str) -> Any:
    return transformer(kind, num_hidden_layers=LAYERS, attention_dropout=0.1)


@cache
def traced(kind: str) -> Workload:
    return workload_of(
        model_of(kind),
        sequence_tokens=24,
        microbatch_sequences=2,
        microbatches=2,
        loss=lambda m, ids: m(ids, labels=ids).loss,
    )


def mix(kind: str, letters: str, weights: int = 0) -> PlanFile:
    """A plan with every placement of state, these treatments of layers, and weights of so many layers offloaded."""
    work, hardware = traced(kind), profile("h200")
    away = frozenset(layer.name for layer in work.repeated[:weights])
    kinds, buckets = list(Placement), work.inventory.buckets
    places = tuple(Placement.HOST if b.layer in away else kinds[i % 3] for i, b in enumerate(buckets))
    choice = Choice(places, treatments(letters), away)
    return plan_of(
        work, hardware, 1, Budgets(), Candidate(choice, required(work, choice), Costs(work, speeds_of(hardware)))
    )


class AllSizes(hostward.Activations):
    """A plan offloads what is worth a copy; here that is nearly all."""

    def __init__(self, num_layers: int | None = None) -> None:
        super().__init__(num_layers=num_layers, min_bytes=64)


def around_calls(model: Any) -> None:
    """Give the layers the checkpoints of transformers before 5.20, which are around their calls."""
    kind: Any = type(model.model.layers[0])

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = partial(torch.nn.Module.__call__, self, **kwargs)
        return self._gradient_checkpointing_func(plain, *args) if self.gradient_checkpointing else plain(*args)

    older: Any = type("Older", (kind,), {"__call__": call})
    older.forward = kind.forward.__wrapped__
    for layer in model.model.layers:
        layer.__class__ = older


def steps(
    kind: str, plan: PlanFile | None, order: Order, *, older: bool = False
) -> tuple[dict[str, torch.Tensor], Any]:
    """Two steps of two microbatches with dropout: all gradients, weights and state; the report of what was attached."""
    model, found, report = model_of(kind), {}, None
    if older:
        around_calls(model)
    made: dict[str, list[torch.Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        p.register_hook(lambda grad, name=name: made[name].append(grad.clone()))
    backend = SimulatedBackend(threads=1, order=order)
    options: dict[str, Any] = {"offload_fraction": 0.0} if plan is None else {"plan": plan}
    optimizer = hostward.AdamW(model, lr=1e-2, max_grad_norm=0.5, backend=backend, **options)
    run = None if plan is None else hostward.attach(model, optimizer, plan=plan)
    torch.manual_seed(1)  # dropout
    for step in range(2):
        for i in range(2):
            with optimizer.accumulate(last=i == 1):
                trained_loss(model, 2 * step + i).backward()
        optimizer.step()
        optimizer.zero_grad()
        found |= {f"{step} {name}": value for name, value in snapshot(model, optimizer).items()}
    if run is not None:
        report = run.report()
        run.detach()
        assert left_over(run) == 0
    return found | {f"gradients {name}": torch.stack(of) for name, of in made.items()}, report


@cache
def alone(kind: str) -> dict[str, torch.Tensor]:
    return steps(kind, None, Order(eager=True))[0]


@pytest.mark.parametrize("letters", MIXES)
@pytest.mark.parametrize("kind", ["Llama", "Qwen3Moe"])
def test_mixed_treatments_keep_the_bits(kind: str, letters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachment, "Activations", AllSizes)
    made = mix(kind, letters)
    for order in FEW:
        found, report = steps(kind, made, order)
        assert_equal(found, alone(kind))
        assert report.recomputed_layers == sum(letter in "Rr" for letter in letters)
        assert report.recomputed_modules >= 3 * sum(letter in "Ee" for letter in letters)
        assert (report.offloaded_bytes > 0) == any(keep in LEAVES for keep in treatments(letters))
        assert report.offloaded_bytes == report.reloaded_bytes
        assert report.on_demand_bytes == 0


@pytest.mark.parametrize("letters", ["eEERRK", "errRRK", "rrrrRR"])
def test_checkpoints_around_the_calls_of_layers_are_followed(letters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: the plan's checkpoints took the place of those that were followed. Inputs of recomputed layers stayed
    on the device, and what other layers had offloaded was not freed.
    """
    monkeypatch.setattr(attachment, "Activations", AllSizes)
    made = mix("Llama", letters)
    for order in FEW:
        found, report = steps("Llama", made, order, older=True)
        assert_equal(found, alone("Llama"))
        assert report.offloaded_bytes == steps("Llama", made, order)[1].offloaded_bytes
        assert report.offloaded_bytes == report.reloaded_bytes == report.freed_bytes + report.held_bytes


@pytest.mark.parametrize("kind", ["Llama", "Qwen3Moe"])
def test_weights_leave_as_well(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: most was said to stay of what layers save, where these layers stay as planned."""
    monkeypatch.setattr(attachment, "Activations", AllSizes)
    made = mix(kind, "eEERKK", weights=5)
    for order in FEW:
        found, report = steps(kind, made, order)
        assert_equal(found, alone(kind))
        assert report.weights.offloaded_bytes > 0
        assert report.offloaded_bytes == report.reloaded_bytes > 0
        assert "of these layers' activations" not in report.explain()


@pytest.mark.parametrize(
    ("letters", "told"),
    [
        (
            "RREEKK",
            r"layer norms and activations are recomputed in layers\[3\], model.layers.3, but not in layers\[0\]",
        ),
        (
            "OOEEKK",
            r"layer norms and activations are recomputed in layers\[3\], model.layers.3, but not in layers\[0\]",
        ),
        ("eROKKK", r"activations are offloaded in layers\[2\], model.layers.2, but not in layers\[1\]"),
        ("EEOOKK", r"activations are offloaded in layers\[3\], model.layers.3, but not in layers\[0\]"),
        ("eeOrrr", "the plan offloads everything of the last layer"),
    ],
)
def test_mixes_that_training_cannot_carry_out_are_refused(letters: str, told: str) -> None:
    model = model_of("Llama")
    with pytest.raises(ConfigError, match=told):
        hostward.attach(model, plan=mix("Llama", letters), backend=SimulatedBackend(threads=1))
    assert not any(switches(model))
