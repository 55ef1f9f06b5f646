"""Files: what is written comes back, peers can read it, theirs are read, broken ones are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollbook.errors import BadFileError
from rollbook.records import logtree
from rollbook.records.logtree import Node, Trace
from rollbook.records.logtree.log import exception_node
from rollbook.records.logtree.page import render


def rich_trace() -> Trace:
    with logtree.trace("Iteration <3> & more") as trace:
        logtree.text("a < b && c > d \u2028 \U0001f600")
        with logtree.scope("Group 0", group_idx=0, task_id="t&1"):
            logtree.conversation(
                [
                    {"role": "user", "content": [{"type": "text", "text": "<b>hi</b>"}]},
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"id": "c", "function": {"name": "f"}}],
                    },
                ],
                traj_idx=0,
            )
            logtree.table([{"reward": 0.5, "ok": True, "note": None, "n": 3}], caption="R")
        details = Node("details", {}, [Node("summary", {}, ["raw"]), Node("pre", {}, ["{}"])])
        trace.root.children += [details, exception_node(ValueError("<script>"))]
    return trace


def nodes(node: dict[str, Any]) -> list[dict[str, Any]]:
    inner = [child for child in node["children"] if isinstance(child, dict)]
    return [node, *(deeper for child in inner for deeper in nodes(child))]


def test_a_tree_comes_back_equal(tmp_path: Path) -> None:
    trace = rich_trace()
    logtree.write(trace, html=tmp_path / "train.html", json=tmp_path / "train_logtree.json")
    back = logtree.read(tmp_path / "train_logtree.json")
    assert (back.title, back.started_at, back.path) == (trace.title, trace.started_at, "train.html")
    assert back.root == trace.root
    assert render(back) == render(trace) == (tmp_path / "train.html").read_bytes()
    logtree.write(back, json=tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "train_logtree.json").read_bytes()


def test_either_file_can_be_left_out(tmp_path: Path) -> None:
    logtree.write(rich_trace(), json=tmp_path / "only.json")
    logtree.write(rich_trace(), html=str(tmp_path / "only.html"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["only.html", "only.json"]
    assert logtree.read(tmp_path / "only.json").path is None


def test_peers_find_the_keys_they_look_for(tmp_path: Path) -> None:
    logtree.write(rich_trace(), html=tmp_path / "train.html", json=tmp_path / "t.json")
    top = json.loads((tmp_path / "t.json").read_bytes())
    assert {"title", "started_at", "path", "root"} <= top.keys()
    assert top["root"]["tag"] == "body"
    everything = nodes(top["root"])
    for node in everything:
        assert {"tag", "attrs", "children"} <= node.keys() <= {"tag", "attrs", "children", "data"}
        assert all(isinstance(value, str) for value in node["attrs"].values())
    kinds = [node["data"]["type"] for node in everything if "data" in node]
    assert kinds == ["conversation", "table", "exception"]


def test_the_file_is_compact_and_its_text_unescaped() -> None:
    trace = rich_trace()
    raw = logtree.encode(trace)
    assert raw == json.dumps(json.loads(raw), ensure_ascii=False, separators=(",", ":")).encode()
    assert "a < b && c > d \u2028 \U0001f600".encode() in raw
    assert b"&lt;" not in raw and b"&amp;" not in raw
    with logtree.trace("t") as empty:
        pass
    with logtree.trace("t") as one:
        one.started_at = empty.started_at
        logtree.text("x" * 1000)
    assert len(logtree.encode(one)) - len(logtree.encode(empty)) <= 1000 + len(
        '{"tag":"p","attrs":{},"children":[""]}'
    )


def test_what_json_cannot_hold_is_replaced_and_nothing_else() -> None:
    with logtree.trace("t\ud800") as trace:
        logtree.text("x\udfffy")
        logtree.conversation(
            [{"role": "user", "content": "z\ud83d", "logprob": float("-inf"), "big": 10**5000}]
        )
    top = json.loads(logtree.encode(trace))
    message = top["root"]["children"][1]["data"]["messages"][0]
    assert top["title"] == "t\ufffd"
    assert top["root"]["children"][0]["children"] == ["x\ufffdy"]
    assert message == {"role": "user", "content": "z\ufffd", "logprob": None, "big": hex(10**5000)}


def test_a_peers_file_is_read_with_its_text_unescaped(peer_fixtures: Path) -> None:
    path = peer_fixtures / "tinker_sync" / "iteration_000000" / "train_logtree.json"
    raw = json.loads(path.read_bytes())
    trace = logtree.read(path)
    assert (trace.title, trace.started_at) == (raw["title"], raw["started_at"])
    found = list(logtree.find_conversations(trace))
    recorded = [
        node["data"] for node in nodes(raw["root"]) if node.get("data", {}).get("type") == "conversation"
    ]
    assert [one.messages for one in found] == [data["messages"] for data in recorded]
    tables = sum(node["tag"] == "table" for node in nodes(raw["root"]))
    assert tables > 0
    assert render(trace).count(b"<table>") == tables
    assert b"&amp;lt;" not in render(trace)


def test_strings_of_an_unmarked_file_are_unescaped_once(tmp_path: Path) -> None:
    paragraph = {"tag": "p", "attrs": {"class": "x"}, "children": ["1 &lt; 2 &amp;amp; 3", 7]}
    file = tmp_path / "peer.json"
    file.write_text(json.dumps({"title": "t", "root": {"tag": "body", "attrs": {}, "children": [paragraph]}}))
    trace = logtree.read(file)
    assert trace.root.children == [Node("p", {"class": "x"}, ["1 < 2 &amp; 3", "7"])]
    logtree.write(trace, json=tmp_path / "ours.json")
    assert logtree.read(tmp_path / "ours.json").root == trace.root


def test_odd_but_complete_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "odd.json"
    file.write_text(
        '{"root": {"children": [{"tag": 5, "attrs": 7, "data": "x", "children": "y"}, null, NaN]}}'
    )
    trace = logtree.read(file)
    assert trace.root.children == [Node("5", {}, []), "None", "nan"]
    assert render(trace).endswith(b"</html>\n")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not a complete JSON file"),
        (b'{"title": "t", "root": {"tag": "bo', "not a complete JSON file"),
        (b"\xff\xfe\x00", "not a complete JSON file"),
        (b"[1, 2]", "no root node"),
        (b'{"root": []}', "no root node"),
        (b"[" * 200_000, "not|nested too deeply"),
    ],
)
def test_a_broken_file_is_named_with_the_reason(content: bytes, why: str, tmp_path: Path) -> None:
    file = tmp_path / "broken_logtree.json"
    file.write_bytes(content)
    with pytest.raises(BadFileError, match=why) as caught:
        logtree.read(file)
    assert str(file) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match="No such file"):
        logtree.read(tmp_path / "nowhere.json")
