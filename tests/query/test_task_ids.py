"""One task has one name, as a task row, a rollout of anybody and a trajectory, in Python and in SQL."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rollbook
from rollbook.data.dedup import dedup
from rollbook.data.merge import merge
from rollbook.data.profile import profile
from rollbook.data.stats import stats
from rollbook.policies.conversion import from_chat
from rollbook.query.session import Session
from rollbook.records.identity import shown_id, task_digest, task_id
from rollbook.records.rollouts import Trajectory

Row = dict[str, Any]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
USER = st.builds(lambda text: {"role": "user", "content": text}, TEXTS)
REPLY = st.builds(lambda text: {"role": "assistant", "content": text}, TEXTS)
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL_USE = [
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "4"},
]
PROMPTS = st.builds(
    lambda system, first, shots, use, last: [*system, first, *chain.from_iterable(shots), *use, last],
    st.lists(st.builds(lambda text: {"role": "system", "content": text}, TEXTS), max_size=1),
    USER,
    st.lists(st.builds(lambda reply, user: [reply, user], REPLY, USER), max_size=2),
    st.sampled_from([[], TOOL_USE]),
    USER,
)
TASKS = st.lists(
    st.tuples(PROMPTS, st.sampled_from([[], [TOOL]]), st.none() | TEXTS | st.integers(0, 2**70)),
    min_size=1,
    max_size=4,
    unique_by=(
        lambda task: task_digest(task[0], task[1]),
        lambda task: task[2] if task[2] is None else str(task[2]),
    ),
)


def rows(sql: str, *paths: Path) -> list[tuple[Any, ...]]:
    return [row for batch in Session(paths).run(sql).batches for row in batch]


def write(path: Path, lines: list[Row]) -> Path:
    path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    return path


def shapes(prompt: list[Row], tools: list[Row], name: Any) -> list[Row]:
    """The task as rows of everybody who may write it."""
    own = {} if name is None else {"task_id": name}
    has_system = prompt[0]["role"] == "system"
    flat = [{"type": "function", **tool["function"], "strict": None} for tool in tools]
    params = {"input": from_chat(prompt), "tools": flat, "instructions": None, "metadata": None}
    instructed = {"input": from_chat(prompt[1:]), "instructions": prompt[0]["content"], "tools": tools}
    padded = [{"name": None, **dict(reversed(message.items()))} for message in prompt]
    parts = [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if m["content"] else m for m in prompt
    ]
    answer = {"response": {"output": []}, "reward": 1.0, "num_turns": 1}
    key = task_id(prompt, tools) if name is None else name
    return [
        {**own, "messages": prompt, "tools": tools, "expected_answer": "4"},
        {**own, "prompt": padded, "tools": tools, "info": {"x": 1}},
        {**own, "prompt": parts, "tools": tools},
        {**own, "responses_create_params": params, "expected_answer": "4"},
        {**own, "responses_create_params": instructed if has_system else params},
        {**own, "responses_create_params": params, **answer, "_ng_task_index": 3, "_ng_rollout_index": 1},
        {"_rb_key": f"{key}#0", "reward": 1.0, "responses_create_params": params, **answer},
        {"_rb_key": f"{key}#1", "reward": 1.0, "_rb_task_digest": task_digest(prompt, tools)},
    ]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TASKS)
def test_the_same_task_has_one_id_everywhere(tasks: list[tuple[list[Row], list[Row], Any]]) -> None:
    names = [task_id(prompt, tools) if name is None else str(name) for prompt, tools, name in tasks]
    digests = [task_digest(prompt, tools) for prompt, tools, _ in tasks]
    by_writer = list(zip(*(shapes(*task) for task in tasks), strict=True))
    with TemporaryDirectory() as directory:
        files = [
            write(Path(directory, f"{number}.jsonl"), list(lines)) for number, lines in enumerate(by_writer)
        ]
        for lines in by_writer:
            assert [task_id(line) for line in lines] == names
            assert [task_digest(line) for line in lines] == digests
        run = rollbook.Run(Path(directory, "run"), kind="rl")
        with run, run.rollouts(iteration=0) as rollouts:
            for number, (prompt, tools, name) in enumerate(tasks):
                with rollouts.group(number, task_id=None if name is None else str(name)) as group:
                    steps = Trajectory.single_turn(prompt, "a", 1.0)
                    steps.tools = tools
                    summary = group.add(steps)
                    assert (summary.task_id, summary.task_digest) == (names[number], digests[number])
        found = rows(
            "select task_id, task_digest, count(*), count(distinct run) from rollouts "
            "group by all order by all",
            *files,
            Path(directory, "run"),
        )
        times = len(by_writer) + 1
        assert found == sorted((n, d, times, times) for n, d in zip(names, digests, strict=True))
        told = rows("select distinct task_id from transcripts order by 1", Path(directory, "run"))
        assert told == sorted((name,) for name in names)


@settings(max_examples=100, deadline=None)
@given(PROMPTS, PROMPTS, st.sampled_from([[], [TOOL]]), st.sampled_from([[], [TOOL]]))
def test_different_tasks_have_different_ids(
    one: list[Row], other: list[Row], tools: list[Row], others: list[Row]
) -> None:
    same = (one, tools) == (other, others)
    assert (task_id(one, tools) == task_id(other, others)) is same
    assert (task_digest(one, tools) == task_digest(other, others)) is same
    assert (
        shown_id({"messages": one, "tools": tools}) == shown_id({"prompt": other, "tools": others})
    ) is same


def gym_rows(name: str, rewards: tuple[float, ...] = (0.0, 1.0)) -> list[Row]:
    """Two rollouts of five tasks without ids, as NeMo Gym writes them."""
    return [
        {
            "responses_create_params": {
                "input": [{"role": "user", "content": f"{name} {task}", "type": "message"}]
            },
            "response": {"output": []},
            "reward": reward,
            "_ng_task_index": task,
            "_ng_rollout_index": repeat,
        }
        for task in range(5)
        for repeat, reward in enumerate(rewards)
    ]


def test_two_files_of_five_tasks_are_ten_tasks(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", gym_rows("one", (0.0, 0.0)))
    two = write(tmp_path / "two.jsonl", gym_rows("two", (1.0, 1.0)))
    found = profile([one, two], None, ks=[1, 2]).details
    assert found["tasks"] == 10
    assert found["pass_at_k"]["2"] == {"mean": 0.5, "std_error": pytest.approx(1 / 6), "tasks": 10}
    assert (found["never_passed"], found["always_passed"]) == (5, 5)
    assert stats([one, two]).tasks == 10
    assert rows("select count(distinct task_id), count(*) from rollouts", one, two) == [(10, 20)]
    assert merge([one, two], tmp_path / "all.jsonl").rows_out == 20
    assert rows("select count(distinct task_id) from rollouts", tmp_path / "all.jsonl") == [(10,)]


def test_an_index_never_joins_across_files(tmp_path: Path) -> None:
    """Not even where nothing else is known."""
    bare = [{"_ng_task_index": task, "_ng_rollout_index": 0, "reward": 1.0} for task in range(5)]
    one, two = write(tmp_path / "one.jsonl", bare), write(tmp_path / "two.jsonl", bare)
    assert profile([one, two], None).details["tasks"] == 10
    assert stats([one, two]).tasks == 10
    names = rows("select task_id from rollouts order by 1", one, two)
    assert len(set(names)) == 10 and all(name.startswith("index-") and "~" in name for (name,) in names)
    assert rows("select task_id from rollouts order by 1", one) == [(f"index-{task}",) for task in range(5)]
    assert dedup([one, two], tmp_path / "dedup.jsonl", on="task").rows_out == 10


def test_tasks_without_names_are_all_covered(tmp_path: Path) -> None:
    texts = ["a", "b", "a", "c", "d"]  # the third one expects another answer than the first
    listed = [
        {"responses_create_params": {"input": text}, "expected_answer": str(number)}
        for number, text in enumerate(texts)
    ]
    tasks = write(tmp_path / "tasks.jsonl", listed)
    foreign = [
        {
            "responses_create_params": {"input": [{"role": "user", "content": text}], "temperature": None},
            "reward": 1.0,
            "_ng_task_index": number,
            "_ng_rollout_index": 0,
        }
        for number, text in enumerate(texts)
    ]
    rollouts = write(tmp_path / "rollouts.jsonl", foreign[::-1])
    merged = tmp_path / "merged.jsonl"
    manifest = merge([rollouts], merged, tasks=tasks, ordered=True)
    assert manifest.coverage == {"expected": 5, "ok": 5, "missing": 0}
    assert [json.loads(line)["_ng_task_index"] for line in merged.read_text().splitlines()] == list(range(5))
    first = task_id(listed[0])
    names = [name for (name,) in rows("select task_id from rollouts", merged)]
    assert names[:3] == [first, task_id(listed[1]), f"{first}~2"]


def test_two_datasets_with_the_same_ids_do_not_mix(tmp_path: Path) -> None:
    def collected(name: str, reward: float) -> list[Row]:
        return [
            {"_rb_key": f"{n}#0", "reward": reward, "responses_create_params": {"input": f"{name} {n}"}}
            for n in range(3)
        ]

    one, two = (write(tmp_path / f"{n}.jsonl", collected(n, r)) for n, r in (("one", 0.0), ("two", 1.0)))
    told_apart = [(row, str(task_digest(row))[:8]) for name in ("one", "two") for row in collected(name, 0)]
    shown = sorted(f"{task_id(row)}~{mark}" for row, mark in told_apart)
    sql = "select task_id, avg(reward), key from rollouts group by all order by all"
    found = rows(sql, one, two)
    assert [name for name, _, _ in found] == shown
    assert {mean for _, mean, _ in found} == {0.0, 1.0}
    assert [key for _, _, key in found] == [f"{name}#0" for name in shown]
    assert rows("select task_id from rollouts order by 1", one) == [("0",), ("1",), ("2",)]
    assert rows("select count(*) from rollouts a join rollouts b using (task_id)", one, two) == [(6,)]
    assert profile([one, two], None).details["tasks"] == 6
    merged = tmp_path / "merged.jsonl"
    assert merge([one, two], merged).rows_out == 6  # no key is there twice
    assert rows(sql, merged) == found
    tasks = write(tmp_path / "tasks.jsonl", [{"id": n, "prompt": f"one {n}"} for n in range(3)])
    assert merge([two], tmp_path / "m2.jsonl", tasks=tasks).coverage["ok"] == 0
    assert merge([one, two], tmp_path / "m3.jsonl", tasks=tasks).coverage["ok"] == 3
    assert dedup([one, two], tmp_path / "d.jsonl", on="task").rows_out == 6


def test_an_id_with_its_mark_is_that_task(tmp_path: Path) -> None:
    asked: Row = {"responses_create_params": {"input": "one"}}
    other: Row = {"responses_create_params": {"input": "two"}}
    mark = str(task_digest(other))[:8]
    lines = [{"_rb_key": "a#0", **asked}, {"_rb_key": f"a~{mark}#0", **other}]
    path = write(tmp_path / "rows.jsonl", lines)
    assert task_id(lines[1]) == "a"
    names = [(f"a~{str(task_digest(line))[:8]}",) for line in (asked, other)]
    assert rows("select task_id from rollouts", path) == names
    alone = write(tmp_path / "other.jsonl", [{"id": "a", **other}])
    assert rows("select count(distinct task_id) from rollouts", path, alone) == [(2,)]


def test_rows_of_parquet_are_the_same_tasks(tmp_path: Path) -> None:
    lines = [{"responses_create_params": {"input": [{"role": "user", "content": text}]}} for text in "ab"]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(lines), path)
    assert rows("select task_id from rollouts", path) == [(task_id(line),) for line in lines]


def test_examples_of_one_task_are_one_task(tmp_path: Path) -> None:
    """A conversation with its answer does not say where the prompt ends, and is not told apart by it."""
    said = [{"role": "user", "content": "?"}]
    lines = [
        {"task_id": "t", "messages": [*said, {"role": "assistant", "content": text}]} for text in ("a", "b")
    ]
    path = write(tmp_path / "sft.jsonl", [*lines, {"task_id": "t", "messages": said}])
    assert rows("select distinct task_id from rollouts", path) == [("t",)]


def test_rollouts_of_others_are_of_the_tasks_they_were_made_from(peer_fixtures: Path, tmp_path: Path) -> None:
    for path in sorted((peer_fixtures / "nemo_gym").glob("*_rollouts.jsonl")):
        tasks = path.with_name(path.name.replace("_rollouts", ""))
        covered = merge([path], tmp_path / path.name, tasks=tasks).coverage
        assert covered == {"expected": 5, "ok": 5, "missing": 0}, path.name


@pytest.mark.parametrize("number", [2**63, 2**64, 10**30])
def test_ids_of_any_size(number: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"task_id": {number}, "_ng_rollout_index": 0, "reward": 1}}\n')
    assert rows("select task_id from rollouts", path) == [(str(number),)]
    profile([path], tmp_path / "profile.jsonl")
    made = orjson.loads((tmp_path / "profile.jsonl").read_bytes())
    assert made["task_id"] == str(number)
    assert f'"task_id":{number}' in (tmp_path / "profile.jsonl").read_text().replace(" ", "")
