"""Logging: what lands where, from tasks, threads and decorators, and that nothing odd raises."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest

from rollbook.errors import UsageError
from rollbook.records import logtree
from rollbook.records.logtree import Node, log


def nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        if isinstance(child, Node):
            yield from nodes(child)


def section(node: Node, title: str) -> Node:
    return next(inner for inner in nodes(node) if inner.tag == "section" and inner.title == title)


def all_text(node: Node) -> list[str]:
    return [child for inner in nodes(node) for child in inner.children if isinstance(child, str)]


def encoded(trace: logtree.Trace) -> Any:
    return json.loads(logtree.encode(trace))


# ---- Nobody listens


def test_nothing_is_built_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("something was built although nobody listens")

    for name in ("Node", "Place", "to_text", "to_plain", "table_data", "id_attrs"):
        monkeypatch.setattr(log, name, refuse)
    for name in ("open_section", "open_loose_section", "open_details", "heading_in"):
        monkeypatch.setattr(log, name, refuse)

    @logtree.scope("Grade")
    def graded() -> int:
        return 7

    with logtree.scope("a", group_idx=1) as node, logtree.details_scope("b"), logtree.detached("c") as loose:
        logtree.text("x")
        logtree.heading("x")
        logtree.details("x")
        logtree.table([{"a": 1}])
        logtree.table_from_dict({"a": 1})
        logtree.conversation([{"role": "user", "content": "x"}])
        logtree.exception(ValueError("x"))
    assert graded() == 7
    assert not node and not loose


def test_the_section_nobody_listens_to_takes_everything_and_keeps_nothing() -> None:
    with logtree.scope("a", group_idx=1) as node:
        node.children.append("x")
        node.attrs["data-x"] = "y"
        node.retitle("other")
        node.identify(reward=1)
    assert (node.children, node.attrs, node.title) == ([], {}, None)
    with logtree.trace("t") as trace:
        trace.attach(node)
    assert trace.root.children == []


def test_disabled_switches_off_inside_only() -> None:
    with logtree.trace("t") as trace:
        logtree.text("before")
        with logtree.disabled():
            logtree.text("inside")
            with logtree.scope("also inside"):
                logtree.text("deeper")
        logtree.text("after")
    assert all_text(trace.root) == ["before", "after"]


# ---- Where things land


def test_sections_nest_with_ids_and_heading_levels() -> None:
    with logtree.trace("t") as trace, contextlib.ExitStack() as stack:
        for depth in range(7):
            stack.enter_context(logtree.scope(f"s{depth}", traj_idx=depth))
            logtree.heading("inside")
    tags = [child.tag for node in nodes(trace.root) for child in node.children[:1] if isinstance(child, Node)]
    titles = [tag for tag in tags if tag.startswith("h")]
    assert titles == ["h2", "h3", "h4", "h5", "h6", "h6", "h6"]
    assert section(trace.root, "s3").attrs == {"data-traj-idx": "3"}
    explicit = [child for child in section(trace.root, "s0").children if isinstance(child, Node)][1]
    assert (explicit.tag, explicit.children) == ("h3", ["inside"])


def test_ids_become_safe_attribute_names() -> None:
    ids: dict[str, Any] = {"task_id": "a/b", "Weird name='x'>": 1, "__": 2, "gone": None, "flag": True}
    with logtree.trace("t") as trace, logtree.scope("s", **ids):
        pass
    attrs = section(trace.root, "s").attrs
    assert attrs == {"data-task-id": "a/b", "data-weird-name-x": "1", "data-id": "2", "data-flag": "True"}


def test_details_hold_text_or_whatever_is_logged_inside() -> None:
    with logtree.trace("t") as trace:
        logtree.details("long", summary="log", open=True)
        with logtree.details_scope("more"):
            logtree.text("x")
    first, second = encoded(trace)["root"]["children"]
    assert first["attrs"] == {"open": ""}
    assert [child["tag"] for child in first["children"]] == ["summary", "pre"]
    assert first["children"][1]["children"] == ["long"]
    assert [child["tag"] for child in second["children"]] == ["summary", "p"]


def test_an_exception_is_recorded_and_raised_again() -> None:
    with pytest.raises(ValueError, match="<b>bad</b>"), logtree.trace("t") as trace, logtree.scope("s"):
        raise ValueError("<b>bad</b>")
    data = encoded(trace)["root"]["children"][-1]["data"]
    assert (data["type"], data["exception"], data["message"]) == ("exception", "ValueError", "<b>bad</b>")
    assert "test_logtree_log.py" in data["traceback"]
    logtree.text("the scope is closed again")
    assert all_text(trace.root) == ["s"]


def test_decorators_keep_what_they_wrap() -> None:
    @logtree.scope("Sync", turn=1)
    def plain(value: int, *, add: int = 0) -> int:
        """Says it."""
        logtree.text(f"got {value}")
        return value + add

    @logtree.scope("Async")
    async def awaited(value: int) -> int:
        await asyncio.sleep(0)
        logtree.text(f"awaited {value}")
        return value

    with logtree.trace("t") as trace:
        assert plain(1, add=2) == 3
        assert asyncio.run(awaited(5)) == 5
        assert plain(2) == 2
    assert plain.__doc__ == "Says it."
    assert all_text(trace.root) == ["Sync", "got 1", "Async", "awaited 5", "Sync", "got 2"]
    assert section(trace.root, "Sync").attrs == {"data-turn": "1"}


def test_a_generator_cannot_be_decorated() -> None:
    def numbers() -> Iterator[int]:
        yield 1

    with pytest.raises(UsageError, match="generator"):
        logtree.scope("no")(numbers)


# ---- Detached sections


def test_detached_sections_are_kept_only_when_attached() -> None:
    with logtree.trace("t") as trace:
        made = []
        for group in range(3):
            with logtree.detached(f"Group {group}", group_idx=group) as node, logtree.scope("Trajectory"):
                logtree.text(f"text {group}")
                logtree.heading("sub")
            made.append(node)
        assert trace.root.children == []
        made[2].retitle("Group 2 · reward 1")
        made[2].identify(reward=1.0)
        with logtree.scope("Chosen"), logtree.scope("Best"):
            trace.attach(made[2])
        trace.attach(made[0])
    best = section(trace.root, "Group 2 · reward 1")
    assert best in section(trace.root, "Best").children
    assert best.attrs == {"data-group-idx": "2", "data-reward": "1.0"}
    headings = [node.tag for node in nodes(best) if node.tag.startswith("h")]
    assert headings == ["h4", "h5", "h6"]
    worst = section(trace.root, "Group 0")
    assert [node.tag for node in nodes(worst) if node.tag.startswith("h")] == ["h2", "h3", "h4"]
    assert "text 1" not in all_text(trace.root)


def test_levels_are_right_even_when_attached_while_open() -> None:
    with logtree.trace("t") as trace:
        with logtree.scope("outer"):
            loose = logtree.detached("loose")
            node = loose.__enter__()
        with logtree.disabled():
            trace.attach(node)
        with logtree.under(node), logtree.scope("late"):
            pass
        loose.__exit__(None, None, None)
    assert [inner.tag for inner in nodes(section(trace.root, "loose")) if inner.tag.startswith("h")] == [
        "h2",
        "h3",
    ]


def test_a_section_cannot_hold_itself() -> None:
    with logtree.trace("t") as trace, logtree.detached("a") as node, pytest.raises(UsageError):
        trace.attach(node)


def test_under_logs_below_an_earlier_section() -> None:
    with logtree.trace("t") as trace:
        with logtree.scope("a") as earlier:
            pass
        with logtree.scope("b"), logtree.under(earlier), logtree.scope("c"):
            logtree.text("x")
    assert all_text(section(trace.root, "a")) == ["a", "c", "x"]
    assert all_text(section(trace.root, "b")) == ["b"]


# ---- Concurrency


def test_concurrent_tasks_never_mix_their_sections() -> None:
    async def rollout(group: int, trajectory: int) -> None:
        with logtree.scope(f"{group}/{trajectory}", group_idx=group, traj_idx=trajectory):
            for turn in range(4):
                await asyncio.sleep((group * 7 + trajectory * 3 + turn) % 5 / 1000)
                with logtree.scope(f"turn {turn}", turn=turn):
                    await asyncio.sleep(0)
                    logtree.text(f"{group}/{trajectory}/{turn}")

    async def group(number: int) -> None:
        with logtree.scope(f"group {number}", group_idx=number):
            await asyncio.gather(*(rollout(number, trajectory) for trajectory in range(8)))

    async def main() -> logtree.Trace:
        with logtree.trace("t") as trace:
            await asyncio.gather(*(group(number) for number in range(25)))
        return trace

    trace = asyncio.run(main())
    for number in range(25):
        node = section(trace.root, f"group {number}")
        assert len(node.children) == 1 + 8
        for trajectory in range(8):
            inner = section(node, f"{number}/{trajectory}")
            expected = [f"{number}/{trajectory}"]
            for turn in range(4):
                expected += [f"turn {turn}", f"{number}/{trajectory}/{turn}"]
            assert all_text(inner) == expected


def test_threads_started_with_to_thread_log_into_their_scope() -> None:
    def work(number: int) -> None:
        for step in range(50):
            with logtree.scope(f"step {step}"):
                logtree.text(f"{number}/{step}")

    async def run(number: int) -> None:
        with logtree.scope(f"thread {number}"):
            await asyncio.to_thread(work, number)

    async def main() -> logtree.Trace:
        with logtree.trace("t") as trace:
            await asyncio.gather(*(run(number) for number in range(8)))
        return trace

    trace = asyncio.run(main())
    for number in range(8):
        logged = [text for text in all_text(section(trace.root, f"thread {number}")) if "/" in text]
        assert logged == [f"{number}/{step}" for step in range(50)]


def test_a_scope_closed_in_another_context_does_not_raise() -> None:
    async def leaky() -> AsyncIterator[int]:
        with logtree.scope("left open"):
            yield 1
            yield 2

    async def main() -> logtree.Trace:
        with logtree.trace("t") as trace:
            generator = leaky()
            assert await anext(generator) == 1
            await asyncio.create_task(generator.aclose())  # type: ignore[attr-defined]
        return trace

    assert all_text(asyncio.run(main()).root) == ["left open"]


# ---- Deep trees


def test_five_thousand_nested_scopes_stay_readable_everywhere(tmp_path: Any) -> None:
    with logtree.trace("t") as trace, contextlib.ExitStack() as stack:
        stack.enter_context(logtree.scope("outermost", group_idx=3))
        for depth in range(5000):
            stack.enter_context(logtree.scope(f"depth {depth}", turn=depth))
            if depth % 7 == 0:
                stack.enter_context(logtree.details_scope("details"))
        logtree.conversation([{"role": "user", "content": "down here"}])
    logtree.write(trace, html=tmp_path / "t.html", json=tmp_path / "t.json")
    json.loads((tmp_path / "t.json").read_text())
    (found,) = logtree.find_conversations(logtree.read(tmp_path / "t.json"))
    assert found.ids["group_idx"] == "3"
    assert found.ids["turn"] == "4999"
    assert b"down here" in (tmp_path / "t.html").read_bytes()
    assert sum(node.tag == "section" for node in nodes(trace.root)) == 5001


def test_sections_attached_to_sections_without_end_are_still_written() -> None:
    inner: Node | None = None
    for _ in range(3000):
        inner = Node("section", {}, [Node("h2", {}, ["x"]), *([inner] if inner else [])])
    with logtree.trace("t") as trace:
        assert inner is not None
        trace.attach(inner)
    assert logtree.encode(trace).count(b'"section"') == 3000


# ---- Anything odd


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


@pytest.mark.parametrize("value", ODD, ids=range(len(ODD)))
def test_odd_values_go_through_every_call(value: Any, tmp_path: Any) -> None:
    with logtree.trace(value) as trace:
        with logtree.scope(value, odd=value), logtree.details_scope(value), logtree.detached(value) as loose:
            logtree.text(value)
        trace.attach(loose)
        loose.retitle(value)
        logtree.heading(value)
        logtree.details(value, summary=value)
        for rows in (value, [value], [[value, 1]], [{"a": value}], {"a": value}):
            logtree.table(rows, caption=value)
            logtree.table(rows, columns=value)
        logtree.table_from_dict({"a": value, value.__hash__ and str(id(value)): value})
        logtree.table_from_dict(value)
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
        logtree.exception(value)
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
    (table,) = logtree.find_tables(trace)
    assert table.rows == [[0], [1]]


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
    data = encoded(trace)["root"]["children"][0]
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
        logtree.table_from_dict({"x": 1, 2: "y"}, caption="c")
        logtree.table(pd.DataFrame({"p": [1, 2], "q": ["r", "s"]}))
        logtree.table(np.eye(2))
        logtree.table([])
    ragged, pairs, frame, array, empty = logtree.find_tables(trace)
    assert (ragged.columns, ragged.rows) == (["a", "1"], [[1, 2], [3, None], [4, None]])
    assert (pairs.columns, pairs.rows, pairs.caption) == (["key", "value"], [["x", 1], [2, "y"]], "c")
    assert (frame.columns, frame.rows) == (["p", "q"], [[1, "r"], [2, "s"]])
    assert array.rows == [[1.0, 0.0], [0.0, 1.0]]
    assert (empty.columns, empty.rows) == ([], [])
