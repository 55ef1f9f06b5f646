"""Whether a row of an input makes a request: it is decoded as far as it takes to know that."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from rollbook.errors import UsageError
from rollbook.records.identity import KEY

A_GOOD_ROW = (
    '{"id": "sum-1", "responses_create_params": {"input": [{"role": "user", "content": "What is 2 + 2?"}]}, '
    '"expected_answer": "4"}'
)
OTHER_ROWS = (
    "rows with messages, prompt or question are taken, too, and other names by columns.prompt=NAME "
    "columns.answer=NAME"
)
_SHOWN_PROBLEMS = 20
_LACKS = "it has no"


class _Array(msgspec.Struct, array_like=True, gc=False):
    """An array whose items are checked to be JSON and skipped: keeping them takes three times as long."""


class _Object(msgspec.Struct, gc=False):
    """The same for an object."""


class _InputItem(msgspec.Struct, gc=False):
    """One item of a conversation. An item of another type would be left out of the request."""

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


class _OtherParams(msgspec.Struct, gc=False):
    instructions: str | None = None
    tools: _Array | None = None
    metadata: _Object | None = None


class _Params(_OtherParams, kw_only=True, gc=False):
    input: str | Annotated[list[_InputItem], msgspec.Meta(min_length=1)]


class _AnyParams(_OtherParams, kw_only=True, gc=False):
    input: str | _Array


class Names(msgspec.Struct, gc=False):
    key: Any = msgspec.field(default=None, name=KEY)
    task_id: str | int | None = None
    id: str | int | None = None


class _Row(Names, kw_only=True, gc=False):
    responses_create_params: _Params
    agent_ref: Any = None

    @property
    def agent(self) -> str | None:
        """The agent that the row is meant for, where it says so."""
        name = self.agent_ref.get("name") if isinstance(self.agent_ref, dict) else None
        return name if isinstance(name, str) else None


class _RowForAServer(_Row, kw_only=True, gc=False):
    """A row that an agent server gets as it is."""

    responses_create_params: _AnyParams  # type: ignore[assignment]


class Agents(NamedTuple):
    """The agent that does the rows, and the others of the config, whose rows it must not do."""

    name: str = ""
    env: Mapping[str, Any] = {}
    others: frozenset[str] = frozenset()


def checker(agents: Agents, foreign: set[str]) -> Callable[[bytes], _Row]:
    """Decodes one row, or raises what is wrong with it."""
    decode = msgspec.json.Decoder(_row_type(agents.env)).decode

    def check(line: bytes) -> _Row:
        if not line.isascii():
            line.decode()  # msgspec does not look into text that it skips
        row: _Row = decode(line)
        if (agent := row.agent) is not None and agent != agents.name:
            if agent in agents.others:
                raise UsageError(
                    f"its agent_ref names {agent!r}; collect such rows apart, with agent_name={agent}"
                )
            foreign.add(agent)
        return row

    return check


def _row_type(env: Mapping[str, Any]) -> Any:
    """What a row must hold for this environment."""
    if env.get("name") == "gym":
        return _RowForAServer
    if env.get("name") == "dataset" and env.get("grader") != "regex":  # which has several places for it
        key, _, _ = str(env.get("answer_key", "expected_answer")).partition(".")
        if key not in _Row.__struct_fields__:
            answer = ("answer", str | bool | int | float | list[Any] | dict[str, Any])
            return msgspec.defstruct("Row", [answer], bases=(_Row,), rename={"answer": key}, kw_only=True)
    return _Row


def problem(path: Path, line: bytes, error: Exception) -> str:
    if line.startswith(codecs.BOM_UTF8):
        remove = rf"sed -i '1s/^\xEF\xBB\xBF//' {path}"
        return f"begins with a byte order mark; remove it: {remove}"
    text = str(error).replace("`$.", "`").replace("Object missing", _LACKS)
    if text.startswith("Invalid enum value"):
        text = f"an item of an unknown type: {text.removeprefix('Invalid enum value ')}"
    return f"{text[:1].lower()}{text[1:]}"


def all_problems(place: str, unit: str, problems: list[tuple[int, str]]) -> str:
    """The first problems in full, with an example of a good row, and the lines of the others."""
    listed = [f"{place}{line}: {text}" for line, text in problems[:_SHOWN_PROBLEMS]]
    for shown, (_, text) in enumerate(problems[:_SHOWN_PROBLEMS]):
        if text.startswith(_LACKS):
            listed[shown] += f"; {OTHER_ROWS}; a good row is like this: {A_GOOD_ROW}"
            break
    if others := [line for line, _ in problems[_SHOWN_PROBLEMS:]]:
        listed.append(f"... and {len(others)} more: {unit}s {_runs(others)}")
    count = "1 row" if len(problems) == 1 else f"{len(problems)} rows"
    return "\n  ".join([f"{count} of the input cannot be used, so nothing was sent:", *listed])


def _runs(lines: list[int]) -> str:
    """3, 7-12: rising numbers, those next to each other together."""
    runs: list[list[int]] = []
    for line in lines:
        if runs and line == runs[-1][1] + 1:
            runs[-1][1] = line
        else:
            runs.append([line, line])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
