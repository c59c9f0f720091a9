"""Two processes with a GPU each, over NCCL: every placement gives the bits of the device. With one GPU they share it,
and exchange through gloo what that can send.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import found_in, launched, said_in
from ranks_cases import CASES, LAYOUTS, SHARED

RANKS = 2
AT_ONCE = 4
"""Starts beside each other. A case takes half a minute, most of it in Python."""
LIMIT_S = 420.0

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(LIMIT_S + 30.0)]


class Started:
    """What each rank finds, by case: some starts of torchrun beside each other for all that are wanted, and others for
    the cases behind one that ends its start. The calling test has the devices to itself.
    """

    def __init__(self, folder: Path, cases: Collection[str]) -> None:
        self._folder = folder
        self._left = [case for case in CASES if case in cases]
        self._found: dict[str, list[Any]] = {}
        self._ended: dict[str, str] = {}

    def of(self, case: str) -> list[Any]:
        while case in self._left:
            self._start([share for i in range(AT_ONCE) if (share := self._left[i::AT_ONCE])])
        assert case in self._found, self._ended[case]
        return self._found[case]

    def _start(self, shares: Sequence[Sequence[str]]) -> None:
        with ExitStack() as ended:
            launchers = [ended.enter_context(self._launched(cases)) for cases in shares]
            until_s = time.monotonic() + LIMIT_S
            for launcher in launchers:
                with contextlib.suppress(subprocess.TimeoutExpired):  # the case that it was at is told below
                    launcher.wait(max(0.0, until_s - time.monotonic()))
        for cases in shares:
            folder = self._folder_of(cases)
            read = found_in(folder)
            for case in cases:
                self._left.remove(case)
                if len(read) < RANKS or any(case not in rank for rank in read):
                    self._ended[case] = said_in(folder)
                    break  # at this one; those behind it are still to come
                self._found[case] = [rank[case] for rank in read]

    def _launched(self, cases: Sequence[str]) -> AbstractContextManager[subprocess.Popen[bytes]]:
        folder = self._folder_of(cases)
        folder.mkdir()
        return launched("ranks_cases.py", RANKS, folder, *cases)

    def _folder_of(self, cases: Sequence[str]) -> Path:
        return self._folder / f"from {cases[0]}"


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Started:
    items: list[Any] = [item for item in request.session.items if item.path == Path(__file__)]
    wanted = {item.callspec.params["case"] for item in items}
    if torch.cuda.device_count() < RANKS:
        wanted &= set(SHARED)
    return Started(tmp_path_factory.mktemp("ranks"), wanted)


@pytest.fixture
def found(case: str, started: Started) -> list[Any]:
    """What each rank has found."""
    if case not in SHARED and torch.cuda.device_count() < RANKS:
        pytest.skip("needs two CUDA devices")
    return started.of(case)


@pytest.mark.parametrize("case", LAYOUTS)
def test_every_placement_gives_the_same_bits(found: list[Any]) -> None:
    for rank in found:
        expected = rank["device"]
        assert expected["offloaded_bytes"] == 0
        assert max(expected["norms"]) > 0.5  # clipped
        assert len(expected["skipped"]) < len(expected["losses"])
        for placement in set(rank) - {"device"}:
            told = rank[placement]
            assert told["offloaded_bytes"] > 0
            assert {k: told[k] for k in ("bits", "losses", "norms")} == {
                k: expected[k] for k in ("bits", "losses", "norms")
            }, placement


@pytest.mark.parametrize("case", LAYOUTS)
def test_ranks_agree_on_losses_and_norms(found: list[Any]) -> None:
    first, second = found
    for placement, told in first.items():
        assert told["losses"] == second[placement]["losses"]
        assert told["norms"] == second[placement]["norms"]
        assert told["skipped"] == second[placement]["skipped"]


@pytest.mark.parametrize("case", ["activations_leave"])
def test_activations_leave_with_the_same_bits(found: list[Any]) -> None:
    for rank in found:
        assert rank["away"]["bits"] == rank["device"]["bits"]
        assert rank["away"]["losses"] == rank["device"]["losses"]


@pytest.mark.parametrize("case", ["weights_leave"])
def test_weights_leave_with_the_same_bits(found: list[Any]) -> None:
    for rank in found:
        expected = rank.pop("device")
        for way, told in rank.items():
            assert (told["bits"], told["losses"]) == (expected["bits"], expected["losses"]), way
            assert (told["weights_away_bytes"] > 0) == (way != "resharded")


@pytest.mark.parametrize("case", ["weights_of_stages_leave"])
def test_weights_of_stages_leave_with_the_same_bits(found: list[Any]) -> None:
    for rank in found:
        for schedule, ways in rank.items():
            expected = ways.pop("device")
            for way, told in ways.items():
                assert (told["bits"], told["losses"]) == (expected["bits"], expected["losses"]), (schedule, way)
                assert told["weights_away_bytes"] > 0
                # Nobody knows the order of a first step; there are four.
                assert told["weights_unforeseen_bytes"] < told["weights_fetched_bytes"] / 4


@pytest.mark.parametrize("case", ["saved"])
def test_a_saved_run_goes_on_bit_for_bit_at_another_placement(found: list[Any]) -> None:
    for rank in found:
        assert rank["resumed"]["bits"] == rank["straight"]["bits"]
        assert rank["resumed"]["losses"] == rank["straight"]["losses"][2:]
        assert rank["iteration"] == 2


@pytest.mark.parametrize("case", ["norm_of_given"])
def test_the_norm_of_given_gradients_is_that_of_one_process(found: list[Any]) -> None:
    for rank in found:
        assert rank["data"] == rank["experts"] == rank["alone"]


@pytest.mark.parametrize("case", ["no_waits"])
def test_an_iteration_does_not_wait_for_the_device(found: list[Any]) -> None:
    for rank in found:
        assert rank["issued_s"] < 0.5 * rank["passed_s"]
