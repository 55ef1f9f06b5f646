"""Sets values in a YAML text that a person wrote, and leaves every other byte as it was.

The text is parsed only to find where a value stands. Its characters are replaced, or a line is added behind
the last one of its mapping. The result is parsed again and must be the old document with the values set, so
what is shared through an anchor, kept by a block scalar or broken by an odd comma is found there and refused.
ruamel.yaml, which edits as well, writes a text anew: of 32 configs of the tests 5 came back as they were.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple, TypeAlias, cast

import yaml
from msgspec import UnsetType

from rollbook.errors import RollbookError
from rollbook.records.plain import to_plain

Scalar: TypeAlias = bool | int | float | str | None
# UNSET stands for a value that is not known: an existing key becomes null, a missing one stays missing.
Tree: TypeAlias = "Mapping[str, Scalar | UnsetType | Tree]"

_DECLARATION_KEYS = frozenset({"description", "value", "path"})
_MERGE = "tag:yaml.org,2002:merge"
_NULL = "tag:yaml.org,2002:null"
_DEFAULT_STEP = 2
_NEWLINE = re.compile(r"\r\n|\r|\n")
# Starts with a letter (behind `/`, `./` and `../`), so that it is never a number, a date or an indicator.
_PLAIN = re.compile(r"(?:\.{0,2}/)*[A-Za-z_][A-Za-z0-9_./+=@~-]*")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}
_ESCAPED = re.compile(
    r'["\\\x00-\x1f\x7f-\xa0\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]'
)


class BlockError(RollbookError):
    """A YAML text that cannot be changed safely; says why, and where."""

    def __init__(self, why: str, *, line: int | None = None, key: str = "") -> None:
        place = f"line {line}: " if line is not None else ""
        super().__init__(f"{place}{key}: {why}" if key else f"{place}{why}")
        self.why, self.line, self.key = why, line, key


def set_block(text: str, path: tuple[str, ...], values: Tree) -> str:
    """`text` with values set in the mapping at `path`, which is added where it is missing.

    A nested mapping of `values` sets its keys and keeps their neighbours. Where the text has a mapping of the
    form `{description, value, path}` in place of a value, its `value` is set.
    """
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    body = text.removeprefix(mark)
    before = compose(body)
    tree = _nested(path, {name: _shaped(_at(before, (*path, name)), value) for name, value in values.items()})
    editor = _Editor(body, before)
    editor.set_root(before, tree)
    if not editor.edits:
        return text
    result = editor.result()
    try:
        after = compose(result)
    except BlockError as error:
        raise BlockError(f"the result would be {error.why}; edit it by hand") from error
    _check(before, after, tree, "")
    return mark + result


def compose(text: str) -> yaml.Node | None:
    """The single document of `text`; whatever is wrong with it is a `BlockError` with a line."""
    try:
        return yaml.SafeLoader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        place = error.problem_mark or error.context_mark
        why = "a tab where YAML wants spaces" if "'\\t'" in (error.problem or "") else str(error.problem)
        raise BlockError(f"not valid YAML: {why}", line=place.line + 1 if place else None) from error
    except RecursionError as error:
        raise BlockError("nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:  # PyYAML lets chr() and int() of its escapes through
        raise BlockError(f"not valid YAML: {error}") from error


def is_declaration(keys: Collection[str | None], own: Collection[str]) -> bool:
    """Whether a mapping with these keys describes an output and holds it under `value`, rather than being it.

    `own` are the keys that the output itself would have, when it is a mapping.
    """
    if "value" in keys and "value" not in own:
        return True
    return not _DECLARATION_KEYS.isdisjoint(keys) and set(own).isdisjoint(keys)


def block_text(tree: Tree, newline: str = "\n", column: int = 0, step: int = _DEFAULT_STEP) -> str:
    """Lines of YAML without the last line break; what is not known is left out."""
    lines: list[str] = []
    for key, value in _known(tree).items():
        head = f"{' ' * column}{scalar_text(key)}:"
        if isinstance(value, Mapping):
            lines += [head, block_text(value, newline, column + step, step)]
        else:
            lines.append(f"{head} {scalar_text(value)}")
    return newline.join(lines)


def scalar_text(value: Scalar, *, quoted: bool = False) -> str:
    """One line of YAML on which parsers of YAML 1.1 and 1.2 agree; NaN and infinities become null.

    `yes`, `0755`, `12:30`, `1e-4` and dates mean different things to different parsers, so a string that
    looks like one of them stands in quotes and a number is never written that way.
    """
    value = to_plain(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        mantissa, e, exponent = repr(value).partition("e")
        return f"{mantissa}.0e{exponent}" if e and "." not in mantissa else repr(value)
    if isinstance(value, int):
        return str(value)
    if not quoted and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return '"' + _ESCAPED.sub(_escape, value) + '"'


def _escape(match: re.Match[str]) -> str:
    character = match.group()
    return f"\\{character}" if character in '"\\' else f"\\u{ord(character):04x}"


def _nested(path: tuple[str, ...], values: Tree) -> Tree:
    for key in reversed(path):
        values = {key: values}
    return values


def _shaped(node: yaml.Node | None, value: Scalar | UnsetType | Tree) -> Scalar | UnsetType | Tree:
    """A value in the shape that the text has for it."""
    if is_declaration([_name(key) for key, _ in _pairs(node)], value if isinstance(value, Mapping) else ()):
        return {"value": _shaped(_at(node, ("value",)), value)}
    if isinstance(value, Mapping):
        return {name: _shaped(_at(node, (name,)), leaf) for name, leaf in value.items()}
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise BlockError(f"{value!a} cannot be written as UTF-8; rename the file")
    return value


def _known(tree: Tree) -> dict[str, Scalar | Tree]:
    """What there is to write where nothing stands yet."""
    known: dict[str, Scalar | Tree] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            if inner := _known(value):
                known[key] = inner
        elif not isinstance(value, UnsetType):
            known[key] = value
    return known


def _at(node: yaml.Node | None, path: tuple[str, ...]) -> yaml.Node | None:
    for key in path:
        node = next((value for name, value in _pairs(node) if _name(name) == key), None)
    return node


class _Edit(NamedTuple):
    start: int
    end: int
    text: str


class _Editor:
    """Collects the edits of a text."""

    def __init__(self, text: str, root: yaml.Node | None) -> None:
        self.edits: list[_Edit] = []
        self._text = text
        self._step = next(_steps(root), _DEFAULT_STEP)

    def result(self) -> str:
        """The text with the edits; where two meet, the one that came first, of the inner mapping, leads."""
        pieces, done = [], 0
        for edit in sorted(self.edits, key=lambda edit: edit.start):
            pieces += [self._text[done : edit.start], edit.text]
            done = edit.end
        return "".join([*pieces, self._text[done:]])

    def set_root(self, root: yaml.Node | None, tree: Tree) -> None:
        if isinstance(root, yaml.MappingNode):
            self._set_in(root, tree, "")
        elif root is not None and not _is_empty(root):
            raise BlockError(f"the document is a {_kind(root)}, not a mapping", line=_line(root))
        elif _known(tree):
            newline = self._newline(len(self._text))
            gap = newline if self._text and self._text[-1] not in "\r\n" else ""
            end = len(self._text)
            self._edit(end, end, f"{gap}{block_text(tree, newline)}{newline}")

    def _set_in(self, node: yaml.MappingNode, tree: Tree, name: str) -> None:
        missing: dict[str, Scalar | UnsetType | Tree] = {}
        for key, value in tree.items():
            inner = f"{name}.{key}" if name else key
            found = [pair for pair in node.value if _name(pair[0]) == key]
            if len(found) > 1:
                lines = f"lines {_line(found[0][0])} and {_line(found[1][0])}"
                raise BlockError(f"the key is there twice ({lines}); keep one", key=inner)
            if not found:
                missing[key] = value
            elif isinstance(value, Mapping):
                self._set_mapping(node, found[0], value, inner)
            else:
                self._set_scalar(node, found[0][1], None if isinstance(value, UnsetType) else value, inner)
        if known := _known(missing):
            self._add(node, known, name)

    def _set_mapping(
        self, parent: yaml.MappingNode, pair: tuple[yaml.Node, yaml.Node], tree: Tree, name: str
    ) -> None:
        key, node = pair
        if isinstance(node, yaml.MappingNode) and node.value:
            self._set_in(node, tree, name)
            return
        written = self._text[node.start_mark.index : node.end_mark.index]
        if not (_is_empty(node) or re.fullmatch(r"\{\s*\}", written)):
            raise BlockError(f"is a {_kind(node)}, not a mapping", line=_line(node), key=name)
        if not (known := _known(tree)):
            return
        if parent.flow_style:
            self._replace(node, "{" + _flow_text(known, _is_json(parent)) + "}", name)
            return
        if written:
            start = len(self._text[: node.start_mark.index].rstrip(" "))
            self._edit(start, node.end_mark.index, "")
        self._add_lines(node.end_mark.index, known, key.start_mark.column + self._step)

    def _set_scalar(self, parent: yaml.MappingNode, node: yaml.Node, value: Scalar, name: str) -> None:
        if not isinstance(node, yaml.ScalarNode) or node.style in ("|", ">"):
            raise BlockError(f"is a {_kind(node)}; write null there first", line=_line(node), key=name)
        if not _holds(node, value):
            quoted = _is_json(parent) or node.style is not None
            self._replace(node, scalar_text(value, quoted=quoted), name)

    def _replace(self, node: yaml.Node, text: str, name: str) -> None:
        start, end = node.start_mark.index, node.end_mark.index
        if start == end:  # no text at all, as behind the colon of `key:`
            if self._text[start - 1 : start] != ":":
                raise BlockError("the key has no colon; write `key:`", line=_line(node), key=name)
            text = f" {text}"
        self._edit(start, end, text)

    def _edit(self, start: int, end: int, text: str) -> None:
        if text and self._text[end : end + 1] == "#":
            text += " "  # a `#` right behind a plain scalar would become part of it
        self.edits.append(_Edit(start, end, text))

    def _add(self, node: yaml.MappingNode, known: Tree, name: str) -> None:
        if any(key.tag == _MERGE for key, _ in node.value):
            raise BlockError("the merge key << is in the way; write it out", line=_line(node), key=name)
        if not node.flow_style:
            self._add_lines(_end_of(node, self._text), known, node.value[0][0].start_mark.column)
            return
        at = _end_of(node.value[-1][1], self._text) if node.value else node.start_mark.index + 1
        gap = ", " if node.value else ""
        self._edit(at, at, gap + _flow_text(known, _is_json(node)))

    def _add_lines(self, position: int, tree: Tree, column: int) -> None:
        """New lines behind the line of `position`; a file without a final line break stays without."""
        found = _NEWLINE.search(self._text, position)
        at = found.start() if found else len(self._text)
        newline = self._newline(at)
        lines = block_text(tree, newline, column, self._step)
        self._edit(at, at, newline + lines)

    def _newline(self, position: int) -> str:
        """The line break at `position`, or the last one before it."""
        here = _NEWLINE.match(self._text, position)
        return here.group() if here else (_NEWLINE.findall(self._text, 0, position) or ["\n"])[-1]


def _flow_text(tree: Tree, quoted: bool) -> str:
    """`a: 1, b: {c: x}`, with quotes where the neighbours are JSON."""
    pairs = []
    for key, value in _known(tree).items():
        text = (
            "{" + _flow_text(value, quoted) + "}"
            if isinstance(value, Mapping)
            else scalar_text(value, quoted=quoted)
        )
        pairs.append(f"{scalar_text(key, quoted=quoted)}: {text}")
    return ", ".join(pairs)


def _pairs(node: yaml.Node | None) -> list[tuple[yaml.Node, yaml.Node]]:
    return list(node.value) if isinstance(node, yaml.MappingNode) else []


def _name(key: yaml.Node) -> str | None:
    """The name of a key; None where a collection is the key."""
    return str(key.value) if isinstance(key, yaml.ScalarNode) else None


def _is_json(node: yaml.MappingNode) -> bool:
    return bool(node.flow_style and node.value) and all(key.style == '"' for key, _ in node.value)


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == _NULL


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return "block scalar" if node.style in ("|", ">") else f"scalar ({node.value[:40]!r})"
    return "mapping" if isinstance(node, yaml.MappingNode) else "list"


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _end_of(node: yaml.Node, text: str) -> int:
    """Where the last content of a node ends; PyYAML's own end of a block is where the next token begins."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        if isinstance(last, tuple):
            key, value = last
            return max(int(key.end_mark.index), _end_of(value, text))
        return _end_of(last, text)
    end = int(node.end_mark.index)
    if isinstance(node, yaml.ScalarNode) and node.style in ("|", ">"):
        return len(text[:end].rstrip(" \r\n"))
    return end


def _steps(node: yaml.Node | None) -> Iterator[int]:
    """The indents of keys in the mappings around them, first to last, in columns."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style:
        for key, value in node.value:
            if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
                yield value.value[0][0].start_mark.column - key.start_mark.column
                yield from _steps(value)


def _holds(node: yaml.Node, value: Scalar) -> bool:
    """Whether a node reads as this value."""
    if not isinstance(node, yaml.ScalarNode):
        return False
    try:
        held = yaml.constructor.SafeConstructor().construct_document(node)
    except (yaml.YAMLError, ValueError):
        return False
    plain = to_plain(value)
    return type(held) is type(plain) and repr(held) == repr(plain)


def _check(before: yaml.Node | None, after: yaml.Node | None, tree: Tree, name: str) -> None:
    """Raise unless `after` is `before` with the values of `tree`."""
    old, new = _pairs(before), _pairs(after)
    there = {_name(key) for key, _ in old}
    added = [key for key in _known(tree) if key not in there]
    if [_name(key) for key, _ in new[len(old) :]] != added or len(new) < len(old):
        raise _differs(name)
    for number, (key, value) in enumerate(new):
        old_key, was = old[number] if number < len(old) else (key, None)
        key_name = _name(key)
        inner = f"{name}.{key_name}" if name else str(key_name)
        wanted = tree[key_name] if key_name is not None and key_name in tree else _NOT_OURS
        if wanted is _NOT_OURS:
            is_right = was is not None and _is_same(was, value, set())
        elif isinstance(wanted, Mapping):
            is_right = True
            if was is None or not _is_same(was, value, set()):
                _check(was, value, wanted, inner)
        else:
            is_right = _holds(value, None if isinstance(wanted, UnsetType) else cast(Scalar, wanted))
        if not (is_right and _is_same(old_key, key, set())):
            raise _differs(inner)


_NOT_OURS = object()


def _is_same(before: yaml.Node, after: yaml.Node, compared: set[tuple[int, int]]) -> bool:
    if type(before) is not type(after) or before.tag != after.tag:
        return False
    if isinstance(before, yaml.ScalarNode) and isinstance(after, yaml.ScalarNode):
        return bool((before.value, before.style) == (after.value, after.style))
    if (both := (id(before), id(after))) in compared:  # a node may contain itself
        return True
    compared.add(both)
    if len(before.value) != len(after.value):
        return False
    pairs = zip(before.value, after.value, strict=True)
    if isinstance(before, yaml.MappingNode):
        return all(_is_same(old, new, compared) for both in pairs for old, new in zip(*both, strict=True))
    return all(_is_same(old, new, compared) for old, new in pairs)


def _differs(name: str) -> BlockError:
    return BlockError("would not read back as meant; edit it by hand", key=name or "document")
