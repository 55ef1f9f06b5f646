"""The conversations that a chat template is tried with at the start."""

from __future__ import annotations

from typing import Any

from rollbook.policies.chat_template import Message

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
QUESTION: Message = {"role": "user", "content": "What is it?"}


def call_id(turn: int, number: int) -> str:
    """Nine letters and digits: some chat templates take nothing else."""
    return f"call{turn % 1000:03}{number % 100:02}"


def probe_call(number: int, word: str) -> dict[str, Any]:
    return {
        "id": call_id(0, number),
        "type": "function",
        "function": {"name": "look_up", "arguments": {"word": word}},
    }


PROBES: dict[str, Message] = {
    "text": {"role": "assistant", "content": "It is 7, I think."},
    "reasoning": {"role": "assistant", "content": "It is 7.", "reasoning_content": "Let me see."},
    "a tool call": {"role": "assistant", "content": "", "tool_calls": [probe_call(0, "one")]},
    "parallel tool calls": {
        "role": "assistant",
        "content": "",
        "tool_calls": [probe_call(0, "one"), probe_call(1, "two")],
    },
    "text with a tool call": {
        "role": "assistant",
        "content": "I look it up.",
        "tool_calls": [probe_call(0, "one")],
    },
}


def probe_word(kind: str) -> str:
    """The argument of the first call of a probe."""
    word: str = PROBES[kind]["tool_calls"][0]["function"]["arguments"]["word"]
    return word
