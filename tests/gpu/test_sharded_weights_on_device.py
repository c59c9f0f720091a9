"""Parts of sharded weights that come and go on a GPU: the same bits whatever lane is slow, and a lower peak. Two
processes, which share a GPU where there are not two; and one, which FSDP2 gathers for without a collective.
"""

from __future__ import annotations

from typing import Any

import pytest
from conftest import device_shared
from launching import found_in, launched, said_in
from sharded_weights_cases import CASES, DEPTH, STOOD_STILL

LIMIT_S = 240.0

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each rank found, by the number of ranks: one start of torchrun for each."""
    known: dict[int, list[Any]] = {}

    def of(ranks: int) -> list[Any]:
        if ranks not in known:
            folder = tmp_path_factory.mktemp("ranks")
            with launched("sharded_weights_cases.py", ranks, folder) as torchrun:
                torchrun.wait(LIMIT_S)
            known[ranks] = found_in(folder)
            assert len(known[ranks]) == ranks, said_in(folder)
            assert all({*CASES, STOOD_STILL} == rank.keys() for rank in known[ranks]), said_in(folder)
        return known[ranks]

    return of


@pytest.fixture(autouse=True)
def _beside_others() -> None:
    """The module's program has it."""


@pytest.fixture(autouse=True, scope="module")
def _device() -> Any:
    with device_shared(alone=True):
        yield


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_parts_that_come_and_go_keep_the_bits(found: Any, ranks: int, case: str) -> None:
    for rank in found(ranks):
        here = rank[case]["here"]
        for way in ("away", "slow"):
            told = rank[case][way]
            assert (told["bits"], told["norms"]) == (here["bits"], here["norms"]), way
            assert told["offloaded"] > 0
            assert told["held"] == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_peak_is_lower_by_what_left(found: Any, ranks: int) -> None:
    """Of six layers five leave, and the parts of three of them are here at a time. Where nothing is trained: how many
    gradients are on their way at once is a matter of time.
    """
    for rank in found(ranks):
        here, away = (rank["frozen"][way] for way in ("here", "away"))
        assert here["peak_bytes"] - away["peak_bytes"] >= 0.95 * (DEPTH - 1 - 3) / DEPTH * here["parts_bytes"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_most_is_foreseen(found: Any, ranks: int) -> None:
    """All but what an evaluation needs first, and the first forward."""
    for rank in found(ranks):
        away = rank["resharded"]["away"]
        assert away["on_demand"] <= 0.1 * away["fetched"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trace_tells_what_the_device_stood_still_for_weights(found: Any, ranks: int) -> None:
    """There is next to no work that slow fetches could hide behind."""
    for rank in found(ranks):
        away, slow = rank[STOOD_STILL]["away"], rank[STOOD_STILL]["slow"]
        for told in (away, slow):
            assert 0 <= told["weights_s"] <= told["all_s"]
        if ranks > 1 and not slow["gathers"]:
            pytest.skip("gloo gathers on the host, which then waits where the device would")
        least_s = slow["fetches"] * slow["sleep_s"]
        assert slow["weights_s"] > 0.5 * least_s
        assert away["weights_s"] < 0.5 * least_s
