"""Rows of every common layout as one thing: a conversation, or a prompt with its completion.

`messages` (with tools and reasoning), `prompt`/`completion`, alpaca, sharegpt, and a prompt with an answer
under the names that tasks have, too (envs/dataset_rows.py). What a row is, its keys say; a row that is none
of them is an error with file and line, never a skipped sample.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rollbook.data.llamafactory import read_call
from rollbook.envs.dataset_rows import ANSWER, EXPECTED, read_dataset_row
from rollbook.policies.chat_template import with_objects
from rollbook.records.columns import USUAL, Columns
from rollbook.records.identity import PROMPTS
from rollbook.records.json_array import elements, is_array
from rollbook.records.rows import COMPRESSED, Row, read_rows
from rollbook.rollouts.types import Message
from rollbook.runs.resolve import find_inputs
from rollbook.sft.settings import DatasetSettings

_QUESTION = "question with answer"
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
    "observation": "tool", "tool": "tool", "function_call": "assistant",
}  # fmt: skip


class Conversation(msgspec.Struct, frozen=True):
    """`messages`, or for a model without a chat template plain `prompt` and `completion`."""

    messages: list[Message] = []
    tools: list[dict[str, Any]] = []
    prompt: str | None = None
    completion: str | None = None
    assumed: str | None = None  # what was taken for what, where the names do not say it

    @property
    def is_chat(self) -> bool:
        return self.completion is None


def files_of(dataset: DatasetSettings) -> list[Path]:
    """The files of a dataset: what a job of `rollbook data` reads, and a file that is one JSON array."""
    path = Path(dataset.path).expanduser()
    if path.is_file() and path.suffix == ".json":
        return [path]
    return find_inputs([dataset.path]).paths


def read_conversations(
    dataset: DatasetSettings, log: Callable[[str], None] = lambda _: None
) -> Iterator[tuple[Row, Conversation]]:
    """`log` is told once per file what was taken for prompt and answer, where the names do not say it."""
    for path in files_of(dataset):
        told: set[str] = set()
        for row in _rows_of(path):
            conversation = conversation_of(row, dataset.format, dataset.names)
            if (assumed := conversation.assumed) and assumed not in told:
                told.add(assumed)
                log(f"{path}: {assumed} (columns.prompt=NAME and columns.answer=NAME name others)")
            yield row, conversation


def _rows_of(path: Path) -> Iterator[Row]:
    if path.suffix in (*COMPRESSED, ".parquet") or not is_array(path):
        return read_rows(path)
    return (Row(element.line, path, element.number, "element") for element in elements(path))


def conversation_of(row: Row, layout: str = "auto", columns: Columns = USUAL) -> Conversation:
    value = row.value()
    if row.path.suffix == ".parquet":
        value = _without_filling(value)
    if columns != USUAL:
        layout = _QUESTION
    elif layout == "auto":
        layout = _layout_of(value)
    reader = _READERS.get(layout) if layout != _QUESTION else partial(_from_question, columns=columns)
    if reader is None:
        raise row.error(
            f"has none of messages, prompt with completion, instruction with output, conversations, question "
            f"with answer (its keys: {', '.join(value) or 'none'}); columns.prompt=NAME columns.answer=NAME "
            "name others"
        )
    try:
        made = reader(value)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else error
        raise row.error(f"cannot be read as {layout}: {what}") from None
    for number, message in enumerate(made.messages):
        if not isinstance(message["content"], str | list):
            what = type(message["content"]).__name__
            raise row.error(f"cannot be read as {layout}: message {number + 1} is a {what}, not text")
    if made.is_chat and not any(message["role"] == "assistant" for message in made.messages):
        raise row.error("has no assistant message to learn from")
    return made


def _without_filling(value: Any) -> Any:
    """Columns give every call the arguments of all others, as null: a model would learn to write them."""
    if isinstance(value, dict):
        return {key: _without_filling(item) for key, item in value.items() if item is not None}
    return [_without_filling(item) for item in value] if isinstance(value, list) else value


def _layout_of(value: Mapping[str, Any]) -> str:
    if "messages" in value:
        return "messages"
    if "conversations" in value:
        return "sharegpt"
    if "prompt" in value and "completion" in value:
        return "prompt_completion"
    if "instruction" in value and "output" in value:
        return "alpaca"
    if ANSWER in value and any(name in value for name in PROMPTS):
        return _QUESTION
    return ""


def _from_messages(value: Mapping[str, Any]) -> Conversation:
    if not isinstance(value["messages"], list):
        raise TypeError(f"messages is a {type(value['messages']).__name__}, not a list")
    messages = [_message(message) for message in value["messages"]]
    return Conversation(messages=with_objects(messages), tools=_tools(value))


def _from_prompt(value: Mapping[str, Any]) -> Conversation:
    prompt, completion = value["prompt"], value["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Conversation(prompt=prompt, completion=completion)
    return _from_messages({"messages": [*prompt, *completion], "tools": value.get("tools")})


def _from_question(value: Mapping[str, Any], columns: Columns) -> Conversation:
    """A prompt, and the answer as the reply to it."""
    if columns.answer is None and ANSWER in value:
        columns = msgspec.structs.replace(columns, answer=ANSWER)
    found = read_dataset_row(value, columns)
    messages = [dict(message) for message in found.messages]
    tools = _tools({"tools": found.tools})
    if columns.answer is None and found.reply is not None:
        assumed = f"took {found.prompt_from} for the messages"
        return Conversation(messages=with_objects([*messages, found.reply]), tools=tools, assumed=assumed)
    if found.answer_from is not None:
        answer = found.row[EXPECTED]
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise TypeError(f"{found.answer_from} is a {type(answer).__name__}, not text")
        messages.append({"role": "assistant", "content": str(answer)})
    assumed = f"took {found.prompt_from} for the prompt and {found.answer_from} for the reply"
    return Conversation(messages=messages, tools=tools, assumed=assumed)


def _from_alpaca(value: Mapping[str, Any]) -> Conversation:
    instruction = value["instruction"] + (f"\n{value['input']}" if value.get("input") else "")
    messages: list[Message] = []
    if value.get("system"):
        messages.append({"role": "system", "content": value["system"]})
    for question, answer in value.get("history") or ():
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    messages += [{"role": "user", "content": instruction}, {"role": "assistant", "content": value["output"]}]
    return Conversation(messages=messages)


def _from_sharegpt(value: Mapping[str, Any]) -> Conversation:
    messages: list[Message] = []
    if value.get("system"):
        messages.append({"role": "system", "content": value["system"]})
    for turn in value["conversations"]:
        role, text = turn["from"], turn["value"]
        if role == "function_call":
            messages.append(read_call(text))
        else:
            if role not in _ROLES:
                raise ValueError(f"unknown role {role!r}; known roles: {', '.join(_ROLES)}")
            messages.append({"role": _ROLES[role], "content": text})
    return Conversation(messages=with_objects(messages), tools=_tools(value))


def _message(message: Mapping[str, Any]) -> Message:
    """As templates want it: null means absent, since columnar files fill up what a row does not have."""
    if not isinstance(message, Mapping):
        raise TypeError(f"a message is a {type(message).__name__}, not an object with role and content")
    kept = {key: item for key, item in message.items() if item is not None}
    if "role" not in kept:
        raise ValueError("a message has no role")
    kept["content"] = _text_of(kept.get("content", ""))
    return kept


def _text_of(content: Any) -> Any:
    """Parts of text as one text; with a part that is something else, such as a picture, as they are."""
    if not isinstance(content, list):
        return content
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content


def _tools(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = value.get("tools")
    if isinstance(tools, str):
        tools = json.loads(tools) if tools.strip() else []
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools or ()]


_READERS = {
    "messages": _from_messages,
    "prompt_completion": _from_prompt,
    "alpaca": _from_alpaca,
    "sharegpt": _from_sharegpt,
}
