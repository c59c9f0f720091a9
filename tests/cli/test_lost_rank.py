"""What a collective that failed says of the other ranks."""

from __future__ import annotations

import pytest

from hostward.cli import ranks

PLACE = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] "


@pytest.mark.parametrize(
    ("text", "why", "slow"),
    [
        ("Timed out waiting 6000ms for recv operation to complete", None, True),
        ("Connection closed by peer [127.0.0.1]:4321. This is nobody's fault", "Connection closed by peer", False),
    ],
)
def test_a_rank_that_may_only_be_slow_is_told_where_to_wait_longer(
    text: str, why: str | None, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "met", lambda: True)
    told = ranks.lost_rank_error(RuntimeError(PLACE + text))
    assert told is not None
    assert told.why.startswith(why or text)
    assert ("dist.distributed_timeout_minutes" in told.fix) is slow


def test_other_errors_are_not_about_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "met", lambda: True)
    assert ranks.lost_rank_error(RuntimeError("timed out at something else")) is None
