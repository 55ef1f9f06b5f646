"""Datasets as LLaMA-Factory reads them: sharegpt rows, and the entry in `dataset_info.json` that names them.

Its loader empties a sample whose turns do not alternate and says so only in a log; here such a sample is not
written, and counted with its reason. `tags` and `columns` name everything, because what they leave out its
parser takes for absent. The `openai` formatting is not used: it adds a system prompt of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson

from rollbook.policies.conversion import text_of
from rollbook.records.atomic import write_atomic

DATASET_INFO = "dataset_info.json"
_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
_ASKING, _ANSWERING = ("human", "observation"), ("gpt", "function_call")


class Unsuitable(Exception):
    """Why a conversation has no place in this layout; the text is a counter's name."""


class DatasetEntry(msgspec.Struct, frozen=True):
    ranking: bool = False

    def entry(self, file_name: str) -> dict[str, Any]:
        columns = {"messages": "conversations", "system": "system", "tools": "tools"}
        if self.ranking:
            columns |= {"chosen": "chosen", "rejected": "rejected"}
        made: dict[str, Any] = {"file_name": file_name, "formatting": "sharegpt", "columns": columns}
        return made | {"tags": dict(_TAGS)} | ({"ranking": True} if self.ranking else {})


def conversation_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with `messages` (and `tools`) as a sharegpt conversation."""
    system, turns = _turns(row["messages"])
    if len(turns) % 2 or not turns:
        raise Unsuitable("last_turn_is_not_the_assistant")
    return {"conversations": turns, **_around(system, row.get("tools"))}


def preference_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A preference pair: the conversation so far, and one turn chosen and one rejected."""
    system, turns = _turns(row["prompt"])
    ends = [_turns([*row["prompt"], *row[side]])[1][len(turns) :] for side in ("chosen", "rejected")]
    if any(len(end) != 1 for end in ends):
        raise Unsuitable("reply_of_several_turns")
    return {
        "conversations": turns,
        "chosen": ends[0][0],
        "rejected": ends[1][0],
        **_around(system, row.get("tools")),
    }


def register(data_file: Path, entry: DatasetEntry) -> None:
    """Name the file in the `dataset_info.json` beside it; what other entries are there stays."""
    path = data_file.with_name(DATASET_INFO)
    known = orjson.loads(path.read_bytes()) if path.exists() else {}
    known[data_file.name.partition(".")[0]] = entry.entry(data_file.name)
    write_atomic(path, orjson.dumps(known, option=orjson.OPT_INDENT_2) + b"\n")


def _around(system: str | None, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, str]:
    """Always there, for a column that only some rows have changes its type from block to block."""
    functions = [tool.get("function", tool) for tool in tools or ()]
    return {"system": system or "", "tools": json.dumps(functions, ensure_ascii=False) if functions else ""}


def _turns(messages: Sequence[Mapping[str, Any]]) -> tuple[str | None, list[dict[str, str]]]:
    system: str | None = None
    turns: list[dict[str, str]] = []
    for message in messages:
        role = message.get("role")
        if role == "system":
            if turns or system is not None:
                raise Unsuitable("system_prompt_in_the_middle")
            system = text_of(message)
        elif role == "assistant":
            _alternate(turns, _ASKING)
            turns.append(_answer(message))
        elif role == "tool" and turns and turns[-1]["from"] == "observation":
            turns[-1]["value"] += "\n" + text_of(message)  # the results of parallel calls are one turn
        elif role in ("user", "tool"):
            _alternate(turns, _ANSWERING)
            turns.append({"from": "human" if role == "user" else "observation", "value": text_of(message)})
        else:
            raise Unsuitable("unknown_role")
    return system, turns


def _alternate(turns: Sequence[Mapping[str, str]], before: Sequence[str]) -> None:
    if turns and turns[-1]["from"] not in before:
        raise Unsuitable("turns_do_not_alternate")
    if not turns and before is _ASKING:
        raise Unsuitable("begins_with_the_assistant")


def _answer(message: Mapping[str, Any]) -> dict[str, str]:
    thought = message.get("reasoning_content") or message.get("reasoning")
    text = (f"<think>\n{thought}\n</think>\n\n" if thought else "") + text_of(message)
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    if not calls:
        return {"from": "gpt", "value": text}
    if text_of(message):
        raise Unsuitable("text_beside_a_tool_call")
    wanted = [{"name": call.get("name"), "arguments": call.get("arguments")} for call in calls]
    value = json.dumps(wanted[0] if len(wanted) == 1 else wanted, ensure_ascii=False)
    return {"from": "function_call", "value": text + value}
