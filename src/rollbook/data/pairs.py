"""Preference pairs within one task: a better answer and a worse one to the very same prompt.

Within a task and a prompt the best is paired with the worst, the second best with the second worst, and so on
while the gap in reward is wide enough; where two say the same, or would make a pair that is there already,
the next worst takes its place. Every rollout is in at most one pair, and the widest gaps come first. Rollouts
of different tasks never meet; neither do two whose prompts differ, whatever their ids say.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import orjson
import xxhash

from rollbook.data.job import DataJob, DataManifest
from rollbook.data.llamafactory import (
    DatasetEntry,
    Unsuitable,
    list_dataset,
    preference_row,
    refuse_unreadable,
)
from rollbook.data.rollouts import Exchange, Unusable, exchange_of, reward_of
from rollbook.data.scratch import scratch_beside
from rollbook.data.table import RolloutTable, Spool, pick
from rollbook.data.verdicts import Verdicts
from rollbook.records.row_keys import task_of
from rollbook.records.rows import Advance

PASSES_OVER_INPUT = 2
Format = Literal["trl", "llamafactory"]
_SAME = 1e-9
_RANKED = """
    select task, row, reward from rollouts where reward is not null and (not truncated or ?)
    order by task, reward desc, row
"""
_PASSED_OVER = _SAME_REPLY, _SAME_PAIR = ("same_reply", "same_pair_again")


class Pair(NamedTuple):
    """Numbers of rows."""

    chosen: int
    rejected: int
    gap: float


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
    answers = _Answers(as_format)
    with (
        DataJob("pairs", inputs, output, arguments=arguments, overwrite=overwrite, advance=advance) as job,
        scratch_beside(output) as directory,
        RolloutTable(job.rows(), directory, answers.verdicts.note) as table,
    ):
        ranked = table.ask(_RANKED, [keep_truncated])
        chosen = _choose(job, ranked, answers, _Wanted(min_gap, per_task))
        for better, worse in _contents(job, chosen, directory):
            _write_pair(job, better, worse, as_format)
        _count(job, table, len(chosen), keep_truncated)
        gaps = [pair.gap for pair in chosen]
        job.manifest.details |= {
            "gap_mean": sum(gaps) / len(gaps) if gaps else None,
            "gap_min": min(gaps, default=None),
            "gap_max": max(gaps, default=None),
        }
    if as_format == "llamafactory":
        list_dataset(output, DatasetEntry(ranking=True), job.manifest.rows_out)
    return job.manifest


class _Answers:
    """Of each row what decides whom it may be paired with: hashes of what was asked and answered."""

    def __init__(self, as_format: Format) -> None:
        self.verdicts = Verdicts(self._note)
        self.prompts, self.replies = array("Q"), array("Q")
        self._format = as_format

    def _note(self, value: dict[str, Any]) -> None:
        for hashes in (self.prompts, self.replies):
            hashes.append(0)
        exchange = exchange_of(value)
        if self._format == "llamafactory":
            try:
                preference_row(_row(exchange, exchange))
            except Unsuitable as reason:
                raise Unusable(f"llamafactory_{reason}") from None
        self.prompts[-1] = _hash([exchange.prompt, exchange.tools])
        self.replies[-1] = _hash(exchange.answer)


class _Wanted(NamedTuple):
    min_gap: float
    per_task: int


class _Candidate(NamedTuple):
    row: int
    reward: float
    reply: int


def _choose(
    job: DataJob, ranked: Iterable[tuple[Any, ...]], answers: _Answers, wanted: _Wanted
) -> list[Pair]:
    """The pairs of every task, in the order in which their better sides stand in the dataset."""
    chosen: list[Pair] = []
    for _, rollouts in groupby(ranked, key=itemgetter(0)):
        by_prompt: dict[int, list[_Candidate]] = defaultdict(list)
        for _, row, reward in rollouts:
            if reason := answers.verdicts.reason(row):
                job.count(reason)
            else:
                by_prompt[answers.prompts[row]].append(_Candidate(row, reward, answers.replies[row]))
        if len(by_prompt) > 1:
            job.count("tasks_with_several_prompts")
        found = [pair for candidates in by_prompt.values() for pair in _match(job, candidates, wanted)]
        chosen += sorted(found, key=lambda pair: -pair.gap)[: wanted.per_task]
    return sorted(chosen)


def _match(job: DataJob, ranked: Sequence[_Candidate], wanted: _Wanted) -> list[Pair]:
    """Each, the best first, with the worst that is left and makes a pair with it."""
    places: dict[int, list[int]] = defaultdict(list)  # of each reply, the worst place last
    for place, candidate in enumerate(ranked):
        places[candidate.reply].append(place)
    worst = [(-some[-1], reply) for reply, some in places.items()]  # one a reply: skipping it skips them all
    heapify(worst)
    made: dict[tuple[int, int], Pair] = {}
    rejected: set[int] = set()
    for better in ranked:
        if better.row in rejected:
            continue
        passed_over = []
        while worst and len(made) < wanted.per_task:
            worse = ranked[-worst[0][0]]
            gap = better.reward - worse.reward
            if gap <= 0 or gap < wanted.min_gap - _SAME:
                break
            head = heappop(worst)
            pair = (better.reply, worse.reply)
            if better.reply == worse.reply or pair in made:
                job.count(_SAME_PAIR if pair in made else _SAME_REPLY)
                passed_over.append(head)
                continue
            made[pair] = Pair(better.row, worse.row, gap)
            rejected.add(worse.row)
            places[worse.reply].pop()
            if left := places[worse.reply]:
                heappush(worst, (-left[-1], worse.reply))
            break
        for head in passed_over:
            heappush(worst, head)
    return list(made.values())


def _contents(
    job: DataJob, chosen: Sequence[Pair], directory: Path
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Both rows of every pair, by a second pass that keeps only them, on the disk."""
    numbers = np.unique(np.array([place for pair in chosen for place in pair[:2]], dtype=np.int64))
    spool = Spool(directory)
    try:
        for number, row in pick(job.rows(), numbers):
            spool.put(number, row)
        for pair in chosen:
            yield spool.take(pair.chosen).value(), spool.take(pair.rejected).value()
    finally:
        spool.close()


def _write_pair(job: DataJob, better: dict[str, Any], worse: dict[str, Any], as_format: Format) -> None:
    row = _row(exchange_of(better), exchange_of(worse))
    who = {"task_id": task_of(better)}
    made = preference_row(row) if as_format == "llamafactory" else who | row
    scores = {"chosen_reward": reward_of(better), "rejected_reward": reward_of(worse)}
    job.write(orjson.dumps(made | scores))


def _row(better: Exchange, worse: Exchange) -> dict[str, Any]:
    row: dict[str, Any] = {"prompt": better.prompt, "chosen": better.answer, "rejected": worse.answer}
    return row | ({"tools": better.tools} if better.tools else {})


def _hash(said: list[Any]) -> int:
    return xxhash.xxh3_64_intdigest(orjson.dumps(said, option=orjson.OPT_SORT_KEYS))


def _count(job: DataJob, table: RolloutTable, found: int, keep_truncated: bool) -> None:
    tasks, with_two = table.one(
        "select count(*), count(*) filter (n > 1) from (select count(reward) n from rollouts group by task)"
    )
    job.count("tasks", tasks)
    job.count("tasks_with_two_rewards", with_two)
    job.count("pairs_found", found + sum(job.counts[reason] for reason in _PASSED_OVER))
    job.count("without_reward", table.one("select count(*) from rollouts where reward is null")[0])
    cut = table.one(
        "select count(*) from rollouts where reward is not null and truncated and not ?", [keep_truncated]
    )
    if cut[0]:
        job.count("truncated", cut[0])
