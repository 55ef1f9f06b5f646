"""The tree itself: nodes, sections with their headings and ids, and the place where log calls append.

A tree never nests deeper than `MAX_DEPTH` scopes however deep the code that logs does, so every JSON parser,
every recursive reader and every browser can open the file.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from rollbook.records.logtree.values import to_text
from rollbook.records.plain import utc_now

MAX_DEPTH = 100
HEADINGS = frozenset({"h1", "h2", "h3", "h4", "h5", "h6"})
_HEADING_OF_LEVEL = ("h1", "h2", "h3", "h4", "h5", "h6")
DATA_NAME = re.compile(r"data-[a-z0-9][a-z0-9-]*")


class Node(msgspec.Struct, gc=False, omit_defaults=True):
    """One element: `children` are text or nodes, `data` is typed content a program can use."""

    # Untracked by the garbage collector: a tree has no cycles, and a big one would cost it dearly.
    tag: str
    attrs: dict[str, str]
    children: list[Node | str]
    data: dict[str, Any] | None = None

    def __bool__(self) -> bool:
        return True

    @property
    def title(self) -> str | None:
        """The text of the heading a section begins with."""
        first = self.children[0] if self.children else None
        if not isinstance(first, Node) or first.tag not in HEADINGS:
            return None
        return "".join([child for child in first.children if isinstance(child, str)])

    def identify(self, **ids: object) -> None:
        """Add ids to a section, open or closed."""
        self.attrs.update(id_attrs(ids))


class _Nowhere(Node):
    """Stands in for the section while nobody listens: falsy, and nothing sticks to it."""

    def __bool__(self) -> bool:
        return False

    def __getattribute__(self, name: str) -> Any:
        if name == "children":
            return []
        if name == "attrs":
            return {}
        return super().__getattribute__(name)


NOWHERE = _Nowhere("section", {}, [])


class Place(NamedTuple):
    """Where log calls append, and how many scopes deep that is."""

    node: Node
    depth: int


here: ContextVar[Place | None] = ContextVar("rollbook_logtree_here", default=None)


class Trace:
    """A whole tree with its title and the time it began."""

    __slots__ = ("path", "root", "started_at", "title")

    def __init__(
        self, title: str, root: Node | None = None, started_at: str | None = None, path: str | None = None
    ) -> None:
        self.title = title
        self.root = Node("body", {}, []) if root is None else root
        self.started_at = utc_now() if started_at is None else started_at
        self.path = path  # of the page that belongs to it


def open_section(parent: Place, title: object, ids: dict[str, object]) -> tuple[Node, Place]:
    """A section at the end of the parent, and where to log while it is open.

    Too deep, it is a line of text instead, and what is logged in it follows that line.
    """
    if parent.depth >= MAX_DEPTH:
        line = Node("p", id_attrs(ids), [to_text(title)])
        parent.node.children.append(line)
        return line, parent
    node = new_section(title, ids, _level(parent.node) + 1)
    parent.node.children.append(node)
    return node, Place(node, parent.depth + 1)


def new_section(title: object, ids: dict[str, object], level: int = 1) -> Node:
    return Node("section", id_attrs(ids), [Node(_heading(level), {}, [to_text(title)])])


def id_attrs(ids: dict[str, object]) -> dict[str, str]:
    """`group_idx=3` as the attribute `data-group-idx: "3"`; an id of None is no id."""
    return {_id_name(name): to_text(value) for name, value in ids.items() if value is not None}


@lru_cache(maxsize=256)
def _id_name(name: str) -> str:
    # Keyword names may come from a dictionary of anything; only what is safe inside a tag survives.
    return "data-" + (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "id")


def _heading(level: int) -> str:
    return _HEADING_OF_LEVEL[level] if level < 6 else "h6"


def _level(section: Node) -> int:
    """How many sections deep this one is, as its heading says; 5 stands for anything deeper."""
    first = section.children[0] if section.children else None
    if section.tag != "section" or not isinstance(first, Node) or first.tag not in HEADINGS:
        return 0
    return int(first.tag[1]) - 1
