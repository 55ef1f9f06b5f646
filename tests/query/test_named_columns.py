"""Over many files a view has only the columns a query names, and the answer is the same."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from rollbook.errors import UsageError
from rollbook.query import session
from rollbook.query.guard import parsed
from rollbook.query.named_columns import named_columns
from rollbook.query.session import Session


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for iteration, group in itertools.product(range(3), range(2)):
        directory = tmp_path / f"iteration_{iteration:06d}"
        directory.mkdir(exist_ok=True)
        ids = {
            "split": "train",
            "iteration": iteration,
            "group_idx": group,
            "traj_idx": 0,
            "task_id": f"t{group}",
        }
        step = {"step_idx": 0, "ob_len": 5, "ac_len": 7 + group, "reward": 0.5, "metrics": {"x": 1}}
        failed = {"status": "error", "error": "timeout: slow"} if group and iteration else {"status": "ok"}
        summary = {**ids, **failed, "total_reward": iteration / 2, "final_reward": 0.5, "steps": [step]}
        told = {**ids, "messages": [{"role": "user", "content": f"q{group}"}]}
        for name, record in (("rollout_summaries", summary), ("transcripts", told)):
            with (directory / f"train_{name}.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
    return tmp_path


def ask(path: Path, question: str) -> list[tuple[Any, ...]]:
    return [line for batch in Session([path]).run(question).batches for line in batch]


QUESTIONS = [
    "select count(*) from rollouts",
    "select avg(reward) as mean, iteration from rollouts group by all order by mean",
    'select "Turns", r.status from rollouts r where r.output_tokens > 7 order by all',
    "select * from rollouts order by all",
    "select r from rollouts r order by r.iteration, r.group_idx",
    "select count(*), max(ac_len) from steps",
    "select t.content, s.ac_len from steps s join transcripts t using (iteration, group_idx) order by all",
    "select count(*) from steps natural join transcripts",
    "with a as (select reward as z, task_id from rollouts) select sum(z) from a",
    "select kind, count(*) as n from failures group by kind",
    "select columns('.*_idx') from transcripts order by all",
    "from failures order by all",
    "select row->>'task_id' as task, metrics from rollouts order by all",
    "describe rollouts",
]


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_same_answer(run: Path, question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ask(run, question)
    monkeypatch.setattr(session, "_MANY_FILES", 0)
    assert ask(run, question) == expected
    assert expected


def test_only_what_is_named_is_there(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_MANY_FILES", 0)
    plan = str(ask(run, "explain select avg(reward) from rollouts"))
    assert "total_reward" in plan
    with pytest.raises(UsageError, match="near it: reward"):
        ask(run, "select rewards from rollouts")


def test_what_may_mean_any_column() -> None:
    assert named_columns(parsed("select a, b.c from t where d is null")[1]) == {"a", "b", "c", "d"}
    for question in ("select * from t", "select t from t", "select x from t x, u y where y is null"):
        assert named_columns(parsed(question)[1]) is None
