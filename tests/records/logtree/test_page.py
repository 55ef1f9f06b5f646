"""Any text at all: exact in the JSON, exactly once in the page, and never anything but text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollbook.records import logtree
from rollbook.records.logtree import Node, Trace
from rollbook.records.logtree.log import exception_node
from rollbook.records.logtree.page import render
from rollbook.records.logtree.tree import here

TAGS = frozenset(
    re.findall(
        r"\w+",
        "html head meta title style body a header button svg path circle h1 h2 h3 h4 h5 h6 div input kbd "
        "output nav main p section details summary small b i table caption thead tbody tr th td img script",
    )
)
ATTRIBUTES = frozenset(
    re.findall(
        r"\S+",
        "lang charset http-equiv content name class href id type aria-label aria-hidden title viewbox width "
        "height d cx cy r fill role placeholder autocomplete spellcheck for tabindex open scope alt src",
    )
)
VOID = frozenset({"meta", "input", "img", "path", "circle"})
# Characters that no text below holds, so that its two ends are found again.
OPEN, CLOSE = "\u27e6", "\u27e7"


class Read(HTMLParser):
    """The text between the tags of a page, with every visible mark turned back into what it stands for."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.main = self.title = ""
        self.attributes: list[tuple[str, str, str | None]] = []
        self.tags: set[str] = set()
        self.policy = ""
        self._stack: list[str] = []
        self._mark: str | None = None
        self.feed(html)
        self.close()
        assert self._stack == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        fields = dict(attrs)
        self.tags.add(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if fields.get("http-equiv") == "Content-Security-Policy":
            self.policy = fields["content"] or ""
        if tag == "i" and fields.get("class") == "c":
            self._mark = chr(int((fields["title"] or "")[2:], 16))
        if tag not in VOID:
            self._stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self._stack.pop() == tag
        if tag == "i" and self._mark is not None:
            self._add(self._mark)
            self._mark = None

    def handle_data(self, data: str) -> None:
        if self._mark is None:
            self._add(data)

    def _add(self, data: str) -> None:
        if "main" in self._stack:
            self.main += data
        elif self._stack and self._stack[-1] == "title":
            self.title += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data!r}")


def say_call(text: str, **fields: Any) -> None:
    call = {"id": "c1", "function": {"name": "f", "arguments": "1"}, **fields}
    logtree.conversation([{"role": "assistant", "content": text, "tool_calls": [call]}])


def say(**fields: Any) -> None:
    logtree.conversation([{"role": "user", "content": "x", **fields}])


def put(tag: str, *children: Node | str) -> None:
    """An element that only other writers make."""
    place = here.get()
    assert place is not None
    place.node.children.append(Node(tag, {}, list(children)))


def open_scope(title: str, **ids: object) -> None:
    with logtree.scope(title, **ids):
        pass


POSITIONS: dict[str, Callable[[str], None]] = {
    "text": logtree.text,
    "heading": lambda text: put("h3", text),
    "scope title": open_scope,
    "group title": lambda text: open_scope(text, group_idx=0),
    "trajectory title": lambda text: open_scope(text, traj_idx=0),
    "scope id": lambda text: open_scope("x", task_id=text),
    "details": lambda text: put("details", Node("summary", {}, ["x"]), Node("pre", {}, [text])),
    "summary": lambda text: put("details", Node("summary", {}, [text]), Node("pre", {}, ["x"])),
    "caption": lambda text: logtree.table([[1]], text),
    "column": lambda text: logtree.table([{text: 1}]),
    "cell": lambda text: logtree.table([{"a": text}]),
    "key": lambda text: logtree.table({text: 1}, columns=("key", "value")),
    "content": lambda text: say(content=text),
    "part": lambda text: say(content=[{"type": "text", "text": text}]),
    "reasoning": lambda text: say(reasoning_content=text),
    "thinking part": lambda text: say(content=[{"type": "thinking", "thinking": text}]),
    "role": lambda text: say(role=text),
    "name": lambda text: say(name=text),
    "refusal": lambda text: say(refusal=text),
    "tool name": lambda text: say_call("x", function={"name": text, "arguments": "1"}),
    "tool arguments": lambda text: say_call("x", function={"name": "f", "arguments": text}),
    "tool call id": lambda text: say_call("x", id=text),
    "tool answer id": lambda text: say(role="tool", tool_call_id=text),
    "image address": lambda text: say(content=[{"type": "image_url", "image_url": {"url": text}}]),
}

any_text = st.text(st.characters(exclude_characters=OPEN + CLOSE, exclude_categories=())).map(
    lambda text: OPEN + text + CLOSE
)
HTML_LIKE = st.lists(
    st.sampled_from(
        ["<", ">", "&", '"', "'", "</p>", "<script>", "&lt;", "&#13;", "\r\n", "\0", "\u202e", "-->", "x"]
    )
).map(lambda pieces: OPEN + "".join(pieces) + CLOSE)


def without_surrogates(text: str) -> str:
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def strings_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for item in value for text in strings_in(item)]
    if isinstance(value, dict):
        return [*value, *(text for item in value.values() for text in strings_in(item))]
    return []


def check_tags(page: Read) -> None:
    assert page.tags <= TAGS
    for tag, name, value in page.attributes:
        assert name in ATTRIBUTES or re.fullmatch(r"data-[a-z0-9][a-z0-9-]*", name), (tag, name)
        if name == "href":
            assert value is not None and value.startswith("#")
        if name == "src":
            assert value is not None and value.startswith("data:image/")


@pytest.mark.parametrize("position", list(POSITIONS))
@settings(max_examples=30)
@given(text=any_text | HTML_LIKE)
@example(text=OPEN + "&amp;lt;\r\n\r</p><!--" + CLOSE)
def test_any_text_is_exact_in_the_json_and_once_in_the_page(position: str, text: str) -> None:
    with logtree.trace("t") as trace:
        POSITIONS[position](text)
    expected = without_surrogates(text)
    assert strings_in(json.loads(logtree.encode(trace))["root"]).count(expected) == 1
    page = Read(render(trace).decode())
    assert page.main.count(expected) == 1
    assert page.main.count(OPEN) == 1
    check_tags(page)


@given(text=any_text | HTML_LIKE)
def test_the_title_is_text(text: str) -> None:
    trace = Trace(text, started_at=text)
    page = Read(render(trace).decode())
    hidden = re.compile(r"\[U\+([0-9A-F]{4,6})\]")
    assert hidden.sub("", page.title).startswith(OPEN) and page.title.endswith(CLOSE)
    assert json.loads(logtree.encode(trace))["title"] == without_surrogates(text)
    check_tags(page)


@given(text=any_text | HTML_LIKE)
def test_an_exception_shows_its_message(text: str) -> None:
    with logtree.trace("t") as trace:
        trace.root.children.append(exception_node(ValueError(text)))
    page = Read(render(trace).decode())
    assert without_surrogates(text) in page.main
    check_tags(page)


@given(value=any_text | HTML_LIKE)
def test_an_id_is_one_attribute_with_exactly_its_value(value: str) -> None:
    with logtree.trace("t") as trace:
        open_scope("x", group_idx=value, task_id=value)
        logtree.conversation([], traj_idx=value)
    page = Read(render(trace).decode())
    expected = without_surrogates(value).replace("\0", "\ufffd")
    found = [(name, seen) for _, name, seen in page.attributes if name.startswith("data-")]
    assert found == [("data-group-idx", expected), ("data-task-id", expected), ("data-traj-idx", expected)]
    check_tags(page)


@given(st.dictionaries(st.text(), st.text()), st.text(), st.text())
def test_tags_and_attribute_names_of_a_tree_never_reach_the_page(
    attrs: dict[str, str], tag: str, text: str
) -> None:
    hostile = {
        **attrs,
        "onclick": "x",
        'data-x" onclick="': "x",
        "data-x onclick": "x",
        "style": "x",
        "id": "lt-main",
    }
    inner = Node(tag, hostile, [text, Node("script", hostile, ["alert(1)"]), Node("p", hostile, [text])])
    section = Node("section", hostile, [Node("h2", hostile, [text]), inner])
    typed = Node(tag, hostile, [], {"type": text, **attrs})
    page = Read(render(Trace("t", Node("body", hostile, [section, typed, inner]))).decode())
    check_tags(page)
    assert sum(tag == "script" for tag, _, _ in page.attributes) == 0
    identities = [value for _, name, value in page.attributes if name == "id"]
    assert len(identities) == len(set(identities))


def test_characters_that_mislead_are_shown_by_name_and_absent() -> None:
    with logtree.trace("t") as trace:
        logtree.text("\x1b[31m \u202edesrever\u202c zero\u200bwidth nul\0 \u2066x\u2069 \ufeff \U000e0041")
    html = render(trace).decode()
    for char in "\x1b\u202e\u202c\u200b\0\u2066\u2069\ufeff\U000e0041":
        assert char not in html
        assert f'title="U+{ord(char):04X}"' in html
    assert ">ESC<" in html and ">RLO<" in html


@pytest.mark.parametrize("text", ["👨‍👩‍👧", "می‌خواهم", "क्‍ष", "❤️ 1️⃣", "naïve — “quoted”"])
def test_ordinary_text_of_the_world_is_left_alone(text: str) -> None:
    with logtree.trace("t") as trace:
        logtree.text(text)
    assert f"<p>{text}</p>" in render(trace).decode()


def test_the_policy_allows_the_pages_own_style_and_script_and_nothing_else() -> None:
    with logtree.trace("t") as trace:
        pass
    policy = dict(rule.strip().split(" ", 1) for rule in Read(render(trace).decode()).policy.split(";"))
    assert policy["default-src"] == "'none'"
    assert re.fullmatch(r"'sha256-[\w+/]+='", policy["script-src"])
    assert re.fullmatch(r"'sha256-[\w+/]+='", policy["style-src"])
    assert (policy["img-src"], policy["base-uri"], policy["form-action"]) == ("data:", "'none'", "'none'")


def test_calls_link_to_their_results_and_images_are_shown_from_the_file_only() -> None:
    pixel = "data:image/png;base64,iVBORw0KGgo="
    with logtree.trace("t") as trace:
        logtree.conversation(
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "c9", "function": {"name": "look", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "c9", "content": "seen"},
                {"role": "user", "content": [{"type": "image", "image": pixel}]},
                {"role": "user", "content": [{"type": "image", "image": "https://example.org/x.png"}]},
                {"role": "user", "content": [{"type": "image", "image": "data:image/svg+xml;base64,AA=="}]},
            ]
        )
    html = render(trace).decode()
    assert '<div class="tc" id="k1"><b>look</b>' in html
    assert 'answers <a href="#k1">look</a>' in html
    assert [value for _, name, value in Read(html).attributes if name == "src"] == [pixel]


def test_groups_and_trajectories_fold_and_links_stay_the_same() -> None:
    def build() -> str:
        with logtree.trace("t") as trace:
            trace.started_at = "2026-01-01T00:00:00Z"
            for group in range(2):
                with logtree.scope(f"g{group}", group_idx=group):
                    for member in range(2):
                        with logtree.scope(f"r{member}", traj_idx=member), logtree.scope("turn", turn=0):
                            logtree.text("x")
        return render(trace).decode()

    html = build()
    assert html == build()
    assert re.findall(r'<details class="s \w" id="([^"]+)"', html) == [
        "g0",
        "g0.t0",
        "g0.t1",
        "g1",
        "g1.t0",
        "g1.t1",
    ]
    assert html.count('id="g1.t1.n0"') == 1
    assert "2 groups · 4 trajectories" in html
