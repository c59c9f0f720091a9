"""Sizes as people write them.

Seen red: units compared without case, GB taken for GiB, an option for a size rounded to the nearest.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hostward.core.units import GIB, MIB, billions, gib, size_bytes, size_option, sizes_apart
from hostward.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("40GiB", 40 << 30),
        ("512 MB", 512_000_000),
        ("1.5TiB", 3 << 39),
        ("7B", 7),
        ("3GB", 3_000_000_000),
        (" 2KiB ", 2048),
        ("0GiB", 0),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert size_bytes(text, "--device-memory") == size


@given(st.integers(1, 1 << 50))
def test_an_option_for_a_size_is_no_smaller_and_little_larger(size: int) -> None:
    assert size <= size_bytes(size_option(size), "--host-memory") < size + (MIB if size < GIB else GIB // 10 + 1)


@pytest.mark.parametrize(("size", "text"), [(64 << 30, "64GiB"), (GIB, "1GiB"), (GIB - 1, "1GiB"), (1, "1MiB")])
def test_an_option_for_a_round_size_is_short(size: int, text: str) -> None:
    assert size_option(size) == text


@pytest.mark.parametrize(
    ("text", "cure"),
    [("40gib", "40GiB"), ("40Gib", "40GiB"), ("40", "40GiB"), ("40Gi", "40GiB"), ("40 gb", "40GB"), ("4Mb", "4MB")],
)
def test_a_misspelt_unit_is_refused_and_the_right_one_named(text: str, cure: str) -> None:
    with pytest.raises(ConfigError, match="--host-memory") as caught:
        size_bytes(text, "--host-memory")
    assert caught.value.fix == f"--host-memory {cure}"


@pytest.mark.parametrize(("text", "cure"), [("40XB", "40GiB"), ("40G", "40GiB"), ("40 t", "40TiB"), ("7Q", "7GiB")])
def test_what_resembles_no_unit_is_taken_for_gib(text: str, cure: str) -> None:
    with pytest.raises(ConfigError, match="is no size") as caught:
        size_bytes(text, "--host-memory")
    assert "units are B, KiB" in caught.value.why
    assert caught.value.fix == f"--host-memory {cure}"


def test_nothing_is_proposed_to_be_nothing() -> None:
    with pytest.raises(ConfigError, match="does not say its unit") as caught:
        size_bytes("0", "--host-memory")
    assert caught.value.fix == "write, for example, --host-memory 40GiB"


@pytest.mark.parametrize("text", ["", "GiB", "-4GiB", "4e3GiB", "4,5GiB", "nanGiB", "4GiB4", "forty"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size") as caught:
        size_bytes(text, "--host-memory")
    assert "a number and a unit" in caught.value.why
    assert caught.value.fix == "write, for example, --host-memory 40GiB"


def test_gib() -> None:
    assert gib(3 << 29) == "1.5"
    assert gib(2000 << 30) == "2,000.0"


def test_what_is_written_tells_two_sizes_apart() -> None:
    """Seen red: 80.0 GiB are needed, and 80.0 GiB are available."""
    assert sizes_apart(80 << 30, 79 << 30) == ("80.0 GiB", "79.0 GiB")
    assert sizes_apart((80 << 30) + 1, 80 << 30) == ("85,899,345,921 bytes", "85,899,345,920 bytes")


def test_numbers_of_parameters() -> None:
    assert (billions(999_999_999), billions(19_722_986_240)) == ("999,999,999", "19.72 B")
