"""A row of an input: what has to be in it, and what it is known by; and what is known of them all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import orjson

from rollbook.records.row_keys import content_id

A_GOOD_ROW = (
    '{"id": "sum-1", "responses_create_params": {"input": [{"role": "user", "content": "What is 2 + 2?"}]}, '
    '"expected_answer": "4"}'
)


class InputItem(msgspec.Struct, gc=False):
    """A part of a conversation. One of another type could not be sent on, and the rest would be another."""

    type: (
        Literal[
            "message",
            "reasoning",
            "function_call",
            "custom_tool_call",
            "function_call_output",
            "custom_tool_call_output",
        ]
        | None
    ) = None


class Items(msgspec.Struct, array_like=True, gc=False):
    """An array whose items are checked to be JSON and skipped: keeping them takes three times as long."""


class Object(msgspec.Struct, gc=False):
    """The same for an object."""


class Params(msgspec.Struct, gc=False):
    input: str | Annotated[list[InputItem], msgspec.Meta(min_length=1)]
    instructions: str | None = None
    tools: Items | None = None
    metadata: Object | None = None


class InputRow(msgspec.Struct, gc=False):
    responses_create_params: Params
    task_id: str | int | None = None
    id: str | int | None = None
    agent_ref: Any = None

    @property
    def is_named(self) -> bool:
        return self.task_id is not None or self.id is not None

    @property
    def agent(self) -> str | None:
        """That the row is meant for, where it says so."""
        name = self.agent_ref.get("name") if isinstance(self.agent_ref, dict) else None
        return name if isinstance(name, str) else None


class Agents(NamedTuple):
    """Which agent does the rows, and which others there are, whose rows it must not do."""

    asked: str = ""
    others: frozenset[str] = frozenset()
    needs: str | None = None  # a further field of a row, for the asked one


class Checked(NamedTuple):
    """What there is to know of an input."""

    problems: list[tuple[int, str]]  # by line number
    foreign_agents: set[str]  # that are named by rows and not known here
    places: list[tuple[int, int]]  # of a row in thousands: its number, and from where on to look for it
    hashes: bytes  # of the id of every row: 64-bit numbers, good in this process and its copies
    has_repeats: bool  # rows of one id


def needed_field(env: Mapping[str, Any]) -> str | None:
    """Without it, the built-in `dataset` cannot grade a row; other environments say so when they meet one."""
    if env.get("name") != "dataset" or env.get("grader") == "regex":  # whose rows have several places for it
        return None
    field, _, _ = str(env.get("answer_key", "expected_answer")).partition(".")
    return None if field in InputRow.__struct_fields__ else field


decode_row = msgspec.json.Decoder(InputRow).decode


def task_id(row: InputRow, line: bytes) -> str:
    given = row.task_id if row.task_id is not None else row.id
    return content_id(orjson.loads(line)) if given is None else str(given)
