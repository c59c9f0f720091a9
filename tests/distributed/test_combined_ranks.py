"""Muon, AdamW, Lion and SGD under FSDP2 with their state on the host: the bits of one process without offloading."""

from __future__ import annotations

from typing import Any

import pytest
from combined_cases import trained
from world import World

NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "one rank": ("pair", {"mesh": "alone"}),
    "two ranks": ("pair", {}),
    "a rank without rows": ("world", {}),
    "two replicas": ("world", {"mesh": "hybrid"}),
}


@pytest.fixture(scope="module")
def expected() -> Any:
    """What one process without offloading and sharding has, by kind of optimizer."""
    known: dict[str, dict[str, str]] = {}

    def of(kind: str) -> dict[str, str]:
        if "lion" in kind:
            pytest.importorskip("pytorch_optimizer")
        if kind not in known:
            known[kind] = trained(kind)["bits"]
        return known[kind]

    return of


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("network", NETWORKS)
def test_muon_and_adamw_have_the_bits_of_one_process(
    request: pytest.FixtureRequest, expected: Any, network: str, fraction: float
) -> None:
    ranks, options = NETWORKS[network]
    found = request.getfixturevalue(ranks).run("combined_cases.trained", fraction=fraction, network=options)
    for rank in found:
        assert rank["bits"] == expected("muon")
        assert bool(rank["host_bytes"]) is (fraction > 0)


@pytest.mark.parametrize("kind", ["sgd", "lion", "muon and lion", "plain momentum"])
def test_other_optimizers_have_the_bits_of_one_process(pair: World, expected: Any, kind: str) -> None:
    bits = expected(kind)
    for rank in pair.run("combined_cases.trained", kind=kind, fraction=1.0, network={}):
        assert rank["bits"] == bits
        assert rank["host_bytes"] > 0


def test_batches_change_no_bit_and_momentum_comes_chunk_by_chunk(pair: World, expected: Any) -> None:
    """One matrix for each rank at a time; of the momentum four chunks are on the device at most."""
    for rank in pair.run("combined_cases.trained", kind="muon alone", fraction=1.0, network={}, batch_bytes=0):
        assert rank["bits"] == expected("muon alone")
        assert rank["chunks"] > 5
        assert 0 < rank["peak_bytes"] < 0.8 * rank["host_bytes"]


def test_a_loop_has_the_bits_of_no_offloading(pair: World) -> None:
    """Forward and backward in bf16, reduced and clipped gradients."""
    options: dict[str, Any] = {"network": {"policy": True}, "backward": True}
    here, away = (pair.run("combined_cases.trained", fraction=f, **options) for f in (0.0, 1.0))
    assert [rank["bits"] for rank in away] == [rank["bits"] for rank in here]
    assert here[0]["bits"] == here[1]["bits"]


def test_bf16_weights_have_the_bits_of_no_offloading(pair: World) -> None:
    """At one number of ranks: on a CPU torch adds the last elements of a bf16 tensor in another way than the others."""
    network = {"dtype": "bf16"}
    here, away = (pair.run("combined_cases.trained", fraction=f, network=network) for f in (0.0, 1.0))
    assert [rank["bits"] for rank in away] == [rank["bits"] for rank in here]


def test_muon_of_torch_alone_has_other_bits(pair: World, expected: Any) -> None:
    """Its matrix products add the ranks' parts: what the other tests compare does show how a matrix is summed."""
    for found in pair.run("combined_cases.muon_of_torch_alone"):
        assert any(expected("muon")[name] != bits for name, bits in found.items())


@pytest.mark.parametrize("kind", ["muon", "lion"])
def test_a_distributed_checkpoint_goes_on_at_another_fraction_and_number_of_ranks(
    pair: World, expected: Any, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bits, folder = expected(kind), str(tmp_path_factory.mktemp("combined") / "saved")
    pair.run("combined_cases.trained", kind=kind, fraction=1.0, network={}, steps=(0, 1), save=folder)
    for network, fraction in (({"mesh": "alone"}, 0.0), ({}, 0.5)):
        options = {"kind": kind, "fraction": fraction, "network": network, "steps": (2,), "load": folder}
        assert [rank["bits"] for rank in pair.run("combined_cases.trained", **options)] == [bits] * 2


def test_state_that_others_refer_to_stays_on_the_device(pair: World) -> None:
    """A tensor, this rank's part of it, and a view of that part; then nothing."""
    assert pair.run("combined_cases.kept_by_others") == [[True, True, True, False]] * 2


def test_a_write_into_a_part_makes_a_failed_step_known(pair: World) -> None:
    for found in pair.run("combined_cases.torn_after_a_write"):
        assert found == ["after a write", "an earlier step of this WritesItsPart failed half way"]


REFUSED = {
    "tensor_parallel_as_well": ("world", "ModelError: parameter 'of shape (165, 33)' is placed as"),
    "gradient_of_another_placement": ("pair", "ModelError: parameter 'up' of Muon has a gradient that is not sharded"),
    "momentum_of_one_process": ("pair", "ModelError: parameter 'up' of Muon has a momentum that is not sharded"),
    "momentum_in_bf16": ("pair", "ModelError: parameter 'of shape (3, 33)' of Muon: bf16 gradients with nesterov="),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_on_every_rank(request: pytest.FixtureRequest, what: str) -> None:
    ranks, first = REFUSED[what]
    for told in request.getfixturevalue(ranks).run("combined_cases.told", what=what):
        assert told.startswith(first)
        assert "  fix: " in told
