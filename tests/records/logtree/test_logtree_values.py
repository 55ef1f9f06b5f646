"""Values: nothing odd makes a call or a file fail, numbers stay numbers, hidden characters are shown."""

from __future__ import annotations

import json
import math
import unicodedata
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest

from rollbook.records import logtree
from rollbook.records.logtree.escape import escape
from rollbook.records.logtree.log import exception_node


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class Proxy:
    @property
    def __class__(self) -> Any:
        raise RuntimeError("working outside of context")


class Struct(msgspec.Struct):
    role: str
    content: str


@dataclass
class Message:
    role: str
    content: str


class Model:
    def model_dump(self) -> dict[str, str]:
        return {"role": "user", "content": "dumped"}


class FakeTensor:
    def item(self) -> float:
        return 0.5


def tables_of(trace: logtree.Trace) -> list[dict[str, Any]]:
    found = [child.data for child in trace.root.children if isinstance(child, logtree.Node)]
    return [data for data in found if data is not None and data["type"] == "table"]


def endless() -> list[Any]:
    cycle: list[Any] = [1]
    cycle += [cycle, cycle]
    return cycle


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(50_000):
        value = [value]
    return value


ODD: list[Any] = [
    None,
    0,
    -1.5,
    math.nan,
    -math.inf,
    10**30,
    10**6000,
    True,
    b"bytes \xff",
    bytearray(b"x"),
    "\ud800 lone",
    Unshowable(),
    Proxy(),
    np.float32(0.5),
    np.int64(3),
    np.zeros((3, 3)),
    np.array(2.0),
    FakeTensor(),
    {"a": Unshowable(), 1: {2: 3}},
    {Unshowable(): 1},
    [None, {}, [], ""],
    (1, 2),
    {1, 2},
    deque([1]),
    endless(),
    deep(),
    Struct("user", "x"),
    Message("user", "x"),
    Model(),
    object,
    lambda: None,
    {"type": "audio", "audio": b"\0\1"},
    {"type": {"not": "text"}, "text": 5},
    {"role": ["user"], "content": {"type": "image", "image": object()}, "tool_calls": "x", "name": 3},
    {"role": "tool", "tool_call_id": 7, "content": None, "unparsed_tool_calls": [None, {"error": 1}]},
]


@pytest.mark.parametrize("number", range(len(ODD)))
def test_odd_values_go_through_every_call(number: int, tmp_path: Any) -> None:
    value = ODD[number]
    with logtree.trace(value) as trace:
        with logtree.scope(value, odd=value), logtree.under(logtree.section(value, odd=value)):
            logtree.text(value)
        for rows in (value, [value], [[value, 1]], [{"a": value}], {"a": value}):
            logtree.table(rows, caption=value)
            logtree.table(rows, columns=value)
        logtree.conversation(value)
        logtree.conversation([value, {"role": value, "content": value}])
        for part in (
            {"type": "text", "text": value},
            {"type": "thinking", "thinking": value},
            {"type": value},
        ):
            logtree.conversation(
                [{"role": "user", "content": [value, part], "reasoning": value, "extra": value}]
            )
        logtree.conversation([{"role": "assistant", "tool_calls": [value, {"function": value, "id": value}]}])
        trace.root.children.append(exception_node(value))
    logtree.write(trace, html=tmp_path / "t.html", json=tmp_path / "t.json")

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    json.loads((tmp_path / "t.json").read_bytes(), parse_constant=refuse)
    logtree.read(tmp_path / "t.json")


def test_generators_are_drained_and_their_failure_is_shown() -> None:
    def broken() -> Iterator[dict[str, str]]:
        yield {"role": "user", "content": "one"}
        raise RuntimeError("halfway")

    with logtree.trace("t") as trace:
        logtree.conversation({"role": "user", "content": str(number)} for number in range(2))
        logtree.conversation(broken())
        logtree.table({"a": number} for number in range(2))
    good, bad = logtree.find_conversations(trace)
    assert [message["content"] for message in good.messages] == ["0", "1"]
    assert "cannot be shown: RuntimeError" in str(bad.messages)
    assert tables_of(trace)[0]["rows"] == [[0], [1]]


def test_messages_are_copied_when_they_are_logged() -> None:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    with logtree.trace("t") as trace:
        logtree.conversation(messages)
        messages[0]["content"][0]["text"] = "changed"
        messages.append({"role": "assistant", "content": "later"})
    (found,) = logtree.find_conversations(trace)
    assert found.messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


def test_objects_become_their_fields() -> None:
    with logtree.trace("t") as trace:
        logtree.conversation([Struct("user", "a"), Message("tool", "b"), Model()])
    (found,) = logtree.find_conversations(trace)
    assert [(message["role"], message["content"]) for message in found.messages] == [
        ("user", "a"),
        ("tool", "b"),
        ("user", "dumped"),
    ]


# ---- Tables


def test_table_cells_keep_their_types() -> None:
    with logtree.trace("t") as trace:
        logtree.table(
            [{"a": 1, "b": "x"}, {"b": None, "c": 0.25, "a": True}, {"c": np.float32(0.5), "a": math.nan}],
            caption="Rewards",
        )
    data = json.loads(logtree.encode(trace))["root"]["children"][0]
    assert (data["tag"], data["children"]) == ("table", [])
    assert data["data"] == {
        "type": "table",
        "caption": "Rewards",
        "columns": ["a", "b", "c"],
        "rows": [[1, "x", None], [True, None, 0.25], [None, None, 0.5]],
        "nonfinite": [[2, 0, "NaN"]],
    }


def test_rows_as_lists_take_their_columns_and_ragged_ones_are_filled() -> None:
    with logtree.trace("t") as trace:
        logtree.table([[1, 2], [3], 4], columns=["a"])
        logtree.table({"x": 1, 2: "y"}, caption="c", columns=("key", "value"))
        logtree.table(pd.DataFrame({"p": [1, 2], "q": ["r", "s"]}))
        logtree.table(np.eye(2))
        logtree.table([])
    ragged, pairs, frame, array, empty = tables_of(trace)
    assert (ragged["columns"], ragged["rows"]) == (["a", "1"], [[1, 2], [3, None], [4, None]])
    assert (pairs["columns"], pairs["rows"]) == (["key", "value"], [["x", 1], [2, "y"]])
    assert pairs["caption"] == "c"
    assert (frame["columns"], frame["rows"]) == (["p", "q"], [[1, "r"], [2, "s"]])
    assert array["rows"] == [[1.0, 0.0], [0.0, 1.0]]
    assert (empty["columns"], empty["rows"]) == ([], [])


# ---- Hidden characters

INVISIBLE = [
    char
    for code in range(0x110000)
    if unicodedata.category(char := chr(code)) in ("Cc", "Cf", "Zl", "Zp") and char not in "\t\n"
]
FILLERS = ["\u034f", "\u115f", "\u1160", "\u17b4", "\u17b5", "\u3164", "\ufe00", "\uffa0", "\U000e0100"]
# Letters and number signs of their scripts: they have a shape, although Unicode files them under format.
WITH_A_SHAPE = {
    *range(0x600, 0x606),
    *(0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD),
    *range(0x13430, 0x13440),
}


@pytest.mark.parametrize("around", ["{}", "a{}b", "word " * 40 + "{} é"])
def test_no_invisible_character_reaches_the_page(around: str) -> None:
    for char in [*INVISIBLE, *FILLERS]:
        if ord(char) not in WITH_A_SHAPE:
            html = escape(around.format(char))
            assert char not in html, f"U+{ord(char):04X}"
            assert f'title="U+{ord(char):04X}"' in html


@pytest.mark.parametrize("text", ["👨‍👩‍👧", "❤️", "1️⃣", "می‌خواهم", "क्‍ष", "中文 é ß", "tabs\tand\nlines"])
def test_joiners_stay_where_they_shape_what_is_written(text: str) -> None:
    assert escape(text) == text


def test_windows_line_ends_survive_and_lone_returns_are_shown() -> None:
    assert escape("a\r\nb") == "a&#13;\nb"
    assert escape("a\rb") == 'a<i class="c" title="U+000D">CR</i>b'
