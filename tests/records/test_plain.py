"""Whatever a training loop logs becomes a line of valid JSON; nothing it logs may end the run."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbook.records.plain import encode, is_finite, to_plain, utc_now

NAN, INF = float("nan"), float("inf")


class Colour(enum.Enum):
    RED = "red"
    NOTHING = NAN


@dataclass
class Point:
    x: float
    path: Path = field(default_factory=lambda: Path("a/b"))


class Pair(msgspec.Struct):
    left: Any
    right: Any


class TorchLike:
    """A tensor as torch has it: `item` refuses more than one element."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def item(self) -> float:
        if len(self.values) != 1:
            raise RuntimeError(f"a Tensor with {len(self.values)} elements cannot be converted to Scalar")
        return self.values[0]

    def tolist(self) -> list[float]:
        return self.values


class Unprintable:
    def __str__(self) -> str:
        raise ValueError("no text")


class Catalogue:
    """Has an `item` that means something else."""

    def item(self) -> object:
        raise KeyError("which one?")

    def __str__(self) -> str:
        return "a catalogue"


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (None, None),
        (True, True),
        (3, 3),
        (0.5, 0.5),
        ("text", "text"),
        (2**63, 2**63),
        (2**64, str(2**64)),
        (-(2**63) - 1, str(-(2**63) - 1)),
        (np.float32(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.int64(-3), -3),
        (np.uint8(3), 3),
        (np.bool_(True), True),
        (np.array(0.5), 0.5),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array([]), []),
        (np.str_("text"), "text"),
        (np.datetime64("2026-01-02"), "2026-01-02"),
        (TorchLike([0.25]), 0.25),
        (TorchLike([0.25, 0.5]), [0.25, 0.5]),
        (Colour.RED, "red"),
        (Point(1.0), {"x": 1.0, "path": "a/b"}),
        (Pair(1, Pair((2,), None)), {"left": 1, "right": {"left": [2], "right": None}}),
        ((1, [2, (3,)]), [1, [2, [3]]]),
        ({"b", "a"}, ["a", "b"]),
        (frozenset({2, 1}), [1, 2]),
        ({1: "a", None: "b", Colour: "c"}, {"1": "a", "None": "b", str(Colour): "c"}),
        (Path("a/b"), "a/b"),
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "2026-01-02T03:04:05+00:00"),
        (date(2026, 1, 2), "2026-01-02"),
        (b"caf\xc3\xa9 \xff", "café \ufffd"),
        (1 + 2j, "(1+2j)"),
        (Catalogue(), "a catalogue"),
        (Unprintable(), "<Unprintable that cannot be shown: ValueError>"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_of_a_training_loop(value: Any, plain: Any) -> None:
    nonfinite: list[str] = []
    found = to_plain(value, "key", nonfinite)
    assert found == plain
    assert type(found) is type(plain)
    assert nonfinite == []
    assert json.loads(encode({"key": found})) == {"key": plain}


@pytest.mark.parametrize(
    "value",
    [NAN, INF, -INF, np.float32("nan"), np.float64("inf"), np.array(NAN), TorchLike([INF])],
    ids=lambda value: type(value).__name__,
)
def test_a_number_that_is_not_finite_is_null_and_listed(value: Any) -> None:
    nonfinite: list[str] = []
    assert to_plain(value, "optim/loss", nonfinite) is None
    assert nonfinite == ["optim/loss"]
    assert to_plain(value) is None


def test_nested_non_finite_numbers_are_listed_by_their_path() -> None:
    nonfinite: list[str] = []
    value = {
        "a": {"b": [1.0, NAN]},
        "c": np.array([INF, 2.0]),
        "d": Point(NAN),
        "e": Colour.NOTHING,
        "f": 1.0,
    }
    assert to_plain(value, "", nonfinite) == {
        "a": {"b": [1.0, None]},
        "c": [None, 2.0],
        "d": {"x": None, "path": "a/b"},
        "e": None,
        "f": 1.0,
    }
    assert nonfinite == ["a.b.1", "c.0", "d.x", "e"]


@dataclass
class Tree:
    parent: Any = None
    children: list[Any] = field(default_factory=list)


def test_what_contains_itself_ends_where_it_would_begin_again() -> None:
    loop: dict[str, Any] = {"x": 1}
    loop["self"] = [loop]
    assert to_plain(loop) == {"x": 1, "self": ["[circular: dict]"]}
    root = Tree()
    root.children = [Tree(root) for _ in range(3)]
    child = {"parent": "[circular: Tree]", "children": []}
    assert to_plain({"state": root}) == {"state": {"parent": None, "children": [child] * 3}}
    pair = Pair(1, None)
    pair.right = pair
    assert to_plain(pair) == {"left": 1, "right": "[circular: Pair]"}


def test_a_web_of_objects_ends() -> None:
    """There are more ways through a grid of neighbours than anybody has time for."""
    cells = [[Tree() for _ in range(8)] for _ in range(8)]
    for y, row in enumerate(cells):
        for x, cell in enumerate(row):
            cell.children = [cells[j][i] for i, j in ((x - 1, y), (x, y - 1), (x - 7, y), (x, y - 7))]
    assert b"[repeated: Tree]" in encode(to_plain({"board": cells}))
    doubled: list[Any] = []
    for _ in range(60):
        doubled = [doubled, doubled]
    assert b"[repeated: list]" in encode(to_plain(doubled))


def test_what_is_large_or_shared_is_kept_whole() -> None:
    shared = {"k": [1]}
    rows = [{"i": i, "x": np.float64(i)} for i in range(30_000)]
    assert to_plain({"rows": rows, "a": shared, "b": shared}) == {
        "rows": [{"i": i, "x": float(i)} for i in range(30_000)],
        "a": {"k": [1]},
        "b": {"k": [1]},
    }
    assert to_plain([np.float64(0.5)] * 30_000) == [0.5] * 30_000


def test_a_number_of_any_size_is_written() -> None:
    assert to_plain([10**5000, -(2**70)]) == [hex(10**5000), str(-(2**70))]


def test_a_mapping_that_fails_is_a_note() -> None:
    class Broken(dict[str, Any]):
        def items(self) -> Any:
            raise KeyError("gone")

    assert to_plain({"a": Broken(), Unprintable(): 1}) == {
        "a": "<Broken that cannot be shown: KeyError>",
        "<Unprintable that cannot be shown: ValueError>": 1,
    }


def test_lone_surrogates_become_the_replacement_character() -> None:
    plain = to_plain({"text": "a\ud800b", "\udfff": ["\ud83d", {"k": "fine 🙂"}]})
    assert json.loads(encode(plain)) == {"text": "a\ufffdb", "\ufffd": ["\ufffd", {"k": "fine 🙂"}]}


def test_encoding_is_compact_utf8_on_one_line() -> None:
    assert encode({"a": "é\n", "b": [1, None]}) == b'{"a":"\xc3\xa9\\n","b":[1,null]}'


def test_a_line_stays_one_line_for_readers_that_split_elsewhere() -> None:
    line = encode({"a": "x\u2028y\u2029z\x85"})
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line) == {"a": "x\u2028y\u2029z\x85"}


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary(max_size=20)
    | st.floats(width=32).map(np.float32)
    | st.dates(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(st.characters()) | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(value=ANYTHING)
def test_anything_becomes_one_line_of_standard_json(value: Any) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = encode({"value": to_plain(value)})
    assert b"\n" not in line
    json.loads(line, parse_constant=refuse)


@given(value=st.recursive(st.none() | st.booleans() | st.text() | st.floats(allow_nan=False), st.lists))
def test_plain_data_passes_unchanged(value: Any) -> None:
    nonfinite: list[str] = []
    plain = to_plain(value, "", nonfinite)
    if not nonfinite:
        assert plain == value
        assert to_plain(plain) == plain


@given(value=st.floats())
def test_is_finite(value: float) -> None:
    assert is_finite(value) == (value not in (INF, -INF) and value == value)


def test_now_is_utc_with_microseconds() -> None:
    now = utc_now()
    assert now.endswith("Z")
    assert len(now) == len("2026-01-02T03:04:05.678901Z")
    assert abs((datetime.fromisoformat(now) - datetime.now(UTC)).total_seconds()) < 60
