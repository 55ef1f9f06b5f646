"""The conversations of a tree, with the ids of the sections they are in.

`Found.ids` merges the `data-*` attributes from the root down, so a conversation says which group,
trajectory and turn it belongs to without the caller walking the tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollbook.records.logtree.tree import Node, Trace


@dataclass(frozen=True, slots=True)
class Found:
    """A conversation."""

    node: Node
    ids: dict[str, str]
    messages: list[dict[str, Any]]


def find_conversations(node: Node | Trace) -> Iterator[Found]:
    for inner, ids in _walk(node):
        if inner.data is not None and inner.data.get("type") == "conversation":
            messages = inner.data.get("messages")
            yield Found(inner, ids, messages if isinstance(messages, list) else [])


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
