"""The calls that library code makes, whether or not anybody listens.

Without an open trace each of them is one `ContextVar.get` and returns. With one, they append to the scope
that is open in the current task or thread. Tasks inherit the scope they were started in, so thousands of
concurrent rollouts write into one tree and never into each other's sections.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import Token
from typing import Any

from rollbook.records.logtree.tables import table_data
from rollbook.records.logtree.tree import (
    NOWHERE,
    Node,
    Place,
    Trace,
    here,
    id_attrs,
    new_section,
    open_section,
)
from rollbook.records.logtree.values import drained, to_plain, to_text
from rollbook.records.redact import redact_text


@contextmanager
def trace(title: object, /) -> Iterator[Trace]:
    """Start a tree. An exception that ends the block is recorded and raised again; no file is written."""
    tree = title if type(title) is Trace else Trace(to_text(title))
    place = here.set(Place(tree.root, 0))
    try:
        yield tree
    except BaseException as error:
        tree.root.children.append(exception_node(error))
        raise
    finally:
        _leave(place)


def section(title: object, /, **ids: object) -> Node:
    """A section that belongs to no tree yet; `under` logs into it, `write` takes it as one of `more`."""
    return new_section(title, ids)


@contextmanager
def under(node: Node, /) -> Iterator[None]:
    """Log below a section made earlier, whatever is open in this task or thread."""
    place = here.set(Place(node, 1) if node else None)
    try:
        yield
    finally:
        _leave(place)


class Scope:
    """A section, as a `with` block."""

    __slots__ = ("_ids", "_title", "_token")

    def __init__(self, title: object, ids: dict[str, object]) -> None:
        self._title, self._ids = title, ids
        self._token: Token[Place | None] | None = None

    def __enter__(self) -> Node:
        parent = here.get()
        if parent is None:
            self._token = None
            return NOWHERE
        node, place = open_section(parent, self._title, self._ids)
        self._token = here.set(place)
        return node

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _leave(self._token)


def scope(title: object, /, **ids: object) -> Scope:
    """A section with its heading; `group_idx=3` becomes the attribute `data-group-idx`."""
    return Scope(title, ids)


def text(value: object, /) -> None:
    place = here.get()
    if place is not None:
        place.node.children.append(Node("p", {}, [to_text(value)]))


def table(rows: object, /, caption: object = None, *, columns: Iterable[object] | None = None) -> None:
    """Rows as dicts (columns in first-seen order) or as lists with `columns`; numbers stay numbers."""
    place = here.get()
    if place is not None:
        place.node.children.append(Node("table", {}, [], table_data(rows, caption, columns)))


def conversation(messages: Iterable[object] | object, /, **ids: object) -> None:
    """Chat messages: dicts with `role` and `content`, tool calls, reasoning, images, or anything near it."""
    place = here.get()
    if place is not None:
        data = {"type": "conversation", "messages": _messages(messages)}
        place.node.children.append(Node("div", id_attrs(ids), [], data))


def _messages(messages: object) -> list[Any]:
    plain = to_plain(drained(messages))
    if plain is None:
        return []
    return plain if isinstance(plain, list) else [plain]


def exception_node(error: BaseException) -> Node:
    try:
        frames = "".join(traceback.format_exception(error))
    except Exception as failure:  # a traceback that cannot be formatted must not hide the error itself
        frames = f"(no traceback: {type(failure).__name__})"
    data = {
        "type": "exception",
        "exception": type(error).__qualname__,
        "message": redact_text(to_text(error)),
        "traceback": redact_text(frames),
    }
    return Node("div", {}, [], data)


def _leave(token: Token[Place | None]) -> None:
    # A block closed by the garbage collector or by another task ends in a context of its own, where there
    # is nothing to restore.
    try:
        here.reset(token)
    except ValueError:
        return
