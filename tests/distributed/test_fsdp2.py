"""FSDP2: at every placement the bits are those of everything on the device, on several processes."""

from __future__ import annotations

from typing import Any

import pytest
from sharded_cases import SEVERAL_BUCKETS
from world import World

from hostward.schedule.optimizer import GRADIENTS_IN_FLIGHT

OFFLOADED = {"host": ["host"], "streamed": ["streamed"], "mixed": ["device", "host", "streamed"]}


def fewest(options: dict[str, Any], pair: World, world: World) -> World:
    """Two ranks where they have this network, four where it is divided by them or in two dimensions."""
    network = options.get("network", {})
    four = network.get("mesh", "alone") != "alone" or network.get("reshard_after_forward") == 2
    return world if four else pair


def trained(world: World, mix: str, **options: Any) -> list[Any]:
    return world.run("sharded_cases.train", mix=mix, **options)


def assert_same_bits(found: list[Any], expected: list[Any]) -> None:
    for mine, reference in zip(found, expected, strict=True):
        assert mine["told"] == reference["told"]
        assert [name for name, bits in mine["bits"].items() if bits != reference["bits"][name]] == []
        assert mine["bits"].keys() == reference["bits"].keys()


@pytest.mark.parametrize(("mix", "order"), [("host", "late"), ("streamed", "random"), ("mixed", "late")])
def test_every_placement_gives_the_same_bits(pair: World, on_device: Any, mix: str, order: str) -> None:
    found = trained(pair, mix, order=order, steps=4)
    assert_same_bits(found, on_device(pair, steps=4))
    assert found[0]["placements"] == OFFLOADED[mix]
    assert len({str(rank["told"][:3]) for rank in found}) == 1  # norms are the same everywhere


CASES: dict[str, dict[str, Any]] = {
    "accumulated with every reduction": {"microbatches": 3},
    "accumulated without": {"microbatches": 3, "sync": False},
    "gradients taken at the step": {"microbatches": 3, "context": False},
    "mixed precision": {"network": {"policy": True}, "microbatches": 2},
    "bf16 parameters": {"network": {"dtype": "bf16"}},
    "bf16 parameters, sums in float32": {"network": {"dtype": "bf16"}, "microbatches": 3, "sums_in_fp32": True},
    "not resharded after forward": {"network": {"reshard_after_forward": False}},
    "resharded to two ranks": {"network": {"reshard_after_forward": 2}},
    "hybrid": {"network": {"mesh": "hybrid"}, "microbatches": 3},
    "two ranks": {"network": {"mesh": "pairs"}},
    "one rank": {"network": {"mesh": "alone"}},
    "four ranks": {"network": {"mesh": "all"}, "microbatches": 2},
    "explicit prefetch": {"network": {"prefetch": True}},
    "every microbatch is the last": {"microbatches": 2, "always_last": True},
    "gradients never cleared": {"clear": False, "microbatches": 2},
    "evaluated before the step": {"evaluate": True, "microbatches": 2},
    "no overlap": {"overlap": False},
    "buckets of a block at several places": {"network": {"width": SEVERAL_BUCKETS, "dtype": "bf16"}},
    "they come back for more": {"network": {"width": SEVERAL_BUCKETS}, "microbatches": 2, "always_last": True},
}


@pytest.mark.parametrize("case", CASES)
def test_every_way_to_train_gives_the_same_bits(pair: World, world: World, on_device: Any, case: str) -> None:
    options = CASES[case]
    ranks = fewest(options, pair, world)
    assert_same_bits(trained(ranks, "mixed", order="late", **options), on_device(ranks, **options))


@pytest.mark.parametrize(("max_norm", "clipping"), [(1e9, {False}), (1.2, {True, False}), (0.05, {True})])
def test_steps_that_are_guessed_in_backward_give_the_same_bits(
    pair: World, on_device: Any, max_norm: float, clipping: set[bool]
) -> None:
    options = {"steps": 5, "max_grad_norm": max_norm, "network": {"dtype": "bf16"}}
    expected = on_device(pair, **options)
    assert {float.fromhex(norm) > max_norm for norm, _ in expected[0]["told"][:5]} == clipping
    for mix, order in (("host", "late"), ("mixed", "random")):
        found = trained(pair, mix, order=order, step_early=True, **options)
        assert_same_bits(found, expected)
        assert all(rank["exchanged"] and all(rank["exchanged"]) for rank in found)


@pytest.mark.parametrize("mix", ["mixed", "halves"])
def test_gradients_that_stay_keep_none_that_have_left(pair: World, mix: str) -> None:
    """FSDP2 reduces the gradients of a block into one memory: those of which some leave are copied out of it."""
    for found in pair.run("sharded_cases.gradients_that_wait", mix=mix):
        leaving = [own for buckets in found.values() for placement, own in buckets if placement == "host"]
        assert sum(map(bool, leaving)) == GRADIENTS_IN_FLIGHT < len(leaving)
        mixed = [
            buckets for buckets in found.values() if {"host", "streamed"} <= {placement for placement, _ in buckets}
        ]
        assert len(mixed) > 1
        assert all(all(own) and own for buckets in mixed for placement, own in buckets if placement != "host")


def test_what_several_microbatches_have_made_is_not_copied(pair: World) -> None:
    for found in pair.run("sharded_cases.gradients_that_wait", mix="halves", microbatches=2):
        streamed = [own for buckets in found.values() for placement, own in buckets if placement == "streamed"]
        assert streamed
        assert not any(map(any, streamed))


def test_what_is_said_of_microbatches_changes_no_bit(pair: World, on_device: Any) -> None:
    expected = on_device(pair, microbatches=2)
    assert_same_bits(trained(pair, "device", microbatches=2, always_last=True, clear=False), expected)
    evaluated = on_device(pair, microbatches=2, evaluate=True)
    assert [rank["bits"] for rank in evaluated] == [rank["bits"] for rank in expected]


def test_gradients_that_have_left_come_back_when_more_is_added(pair: World, on_device: Any) -> None:
    found = trained(pair, "host", order="late", microbatches=2, always_last=True)
    assert_same_bits(found, on_device(pair, microbatches=2))


def test_what_others_write_into_parts_is_stepped_on(pair: World, on_device: Any) -> None:
    expected = on_device(pair, write=True)
    assert [rank["bits"] for rank in expected] != [rank["bits"] for rank in on_device(pair)]
    assert_same_bits(trained(pair, "host", order="late", write=True), expected)


def test_sums_on_the_host_are_those_on_the_device(pair: World, on_device: Any) -> None:
    expected = on_device(pair, microbatches=3)
    found = trained(pair, "host", order="late", microbatches=3, gradients="host")
    assert_same_bits(found, expected)


def test_bf16_gradients_are_added_up_in_float32_where_asked_for(pair: World, on_device: Any) -> None:
    options = {"network": {"dtype": "bf16"}, "microbatches": 3}
    expected = on_device(pair, sums_in_fp32=True, **options)
    assert expected[0]["bits"] != on_device(pair, **options)[0]["bits"]
    assert_same_bits(trained(pair, "device", by_hand=True, sums_in_fp32=True, **options), expected)
    summed = trained(pair, "host", order="late", gradients="host", **options)
    assert_same_bits(summed, expected)
    # Three gradients of two bytes in each of two steps, not of four; and the numbers that ranks add up.
    extra = [rank["to_host_bytes"] - 2 * 3 * 2 * rank["numel"] for rank in summed]
    assert all(0 <= n < 256 for n in extra), extra


@pytest.mark.parametrize("fp32", ["reduce_dtype", "param_dtype"])
def test_gradients_reduced_in_float32_are_added_up_so_on_the_host(pair: World, on_device: Any, fp32: str) -> None:
    options = {"network": {"dtype": "bf16", "fp32": fp32}, "microbatches": 3}
    expected = on_device(pair, sums_in_fp32=True, **options)
    assert (
        expected[0]["bits"] != on_device(pair, sums_in_fp32=True, network={"dtype": "bf16"}, microbatches=3)[0]["bits"]
    )
    assert_same_bits(trained(pair, "host", order="late", gradients="host", **options), expected)


PARTLY: dict[str, dict[str, Any]] = {
    "modules of their own": {"alone": ["blocks.0.up", "blocks.1.up", "blocks.2.down", "head"]},
    "frozen weights": {"frozen": True, "alone": ["blocks.0.up", "blocks.1.norm"]},
    "layer by layer": {},
}


@pytest.mark.parametrize(
    ("case", "fraction"),
    [
        ("modules of their own", 0.5),
        ("modules of their own", 1.0),
        ("frozen weights", 0.6),
        ("layer by layer", 0.5),
    ],
)
def test_sums_of_a_share_on_the_host_are_those_on_the_device(
    pair: World, on_device: Any, case: str, fraction: float
) -> None:
    """A bucket's gradients leave in one dtype, and FSDP2 knows one for a group; neither is made of the other."""
    options = {"network": {"dtype": "bf16", **PARTLY[case]}, "microbatches": 2}
    expected = on_device(pair, sums_in_fp32=True, **options)
    assert_same_bits(trained(pair, "host", gradients="host", offload_fraction=fraction, **options), expected)


@pytest.mark.parametrize("network", [{}, {"reshard_after_forward": False}, {"mesh": "hybrid"}], ids=str)
def test_activations_leave_and_gathered_weights_do_not(
    pair: World, world: World, on_device: Any, network: dict[str, Any]
) -> None:
    ranks = fewest({"network": network}, pair, world)
    found = trained(ranks, "mixed", order="late", network=network, activations=True)
    assert_same_bits(found, on_device(ranks, network=network))
    assert [rank["moved_bytes"] for rank in found] == ranks.run("sharded_cases.moved_without_sharding")
    assert found[0]["moved_bytes"] > 0


def test_a_rank_that_has_nothing_takes_part_in_every_step(world: World) -> None:
    expected = world.run("sharded_cases.tiny")
    for mix in OFFLOADED:
        found = world.run("sharded_cases.tiny", mix=mix)
        assert_same_bits(found, expected)
        assert found[3]["counts"] == found[0]["counts"] == {"three": 4, "scale": 4, "later.weight": 2}


def test_what_is_gathered_together_is_stepped_together_and_state_is_staged_in_backward(pair: World) -> None:
    """The root owns embedding and head, and is gathered before the first block."""
    for layers, staged in pair.run("sharded_cases.order_of_use"):
        blocks = [layer for layer in layers if layer.startswith("blocks.")]
        assert [layer for layer in layers if layer != "root"] == ["embed", "head", *blocks]  # one rank has the scale
        assert staged


def test_what_is_used_last_is_stepped_first_where_the_root_owns_it(pair: World) -> None:
    """The root is gathered before anything else: were the head stepped in its own place, forward would wait for all."""
    for layers, staged in pair.run("sharded_cases.order_of_use", alone=["embed"]):
        blocks = [layer for layer in layers if layer.startswith("blocks.")]
        assert layers == ["embed", "head", *blocks]
        assert staged


def test_gathers_wait_for_what_is_on_its_way_whoever_has_waited_before(pair: World) -> None:
    """A layer's own hook runs before FSDP2's and lets the compute lane wait; parts are read on another stream."""
    for first, second, expected in pair.run("sharded_cases.held_gathers"):
        assert first == expected
        assert second == []  # what a stream has waited for is there


def test_what_leaves_together_has_one_dtype(pair: World) -> None:
    """Of a bucket in which two groups meet, one group has other parameters elsewhere."""
    expected = pair.run("sharded_cases.nested")
    for fraction in (0.3, 0.5, 0.6, 1.0):
        assert_same_bits(pair.run("sharded_cases.nested", fraction=fraction, gradients="host"), expected)


def test_a_rank_that_cannot_place_tells_the_others(pair: World) -> None:
    """They would wait for it until the limit of their process group."""
    found = pair.run("sharded_cases.placed_where_one_rank_has_less")
    assert found == ["RankError", "MemoryLimitError"]


SLEPT: dict[str, dict[str, Any]] = {
    "in turn": {"order": "late", "steps": 3, "microbatches": 2, "network": {"frozen": True}},
    "not resharded after forward": {"network": {"reshard_after_forward": False}, "evaluate": True},
    "gradients stay until the step": {"context": False, "microbatches": 2, "network": {"dtype": "bf16"}},
    "weights away": {"weights": 2},
}


@pytest.mark.parametrize("case", SLEPT)
def test_parts_that_sleep_change_no_bit(pair: World, on_device: Any, case: str) -> None:
    """Seen red: with tensors of FSDP2 that count as others', with unsharded weights that are not resharded first."""
    options = dict(SLEPT[case])
    found = trained(pair, "host" if "weights" in options else "mixed", nap=True, **options)
    options.pop("weights", None)
    assert_same_bits(found, on_device(pair, **options))


def test_weights_sleep_before_the_first_forward(pair: World) -> None:
    """Seen red: FSDP2 pads parts when it is first used, by reading memory that was freed: a segmentation fault."""
    for expected, found in pair.run("away_cases.asleep_before_the_first_forward"):
        assert found == expected


def test_frozen_parts_are_not_gathered_while_they_are_asleep(pair: World) -> None:
    """Seen red: memory that was freed was read."""
    for before, after in pair.run("away_cases.asleep"):
        assert after == before
