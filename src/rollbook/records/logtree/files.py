"""`*_logtree.json`: written compact and in one go, read back from our files and from Tinker's.

Text is stored unescaped (`"text": "plain"` says so). Files without that mark hold HTML-escaped strings,
which are unescaped on reading. Encoding walks with its own stack: no tree is too deep to write.
"""

from __future__ import annotations

import html as html_entities
import io
import json as stdlib_json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path, PurePath
from typing import IO, Any

import msgspec
import orjson

from rollbook.errors import BadFileError
from rollbook.records import plain
from rollbook.records.atomic import replacing
from rollbook.records.line_secrets import LineSecrets
from rollbook.records.logtree.tree import Node, Trace
from rollbook.records.logtree.values import to_text
from rollbook.records.versions import made_by_newer
from rollbook.version import __version__

SCHEMA_VERSION = 1
_encoder = msgspec.json.Encoder()


Add = Callable[["Node | str"], None]  # takes the next child of the root


def write(
    trace: Trace,
    html: str | os.PathLike[str] | None = None,
    json: str | os.PathLike[str] | None = None,
    *,
    more: Iterable[Node] = (),
) -> None:
    """Write the page, the machine-readable tree, or both, each complete or not at all.

    `more` are sections for its end. They are taken one at a time and not kept, so a report may be larger than
    the memory.
    """
    with ExitStack() as opened:
        files: list[Add] = []
        if json is not None:
            name = Path(html).name if html is not None else trace.path and PurePath(trace.path).name
            file = opened.enter_context(replacing(Path(json)))
            files.append(opened.enter_context(_writing(file, trace, name or None)))
        if html is not None:
            from rollbook.records.logtree.page import writing_page  # only writers of pages need it

            files.append(opened.enter_context(writing_page(Path(html), trace)))
        for child in chain(trace.root.children, more):
            for add in files:
                add(child)


def encode(trace: Trace, html_name: str | None = None) -> bytes:
    file = io.BytesIO()
    with _writing(file, trace, html_name) as add:
        for child in trace.root.children:
            add(child)
    return file.getvalue()


def encode_node(node: Node) -> bytes:
    """One section as JSON, to be put aside for a while."""
    return _encoded(node)


def decode_node(data: bytes) -> Node:
    return _node_tree(orjson.loads(data), escaped=False)


@contextmanager
def _writing(file: IO[bytes], trace: Trace, html_name: str | None) -> Iterator[Add]:
    top = {
        "title": trace.title,
        "started_at": trace.started_at,
        "path": html_name,
        "schema_version": SCHEMA_VERSION,
        "writer": f"rollbook {__version__}",
        "text": "plain",
    }
    comma, secrets = b"", LineSecrets()
    file.write(secrets.cleaned_json(_dumps(top)[:-1] + b',"root":' + _opening(trace.root)))

    def add(child: Node | str) -> None:
        nonlocal comma
        file.write(comma + secrets.cleaned_json(_encoded(child)))
        comma = b","

    yield add
    file.write(_closing(trace.root) + b"}")


def _encoded(child: Node | str) -> bytes:
    try:
        return _encoder.encode(child)
    except (TypeError, ValueError, RecursionError):
        # A lone surrogate, something put in by hand, or sections attached to sections without end.
        return b"".join(_tree_pieces(child)) if isinstance(child, Node) else _dumps(to_text(child))


def _tree_pieces(root: Node) -> list[bytes]:
    """The JSON of any tree. Every child is followed by a comma; closing a node replaces the last one."""
    out = [_opening(root)]
    stack: list[tuple[Node, Iterator[Node | str]]] = [(root, iter(root.children))]
    while stack:
        node, children = stack[-1]
        for child in children:
            if isinstance(child, Node):
                out.append(_opening(child))
                stack.append((child, iter(child.children)))
                break
            out += (_dumps(to_text(child)), b",")
        else:
            stack.pop()
            if out[-1] == b",":
                out.pop()
            out += (_closing(node), b",")
    return out[:-1]


def _opening(node: Node) -> bytes:
    return b'{"tag":%b,"attrs":%b,"children":[' % (_dumps(node.tag), _dumps(node.attrs))


def _closing(node: Node) -> bytes:
    data = b"" if node.data is None else b',"data":' + _dumps(node.data)
    return b"]" + data + b"}"


def _dumps(value: Any) -> bytes:
    return plain.encode(plain.to_plain(value))


def read(path: str | os.PathLike[str]) -> Trace:
    file = Path(path)
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise BadFileError(file, f"cannot be read: {error.strerror or error}") from error
    top = _parsed(file, raw)
    if not isinstance(top, dict) or not isinstance(top.get("root"), dict):
        raise BadFileError(file, "is JSON but not a logtree: it has no root node")
    is_ours = to_text(top.get("writer", "")).startswith("rollbook ")
    if is_ours and (why := made_by_newer(top.get("schema_version"), SCHEMA_VERSION)):
        raise BadFileError(file, why)
    root = _node_tree(top["root"], escaped=top.get("text") != "plain")
    link = top.get("path")
    return Trace(
        to_text(top.get("title", "")),
        root,
        to_text(top.get("started_at", "")),
        None if link is None else to_text(link),
    )


def _parsed(file: Path, raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        pass  # the standard parser also takes the NaN that other writers leave behind
    try:
        return stdlib_json.loads(raw)
    except ValueError as error:
        raise BadFileError(file, f"is not a complete JSON file: {error}") from error
    except RecursionError as error:
        raise BadFileError(file, "is nested too deeply to be read") from error


def _node_tree(raw_root: dict[str, Any], *, escaped: bool) -> Node:
    root = _bare_node(raw_root)
    pending: list[tuple[Node, Any]] = [(root, raw_root.get("children"))]
    while pending:
        node, raw_children = pending.pop()
        for raw in raw_children if isinstance(raw_children, list) else []:
            if isinstance(raw, dict):
                child = _bare_node(raw)
                node.children.append(child)
                pending.append((child, raw.get("children")))
            else:
                text = to_text(raw)
                node.children.append(html_entities.unescape(text) if escaped else text)
    return root


def _bare_node(raw: dict[str, Any]) -> Node:
    attrs, data = raw.get("attrs"), raw.get("data")
    return Node(
        to_text(raw.get("tag", "div")),
        {name: to_text(value) for name, value in attrs.items()} if isinstance(attrs, dict) else {},
        [],
        data if isinstance(data, dict) else None,
    )
