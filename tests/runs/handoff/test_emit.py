"""Every parser reads what is written as the value it was."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollbook.runs.handoff.emit import scalar_text
from rollbook.runs.handoff.splice import set_paths

# fmt: off
READ_OTHERWISE = [
    "1e-4", "1e5", "12e4567", "yes", "No", "ON", "off", "y", "N", "true", "FALSE", "null", "NULL", "~",
    "0755", "0o17", "0x1F", "0b11", "12:30", "1:02:03", "1_000", "1_23_1", "1", "-1", "+1", ".5", "5.", ".",
    "..", "1.2.3", ".inf", "-.INF", ".nan", "NaN", "inf", "2024-01-01", "2024-01-01T00:00:00Z", "=", "<<",
    "-", "--", "---", "...", "?", ":", "a:", ":a", "#a", "a#", "&a", "*a", "!a", "%a", "@a", "`a", "[a]",
    "{a}", "a,", "'a'", '"a"', "|a", ">a", "🙂", "\xa0", "3f9c8a1b", "", " ", "a b", "a\n", "a\tb",
]
# fmt: on


@pytest.mark.parametrize("text", READ_OTHERWISE)
def test_a_string_that_some_parser_reads_otherwise_is_quoted(text: str) -> None:
    written = scalar_text(text)
    assert written[0] == '"'
    assert yaml.safe_load(written) == text


@pytest.mark.parametrize(
    "text", ["artifacts/model/demo/checkpoint-24", "../a/b.json", "/abs/x", "./x", "abc_1", "a=b", "../../x~"]
)
def test_a_path_needs_no_quotes(text: str) -> None:
    assert scalar_text(text) == text


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, "null"),
        (True, "true"),
        (24, "24"),
        (1e-05, "1.0e-05"),
        (1.5e-07, "1.5e-07"),
        (1e16, "1.0e+16"),
        (math.nan, "null"),
        (-math.inf, "null"),
        (np.float32(0.5), "0.5"),
        (np.float64(0.25), "0.25"),
        (np.int64(7), "7"),
        (np.bool_(True), "true"),
        (np.float64("nan"), "null"),
    ],
)
def test_numbers(value: Any, written: str) -> None:
    assert set_paths("a: old # c\n", {("a",): value}) == f"a: {written} # c\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 0.3420\n", 0.342),
        ("a: 3.420e-1\n", 0.342),
        ("a: 'x'\n", "x"),
        ("a: >-\n  x\n", "x"),
        ("a:\n", None),
        ("a: ~\n", None),
        ("a: True\n", True),
        ("a: 3f9c\n", "3f9c"),
        ("{a, b}", None),
    ],
)
def test_a_value_that_is_there_already_is_left_as_it_is_spelled(text: str, value: Any) -> None:
    assert set_paths(text, {("a",): value}) == text


@pytest.mark.parametrize(
    ("text", "value", "written"),
    [
        ("a: yes\n", True, "a: true\n"),
        ("a: 010\n", 8, "a: 8\n"),
        ("a: 1e-4\n", "1e-4", 'a: "1e-4"\n'),
        ("a: 1\n", 1.0, "a: 1.0\n"),
        ("a: 1\n", True, "a: true\n"),
        ("a: '1'\n", 1, "a: 1\n"),
        ("a: 0.0\n", -0.0, "a: -0.0\n"),
    ],
)
def test_a_spelling_that_parsers_read_differently_is_replaced(text: str, value: Any, written: str) -> None:
    assert set_paths(text, {("a",): value}) == written


@settings(max_examples=150, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
@example(1e-05)
@example(1e22)
@example(-0.0)
@example(5e-324)
def test_any_float_comes_back_as_a_float(value: float) -> None:
    read = yaml.safe_load(scalar_text(value))
    assert type(read) is float
    assert repr(read) == repr(value)
    assert repr(json.loads(scalar_text(value))) == repr(value)
