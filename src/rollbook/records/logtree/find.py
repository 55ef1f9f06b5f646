"""Typed content of a tree, with the ids it stands under.

`Found.ids` merges the `data-*` attributes from the root down, so a conversation says which group,
trajectory and turn it belongs to without the caller walking the tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollbook.records.logtree.tree import Node, Trace
from rollbook.records.logtree.values import to_text


@dataclass(frozen=True, slots=True)
class Found:
    """A conversation."""

    node: Node
    ids: dict[str, str]
    messages: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class FoundTable:
    node: Node
    ids: dict[str, str]
    caption: str | None
    columns: list[str]
    rows: list[list[Any]]


def find_conversations(node: Node | Trace) -> Iterator[Found]:
    for inner, ids in _walk(node):
        if inner.data is not None and inner.data.get("type") == "conversation":
            yield Found(inner, ids, _list(inner.data.get("messages")))


def find_tables(node: Node | Trace) -> Iterator[FoundTable]:
    """Our tables with their typed cells, and tables built of `tr` and `td` nodes with theirs as text."""
    for inner, ids in _walk(node):
        if inner.data is not None and inner.data.get("type") == "table":
            caption = inner.data.get("caption")
            yield FoundTable(
                inner,
                ids,
                None if caption is None else to_text(caption),
                [to_text(name) for name in _list(inner.data.get("columns"))],
                [_list(row) for row in _list(inner.data.get("rows"))],
            )
        elif inner.tag == "table":
            yield _table_of_nodes(inner, ids)


def _walk(start: Node | Trace) -> Iterator[tuple[Node, dict[str, str]]]:
    """Every node in document order, with the ids merged from its ancestors and itself."""
    pending: list[tuple[Node, dict[str, str]]] = [(start.root if isinstance(start, Trace) else start, {})]
    while pending:
        node, inherited = pending.pop()
        own = {
            name[len("data-") :].replace("-", "_"): value
            for name, value in node.attrs.items()
            if name.startswith("data-")
        }
        ids = inherited | own if own else inherited
        yield node, dict(ids)
        pending.extend((child, ids) for child in reversed(node.children) if isinstance(child, Node))


def _table_of_nodes(table: Node, ids: dict[str, str]) -> FoundTable:
    columns: list[str] = []
    rows: list[list[Any]] = []
    for row, _ in _walk(table):
        if row.tag != "tr":
            continue
        cells = [cell for cell in row.children if isinstance(cell, Node)]
        texts = [_text_of(cell) for cell in cells]
        if not columns and cells and all(cell.tag == "th" for cell in cells):
            columns = texts
        else:
            rows.append(texts)
    captions = [
        _text_of(child) for child in table.children if isinstance(child, Node) and child.tag == "caption"
    ]
    return FoundTable(table, ids, captions[0] if captions else None, columns, rows)


def _text_of(node: Node) -> str:
    return "".join(child for inner, _ in _walk(node) for child in inner.children if isinstance(child, str))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
