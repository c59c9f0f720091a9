"""Hardware files: what is written is read back equal, and nothing else is read."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import statistics
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hostward.core.host_limits import Rates
from hostward.errors import ConfigError
from hostward.plan.hardware_profile import (
    PROFILES,
    VERSION,
    Cpu,
    Gpu,
    Hardware,
    Limits,
    LinkRate,
    load,
    profile,
    profile_of,
    save,
)

RATE = st.floats(1.0, 1e18)
SIZE = st.integers(0, 1 << 60)
NAME = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)

GPUS = st.builds(Gpu, NAME, SIZE, *[st.none() | RATE] * 4)
CPUS = st.builds(Cpu, st.none() | NAME, st.none() | SIZE, st.none() | RATE, st.none() | SIZE, st.lists(NAME).map(tuple))
LIMITS = st.builds(Limits, st.none() | SIZE, st.none() | NAME, *[st.none() | SIZE] * 3)
LINKS = st.lists(
    st.builds(LinkRate, SIZE, RATE, RATE, st.none() | RATE), max_size=4, unique_by=lambda link: link.copy_bytes
).map(lambda links: tuple(sorted(links, key=lambda link: link.copy_bytes)))


@st.composite
def hardwares(draw: st.DrawFn) -> Hardware:
    gpu = draw(st.none() | GPUS)
    rates = [draw(st.none() | RATE) for _ in range(8)]
    return Hardware(
        VERSION,
        draw(NAME),
        draw(st.none() | NAME),
        draw(st.none() | SIZE),
        gpu,
        0 if gpu is None else draw(st.integers(1, 16)),
        draw(CPUS),
        draw(LIMITS),
        () if gpu is None else draw(LINKS),
        *rates,
        draw(st.dictionaries(NAME, NAME, max_size=3)),
    )


@given(hardware=hardwares())
def test_what_is_written_is_read_back_equal(hardware: Hardware) -> None:
    again = Hardware.from_json(hardware.to_json())
    assert again == hardware
    assert again.to_json() == hardware.to_json()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(data=st.data(), value=JSON)
def test_any_value_in_any_place_is_read_or_refused(data: st.DataObject, value: Any) -> None:
    content = json.loads(profile("h200").to_json())
    place = content
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else list(range(len(place)))))
        inner = place[key]
        if not isinstance(inner, (dict, list)) or not inner or data.draw(st.booleans()):
            break
        place = inner
    place[key] = value
    with contextlib.suppress(ConfigError):
        assert isinstance(Hardware.from_json(json.dumps(content)), Hardware)


@given(text=st.text())
def test_any_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no hardware file"):
        Hardware.from_json(text)


def edited(**changes: Any) -> str:
    content = json.loads(profile("h200").to_json())
    for path, value in changes.items():
        place = content
        *outer, last = path.split("__")
        for key in outer:
            place = place[int(key) if key.isdigit() else key]
        place[last] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("[]", r"the whole is \[\], not an object"),
        ("{}", "key 'version' is missing"),
        (edited(version=2), "it has version 2, this hostward reads version 1"),
        ('{"version": 7}', "it has version 7, this hostward reads version 1"),
        (edited(version=True), "version is true, not a whole number"),
        (edited(version=1.0), r"version is 1\.0, not a whole number"),
        (edited(gpu_cuont=1), "key 'gpu_cuont' is unknown; did you mean 'gpu_count'?"),
        (edited(gpu__nmae="x"), r"key gpu\.'nmae' is unknown; did you mean 'name'?"),
        (edited(gpu__memory_bytes=-1), r"gpu\.memory_bytes is -1, which is negative"),
        (edited(dram_bytes_per_s="fast"), 'dram_bytes_per_s is "fast", not a number'),
        (edited(dram_bytes_per_s=False), "dram_bytes_per_s is false, not a number"),
        (edited(dram_bytes_per_s=0), "dram_bytes_per_s is 0; null means unknown"),
        (edited(links__0__h2d_bytes_per_s=1e-300), r"links\[0\]\.h2d_bytes_per_s is 1e-300, which no machine has"),
        (edited(matmul_share=1e300), r"matmul_share is 1e\+300, which no machine has"),
        (edited(dram_bytes_per_s=-1.5), r"dram_bytes_per_s is -1\.5, not a finite number of at least 0"),
        (edited(dram_bytes_per_s=10**400), "dram_bytes_per_s is 10+[.][.][.], which is too large"),
        (edited(dram_bytes_per_s=float("nan")), "NaN is no number"),
        (edited(dram_bytes_per_s=float("inf")), "Infinity is no number"),
        (edited(gpu__bf16_matmul_flops_per_s=0), r"gpu\.bf16_matmul_flops_per_s is 0; null means unknown"),
        (edited(gpu__bf16_peak_flops_per_s=0), r"gpu\.bf16_peak_flops_per_s is 0"),
        (edited(gpu__memory_peak_bytes_per_s=0), r"gpu\.memory_peak_bytes_per_s is 0"),
        (edited(gpu__link_peak_bytes_per_s=0), r"gpu\.link_peak_bytes_per_s is 0"),
        (edited(links=5), "links is 5, not a list"),
        (edited(links__0__h2d_bytes_per_s=0), r"links\[0\].h2d_bytes_per_s is 0"),
        (edited(links__0__copy_bytes=1 << 40), "links are not in the order of copy_bytes"),
        (edited(gpu=None), "gpu is null, but gpu_count or links say that there is one"),
        (edited(gpu_count=0), "gpu_count is 0, but there is a gpu"),
        (edited(sources=[]), r"sources is \[\], not an object"),
        (edited(cpu__instruction_sets=["avx2", 3]), r"cpu.instruction_sets\[1\] is 3, not a text"),
        ('{"version": 1, "version": 1}', "key 'version' is there twice"),
    ],
)
def test_a_file_edited_into_nonsense_is_refused_with_the_place(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match="the text is no hardware file") as caught:
        Hardware.from_json(text)
    assert re.search(why, caught.value.why), caught.value.why
    assert "hostward bench machine" in caught.value.fix


def test_whole_numbers_serve_as_rates() -> None:
    assert Hardware.from_json(edited(dram_bytes_per_s=126)).dram_bytes_per_s == 126.0


def test_a_file_is_written_whole_over_an_old_one(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    path.write_text("old")
    save(profile("h200"), path)
    assert load(path) == profile("h200")
    assert [p.name for p in tmp_path.iterdir()] == ["hardware.json"]


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "elsewhere" / "hardware.json")
    save(profile("h200"), tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert load(tmp_path / "elsewhere" / "hardware.json") == profile("h200")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is no plain file"):
        save(profile("h200"), tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "link.json", "pipe"]


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "latin.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "latin.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        save(profile("h200"), tmp_path / "none" / "hardware.json")
    with pytest.raises(ConfigError, match=r"hardware file .* is no plain file"):
        save(profile("h200"), tmp_path / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "latin.json"]


@pytest.mark.parametrize("name", PROFILES)
def test_each_number_of_a_shipped_profile_names_its_source(name: str) -> None:
    shipped = profile(name)
    assert shipped.name == name
    assert shipped.gpu is not None
    assert shipped.gpu.name in PROFILES[name]
    content = json.loads(shipped.to_json())
    numbers = {key for key, value in content.items() if isinstance(value, float) or (key == "links" and value)}
    numbers |= {f"gpu.{key}" for key, value in content["gpu"].items() if isinstance(value, (int, float))}
    assert numbers == set(shipped.sources)
    assert all(len(source) > 10 for source in shipped.sources.values())


def test_profiles_are_found_by_the_name_of_the_gpu() -> None:
    assert profile_of("NVIDIA H200") == profile("h200")
    assert profile_of("NVIDIA GeForce RTX 3090") is None
    with pytest.raises(ConfigError, match="there is no hardware profile 'h300'"):
        profile("h300")


def test_rates_for_the_mix_need_all() -> None:
    full = profile("h200")
    assert full.rates == Rates(5.14e9, 94e9, 3.53e9, 67e9, 55.2e9)
    assert dataclasses.replace(full, busy_duplex_bytes_per_s=None).rates is None
    assert dataclasses.replace(full, links=()).rates is None


def test_the_h200_profile_has_the_median_rates_of_the_measured_hosts() -> None:
    shipped, folder = profile("h200"), Path(__file__).parents[2] / "benchmarks" / "results"
    measured = [load(path) for path in sorted(folder.glob("*-hardware*-h200.json"))]
    assert len(measured) >= 6
    names = ("pinned_s_per_gib", "dram_bytes_per_s", "host_parameters_per_s", "duplex_bytes_per_s")
    for name in (*names, "busy_host_parameters_per_s", "busy_duplex_bytes_per_s"):
        median = statistics.median(getattr(hardware, name) for hardware in measured)
        assert getattr(shipped, name) == pytest.approx(median, rel=0.005), name
    for at, link in enumerate(shipped.links):
        for name in ("h2d_bytes_per_s", "d2h_bytes_per_s", "duplex_bytes_per_s"):
            median = statistics.median(getattr(hardware.links[at], name) for hardware in measured)
            assert getattr(link, name) == pytest.approx(median, rel=0.005), (link.copy_bytes, name)
