"""Datasets as LLaMA-Factory reads them: sharegpt rows, and the entry in `dataset_info.json` that names them.

Its loader empties a sample whose turns do not alternate and says so only in a log; here such a sample is not
written, and counted with its reason. `tags` and `columns` name everything, because what they leave out its
parser takes for absent. The `openai` formatting is not used: it adds a system prompt of its own. Text that a
model wrote beside a tool call is kept: its parser takes a call between `<tool_call>` marks out of any text.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson

from rollbook.errors import BadFileError, LockedError, UsageError
from rollbook.policies.conversion import text_of
from rollbook.records.atomic import write_atomic
from rollbook.records.datasets import ENDINGS
from rollbook.records.locks import FileLock
from rollbook.records.plain import encode_document

DATASET_INFO = "dataset_info.json"
_READABLE = (".jsonl", ".parquet")  # of our endings, those its loader knows
_CALL = ("<tool_call>", "</tool_call>")
_THOUGHT = re.compile(r"<think>\n?(.*?)\n?</think>\n*", re.DOTALL)
_WAIT_S = 10.0
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


def refuse_unreadable(data_file: Path) -> None:
    """Before there is any work to lose: a file it cannot read, or that could not be listed."""
    if data_file.suffix not in _READABLE:
        raise UsageError(f"{data_file}: LLaMA-Factory reads {' and '.join(_READABLE)}; choose such an ending")
    _known(data_file.with_name(DATASET_INFO))


def register(data_file: Path, entry: DatasetEntry) -> str:
    """Name the file in the `dataset_info.json` beside it; what other entries are there stays. The name."""
    path = data_file.with_name(DATASET_INFO)
    name = dataset_name(data_file)
    lock = _lock(path)
    try:
        known = _known(path)
        known[name] = entry.entry(data_file.name)
        write_atomic(path, encode_document(known))
    finally:
        lock.release()
    return name


def list_dataset(data_file: Path, entry: DatasetEntry, rows: int) -> None:
    """Register it if there is something in it: its loader fails on a dataset without rows."""
    if rows:
        register(data_file, entry)
    else:
        _remove(data_file)


def _remove(data_file: Path) -> None:
    """The entry of an earlier file of this name, which had rows."""
    path = data_file.with_name(DATASET_INFO)
    name = dataset_name(data_file)
    if name not in _known(path):
        return
    lock = _lock(path)
    try:
        left = {other: entry for other, entry in _known(path).items() if other != name}
        write_atomic(path, encode_document(left))
    finally:
        lock.release()


def dataset_name(data_file: Path) -> str:
    """Its file without the ending; a comma would separate two names."""
    ending = next(ending for ending in ENDINGS if data_file.name.endswith(ending))
    return data_file.name.removesuffix(ending).replace(",", "_")


def _lock(path: Path) -> FileLock:
    """Others hold it for the time of one small write."""
    until = time.monotonic() + _WAIT_S
    while True:
        try:
            return FileLock(path)
        except LockedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


def _known(path: Path) -> dict[str, Any]:
    try:
        known = orjson.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):  # the output says so itself
        return {}
    except ValueError as error:
        raise BadFileError(path, f"not valid JSON ({error}); fix or delete it") from error
    if not isinstance(known, dict):
        raise BadFileError(path, "not an object of datasets; fix or delete it")
    return known


def _around(system: str | None, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, str]:
    """Always there, for a column that only some rows have changes its type from block to block."""
    functions = [_described(tool.get("function", tool)) for tool in tools or ()]
    return {"system": system or "", "tools": json.dumps(functions, ensure_ascii=False) if functions else ""}


def _described(function: Mapping[str, Any]) -> dict[str, Any]:
    """The tool with parameters and properties: the templates look for both, and fail without."""
    parameters = {"type": "object", **(function.get("parameters") or {})}
    return {**function, "parameters": {**parameters, "properties": parameters.get("properties") or {}}}


def _turns(messages: Sequence[Mapping[str, Any]]) -> tuple[str | None, list[dict[str, str]]]:
    system: str | None = None
    turns: list[dict[str, str]] = []
    for message in messages:
        role = message.get("role")
        if role == "system":
            if turns or system is not None:
                raise Unsuitable("system_prompt_in_the_middle")
            system = _content(message)
        elif role == "assistant":
            _alternate(turns, _ASKING)
            turns.append(_answer(message))
        elif role == "tool" and turns and turns[-1]["from"] == "observation":
            turns[-1]["value"] += "\n" + _content(message)  # the results of parallel calls are one turn
        elif role in ("user", "tool"):
            _alternate(turns, _ANSWERING)
            turns.append({"from": "human" if role == "user" else "observation", "value": _content(message)})
        else:
            raise Unsuitable("unknown_role")
    return system, turns


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list) and not all(
        isinstance(part.get("text", part.get("refusal")), str) for part in content
    ):
        raise Unsuitable("parts_that_are_not_text")
    return text_of(message)


def _alternate(turns: Sequence[Mapping[str, str]], before: Sequence[str]) -> None:
    if turns and turns[-1]["from"] not in before:
        raise Unsuitable("turns_do_not_alternate")
    if not turns and before is _ASKING:
        raise Unsuitable("begins_with_the_assistant")


def _answer(message: Mapping[str, Any]) -> dict[str, str]:
    thought = message.get("reasoning_content") or message.get("reasoning")
    text = _content(message)
    before = (f"<think>\n{thought}\n</think>\n\n" if thought else "") + text
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    if not calls:
        return {"from": "gpt", "value": before}
    if _CALL[0] in before:
        raise Unsuitable("mark_of_a_tool_call_in_the_text_beside_it")
    wanted = [{"name": call.get("name"), "arguments": call.get("arguments")} for call in calls]
    value = json.dumps(wanted[0] if len(wanted) == 1 else wanted, ensure_ascii=False)
    value = value.replace("<", "\\u003c")  # the same JSON, and nothing in it looks like a mark
    return {"from": "function_call", "value": before + (value.join(_CALL) if text else value)}


def read_call(value: str) -> dict[str, Any]:
    """A `function_call` turn as the message it came from; ValueError: there is no call in it."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    if thought := _THOUGHT.match(value):
        message["reasoning_content"] = thought[1]
        value = value[thought.end() :]
    before, mark, marked = value.partition(_CALL[0])
    if mark:
        message["content"], value = before, marked.rpartition(_CALL[1])[0]
    calls = json.loads(value)
    wanted = calls if isinstance(calls, list) else [calls]
    message["tool_calls"] = [{"type": "function", "function": call} for call in wanted]
    return message
