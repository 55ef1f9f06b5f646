"""Hostile output, opened in a real browser: nothing runs, nothing leaves, and the text is there to read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from browser import Browser, Page
from records.logtree import hostile
from rollbook.records import logtree
from rollbook.records.logtree import Trace
from rollbook.records.logtree.page import render

TAGS = set(
    re.findall(
        r"\w+",
        "html head meta title style body a header button svg path circle h1 h2 h3 h4 h5 h6 div input kbd "
        "output nav main p section details summary small b i table caption thead tbody tr th td img "
        "script ul li span",
    )
)
TOGETHER = 5  # strings on one page: opening a page is most of the cost
# What a reader might do: open everything, follow every link, point at and focus every element, search.
USE_EVERYTHING = """(async () => {
  const main = document.getElementById("lt-main");
  if (main) document.getElementById("lt-all").click();
  for (const button of document.querySelectorAll("nav button")) button.click();
  for (const el of document.querySelectorAll("body *")) {
    if (el.id === "lt-menu") continue;
    for (const kind of ["mouseover", "mouseenter", "pointerover", "mousemove"]) {
      el.dispatchEvent(new MouseEvent(kind, { bubbles: true }));
    }
    if (el.tabIndex >= 0) el.focus({ preventScroll: true });
    if (el.localName === "a") el.click();
  }
  const find = document.getElementById("lt-find");
  if (find) { find.value = "script"; find.dispatchEvent(new Event("input")); }
  scrollTo(0, document.documentElement.scrollHeight);
  await new Promise((resolve) => setTimeout(resolve, 20));
})()"""
STRUCTURE = """(() => {
  const tags = new Set(), bad = [];
  for (const el of document.querySelectorAll("*")) {
    tags.add(el.localName);
    for (const { name, value } of el.attributes) {
      if (/^on|^style$|^srcdoc$|^action$|^ping$/.test(name)) bad.push(name);
      if (name === "href" && !value.startsWith("#")) bad.push(value);
      if (name === "src" && !value.startsWith("data:image/")) bad.push(value);
    }
  }
  return { tags: [...tags], bad, scripts: document.scripts.length, styles: document.styleSheets.length };
})()"""


@dataclass
class Seen:
    """Whatever a page did that a page of text must not do."""

    ran: object
    dialogs: list[str]
    requests: list[str]
    connections: list[str]
    windows: list[str]

    def anything(self) -> bool:
        return bool(self.ran or self.dialogs or self.requests or self.connections or self.windows)


def visit(browser: Browser, page: Page, file: Path) -> Seen:
    asked, targets = browser.proxy.mark(), len(browser.targets)
    page.open(file.as_uri())
    page.evaluate(USE_EVERYTHING)
    ran = page.evaluate("window.__pwned")
    own = (file.as_uri(), "data:image/")
    return Seen(
        ran,
        page.dialogs,
        [url for url in page.requests if not url.startswith(own)],
        browser.proxy.asked_since(asked),
        browser.targets[targets:],
    )


def written(trace: Trace, path: Path) -> Path:
    file = path / "page.html"
    logtree.write(trace, html=file)
    return file


@pytest.mark.parametrize("first", range(0, len(hostile.STRINGS), TOGETHER))
def test_hostile_strings_are_only_ever_text(browser: Browser, tmp_path: Path, first: int) -> None:
    texts = hostile.STRINGS[first : first + TOGETHER]
    trace = Trace(" ".join(texts))
    for text in texts:
        trace.root.children += hostile.tree_of(text).root.children
    file = written(trace, tmp_path)
    with browser.page() as page:
        seen = visit(browser, page, file)
        assert not seen.anything(), seen
        structure = page.evaluate(STRUCTURE)
        assert set(structure["tags"]) <= TAGS
        assert structure["bad"] == []
        assert (structure["scripts"], structure["styles"]) == (1, 1)
        assert page.complaints == []
        shown, title = page.evaluate("[document.getElementById('lt-main').textContent, document.title]")
        for text in filter(str.isprintable, texts):
            assert shown.count(text) > 50
            assert " ".join(text.split()) in title


def test_a_hostile_file_is_as_harmless_once_read_back(browser: Browser, tmp_path: Path) -> None:
    with logtree.trace("all") as trace:
        pass
    for text in hostile.STRINGS[::8]:
        trace.root.children += hostile.tree_of(text).root.children
    logtree.write(trace, json=tmp_path / "t.json")
    (tmp_path / "peer.json").write_bytes(
        (tmp_path / "t.json").read_bytes().replace(b'"text":"plain"', b'"text":"html"', 1)
    )
    for name in ("t.json", "peer.json"):
        file = written(logtree.read(tmp_path / name), tmp_path)
        with browser.page() as page:
            seen = visit(browser, page, file)
            assert not seen.anything(), (name, seen)
            assert page.evaluate(STRUCTURE)["bad"] == []


CONTROLS = {
    "a script": f"<script>{hostile.RUN}</script>",
    "a handler": f"<img src=data:, onerror={hostile.RUN}>",
    "a handler that needs the mouse": f"<p onmouseover={hostile.RUN}>x</p>",
    "a link that needs a click": f"<a href='javascript:{hostile.RUN}'>x</a>",
    "a dialog": "<script>alert('here')</script>",
    "an image": f"<img src={hostile.AWAY}.png>",
    "a style": f"<style>body{{background:url({hostile.AWAY})}}</style>",
    "a prefetch": f"<link rel=prefetch href={hostile.AWAY}>",
    "a window": "<a href='about:blank#pwned' target=_blank rel=noopener>x</a>",
}


@pytest.mark.parametrize("control", CONTROLS)
def test_a_page_that_does_harm_is_caught(browser: Browser, tmp_path: Path, control: str) -> None:
    """Without this, the tests above could pass because they look at nothing."""
    file = tmp_path / "control.html"
    file.write_text(f"<!doctype html><title>x</title><body>{CONTROLS[control]}</body>")
    with browser.page() as page:
        seen = visit(browser, page, file)
        assert seen.anything()
        if hostile.AWAY in CONTROLS[control]:
            assert seen.requests and all(url.startswith(hostile.AWAY) for url in seen.requests)


@pytest.mark.parametrize("control", [name for name in CONTROLS if name != "a window"])
def test_the_policy_stops_what_an_escaping_mistake_would_let_through(
    browser: Browser, tmp_path: Path, control: str
) -> None:
    with logtree.trace("t") as trace:
        logtree.text("HERE")
    file = tmp_path / "leaky.html"
    file.write_bytes(render(trace).replace(b"HERE", CONTROLS[control].encode()))
    with browser.page() as page:
        seen = visit(browser, page, file)
        assert not (seen.ran or seen.dialogs or seen.connections), seen
        assert "Content Security Policy" in " ".join(page.complaints)
