"""The messages of collected rows: instructions, reasoning, refusals and replies, each in its column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from rollbook.policies.conversion import from_chat
from rollbook.query.session import Session


def messages_of(path: Path, row: dict[str, Any]) -> list[tuple[Any, ...]]:
    path.write_bytes(orjson.dumps(row) + b"\n")
    sql = "select role, content, reasoning from transcripts order by message_idx"
    return [line for batch in Session([path]).run(sql).batches for line in batch]


def test_instructions_are_the_first_message(tmp_path: Path) -> None:
    asked = {"instructions": "Be brief.", "input": "Hi"}
    found = messages_of(tmp_path / "rows.jsonl", {"task_id": 1, "responses_create_params": asked})
    assert found == [("system", "Be brief.", None), ("user", "Hi", None)]
    for nothing in (None, ""):
        row = {"task_id": 1, "responses_create_params": {"instructions": nothing, "input": "Hi"}}
        assert messages_of(tmp_path / "rows.jsonl", row) == [("user", "Hi", None)]


@pytest.mark.parametrize(
    "thought",
    [
        {"summary": [], "content": [{"type": "reasoning_text", "text": "one"}]},
        {"summary": [{"type": "summary_text", "text": "one"}]},
        {"summary": [{"type": "summary_text", "text": "one"}], "content": []},
    ],
)
def test_reasoning_is_no_content(tmp_path: Path, thought: dict[str, Any]) -> None:
    output = [{"type": "reasoning", **thought}, *from_chat([{"role": "assistant", "content": "1"}])]
    row = {"task_id": 1, "responses_create_params": {"input": "Hi"}, "response": {"output": output}}
    found = messages_of(tmp_path / "rows.jsonl", row)
    assert found[1:] == [("assistant", None, "one"), ("assistant", "1", None)]


def test_the_converters_items_are_read_back(tmp_path: Path) -> None:
    output = from_chat([{"role": "assistant", "reasoning_content": "one", "content": "1"}])
    found = messages_of(tmp_path / "rows.jsonl", {"task_id": 1, "response": {"output": output}})
    assert found == [("assistant", None, "one"), ("assistant", "1", None)]
    chat = [{"role": "assistant", "reasoning": "one", "content": ["1", {"type": "text", "text": "2"}]}]
    assert messages_of(tmp_path / "rows.jsonl", {"task_id": 1, "messages": chat}) == [
        ("assistant", "12", "one")
    ]


def test_a_refusal_is_what_was_said(tmp_path: Path) -> None:
    part = {"type": "refusal", "refusal": "No."}
    output = [{"type": "message", "role": "assistant", "content": [part]}]
    found = messages_of(tmp_path / "rows.jsonl", {"task_id": 1, "response": {"output": output}})
    assert found == [("assistant", "No.", None)]
    chat = [{"role": "assistant", "content": None, "refusal": "No."}]
    found = messages_of(tmp_path / "rows.jsonl", {"task_id": 1, "messages": chat})
    assert found == [("assistant", "No.", None)]
