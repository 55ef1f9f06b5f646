"""Rollouts as conversations to learn from: prompt, reasoning, tool calls and their results, all kept.

Every rollout that is not in the output is counted under its reason: no reward, a reward below the threshold,
cut off by a limit, nothing answered, not among the best of its task.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import orjson

from rollbook.data.job import DataJob, DataManifest
from rollbook.data.llamafactory import DatasetEntry, Unsuitable, conversation_row, refuse_unreadable, register
from rollbook.data.rollouts import prompt_of, reply_of, reward_of, tools_of
from rollbook.data.rows import Advance, Row
from rollbook.data.table import RolloutTable, pick
from rollbook.records.row_keys import KEY, task_of

PASSES_OVER_INPUT = 2
Format = Literal["messages", "llamafactory"]
_BEST = """
    select row from (
        select row, row_number() over (partition by task order by reward desc, row) as place
        from rollouts where reward >= ? and (not truncated or ?)
    ) where place <= ?
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
    advance: Advance = lambda _: None,
) -> DataManifest:
    """`best_of` keeps that many of each task's rollouts, the highest rewards first."""
    if as_format == "llamafactory":
        refuse_unreadable(output)
    threshold = float("-inf") if min_reward is None else min_reward
    arguments = {"min_reward": min_reward, "best_of": best_of, "format": as_format}
    arguments |= {"keep_truncated": keep_truncated}
    with (
        DataJob("sft", inputs, output, arguments=arguments, overwrite=overwrite, advance=advance) as job,
        RolloutTable(job.rows()) as table,
    ):
        good = "reward >= ? and (not truncated or ?)"
        _count(job, table, threshold, keep_truncated)
        if best_of is None:
            numbers = table.row_numbers(f"select row from rollouts where {good}", [threshold, keep_truncated])
        else:
            numbers = table.row_numbers(_BEST, [threshold, keep_truncated, best_of])
            suited = table.one(f"select count(*) from rollouts where {good}", [threshold, keep_truncated])[0]
            job.count("not_among_the_best", suited - len(numbers))
        for _, row in pick(job.rows(), numbers):
            _write(job, row, as_format)
    if as_format == "llamafactory":
        register(output, DatasetEntry())
    return job.manifest


def _write(job: DataJob, row: Row, as_format: Format) -> None:
    value = row.value()
    prompt, reply = prompt_of(value), reply_of(value)
    if not prompt:
        job.count("without_prompt")
    elif not any(message["role"] == "assistant" for message in reply):
        job.count("without_reply")
    else:
        made: dict[str, Any] = {"messages": [*prompt, *_until_last_reply(reply)]}
        if tools := tools_of(value):
            made["tools"] = tools
        if as_format == "llamafactory":
            try:
                made = conversation_row(made)
            except Unsuitable as reason:
                job.count(f"llamafactory_{reason}")
                return
        who = {"task_id": task_of(value), "reward": reward_of(value)}
        if KEY in value:
            who["rollout"] = value[KEY]
        job.write(orjson.dumps(made | who))


def _until_last_reply(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What an environment said after the last reply teaches nothing."""
    while messages and messages[-1]["role"] != "assistant":
        messages = messages[:-1]
    return messages


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
