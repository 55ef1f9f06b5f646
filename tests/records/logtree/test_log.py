"""The calls of library code: what they build, who they build it for, and that nothing makes them raise."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import pytest

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
        with logtree.scope("outer", group_idx=3, task_id="a/b", nothing=None), logtree.scope("inner"):
            logtree.text("deep")
        logtree.text("after")
    assert texts(trace.root) == ["before", "after"]
    (outer,) = sections(trace.root)
    assert outer.title == "outer"
    assert outer.attrs == {"data-group-idx": "3", "data-task-id": "a/b"}
    tags = [child.tag for child in outer.children if isinstance(child, Node)]
    assert tags == ["h2", "section"]
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
        logtree.table(value, value, columns=value)
        logtree.conversation(value, id=value)
        node.identify(reward=1)
    with logtree.under(node):
        logtree.text(value)


def test_nothing_is_looked_at_or_built_while_nobody_listens() -> None:
    call_everything(Untouchable())
    gc.collect()
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
        logtree.conversation([])
    assert [found.ids for found in logtree.find_conversations(trace)] == [
        {"group_idx": "1", "task_id": "y", "traj_idx": "2", "turn": "0"},
        {"group_idx": "1", "task_id": "x"},
    ]


def test_a_loose_section_has_the_headings_of_one_in_the_tree(tmp_path: Path) -> None:
    loose = logtree.section("loose", group_idx=0)
    with logtree.trace("t") as trace:
        with logtree.under(loose), logtree.scope("inner"):
            logtree.text("body")
        assert trace.root.children == []
        with logtree.scope("in the tree"), logtree.scope("inner"):
            logtree.text("body")
    logtree.write(trace, json=tmp_path / "t.json", more=[loose])
    written = sections(logtree.read(tmp_path / "t.json").root)
    for section, title in zip(written, ["in the tree", "loose"], strict=True):
        assert section.title == title
        headings = [section.children[0], sections(section)[0].children[0]]
        assert [heading.tag for heading in headings if isinstance(heading, Node)] == ["h2", "h3"]


def test_under_and_identify_change_a_closed_section() -> None:
    with logtree.trace("t") as trace:
        with logtree.scope("waiting") as node:
            pass
        with logtree.scope("elsewhere"):
            with logtree.under(node):
                logtree.text("late")
                with logtree.scope("inner"):
                    pass
            logtree.text("here")
        node.identify(reward=1.0)
    first, second = sections(trace.root)
    assert (first.title, texts(first), first.attrs) == ("waiting", ["late"], {"data-reward": "1.0"})
    assert [inner.title for inner in sections(first)] == ["inner"]
    assert texts(second) == ["here"]


def test_five_thousand_nested_scopes_stay_readable_everywhere(tmp_path: Path) -> None:
    blocks = [logtree.scope(f"level {level}", level=level) for level in range(5000)]
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
    assert found.ids == {"level": str(MAX_DEPTH - 1)}


def test_trees_attached_to_trees_without_end_can_still_be_written() -> None:
    with logtree.trace("deep") as trace:
        inner = Node("section", {}, [Node("h2", {}, ["innermost"])])
        for level in range(3000):
            inner = Node("section", {}, [Node("h2", {}, [str(level)]), inner])
        trace.root.children.append(inner)
    assert b"innermost" in logtree.encode(trace)
    assert b"innermost" in render(trace)
