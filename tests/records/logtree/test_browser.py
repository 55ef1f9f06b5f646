"""The page in a reader's hands: find, fold, colours, outline and keys, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import browser as browser_module
from browser import Browser, Page
from rollbook.records import logtree
from rollbook.records.logtree.log import exception_node

GROUPS, MEMBERS = 6, 4
COUNT = "document.getElementById('lt-count').textContent"
CLOSED = "document.querySelectorAll('#lt-main details:not([open])').length"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with logtree.trace("Iteration 3") as trace:
        for group in range(GROUPS):
            with logtree.scope(f"Group {group}", group_idx=group):
                for member in range(MEMBERS):
                    with logtree.scope(f"Trajectory {member} · reward 0.5", traj_idx=member):
                        answer = f"needle (1+{member})? " + "hay " * 400
                        logtree.conversation(
                            [
                                {"role": "user", "content": "question"},
                                {
                                    "role": "assistant",
                                    "content": answer,
                                    "reasoning_content": f"why {group}.{member}",
                                },
                            ]
                        )
                logtree.table([{"wide column " * 3 + str(column): 1 for column in range(20)}])
        trace.root.children.append(exception_node(ValueError("went wrong")))
    path = tmp_path_factory.mktemp("page") / "train.html"
    logtree.write(trace, html=path)
    return path


@pytest.fixture
def page(browser: Browser, file: Path) -> Iterator[Page]:
    with browser.page() as opened:
        opened.open(file.as_uri())
        yield opened
        assert opened.complaints == []


def is_open(page: Page, anchor: str) -> bool:
    return bool(page.evaluate(f"document.getElementById('{anchor}').open"))


def find(page: Page, text: str) -> None:
    page.press("/")
    assert page.evaluate("document.activeElement.id") == "lt-find"
    page.type(text)


def test_find_counts_goes_on_and_back_and_opens_what_is_closed(page: Page) -> None:
    assert not is_open(page, "g0.t1")
    find(page, "NEEDLE (1+")
    page.wait_until(f"{COUNT} === '1 of {GROUPS * MEMBERS}'")
    page.press("Enter")
    assert page.evaluate(COUNT) == f"2 of {GROUPS * MEMBERS}"
    assert is_open(page, "g0.t1")
    page.press("Enter", shift=True)
    page.press("Enter", shift=True)
    assert page.evaluate(COUNT) == f"{GROUPS * MEMBERS} of {GROUPS * MEMBERS}"
    last = f"g{GROUPS - 1}.t{MEMBERS - 1}"
    assert is_open(page, f"g{GROUPS - 1}") and is_open(page, last)
    box = f"document.getElementById('{last}').getBoundingClientRect()"
    page.wait_until(f"{box}.bottom > 0 && {box}.top < innerHeight")
    page.click("#lt-next")
    assert page.evaluate(COUNT) == f"1 of {GROUPS * MEMBERS}"
    assert not is_open(page, last), "what find opened on its way is closed again"


def test_find_looks_into_closed_reasoning_and_says_when_there_is_nothing(page: Page) -> None:
    find(page, "why 5.2")
    page.wait_until(f"{COUNT} === '1 of 1'")
    assert page.evaluate("document.getElementById('g5.t2').querySelector('details.r').open")
    page.type(" nowhere")
    page.wait_until(f"{COUNT} === 'no match'")
    page.press("Escape")
    assert page.evaluate("document.getElementById('lt-find').value + document.activeElement.id") == "lt-main"
    assert page.evaluate(COUNT) == ""


def test_everything_opens_and_closes_at_once(page: Page) -> None:
    label = "document.getElementById('lt-all').textContent"
    assert page.evaluate(label) == "Expand all" and page.evaluate(CLOSED) > 0
    page.click("#lt-all")
    assert (page.evaluate(label), page.evaluate(CLOSED)) == ("Collapse all", 0)
    page.press("e")
    assert page.evaluate(label) == "Expand all"
    assert page.evaluate("document.querySelectorAll('#lt-main details[open]').length") == 0


def test_colours_follow_the_system_until_told_and_are_remembered(page: Page, file: Path) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    page.prefer("light")
    light = page.evaluate(background)
    page.prefer("dark")
    dark = page.evaluate(background)
    assert light != dark
    page.click("#lt-theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.prefer("light")
    assert page.evaluate(background) == dark
    page.open(file.as_uri())
    assert page.evaluate(background) == dark
    page.click("#lt-theme")
    page.prefer("dark")
    assert page.evaluate(background) == light
    page.click("#lt-theme")
    assert page.evaluate(background) == dark


def test_the_outline_leads_to_a_place_and_shows_rewards(page: Page) -> None:
    titles = (
        "[...document.querySelectorAll('#lt-outline > ul > li > div a > span')].map(el => el.textContent)"
    )
    assert page.evaluate(titles) == [*(f"Group {group}" for group in range(GROUPS)), "ValueError went wrong"]
    page.wait_until("document.querySelector('#lt-outline a[href=\"#g0.t1\"] > b')?.textContent === '0.5'")
    page.click("#lt-outline a[href='#g4']")
    page.wait_until("document.querySelector('#lt-outline .now a')?.getAttribute('href').startsWith('#g4')")
    assert page.evaluate("location.hash") == "#g4"


def test_keys_step_from_group_to_group(page: Page) -> None:
    seen = []
    for key in "jjk":
        page.press(key)
        seen.append(page.evaluate("location.hash"))
    assert seen in (["#g0", "#g1", "#g0"], ["#g1", "#g2", "#g1"])
    assert page.evaluate("document.activeElement.localName") == "summary"


def test_a_link_opens_the_place_it_names(browser: Browser, file: Path) -> None:
    with browser.page() as page:
        page.open(file.as_uri() + "#g5.t3")
        page.wait_until("document.getElementById('g5').open")
        assert page.evaluate("document.getElementById('g5.t3').getBoundingClientRect().top < innerHeight")
        page.open(file.as_uri() + "?again#%")
        assert page.complaints == []


@pytest.mark.parametrize("width", [1280, 900, 420])
def test_the_page_is_never_wider_than_the_window(browser: Browser, file: Path, width: int) -> None:
    with browser.page(width, 800) as page:
        page.open(file.as_uri())
        page.click("#lt-all")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_outline_of_a_narrow_window_opens_on_demand(browser: Browser, file: Path) -> None:
    shown = "getComputedStyle(document.getElementById('lt-outline')).display !== 'none'"
    with browser.page(420, 800) as page:
        page.open(file.as_uri())
        assert not page.evaluate(shown)
        page.click("#lt-menu")
        assert page.evaluate(shown)
        page.click("#lt-outline a[href='#g2']")
        assert not page.evaluate(shown)
        assert page.evaluate("location.hash") == "#g2"


def test_without_browser_and_node_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("ROLLBOOK_CHROMIUM", raising=False)
    monkeypatch.setattr(browser_module, "CACHE", tmp_path / "cache")
    with pytest.raises(RuntimeError, match="ROLLBOOK_CHROMIUM, or install Node"):
        browser_module.chromium()
