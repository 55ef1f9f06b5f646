"""The keys that join: one function makes each, so that the same thing has the same name in every file.

- `run_id` (`id` in run.json, `run` in views) names a run: run.json, iteration files, token exports.
- `id` of index.yaml (`run` in the view `history`) names an entry of the history.
- `split`, `iteration`, `group_idx`, `traj_idx`, `step_idx` name a place in a run: the same files.
- `task_id` names a task: task rows, rollout summaries, transcripts, token exports.
- `task_digest`, in rows `_rb_task_digest`, is of what a task shows: summaries, transcripts, rows, failures.
- `_rb_key`, `<task id>#<repeat>` (`key` in views), names a rollout of a collection: collected rows, failures.
- `_ng_task_index`, `_ng_rollout_index` are a row of the input and its repeat, in one file and no other.

A task is named by its own id, else by a digest of what it shows. So it has one name as a row of an input, as
a rollout of ours or of others, and as a recorded trajectory. Tasks that share an id and show different things
are told apart by their digests (`1000~1a2b3c4d`), and tasks of one file that show the same by their order
(`...~2`). The forms in SQL are in query/task_ids.py; they call the functions here.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, overload

import orjson
import xxhash

from rollbook.records.layout import sanitize
from rollbook.records.messages import chat_tools, text_or_parts, to_chat
from rollbook.records.plain import canonical, canonical_of_plain, encode

KEY, DIGEST = "_rb_key", "_rb_task_digest"
STEPS = "_rb_steps"  # of a rollout of several turns: what each was and earned
METRICS = "_rb_metrics"  # the names of the fields that the environment measured
TASK_INDEX, ROLLOUT_INDEX = "_ng_task_index", "_ng_rollout_index"
OWN_IDS = ("task_id", "id")
PROMPTS = ("responses_create_params", "messages", "prompt", "question", "instruction", "input")
SHOWN = (*PROMPTS, "tools")  # the fields of a row that say what the policy is shown
_REPEAT_DIGITS = 18  # what every reader takes for a whole number
_MARK = 8  # hex digits of a digest behind an id
_ID_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_NOTHING: tuple[Any, ...] = (None, "", [], {})
SeedPart = str | int | None
Row = Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]


def task_id(task: Row | Messages, tools: Sequence[Any] = ()) -> str:
    """The id of a task, from its row, a row of a rollout of it, or all messages that the policy sees first.

    A row that has no id and shows nothing is named by all it says.
    """
    if not isinstance(task, Mapping):
        return _prompt_id(_said(task), tools)
    own = own_id(task)
    return own if own is not None else shown_id(task) or content_id(task)


@overload
def task_digest(task: Row) -> str | None: ...
@overload
def task_digest(task: Messages, tools: Sequence[Any] = ()) -> str: ...
def task_digest(task: Row | Messages, tools: Sequence[Any] = ()) -> str | None:
    """32 hex digits for what the policy is shown, messages and tools; None for a row that does not say it.

    Neither the order of keys counts, nor keys without a value, nor which API's form they have.
    """
    if not isinstance(task, Mapping):
        return _digest(_said(task), tools)
    if isinstance(known := task.get(DIGEST), str):
        return known
    shown = _shown(task)
    # A conversation that ends with a reply is an example: where its prompt ends it does not say.
    is_example = shown is not None and "messages" in task and shown[0][-1]["role"] == "assistant"
    return None if shown is None or is_example else _digest(*shown)


def own_id(row: Row) -> str | None:
    """The id that a row brings: of its key, `task_id` or `id`."""
    key = row.get(KEY)
    if isinstance(key, str):
        name = split_key(key)[0]
        has_mark = name[-_MARK - 1 : -_MARK] == "~"
        return (
            name[: -_MARK - 1]
            if has_mark and name == marked_id(name[: -_MARK - 1], task_digest(row))
            else name
        )
    for name in OWN_IDS:
        value = row.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool):
            return str(value)
    return None


def shown_id(row: Row) -> str | None:
    """The id of a row without one: a digest of what it shows; None where that is nothing."""
    shown = _shown(row)
    return None if shown is None else _prompt_id(*shown)


def content_id(row: Row) -> str:
    """A digest of all that a row says. Collections of before 0.2 named the tasks without an id by it."""
    content = {key: value for key, value in row.items() if not key.startswith("_ng_")}
    return "row-" + hashlib.blake2b(canonical(content), digest_size=10).hexdigest()


def marked_id(name: str, digest: str | None) -> str:
    """The name of a task whose id is that of another task, too."""
    return f"{name}~{digest[:_MARK]}" if digest else name


def numbered_id(name: str, number: int) -> str:
    """The name of the n-th task of a file that shows what the first of them shows."""
    return name if number == 1 else f"{name}~{number}"


def rollout_key(task_id: str, repeat: int) -> str:
    """No two rollouts of a collection share it."""
    return f"{task_id}#{repeat}"


def split_key(key: str) -> tuple[str, int | None]:
    """The task's id and the repeat of a rollout key; the repeat is None where the text is no such key."""
    name, mark, repeat = key.rpartition("#")
    is_repeat = mark and repeat.isdecimal() and repeat.isascii() and len(repeat) <= _REPEAT_DIGITS
    return (name, int(repeat)) if is_repeat else (key, None)


def repeat_of(row: Row) -> int | None:
    """Which rollout of its task a row is."""
    key = row.get(KEY)
    if isinstance(key, str):
        return split_key(key)[1]
    value = row.get(ROLLOUT_INDEX)
    is_repeat = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**_REPEAT_DIGITS
    return value if is_repeat else None


def row_key(row: Row) -> str | None:
    """The key of a row; None where a row does not say which rollout it is."""
    key = row.get(KEY)
    if isinstance(key, str):
        return key
    repeat = repeat_of(row)
    return None if repeat is None else rollout_key(task_id(row), repeat)


def new_run_id() -> str:
    """Unique without coordination, sortable by time: UTC seconds and 40 random bits."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return f"{stamp}-{''.join(secrets.choice(_ID_ALPHABET) for _ in range(8))}"


def new_history_id(name: str) -> str:
    """The same for an entry of the history, with its name."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return f"{stamp}-{sanitize(name)[:40].strip('._-') or 'unnamed'}-{os.urandom(5).hex()}"


def derive_seed(*parts: SeedPart) -> int:
    """A seed of 63 bits for a place, for example (run seed, iteration, environment, task, sample, turn).

    The same parts give the same seed on every machine and in every version. 1 and "1" are different parts.
    """
    for part in parts:
        if not (part is None or isinstance(part, str | int)) or isinstance(part, bool):
            raise TypeError(f"a part of a seed is text, a whole number or None, not {part!r}")
    # Whole numbers as text of their own kind: JSON has no more than 64 bits for them.
    tagged = [["i", str(int(part))] if isinstance(part, int) else part for part in parts]
    return xxhash.xxh3_64_intdigest(canonical_of_plain(tagged)) >> 1


def _shown(row: Row) -> tuple[list[dict[str, Any]], Sequence[Any]] | None:
    """The messages and tools of a row in any of the usual shapes; None where it has no conversation."""
    params = row.get("responses_create_params")
    instructions = None
    if isinstance(params, Mapping):
        messages, instructions, tools = (params.get(name) for name in ("input", "instructions", "tools"))
    else:
        name = next((name for name in PROMPTS if isinstance(row.get(name), str | list) and row[name]), None)
        messages, tools = (row[name] if name else None), row.get("tools")
    try:
        said = _said(messages or [], instructions)
        return (said, tools if isinstance(tools, list) else []) if said else None
    except (TypeError, KeyError, AttributeError, ValueError):  # it is no conversation
        return None


def _said(messages: str | Messages, instructions: str | None = None) -> list[dict[str, Any]]:
    """Messages in chat form, without what says nothing."""
    if isinstance(messages, str) or instructions or not all(map(_is_message, messages)):
        messages = to_chat(messages, instructions)
    return [_message(message) for message in messages]


def _is_message(item: Mapping[str, Any]) -> bool:
    return item.get("type") in (None, "message")


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role") or "user"
    # In the form of Responses a message has an id and a status, which are its server's.
    left_out = {"role", "content", "type", *(("id", "status") if "type" in message else ())}
    rest = {name: message[name] for name in sorted(message.keys() - left_out)}
    return {
        "role": "system" if role == "developer" else role,
        "content": text_or_parts(message.get("content")),
        **{name: value for name, value in rest.items() if value not in _NOTHING},
    }


def _tools(tools: Sequence[Any]) -> list[Any]:
    mappings = all(isinstance(tool, Mapping) for tool in tools)
    converted: list[Any] = _without_nulls(chat_tools(tools) if mappings else list(tools))
    return converted


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _digest(said: list[dict[str, Any]], tools: Sequence[Any]) -> str:
    return xxhash.xxh3_128_hexdigest(canonical([said, _tools(tools)]))


def _prompt_id(said: list[dict[str, Any]], tools: Sequence[Any]) -> str:
    # Role and content first, and then the others by name: as it has been since the first runs.
    prompt: list[Any] = [
        {name: orjson.Fragment(canonical(value)) for name, value in message.items()} for message in said
    ]
    if tools:
        prompt.append({"tools": orjson.Fragment(canonical(_tools(tools)))})
    return "sha256:" + hashlib.sha256(encode(prompt)).hexdigest()[:16]
