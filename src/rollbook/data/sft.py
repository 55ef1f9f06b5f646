"""Rollouts as conversations to learn from: prompt, reasoning, tool calls and their results, all kept.

Every rollout that is not in the output is counted under its reason: no reward, a reward below the threshold,
cut off by a limit, nothing answered, not among the best of its task.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rollbook.data.job import DataJob
from rollbook.data.llamafactory import (
    DatasetEntry,
    Unsuitable,
    conversation_row,
    list_dataset,
    refuse_unreadable,
)
from rollbook.data.progress import NO_PROGRESS, Progress
from rollbook.data.rollout_table import rollout_table, rows_at
from rollbook.data.rollouts import Unusable, exchange_of, reward_of
from rollbook.query.connection import Kept
from rollbook.records.datasets import DataManifest
from rollbook.records.identity import KEY, task_id
from rollbook.records.rows import Row, encode_row

Format = Literal["messages", "llamafactory"]
_GOOD = "reward >= ? and (not truncated or ?)"
_BEST = """
    select n from (
        select n, row_number() over (partition by task_id order by reward desc, n) as place
        from kept join examples using (n)
    ) where place <= ? order by n
"""


def sft(
    inputs: Sequence[str | Path],
    output: Path,
    *,
    min_reward: float | None = None,
    best_of: int | None = None,
    as_format: Format = "messages",
    keep_truncated: bool = False,
    overwrite: bool = False,
    progress: Progress = NO_PROGRESS,
) -> DataManifest:
    """`best_of` keeps that many of each task's rollouts, the highest rewards first."""
    if as_format == "llamafactory":
        refuse_unreadable(output)
    threshold = float("-inf") if min_reward is None else min_reward
    arguments = {"min_reward": min_reward, "best_of": best_of, "format": as_format}
    arguments |= {"keep_truncated": keep_truncated}
    with (
        DataJob("sft", inputs, output, arguments=arguments, overwrite=overwrite, progress=progress) as job,
        rollout_table(job) as table,
    ):
        _count(job, table, threshold, keep_truncated)
        good = table.numbers(f"select n from kept where {_GOOD}", [threshold, keep_truncated])
        examples = _examples(job, rows_at(job, good), as_format)
        if best_of is not None:
            examples = _best(job, examples, table, best_of)
        for _, example in examples:
            job.write(example)
    if as_format == "llamafactory":
        list_dataset(output, DatasetEntry(), job.manifest.rows_out)
    return job.manifest


def _examples(
    job: DataJob, rows: Iterable[tuple[int, Row]], as_format: Format
) -> Iterator[tuple[int, bytes]]:
    """Each row as an example, with its number; those that are none are counted."""
    for number, row in rows:
        value = row.value()
        try:
            made = _example(value, as_format)
        except Unusable as reason:
            job.count(str(reason))
            continue
        who = {"task_id": task_id(value), "reward": reward_of(value)}
        if KEY in value:
            who["rollout"] = value[KEY]
        yield number, encode_row(made | who)


def _best(
    job: DataJob, examples: Iterable[tuple[int, bytes]], table: Kept, best_of: int
) -> Iterator[tuple[int, bytes]]:
    """The best examples of each task: a rollout that is none does not take the place of one that is."""
    numbers = array("q")
    with (job.scratch / "examples").open("x+b") as spool:
        for number, example in examples:
            numbers.append(number)
            spool.write(example + b"\n")
        table.add("examples", n=np.asarray(numbers, dtype=np.int64))
        chosen = table.ask(_BEST, [best_of])
        following = next(chosen, (None,))[0]
        spool.seek(0)
        for number, example in zip(numbers, spool, strict=True):
            if number == following:
                yield number, example[:-1]
                following = next(chosen, (None,))[0]
            else:
                job.count("not_among_the_best")


def _example(value: dict[str, Any], as_format: Format) -> dict[str, Any]:
    prompt, answer, tools = exchange_of(value)
    made: dict[str, Any] = {"messages": [*prompt, *answer]} | ({"tools": tools} if tools else {})
    if as_format == "messages":
        return made
    try:
        return conversation_row(made)
    except Unsuitable as reason:
        raise Unusable(f"llamafactory_{reason}") from None


def _count(job: DataJob, table: Kept, threshold: float, keep_truncated: bool) -> None:
    reasons = {
        "without_reward": "reward is null",
        "below_min_reward": "reward < ?",
        "truncated": "reward >= ? and truncated",
    }
    for name, condition in reasons.items():
        if name == "truncated" and keep_truncated:
            continue
        values = [threshold] if "?" in condition else []
        if count := table.one(f"select count(*) from kept where {condition}", values)[0]:
            job.count(name, count)
