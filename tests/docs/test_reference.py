"""docs/reference.md names all that hostward gives, and signatures tell the types."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import hostward

PAGE = (Path(__file__).resolve().parents[2] / "docs/reference.md").read_text(encoding="utf-8")
PUBLIC = [name for name in hostward.__all__ if name not in ("HostwardError", "__version__", "errors")]


def test_every_public_name_is_on_the_page() -> None:
    listed = re.findall(r"^::: hostward\.(\w+)$", PAGE, flags=re.MULTILINE)
    assert sorted(listed) == sorted([*PUBLIC, "errors"])


@pytest.mark.parametrize("name", PUBLIC)
def test_no_public_signature_says_object(name: str) -> None:
    public = getattr(hostward, name)
    calls = [public]
    if inspect.isclass(public):
        calls += [m for n, m in inspect.getmembers(public, inspect.isfunction) if n in vars(public) and n[0] != "_"]
    for call in calls:
        signature = inspect.signature(call)
        unsaid = [p.name for p in signature.parameters.values() if p.annotation in ("object", inspect.Parameter.empty)]
        assert [name for name in unsaid if name != "self"] == [], call
        assert signature.return_annotation != "object", call
