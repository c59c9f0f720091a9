"""Reads a page as a browser would, strictly: every element closed, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "br", "wbr"}


@dataclass
class Element:
    """An element with its attributes, its children and the words directly within it."""

    tag: str
    attributes: dict[str, str]
    children: list[Element] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def all(self, tag: str, **attributes: str) -> list[Element]:
        """Elements below, in order, with this tag and these attributes (`class_` holds one of the classes)."""
        return [e for e in self.below() if e.tag == tag and all(e.has(k, v) for k, v in attributes.items())]

    def below(self) -> Iterator[Element]:
        for child in self.children:
            yield child
            yield from child.below()

    def has(self, name: str, value: str) -> bool:
        if name == "class_":
            return value in self.attributes.get("class", "").split()
        return self.attributes.get(name) == value

    @property
    def text(self) -> str:
        """All words of it and of what is below."""
        return " ".join(" ".join([*self.words, *(child.text for child in self.children)]).split())


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].words.append(data)


def read_html(text: str) -> Element:
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == [reader.root], f"<{reader.open[-1].tag}> is not closed"
    return reader.root
