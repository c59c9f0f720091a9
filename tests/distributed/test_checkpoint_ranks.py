"""Checkpoints of several ranks: whatever saved them, whatever loads them, the bits are the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_cases import FRACTIONS, RANKS, saver_for
from sharded_cases import digest
from world import World

from hostward.checkpoint import api


@pytest.fixture(scope="module")
def everything(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder of checkpoints saved at every fraction and number of ranks, and the bits that all of them hold."""
    folder = tmp_path_factory.mktemp("everything")
    expected: dict[str, str] = world.run("checkpoint_cases.save_all", folder=str(folder))[0]
    return folder, expected


def test_pairs_of_who_saves_and_who_loads_cover_any_two_properties() -> None:
    chosen = [(*saver_for(ranks, mix).split("-"), ranks, mix) for ranks in RANKS for mix in FRACTIONS]
    for one, other in itertools.combinations(range(4), 2):
        assert len({(pair[one], pair[other]) for pair in chosen}) == 9


@pytest.mark.parametrize("mix", FRACTIONS)
@pytest.mark.parametrize("ranks", RANKS)
def test_state_and_the_next_step_are_the_same_from_every_fraction_and_number_of_ranks(
    world: World, everything: tuple[Path, dict[str, str]], ranks: int, mix: str
) -> None:
    folder, expected = everything
    for found in world.run("checkpoint_cases.load", folder=str(folder), ranks=ranks, mix=mix)[:ranks]:
        assert found == expected


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_dcp_reads_what_four_ranks_saved(everything: tuple[Path, dict[str, str]]) -> None:
    folder, _ = everything
    one, four = (folder / f"{ranks}-host" / "iter_0000002" for ranks in (1, 4))
    index = api.tensor_index(four)
    assert index == api.tensor_index(one)
    by_dcp, by_us = ({n: torch.zeros(shape, dtype=d) for n, (shape, d) in index.items()} for _ in range(2))
    dcp.load(by_dcp, checkpoint_id=four, no_dist=True)
    api.load(one, by_us)
    assert [name for name in index if digest(by_dcp[name].view(-1)) != digest(by_us[name].view(-1))] == []


@pytest.mark.parametrize("mode", ["snapshot", "stream"])
@pytest.mark.parametrize("mix", ["mixed", "host"])
def test_training_goes_on_beside_a_save_and_tears_nothing(pair: World, tmp_path: Path, mode: str, mix: str) -> None:
    for expected, found, without, beside in pair.run(
        "checkpoint_cases.saved_beside", folder=str(tmp_path), mode=mode, mix=mix
    ):
        assert found == expected
        assert beside == without


@pytest.mark.parametrize(("what", "text"), [("value", "rank 2: cannot save 'no tensor'"), ("lock", "another process")])
def test_a_rank_that_cannot_save_stops_all_with_its_cause(world: World, tmp_path: Path, what: str, text: str) -> None:
    told = world.run("checkpoint_cases.refused", folder=str(tmp_path / "saved"), what=what)
    assert len(set(told)) == 1
    assert told[0].startswith("CheckpointError: cannot save checkpoint")
    assert text in told[0]
    assert world.run("checkpoint_cases.refused", folder=str(tmp_path / "saved"), what="nothing") == ["no error"] * 4


def flipped(content: bytearray) -> bytearray:
    content[len(content) // 2] ^= 1
    return content


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (flipped, "file __2_0.distcp is damaged in chunk 1 of 1"),
        (lambda content: content[: len(content) // 2], "file __2_0.distcp has "),
    ],
    ids=["a flipped bit", "truncated"],
)
def test_a_damaged_file_that_one_rank_reads_stops_all(
    world: World,
    everything: tuple[Path, dict[str, str]],
    tmp_path: Path,
    harm: Callable[[bytearray], bytearray],
    text: str,
) -> None:
    folder, _ = everything
    path = tmp_path / "iter_0000002"
    path.mkdir()
    for file in (folder / "4-mixed" / path.name).iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    damaged = path / "__2_0.distcp"
    damaged.write_bytes(harm(bytearray(damaged.read_bytes())))
    told = world.run("checkpoint_cases.load_damaged", path=str(path))
    assert len(set(told)) == 1
    assert text in told[0]


@pytest.mark.parametrize("mode", [None, "stream"])
def test_each_rank_goes_on_with_its_own_random_numbers(pair: World, tmp_path: Path, mode: str | None) -> None:
    found = pair.run("checkpoint_cases.resumed_run", folder=str(tmp_path / "run"), mode=mode)
    assert found == [(True, True, 2)] * 2
    path = api.latest(tmp_path / "run")
    assert path is not None
    assert len({str(own) for own in api.read_own(path)}) == 2
