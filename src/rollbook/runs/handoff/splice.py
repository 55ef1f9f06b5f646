"""Sets leaves of a YAML text and leaves every other byte as it was.

No emitter that parses and dumps keeps a file: the best one rewrites `1_23_1` as `1_2_3_1`. Here the text is
parsed only to find where a leaf stands; its span is replaced, or a line is inserted, and nothing else moves.
The result is parsed again before it is returned: the data is the old data with the paths set, no comment is
lost, undoing the edits gives the old text, and a second call would change nothing. What cannot be done
within that promise is refused with a `SpliceError`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from rollbook.errors import UsageError
from rollbook.runs.handoff.emit import (
    Scalar,
    Tree,
    Unset,
    Value,
    already_is,
    block_lines,
    flow_pairs,
    flow_text,
    plain_scalar,
    scalar_text,
)
from rollbook.runs.handoff.nodes import (
    MERGE_TAG,
    Comment,
    Document,
    Kind,
    Node,
    Pair,
    SpliceError,
    block_header_rest,
    line_end,
    parse_document,
)
from rollbook.runs.handoff.verify import Edit, apply_edits, check_result

KeyPath: TypeAlias = tuple[str, ...]

_DEFAULT_STEP = 2
_DECLARATION_KEYS = frozenset({"description", "value", "path"})


def set_paths(text: str, values: Mapping[KeyPath, Value]) -> str:
    """`text` with the value of each path set.

    A mapping sets its leaves and keeps its neighbours. An existing node of the form `{description, value,
    path}` has its `value` set. Missing keys are added behind the last key of their parent.
    """
    document = parse_document(text)
    edits, wanted = _plan(document, values)
    result = apply_edits(text, edits)
    if edits:
        after = check_result(document, result, edits, wanted)
        again, _ = _plan(after, values)
        if again:
            raise SpliceError("the result would change again when written a second time")
    return result


def is_declaration(keys: Collection[str], leaves: Collection[str] = ()) -> bool:
    """A mapping that describes an output and holds it under `value`, rather than being it.

    `leaves` are the names the output itself would have, when it is a mapping.
    """
    if "value" in keys and "value" not in leaves:
        return True
    return not _DECLARATION_KEYS.isdisjoint(keys) and set(leaves).isdisjoint(keys)


def _plan(document: Document, values: Mapping[KeyPath, Value]) -> tuple[list[Edit], Tree]:
    _refuse_sharing(document.root, list(values))
    wanted: Tree = {}
    for path, value in values.items():
        if not path:
            raise UsageError("a path needs at least one key")
        shaped = _shape(_node_at(document.root, path), value, ".".join(path))
        if not isinstance(shaped, Unset):
            _put(wanted, path, shaped)
    planner = _Planner(document)
    planner.set_root(wanted)
    return planner.edits, wanted


def _put(tree: Tree, path: KeyPath, value: Scalar | Tree) -> None:
    for depth, key in enumerate(path[:-1]):
        inner = tree.setdefault(key, {})
        if not isinstance(inner, dict):
            raise UsageError(f"{'.'.join(path[: depth + 1])} is set to a scalar and to a mapping")
        tree = inner
    if path[-1] in tree:
        raise UsageError(f"{'.'.join(path)} is set twice")
    tree[path[-1]] = value


def _node_at(node: Node | None, path: KeyPath) -> Node | None:
    for key in path:
        node = node.get(key) if node is not None else None
    return node


def _shape(node: Node | None, value: Value, name: str) -> Scalar | Tree | Unset:
    """What is set at `node` in the shape it has there; `Unset` when there is nothing to set."""
    keys = node.keys() if node is not None else []
    if isinstance(value, Mapping):
        if is_declaration(keys, value):
            inner = _shape(_child(node, "value"), value, f"{name}.value")
            return inner if isinstance(inner, Unset) else {"value": inner}
        leaves = {key: _shape(_child(node, key), leaf, f"{name}.{key}") for key, leaf in value.items()}
        known: Tree = {key: leaf for key, leaf in leaves.items() if not isinstance(leaf, Unset)}
        return known or Unset.NULL_IF_PRESENT
    if value is Unset.NULL_IF_PRESENT and node is None:
        return value
    if is_declaration(keys):
        inner = _shape(_child(node, "value"), value, f"{name}.value")
        return inner if isinstance(inner, Unset) else {"value": inner}
    scalar = None if isinstance(value, Unset) else plain_scalar(value)
    if isinstance(scalar, str) and any("\ud800" <= character <= "\udfff" for character in scalar):
        raise SpliceError(f"{scalar!a} cannot be written as UTF-8; rename the file", key=name)
    return scalar


def _child(node: Node | None, key: str) -> Node | None:
    return node.get(key) if node is not None else None


def _refuse_sharing(root: Node | None, paths: list[KeyPath]) -> None:
    """Anchors, aliases, merge keys and tags where a change here could change something elsewhere."""
    node, name = root, ""
    for key in _common_prefix(paths):
        if node is None:
            return
        _refuse_shared(node, name)
        for pair in node.pairs:
            if pair.key.kind is Kind.ALIAS or pair.key.tag == MERGE_TAG or pair.name == key:
                _refuse_shared(pair.key, name)
        node, name = node.get(key), f"{name}.{key}" if name else key
    for inner in node.walk() if node is not None else ():
        _refuse_shared(inner, name)


def _refuse_shared(node: Node, name: str) -> None:
    if node.kind is Kind.ALIAS:
        what = f"the alias *{node.value}"
    elif node.anchor is not None:
        what = f"the anchor &{node.anchor}"
    elif node.tag == MERGE_TAG:
        what = "the merge key <<"
    elif node.has_tag:
        what = f"the tag {node.tag}"
    else:
        return
    raise SpliceError(f"{what} is in the way; write it out plainly", line=node.line, key=name)


def _common_prefix(paths: list[KeyPath]) -> KeyPath:
    shortest = min(paths, key=len, default=())
    for depth, key in enumerate(shortest):
        if any(path[depth] != key for path in paths):
            return shortest[:depth]
    return shortest


class _Place(NamedTuple):
    """The mapping being edited, and how its neighbourhood is written."""

    node: Node
    name: str
    step: int  # columns from a key to the keys below it
    quoted: bool  # keys and strings in double quotes, as in JSON

    def below(self, pair: Pair) -> _Place:
        node = pair.value
        nested = node.kind is Kind.MAPPING and not node.flow and not self.node.flow
        step = node.column - self.node.column if nested else self.step
        own_step = next(_child_steps(node), step)
        return _Place(node, self.name_of(pair.name or ""), own_step, _is_json(node, self.quoted))

    def name_of(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key


class _Planner:
    """Collects the edits, inner ones first where two insertions meet."""

    def __init__(self, document: Document) -> None:
        self.edits: list[Edit] = []
        self._document = document
        self._text = document.text

    def set_root(self, wanted: Tree) -> None:
        root = self._document.root
        step = _first_step(root)
        if not wanted:
            return
        if root is None or (root.is_null and root.is_empty):
            self._begin_document(wanted, step)
        elif root.kind is not Kind.MAPPING:
            raise SpliceError(f"the document is {_describe(root)}, not a mapping", line=root.line)
        else:
            self._set_in(_Place(root, "", step, _is_json(root, False)), wanted)

    def _begin_document(self, wanted: Tree, step: int) -> None:
        lines = block_lines(wanted, 0, step)
        if self._document.start_end is not None:
            self._insert_lines(self._document.start_end, lines)
        elif self._text.strip("\ufeff") and self._text[-1] not in "\r\n":
            self._insert_lines(len(self._text), lines)
        else:
            newline = self._newline(len(self._text))
            self._edit(len(self._text), len(self._text), newline.join(lines) + newline)

    def _set_in(self, place: _Place, wanted: Tree) -> None:
        missing: Tree = {}
        for key, value in wanted.items():
            pairs = place.node.pairs_of(key)
            if len(pairs) > 1:
                why = f"the key is there twice (first in line {pairs[0].key.line}); keep one"
                raise SpliceError(why, line=pairs[1].key.line, key=place.name_of(key))
            if not pairs:
                missing[key] = value
            elif isinstance(value, dict):
                self._descend(place, pairs[0], value)
            elif not already_is(pairs[0].value, value):
                self._replace(place, pairs[0], value)
        if missing:
            self._insert(place, missing)

    def _descend(self, place: _Place, pair: Pair, wanted: Tree) -> None:
        node = pair.value
        below = place.below(pair)
        holds_comment = bool(self._comments_between(node.start, node.end))
        is_bare = node.kind is Kind.MAPPING and not node.pairs and not holds_comment
        if node.kind is Kind.MAPPING and not is_bare:
            self._set_in(below, wanted)
        elif not node.is_null and not is_bare:
            raise SpliceError(f"is {_describe(node)}, not a mapping", line=node.line, key=below.name)
        elif place.node.flow:
            self._fill_flow(pair, flow_text(wanted, quoted=below.quoted))
        else:
            self._expand(place, pair, wanted)

    def _expand(self, place: _Place, pair: Pair, wanted: Tree) -> None:
        """Lines below a key whose value is nothing yet: `key:`, `key: ~`, `key: {}`."""
        node, colon = pair.value, self._colon(place, pair)
        end = line_end(self._text, node.end)
        if node.is_empty or node.start < line_end(self._text, colon):
            self._edit(colon, node.end, "")
        elif self._comments_between(node.end, end):
            self._edit(node.start, node.end, "")
        else:
            self._edit(self._previous_line_end(node.start), end, "")
        self._insert_lines(node.end, block_lines(wanted, place.node.column + place.step, place.step))

    def _replace(self, place: _Place, pair: Pair, value: Scalar) -> None:
        node = pair.value
        quote = '"' if place.quoted else node.style if node.style in ("'", '"') else None
        text = scalar_text(value, quote)
        if node.is_empty and not place.node.flow:
            colon = self._colon(place, pair)
            self._edit(colon, colon, f" {text}")
        elif node.is_empty:
            self._fill_flow(pair, text)
        elif node.style in ("|", ">"):
            self._edit(node.start, node.end, text + block_header_rest(self._text, node.start))
        elif node.kind is Kind.SCALAR:
            self._edit(node.start, node.end, text)
        else:
            self._replace_collection(place, pair, text)

    def _replace_collection(self, place: _Place, pair: Pair, text: str) -> None:
        node, colon = pair.value, self._colon(place, pair)
        lost = self._comments_between(node.start, node.end)
        if lost:
            why = f"the comment {lost[0].text!r} stands in the value to be replaced; move it out of the way"
            line = self._text.count("\n", 0, lost[0].start) + 1
            raise SpliceError(why, line=line, key=place.name_of(pair.name or ""))
        if node.flow or node.start < line_end(self._text, colon):
            self._edit(node.start, node.end, text)
            return
        self._edit(colon, colon, f" {text}")
        start, end = self._previous_line_end(node.start), line_end(self._text, node.end)
        if not self._comments_between(node.end, end):
            self._edit(start, end, "")
        elif not self._comments_between(colon, node.start):
            self._edit(start, node.end, "")  # the comment behind the last line moves up
        else:
            self._edit(node.start, node.end, "")  # it keeps a line of its own

    def _comments_between(self, start: int, end: int) -> list[Comment]:
        return [comment for comment in self._document.comments if start <= comment.start < end]

    def _fill_flow(self, pair: Pair, text: str) -> None:
        if not pair.value.is_empty:
            self._edit(pair.value.start, pair.value.end, text)
        elif pair.colon is not None:
            self._edit(pair.colon, pair.colon, f" {text}")
        else:
            self._edit(pair.key.end, pair.key.end, f": {text}")

    def _insert(self, place: _Place, missing: Tree) -> None:
        node = place.node
        if not node.flow:
            self._insert_lines(node.end, block_lines(missing, node.column, place.step))
            return
        pairs = flow_pairs(missing, quoted=place.quoted)
        if node.pairs:
            last = node.pairs[-1]
            gap = " " if last.end == last.colon else ""  # some parsers do not read `{key:, ...}`
            self._edit(last.end, last.end, f"{gap}, {pairs}")
        else:
            self._edit(node.start + 1, node.start + 1, pairs)

    def _insert_lines(self, position: int, lines: list[str]) -> None:
        """New lines behind the line of `position`; a file without a final newline stays without."""
        at = line_end(self._text, position)
        newline = self._newline(at)
        self.edits.append(Edit(at, at, newline + newline.join(lines)))

    def _edit(self, start: int, end: int, text: str) -> None:
        if text and self._text[end : end + 1] == "#":
            text += " "  # a `#` right behind a plain scalar would become part of it
        if (start, end, text) != (start, start, ""):
            self.edits.append(Edit(start, end, text))

    def _colon(self, place: _Place, pair: Pair) -> int:
        if pair.colon is None:
            why = "the key has no colon; write `key:`"
            raise SpliceError(why, line=pair.key.line, key=place.name_of(pair.name or ""))
        return pair.colon

    def _previous_line_end(self, position: int) -> int:
        start = max(self._text.rfind("\n", 0, position), self._text.rfind("\r", 0, position))
        return start - 1 if self._text[start - 1 : start + 1] == "\r\n" else start

    def _newline(self, position: int) -> str:
        """The line break at `position`, or the one before it at the end of the file."""
        for at in (position, self._text.rfind("\n"), self._text.rfind("\r")):
            if at >= 0 and self._text[at : at + 1] in ("\r", "\n"):
                first = at - 1 if self._text[at - 1 : at + 1] == "\r\n" else at
                return "\r\n" if self._text[first : first + 2] == "\r\n" else self._text[first]
        return "\n"


def _is_json(node: Node, inherited: bool) -> bool:
    if node.kind is not Kind.MAPPING or not node.flow or not node.pairs:
        return inherited
    return all(pair.key.style == '"' for pair in node.pairs)


def _first_step(root: Node | None) -> int:
    nodes = root.walk() if root is not None else iter(())
    return next((step for node in nodes for step in _child_steps(node)), _DEFAULT_STEP)


def _child_steps(node: Node) -> Iterator[int]:
    if node.kind is Kind.MAPPING and not node.flow:
        for pair in node.pairs:
            if pair.value.kind is Kind.MAPPING and not pair.value.flow:
                yield pair.value.column - node.column


def _describe(node: Node) -> str:
    if node.kind is Kind.SCALAR:
        return f"the scalar {node.value[:40]!r}"
    return f"a {node.kind}"
