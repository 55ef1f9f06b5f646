"""The second opinion refuses an edit that does more than it was meant to."""

from __future__ import annotations

import pytest

from rollbook.runs.handoff.nodes import SpliceError, parse_document
from rollbook.runs.handoff.verify import Edit, apply_edits, check_result

TEXT = "a: 1   # one\nb: 'x'\nc: &c [1, 2]\nd: *c\n"


def check(text: str, edits: list[Edit], **wanted: int) -> None:
    check_result(parse_document(text), apply_edits(text, edits), edits, dict(wanted))


def edit(old: str, new: str) -> Edit:
    start = TEXT.index(old)
    return Edit(start, start + len(old), new)


def test_what_was_meant_passes() -> None:
    check(TEXT, [edit("1", "2")], a=2)


@pytest.mark.parametrize(
    ("edits", "why"),
    [
        ([edit("1", "3")], "a: would not read back"),
        ([edit("1", "'2'")], "a: would not read back"),
        ([edit("1", "2"), edit("'x'", '"x"')], "b: would not read back"),
        ([edit("1", "2"), edit("'x'", "y")], "b: would not read back"),
        ([edit("1", "2"), edit("d:", "e:")], "would not read back"),
        ([edit("1", "2"), edit("*c", "[1, 2]")], "d: would not read back"),
        ([edit("1", "2"), edit("[1, 2]", "[1, 2, 3]")], "c: would not read back"),
        ([edit("1", "2"), edit("&c ", "&c\n  ")], None),  # white space alone is no change of the data
        ([edit("1", "2"), edit("b: 'x'\n", "")], "would not read back"),
        ([edit("1", "2"), edit("d: *c\n", "d: *c\ne: 1\n")], "would not read back"),
        ([edit("1   # one", "2")], "comment would not survive"),
        ([edit("1   # one", "2   # two")], "comment would not survive"),
        ([edit("1", "2 # new")], "comment would not survive"),
        ([edit("1", "[2")], "would not be valid YAML"),
        ([edit(TEXT, "")], "would be empty"),
    ],
)
def test_anything_more_is_refused(edits: list[Edit], why: str | None) -> None:
    if why is None:
        check(TEXT, edits, a=2)
        return
    with pytest.raises(SpliceError, match=why):
        check(TEXT, edits, a=2)


def test_edits_that_overlap_are_refused() -> None:
    with pytest.raises(SpliceError, match="line 2: two changes meet"):
        apply_edits("a: 1\nb: 2\n", [Edit(3, 8, "x"), Edit(6, 9, "y")])


def test_a_result_that_is_not_made_of_the_edits_is_refused() -> None:
    before = parse_document(TEXT)
    edits = [edit("1", "2")]
    with pytest.raises(SpliceError, match="outside of the leaves"):
        check_result(before, apply_edits(TEXT, edits) + "\n", edits, {"a": 2})
    with pytest.raises(SpliceError, match="not where it was meant"):
        check_result(before, TEXT, edits, {"a": 2})
