"""Worlds of processes for all tests of this folder: starting them takes most of their time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from run_fixtures import one_length_is_traced as one_length_is_traced
from world import World


@pytest.fixture(scope="package")
def world() -> Iterator[World]:
    """Four ranks, for what needs as many: two dimensions, or a rank that has nothing of three rows."""
    made = World()
    yield made
    made.close()


@pytest.fixture(scope="package")
def pair() -> Iterator[World]:
    """Two ranks, which take half of the time of four."""
    made = World(2)
    yield made
    made.close()


CHANGE_NO_BIT = {"overlap": False, "always_last": True, "clear": False, "context": False}
"""Of `sharded_cases.train`; of its network, to prefetch explicitly, and the mesh of all ranks."""


@pytest.fixture(scope="package")
def on_device() -> Any:
    """What training a sharded network with everything on the device gives, by options of `sharded_cases.train`. What
    changes no bit is left out of them: it is one more thing that the offloaded run must not depend on.
    """
    known: dict[tuple[int, str], list[Any]] = {}

    def found(world: World, **options: Any) -> list[Any]:
        kept = {name: value for name, value in options.items() if CHANGE_NO_BIT.get(name) != value}
        network = {k: v for k, v in options.get("network", {}).items() if k != "prefetch" and v != "all"}
        kept = {name: value for name, value in kept.items() if name != "network"}
        kept |= {"network": network} if network else {}
        name = world.size, repr(sorted(kept.items()))
        if name not in known:
            known[name] = world.run("sharded_cases.train", mix="device", **kept)
        return known[name]

    return found
