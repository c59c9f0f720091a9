"""One world of processes for all tests of this folder: starting it takes most of their time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from world import World


@pytest.fixture(scope="package")
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()
