"""What a row of an ordinary dataset asks, and what it expects: here, and nowhere else.

The prompt is `responses_create_params`, else the first of `messages`, `prompt`, `question`, `instruction` and
`input`: text, or messages. The expected answer is `expected_answer`, else `answer`, else the reply with which
the messages end, which then is no part of the prompt. `columns` names fields of other names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rollbook.envs.answers import look_up
from rollbook.policies.conversion import from_chat, responses_tools, text_of, to_chat
from rollbook.records.columns import USUAL, Columns
from rollbook.records.identity import PROMPTS
from rollbook.rollouts.types import Message

PARAMS, EXPECTED, ANSWER = "responses_create_params", "expected_answer", "answer"
_LAST_REPLY = "the last reply"
_SAY_IT = (None, PARAMS, "messages", "prompt", EXPECTED)
_NOT_PARAMS = frozenset({"input", "tools", "instructions"})


class DatasetRow(NamedTuple):
    """A row, and what was taken for what in it."""

    row: dict[str, Any]  # with its `expected_answer`, where it has one
    messages: list[Message]
    tools: list[Any]
    params: dict[str, Any]  # how to sample, where the row says it
    prompt_from: str
    answer_from: str | None
    reply: Message | None = None  # with which the messages ended

    @property
    def assumed(self) -> str | None:
        """What was taken for what; None where the names say it."""
        taken = {"prompt": self.prompt_from, "expected answer": self.answer_from}
        told = [f"{name} for the {what}" for what, name in taken.items() if name not in _SAY_IT]
        return f"took {', '.join(map(str, told))}" if told else None

    @property
    def with_params(self) -> dict[str, Any]:
        """The row as a line of an input: its prompt in `responses_create_params`."""
        if self.prompt_from == PARAMS:
            return self.row
        tools = {"tools": responses_tools(self.tools)} if self.tools else {}
        return {**self.row, PARAMS: {"input": from_chat(self.messages), **tools}}


def read_dataset_row(row: Mapping[str, Any], columns: Columns = USUAL) -> DatasetRow:
    """Raises KeyError, TypeError or ValueError, with the reason, for a row that asks nothing."""
    name, value = _prompt(row, columns)
    if name == PARAMS:
        messages = to_chat(value["input"], value.get("instructions"))
        tools, params = value.get("tools"), {key: value[key] for key in value if key not in _NOT_PARAMS}
    else:
        if not isinstance(value, str | list) or not value:
            raise ValueError(f"{name} is {value!r:.100}; it must be text or messages")
        messages, tools, params = to_chat(value), row.get("tools"), {}
    answer_from, kept, reply = _answer_field(row, columns), dict(row), None
    if name != PARAMS and len(messages) > 1 and messages[-1]["role"] == "assistant":
        reply = messages.pop()
        if answer_from is None and (text := text_of(reply)):
            answer_from, kept[EXPECTED] = _LAST_REPLY, text
    if answer_from not in (None, EXPECTED, _LAST_REPLY):
        kept[EXPECTED] = look_up(row, str(answer_from))
    return DatasetRow(kept, messages, list(tools or []), params, name, answer_from, reply)


def _prompt(row: Mapping[str, Any], columns: Columns) -> tuple[str, Any]:
    given = columns.prompt or columns.messages
    if given is not None:
        return given, look_up(row, given)
    if isinstance(row.get(PARAMS), Mapping):
        return PARAMS, row[PARAMS]
    names = [name for name in PROMPTS if name != PARAMS and name in row]
    usable = [name for name in names if isinstance(row[name], str | list) and row[name]]
    if found := (usable or names)[:1]:
        return found[0], row[found[0]]
    raise KeyError(
        f"the row has no responses_create_params, messages or prompt; it has: {', '.join(row)}; "
        "columns.prompt=NAME says where the prompt is, columns.answer=NAME the expected answer"
    )


def _answer_field(row: Mapping[str, Any], columns: Columns) -> str | None:
    """Where the expected answer is; a row with parameters of its own has it under the name it was given."""
    if columns.answer is not None:
        return columns.answer
    names = (EXPECTED,) if isinstance(row.get(PARAMS), Mapping) else (EXPECTED, ANSWER)
    return next((name for name in names if row.get(name) is not None), None)
