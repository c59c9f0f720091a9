"""State in bf16 and FP8: the same bits at every placement and in numpy, fewer bytes, and what loads into what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from optimizer_cases import (
    MIXES,
    NEVER,
    Model,
    NumpyOptimizer,
    adamw,
    assert_equal,
    backend,
    set_gradients,
    snapshot,
)
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import hostward
from hostward.checkpoint import api
from hostward.core.inventory import StateFormat
from hostward.distributed.flat_shards import FlatPart, FlatShards
from hostward.errors import CheckpointError, ConfigError
from hostward.integrations.fsdp2_loops import build_optimizers
from hostward.optim.bucket_state import fp8_stored, same_bits
from hostward.runtime.backend import Tier

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.uint8
Form = tuple[torch.dtype, ...]
"""Dtypes of exp_avg, exp_avg_sq and, where it is not fp32, main_param."""
BF16_MOMENTS = {"both": (BF16, BF16), "first": (BF16, FP32), "second": (FP32, BF16)}
MOMENTS = {**BF16_MOMENTS, "fp8": (FP8, FP8), "fp8-fp32": (FP8, FP32), "bf16-fp8": (BF16, FP8)}
FORMATS = {**MOMENTS, "least": (FP8, FP8, BF16), "main": (FP32, FP32, BF16), "all": (BF16, BF16, BF16)}


def dtypes_of(form: Form) -> dict[str, torch.dtype]:
    return dict(zip(("exp_avg", "exp_avg_sq", "main_param"), form, strict=False))


def made(dtype: torch.dtype, form: Form, **options: object) -> tuple[Model, hostward.AdamW]:
    model = Model(dtype)
    return model, adamw(model, max_grad_norm=0.5, state_dtypes=dtypes_of(form), **options)


def step(model: Model, optimizer: hostward.AdamW, steps: range) -> None:
    for number in steps:
        set_gradients(model, number, skip=[NEVER] if number % 2 else [])
        optimizer.step()


@pytest.mark.parametrize(
    ("dtype", "moments"), [*((BF16, f) for f in FORMATS.values()), *((FP32, f) for f in MOMENTS.values())]
)
def test_every_placement_has_the_bits_of_the_definition(dtype: torch.dtype, moments: Form) -> None:
    model = Model(dtype)
    numpy = NumpyOptimizer.over(model.named_parameters(), moments)
    for number in range(3):
        set_gradients(model, number, skip=[NEVER] if number % 2 else [])
        numpy.step({name: p.grad for name, p in model.named_parameters()}, max_norm=0.5)
    expected = numpy.snapshot()
    for mix in ({}, *(MIXES[name] for name in ("host", "streamed", "mixed"))):
        model, optimizer = made(dtype, moments, **mix, backend=backend(seed=1, threads=2))
        step(model, optimizer, range(3))
        assert_equal(snapshot(model, optimizer), expected)


def test_state_is_that_many_bytes_smaller_wherever_it_is_stored() -> None:
    sizes = {}
    for moments in ((FP32, FP32), (BF16, FP32), (BF16, BF16), (BF16, BF16, BF16)):
        _, optimizer = made(BF16, moments, **MIXES["mixed"])
        plan, ledger = optimizer.plan, optimizer.backend.ledger
        held = sum(entry.nbytes for state in optimizer._states for entry in state.streamed())
        sizes[moments] = plan.state_bytes, held
        assert held >= plan.state_bytes
        assert ledger.pinned_bytes > 0
        assert ("bf16" in repr(optimizer)) is (moments != (FP32, FP32))
    numel = sum(p.numel() for p in Model().parameters())
    assert [size for size, _ in sizes.values()] == [10 * numel, 8 * numel, 6 * numel, 4 * numel]
    assert sizes[BF16, BF16][1] < 0.62 * sizes[FP32, FP32][1]
    assert sizes[BF16, BF16, BF16][1] < 0.42 * sizes[FP32, FP32][1]


def test_fp8_moments_are_a_byte_each_and_one_for_128_of_them_in_matrices_and_bf16_in_vectors() -> None:
    sizes = [(p.numel(), p.dim() > 1) for p in Model().parameters()]
    matrices, vectors = (sum(n for n, matrix in sizes if matrix is wanted) for wanted in (True, False))
    blocks = sum(-(-n // 128) for n, matrix in sizes if matrix)
    both, first = 4 * matrices + 2 * blocks + 6 * vectors, 5 * matrices + blocks + 6 * vectors
    for moments, size_bytes in (((FP8, FP8), both), ((FP8, FP32, BF16), first)):
        _, optimizer = made(BF16, moments, **MIXES["mixed"])
        assert optimizer.plan.state_bytes == size_bytes
        assert "bf16 of vectors" in repr(optimizer)
        padded = sum(bucket.padded_state_bytes for bucket in optimizer.inventory.buckets)
        tiers = [optimizer.backend.ledger.by_owner(tier) for tier in Tier]
        held = [owners.get(part, 0) for owners in tiers for part in ("exp_avg", "exp_avg_sq", "remainder")]
        assert sum(held) == padded < 1.3 * size_bytes  # small tensors are padded to blocks


@pytest.mark.parametrize("form", [FORMATS[name] for name in ("both", "all", "fp8", "least")])
def test_a_saved_state_goes_on_at_another_placement_and_widens_exactly(form: Form) -> None:
    model, optimizer = made(BF16, form, **MIXES["host"])
    step(model, optimizer, range(2))
    saved, weights = optimizer.state_dict(), {n: p.detach().clone() for n, p in model.named_parameters()}
    step(model, optimizer, range(2, 4))

    again, other = made(BF16, form, **MIXES["mixed"])
    again.load_state_dict(weights, strict=False)
    other.load_state_dict(saved)
    step(again, other, range(2, 4))
    assert_equal(snapshot(again, other), snapshot(model, optimizer))

    wide, whole = made(BF16, (FP32, FP32))
    step(wide, whole, range(1))
    wide.load_state_dict(weights, strict=False)
    whole.load_state_dict(saved)
    for name, entry in whole.state_dict()["state"].items():
        for role in ("exp_avg", "exp_avg_sq"):
            assert entry[role].dtype is FP32
            assert torch.equal(entry[role], saved["state"][name][role].float())
        assert torch.equal(entry["master"], saved["state"][name].get("master", weights[name].float()))


def test_fp32_moments_are_not_rounded_in_silence() -> None:
    model, whole = made(BF16, (FP32, FP32))
    step(model, whole, range(1))
    narrow, optimizer = made(BF16, FORMATS["second"])
    step(narrow, optimizer, range(1))
    before = snapshot(narrow, optimizer)
    with pytest.raises(CheckpointError, match=r"(?s)exp_avg_sq of parameter.*16 of its 32 bits would be lost"):
        optimizer.load_state_dict(whole.state_dict())
    name = "layers.0.weight"
    values = whole.state_of(name)
    with pytest.raises(CheckpointError, match="would be lost"):
        optimizer.set_state_of(name, {"exp_avg_sq": values["exp_avg_sq"]})
    assert_equal(snapshot(narrow, optimizer), before)
    rounded = values["exp_avg_sq"].to(BF16)
    optimizer.set_state_of(name, {"exp_avg": values["exp_avg"], "exp_avg_sq": rounded})
    assert torch.equal(optimizer.state_of(name)["exp_avg_sq"], rounded)


@pytest.mark.parametrize("mix", ["host", "mixed"])
def test_parts_of_fp8_moments_are_read_wherever_they_begin_in_a_block(mix: str) -> None:
    model, optimizer = made(BF16, FORMATS["fp8"], **MIXES[mix])
    step(model, optimizer, range(2))
    sources = optimizer.sources()
    for name, rows in (("layers.0.weight", 129), ("embed.weight", 300)):
        for role in ("exp_avg", "exp_avg_sq"):
            source, whole = sources.state[name][role], optimizer.state_of(name)[role]
            for first, count in ((0, rows), (5, 3), (rows - 1, 1)):
                room = torch.full((whole[0].nbytes * count,), 0x5A, dtype=torch.uint8)
                box = source.read([first, 0], [count, whole.shape[1]], room)
                assert torch.equal(box, whole[first : first + count])
                taken = sum(stop - start for _, start, stop in source.memory_of([first, 0], [count, whole.shape[1]]))
                assert 0 <= taken - box.numel() <= -(-box.numel() // 128) + 2


@pytest.mark.parametrize("given", [FORMATS["both"], FORMATS["fp8-fp32"], (FP32, FP32)])
def test_other_moments_are_not_rounded_to_fp8_in_silence(given: Form) -> None:
    """FP8 ones in bf16 are, wherever their block is; any others are not."""
    model, whole = made(BF16, given)
    step(model, whole, range(2))
    narrow, optimizer = made(BF16, FORMATS["fp8"], **MIXES["mixed"])
    step(narrow, optimizer, range(1))
    before = snapshot(narrow, optimizer)
    text = r"(?s)exp_avg(_sq)? .*(FP8 does not hold|all but 3 bits|16 of its 32 bits would be lost)"
    with pytest.raises(CheckpointError, match=text):
        optimizer.load_state_dict(whole.state_dict())
    with pytest.raises(CheckpointError, match=r"(?s)exp_avg(_sq)? .* FP8.*all but 3 bits|FP8 does not hold") as refused:
        optimizer.load_state_dict({k: v for k, v in whole.state_dict().items() if k != "moments"})  # as torch's state
    assert "--to fp8-moments" in str(refused.value)
    name = "layers.0.weight"
    with pytest.raises(CheckpointError, match=text):
        optimizer.set_state_of(name, {"exp_avg_sq": whole.state_of(name)["exp_avg_sq"]})
    assert_equal(snapshot(narrow, optimizer), before)
    doubled = 2 * optimizer.state_of(name)["exp_avg_sq"]
    optimizer.set_state_of(name, {"exp_avg_sq": doubled})
    assert torch.equal(optimizer.state_of(name)["exp_avg_sq"], doubled)


def test_fp8_moments_of_flat_parts_are_refused() -> None:
    """They do not say whether they are parts of a matrix or of a vector."""
    parts = {"a": FlatPart("w", 0, 128, 300), "b": FlatPart("w", 128, 300, 300)}
    weights = [(n, torch.nn.Parameter(torch.zeros(p.stop - p.start, dtype=BF16))) for n, p in parts.items()]
    shards = [FlatShards(parts)]
    adamw(weights, state_dtypes=dtypes_of(FORMATS["both"]), shards=shards)
    with pytest.raises(ConfigError, match=r"(?s)moments in FP8 with shards=.*parts of a matrix"):
        adamw(weights, state_dtypes=dtypes_of(FORMATS["fp8-fp32"]), shards=shards)


@pytest.mark.parametrize("form", [FORMATS["least"], FORMATS["bf16-fp8"]])
def test_states_whose_vectors_were_in_fp8_load_as_they_are(
    form: Form, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Earlier versions stored vectors in FP8 as well; what they have saved is bf16."""
    with monkeypatch.context() as patched:
        patched.setattr(StateFormat, "of", lambda form, dims: form)
        model, before = made(BF16, form, **MIXES["host"])
        step(model, before, range(2))
        saved, parts = before.state_dict(), api.parts_of(model, before)
        api.save(tmp_path, 2, tensors=parts.tensors, plain={"optimizer": parts.optimizer})
        expected = snapshot(model, before)
    again, optimizer = made(BF16, form, **MIXES["mixed"])
    step(again, optimizer, range(3))
    assert not same_bits(optimizer.state_of("layers.2.weight")["exp_avg_sq"], expected["exp_avg_sq layers.2.weight"])
    again.load_state_dict({n: expected[f"weight {n}"] for n, _ in again.named_parameters()}, strict=False)
    optimizer.load_state_dict(saved)
    assert_equal(snapshot(again, optimizer), expected)
    restored, later = made(BF16, form)
    api.restore(api.latest(tmp_path), restored, later)
    assert_equal(snapshot(restored, later), expected)
    step(again, optimizer, range(2, 4))
    step(restored, later, range(2, 4))
    assert_equal(snapshot(restored, later), snapshot(again, optimizer))


def test_moments_of_vectors_keep_more_bits_than_fp8_has() -> None:
    """A state with them goes on, whatever is loaded; as FP8 ones they would not have been stored as they are."""
    model, optimizer = made(BF16, FORMATS["fp8"], **MIXES["mixed"])
    step(model, optimizer, range(2))
    for name, matrix in (("layers.2.after", False), ("layers.0.scale", False), ("layers.0.weight", True)):
        for role, value in optimizer.state_of(name).items():
            if role in ("exp_avg", "exp_avg_sq"):
                assert (fp8_stored(value.reshape(-1), role) is not None) is matrix


def test_fp32_main_weights_are_not_dropped_in_silence() -> None:
    model, whole = made(BF16, (FP32, FP32))
    step(model, whole, range(1))
    narrow, optimizer = made(BF16, FORMATS["main"])
    step(narrow, optimizer, range(1))
    before = snapshot(narrow, optimizer)
    with pytest.raises(CheckpointError, match=r"(?s)master of parameter.*low 16 of its 32 bits.*bf16-main-params"):
        optimizer.load_state_dict(whole.state_dict())
    with pytest.raises(CheckpointError, match="has no 'master'"):
        optimizer.set_state_of("layers.0.weight", {"master": whole.state_of("layers.0.weight")["master"]})
    assert_equal(snapshot(narrow, optimizer), before)


def test_a_state_without_main_weights_says_so_or_does_not_load() -> None:
    """One that lacks them and does not say so was cut, or is of other weights."""
    saved = made(BF16, FORMATS["main"])[1].state_dict()
    optimizer = made(BF16, (FP32, FP32))[1]
    optimizer.load_state_dict(saved)
    for said in (saved, *saved["param_groups"]):
        del said["main_param"]
    with pytest.raises(CheckpointError, match="has no master"):
        optimizer.load_state_dict(saved)
    with pytest.raises(CheckpointError, match="parts of dtypes"):
        optimizer.load_state_dict({**saved, "main_param": "int4"})


@pytest.mark.parametrize("form", [FORMATS["main"], FORMATS["all"]], ids=["main", "all"])
@pytest.mark.parametrize("mix", ["host", "streamed"])
def test_weights_that_others_write_are_followed_and_those_without_change_stay(form: Form, mix: str) -> None:
    model, optimizer = made(BF16, form, **MIXES[mix], lr=0.0)
    step(model, optimizer, range(2))
    with torch.no_grad():
        model.get_parameter("layers.0.weight").fill_(1.5)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(model, optimizer, range(2, 5))
    optimizer.wait()
    assert_equal(dict(model.named_parameters()), weights)


@pytest.mark.filterwarnings("ignore")  # of torch, about one process
def test_torchs_distributed_checkpoints_do_not_round_either(tmp_path: Path) -> None:
    """They copy what they read into the tensors of a state dict, of whatever dtype."""
    for saved in ((FP32, FP32), FORMATS["first"]):
        folder = tmp_path / str(saved)
        dcp.save(made(BF16, saved)[1].state_dict(), checkpoint_id=folder, no_dist=True)
        for wanted in ((FP32, FP32), *BF16_MOMENTS.values()):
            optimizer = made(BF16, wanted)[1]
            read = optimizer.state_dict()
            if saved == wanted or wanted == (FP32, FP32):
                dcp.load(read, checkpoint_id=folder, no_dist=True)
                optimizer.load_state_dict(read)
                continue

            def load(optimizer: hostward.AdamW = optimizer, read: dict[str, Any] = read, folder: Path = folder) -> None:
                dcp.load(read, checkpoint_id=folder, no_dist=True)
                optimizer.load_state_dict(read)

            with pytest.raises((CheckpointError, CheckpointException), match=r"would be lost|moments"):
                load()


@pytest.mark.filterwarnings("ignore")  # of torch, about one process
@pytest.mark.parametrize("through", ["get_optimizer_state_dict", "fsdp2_loops"])
def test_nor_do_those_of_trainers_that_keep_state_and_groups_alone(through: str, tmp_path: Path) -> None:
    """As accelerate, Lightning and torchtitan's loops save. Seen red: moments rounded, main weights dropped."""
    made_here: list[tuple[Model, Any]] = []

    def state_of(form: Form) -> dict[str, Any]:
        model = Model(BF16)
        optimizers = build_optimizers([model], state_dtypes=dtypes_of(form))
        step(model, optimizers.optimizer, range(1))
        made_here.append((model, optimizers))
        if through == "fsdp2_loops":
            return optimizers.state_dict()
        state: dict[str, Any] = get_optimizer_state_dict(model, optimizers.optimizer)
        return state

    for saved in ((FP32, FP32), FORMATS["first"], FORMATS["both"]):
        folder = tmp_path / str(saved)
        dcp.save(state_of(saved), checkpoint_id=folder, no_dist=True)
        for wanted in ((FP32, FP32), *BF16_MOMENTS.values(), FORMATS["main"]):
            read = state_of(wanted)
            model, optimizers = made_here[-1]

            def load(read: Any = read, folder: Path = folder, model: Any = model, optimizers: Any = optimizers) -> None:
                dcp.load(read, checkpoint_id=folder, no_dist=True)
                if through == "fsdp2_loops":
                    optimizers.load_state_dict(read)
                else:
                    set_optimizer_state_dict(model, optimizers.optimizer, read)

            if wanted in (saved, (FP32, FP32)) or (saved == (BF16, BF16) and len(wanted) == 2):
                load()
                assert optimizers.optimizer.param_groups[0].keys().isdisjoint({"moments", "main_param"})
            else:
                with pytest.raises((CheckpointError, CheckpointException), match=r"would be lost|moments|main_param"):
                    load()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"state_dtypes": {"exp_avg": torch.float16}}, r"state_dtypes\['exp_avg'\]=torch.float16"),
        ({"state_dtypes": {"master": BF16}}, "state_dtypes has 'master'"),
        ({"state_dtypes": {"main_param": FP8}}, r"state_dtypes\['main_param'\]=torch.uint8"),
        ({"state_dtypes": {"exp_avg": BF16}, "use_torch_optimizer": True}, "weights stall"),
        ({"state_dtypes": {"main_param": BF16}, "dtype": FP32}, "main_param in bf16, and weights in torch.float32"),
        ({"state_dtypes": {"main_param": BF16}, "dtype": torch.float16}, "weights in torch.float16"),
    ],
)
def test_other_formats_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        adamw(Model(options.pop("dtype", BF16)), **options)
