"""Redacts config files as they are written, with their comments, and the changes of such files in a diff.

YAML (and JSON, which is YAML) is parsed, redacted by its keys, and written back with each secret in its place
replaced; then it is redacted as any text. What cannot be parsed (a template), and TOML, INI and the like, is
read line by line. No line is added or removed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from rollbook.records import secret_values
from rollbook.records.redact import REDACTED, Redactor, kinds_of_items, redact_text
from rollbook.records.secret_names import NameKind, is_numeric_secret, is_secret, kind_below

_MAX_PARSED = 1 << 20
_YAML = re.compile(r"(?i).*\.(?:ya?ml|json)(?:\.\w+)?")
_LINES = re.compile(r"(?i).*\.(?:toml|ini|cfg|conf|properties)(?:\.\w+)?|\.env(?:\.\w+)*|.*\.env")
_NUMBERS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float"))
_TEXTS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("str", "timestamp", "binary", "value"))
_PROPERTIES = re.compile(r"(?:[&!]\S+[ \t]+)*")  # `&anchor`, `!tag`: an alias may need them
_SECTION = re.compile(r"[ \t]*\[+[ \t]*([^\]\n]*?)[ \t]*\]+[ \t]*(?:#.*)?")
_ENTRY = re.compile(
    r"(?P<head>(?P<indent>[ \t]*(?:-[ \t]+)*)(?:export[ \t]+)?[\"']?(?P<name>[\w.-]+)[\"']?[ \t]*[:=][ \t]*)"
    r"(?P<value>[^\r\n]*?)(?P<rest>[ \t]*,?[ \t]*\r?)"
)
_OPENS = re.compile(r"(?:[\[{(|>][-+0-9]*[ \t]*|)(?:#.*)?")  # the value is on the lines below
_TEMPLATE = re.compile(r"\{[{%].*")
_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@")


def is_config(name: str) -> bool:
    """Whether a file of this name is redacted by its keys."""
    return bool(_YAML.fullmatch(name) or _LINES.fullmatch(name))


def redact_yaml(text: str, *, remember: bool = False) -> str:
    """Redact a YAML file. `[redacted]` is written with quotes, so that it is text there too.

    With `remember` the values found are redacted everywhere from then on, also as they are written there.
    """
    import yaml

    if len(text) > _MAX_PARSED:
        return _by_lines(text)
    # The parser of libyaml counts characters as Python does; a mark at the beginning is none to it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    mark = text[: text.startswith("\ufeff")]
    body = text[len(mark) :]
    try:
        spans = {
            span: new
            for root in yaml.compose_all(body, Loader=loader)
            for span, new in _changes(body, root, Redactor(remember))
        }
    except (yaml.YAMLError, RecursionError, UnicodeError):
        return _by_lines(text)
    for (start, end), new in sorted(spans.items(), reverse=True):
        if remember and "\n" in body[start:end]:
            secret_values.remember(body[start:end])
        body = body[:start] + new + body[end:]
    return mark + redact_text(body)


def redact_config(name: str, text: str) -> str:
    return redact_yaml(text) if _YAML.fullmatch(name) else _by_lines(text)


def redact_patch(name: str, patch: str, old: str | None, new: str | None) -> str:
    """The changes of a config file, in which each line is as in the redacted file before or after."""
    sides = {sign: _sides(name, text) for sign, text in (("-", old), ("+", new))}
    lines = patch.split("\n")
    at, in_hunk = {"-": 0, "+": 0}, False
    for place, line in enumerate(lines):
        if hunk := _HUNK.match(line):
            at, in_hunk = {"-": int(hunk[1]), "+": int(hunk[2])}, True
            lines[place] = hunk[0]  # without the line above it that git quotes
        elif in_hunk and line[:1] in ("-", "+", " "):
            side = "-" if line[0] == "-" else "+"
            before, after = sides[side]
            number = at[side] - 1
            is_same = number < len(before) and before[number] == line[1:]
            lines[place] = line[0] + (after[number] if is_same else _by_lines(line[1:]))
            for sign in ("-", "+") if line[0] == " " else (line[0],):
                at[sign] += 1
    return redact_text("\n".join(lines))


def _sides(name: str, text: str | None) -> tuple[list[str], list[str]]:
    return ([], []) if text is None else (text.split("\n"), redact_config(name, text).split("\n"))


def _changes(text: str, root: Any, redactor: Redactor) -> Iterator[tuple[tuple[int, int], str]]:
    """The spans of a document that are to be replaced, and by what."""
    pending = [(root, NameKind.PLAIN, "")]
    seen = set[tuple[int, NameKind, str]]()
    while pending:
        node, kind, name = pending.pop()
        if node is None or (id(node), kind, name) in seen:  # an alias
            continue
        seen.add((id(node), kind, name))
        if isinstance(node.value, str):
            new = _redacted(redactor, node, kind, name)
            if new is not None:
                start, end = node.start_mark.index, node.end_mark.index
                yield (start, end), _in_place(text[start:end], new, node.style)
        elif node.value and isinstance(node.value[0], tuple):
            entries = ((str(key.value), value) for key, value in node.value)
            pending += [(value, kind_below(kind, key), key) for key, value in entries]
        else:
            texts = [item.value if isinstance(item.value, str) else None for item in node.value]
            kinds = kinds_of_items(texts, kind, name)
            pending += [(item, *judged) for item, judged in zip(node.value, kinds, strict=True)]


def _redacted(redactor: Redactor, node: Any, kind: NameKind, name: str) -> str | None:
    """What a scalar becomes; None if it stays."""
    if node.tag in _NUMBERS:
        return REDACTED if is_numeric_secret(name, kind) else None
    if node.tag not in _TEXTS and not node.tag.startswith("!"):  # null, true
        return None
    new = redactor.leaf(node.value, kind, name)
    return None if new == node.value else new


def _in_place(written: str, new: str, style: str | None) -> str:
    """A scalar's source with another value, on as many lines."""
    properties = _PROPERTIES.match(written)
    head = properties[0] if properties else ""
    first, *others = written[len(head) :].split("\n")
    if not others:
        return head + json.dumps(new, ensure_ascii=False)
    if style in ("|", ">"):
        return "\n".join([head + first, *map(_blanked, others)])
    return head + "\n".join([f'"{REDACTED}', *map(_blanked, others)]) + '"'


def _blanked(line: str) -> str:
    content = line.strip()
    return line.replace(content, REDACTED) if content else line


def _by_lines(text: str) -> str:
    lines = text.split("\n")
    section, outer, outer_indent = NameKind.PLAIN, NameKind.PLAIN, -1
    for place, line in enumerate(lines):
        if opened := _SECTION.fullmatch(line.rstrip("\r")):
            section = _kind_of_path(NameKind.PLAIN, opened[1])
            outer, outer_indent = NameKind.PLAIN, -1
            continue
        indent = len(line) - len(line.lstrip(" \t"))
        if line.strip() and indent <= outer_indent and line.strip()[0] not in "]})-":
            outer, outer_indent = NameKind.PLAIN, -1
        entry = _ENTRY.fullmatch(line)
        if entry is None:
            if outer is not NameKind.PLAIN and line.strip(" \t\r[]{}(),"):
                lines[place] = _blanked(line)
            continue
        kind = _kind_of_path(outer if outer is not NameKind.PLAIN else section, entry["name"])
        value = entry["value"]
        if kind in (NameKind.SECRET, NameKind.HEADERS) and _OPENS.fullmatch(value):
            outer, outer_indent = kind, indent
        elif _is_secret_value(entry["name"].rpartition(".")[2], kind, value):
            lines[place] = f'{entry["head"]}"{REDACTED}"{entry["rest"]}'
    return redact_text("\n".join(lines))


def _kind_of_path(kind: NameKind, path: str) -> NameKind:
    """What `policy.headers.X-Token` is."""
    for part in path.split("."):
        kind = kind_below(kind, part.strip("\"' "))
    return kind


def _is_secret_value(name: str, kind: NameKind, value: str) -> bool:
    bare = value.strip("\"'")
    if not bare or _TEMPLATE.fullmatch(bare) or bare in ("true", "false", "null", "~"):
        return False
    if kind is NameKind.HEADERS:  # `headers = {X-Token = "..."}`, but not the headers of a table
        return ":" in bare or "=" in bare
    if bare.replace(".", "").isdigit():
        return is_numeric_secret(name, kind)
    return is_secret(name, kind, bare)
