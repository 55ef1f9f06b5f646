"""Preference pairs within one task: a better answer and a worse one to the very same prompt.

Within a task and a prompt, of answers that say the same the best stays. Then the best is paired with the
worst, the second best with the second worst, and so on while the gap in reward is wide enough; the widest
gaps come first. Every rollout is in at most one pair. Rollouts of different tasks never meet; neither do two
whose prompts differ, whatever their ids say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from rollbook.data.external_sort import ExternalSort
from rollbook.data.job import DataJob
from rollbook.data.llamafactory import (
    DatasetEntry,
    Unsuitable,
    list_dataset,
    preference_row,
    refuse_unreadable,
)
from rollbook.data.mixed_graders import note_different_graders, refuse_pairs_across_graders
from rollbook.data.progress import NO_PROGRESS, Progress
from rollbook.data.rollout_table import rollout_table, rows_at
from rollbook.data.rollouts import Exchange, Unusable, exchange_of, reward_of
from rollbook.query.connection import Kept
from rollbook.records.datasets import DataManifest
from rollbook.records.identity import task_id
from rollbook.records.numbers import std_error
from rollbook.records.rows import Row, encode_row, sorted_json

Format = Literal["trl", "llamafactory"]
_HELD = 100_000  # hashes that are handed over at once
_PAIRS = """
    create table pairs as
    with answers as (
        select n, task_id, prompt, reward from kept join hashes using (n)
        qualify row_number() over (partition by task_id, prompt, reply order by reward desc, n) = 1
    ), ranked as (
        select *, row_number() over (partition by task_id, prompt order by reward desc, n) as rank,
            count(*) over (partition by task_id, prompt) as answers
        from answers
    )
    select better.n as chosen, worse.n as rejected, better.reward - worse.reward as gap
    from ranked better join ranked worse using (task_id, prompt)
    where worse.rank = better.answers + 1 - better.rank and better.rank < worse.rank
        and gap > 0 and gap >= $1 - 1e-9
    qualify row_number() over (partition by task_id order by gap desc, chosen) <= $2
"""
_COUNTS = {
    "tasks": "count(*) from tasks",
    "tasks_with_two_rewards": "count(*) from tasks where rewards > 1",
    "pairs_found": "count(*) from pairs",
    "without_reward": "count(*) from kept where reward is null",
    "tasks_with_several_prompts": "count(*) from tasks where prompts > 1",
    "repeated_replies": "count(*) - count(distinct (task_id, prompt, reply)) from kept join hashes using (n)",
}
_ALWAYS = ("tasks", "tasks_with_two_rewards", "pairs_found", "without_reward")
_TASKS = """
    create view tasks as select count(reward) as rewards, count(distinct prompt) as prompts
    from kept left join hashes using (n) group by task_id
"""


def pairs(
    inputs: Sequence[str | Path],
    output: Path,
    *,
    min_gap: float = 0.0,
    per_task: int = 1,
    as_format: Format = "trl",
    keep_truncated: bool = False,
    allow_different_graders: bool = False,
    overwrite: bool = False,
    progress: Progress = NO_PROGRESS,
) -> DataManifest:
    """Refused where a pair would be of answers that different graders graded, unless that is allowed."""
    if as_format == "llamafactory":
        refuse_unreadable(output)
    arguments = {"min_gap": min_gap, "per_task": per_task, "format": as_format}
    arguments |= {"keep_truncated": keep_truncated, "allow_different_graders": allow_different_graders}
    with (
        DataJob("pairs", inputs, output, arguments=arguments, overwrite=overwrite, progress=progress) as job,
        rollout_table(job) as table,
    ):
        usable = "reward is not null and (not truncated or ?)"
        numbers = table.numbers(f"select n from kept where {usable}", [keep_truncated])
        _add_hashes(job, rows_at(job, numbers), table, as_format)
        table.run(_PAIRS, [min_gap, per_task])
        note_different_graders(job)
        if not allow_different_graders:
            refuse_pairs_across_graders(job, table)
        for better, worse in _contents(job, table):
            _write_pair(job, better.value(), worse.value(), as_format)
        _count(job, table, keep_truncated)
    if as_format == "llamafactory":
        list_dataset(output, DatasetEntry(ranking=True), job.manifest.rows_out)
    return job.manifest


def _add_hashes(job: DataJob, rows: Iterable[tuple[int, Row]], table: Kept, as_format: Format) -> None:
    """What was asked and answered, as the table `hashes`; rows that cannot be an example are counted."""
    held: list[tuple[int, int, int]] = []
    for number, row in rows:
        try:
            exchange = _exchange(row.value(), as_format)
        except Unusable as reason:
            job.count(str(reason))
            continue
        held.append((number, _hash([exchange.prompt, exchange.tools]), _hash(exchange.answer)))
        if len(held) == _HELD:
            _hand_over(table, held)
            held = []
    _hand_over(table, held)


def _hand_over(table: Kept, held: Sequence[tuple[int, int, int]]) -> None:
    numbers, prompts, replies = np.array(held, dtype=np.uint64).reshape(-1, 3).T
    table.add("hashes", n=numbers.astype(np.int64), prompt=prompts.copy(), reply=replies.copy())


def _exchange(value: dict[str, Any], as_format: Format) -> Exchange:
    exchange = exchange_of(value)
    if as_format == "llamafactory":
        try:
            preference_row(_row(exchange, exchange))
        except Unsuitable as reason:
            raise Unusable(f"llamafactory_{reason}") from None
    return exchange


def _contents(job: DataJob, table: Kept) -> Iterator[tuple[Row, Row]]:
    """Both rows of every pair, in the order of the better ones in the dataset."""
    sides = [table.numbers(f"select {side} from pairs order by chosen") for side in ("chosen", "rejected")]
    numbers, count = np.concatenate(sides), len(sides[0])
    rows = ExternalSort(job.scratch)
    for place, (_, row) in zip(np.argsort(numbers).tolist(), rows_at(job, numbers), strict=True):
        rows.add(place % count, place // count, row.data)
    ordered = (Row(data, job.paths[0], 0) for _, _, data in rows.ordered())
    return zip(ordered, ordered, strict=True)


def _write_pair(job: DataJob, better: dict[str, Any], worse: dict[str, Any], as_format: Format) -> None:
    row = _row(exchange_of(better), exchange_of(worse))
    who = {"task_id": task_id(better)}
    made = preference_row(row) if as_format == "llamafactory" else who | row
    scores = {"chosen_reward": reward_of(better), "rejected_reward": reward_of(worse)}
    job.write(encode_row(made | scores))


def _row(better: Exchange, worse: Exchange) -> dict[str, Any]:
    row: dict[str, Any] = {"prompt": better.prompt, "chosen": better.answer, "rejected": worse.answer}
    return row | ({"tools": better.tools} if better.tools else {})


def _hash(content: list[Any]) -> int:
    return xxhash.xxh3_64_intdigest(sorted_json(content))


def _count(job: DataJob, table: Kept, keep_truncated: bool) -> None:
    table.run(_TASKS)
    counts = {name: table.one(f"select {question}")[0] for name, question in _COUNTS.items()}
    if not keep_truncated:
        cut_off = "select count(*) from kept where reward is not null and truncated"
        counts["truncated"] = table.one(cut_off)[0]
    for name, count in counts.items():
        if count or name in _ALWAYS:
            job.count(name, count)
    moments = "count(gap), avg(gap), stddev_samp(gap), min(gap), max(gap)"
    count, mean, std, least, most = table.one(f"select {moments} from pairs")
    gap = {"mean": mean, "std_error": std_error(std, count), "min": least, "max": most}
    job.manifest.details |= {f"gap_{name}": value for name, value in gap.items()}
