"""The calls of library code: what they build, who they build it for, and that nothing makes them raise."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollbook.errors import UsageError
from rollbook.records import logtree
from rollbook.records.logtree import Node, Trace
from rollbook.records.logtree.page import render
from rollbook.records.logtree.tree import MAX_DEPTH


def sections(node: Node) -> list[Node]:
    return [child for child in node.children if isinstance(child, Node) and child.tag == "section"]


def texts(node: Node) -> list[str]:
    """The paragraphs directly inside a node."""
    return [str(child.children[0]) for child in node.children if isinstance(child, Node) and child.tag == "p"]


def depth_of(root: Node) -> int:
    deepest, pending = 0, [(root, 0)]
    while pending:
        node, depth = pending.pop()
        deepest = max(deepest, depth)
        pending += [(child, depth + 1) for child in node.children if isinstance(child, Node)]
    return deepest


def files_of(trace: Trace, path: Path) -> tuple[dict[str, Any], str]:
    logtree.write(trace, html=path / "page.html", json=path / "page_logtree.json")
    return json.loads((path / "page_logtree.json").read_bytes()), (path / "page.html").read_text()


def test_scopes_nest_with_headings_one_level_apart() -> None:
    with logtree.trace("iteration") as trace:
        logtree.text("before")
        with logtree.scope("outer", group_idx=3, task_id="a/b", nothing=None):
            logtree.heading("inside")
            with logtree.scope("inner"):
                logtree.text("deep")
        logtree.text("after")
    assert texts(trace.root) == ["before", "after"]
    (outer,) = sections(trace.root)
    assert outer.title == "outer"
    assert outer.attrs == {"data-group-idx": "3", "data-task-id": "a/b"}
    tags = [child.tag for child in outer.children if isinstance(child, Node)]
    assert tags == ["h2", "h3", "section"]
    (inner,) = sections(outer)
    assert [child.tag for child in inner.children if isinstance(child, Node)] == ["h3", "p"]


def test_an_exception_ends_the_trace_recorded_and_raised() -> None:
    kept: list[Trace] = []
    with pytest.raises(ZeroDivisionError), logtree.trace("run") as trace:
        kept.append(trace)
        with logtree.scope("step"):
            _ = 1 / 0
    last = kept[0].root.children[-1]
    assert isinstance(last, Node) and last.data is not None
    assert last.data["exception"] == "ZeroDivisionError"
    assert last.data["message"] == "division by zero"
    assert "_ = 1 / 0" in last.data["traceback"]
    logtree.text("nobody listens any more")
    assert kept[0].root.children[-1] is last


def test_a_scope_around_functions_opens_anew_for_every_call() -> None:
    @logtree.scope("add", kind="sum")
    def add(left: int, right: int) -> int:
        """Sum."""
        logtree.text(left + right)
        return left + right

    @logtree.scope("later")
    async def later(value: int) -> int:
        await asyncio.sleep(0)
        logtree.text(value)
        return value

    async def main() -> list[int]:
        return list(await asyncio.gather(later(1), later(2)))

    assert (add.__name__, add.__doc__, add(1, 1)) == ("add", "Sum.", 2)
    with logtree.trace("t") as trace:
        assert (add(1, 2), add(3, right=4)) == (3, 7)
        assert asyncio.run(main()) == [1, 2]
    assert [(section.title, texts(section)) for section in sections(trace.root)] == [
        ("add", ["3"]),
        ("add", ["7"]),
        ("later", ["1"]),
        ("later", ["2"]),
    ]
    assert sections(trace.root)[0].attrs == {"data-kind": "sum"}


def test_a_scope_around_a_generator_is_refused_with_advice() -> None:
    def numbers() -> Iterator[int]:
        yield 1

    with pytest.raises(UsageError, match=r"put `with logtree\.scope"):
        logtree.scope("x")(numbers)


def test_a_thousand_interleaved_tasks_write_only_into_their_own_sections() -> None:
    async def rollout(number: int) -> None:
        with logtree.scope(f"rollout {number}", traj_idx=number):
            for turn in range(3):
                await asyncio.sleep(0.001 * ((number * 7 + turn) % 5))
                with logtree.scope(f"turn {turn}", turn=turn):
                    await asyncio.sleep(0)
                    logtree.text(f"{number}.{turn}")

    async def group(number: int) -> None:
        with logtree.scope(f"group {number}", group_idx=number):
            await asyncio.gather(*(rollout(number * 100 + member) for member in range(100)))

    async def main() -> Trace:
        with logtree.trace("busy") as trace:
            await asyncio.gather(*(group(number) for number in range(10)))
        return trace

    trace = asyncio.run(main())
    groups = sections(trace.root)
    assert [group.title for group in groups] == [f"group {number}" for number in range(10)]
    for number, group_node in enumerate(groups):
        assert {member.title for member in sections(group_node)} == {
            f"rollout {number * 100 + member}" for member in range(100)
        }
        for member in sections(group_node):
            identity = member.attrs["data-traj-idx"]
            assert [texts(turn) for turn in sections(member)] == [[f"{identity}.{turn}"] for turn in range(3)]


def test_threads_started_by_a_task_write_into_its_section() -> None:
    def work(number: int) -> None:
        with logtree.scope(f"thread {number}"):
            logtree.text(number)

    async def rollout(number: int) -> None:
        with logtree.scope(f"task {number}"):
            await asyncio.gather(asyncio.to_thread(work, number), asyncio.to_thread(work, number))

    async def main() -> Trace:
        with logtree.trace("threads") as trace:
            await asyncio.gather(*(rollout(number) for number in range(20)))
        return trace

    for number, task in enumerate(sections(asyncio.run(main()).root)):
        assert task.title == f"task {number}"
        assert [texts(thread) for thread in sections(task)] == [[str(number)]] * 2


def test_two_traces_in_two_tasks_stay_apart() -> None:
    async def one(name: str) -> Trace:
        with logtree.trace(name) as trace:
            for step in range(5):
                await asyncio.sleep(0)
                logtree.text(f"{name} {step}")
        return trace

    async def main() -> list[Trace]:
        return list(await asyncio.gather(one("a"), one("b")))

    for trace in asyncio.run(main()):
        assert texts(trace.root) == [f"{trace.title} {step}" for step in range(5)]


class Untouchable:
    """Fails the test when anybody as much as looks at it."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"looked at {name}")

    __str__ = __repr__ = lambda self: pytest.fail("shown")
    __iter__ = __len__ = lambda self: pytest.fail("walked")


def call_everything(value: Any) -> None:
    with logtree.scope(value, id=value) as node:
        logtree.text(value)
        logtree.heading(value)
        logtree.details(value, summary=value)
        logtree.table(value, value, columns=value)
        logtree.table_from_dict(value, value)
        logtree.conversation(value, id=value)
        logtree.exception(value)
        node.retitle("new")
        node.identify(reward=1)
    with logtree.detached(value), logtree.details_scope(value), logtree.under(node):
        logtree.text(value)


def test_nothing_is_looked_at_or_built_while_nobody_listens() -> None:
    call_everything(Untouchable())
    gc.collect()
    with logtree.trace("t") as trace, logtree.disabled():
        call_everything(Untouchable())
    assert trace.root.children == []
    with logtree.scope("nobody") as node:
        assert not node
        node.children.append("lost")
        node.attrs["data-lost"] = "x"
    with logtree.scope("nobody") as again:
        assert (again.children, again.attrs) == ([], {})


def test_a_conversation_is_a_copy() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    with logtree.trace("t") as trace:
        logtree.conversation(messages, traj_idx=0)
        messages[0]["content"] = "changed"
        messages.append({"role": "assistant", "content": "late"})
    (found,) = logtree.find_conversations(trace)
    assert found.messages == [{"role": "user", "content": "hi"}]
    assert found.ids == {"traj_idx": "0"}


def test_ids_are_merged_from_the_root_down() -> None:
    with logtree.trace("t") as trace, logtree.scope("g", group_idx=1, task_id="x"):
        with logtree.scope("r", traj_idx=2, task_id="y"):
            logtree.conversation([], turn=0)
            logtree.table([{"a": 1}], caption="c")
        logtree.table([[1]])
    (found,) = logtree.find_conversations(trace)
    assert found.ids == {"group_idx": "1", "task_id": "y", "traj_idx": "2", "turn": "0"}
    assert [table.ids for table in logtree.find_tables(trace)] == [
        {"group_idx": "1", "task_id": "y", "traj_idx": "2"},
        {"group_idx": "1", "task_id": "x"},
    ]


def test_detached_sections_are_kept_only_when_attached() -> None:
    with logtree.trace("t") as trace:
        with logtree.detached("kept", group_idx=0) as kept, logtree.scope("inner"):
            logtree.text("body")
        with logtree.detached("dropped"):
            logtree.text("gone")
        assert trace.root.children == []
        with logtree.scope("home"):
            trace.attach(kept)
    (home,) = sections(trace.root)
    assert sections(home) == [kept]
    headings = [kept.children[0], sections(kept)[0].children[0]]
    assert [heading.tag for heading in headings if isinstance(heading, Node)] == ["h3", "h4"]


def test_a_section_cannot_be_attached_to_itself() -> None:
    with (
        logtree.trace("t") as trace,
        logtree.detached("loop") as node,
        pytest.raises(UsageError, match="itself"),
    ):
        trace.attach(node)


def test_under_and_retitle_change_a_closed_section() -> None:
    with logtree.trace("t") as trace:
        with logtree.scope("waiting") as node:
            pass
        with logtree.scope("elsewhere"):
            with logtree.under(node):
                logtree.text("late")
                with logtree.scope("inner"):
                    pass
            logtree.text("here")
        node.retitle("reward 1.0")
        node.identify(reward=1.0)
    first, second = sections(trace.root)
    assert (first.title, texts(first), first.attrs) == ("reward 1.0", ["late"], {"data-reward": "1.0"})
    assert [inner.title for inner in sections(first)] == ["inner"]
    assert texts(second) == ["here"]


def test_details_hold_what_is_logged_inside() -> None:
    with logtree.trace("t") as trace, logtree.details_scope("more", open=True):
        logtree.text("inside")
        logtree.details("  pre\n", summary="raw")
    (outer,) = trace.root.children
    assert isinstance(outer, Node) and outer.tag == "details" and "open" in outer.attrs
    assert texts(outer) == ["inside"]
    inner = outer.children[-1]
    assert isinstance(inner, Node) and "open" not in inner.attrs
    pre = inner.children[1]
    assert isinstance(pre, Node) and (pre.tag, pre.children) == ("pre", ["  pre\n"])


def test_five_thousand_nested_scopes_stay_readable_everywhere(tmp_path: Path) -> None:
    blocks = [
        logtree.scope(f"level {level}", level=level, **{f"by_{level % 10}": level}) for level in range(5000)
    ]
    with logtree.trace("deep") as trace:
        for block in blocks:
            block.__enter__()
        logtree.conversation([{"role": "user", "content": "at the bottom"}])
        for block in reversed(blocks):
            block.__exit__(None, None, None)
        logtree.text("back at the top")
    assert depth_of(trace.root) <= MAX_DEPTH + 3
    assert texts(trace.root) == ["back at the top"]
    raw, html = files_of(trace, tmp_path)
    assert raw["root"]["children"]
    assert html.count("level ") >= 5000
    (found,) = logtree.find_conversations(logtree.read(tmp_path / "page_logtree.json"))
    assert found.ids == {"level": "4999", **{f"by_{digit}": str(4990 + digit) for digit in range(10)}}


def test_trees_attached_to_trees_without_end_can_still_be_written() -> None:
    with logtree.trace("deep") as trace:
        inner = Node("section", {}, [Node("h2", {}, ["innermost"])])
        for level in range(3000):
            inner = Node("section", {}, [Node("h2", {}, [str(level)]), inner])
        trace.root.children.append(inner)
    assert b"innermost" in logtree.encode(trace)
    assert b"innermost" in render(trace)
