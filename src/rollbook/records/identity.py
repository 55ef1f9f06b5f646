"""The keys that join: one function makes each, so that the same thing has the same name everywhere.

`task_id` names a task: its own id, else a digest of its content. `task_digest` is a digest of what the policy
is shown, so two tasks that share an id by mistake are told apart. `rollout_key` names one repeat of a task.
`derive_seed` turns the place of a random choice into its seed, so that no choice depends on what came before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from rollbook.records.plain import canonical, canonical_of_plain, encode, to_plain

KEY = "_rb_key"
_OWN_IDS = ("task_id", "id")
_REPEAT_DIGITS = 18  # what every reader takes for a whole number
SeedPart = str | int | None


def task_id(task: Mapping[str, Any] | Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> str:
    """The id of a task, given as its row or as its prompt; the same in every iteration and every run.

    A row is named by `_rb_key`, `task_id` or `id`, else by a digest of its content. A prompt (all messages
    that the policy sees first, and its tools) is named by a digest.
    """
    if not isinstance(task, Mapping):
        return _prompt_id(task, tools)
    key = task.get(KEY)
    if isinstance(key, str):
        return split_key(key)[0]
    for name in _OWN_IDS:
        value = task.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool):
            return str(value)
    return content_id(task)


def task_digest(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> str:
    """32 hex digits for what the policy is shown; keys that are None do not count, nor does their order."""
    shown = [{name: value for name, value in message.items() if value is not None} for message in messages]
    return xxhash.xxh3_128_hexdigest(canonical([shown, list(tools)]))


def content_id(row: Mapping[str, Any]) -> str:
    """The id of a row that has none: a digest of all it says, in any order of keys."""
    content = {key: value for key, value in row.items() if not key.startswith("_ng_")}
    return "row-" + hashlib.blake2b(canonical(content), digest_size=10).hexdigest()


def rollout_key(task_id: str, repeat: int) -> str:
    """No two rollouts of a collection share it."""
    return f"{task_id}#{repeat}"


def split_key(key: str) -> tuple[str, int | None]:
    """The task's id and the repeat of a rollout key; the repeat is None where the text is no such key."""
    name, mark, repeat = key.rpartition("#")
    is_repeat = mark and repeat.isdecimal() and repeat.isascii() and len(repeat) <= _REPEAT_DIGITS
    return (name, int(repeat)) if is_repeat else (key, None)


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


def _prompt_id(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> str:
    prompt: list[Any] = []
    for message in messages:
        others = sorted(message.keys() - {"role", "content"})
        rest = {name: message[name] for name in others if message[name] is not None}
        prompt.append(to_plain({"role": message.get("role"), "content": message.get("content"), **rest}))
    if tools:
        prompt.append({"tools": to_plain(list(tools))})
    return "sha256:" + hashlib.sha256(encode(prompt)).hexdigest()[:16]
