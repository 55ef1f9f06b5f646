"""The page in a real browser: find, folding, colours, outline and keys do what they say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import Browser, Page
from records.logtree import hostile
from rollbook.records import logtree
from rollbook.records.logtree.log import exception_node
from rollbook.records.logtree.page import render

GROUPS, TRAJECTORIES, TURNS = 6, 3, 2
COUNT = "document.getElementById('lt-count').textContent"
NEEDLE = "needle-in-a-reasoning-block"


def sample() -> logtree.Trace:
    with logtree.trace("Iteration 3") as trace:
        for group in range(GROUPS):
            with logtree.scope(f"Group {group} · mean reward 0.{group}", group_idx=group):
                for trajectory in range(TRAJECTORIES):
                    with logtree.scope(f"Trajectory {trajectory}", group_idx=group, traj_idx=trajectory):
                        for turn in range(TURNS):
                            with logtree.scope(f"Turn {turn}", turn=turn):
                                logtree.conversation(messages(group, trajectory, turn))
    return trace


def messages(group: int, trajectory: int, turn: int) -> list[dict[str, Any]]:
    hidden = NEEDLE if (group, trajectory, turn) == (4, 2, 1) else "thinking"
    said = f"answer {group}.{trajectory}.{turn} " + "words and more words " * 60
    return [
        {"role": "user", "content": "a question"},
        {"role": "assistant", "reasoning": hidden, "content": said},
    ]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "train.html"
    logtree.write(sample(), html=path)
    return path


@pytest.fixture
def page(browser: Browser, file: Path) -> Iterator[Page]:
    with browser.page() as opened:
        opened.open(file.as_uri())
        yield opened
        assert opened.complaints == []


def find(page: Page, text: str) -> None:
    page.press("/")
    page.type(text)
    page.wait_until(f"/ of |no match/.test({COUNT}) && !{COUNT}.includes('…')")


def open_sections(page: Page) -> list[str]:
    return list(
        page.evaluate("[...document.querySelectorAll('#lt-main details.s[open]')].map((el) => el.id)")
    )


def marked_text(page: Page) -> Any:
    return page.evaluate("[...CSS.highlights.get('find-now')].map((range) => range.toString())[0]")


def is_in_view(page: Page) -> bool:
    spot = page.evaluate(
        "(() => { const box = [...CSS.highlights.get('find-now')][0].getBoundingClientRect();"
        " return [box.top, box.bottom, box.height, innerHeight]; })()"
    )
    return bool(spot[0] > 48 and spot[1] <= spot[3] and spot[2] > 0)


def test_only_the_first_group_and_trajectory_start_open(page: Page) -> None:
    shown = (
        "[...document.querySelectorAll('#lt-main details.s')].filter((el) => el.checkVisibility() && el.open)"
    )
    assert page.evaluate(f"{shown}.map((el) => el.id)") == ["g0", "g0.t0"]


def test_find_opens_what_hides_a_match_and_closes_it_again(page: Page) -> None:
    assert "g4" not in open_sections(page)
    find(page, NEEDLE.upper())
    assert page.evaluate(COUNT) == "1 of 1"
    assert marked_text(page) == NEEDLE
    assert {"g4", "g4.t2"} <= set(open_sections(page))
    page.wait_until("[...CSS.highlights.get('find-now')][0].getBoundingClientRect().height > 0")
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert is_in_view(page)
    page.press("Escape")
    page.wait_until(f"{COUNT} === ''")
    find(page, "answer 0.0.1")
    assert "g4" not in open_sections(page)


def test_find_counts_and_walks_both_ways_around(page: Page) -> None:
    total = GROUPS * TRAJECTORIES * TURNS
    find(page, "answer")
    assert page.evaluate(COUNT) == f"1 of {total}"
    page.press("Enter")
    assert page.evaluate(COUNT) == f"2 of {total}"
    page.press("Enter", shift=True)
    page.press("Enter", shift=True)
    assert page.evaluate(COUNT) == f"{total} of {total}"
    page.click("#lt-next")
    assert page.evaluate(COUNT) == f"1 of {total}"
    page.click("#lt-previous")
    assert page.evaluate(COUNT) == f"{total} of {total}"
    assert page.evaluate("CSS.highlights.get('find').size") == total


@pytest.mark.parametrize("query", [".*", "(", "[a", "\\", "no such text", "a+"])
def test_a_query_is_text_and_not_a_pattern(page: Page, query: str) -> None:
    find(page, query)
    assert page.evaluate(COUNT) == "no match"


def test_everything_folds_and_unfolds(page: Page) -> None:
    closed = "document.querySelectorAll('#lt-main details:not([open])').length"
    total = page.evaluate("document.querySelectorAll('#lt-main details').length")
    label = "document.getElementById('lt-all').textContent"
    assert total == GROUPS * (1 + TRAJECTORIES * (1 + TURNS))
    page.press("e")
    assert (page.evaluate(closed), page.evaluate(label)) == (0, "Collapse all")
    page.click("#lt-all")
    assert (page.evaluate(closed), page.evaluate(label)) == (total, "Expand all")
    page.click("#g2 > summary")
    assert page.evaluate("document.getElementById('g2').open")


def test_colours_follow_the_system_until_they_are_chosen(page: Page) -> None:
    def darkness() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    page.prefer("light")
    light = darkness()
    page.prefer("dark")
    dark = darkness()
    assert light != dark
    page.click("#lt-theme")
    page.prefer("light")
    assert darkness() == dark
    page.click("#lt-theme")
    page.prefer("dark")
    assert darkness() == light
    assert "light" in page.evaluate("document.getElementById('lt-theme').getAttribute('aria-label')")
    page.click("#lt-theme")
    assert darkness() == dark


def test_keys_walk_from_group_to_group(page: Page) -> None:
    for expected in ("#g0", "#g1", "#g2"):
        page.press("j")
        assert page.evaluate("location.hash") == expected
    assert page.evaluate("document.getElementById('g2').open")
    page.press("k")
    assert page.evaluate("location.hash") == "#g1"
    find(page, "jke")
    assert page.evaluate("document.getElementById('lt-find').value") == "jke"
    assert page.evaluate("location.hash") == "#g1"


def test_the_outline_names_rewards_opens_lazily_and_follows(page: Page) -> None:
    rows = (
        "[...document.querySelectorAll('#lt-outline > ul > li > div a')].map((a) => a.innerText.split('\\n'))"
    )
    assert page.evaluate(rows) == [[f"Group {group}", f"0.{group}"] for group in range(GROUPS)]
    links = "document.querySelectorAll('#lt-outline a').length"
    assert page.evaluate(links) == GROUPS + TRAJECTORIES, "only the group the reader is in has its entries"
    page.click("#lt-outline > ul > li:nth-child(6) button")
    assert page.evaluate(links) == GROUPS + 2 * TRAJECTORIES
    page.click("#lt-outline a[href='#g5.t1']")
    assert page.evaluate("location.hash") == "#g5.t1"
    assert {"g5", "g5.t1"} <= set(open_sections(page))
    page.wait_until("document.querySelector('#lt-outline .now a').getAttribute('href') === '#g5.t1'")
    assert page.evaluate("document.querySelectorAll('#lt-outline [aria-current]').length") == 1


def test_a_permalink_opens_the_place_it_names(browser: Browser, file: Path) -> None:
    with browser.page() as page:
        page.open(file.as_uri() + "#g3.t2.n1")
        assert {"g3", "g3.t2"} <= set(open_sections(page))
        spot = page.evaluate("document.getElementById('g3.t2.n1').getBoundingClientRect().top")
        assert 0 <= spot < 800
        own = page.evaluate("document.querySelector('#g3\\\\.t2\\\\.n1 > h4 > a').getAttribute('href')")
        assert own == "#g3.t2.n1"


def test_a_narrow_window_has_the_outline_as_a_drawer(browser: Browser, file: Path) -> None:
    with browser.page(420, 800) as page:
        page.open(file.as_uri())
        visible = "document.getElementById('lt-outline').checkVisibility()"
        assert not page.evaluate(visible)
        page.click("#lt-menu")
        assert page.evaluate(visible)
        page.click("#lt-outline a[href='#g1']")
        assert not page.evaluate(visible)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing may stick out"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(browser: Browser, tmp_path: Path, scheme: str) -> None:
    with logtree.trace("t") as trace:
        with logtree.scope("Group", group_idx=0, task_id="a"):
            roles = ("system", "user", "assistant", "tool", "somebody")
            logtree.conversation([{"role": role, "content": "x\x1b", "name": "n"} for role in roles])
            logtree.conversation(
                [{"role": "assistant", "reasoning": "why", "tool_calls": [{"id": "1", "name": "f"}]}]
            )
            logtree.table([{"a": 1, "b": float("nan"), "c": None}], caption="c")
        trace.root.children.append(exception_node(ValueError("x")))
    file = tmp_path / "t.html"
    logtree.write(trace, html=file)
    with browser.page() as page:
        page.prefer(scheme)
        page.open(file.as_uri())
        page.press("e")
        assert page.evaluate(CONTRAST) == []


CONTRAST = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (el) => {
    for (; el; el = el.parentElement) {
      const colour = rgb(getComputedStyle(el).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  };
  const weak = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const el = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !el.checkVisibility() || el.localName === "script") continue;
    const [a, b] = [light(rgb(getComputedStyle(el).color)), light(behind(el))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) weak.push([el.outerHTML.slice(0, 80), (a + 0.05) / (b + 0.05)]);
  }
  return weak;
})()"""


# ---- Escaping has to hold by itself: the policy is the second line, not the first.


def test_nothing_hostile_runs_even_without_the_policy(browser: Browser, tmp_path: Path) -> None:
    with logtree.trace(hostile.STRINGS[0]) as trace:
        for text in hostile.STRINGS:
            trace.root.children += hostile.tree_of(text).root.children
    file = tmp_path / "all.html"
    logtree.write(trace, html=file)
    asked = browser.proxy.mark()
    with browser.page() as page:
        page.call("Page.setBypassCSP", enabled=True)
        page.open(file.as_uri())
        page.press("e")
        page.evaluate("new Promise((done) => setTimeout(done, 300))")
        assert page.evaluate("window.__pwned") is None
        assert page.dialogs == []
        assert [url for url in page.requests if not url.startswith((file.as_uri(), "data:image/"))] == []
        assert page.evaluate("document.scripts.length") == 1
    assert browser.proxy.asked_since(asked) == []


def test_the_policy_really_is_off_in_the_test_above(browser: Browser, tmp_path: Path) -> None:
    with logtree.trace("t") as trace:
        logtree.text("HERE")
    script = f"<script>{hostile.RUN};fetch({json.dumps(hostile.AWAY)}).catch(() => 0)</script>".encode()
    file = tmp_path / "leaky.html"
    file.write_bytes(render(trace).replace(b"HERE", script))
    for bypass in (False, True):
        with browser.page() as page:
            page.call("Page.setBypassCSP", enabled=bypass)
            page.open(file.as_uri())
            assert page.evaluate("window.__pwned") == (1 if bypass else None)
            assert any("attacker" in url for url in page.requests) is bypass
