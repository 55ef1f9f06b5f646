"""Each row once: the first of its like stays, in the order of the input, and every other is counted.

Alike is what has the same content (keys in any order; the names and times that collecting gave a row do not
count), the same task, prompt or field, or, with `near`, text that is nearly the same. One pass finds for
every row the first one like it, a second copies. Exact: 16 bytes per row are held, and three times that while
they are sorted. Near: see `near_duplicates.py`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rollbook.data.job import DataJob
from rollbook.data.near_duplicates import NearDuplicates
from rollbook.data.output import RowOutput
from rollbook.data.progress import NO_PROGRESS, Progress
from rollbook.data.rollouts import prompt_of, reply_of
from rollbook.errors import UsageError
from rollbook.policies.conversion import text_of
from rollbook.records.datasets import DataManifest
from rollbook.records.field_paths import field_path, value_at
from rollbook.records.row_keys import row_key, task_of
from rollbook.records.rows import Row

REPEATS = "_rb_repeats"  # on a rejected row: the key, or the place, of the row it repeats
_BOOKKEEPING = ("_rb_", "_ng_")
_RESPONSE_BOOKKEEPING = frozenset({"id", "created_at", "completed_at"})
_CHAT = ("messages", "prompt", "question", "instruction", "input", "text", "chosen", "completion", "output")

Numbers = np.ndarray[Any, np.dtype[np.int64]]
Value = Mapping[str, Any]


def dedup(
    inputs: Sequence[str | Path],
    output: Path,
    *,
    on: str | None = None,
    near: float | None = None,
    rejected: Path | None = None,
    overwrite: bool = False,
    progress: Progress = NO_PROGRESS,
) -> DataManifest:
    """`on` is `task`, `prompt`, a field, or None for the whole row; `near` a Jaccard similarity."""
    if near is not None and not 0.5 <= near < 1:
        raise UsageError(f"--near {near:g}: a similarity from 0.5 up to 1; without --near only equal rows go")
    compared = _compared(on)
    with DataJob(
        "dedup",
        inputs,
        output,
        extra_outputs=[rejected],
        arguments={"on": on, "near": near, "rejected": str(rejected) if rejected is not None else None},
        overwrite=overwrite,
        progress=progress,
    ) as job:
        values = (compared(row.value()) for row in job.rows())
        first, incomparable = _first_equal(values) if near is None else _first_near(values, near)
        _copy(job, first, job.outputs[1] if rejected is not None else None)
        job.count("repeated", int((first != np.arange(len(first))).sum()))
        if incomparable:
            job.count("nothing_to_compare", incomparable)  # kept: they are like no other row
        job.manifest.details = _clusters(first)
    return job.manifest


def _compared(on: str | None) -> Callable[[Value], Any]:
    """What of a row is compared; None where the row has nothing there."""
    if on is None:
        return content_of
    if on == "task":
        return task_of
    if on == "prompt":
        return lambda row: prompt_of(row) or {name: row[name] for name in _CHAT[:5] if name in row} or None
    path = field_path(on)
    return lambda row: value_at(row, path)


def content_of(row: Value) -> dict[str, Any]:
    """A row without the names, numbers and times that collecting gave it."""
    content = {key: value for key, value in row.items() if not key.startswith(_BOOKKEEPING)}
    response = content.get("response")
    if isinstance(response, Mapping):
        kept = {key: value for key, value in response.items() if key not in _RESPONSE_BOOKKEEPING}
        if isinstance(items := kept.get("output"), list):
            kept["output"] = [_without_id(item) for item in items]
        content["response"] = kept
    return content


def _without_id(item: Any) -> Any:
    if not isinstance(item, Mapping):
        return item
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def _text(value: Any) -> str:
    """The words of what is compared: of a rollout its prompt and replies, else every text there is."""
    if isinstance(value, Mapping) and "responses_create_params" in value:
        return _spoken((*prompt_of(value), *reply_of(value)))
    if isinstance(value, Mapping):
        named = [value[name] for name in _CHAT if name in value]
        return "\n".join(_text(inner) for inner in (named or [value[k] for k in value if k != "role"]))
    if isinstance(value, list):
        if value and all(isinstance(item, Mapping) and "role" in item for item in value):
            return _spoken(value)
        return "\n".join(map(_text, value))
    return value if isinstance(value, str) else ""


def _spoken(messages: Sequence[Value]) -> str:
    """Without the system's words: a long one that all rows share would make them all alike."""
    texts: list[str] = []
    for message in messages:
        if message["role"] not in ("system", "developer"):
            texts.append(text_of(message))
            calls = message.get("tool_calls") or ()
            texts += [str(call.get("function")) for call in calls if isinstance(call, Mapping)]
    return "\n".join(texts)


def _first_equal(values: Iterable[Any]) -> tuple[Numbers, int]:
    """The number of the first row like it, for every row; and how many had nothing to compare."""
    digests, incomparable = bytearray(), 0
    for number, value in enumerate(values):
        incomparable += value is None
        plain = orjson.dumps(value, option=orjson.OPT_SORT_KEYS) if value is not None else b"row %d" % number
        digests += hashlib.blake2b(plain, digest_size=16).digest()
    halves = np.frombuffer(digests, dtype=np.uint64).reshape(-1, 2)
    order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: of equal ones the first comes first
    is_new = np.ones(len(order), dtype=bool)
    is_new[1:] = (halves[order[1:]] != halves[order[:-1]]).any(axis=1)
    starts = np.flatnonzero(is_new)
    first = np.empty(len(order), dtype=np.int64)
    first[order] = np.repeat(order[starts], np.diff(starts, append=len(order)))
    return first, incomparable


def _first_near(values: Iterable[Any], similarity: float) -> tuple[Numbers, int]:
    near = NearDuplicates(similarity)
    for value in values:
        near.add(_text(value))
    return np.array(near.first, dtype=np.int64), near.without_words


def _copy(job: DataJob, first: Numbers, rejected: RowOutput | None) -> None:
    repeated = set(first[first != np.arange(len(first))].tolist()) if rejected is not None else set()
    names: dict[int, str] = {}
    for number, (row, original) in enumerate(zip(job.rows(), first.tolist(), strict=True)):
        if number in repeated:
            names[number] = _name(row)
        if number == original:
            job.write(row.data)
        elif rejected is not None:
            rejected.write(orjson.dumps({**row.value(), REPEATS: names[original]}))


def _name(row: Row) -> str:
    return row_key(row.value()) or f"{row.path}:{row.number}"


def _clusters(first: Numbers) -> dict[str, Any]:
    """How many rows were like each other: size of a cluster -> how many of that size."""
    _, sizes = np.unique(first, return_counts=True)
    by_size = Counter(sizes.tolist())
    sizes_of_repeated = {str(size): count for size, count in sorted(by_size.items()) if size > 1}
    return {
        "clusters": sum(sizes_of_repeated.values()),
        "largest_cluster": int(sizes.max(initial=0)),
        "cluster_sizes": dict(list(sizes_of_repeated.items())[:50]),
    }
