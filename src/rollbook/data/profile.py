"""Per task: how often it is passed, and what that says about k tries.

pass@k is the unbiased estimate over n rollouts of which c passed: 1 - C(n-c, k) / C(n, k), the share of the
k-subsets with at least one pass. A task with fewer than k rollouts says nothing about k and is left out of
that mean; how many tasks it stands for is beside it. The lines carry the keys of the ecosystem's reward
profiles (`mean/reward`, `num_rollouts`, ...), with the task's own row under `sample`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from rollbook.data.coverage import Planned, planned_by
from rollbook.data.job import DataJob
from rollbook.data.mixed_graders import note_different_graders
from rollbook.data.progress import NO_PROGRESS, Progress
from rollbook.data.rollout_table import rollout_table, rows_at, task_fields
from rollbook.errors import UsageError
from rollbook.query.connection import Kept
from rollbook.records.datasets import DataManifest
from rollbook.records.identity import TASK_INDEX
from rollbook.records.numbers import std_error
from rollbook.records.rollout_stats import ExactMean

PROFILES = """
    select
        task_id, min(n) as first, min(task_index), count(*), count(reward),
        count(*) filter (reward >= ?),
        avg(reward), stddev_samp(reward), min(reward), max(reward), median(reward),
        avg(output_tokens), max(output_tokens), avg(input_tokens), count(*) filter (truncated)
    from kept group by task_id
"""
# How often each task was to be done by the manifests of the files it is in, where all of them say so.
_EXPECTED = """
    select task_id, case when bool_and(repeats is not null) then sum(repeats) end
    from (select distinct task_id, file from kept) left join repeats using (file) group by task_id
"""


class Band(NamedTuple):
    """A range of pass rates, both ends included."""

    low: float = 0.0
    high: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Band:
        low, mark, high = text.partition("..")
        try:
            band = cls(float(low or 0), float(high or 1)) if mark else None
        except ValueError:
            band = None
        if band is None or not 0 <= band.low <= band.high <= 1:
            raise UsageError(f"a band of pass rates is written like 0.1..0.9, not {text!r}")
        return band


class TaskProfile(NamedTuple):
    task_id: str
    first: int  # the number of its first row in the dataset
    task_index: int | None
    rollouts: int
    rewarded: int
    passed: int
    reward_mean: float | None
    reward_std: float | None
    reward_min: float | None
    reward_max: float | None
    reward_median: float | None
    output_tokens_mean: float | None
    output_tokens_max: int | None
    input_tokens_mean: float | None
    truncated: int

    @property
    def pass_rate(self) -> float | None:
        return self.passed / self.rewarded if self.rewarded else None

    def is_in(self, band: Band | None) -> bool:
        rate = self.pass_rate
        return band is None or (rate is not None and band.low <= rate <= band.high)


def pass_at_k(rollouts: int, passed: int, k: int) -> float | None:
    """None where there are fewer than k rollouts."""
    if rollouts < k:
        return None
    return 1.0 - math.comb(rollouts - passed, k) / math.comb(rollouts, k)


def profile(
    inputs: Sequence[str | Path],
    output: Path | None,
    *,
    pass_reward: float = 1.0,
    ks: Sequence[int] = (),
    band: Band | None = None,
    overwrite: bool = False,
    progress: Progress = NO_PROGRESS,
) -> DataManifest:
    """One line per task; with a band, only of the tasks whose pass rate is in it."""
    arguments = {"pass_reward": pass_reward, "k": list(ks), "band": list(band) if band else None}
    with (
        DataJob(
            "profile", inputs, output, arguments=arguments, overwrite=overwrite, progress=progress
        ) as job,
        rollout_table(job) as table,
    ):
        planned = planned_by(job.paths)
        ks = ks or _powers_of_two(table)
        summary = _Summary(ks)
        first = table.numbers("select min(n) from kept group by task_id")
        # Both come in the order in which the tasks first appear, so neither has to be held.
        samples = rows_at(job, first) if output is not None else repeat(None)
        for (task, expected), sample in zip(_profiles(table, planned, pass_reward), samples, strict=False):
            summary.add(task)
            if not task.is_in(band):
                job.count("tasks_outside_band")
            elif sample is not None:
                job.write(orjson.dumps(_line(task, ks, expected, task_fields(sample[1]))))
        job.manifest.details = summary.report(planned.tasks)
        job.manifest.coverage = summary.coverage(planned)
        note_different_graders(job)
    return job.manifest


def _profiles(table: Kept, planned: Planned, pass_reward: float) -> Iterator[tuple[TaskProfile, int]]:
    """Each with the rollouts that were expected: as many as of any task, where no manifest knows better."""
    files = {str(path.absolute()): repeats for path, repeats in planned.repeats_of.items() if repeats}
    columns = np.array(list(files), dtype=object), np.array(list(files.values()), dtype=np.int64)
    table.add("repeats", file=columns[0], repeats=columns[1])
    most = table.one("select max(n) from (select count(*) as n from kept group by task_id)")[0]
    question = f"from ({PROFILES}) join ({_EXPECTED}) using (task_id) order by first"
    for *line, expected in table.ask(question, [pass_reward]):
        yield TaskProfile(*line), int(expected or most)


def _line(task: TaskProfile, ks: Sequence[int], expected: int, sample: dict[str, Any]) -> dict[str, Any]:
    index = {TASK_INDEX: task.task_index} if task.task_index is not None else {}
    missing = expected - task.rollouts
    return {
        "task_id": task.task_id,
        **index,
        "pass_rate": task.pass_rate,
        **{f"pass@{k}": pass_at_k(task.rewarded, task.passed, k) for k in ks},
        "mean/reward": task.reward_mean,
        "std/reward": task.reward_std,
        "std_error/reward": std_error(task.reward_std, task.rewarded),
        "min/reward": task.reward_min,
        "max/reward": task.reward_max,
        "median/reward": task.reward_median,
        "mean/output_tokens": task.output_tokens_mean,
        "max/output_tokens": task.output_tokens_max,
        "mean/input_tokens": task.input_tokens_mean,
        "num_rollouts": task.rollouts,
        "num_rewards": task.rewarded,
        "num_passed": task.passed,
        "num_truncated": task.truncated,
        "expected_num_rollouts": expected,
        "missing_num_rollouts": missing,
        "sample": sample,
    }


def _powers_of_two(table: Kept) -> list[int]:
    most = table.one("select max(n) from (select count(reward) as n from kept group by task_id)")[0] or 1
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


class _Summary:
    """Over the tasks: each task counts once, whatever the number of its rollouts."""

    def __init__(self, ks: Sequence[int]) -> None:
        self._ks = ks
        self._tasks = self._rollouts = self._rewarded = 0
        self._never = self._always = self._unknown = 0
        self._estimates = {k: ExactMean() for k in ks}
        self._bins = [0] * 10

    def add(self, task: TaskProfile) -> None:
        self._tasks += 1
        self._rollouts += task.rollouts
        self._rewarded += task.rewarded
        rate = task.pass_rate
        if rate is None:
            self._unknown += 1
            return
        self._never += rate == 0
        self._always += rate == 1
        self._bins[min(9, int(rate * 10))] += 1
        for k in self._ks:
            if (estimate := pass_at_k(task.rewarded, task.passed, k)) is not None:
                self._estimates[k].add(estimate)

    def report(self, planned_tasks: int | None) -> dict[str, Any]:
        unseen = None if planned_tasks is None else max(0, planned_tasks - self._tasks)
        return {
            "tasks": self._tasks,
            **({} if unseen is None else {"tasks_without_rollouts": unseen}),
            "rollouts": self._rollouts,
            "never_passed": self._never,
            "always_passed": self._always,
            "without_reward": self._unknown,
            "pass_at_k": {
                str(k): {
                    "mean": estimates.mean if estimates.count else None,
                    "std_error": estimates.std_error,
                    "tasks": estimates.count,
                }
                for k, estimates in self._estimates.items()
            },
            "pass_rate_histogram": self._bins,
        }

    def coverage(self, planned: Planned) -> dict[str, int]:
        """What was expected only manifests know: tasks may differ in their repeats, or have none at all."""
        known = planned.coverage(self._rollouts) or {"ok": self._rollouts}
        return {**known, "ok": self._rewarded, "without_reward": self._rollouts - self._rewarded}
