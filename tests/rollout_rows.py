"""Rows as a collector writes them, for the tests of everything that reads rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson


def rollout(task: str, repeat: int, reward: float | None, **changes: Any) -> dict[str, Any]:
    """One finished rollout with one reply; `changes` replace fields, `text` and `prompt` the words."""
    prompt = changes.pop("prompt", f"Do {task}.")
    text = changes.pop("text", f"{task} by try {repeat}")
    output = changes.pop("output", [message(text)])
    row = {
        "_rb_key": f"{task}#{repeat}",
        "_ng_rollout_index": repeat,
        "reward": reward,
        "responses_create_params": {"input": [{"role": "user", "content": prompt}]},
        "response": {
            "status": "completed",
            "output": output,
            "usage": {"input_tokens": 10, "output_tokens": len(text), "total_tokens": 10 + len(text)},
        },
        "stop_reason": "stop",
        "expected_answer": "4",
    }
    return row | changes


def message(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def tool_use(task: str) -> list[dict[str, Any]]:
    """Reasoning, a call, its result, and the answer."""
    return [
        {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": f"think {task}"}],
        },
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "calculator",
            "arguments": '{"expression": "2+2"}',
        },
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
        message("It is 4."),
    ]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
