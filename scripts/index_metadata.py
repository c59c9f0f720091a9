"""Gives the build what an index page shows: README.md with absolute links, and the project's URLs.

The address of the repository is in no file. A release names it (docs/releasing.md):

    HOSTWARD_REPOSITORY_URL=https://HOST/OWNER/hostward python -m build

Without it, as in every other build, the text keeps the words of its relative links and drops their targets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[1] / "README.md"


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields `readme` and `urls` of the project table; scikit-build-core calls this."""
    repository = os.environ.get("HOSTWARD_REPOSITORY_URL", "").rstrip("/")
    tag = f"v{project['version']}"
    text = with_absolute_links(README.read_text(encoding="utf-8"), repository, tag)
    urls = {
        "Repository": repository,
        "Documentation": f"{repository}/blob/{tag}/docs/README.md",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
    }
    return {"readme": {"content-type": "text/markdown", "text": text}, "urls": urls if repository else {}}


def dynamic_wheel(settings: Mapping[str, Any]) -> dict[str, bool]:
    """Name the fields that may differ between a source distribution and a wheel built from it elsewhere."""
    return {"readme": True, "urls": True}


def with_absolute_links(text: str, repository: str, tag: str) -> str:
    """Return a page of the repository's root whose relative links lead to `tag` in `repository`.

    Pictures lead to the file itself. Where `repository` is empty, links and pictures become their text.
    """

    def absolute(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        if not repository:
            return words
        return f"{picture}[{words}]({repository}/{'raw' if picture else 'blob'}/{tag}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)", absolute, text)
