"""The tree itself: nodes, sections with their headings and ids, and where the log currently stands.

A tree never nests deeper than `MAX_DEPTH` scopes however deep the code that logs does: a deeper section
becomes the next sibling and carries the ids of the sections it stands in. So every JSON parser, every
recursive reader and every browser can open the file.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import msgspec

from rollbook.errors import UsageError
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

    def retitle(self, title: object) -> None:
        """Change a section's heading, once the reward that belongs in it is known."""
        first = self.children[0] if self.children else None
        if isinstance(first, Node) and first.tag in HEADINGS:
            first.children[:] = [to_text(title)]

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


class Place:
    """Where log calls append: a node, the section it stands in, and how deep that is."""

    __slots__ = ("depth", "home", "node", "section")

    def __init__(self, node: Node, section: Node, depth: int, home: Place | None) -> None:
        self.node = node
        self.section = section
        self.depth = depth
        self.home = home  # where new scopes go once this one is too deep to hold them


here: ContextVar[Place | None] = ContextVar("rollbook_logtree_here", default=None)
open_trace: ContextVar[Trace | None] = ContextVar("rollbook_logtree_trace", default=None)


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

    def attach(self, node: Node) -> None:
        """Put a detached section where this trace stands: into the open scope, or at its end."""
        if not node:
            return
        place = here.get() if open_trace.get() is self else None
        parent, section = (self.root, self.root) if place is None else (place.node, place.section)
        _set_heading_levels(node, parent, _level(section))
        parent.children.append(node)

    def fit(self, node: Node) -> Node:
        """Give the headings of a loose section the levels they have at the end of this tree."""
        _set_heading_levels(node, self.root, _level(self.root))
        return node


def place_at_root(trace: Trace) -> Place:
    return Place(trace.root, trace.root, 0, None)


def place_under(section: Node) -> Place:
    return Place(section, section, 1, None)


def open_section(parent: Place, title: object, ids: dict[str, object]) -> Place:
    node = _section(title, ids, _level(parent.section) + 1)
    return _placed(parent, node, node)


def open_loose_section(title: object, ids: dict[str, object]) -> Place:
    """A section that belongs to no tree yet."""
    node = _section(title, ids, 1)
    return Place(node, node, 1, None)


def open_details(parent: Place, summary: object, is_open: bool) -> Place:
    children: list[Node | str] = [Node("summary", {}, [to_text(summary)])]
    node = Node("details", {"open": ""} if is_open else {}, children)
    return _placed(parent, node, parent.section)


def heading_in(place: Place, text: object) -> Node:
    return Node(_heading(_level(place.section) + 1), {}, [to_text(text)])


def id_attrs(ids: dict[str, object]) -> dict[str, str]:
    """`group_idx=3` as the attribute `data-group-idx: "3"`; an id of None is no id."""
    return {_id_name(name): to_text(value) for name, value in ids.items() if value is not None}


@lru_cache(maxsize=256)
def _id_name(name: str) -> str:
    # Keyword names may come from a dictionary of anything; only what is safe inside a tag survives.
    return "data-" + (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "id")


def _section(title: object, ids: dict[str, object], level: int) -> Node:
    return Node("section", id_attrs(ids), [Node(_heading(level), {}, [to_text(title)])])


def _heading(level: int) -> str:
    return _HEADING_OF_LEVEL[level] if level < 6 else "h6"


def _level(section: Node) -> int:
    """How many sections deep this one is, as its heading says; 5 stands for anything deeper."""
    first = section.children[0] if section.children else None
    if section.tag != "section" or not isinstance(first, Node) or first.tag not in HEADINGS:
        return 0
    return int(first.tag[1]) - 1


def _placed(parent: Place, node: Node, section: Node) -> Place:
    """Append a new scope to its parent, or next to a parent that is already too deep."""
    if parent.home is None:
        parent.node.children.append(node)
        depth = parent.depth + 1
        return Place(node, section, depth, parent if depth >= MAX_DEPTH else None)
    inherited = {name: value for name, value in parent.node.attrs.items() if name.startswith("data-")}
    node.attrs = inherited | node.attrs
    parent.home.node.children.append(node)
    return Place(node, section, parent.depth, parent.home)


def _set_heading_levels(node: Node, parent: Node, level: int) -> None:
    """Give every heading below `node` the level it has inside `parent`, itself `level` sections deep."""
    titles: list[tuple[Node, int]] = []
    pending = [(node, level)]
    while pending:
        current, outside = pending.pop()
        if current is parent:
            raise UsageError("a section cannot hold itself: attach it after its `with` block has ended")
        inside = outside + (current.tag == "section")
        for index, child in enumerate(current.children):
            if isinstance(child, Node):
                if child.tag in HEADINGS:
                    is_title = index == 0 and current.tag == "section"
                    titles.append((child, inside if is_title else inside + 1))
                else:
                    pending.append((child, inside))
    for heading, heading_level in titles:
        heading.tag = _heading(heading_level)
