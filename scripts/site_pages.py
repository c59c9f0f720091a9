"""Makes pages of the repository fit the site: README.md becomes its first page, and links that leave docs/ work or go.

mkdocs calls these functions (`hooks` in mkdocs.yml). With HOSTWARD_REPOSITORY_URL links to files outside docs/ lead to
the repository; without it, as with the index page's text, they become their words.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
START = "start.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace each pattern of the navigation by the pages that it means."""
    named = {page for page in _leaves(config.nav) if "*" not in page}
    config.nav = _expanded(config.nav, named)
    return config


def _leaves(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [leaf for part in (nav.values() if isinstance(nav, dict) else nav) for leaf in _leaves(part)]


def _expanded(nav: Any, named: set[str]) -> Any:
    if isinstance(nav, dict):
        return {title: _expanded(part, named) for title, part in nav.items()}
    if isinstance(nav, str):
        return nav
    expanded: list[Any] = []
    for part in nav:
        if isinstance(part, str) and "*" in part:
            found = sorted({page.relative_to(DOCS).as_posix() for page in DOCS.glob(part)} - named)
            named |= set(found)
            expanded += found
        else:
            expanded.append(_expanded(part, named))
    return expanded


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README.md of the repository as the first page."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, START, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page's text with links out of docs/ made absolute, or made their words."""
    folder = posixpath.dirname(page.file.src_uri)
    outside = "" if page.file.src_uri == START else ".."
    repository = os.environ.get("HOSTWARD_REPOSITORY_URL", "").rstrip("/")

    def leading(link: re.Match[str]) -> str:
        words, target = link.groups()
        path = posixpath.normpath(posixpath.join("docs" if outside else "", folder, target.partition("#")[0]))
        if outside and path.startswith("docs/") and Path(ROOT, path).suffix:
            return link[0]
        if not outside and (files.get_file_from_path(path) or not target.partition("#")[0]):
            return link[0]
        return f"[{words}]({repository}/blob/HEAD/{path})" if repository else words

    return re.sub(r"(?<!!)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)", leading, markdown)
