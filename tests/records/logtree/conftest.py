"""What the logtree tests share: a browser started once, and a reader of the text a page shows."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser

import pytest

from browser import Browser
from rollbook.records.logtree import Trace
from rollbook.records.logtree.page import render


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    running = Browser()
    yield running
    running.close()


class Shown(HTMLParser):
    """The elements of a page in order, with the text each one directly holds.

    A mark for a hidden character reads as that character, so text can be compared with what was logged.
    """

    VOID = frozenset({"meta", "img", "input", "path", "circle"})

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[int | None] = []
        self._main: int | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "i" and values.get("class") == "c":
            self._add(chr(int(str(values["title"])[2:], 16)))
            self._open.append(None)
            return
        self.elements.append((tag, values, []))
        if tag == "main":
            self._main = len(self.elements)
        if tag not in self.VOID:
            self._open.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        self._add(data)

    def _add(self, text: str) -> None:
        if self._open and self._open[-1] is not None:
            self.elements[self._open[-1]][2].append(text)

    def tree(self) -> list[tuple[str, dict[str, str | None], str]]:
        """The elements below `main`, without the line about the page itself."""
        assert self._main is not None
        return [(tag, attrs, "".join(text)) for tag, attrs, text in self.elements[self._main + 1 :]]


def shown(trace: Trace) -> list[tuple[str, dict[str, str | None], str]]:
    parser = Shown()
    parser.feed(render(trace).decode())
    parser.close()
    return parser.tree()


def texts(trace: Trace, tag: str) -> list[str]:
    return [text for name, _, text in shown(trace) if name == tag]
