"""The README stays short and its numbers are measured; the links and files that pages name exist."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for page in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("benchmarks/*.md"),
        *ROOT.glob("skills/**/*.md"),
    )
)


@cache
def program(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["kib", "words", "numbers", "longest_sentence"])
def test_the_readme_keeps_its_limits(name: str) -> None:
    found = program("scripts/readme_figures.py").figures_of((ROOT / "README.md").read_text(encoding="utf-8"))
    assert getattr(found, name) <= getattr(program("scripts/readme_figures.py").LIMITS, name)


def test_figures_of_a_small_page() -> None:
    page = (
        "# Title of it\n\nOne `x = 1.0` on an H100, 1.42 times. Two\nlines make [one](a/2.md) sentence.\n\n"
        "| 8K | cell |\n|---|---|\n\n```text\n5 6 7\n```\n"
    )
    found = program("scripts/readme_figures.py").figures_of(page)
    assert found.kib == len(page) / 1024
    assert (found.words, found.numbers, found.longest_sentence) == (22, 2, 7)


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page, and those that it sets itself."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)"', text))


@pytest.mark.parametrize("name", PAGES)
def test_relative_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    broken = []
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors_of(there)):
            broken.append(target)
    assert broken == []


def test_pages_named_in_the_source_exist() -> None:
    """Docstrings and messages name pages as docs/…md."""
    files = [*ROOT.glob("src/hostward/**/*.py"), *ROOT.glob("native/**/*.[ch]*"), *ROOT.glob("benchmarks/*.py")]
    named = {name for file in files for name in re.findall(r"docs/[\w/-]+\.md", file.read_text(encoding="utf-8"))}
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_files_named_by_where_to_change_exist() -> None:
    text = (ROOT / "docs/where-to-change.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/.-]+(?:/|\.(?:py|inc|cpp|h)))`", text)
    assert len(named) > 100
    assert [name for name in named if not any((ROOT / base / name).exists() for base in ("src/hostward", "."))] == []


def rows_of(name: str, key: str, **only: object) -> dict[object, dict[str, object]]:
    """Return the rows of a result file by `key`, of several the first, and of other libraries the last."""
    result = json.loads((ROOT / "benchmarks/results" / name).read_text(encoding="utf-8"))
    rows = [row for row in result["rows"] if only.items() <= row.items()]
    return {row[key]: row for row in (*reversed(rows), *(result.get("peers") or []))}


def test_the_table_of_the_readme_is_what_was_measured() -> None:
    """Slowdowns of hostward are relative to itself at fraction 0, those of others to torch on the GPU."""
    cells = []
    for name in ("2026-11-22-step-32k-peers-h200.json", "2026-11-28-step-everybody-h200.json"):
        rows = rows_of(name, "row")
        torchao = f"torchao: {rows['ao_bf16_grads']['ratio_to_torch']:.2f}"
        cells.append((peaks(rows["0"], rows["auto:1"]), ratio(rows["auto:1"], rows["0"]), torchao))
    rows = rows_of("2026-11-23-activations-8k-peers-h200.json", "row")
    trl = f"TRL: {ratio(rows['trl'], rows['keep'])}, at {gib(rows['trl'])} GiB"
    cells.append((peaks(rows["keep"], rows["act+offload:6"]), ratio(rows["act+offload:6"], rows["keep"]), trl))
    rows = rows_of("2026-11-26-scaling-four-whole.json", "fraction", length=16384)
    cells.append((peaks(rows[0.0], rows[1.0]), ratio(rows[1.0], rows[0.0]), "none was run"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if "→" in line and "GiB" in line]
    assert [tuple(cell.strip() for cell in line.split("|")[4:7]) for line in lines] == cells


def gib(row: dict[str, object]) -> str:
    nbytes = row.get("device_peak_bytes", row.get("device_bytes"))
    assert isinstance(nbytes, int)
    return f"{nbytes / 2**30:.1f}"


def peaks(without: dict[str, object], offloaded: dict[str, object]) -> str:
    return f"{gib(without)} → {gib(offloaded)} GiB"


def ratio(row: dict[str, object], base: dict[str, object]) -> str:
    return f"{float(str(row['step_s'])) / float(str(base['step_s'])):.2f}"


def test_choices_that_others_dominate_are_said_to_be() -> None:
    """Of activations at one length: rows that take at least 2 % longer than another, and more memory."""
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    table = page.partition("## Activations, one GPU")[2].partition("## ")[0]
    rows: list[tuple[str, str, float, float]] = []
    for cells in (line.split("|") for line in table.splitlines() if re.search(r"[.]\d+ \|$", line)):
        length = cells[1].split(",")[0].strip() or rows[-1][0]
        others = "TRL", "torchtune", "save_on_cpu", "hidden size"  # of another library, or another model
        if not any(other in cells[1] + cells[2] for other in others):
            rows.append((length, cells[2], float(cells[4]), float(cells[5].split()[0])))
    assert len(rows) >= 12
    dominated = [
        what
        for length, what, slower, gib in rows
        if any(length == other and 1.02 * s <= slower and g < gib for other, _, s, g in rows)
    ]
    assert [what for _, what, _, _ in rows if "Dominated" in what] == dominated != []


def test_conditions_of_the_benchmarks_page_are_those_of_its_files() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert program("benchmarks/conditions.py").with_conditions(page) == page, (
        "run: python benchmarks/conditions.py docs/benchmarks.md"
    )
