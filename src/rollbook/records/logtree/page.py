"""One offline HTML file from a tree: static, escaped once, nothing to fetch, nothing that can run.

The page's own style and script are allowed by hash and nothing else is, so even a mistake here could not
run what a model wrote. Tags and attribute names come from the fixed lists below, never from the tree. A
report of a thousand trajectories has to stay readable, so groups and trajectories fold.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from shutil import copyfileobj
from tempfile import SpooledTemporaryFile
from typing import Any

from rollbook.records.atomic import replacing
from rollbook.records.line_secrets import LineSecrets
from rollbook.records.logtree.escape import attribute, escape
from rollbook.records.logtree.messages import block, mono, pretty, render_messages
from rollbook.records.logtree.shell import Counts, foot, head
from rollbook.records.logtree.tree import DATA_NAME, HEADINGS, Node, Trace
from rollbook.records.logtree.values import to_text

_IN_MEMORY = 8 << 20  # of a page before it is written
_LONG_CELL = 40  # characters of text that get a column wide enough to be read
_INLINE = HEADINGS | {"p", "pre", "summary", "th", "td", "caption"}
_TABLE_PARTS = frozenset({"table", "thead", "tbody", "tr", "th", "td", "caption"})
_ANCHORED = re.compile(r"[0-9A-Za-z_-]{1,32}")
_TURN, _TRAJECTORY, _GROUP = "data-turn", "data-traj-idx", "data-group-idx"
_IN_HEADING = frozenset({_TURN, _TRAJECTORY, _GROUP})


def render(trace: Trace) -> bytes:
    body = _Body()
    for child in trace.root.children:
        body.add(child)
    return b"".join([head(trace, body.counts).encode(), body.take(), foot().encode()])


@contextmanager
def writing_page(path: Path, trace: Trace) -> Iterator[Callable[[Node | str], None]]:
    """A page that takes the children of the root one at a time; what was written does not stay in memory."""
    body = _Body()
    # The head, which counts the groups, is written last.
    with replacing(path) as file, SpooledTemporaryFile(_IN_MEMORY, dir=str(path.parent)) as spooled:

        def add(child: Node | str) -> None:
            body.add(child)
            spooled.write(body.take())

        yield add
        file.write(body.secrets.cleaned(head(trace, body.counts).encode()))
        spooled.seek(0)
        copyfileobj(spooled, file)
        file.write(foot().encode())


@dataclass(slots=True)
class _Frame:
    """An element whose children are being written."""

    children: Iterator[Node | str]
    closing: str
    inline: bool
    anchor: str
    ids: dict[str, str]
    sections: int = 0
    trajectories: int = 0


class _Body:
    def __init__(self) -> None:
        self.out: list[str] = []
        self.groups = 0
        self.groups_in_full = 0
        self.trajectories = 0
        self._anchors: dict[str, int] = {}  # how often each was asked for
        self._calls = (f"k{number}" for number in count(1))
        self.secrets = LineSecrets()
        self._root = _Frame(iter(()), "", False, "", {})
        self._stack: list[_Frame] = []
        self._seen: set[tuple[str, str]] = set()  # group and number of each trajectory

    @property
    def counts(self) -> Counts:
        return Counts(self.groups, self.groups_in_full, self.trajectories)

    def add(self, child: Node | str) -> None:
        """The next child of the root."""
        self._child(child, self._root)
        while self._stack:
            frame = self._stack[-1]
            for inner in frame.children:
                if self._child(inner, frame):
                    break
            else:
                self.out.append(frame.closing)
                self._stack.pop()

    def take(self) -> bytes:
        """What was written since the last call."""
        # Piece by piece: joined as text, one emoji would make all of it four bytes a character.
        taken = b"".join([piece.encode() for piece in self.out])
        self.out.clear()
        return self.secrets.cleaned(taken)

    def _child(self, child: Node | str, parent: _Frame) -> bool:
        """Write a child; true when it has children of its own that come first."""
        if isinstance(child, Node):
            return self._opened(child, parent)
        text = escape(to_text(child))
        self.out.append(text if parent.inline else f"<p>{text}</p>")
        return False

    def _opened(self, node: Node, parent: _Frame) -> bool:
        """Write a node; true when its children are still to come."""
        if node.data is not None:
            self._typed(node)
        elif node.tag == "section":
            self._section(node, parent)
            return True
        if not node.children:
            return False
        if node.tag == "details":
            opening, closing = f'<details class="d"{" open" if "open" in node.attrs else ""}>', "</details>"
        elif node.tag == "table":
            opening, closing = '<div class="t"><table>', "</table></div>"
        elif node.tag == "pre":
            opening, closing = '<p class="k">', "</p>"
        elif node.tag == "p" and any(isinstance(child, Node) for child in node.children):
            opening, closing = "", ""  # a paragraph cannot hold blocks
        elif node.tag in _INLINE or node.tag in _TABLE_PARTS:
            opening, closing = f"<{node.tag}>", f"</{node.tag}>"
        else:
            opening, closing = "", ""
        self.out.append(opening)
        inline = node.tag in _INLINE and bool(opening)
        self._stack.append(_Frame(iter(node.children), closing, inline, parent.anchor, parent.ids))
        return True

    def _typed(self, node: Node) -> None:
        data = node.data or {}
        kind = data.get("type")
        if kind == "conversation":
            self.out.append(f'<div class="v"{_data_attributes(node)}>')
            render_messages(data.get("messages"), self.out, self._calls)
            self.out.append("</div>")
        elif kind == "table":
            self.out.append(_table(data))
        elif kind == "exception":
            self.out.append(_exception(data, self._unique("x")))
        else:
            self.out.append(block(escape(to_text(kind)), mono(pretty(data))))

    def _section(self, node: Node, parent: _Frame) -> None:
        attrs, children = node.attrs, iter(node.children)
        parent.sections += 1
        anchor = self._anchor(node, parent)
        first = next(children, None)
        if isinstance(first, Node) and first.tag in HEADINGS:
            tag, title = first.tag, "".join([child for child in first.children if isinstance(child, str)])
        else:
            tag, title, children = "h6", "(untitled)", iter(node.children)
        data_attributes = _data_attributes(node)
        heading = f'<{tag}>{escape(title)}<a href="#{anchor}"></a></{tag}>{_chips(attrs, parent.ids, title)}'
        fold = None if _TURN in attrs else "j" if _TRAJECTORY in attrs else "g" if _GROUP in attrs else None
        if fold is None:
            opening, closing = f'<section id="{anchor}"{data_attributes}>', "</section>"
        else:
            is_open = " open" if self._starts_open(node, fold, parent) else ""
            opening = f'<details class="s {fold}" id="{anchor}"{data_attributes}{is_open}>'
            heading = f"<summary>{heading}</summary>"
            closing = "</details>"
        self.out.append(opening + heading)
        ids = {**parent.ids, **attrs} if attrs else parent.ids
        self._stack.append(_Frame(children, closing, False, anchor, ids))

    def _starts_open(self, node: Node, fold: str, parent: _Frame) -> bool:
        """Whether a fold starts open: the first group in full, and the first trajectory of each."""
        if fold == "g":
            self.groups += 1
            self.groups_in_full += not _has_details_only(node)
            return self.groups_in_full == 1 and not _has_details_only(node)
        # The log of a trajectory is a section of its own, beside that of its conversation.
        self._seen.add((parent.ids.get(_GROUP, parent.anchor), node.attrs[_TRAJECTORY]))
        self.trajectories = len(self._seen)
        parent.trajectories += 1
        return parent.trajectories == 1

    def _anchor(self, node: Node, parent: _Frame) -> str:
        """`g3.t1.n2`: the same place keeps its link when the page is written again."""
        own = f"s{parent.sections}"
        for name, letter in ((_TURN, "n"), (_TRAJECTORY, "t"), (_GROUP, "g")):
            if name in node.attrs and _ANCHORED.fullmatch(node.attrs[name]):
                own = letter + node.attrs[name]
                break
        return self._unique(f"{parent.anchor}.{own}" if parent.anchor else own)

    def _unique(self, anchor: str) -> str:
        while anchor in self._anchors:
            self._anchors[anchor] += 1
            anchor = f"{anchor}_{self._anchors[anchor]}"
        self._anchors[anchor] = 1
        return anchor


def _has_details_only(group: Node) -> bool:
    """Whether a group is told in tables alone, without the conversation of any trajectory."""
    contents = group.children[1:]
    return bool(contents) and all(
        isinstance(child, Node) and child.tag == "section" and _TRAJECTORY not in child.attrs
        for child in contents
    )


def _data_attributes(node: Node) -> str:
    if not node.attrs:
        return ""
    return "".join([attribute(name, to_text(value)) for name, value in node.attrs.items() if _is_data(name)])


@lru_cache(maxsize=256)
def _is_data(name: str) -> bool:
    return DATA_NAME.fullmatch(name) is not None


def _chips(attrs: dict[str, str], inherited: dict[str, str], title: str) -> str:
    """The ids that the heading does not already say, once on the outermost section that has them."""
    if attrs.keys() <= _IN_HEADING:
        return ""
    shown = [
        f"<small>{name[5:].replace('-', '_')} {escape(to_text(value))}</small>"
        for name, value in attrs.items()
        if name not in _IN_HEADING and inherited.get(name) != value and _is_data(name) and value not in title
    ]
    return "".join(shown)


def _table(data: dict[str, Any]) -> str:
    caption = data.get("caption")
    columns, rows = _list(data.get("columns")), _list(data.get("rows"))
    odd = {tuple(cell[:2]): to_text(cell[2]) for cell in _list(data.get("nonfinite")) if _is_place(cell)}
    pieces = ['<div class="t"><table>']
    if caption is not None:
        pieces.append(f"<caption>{escape(to_text(caption))}</caption>")
    pieces.append("<thead><tr>")
    for column, name in enumerate(columns):
        css = ' class="n"' if _is_numeric(rows, column) else ""
        pieces.append(f'<th scope="col"{css}>{escape(to_text(name))}</th>')
    pieces.append("</tr></thead><tbody>")
    for index, row in enumerate(rows):
        pieces.append("<tr>")
        pieces.extend(_cell(cell, odd.get((index, column))) for column, cell in enumerate(_list(row)))
        pieces.append("</tr>")
    pieces.append("</tbody></table></div>")
    return "".join(pieces)


def _is_numeric(rows: list[Any], column: int) -> bool:
    """Whether the first cell that holds anything holds a number."""
    for row in rows:
        if isinstance(row, list) and column < len(row) and row[column] is not None:
            return isinstance(row[column], (int, float)) and not isinstance(row[column], bool)
    return False


def _is_place(cell: object) -> bool:
    return isinstance(cell, list) and len(cell) == 3 and all(isinstance(index, int) for index in cell[:2])


def _cell(value: object, nonfinite: str | None) -> str:
    if nonfinite is not None:
        return f'<td class="n w">{escape(nonfinite)}</td>'
    if value is None:
        return '<td class="o">–</td>'
    if isinstance(value, bool):
        return f"<td>{json.dumps(value)}</td>"
    if isinstance(value, float):
        if not math.isfinite(value):
            return f'<td class="n w">{json.dumps(value)}</td>'
        return f'<td class="n">{value:.6g}</td>'
    if isinstance(value, int):
        return f'<td class="n">{escape(to_text(value))}</td>'
    text = pretty(value) if isinstance(value, (dict, list)) else to_text(value)
    css = ' class="l"' if len(text) > _LONG_CELL else ""
    return f"<td{css}>{escape(text)}</td>"


def _exception(data: dict[str, Any], anchor: str) -> str:
    name, message = to_text(data.get("exception", "exception")), to_text(data.get("message", ""))
    body = mono(to_text(data.get("traceback", "")))
    return (
        f'<details class="x" id="{anchor}" open><summary><b>{escape(name)}</b> {escape(message)}</summary>'
        f"{body}</details>"
    )


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
