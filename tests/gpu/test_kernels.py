"""The Triton AdamW against its numpy definition, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_case import (
    COMBINATIONS,
    DEVICE,
    FP8_MOMENTS,
    INTERPRETED,
    LAYOUTS,
    MOMENTS,
    TABLES,
    Case,
    as_grad,
    assert_bits,
    bits_of,
    copy_bytes_per_s,
    device_only,
    from_device,
    ordinary,
    seconds,
    to_device,
)

from hostward.errors import ConfigError, PlacementError
from hostward.kernels import reference
from hostward.kernels.cpu.adamw import MasterKind, bias_tables
from hostward.kernels.cuda import adamw

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("quiet_numpy")

LENGTHS = [0, 1, 2, 3, 7, 129, 511, 513, 257] if INTERPRETED else list(range(258))


@pytest.mark.parametrize(("grad_code", "layout"), COMBINATIONS)
@pytest.mark.parametrize("wild", [False, True], ids=["ordinary", "any-bits"])
def test_t46_every_length_at_odd_alignment(grad_code: int, layout: str, wild: bool) -> None:
    case = Case(grad_code, layout, LENGTHS, wild=wild)
    for _ in range(2):
        case.step()
        case.expect_step()
    case.check()
    assert int(case.error[0]) == 0


@pytest.mark.parametrize("moments", [*(m for m in MOMENTS if m != "fp32-fp32"), *FP8_MOMENTS])
@pytest.mark.parametrize(
    ("grad_code", "layout"),
    [(0, "fp32"), (1, "bf16-split"), (2, "fp16-plain"), (1, "bf16-rounded")] if INTERPRETED else COMBINATIONS,
)
def test_short_moments_at_every_length_and_in_whole_blocks(grad_code: int, layout: str, moments: str) -> None:
    lengths = [4096, *LENGTHS[:5]] if INTERPRETED else [*LENGTHS, 3 * 4096, 4097, 65536, 8192]
    for gap in (16, 3):
        wild = gap == 16 or "fp8" not in moments  # infinities leave nothing of a block
        case = Case(grad_code, layout, lengths, gap=gap, wild=wild, seed=gap, moments=moments)
        for _ in range(2):
            case.step()
            case.expect_step()
        case.check()


@pytest.mark.parametrize(("grad_code", "layout"), COMBINATIONS)
def test_long_ranges_on_both_paths(grad_code: int, layout: str) -> None:
    """Whole aligned blocks, their tails, and ranges that start after an odd number of elements."""
    lengths = [4096, 2 * 4096 + 17] if INTERPRETED else [3 * 4096, 4096, 4097, 65536, 300_001, 8192]
    for gap in (16, 1):
        case = Case(grad_code, layout, lengths, gap=gap, wild=True, seed=gap)
        case.step()
        case.expect_step()
        case.check()


@pytest.mark.parametrize("stream", ["grad", "weight"])
def test_one_unaligned_stream_changes_nothing(stream: str) -> None:
    case = Case(1, "bf16-split", [4096], gap=16)
    moved = torch.cat([case.device[stream].new_zeros(1), case.device[stream]])
    case.device[stream] = moved[1:]
    case.table = to_device(case._table())
    assert int(case.table[0, 2 if stream == "grad" else 3]) % 16 != 0
    case.step()
    case.expect_step()
    case.check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_skip_writes_nothing(layout: str) -> None:
    case = Case(1, layout, [5, 4096, 1000], gap=8)
    case.skip.fill_(1)
    case.step()
    case.check()
    case.skip.fill_(0)
    case.step()
    case.expect_step()
    case.check()


@pytest.mark.parametrize("scale", [0.37, 0.0, 3e38, float("inf"), float("nan"), 1e-42])
def test_scale_is_read_through_memory(scale: float) -> None:
    case = Case(1, "bf16-split", [4096, 100], gap=8, wild=True)
    case.scale.fill_(scale)
    case.step()
    case.expect_step(scale)
    case.check()


def test_counts_of_ranges_advance_one_by_one() -> None:
    case = Case(0, "fp32", [10] * 5, counts=[0, 1, 7, 299, 4000])
    assert len(TABLES[0]) < 4000, "the last count must lie past the tables"
    for _ in range(3):
        case.step()
        case.expect_step()
    case.check()
    assert from_device(case.device["count"], np.int64).tolist() == [3, 4, 10, 302, 4003]


def test_a_step_past_short_tables_is_reported_and_left_out() -> None:
    case = Case(1, "bf16-split", [100, 100, 0], counts=[0, 3, 9], tables=bias_tables(0.9, 0.95, 4))
    case.step()
    case.lengths, case.starts = case.lengths[:1], case.starts[:1]
    case.expect_step()
    case.check()
    assert int(case.error[0]) == 5


def test_stored_bits_of_special_results() -> None:
    """A NaN of any payload, overflow of the 16-bit weight, ties away from zero, minus zero."""
    still = reference.Hyper(lr=0.0, weight_decay=0.0, beta1=0.9, beta2=0.95, eps=1e-8)
    given = np.array(
        [0xFF812345, 0x7F7FFFFF, 0xFF7F8000, 0x3F808000, 0xBF808000, 0x80000000, 0x00008000, 0x00007FFF], np.uint32
    )
    # p - 0 * x is p, but for minus zero, which stays too: -0 - +0.
    expected = {"split": [0x7FC0, 0x7F80, 0xFF80, 0x3F81, 0xBF81, 0x8000, 0x0001, 0x0000]}
    expected["half"] = [0x7E00, 0x7C00, 0xFC00, 0x3C04, 0xBC04, 0x8000, 0x0000, 0x0000]
    for layout, key in (("bf16-split", "split"), ("bf16-plain", "split"), ("fp16-plain", "half")):
        case = Case(0, layout, [8], gap=8, hyper=still)
        weight, remainder = reference.split_master(given.view(np.float32))
        for name, values in (("weight", weight), ("remainder", remainder), ("master", given.view(np.float32))):
            if name in case.slabs and not (name == "weight" and layout != "bf16-split"):
                bits_of(case.slabs[name])[8:16] = bits_of(values)
                case.device[name].copy_(to_device(case.slabs[name]))
        for name in ("grad", "exp_avg", "exp_avg_sq"):
            case.slabs[name][:] = 0
            case.device[name].zero_()
        case.step()
        case.expect_step()
        case.check()
        assert bits_of(from_device(case.device["weight"], case.slabs["weight"].dtype))[8:16].tolist() == expected[key]


def test_split_and_plain_master_are_the_same_numbers() -> None:
    split, plain = Case(1, "bf16-split", [5000], gap=8), Case(1, "bf16-plain", [5000], gap=8)
    master = reference.join_master(split.slabs["weight"], split.slabs["remainder"])
    plain.device["master"].copy_(to_device(master))
    for _ in range(3):
        split.step()
        plain.step()
    weight, remainder = (from_device(split.device[n], t) for n, t in (("weight", np.uint16), ("remainder", np.int16)))
    assert_bits("weight", weight[8:5008], from_device(plain.device["weight"], np.uint16)[8:5008])
    got = reference.join_master(weight, remainder)
    assert_bits("master", got[8:5008], from_device(plain.device["master"], np.float32)[8:5008])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_thousand_random_steps(layout: str) -> None:
    steps, n = (10, 600) if INTERPRETED else (1000, 20_000)
    case = Case(1, layout, [n, 77], gap=8, counts=[0, 5])
    rng = np.random.default_rng(7)
    for _ in range(steps):
        grad = as_grad(ordinary(rng, case.slabs["grad"].size), 1)
        case.slabs["grad"][:] = grad
        case.device["grad"].copy_(to_device(grad))
        scale = float(np.float32(rng.random()))
        case.scale.fill_(scale)
        case.step()
        case.expect_step(scale)
    case.check()


def test_many_tiny_ranges() -> None:
    rng = np.random.default_rng(1)
    case = Case(1, "bf16-split", rng.integers(0, 40, 300 if INTERPRETED else 20_000).tolist(), gap=1)
    case.step()
    case.expect_step()
    case.check()


def test_no_ranges_and_empty_ranges() -> None:
    case = Case(1, "bf16-split", [0, 0], counts=[3, 4])
    case.step()
    assert from_device(case.device["count"], np.int64).tolist() == [4, 5]


@pytest.mark.alone
@device_only
def test_elements_past_two_to_the_31() -> None:
    """One range of more than 2**31 elements, behind an offset: 32-bit arithmetic anywhere would write elsewhere."""
    offset, length, tail = 4096, 2**31 + 5000, 9000
    if torch.cuda.mem_get_info(DEVICE)[0] < 28 * (offset + length):
        pytest.skip("needs 60 GB of free device memory")
    case = Case(1, "bf16-split", [tail], gap=0, counts=[2])
    kinds = {
        "grad": torch.int16,
        "weight": torch.int16,
        "remainder": torch.int16,
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.float32,
    }
    large = {name: torch.zeros(offset + length, dtype=kind, device=DEVICE) for name, kind in kinds.items()}
    for name, tensor in large.items():
        tensor[-tail:] = case.device[name]
    row = [
        offset,
        length,
        large["grad"].data_ptr() + 2 * offset,
        large["weight"].data_ptr() + 2 * offset,
        case.device["count"].data_ptr(),
    ]
    case.checked_step(
        table=torch.tensor([row], device=DEVICE),
        blocks=to_device(adamw.block_map([length])),
        **{name: large[name] for name in ("exp_avg", "exp_avg_sq", "remainder")},
    )
    case.expect_step()
    for name, tensor in large.items():
        assert_bits(name, from_device(tensor[-tail:], case.slabs[name].dtype), case.slabs[name])
        # Zero state and zero gradients stay zero.
        assert all(not bool(part.any()) for part in tensor[:-tail].split(2**28)), name
    torch.cuda.empty_cache()


@device_only
def test_a_captured_step_replays() -> None:
    case = Case(1, "bf16-split", [4096, 1000], gap=8)
    case.step()
    case.expect_step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.step()
    for scale in (1.0, 0.25):
        case.scale.fill_(scale)
        graph.replay()
        case.expect_step(scale)
    case.check()


@device_only
def test_h54_operands_are_checked_before_the_launch() -> None:
    case = Case(1, "bf16-split", [100])
    n = case.device["exp_avg"].numel()
    wrong = {
        "exp_avg is on cpu": {"exp_avg": case.device["exp_avg"].cpu()},
        "skip is on cpu": {"skip": case.skip.cpu()},
        "exp_avg_sq has dtype torch.float64": {"exp_avg_sq": case.device["exp_avg_sq"].double()},
        "exp_avg is not contiguous": {"exp_avg": torch.zeros(n, 2, device=DEVICE)[:, 0]},
        f"remainder has {n - 1} elements": {"remainder": case.device["remainder"][1:]},
        "the gradient has dtype torch.int8": {"grad_dtype": torch.int8},
        "blocks has shape": {"blocks": case.blocks.flatten()},
        "table has 5 elements": {"n_ranges": 2},
    }
    for text, change in wrong.items():
        with pytest.raises(PlacementError, match=text):
            case.checked_step(**change)
    with pytest.raises(ConfigError, match="master kind 2 with weight dtype code 1, a remainder"):
        case.checked_step(master_kind=MasterKind.PLAIN)
    case.check()


@pytest.mark.alone
@device_only
def test_step_speed_against_a_copy(capsys: pytest.CaptureFixture[str]) -> None:
    """A floor far below what is expected, so that a lost fast path is seen; the printed numbers are the point."""
    n = 64 * 2**20
    roof = copy_bytes_per_s()
    case = Case(1, "bf16-split", [8])
    grad, weight = (torch.randn(n, device=DEVICE).bfloat16() for _ in range(2))
    exp_avg, exp_avg_sq = torch.randn(n, device=DEVICE), torch.rand(n, device=DEVICE)
    state = {
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
        "remainder": torch.zeros(n, dtype=torch.int16, device=DEVICE),
    }
    row = [0, n, grad.data_ptr(), weight.data_ptr(), case.device["count"].data_ptr()]
    table, blocks = torch.tensor([row], device=DEVICE), to_device(adamw.block_map([n]))
    step_s = seconds(lambda: case.checked_step(table=table, blocks=blocks, **state))
    with capsys.disabled():
        print(f"\n  {torch.cuda.get_device_name(DEVICE)}: copy {roof / 1e12:.2f} TB/s")
        print(f"  AdamW split bf16 {n / step_s / 1e9:.0f} G parameters/s ({26 * n / step_s / 1e12:.2f} TB/s)")
    assert 26 * n / step_s > 0.5 * roof
