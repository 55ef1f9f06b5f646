"""Preference pairs within one task: a better answer and a worse one to the very same prompt.

Within a task the best is paired with the worst, the second best with the second worst, and so on while the
gap in reward is wide enough: every rollout is in at most one pair, and the widest gaps come first. Rollouts
of different tasks never meet; neither do two whose prompts differ, whatever their ids say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import orjson

from rollbook.data.job import DataJob, DataManifest
from rollbook.data.llamafactory import DatasetEntry, Unsuitable, preference_row, refuse_unreadable, register
from rollbook.data.rollouts import prompt_of, reply_of, reward_of, tools_of
from rollbook.data.rows import Advance
from rollbook.data.table import RolloutTable, Spool, pick
from rollbook.records.row_keys import task_of

PASSES_OVER_INPUT = 2
Format = Literal["trl", "llamafactory"]
_QUESTION = """
    with ranked as (
        select task, row, reward,
            row_number() over (partition by task order by reward desc, row) as best,
            row_number() over (partition by task order by reward, row desc) as worst
        from rollouts where reward is not null and (not truncated or ?)
    )
    select chosen.row, rejected.row, chosen.reward - rejected.reward
    from ranked chosen join ranked rejected
        on chosen.task = rejected.task and chosen.best = rejected.worst and chosen.best < rejected.best
    where chosen.reward > rejected.reward and chosen.reward - rejected.reward >= ? - 1e-9
        and chosen.best <= ?
    order by chosen.row
"""


def pairs(
    inputs: Sequence[str | Path],
    output: Path,
    *,
    min_gap: float = 0.0,
    per_task: int = 1,
    as_format: Format = "trl",
    keep_truncated: bool = False,
    overwrite: bool = False,
    advance: Advance = lambda _: None,
) -> DataManifest:
    if as_format == "llamafactory":
        refuse_unreadable(output)
    arguments = {"min_gap": min_gap, "per_task": per_task, "format": as_format}
    arguments |= {"keep_truncated": keep_truncated}
    with (
        DataJob("pairs", inputs, output, arguments=arguments, overwrite=overwrite, advance=advance) as job,
        RolloutTable(job.rows()) as table,
    ):
        chosen = list(table.ask(_QUESTION, [keep_truncated, min_gap, per_task]))
        gaps = [gap for _, _, gap in chosen]
        for values in _contents(job, chosen):
            _write_pair(job, *values, as_format)
        _count(job, table, len(chosen))
        job.manifest.details |= {
            "gap_mean": sum(gaps) / len(gaps) if gaps else None,
            "gap_min": min(gaps, default=None),
            "gap_max": max(gaps, default=None),
        }
    if as_format == "llamafactory":
        register(output, DatasetEntry(ranking=True))
    return job.manifest


def _contents(
    job: DataJob, chosen: Sequence[tuple[Any, ...]]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Both rows of every pair, by a second pass that keeps only them, on the disk."""
    import numpy as np

    numbers = np.unique(np.array([place for pair in chosen for place in pair[:2]], dtype=np.int64))
    spool = Spool()
    try:
        for number, row in pick(job.rows(), numbers):
            spool.put(number, row)
        for better, worse, _ in chosen:
            yield spool.take(better).value(), spool.take(worse).value()
    finally:
        spool.close()


def _write_pair(job: DataJob, better: dict[str, Any], worse: dict[str, Any], as_format: Format) -> None:
    prompt, replies = prompt_of(better), (reply_of(better), reply_of(worse))
    if prompt != prompt_of(worse):
        job.count("prompts_differ")
    elif not prompt or not all(replies):
        job.count("without_prompt_or_reply")
    elif replies[0] == replies[1]:
        job.count("same_reply")
    else:
        row = {"task_id": task_of(better), "prompt": prompt, "chosen": replies[0], "rejected": replies[1]}
        if tools := tools_of(better):
            row["tools"] = tools
        if as_format == "llamafactory":
            try:
                row = preference_row(row)
            except Unsuitable as reason:
                job.count(f"llamafactory_{reason}")
                return
        scores = {"chosen_reward": reward_of(better), "rejected_reward": reward_of(worse)}
        job.write(orjson.dumps(row | scores))


def _count(job: DataJob, table: RolloutTable, found: int) -> None:
    tasks, with_two = table.one(
        "select count(*), count(*) filter (n > 1) from (select count(reward) n from rollouts group by task)"
    )
    job.count("tasks", tasks)
    job.count("tasks_with_two_rewards", with_two)
    job.count("pairs_found", found)
    job.count("without_reward", table.one("select count(*) from rollouts where reward is null")[0])
