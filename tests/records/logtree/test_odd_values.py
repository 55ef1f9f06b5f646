"""Odd values: whatever a rollout hands over leaves a readable trace of itself and never raises."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollbook.records import logtree
from rollbook.records.logtree.log import exception_node


class FailingRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class LyingScalar:
    def item(self) -> object:
        return self


@dataclass
class Reply:
    role: str
    content: Any


SELF_CONTAINING: list[Any] = []
SELF_CONTAINING.append(SELF_CONTAINING)

ODD_VALUES: list[Any] = [
    None,
    b"\xff\x00bytes",
    bytearray(b"more"),
    "lone \ud800 surrogate \udfff",
    float("nan"),
    float("-inf"),
    10**5000,
    np.float32(0.5),
    np.int64(7),
    np.float64("nan"),
    np.array([1, 2]),
    np.zeros((2, 2)),
    np.array(3),
    FailingRepr(),
    LyingScalar(),
    {
        "role": "user",
        "content": [{"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}],
    },
    {"role": FailingRepr(), "content": {1: FailingRepr()}, 5: b"x"},
    [{"role": None, "content": None, "tool_calls": 7}, "bare", 3, None],
    [{"role": "tool", "tool_call_id": ["a"], "content": [[["x"]]], "name": {}}],
    [{"role": "assistant", "tool_calls": [{"function": 5}, {"id": {}}, None, {"function": {"name": []}}]}],
    [{"content": [{"type": "image", "image": 5}, {"type": None}, {"type": ["x"]}, {"image_url": {}}]}],
    Reply("user", "dataclass"),
    SELF_CONTAINING,
    {"a": SELF_CONTAINING},
    {1, 2},
    (value for value in [1, "two"]),
    [[1], [1, 2, 3], {"a": 1}, None, "text"],
    object,
    ValueError("\ud800"),
    type("Empty", (str,), {})("subclass"),
]


@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda value: type(value).__name__)
def test_no_value_makes_a_call_or_a_file_fail(value: Any, tmp_path: Path) -> None:
    with logtree.trace(value) as trace:
        with logtree.scope(value, group_idx=value, **{"": value, "on click=": value, '"><b>': value}) as node:
            logtree.text(value)
            logtree.table(value, value)
            logtree.table([value, [value], {"a": value}], columns=[value])
            logtree.conversation(value, traj_idx=value)
            logtree.conversation([{"role": value, "content": value, "tool_calls": value, "extra": value}])
            logtree.conversation(
                [{"role": "user", "content": [{"type": value, "text": value, "image": value}]}]
            )
        error = value if isinstance(value, BaseException) else ValueError(value)
        trace.root.children.append(exception_node(error))
        node.identify(reward=value)
    logtree.write(trace, html=tmp_path / "page.html", json=tmp_path / "page_logtree.json")
    assert json.loads((tmp_path / "page_logtree.json").read_bytes())["root"]["children"]
    assert (tmp_path / "page.html").read_text().endswith("</html>\n")
    assert logtree.encode(logtree.read(tmp_path / "page_logtree.json")) != b""


def test_values_keep_their_meaning() -> None:
    with logtree.trace("t") as trace:
        logtree.text(np.float32(0.5))
        logtree.text(b"caf\xc3\xa9")
        logtree.text(None)
        logtree.text(FailingRepr())
        logtree.table(
            [{"n": np.int64(3), "x": np.float64(0.25), "bad": float("nan"), "ok": True, "no": None}]
        )
    paragraphs = [child.children[0] for child in trace.root.children[:4] if isinstance(child, logtree.Node)]
    assert paragraphs == ["0.5", "café", "None", "<FailingRepr that cannot be shown: RuntimeError>"]
    table = trace.root.children[4]
    assert isinstance(table, logtree.Node) and table.data is not None
    assert table.data["columns"] == ["n", "x", "bad", "ok", "no"]
    (row,) = table.data["rows"]
    assert row == [3, 0.25, None, True, None]
    assert [type(cell) for cell in row] == [int, float, type(None), bool, type(None)]
    assert table.data["nonfinite"] == [[0, 2, "NaN"]]


def test_a_web_of_objects_ends() -> None:
    cells = [Reply("cell", []) for _ in range(30)]
    for cell in cells:
        cell.content.extend(cells)
    with logtree.trace("t") as trace:
        logtree.table([{"board": cells}])
        logtree.conversation([{"role": "user", "content": cells}])
    assert b"[circular: Reply]" in logtree.encode(trace)
