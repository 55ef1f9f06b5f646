"""The second opinion on an edited YAML text: parse it again and compare it with what was meant.

Everything outside the wanted leaves must be the same in value, tag, quoting style, anchor and order; every
comment must be there once, in order; and taking the edits back must give the old text.
"""

from __future__ import annotations

from typing import NamedTuple

from rollbook.runs.handoff.emit import Scalar, Tree, already_is
from rollbook.runs.handoff.nodes import Document, Kind, Node, SpliceError, parse_document


class Edit(NamedTuple):
    start: int
    end: int
    text: str


def apply_edits(text: str, edits: list[Edit]) -> str:
    pieces: list[str] = []
    done = 0
    for edit in sorted(
        edits, key=lambda edit: edit.start
    ):  # stable: insertions at one place keep their order
        if edit.start < done:
            raise SpliceError("two changes meet at one place", line=text.count("\n", 0, edit.start) + 1)
        pieces += [text[done : edit.start], edit.text]
        done = edit.end
    return "".join([*pieces, text[done:]])


def check_result(before: Document, result: str, edits: list[Edit], wanted: Tree) -> Document:
    """The parsed result, or a refusal that says what would have gone wrong."""
    if _undo(before.text, result, edits) != before.text:
        raise SpliceError("the change would touch text outside of the leaves")
    try:
        after = parse_document(result)
    except SpliceError as error:
        raise SpliceError(f"the result would not be valid YAML ({error})") from error
    if after.root is None:
        raise SpliceError("the result would be empty")
    _check(before.root, after.root, wanted, "")
    if [comment.text for comment in before.comments] != [comment.text for comment in after.comments]:
        raise SpliceError("a comment would not survive; move it out of the output block")
    return after


def _undo(before: str, result: str, edits: list[Edit]) -> str:
    pieces: list[str] = []
    done = shift = 0
    for edit in sorted(edits, key=lambda edit: edit.start):
        begin = edit.start + shift
        pieces += [result[done:begin], before[edit.start : edit.end]]
        if result[begin : begin + len(edit.text)] != edit.text:
            raise SpliceError("the change is not where it was meant to be")
        done = begin + len(edit.text)
        shift += len(edit.text) - (edit.end - edit.start)
    return "".join([*pieces, result[done:]])


def _check(before: Node | None, after: Node, wanted: Scalar | Tree, name: str) -> None:
    """`after` is `before` with the wanted leaves set, and not a key more."""
    if not isinstance(wanted, dict):
        if not already_is(after, wanted):
            raise _unlike(after, name)
        return
    if after.kind is not Kind.MAPPING:
        raise _unlike(after, name)
    old_pairs = before.pairs if before is not None and before.kind is Kind.MAPPING else []
    old_names = {pair.name for pair in old_pairs}
    names = [key for key in wanted if key not in old_names]
    if [pair.name for pair in after.pairs[len(old_pairs) :]] != names:
        raise _unlike(after, name)
    for index, new in enumerate(after.pairs):
        old = old_pairs[index] if index < len(old_pairs) else None
        inner = f"{name}.{new.key.value}" if name else new.key.value
        if old is not None:
            _check_same(old.key, new.key, inner)
        if new.name is not None and new.name in wanted:
            _check(old.value if old else None, new.value, wanted[new.name], inner)
        elif old is not None:
            _check_same(old.value, new.value, inner)


def _check_same(before: Node, after: Node, name: str) -> None:
    same = (
        before.kind is after.kind
        and (before.tag, before.value, before.style) == (after.tag, after.value, after.style)
        and (before.anchor, before.flow) == (after.anchor, after.flow)
        and len(before.items) == len(after.items)
        and len(before.pairs) == len(after.pairs)
    )
    if before.style in ("|", ">") and after.value == before.value + "\n":
        why = "the file ends here without a line break, which is part of this value; add one at its end"
        raise SpliceError(why, line=before.line, key=name)
    if not same:
        raise _unlike(after, name)
    for old, new in zip(before.items, after.items, strict=True):
        _check_same(old, new, name)
    for old_pair, new_pair in zip(before.pairs, after.pairs, strict=True):
        _check_same(old_pair.key, new_pair.key, name)
        inner = f"{name}.{new_pair.name}" if new_pair.name else name
        _check_same(old_pair.value, new_pair.value, inner)


def _unlike(node: Node, name: str) -> SpliceError:
    return SpliceError(
        "would not read back as meant; edit it by hand", line=node.line, key=name or "document"
    )
