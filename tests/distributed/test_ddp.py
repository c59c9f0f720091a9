"""DistributedDataParallel reduces gradients in `.grad` when backward is over: they are taken then, with the same bits.

Seen red: gradients taken in backward, as without it (a ModelError from inside of backward, which did not name it);
the block around backward alone forgets that the forward ran in DDP.
"""

from __future__ import annotations

import pytest
from world import World

WAYS = {
    "plain": {},
    "static graph": {"static": True},
    "no_sync": {"no_sync": True},
    "wrapped first": {"wrapped_first": True},
    "bucket views": {"bucket_views": True},
    "around backward": {"forward_outside": True, "no_sync": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_accumulate_has_the_bits_of_a_loop_without_it(pair: World, way: str) -> None:
    expected = pair.run("ddp_cases.trained", mix="device", context=False, **WAYS[way])
    assert len({tuple(rank.items()) for rank in expected}) == 1
    for mix in ("host", "streamed", "device"):
        assert pair.run("ddp_cases.trained", mix=mix, context=True, **WAYS[way]) == expected
    assert pair.run("ddp_cases.trained", mix="host", context=False, **WAYS[way]) == expected


@pytest.mark.parametrize("context", [False, True])
def test_gradients_on_the_host_are_refused_by_name(pair: World, context: bool) -> None:
    for told in pair.run("ddp_cases.refused", context=context):
        assert told.startswith('gradients="host" of a model that is wrapped in DistributedDataParallel')
