"""What may go wrong only where lanes are streams: each lane slow at each of its operations, memory reused during
backward, gradients called back from the host, graphs and compilers.

Every test compares bits with the same training at fraction 0 and overlap=False, run apart. The edges that these tests
need were each deleted in turn in tests/schedule.
"""

from __future__ import annotations

import functools
import gc
import shutil

import pytest
import torch
from hidden_step_cases import (
    DEVICE,
    MAX_NORM,
    MIXES,
    SIDE_LANES,
    WIDTH,
    Backward,
    Net,
    assert_equal,
    deterministic,
    every_mix,
    everything,
    loss_of,
    make,
    one_backward,
    reference,
    slow,
    train,
)

import hostward
from hostward.optim.bucket_state import same_bits
from hostward.schedule.ops import Lane

__all__ = ["deterministic"]
pytestmark = pytest.mark.gpu


def test_clipping_is_active_in_some_steps_and_not_in_others() -> None:
    model, optimizer = make(None)
    norms = []
    for step in range(6):
        loss_of(model, step).backward()
        optimizer.step()
        norms.append(optimizer.grad_norm)
        optimizer.zero_grad()
    assert min(norms) < MAX_NORM < max(norms)


# ---------------------------------------------------------------- slow lanes


@pytest.mark.parametrize("lanes", [*([lane] for lane in Lane), SIDE_LANES], ids=lambda x: "+".join(x))
@every_mix
def test_t30_t31_h1_each_lane_slow_at_each_operation(
    mix: str, lanes: list[Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference()
    slept = slow(lanes, monkeypatch)
    assert_equal(train(mix), expected)
    assert set(slept) == set(lanes) or mix != "mixed"


@every_mix
def test_h1_evaluation_right_after_the_step_sees_the_new_weights(mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluated(mix: str | None) -> list[torch.Tensor]:
        losses = []

        def look(model: Net, _: hostward.AdamW) -> None:
            with torch.no_grad():
                losses.append(loss_of(model.eval(), 500))
            model.train()

        train(mix, steps=8, between=look)
        return losses

    expected = evaluated(None)
    slow(SIDE_LANES, monkeypatch)
    found = evaluated(mix)
    assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))


# ---------------------------------------------------------------- gradients called back


def twice(model: Net, seed: int) -> None:
    loss_of(model, seed).backward()
    loss_of(model, seed + 3).backward()


def shared(reentrant: bool) -> Backward:
    """One layer used three times, recomputed each time: its gradient hook fires more than once in one backward."""

    def backward(model: Net, seed: int) -> None:
        loss_of(model, seed, only=1, reentrant=reentrant).backward()

    return backward


BACKWARDS: dict[str, Backward] = {
    "twice": twice,
    "shared, reentrant": shared(True),
    "shared": shared(False),
    "recomputed, reentrant": lambda model, seed: loss_of(model, seed, reentrant=True).backward(),
    "a layer left out of some microbatches": lambda model, seed: loss_of(
        model, seed, without=1 if seed % 2 else None
    ).backward(),
    "a layer left out of some steps": lambda model, seed: loss_of(
        model, seed, without=2 if seed // 10 % 3 else None
    ).backward(),
}


@functools.cache
def reference_of(backward: str) -> dict[str, torch.Tensor]:
    return train(None, BACKWARDS[backward], steps=6)


@pytest.mark.parametrize("lanes", [[], SIDE_LANES], ids=lambda x: "+".join(x) or "none")
@pytest.mark.parametrize("backward", BACKWARDS)
@every_mix
def test_t29_h38_gradients_that_were_not_final_yet(
    mix: str, backward: str, lanes: list[Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called back while their copy to the host still runs, or from the host: added to, and taken again."""
    expected = reference_of(backward)
    slow(lanes, monkeypatch)
    assert_equal(train(mix, BACKWARDS[backward], steps=6), expected)


# ---------------------------------------------------------------- memory


def churning(backward: Backward) -> Backward:
    """During backward, whatever is freed is taken again at once, on the compute stream, and filled with NaN."""
    sizes = [WIDTH * WIDTH * 4, WIDTH * WIDTH * 2, WIDTH * 4, WIDTH * 300 * 4, 32 * WIDTH * 4]

    def churn(*_: object) -> None:
        for size in sizes:
            blocks = [torch.empty(size, dtype=torch.uint8, device=DEVICE).fill_(0xFF) for _ in range(2)]
            del blocks

    def run(model: Net, seed: int) -> None:
        handles = [p.register_post_accumulate_grad_hook(churn) for p in model.parameters()]
        backward(model, seed)
        churn()
        for handle in handles:
            handle.remove()

    return run


@pytest.mark.parametrize("backward", ["once", "twice"])
@pytest.mark.parametrize("lanes", [[Lane.D2H], [Lane.UPDATE, Lane.H2D], SIDE_LANES], ids=lambda x: "+".join(x))
@every_mix
def test_h12_memory_freed_in_backward_is_not_reused_while_a_lane_uses_it(
    mix: str, lanes: list[Lane], backward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {"once": one_backward, "twice": twice}[backward]
    expected = train(None, plain, steps=8)
    slow(lanes, monkeypatch)
    assert_equal(train(mix, churning(plain), steps=8), expected)


@every_mix
def test_two_models_one_after_the_other_and_side_by_side(mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference(steps=6)
    slow(SIDE_LANES, monkeypatch)
    assert_equal(train(mix, steps=6), expected)
    gc.collect()
    assert_equal(train(mix, steps=6), expected)
    pairs = [make(mix), make("mixed")]
    for step in range(6):
        for i in range(2):
            for model, optimizer in pairs:
                with optimizer.accumulate(last=i == 1):
                    loss_of(model, 10 * step + i).backward()
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
    for model, optimizer in pairs:
        found = everything(model, optimizer)
        assert_equal(found, {name: expected[name] for name in found})


@pytest.mark.alone
@every_mix
def test_t12_h15_memory_is_level_over_200_steps(mix: str) -> None:
    model, optimizer = make(mix)
    levels = set()
    for step in range(200):
        with optimizer.accumulate(last=True):
            loss_of(model, step % 5).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (40, 100, 199):
            optimizer.wait()
            pinned = optimizer.backend.ledger.pinned_bytes
            levels.add((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), pinned))
    assert len(levels) == 1


# ---------------------------------------------------------------- graphs and compilers


@pytest.mark.parametrize("mix", [None, *MIXES])
def test_t44_gradients_of_a_captured_backward_stay_where_the_graph_writes_them(mix: str | None) -> None:
    model, optimizer = make(mix, torch.float32)
    other_model, other = make(None, torch.float32)
    x = torch.randn(32, 32, device=DEVICE)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(x).square().mean().backward()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).square().mean().backward()
    addresses = {name: p.grad.data_ptr() for name, p in model.named_parameters()}
    for replay in range(100):
        x.copy_(torch.randn(32, 32, generator=torch.Generator().manual_seed(replay)))
        graph.replay()
        other.zero_grad()
        other_model(x).square().mean().backward()
        if replay % 20 == 0:
            for (name, p), q in zip(model.named_parameters(), other_model.parameters(), strict=True):
                assert p.grad.data_ptr() == addresses[name]
                assert same_bits(p.grad, q.grad)
        optimizer.step()
        other.step()
    assert_equal(everything(model, optimizer), everything(other_model, other))


@pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("cc")), reason="inductor needs a C compiler")
@pytest.mark.filterwarnings("ignore")  # the compiler looks at .grad of everything
@every_mix
def test_t43_layers_compiled_by_inductor(mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(mix: str | None) -> dict[str, torch.Tensor]:
        model, optimizer = make(mix, torch.float32)
        for layer in model.layers:
            layer.compile()
        for step in range(6):
            with optimizer.accumulate(last=True):
                loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return everything(model, optimizer)

    expected = compiled(None)
    slow(SIDE_LANES, monkeypatch)
    assert_equal(compiled(mix), expected)
