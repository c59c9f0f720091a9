"""Parts of layers that run again in backward, on a GPU: the same bits, less memory, also where copies are slow."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from attached_cases import churn, deterministic_algorithms, put_to_sleep, same

import hostward
from hostward.core.placement import Placement
from hostward.plan.budgets import Budgets
from hostward.plan.cost_model import Costs, speeds_of
from hostward.plan.decisions import Choice, Keep
from hostward.plan.hardware_profile import profile
from hostward.plan.memory_model import required
from hostward.plan.plan_file import PlanFile, plan_of
from hostward.plan.search import Candidate
from hostward.profiler.workload import workload_of
from hostward.schedule.ops import Lane

pytestmark = pytest.mark.gpu

HIDDEN, FFN, TOKENS, LAYERS = 512, 2048, 2048, 4
ELEMENTWISE = ("layernorm", "mlp_act")


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    with deterministic_algorithms(warn_only=False):
        yield


def build(kind: str = "Llama", device: str = "cuda", **options: Any) -> Any:
    """A model of transformers in bf16 with sdpa, small, but with layers that save tens of MiB."""
    import transformers

    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 512,
        "attn_implementation": "sdpa",
        "use_cache": False,
    }
    more: dict[str, dict[str, Any]] = {
        "Llama": {},
        "Qwen3": {"head_dim": 64},
        "Qwen3Moe": {
            "head_dim": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 512,
            "experts_implementation": "grouped_mm",
        },
    }
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **more[kind], **options})
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.train()  # type: ignore[no-any-return]


def loss_of(model: Any, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 512, (1, TOKENS), generator=generator).cuda()
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def gradients(model: Any, steps: int = 3, *, churned: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(1)  # dropout
    found = []
    for step in range(steps):
        model.zero_grad()
        loss_of(model, step).backward()
        if churned:
            churn()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


def peak_and_held(model: Any) -> tuple[int, int]:
    """Bytes of the peak of one forward and backward, and of what forward leaves for backward."""
    gradients(model, 2)
    model.zero_grad()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = loss_of(model, 0)
    held = torch.cuda.memory_allocated() - before
    loss.backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, held


@pytest.mark.parametrize(
    ("kind", "modules"),
    [
        ("Llama", ELEMENTWISE),
        ("Llama", ("self_attn", "mlp")),
        ("Qwen3", ELEMENTWISE),
        ("Qwen3Moe", ("layernorm", "moe_act")),
        ("Qwen3Moe", ("moe",)),
    ],
    ids=str,
)
def test_gradients_keep_their_bits(kind: str, modules: tuple[str, ...]) -> None:
    expected = gradients(build(kind))
    model = build(kind)
    with hostward.attach(model, recompute=modules):
        assert same(gradients(model, churned=True), expected)
    assert same(gradients(build(kind)), expected)


WORDS = dict(zip("KORrEe", Keep, strict=True))
INPUT_BYTES = 2 * TOKENS * HIDDEN


def planned(kind: str, letters: str) -> PlanFile:
    """A plan with all state on the device, and these treatments of layers."""
    work = workload_of(
        build(kind, "meta", num_hidden_layers=len(letters)),
        sequence_tokens=TOKENS,
        loss=lambda model, ids: model(ids, labels=ids).loss,
    )
    choice = Choice((Placement.DEVICE,) * len(work.inventory.buckets), tuple(WORDS[letter] for letter in letters))
    hardware = profile("h200")
    candidate = Candidate(choice, required(work, choice), Costs(work, speeds_of(hardware)))
    return plan_of(work, hardware, 1, Budgets(), candidate)


@pytest.mark.parametrize("letters", ["EERRKK", "eEERRK", "eOORRK", "errRRK", "rrrrRR", "eeOrRK"])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3Moe"])
def test_layers_that_a_plan_treats_differently_keep_the_bits_and_free_what_they_offload(
    kind: str, letters: str
) -> None:
    """Seen red: with transformers before 5.20, whose checkpoints are around the layers' calls, inputs of recomputed
    layers did not leave, and what the first layers had offloaded kept its device memory.
    """
    steps, layers = 3, len(letters)
    expected = gradients(build(kind, num_hidden_layers=layers), steps)
    model = build(kind, num_hidden_layers=layers)
    run = hostward.attach(model, plan=planned(kind, letters))
    put_to_sleep(run, (Lane.D2H,))
    assert same(gradients(model, steps, churned=True), expected)
    report = run.report()
    run.detach()
    assert report.offloaded_bytes == report.freed_bytes + report.held_bytes == report.reloaded_bytes
    assert report.on_demand_bytes == 0
    leaving = [letter for letter in letters if letter in "Ore"]
    if set(leaving) <= {"r"}:
        assert report.offloaded_bytes == steps * len(leaving) * INPUT_BYTES
    else:
        assert report.offloaded_bytes > steps * len(leaving) * INPUT_BYTES


@pytest.mark.parametrize("slow", [(), (Lane.D2H,), (Lane.H2D,), (Lane.D2H, Lane.H2D)], ids=str)
@pytest.mark.parametrize("most", [None, 0, 1])
def test_what_remains_is_offloaded_with_the_same_bits(slow: tuple[Lane, ...], most: int | None) -> None:
    expected = gradients(build())
    for num_layers in (1, LAYERS - 1):
        model = build()
        how = hostward.Activations(num_layers=num_layers, min_bytes=4096, max_in_flight=most)
        run = hostward.attach(model, activations=how, recompute=ELEMENTWISE)
        put_to_sleep(run, slow)
        assert same(gradients(model, churned=True), expected), num_layers
        report = run.report()
        run.detach()
        assert report.offloaded_bytes == report.reloaded_bytes > 0
        assert report.on_demand_bytes == 0
        assert run._arena.blocks_in_use == 0


def test_random_numbers_of_the_device_are_the_same_again() -> None:
    def dropping() -> Any:
        return build(attention_dropout=0.2)

    expected = gradients(dropping())
    assert not same(expected, gradients(build()))
    for modules in (("self_attn",), ("self_attn", "layernorm", "mlp_act")):
        model = dropping()
        with hostward.attach(model, recompute=modules):
            assert same(gradients(model), expected)


def test_autocast() -> None:
    def found(model: Any) -> list[torch.Tensor]:
        model.float()
        made = []
        for step in range(2):
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = loss_of(model, step)
            loss.backward()
            made += [p.grad.clone().view(torch.int16) for p in model.parameters() if p.grad is not None]
        return made

    expected = found(build())
    model = build()
    with hostward.attach(model, recompute=ELEMENTWISE):
        assert same(found(model), expected)


def test_memory_is_lower_and_lower_still_with_offloading() -> None:
    unit = TOKENS * HIDDEN
    model = build()
    kept_peak, kept = peak_and_held(model)
    with hostward.attach(model, recompute=ELEMENTWISE):
        peak, held = peak_and_held(model)
        assert kept - held > 0.9 * 24 * unit * LAYERS
        assert kept_peak - peak > 0.8 * 24 * unit * (LAYERS - 1)
    how = hostward.Activations(num_layers=LAYERS - 1, min_bytes=4096)
    with hostward.attach(model, recompute=ELEMENTWISE, activations=how):
        peak_with, held_with = peak_and_held(model)
    assert peak_with < peak
    assert held_with < held - 0.9 * 30 * unit * (LAYERS - 2)
    assert peak_and_held(model)[1] == kept


def test_a_bound_on_copies_in_flight_frees_memory_early() -> None:
    """After the second of two offloaded layers, of which the window would keep both."""
    layer = 54 * TOKENS * HIDDEN
    seen: list[int] = []
    for most in (None, 1, 0):
        model = build()
        how = hostward.Activations(num_layers=2, min_bytes=4096, max_in_flight=most)
        with hostward.attach(model, activations=how):
            gradients(model, 2)
            model.zero_grad()
            gc.collect()
            before = torch.cuda.memory_allocated()
            hook = model.model.layers[1].register_forward_hook(
                lambda *_, before=before: seen.append(torch.cuda.memory_allocated() - before)
            )
            loss_of(model, 0).backward()
            hook.remove()
    assert seen[0] - seen[1] > 0.9 * layer
    assert seen[1] - seen[2] > 0.9 * layer


def test_nothing_waits_on_the_host(no_host_waits: Callable[[], AbstractContextManager[None]]) -> None:
    model = build()
    ids = torch.randint(0, 512, (1, TOKENS)).cuda()
    layers = model.model.layers
    with hostward.attach(model, recompute=ELEMENTWISE, activations=hostward.Activations(min_bytes=4096)):
        gradients(model, 3)
        x = model.model.embed_tokens(ids).detach().requires_grad_()
        rotary = model.model.rotary_emb(x, torch.arange(TOKENS, device="cuda")[None])
        with no_host_waits():
            hidden = x
            for layer in layers:
                hidden = layer(hidden, position_embeddings=rotary)
            hidden.float().square().mean().backward()
