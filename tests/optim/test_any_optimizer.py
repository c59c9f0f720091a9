"""`offload_optimizer_states`: any torch optimizer gives the bits that it gives with its state on the device."""

from __future__ import annotations

import gc
import io
import itertools
import weakref
from typing import Any

import pytest
import torch
from any_optimizer_cases import (
    OPTIMIZERS,
    OWNER,
    MuonLike,
    all_parameters,
    assert_same,
    groups,
    offloaded,
    parameters,
    set_gradients,
    simulated,
    train,
)
from hypothesis import given, settings, strategies as st

from hostward.errors import OrderingError
from hostward.optim.any_optimizer.host_state import Layout, Share, cut, span_bytes
from hostward.optim.any_optimizer.offload import offload_optimizer_states
from hostward.runtime.backend import Lane, Tier
from hostward.runtime.simulated.backend import Order, SimulatedBackend

STATE_LANES = (Lane.COMPUTE, Lane.H2D, Lane.D2H)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_gives_its_own_bits(name: str) -> None:
    plain = OPTIMIZERS[name](groups(parameters()))
    optimizer, states = offloaded(OPTIMIZERS[name])
    for n in range(4):
        train(plain, optimizer, steps=1, first=n)
        assert_same(optimizer, plain)
        tensors = [v for entry in plain.state.values() for v in entry.values() if torch.is_tensor(v) and v.numel() > 1]
        assert states.offloaded_bytes == sum(t.nbytes for t in tensors)
    assert (states.offloaded_bytes == 0) is (name == "sgd")
    held = states.backend.ledger.held_bytes
    assert states.offloaded_bytes <= held[Tier.HOST, OWNER] <= states.offloaded_bytes * 1.02
    assert held[Tier.DEVICE, f"{OWNER} on the device"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["sgd momentum", "adamw foreach", "adamw fused"])
def test_state_keeps_its_dtype(name: str, dtype: torch.dtype) -> None:
    plain = OPTIMIZERS[name](groups(parameters(dtype)))
    optimizer, _ = offloaded(OPTIMIZERS[name], dtype=dtype)
    train(plain, optimizer, steps=3)
    assert_same(optimizer, plain)


@pytest.mark.parametrize(
    "order",
    [
        *({"seed": seed} for seed in range(4)),
        *({"late": frozenset(late)} for n in (1, 2) for late in itertools.combinations(STATE_LANES, n)),
        {"eager": True},
    ],
    ids=lambda order: " ".join(sorted(lane.value for lane in order["late"])) if "late" in order else str(order),
)
def test_h06_t32_any_order_of_the_lanes_gives_the_same_bits(order: dict[str, Any]) -> None:
    plain = OPTIMIZERS["adamw foreach"](groups(parameters()))
    optimizer, _ = offloaded(OPTIMIZERS["adamw foreach"], backend=simulated(**order))
    train(plain, optimizer)
    assert_same(optimizer, plain)


class Careless(SimulatedBackend):
    """Forgets what operations of one name wait for, from the second step on."""

    def __init__(self, name: str) -> None:
        super().__init__(order=Order(), threads=1)
        self.name = name
        self.careless = False

    def copy(self, lane: Lane, pairs: Any, **options: Any) -> Any:
        return super().copy(lane, pairs, **self.forgetful(options["name"], options))

    def launch(self, name: str, kernel: Any, **options: Any) -> Any:
        return super().launch(name, kernel, **self.forgetful(name, options))

    def mark(self, name: str, lane: Lane, **options: Any) -> Any:
        return super().mark(name, lane, **self.forgetful(name, options))

    def retire(self, buffers: Any, lane: Lane, **options: Any) -> Any:
        return super().retire(buffers, lane, **self.forgetful("offload/retire", options))

    def forgetful(self, name: str, options: dict[str, Any]) -> dict[str, Any]:
        return {**options, "waits": ()} if self.careless and name.startswith(self.name) else options


@pytest.mark.parametrize(
    "name", ["offload/h2d/state", "offload/update/0", "offload/d2h/state", "offload/retire", "nothing"]
)
def test_a_deleted_wait_is_a_race(name: str) -> None:
    backend = Careless(name)
    optimizer, _ = offloaded(OPTIMIZERS["adamw foreach"], backend=backend)
    train(optimizer, steps=1)
    backend.careless = True
    if name == "nothing":
        train(optimizer, steps=2, first=2)
        return
    with pytest.raises(OrderingError, match=OWNER):
        train(optimizer, steps=2, first=2)


class Metered(SimulatedBackend):
    """Notes the most slot bytes at a time."""

    peak_bytes = 0

    def begin_step(self) -> None:
        super().begin_step()
        assert self.ledger.held_bytes[Tier.DEVICE, f"{OWNER} on the device"] == 0

    def mark(self, *args: Any, **options: Any) -> Any:
        self.peak_bytes = max(self.peak_bytes, self.ledger.held_bytes[Tier.DEVICE, f"{OWNER} on the device"])
        return super().mark(*args, **options)


def test_chunks_are_on_the_device_during_the_step_alone(caplog: pytest.LogCaptureFixture) -> None:
    backend = Metered(threads=1)
    large = torch.nn.Parameter(torch.zeros(512, 700))
    optimizer = torch.optim.Adam([*parameters(), large])
    states = offload_optimizer_states(optimizer, chunk_size_mb=1, backend=backend)
    train(optimizer, steps=2)
    large_bytes = 2 * large.nbytes
    assert backend.peak_bytes <= 2 * (1 << 20) + large_bytes
    assert backend.peak_bytes > large_bytes
    sizes = [chunk.size_bytes for chunk in states._away.chunks]
    places = [place for chunk in states._away.chunks for bundle in chunk.places.values() for place in bundle.values()]
    assert all(place.offset % 256 == 0 and place.home.data_ptr() % 256 == 0 for place in places)
    assert sorted(sizes)[-2] <= 1 << 20 < max(sizes) == large_bytes
    (record,) = caplog.records
    assert record.getMessage() == (
        "the state of one parameter (512, 700) takes 2,867,200 bytes, more than a chunk's 1,048,576: it is a chunk of "
        "its own"
    )
    total = states.offloaded_bytes
    assert states.explain() == (
        f"Adam: {total:,} of {total:,} bytes of state on the host (100.0%, asked 100.0%), in {len(sizes)} chunks of at "
        "most 2,867,200 bytes; at most 4 of them on the device during a step"
    )


def test_before_the_first_step_it_says_that_there_is_no_state_yet() -> None:
    optimizer, states = offloaded(OPTIMIZERS["adam"], fraction=0.5)
    said = states.explain()
    assert said == "Adam: there is no state yet, the first step makes it; asked 50.0% on the host"
    train(optimizer, steps=1)
    assert states.explain() != said
    states.detach()


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.9])
def test_t28_the_share_is_within_one_parameter(fraction: float) -> None:
    plain = OPTIMIZERS["adam"](groups(parameters()))
    optimizer, states = offloaded(OPTIMIZERS["adam"], fraction=fraction)
    train(plain, optimizer)
    assert_same(optimizer, plain)
    entries = [[v for v in e.values() if torch.is_tensor(v) and v.numel() > 1] for e in plain.state.values()]
    sizes = [sum(v.nbytes for v in entry) for entry in entries]
    assert abs(states.offloaded_bytes - fraction * sum(sizes)) <= max(sizes) / 2
    states.detach()
    assert_same(optimizer, plain)


def test_fraction_0_changes_nothing() -> None:
    optimizer, states = offloaded(OPTIMIZERS["adam"], fraction=0)
    assert "step" not in vars(optimizer)
    train(optimizer, steps=1)
    assert states.explain() == "Adam: fraction=0, no state is offloaded"
    states.detach()


@settings(deadline=None)
@given(st.floats(0, 1), st.lists(st.integers(1, 1000), max_size=30))
def test_a_share_never_strays_further_than_half_a_bundle(fraction: float, sizes: list[int]) -> None:
    share, left = Share(fraction), 0
    for n in sizes:
        left += n if share.leaves(n) else 0
    assert share.left_bytes == left
    assert abs(left - fraction * sum(sizes)) <= max(sizes, default=0) / 2 + 1e-9
    assert left == {0.0: 0, 1.0: sum(sizes)}.get(fraction, left)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 4), max_size=4),
    st.randoms(use_true_random=False),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64]),
)
def test_h32_bytes_and_layout_rebuild_a_tensor(shape: list[int], random: Any, dtype: torch.dtype) -> None:
    order = random.sample(range(len(shape)), len(shape))
    tensor = torch.randn(shape).to(dtype).permute(order)
    memory = torch.empty(3 + span_bytes(tensor).numel(), dtype=torch.uint8)[3:].clone()
    memory[:] = span_bytes(tensor)
    layout = Layout.of(tensor)
    rebuilt = layout.view(memory, 0)
    assert layout.nbytes == memory.numel()
    assert (rebuilt.shape, rebuilt.stride(), rebuilt.dtype) == (tensor.shape, tensor.stride(), dtype)
    assert torch.equal(rebuilt, tensor)


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 60))
def test_cuts_keep_all_in_order_and_below_the_limit(sizes: list[int], limit: int) -> None:
    items = [(torch.empty(0), n) for n in sizes]
    runs = cut(items, limit)
    assert [id(p) for run in runs for p in run] == [id(p) for p, _ in items]
    by_id = {id(p): n for p, n in items}
    assert all(len(run) == 1 or sum(by_id[id(p)] for p in run) <= limit for run in runs)


def test_adagrad_leaves_when_it_is_attached() -> None:
    optimizer, states = offloaded(OPTIMIZERS["adagrad"])
    tensors = [entry["sum"] for entry in optimizer.state.values() if entry["sum"].numel() > 1]
    assert states.offloaded_bytes == sum(t.nbytes for t in tensors) > 0


def test_a_parameter_without_gradient_moves_no_state() -> None:
    optimizer, states = offloaded(OPTIMIZERS["sgd momentum"])
    params = all_parameters(optimizer)
    train(optimizer, steps=1)
    copied = states.backend.ledger.copied_bytes
    before = copied[Lane.H2D], copied[Lane.D2H]
    set_gradients(params, 5, skip=[i for i in range(len(params)) if i not in (2, 3, 8)])
    optimizer.step()
    states.wait()
    moved = sum(params[i].nbytes for i in (2, 3, 8))
    assert (copied[Lane.H2D] - before[0], copied[Lane.D2H] - before[1]) == (moved, moved)
    set_gradients(params, 6, skip=range(len(params)))
    optimizer.step()
    assert copied[Lane.H2D] - before[0] == moved


def test_a_group_that_is_added_later_is_streamed_too() -> None:
    plain = OPTIMIZERS["adamw foreach"](groups(parameters()))
    optimizer, states = offloaded(OPTIMIZERS["adamw foreach"])
    train(plain, optimizer, steps=2)
    before = states.offloaded_bytes
    for each in (plain, optimizer):
        generator = torch.Generator().manual_seed(5)
        each.add_param_group({"params": [torch.nn.Parameter(torch.randn(300, 300, generator=generator))], "lr": 1e-4})
    train(plain, optimizer, steps=2, first=2)
    assert_same(optimizer, plain)
    assert states.offloaded_bytes == before + 2 * 4 * 300 * 300


def test_sparse_gradients() -> None:
    def embedding() -> torch.nn.Embedding:
        torch.manual_seed(0)
        return torch.nn.Embedding(1000, 300, sparse=True)

    a, b = embedding(), embedding()
    plain, optimizer = torch.optim.SparseAdam(a.parameters()), torch.optim.SparseAdam(b.parameters())
    states = offload_optimizer_states(optimizer, chunk_size_mb=1, backend=simulated())
    for n in range(3):
        for module, each in ((a, plain), (b, optimizer)):
            each.zero_grad()
            module(torch.tensor([n, n + 5, 999])).square().sum().backward()
            each.step()
    assert_same(optimizer, plain)
    assert states.offloaded_bytes == 2 * 4 * 1000 * 300


def test_detach_brings_everything_back_and_goes_on() -> None:
    plain = OPTIMIZERS["adamw foreach"](groups(parameters()))
    optimizer, states = offloaded(OPTIMIZERS["adamw foreach"])
    original = type(optimizer).step
    train(plain, optimizer, steps=2)
    states.detach()
    states.detach()
    assert "step" not in vars(optimizer)
    assert type(optimizer).step is original
    assert states.offloaded_bytes == 0
    assert {k: n for k, n in states.backend.ledger.held_bytes.items() if n} == {}
    assert_same(optimizer, plain)
    assert {type(entry) for entry in optimizer.state.values()} == {dict}  # torch.load takes these alone
    torch.save(optimizer.state_dict(), saved := io.BytesIO())
    saved.seek(0)
    torch.load(saved, weights_only=True)
    train(plain, optimizer, steps=1, first=2)
    assert_same(optimizer, plain)
    again = offload_optimizer_states(optimizer, chunk_size_mb=1, backend=simulated())
    assert again.offloaded_bytes > 0
    train(plain, optimizer, steps=1, first=3)
    assert_same(optimizer, plain)


def test_state_that_the_user_replaces_is_followed() -> None:
    plain, (optimizer, _) = MuonLike(groups(parameters())), offloaded(MuonLike)
    train(plain, optimizer, steps=2)
    for each in (plain, optimizer):
        first, second, third = all_parameters(each)[:3]
        each.state[first].clear()
        del each.state[second]
        each.state[third]["momentum_buffer"] = torch.ones_like(third)
    train(plain, optimizer, steps=2, first=2)
    assert_same(optimizer, plain)


def test_h18_tensors_that_share_memory_stay_where_they_are() -> None:
    """Taken one by one they would be torn apart, and nothing would be freed."""
    plain, (optimizer, states) = MuonLike(groups(parameters())), offloaded(MuonLike)
    for each in (plain, optimizer):
        first, second = all_parameters(each)[:2]
        buffer = torch.zeros(2, 256, 256)
        each.state[first]["momentum_buffer"], each.state[second]["momentum_buffer"] = buffer
        each.state[second]["weight"] = second.data
        third, fourth = all_parameters(each)[2:4]
        each.state[third]["momentum_buffer"] = each.state[fourth]["momentum_buffer"] = torch.zeros(256, 256)
    train(plain, optimizer, steps=3)
    assert_same(optimizer, plain)
    entries = [optimizer.state[p] for p in all_parameters(optimizer)[:4]]
    assert entries[1]["weight"].data_ptr() == all_parameters(optimizer)[1].data_ptr()
    assert entries[2]["momentum_buffer"] is entries[3]["momentum_buffer"]
    moved = [p for p in all_parameters(optimizer)[4:] if p.numel() > 1]
    assert states.offloaded_bytes == sum(p.nbytes * (1 if p.dim() == 2 else 2) for p in moved)


def test_h19_a_dropped_optimizer_goes_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        optimizer, states = offloaded(OPTIMIZERS["adam"])
        train(optimizer, steps=1)
        reference = weakref.ref(optimizer)
        del optimizer
        assert reference() is None
        states.detach()
    finally:
        gc.enable()


def test_h28_attached_inside_inference_mode() -> None:
    plain = OPTIMIZERS["adagrad"](groups(parameters()))
    optimizer = OPTIMIZERS["adagrad"](groups(parameters()))
    with torch.inference_mode():
        offload_optimizer_states(optimizer, chunk_size_mb=1, backend=simulated())
    train(plain, optimizer, steps=2)
    assert_same(optimizer, plain)
