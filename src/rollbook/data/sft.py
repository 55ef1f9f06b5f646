"""Rollouts as conversations to learn from: prompt, reasoning, tool calls and their results, all kept.

Every rollout that is not in the output is counted under its reason: no reward, a reward below the threshold,
cut off by a limit, nothing answered, not among the best of its task.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson

from rollbook.data.job import DataJob, DataManifest
from rollbook.data.llamafactory import (
    DatasetEntry,
    Unsuitable,
    conversation_row,
    list_dataset,
    refuse_unreadable,
)
from rollbook.data.rollouts import Unusable, exchange_of, reward_of
from rollbook.data.scratch import scratch_beside
from rollbook.data.table import RolloutTable, pick
from rollbook.data.verdicts import Verdicts
from rollbook.records.row_keys import KEY, task_of
from rollbook.records.rows import Advance, Row

PASSES_OVER_INPUT = 2
Format = Literal["messages", "llamafactory"]
_GOOD = "reward >= ? and (not truncated or ?)"


def sft(
    inputs: Sequence[str | Path],
    output: Path,
    *,
    min_reward: float | None = None,
    best_of: int | None = None,
    as_format: Format = "messages",
    keep_truncated: bool = False,
    overwrite: bool = False,
    advance: Advance = lambda _: None,
) -> DataManifest:
    """`best_of` keeps that many of each task's rollouts, the highest rewards first."""
    if as_format == "llamafactory":
        refuse_unreadable(output)
    threshold = float("-inf") if min_reward is None else min_reward
    arguments = {"min_reward": min_reward, "best_of": best_of, "format": as_format}
    arguments |= {"keep_truncated": keep_truncated}
    verdicts = Verdicts(lambda value: _example(value, as_format))
    with (
        DataJob("sft", inputs, output, arguments=arguments, overwrite=overwrite, advance=advance) as job,
        scratch_beside(output) as directory,
        RolloutTable(job.rows(), directory, None if best_of is None else verdicts.note) as table,
    ):
        good = [threshold, keep_truncated]
        _count(job, table, threshold, keep_truncated)
        if best_of is None:
            numbers = table.row_numbers(f"select row from rollouts where {_GOOD}", good)
        else:
            question = f"select task, row from rollouts where {_GOOD} order by task, reward desc, row"
            numbers = _best(job, table.ask(question, good), verdicts, best_of)
        for _, row in pick(job.rows(), numbers):
            _write(job, row, as_format)
    if as_format == "llamafactory":
        list_dataset(output, DatasetEntry(), job.manifest.rows_out)
    return job.manifest


def _best(
    job: DataJob, ranked: Iterable[tuple[Any, ...]], verdicts: Verdicts, best_of: int
) -> np.ndarray[Any, Any]:
    """The best examples of each task: a rollout that is none does not take the place of one that is."""
    chosen = array("q")
    for _, rollouts in groupby(ranked, key=itemgetter(0)):
        left = best_of
        for _, row in rollouts:
            if reason := verdicts.reason(row):
                job.count(reason)
            elif left:
                chosen.append(row)
                left -= 1
            else:
                job.count("not_among_the_best")
    return np.sort(np.asarray(chosen, dtype=np.int64))


def _write(job: DataJob, row: Row, as_format: Format) -> None:
    value = row.value()
    try:
        made = _example(value, as_format)
    except Unusable as reason:
        job.count(str(reason))
        return
    who = {"task_id": task_of(value), "reward": reward_of(value)}
    if KEY in value:
        who["rollout"] = value[KEY]
    job.write(orjson.dumps(made | who))


def _example(value: dict[str, Any], as_format: Format) -> dict[str, Any]:
    prompt, answer, tools = exchange_of(value)
    made: dict[str, Any] = {"messages": [*prompt, *answer]} | ({"tools": tools} if tools else {})
    if as_format == "messages":
        return made
    try:
        return conversation_row(made)
    except Unsuitable as reason:
        raise Unusable(f"llamafactory_{reason}") from None


def _count(job: DataJob, table: RolloutTable, threshold: float, keep_truncated: bool) -> None:
    reasons = {
        "without_reward": "reward is null",
        "below_min_reward": "reward < ?",
        "truncated": "reward >= ? and truncated",
    }
    for name, condition in reasons.items():
        if name == "truncated" and keep_truncated:
            continue
        values = [threshold] if "?" in condition else []
        if count := table.one(f"select count(*) from rollouts where {condition}", values)[0]:
            job.count(name, count)
