"""A YAML document as a tree whose nodes know exactly where their text begins and ends.

PyYAML's own block nodes end where the next token begins, past the comments and blank lines that follow;
here `end` is the end of a node's last content. Aliases stay leaves, so shared and cyclic documents are
trees too, and nothing is constructed: a custom tag elsewhere in the file is no obstacle.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, cast

import yaml
from yaml import events as ev

from rollbook.errors import RollbookError

_TAG_PREFIX = "tag:yaml.org,2002:"
MERGE_TAG = _TAG_PREFIX + "merge"
STR_TAG = _TAG_PREFIX + "str"
NULL_TAG = _TAG_PREFIX + "null"

_COMMENT = re.compile(r"#[^\r\n]*")
_BLOCK_HEADER = re.compile(r"[|>][-+0-9]*")


class SpliceError(RollbookError):
    """A YAML text that cannot be changed safely; says why, and where."""

    def __init__(self, why: str, *, line: int | None = None, key: str = "") -> None:
        place = f"line {line}: " if line is not None else ""
        super().__init__(f"{place}{key}: {why}" if key else f"{place}{why}")
        self.why, self.line, self.key = why, line, key


class Kind(StrEnum):
    SCALAR = "scalar"
    SEQUENCE = "sequence"
    MAPPING = "mapping"
    ALIAS = "alias"


@dataclass(slots=True)
class Node:
    kind: Kind
    start: int
    end: int
    line: int  # from 1
    column: int  # from 0; of a block mapping: the column of its keys
    tag: str = ""
    value: str = ""  # a scalar's content, an alias's name
    style: str | None = None  # of a scalar: None when plain, else the character that opens it
    flow: bool = False
    anchor: str | None = None
    has_tag: bool = False
    items: list[Node] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """No text at all, as behind the colon of `key:`."""
        return self.start == self.end

    @property
    def is_null(self) -> bool:
        return self.kind is Kind.SCALAR and self.tag == NULL_TAG

    def keys(self) -> list[str]:
        return [pair.name for pair in self.pairs if pair.name is not None]

    def pairs_of(self, name: str) -> list[Pair]:
        return [pair for pair in self.pairs if pair.name == name]

    def get(self, name: str) -> Node | None:
        return next((pair.value for pair in self.pairs_of(name)), None)

    def walk(self) -> Iterator[Node]:
        yield self
        for item in self.items:
            yield from item.walk()
        for pair in self.pairs:
            yield from pair.key.walk()
            yield from pair.value.walk()


class Pair(NamedTuple):
    key: Node
    value: Node
    colon: int | None  # the place right behind the colon; none for `{a}` or a bare `? a`

    @property
    def name(self) -> str | None:
        is_text = self.key.kind is Kind.SCALAR and self.key.tag == STR_TAG
        return self.key.value if is_text else None

    @property
    def end(self) -> int:
        if not self.value.is_empty:
            return self.value.end
        return self.key.end if self.colon is None else self.colon


class Comment(NamedTuple):
    start: int
    text: str


@dataclass(slots=True)
class Document:
    text: str
    root: Node | None  # none for a text of comments only
    comments: list[Comment]
    start_end: int | None  # the place right behind an explicit `---`


def parse_document(text: str) -> Document:
    """The single document of `text`; whatever is wrong with it is a `SpliceError` with a line."""
    if (stray := text.find("\ufeff", 1)) >= 0:  # parsers do not agree on the columns behind it
        raise SpliceError("a byte order mark inside the text; remove it", line=text.count("\n", 0, stray) + 1)
    try:
        tokens = list(yaml.scan(text, Loader=yaml.SafeLoader))
        return _Builder(text, tokens).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise SpliceError(_explain(error), line=mark.line + 1 if mark else None) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        why = f"a character that YAML does not allow (U+{ord(text[error.position]):04X})"
        raise SpliceError(why, line=line) from error
    except RecursionError as error:
        raise SpliceError("nested too deeply to read") from error
    except (yaml.YAMLError, ValueError) as error:  # PyYAML lets chr() and int() of its escapes through
        raise SpliceError(f"not valid YAML: {error}") from error


def _explain(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "not valid YAML"
    if "'\\t'" in problem:
        return "a tab where YAML wants spaces; replace it by spaces"
    context = f" {error.context}" if error.context else ""
    return f"not valid YAML: {problem}{context}"


class _Builder:
    def __init__(self, text: str, tokens: list[yaml.Token]) -> None:
        self._text = text
        self._tokens = tokens
        self._events: Iterator[ev.Event] = iter(yaml.parse(text, Loader=yaml.SafeLoader))
        self._colons: list[int] = [t.start_mark.index for t in tokens if isinstance(t, yaml.ValueToken)]
        self._resolve: Callable[[type, str, tuple[bool, bool]], str] = yaml.resolver.Resolver().resolve
        self._anchors: set[str] = set()

    def document(self) -> Document:
        root, start_end = None, None
        for event in self._events:
            if isinstance(event, ev.DocumentStartEvent):
                if root is not None:
                    line = _mark(event.start_mark).line + 1
                    raise SpliceError("a second document begins here; keep one document a file", line=line)
                start_end = _mark(event.end_mark).index if event.explicit else None
                root = self._node(next(self._events))
        return Document(self._text, root, self._comments(), start_end)

    def _node(self, event: ev.Event) -> Node:
        first, last = _mark(event.start_mark), _mark(event.end_mark)
        node = Node(Kind.SCALAR, first.index, last.index, first.line + 1, first.column)
        if isinstance(event, ev.AliasEvent):
            node.kind, node.value = Kind.ALIAS, event.anchor or ""
            if node.value not in self._anchors:
                raise SpliceError(f"alias *{node.value} has no anchor", line=node.line)
        elif isinstance(event, ev.ScalarEvent | ev.CollectionStartEvent):
            self._note_anchor(node, event.anchor)
            node.has_tag = event.tag is not None
            if isinstance(event, ev.ScalarEvent):
                self._fill_scalar(node, event)
            else:
                self._fill_collection(node, event)
        return node

    def _note_anchor(self, node: Node, anchor: str | None) -> None:
        if anchor is None:
            return
        if anchor in self._anchors:
            raise SpliceError(f"anchor &{anchor} is defined twice", line=node.line)
        self._anchors.add(anchor)
        node.anchor = anchor

    def _fill_scalar(self, node: Node, event: ev.ScalarEvent) -> None:
        node.value, node.style, node.tag = event.value, event.style or None, event.tag or ""
        if event.tag is None or event.tag == "!":
            node.tag = self._resolve(yaml.ScalarNode, event.value, event.implicit)
        if node.style in ("|", ">"):
            node.end = _block_scalar_end(self._text, node.start, node.end)

    def _fill_collection(self, node: Node, event: ev.CollectionStartEvent) -> None:
        node.flow = bool(event.flow_style)
        if isinstance(event, ev.SequenceStartEvent):
            node.kind, node.tag = Kind.SEQUENCE, event.tag or _TAG_PREFIX + "seq"
        else:
            node.kind, node.tag = Kind.MAPPING, event.tag or _TAG_PREFIX + "map"
        inner = next(self._events)
        while not isinstance(inner, ev.CollectionEndEvent):
            child = self._node(inner)
            if node.kind is Kind.SEQUENCE:
                node.items.append(child)
            else:
                value = self._node(next(self._events))
                node.pairs.append(Pair(child, value, self._colon_between(child, value)))
            inner = next(self._events)
        if node.flow:
            node.end = _mark(inner.end_mark).index
        elif node.pairs:
            node.end = node.pairs[-1].end
        elif node.items:
            node.end = node.items[-1].end

    def _colon_between(self, key: Node, value: Node) -> int | None:
        at = bisect_left(self._colons, key.end)
        if at < len(self._colons) and self._colons[at] <= value.start:
            return self._colons[at] + 1
        return None

    def _comments(self) -> list[Comment]:
        """Every comment in order: what stands between tokens, and behind the header of a block scalar."""
        found: list[Comment] = []
        previous = 0
        for token in self._tokens:
            first, last = token.start_mark.index, token.end_mark.index
            found += self._comments_in(previous, first)
            if isinstance(token, yaml.ScalarToken) and token.style in ("|", ">"):
                found += self._comments_in(first, line_end(self._text, first))
            previous = last
        return found

    def _comments_in(self, start: int, end: int) -> Iterator[Comment]:
        for match in _COMMENT.finditer(self._text, start, end):
            yield Comment(match.start(), match.group())


def line_end(text: str, position: int) -> int:
    """Where the line of `position` ends, before its line break."""
    match = re.compile(r"[\r\n]").search(text, position)
    return match.start() if match else len(text)


def block_header_rest(text: str, start: int) -> str:
    """What stands behind the `|-` of a block scalar on its first line: spaces, a comment, or nothing."""
    header = _BLOCK_HEADER.match(text, start)
    return text[header.end() if header else start : line_end(text, start)]


def _block_scalar_end(text: str, start: int, end: int) -> int:
    """The end of a block scalar's last line that matters, before its line break.

    Blank lines behind it belong to the value only with `+`; lines of more spaces than the indent always do.
    """
    header = _BLOCK_HEADER.match(text, start)
    marks = header.group() if header else ""
    lines = text[start:end].splitlines(keepends=True)
    body = [line for line in lines[1:] if line.strip(" \r\n")]
    explicit = "+" in marks or any(mark.isdigit() for mark in marks)
    if not explicit:
        indent = len(body[0]) - len(body[0].lstrip(" ")) if body else len(text)
        while len(lines) > 1 and not lines[-1].strip(" \r\n") and len(lines[-1].rstrip("\r\n")) <= indent:
            end -= len(lines.pop())
    return end - len(lines[-1]) + len(lines[-1].rstrip("\r\n"))


def _mark(mark: object) -> yaml.Mark:
    return cast(yaml.Mark, mark)
