"""The page in a real browser: on a telephone and on a desk, light and dark, nothing overlaps and all can be read."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_cases import cut_short, gpu_report, gpu_trace, ranks_report, ranks_trace

from hostward.report.page import render
from hostward.report.schema import Ended

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)
SIZES = {"telephone": (360, 780), "desk": (1280, 900)}
SCHEMES = {"light": "1", "dark": "0"}
LEAST_PIXELS = 11.5
TEXT_CONTRAST, SHAPE_CONTRAST = 4.5, 3.0  # WCAG 2.2, 1.4.3 and 1.4.11
ALL_IN_VIEW = 6000

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"none of these browsers is installed: {', '.join(BROWSERS)}")

# The page gets a frame of the width under test: a window without a screen is never as narrow as a telephone.
FRAME = """<!doctype html><meta charset="utf-8"><body style="margin:0">
<iframe id="f" style="border:0;width:{width}px;height:{height}px" srcdoc="{page}"></iframe><pre id="found"></pre>
<script>
const channel = c => {{ c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4 }};
const parse = text => text.match(/[\\d.]+/g).map(Number);
const light = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
const contrast = (a, b) => {{
  const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
  return (x + 0.05) / (y + 0.05);
}};
document.getElementById("f").onload = event => {{
  const doc = event.target.contentDocument, view = event.target.contentWindow;
  const style = e => view.getComputedStyle(e);
  const ground = e => {{
    for (; e; e = e.parentElement) {{
      const c = parse(style(e).backgroundColor);
      if (c.length < 4 || c[3] === 1) return c;
    }}
    return [255, 255, 255];
  }};
  const texts = [], outside = [], overlapping = [], clipped = [];
  const walk = doc.createTreeWalker(doc.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {{
    const e = walk.currentNode.parentElement, words = walk.currentNode.textContent.trim();
    if (!words || e.closest("svg") || !e.getClientRects().length) continue;
    const pixels = parseFloat(style(e).fontSize);
    texts.push({{ words, pixels, contrast: contrast(parse(style(e).color), ground(e)) }});
    const box = e.getBoundingClientRect();
    if (!e.closest(".scroll") && (box.left < -0.5 || box.right > view.innerWidth + 0.5)) outside.push(words);
  }}
  for (const group of doc.querySelectorAll(".plot, .ruler:not(.phases)")) {{
    const labels = [...group.querySelectorAll("span:not(.small)")].map(e => [e, e.getBoundingClientRect()]);
    labels.forEach(([e, a], i) => labels.slice(i + 1).forEach(([f, b]) => {{
      if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
        overlapping.push(e.textContent + " and " + f.textContent);
    }}));
  }}
  const shortened = [], passes = [];
  for (const e of doc.querySelectorAll(".phases span")) {{
    const words = doc.createRange(), box = e.getBoundingClientRect();
    words.selectNodeContents(e);
    const found = words.getBoundingClientRect();
    if (found.top >= box.bottom) continue;  // on a second line, which is not shown
    passes.push(e.textContent);
    if (found.left < box.left - 0.5 || found.right > box.right + 0.5) shortened.push(e.textContent);
  }}
  for (const e of doc.querySelectorAll("dd, .sum, h1, td, th"))
    if (e.scrollWidth > e.clientWidth + 1 && e.clientWidth && !e.closest(".scroll")) clipped.push(e.textContent);
  const shapes = [...doc.querySelectorAll(".legend i:not(.dash)")].map(e =>
    [e.parentElement.textContent, contrast(parse(style(e).backgroundColor), ground(e.parentElement))]);
  const drawings = [...doc.querySelectorAll("svg")].map(e => e.getBoundingClientRect().width);
  document.getElementById("found").textContent = JSON.stringify({{
    texts, outside, overlapping, clipped, shortened, passes: passes.length, shapes, drawings, ground: ground(doc.body),
    width: doc.documentElement.scrollWidth, room: view.innerWidth,
  }});
}};
</script>"""


def browse(folder: Path, page: str, size: tuple[int, int], scheme: str, *arguments: str) -> str:
    """Open the page in a frame of this size; returns what the browser prints."""
    assert BROWSER is not None
    width, height = size
    file = folder / "frame.html"
    file.write_text(FRAME.format(page=html.escape(page), width=width, height=height), encoding="utf-8")
    command = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ]
    command += ["--disable-background-networking", "--no-first-run", f"--user-data-dir={folder / 'profile'}"]
    command += [f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", f"--window-size={max(width, 500)},{height}"]
    done = subprocess.run([*command, *arguments, file.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def found_in(folder: Path, page: str, size: tuple[int, int], scheme: str) -> dict[str, Any]:
    """What the script in the frame found out about the page."""
    dom = browse(folder, page, size, scheme, "--dump-dom", "--virtual-time-budget=2000")
    match = re.search(r'<pre id="found">(.+?)</pre>', dom, re.DOTALL)
    assert match is not None, dom[-2000:]
    content: dict[str, Any] = json.loads(html.unescape(match[1]))
    return content


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("screen", SIZES)
def test_the_page_can_be_read(tmp_path: Path, screen: str, scheme: str) -> None:
    page = render(gpu_report(), gpu_trace())
    found = found_in(tmp_path, page, SIZES[screen], scheme)
    assert found["room"] == SIZES[screen][0]
    assert found["width"] <= found["room"]
    assert found["outside"] == []
    assert found["overlapping"] == []
    assert found["clipped"] == []
    assert sum(found["ground"][:3]) / 3 > 200 if scheme == "light" else sum(found["ground"][:3]) / 3 < 60
    assert len(found["texts"]) > 100
    assert [t for t in found["texts"] if t["pixels"] < LEAST_PIXELS] == []
    assert [t for t in found["texts"] if t["contrast"] < TEXT_CONTRAST] == []
    assert len(found["shapes"]) >= 12
    assert [shape for shape in found["shapes"] if shape[1] < SHAPE_CONTRAST] == []
    assert len(found["drawings"]) == 10
    assert min(found["drawings"]) > 0.5 * found["room"]


@pytest.mark.parametrize("screen", SIZES)
def test_a_crowded_page_can_be_read(tmp_path: Path, screen: str) -> None:
    """Four ranks, 48 layers, 2,000 iterations and 36 plans. The desk has room for the words of eight passes."""
    found = found_in(tmp_path, render(ranks_report(), ranks_trace()), SIZES[screen], "light")
    assert (found["outside"], found["overlapping"], found["clipped"]) == ([], [], [])
    assert found["width"] <= found["room"]
    assert found["shortened"] == []
    assert (found["passes"] == 9) == (screen == "desk")


def test_long_words_and_large_numbers_stay_in_their_places(tmp_path: Path) -> None:
    report = cut_short(Ended.FAILED, "word" * 60)
    report = replace(
        report,
        recipe="qwen3_30b_a3b_" * 8,
        command="hostward train " + "x" * 400,
        tokens_per_s=123_456_789.0,
        losses=(123456.5, *report.losses[1:]),
        options={"optimizer.a_long_name_of_an_option" * 3: "value" * 50},
        iteration_s=tuple(1e-4 * (1 + i % 3) for i in range(11)),
    )
    found = found_in(tmp_path, render(report, gpu_trace()), SIZES["telephone"], "light")
    assert (found["outside"], found["overlapping"], found["clipped"]) == ([], [], [])
    assert found["width"] <= found["room"]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("screen", SIZES)
def test_pictures_of_the_page_for_a_person_to_look_at(tmp_path: Path, screen: str, scheme: str) -> None:
    """Run with --basetemp FOLDER to keep them."""
    picture = tmp_path / f"{screen}-{scheme}.png"
    size = SIZES[screen][0], ALL_IN_VIEW
    browse(tmp_path, render(gpu_report(), gpu_trace()), size, scheme, f"--screenshot={picture}")
    header = picture.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    assert int.from_bytes(header[20:24], "big") == ALL_IN_VIEW
