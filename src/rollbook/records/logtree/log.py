"""The calls that library code makes, whether or not anybody listens.

Without an open trace each of them is one `ContextVar.get` and returns. With one, they append to the scope
that is open in the current task or thread. Tasks inherit the scope they were started in, so thousands of
concurrent rollouts write into one tree and never into each other's sections.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from rollbook.errors import UsageError
from rollbook.records.logtree.tables import table_data
from rollbook.records.logtree.tree import (
    NOWHERE,
    Node,
    Place,
    Trace,
    heading_in,
    here,
    id_attrs,
    open_details,
    open_loose_section,
    open_section,
    open_trace,
    place_at_root,
    place_under,
)
from rollbook.records.logtree.values import drained, to_plain, to_text
from rollbook.records.redact import redact_text

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@contextmanager
def trace(title: object, /) -> Iterator[Trace]:
    """Start a tree. An exception that ends the block is recorded and raised again; no file is written."""
    tree = title if type(title) is Trace else Trace(to_text(title))
    place, owner = here.set(place_at_root(tree)), open_trace.set(tree)
    try:
        yield tree
    except BaseException as error:
        tree.root.children.append(_exception_node(error))
        raise
    finally:
        _leave(here, place)
        _leave(open_trace, owner)


@contextmanager
def disabled() -> Iterator[None]:
    """Nothing logged inside the block is kept."""
    place = here.set(None)
    try:
        yield
    finally:
        _leave(here, place)


def section(title: object, /, **ids: object) -> Node:
    """A section that belongs to no tree yet; `under` logs into it, `trace.attach` keeps it."""
    return open_loose_section(title, ids).node


@contextmanager
def under(node: Node, /) -> Iterator[None]:
    """Log below a section made earlier, whatever is open in this task or thread."""
    place = here.set(place_under(node) if node else None)
    try:
        yield
    finally:
        _leave(here, place)


class Block:
    """A `with` block during which its node is the place where log calls append."""

    __slots__ = ("_ids", "_title", "_token")

    def __init__(self, title: object, ids: dict[str, object]) -> None:
        self._title, self._ids = title, ids
        self._token: Token[Place | None] | None = None

    def _opened(self, parent: Place) -> Place:
        return open_section(parent, self._title, self._ids)

    def __enter__(self) -> Node:
        parent = here.get()
        if parent is None:
            self._token = None
            return NOWHERE
        place = self._opened(parent)
        self._token = here.set(place)
        return place.node

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._token is not None:
            _leave(here, self._token)


class Scope(Block):
    """A section, as a `with` block or around a function."""

    __slots__ = ()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        title, ids = self._title, self._ids
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise UsageError(
                f"{function.__qualname__} is a generator: put `with logtree.scope(...)` inside it"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def in_scope(*args: P.args, **kwargs: P.kwargs) -> Any:
                with Scope(title, ids):
                    return await function(*args, **kwargs)

            return cast("Callable[P, R]", in_scope)

        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            with Scope(title, ids):
                return function(*args, **kwargs)

        return inside


class _Detached(Block):
    __slots__ = ()

    def _opened(self, parent: Place) -> Place:
        return open_loose_section(self._title, self._ids)


class _Details(Block):
    __slots__ = ("_is_open",)

    def __init__(self, summary: object, is_open: bool) -> None:
        super().__init__(summary, {})
        self._is_open = is_open

    def _opened(self, parent: Place) -> Place:
        return open_details(parent, self._title, self._is_open)


def scope(title: object, /, **ids: object) -> Scope:
    """A section with its heading; `group_idx=3` becomes the attribute `data-group-idx`."""
    return Scope(title, ids)


def detached(title: object, /, **ids: object) -> Block:
    """A section outside the tree: `trace.attach(node)` keeps it, forgetting it drops it."""
    return _Detached(title, ids)


def details_scope(summary: object, /, *, open: bool = False) -> Block:
    """A collapsible block that holds whatever is logged inside."""
    return _Details(summary, open)


def text(value: object, /) -> None:
    place = here.get()
    if place is not None:
        place.node.children.append(Node("p", {}, [to_text(value)]))


def heading(value: object, /) -> None:
    place = here.get()
    if place is not None:
        place.node.children.append(heading_in(place, value))


def details(value: object, /, *, summary: object = "details", open: bool = False) -> None:
    """Pre-formatted text that starts collapsed."""
    place = here.get()
    if place is not None:
        body = Node("pre", {}, [to_text(value)])
        open_details(place, summary, open).node.children.append(body)


def table(rows: object, /, caption: object = None, *, columns: Iterable[object] | None = None) -> None:
    """Rows as dicts (columns in first-seen order) or as lists with `columns`; numbers stay numbers."""
    place = here.get()
    if place is not None:
        place.node.children.append(Node("table", {}, [], table_data(rows, caption, columns)))


def table_from_dict(values: Mapping[Any, object], /, caption: object = None) -> None:
    """One row per key."""
    table(values, caption, columns=("key", "value"))


def conversation(messages: Iterable[object] | object, /, **ids: object) -> None:
    """Chat messages: dicts with `role` and `content`, tool calls, reasoning, images, or anything near it."""
    place = here.get()
    if place is not None:
        data = {"type": "conversation", "messages": _messages(messages)}
        place.node.children.append(Node("div", id_attrs(ids), [], data))


def exception(error: BaseException, /) -> None:
    place = here.get()
    if place is not None:
        place.node.children.append(_exception_node(error))


def _messages(messages: object) -> list[Any]:
    plain = to_plain(drained(messages))
    if plain is None:
        return []
    return plain if isinstance(plain, list) else [plain]


def _exception_node(error: BaseException) -> Node:
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


def _leave(variable: ContextVar[T], token: Token[T]) -> None:
    # A block closed by the garbage collector or by another task ends in a context of its own, where there
    # is nothing to restore.
    try:
        variable.reset(token)
    except ValueError:
        return
