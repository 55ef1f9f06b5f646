"""What is trained on and what is held out: a task of an evaluation is trained on under no name."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from helpers.rl_runs import settings_of, write_setup
from rollbook.errors import UsageError
from rollbook.records.identity import task_digest
from rollbook.rl.settings import RlSettings, load_settings
from rollbook.rl.tasks import GENERATED_TASKS, TaskPool, read_pools
from rollbook.rl.train import train

WORDS = ["cat", "dog", "owl", "hen", "cow", "ant"]


def write_rows(path: Path, words: Iterable[str] = WORDS, *, prefix: str = "task", **fields: str) -> str:
    rows = (
        {"id": f"{prefix}-{number}", "prompt": word, "expected_answer": word} | fields
        for number, word in enumerate(words)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def settings(environments: list[dict[str, Any]], *evals: dict[str, Any]) -> RlSettings:
    given = {"log_path": "run", "model": {"path": "model"}, "environments": environments}
    return load_settings(given | {"evals": [{"name": f"eval{n}", **one} for n, one in enumerate(evals)]})


def dataset(label: str, tasks: str, **others: Any) -> dict[str, Any]:
    return {"name": "dataset", "as": label, "tasks": tasks, **others}


def opened(asked: RlSettings) -> tuple[list[set[str]], set[str], list[str]]:
    """The prompts of each training pool, those that are held out, and what was logged."""
    lines: list[str] = []
    pools, held_out = read_pools(asked, lines.append)
    shown = [prompts(pool) for pool in pools]
    return shown, set().union(*map(prompts, held_out.values())), lines


def prompts(pool: TaskPool) -> set[str]:
    return {pool.task(number).messages[-1]["content"] for number in range(len(pool))}


def test_a_held_out_task_is_held_out_of_every_environment_that_has_it(tmp_path: Path) -> None:
    tasks = write_rows(tmp_path / "tasks.jsonl")
    asked = settings([dataset("a", tasks), dataset("b", tasks)], {"environment": "a", "tasks": 3})
    (one, other), held_out, lines = opened(asked)
    assert len(held_out) == 3
    assert one == other == set(WORDS) - held_out
    assert lines == [f"environment {label}: 3 tasks; 3 more are held out for evals" for label in "ab"]


def test_what_the_policy_is_shown_tells_it_and_an_id_of_another_file_does_not(tmp_path: Path) -> None:
    """The copy has other ids and other fields; the third file has the same ids for other words."""
    tasks = write_rows(tmp_path / "tasks.jsonl")
    copy = write_rows(tmp_path / "copy.jsonl", prefix="copy", source="elsewhere")
    others = write_rows(tmp_path / "others.jsonl", [word[::-1] for word in WORDS])
    environments = [dataset("a", tasks), dataset("b", copy), dataset("c", others)]
    (one, other, third), held_out, _ = opened(settings(environments, {"environment": "a", "tasks": 2}))
    assert one == other == set(WORDS) - held_out
    assert len(third) == 6


def test_an_id_tells_it_within_one_file_whatever_is_put_before_the_prompt(tmp_path: Path) -> None:
    tasks = write_rows(tmp_path / "tasks.jsonl")
    (tmp_path / "link.jsonl").symlink_to(tasks)
    environments = [dataset("a", tasks), dataset("b", str(tmp_path / "link.jsonl"), system="Be short.")]
    (one, other), held_out, _ = opened(settings(environments, {"environment": "b", "tasks": 2}))
    assert one == other == set(WORDS) - held_out


def test_a_file_of_an_evaluation_counts_too(tmp_path: Path) -> None:
    tasks = write_rows(tmp_path / "tasks.jsonl")
    held = write_rows(tmp_path / "held.jsonl", ["owl", "bee"], prefix="held")
    asked = settings([dataset("a", tasks), dataset("b", tasks)], {"environment": "a", "tasks": held})
    (one, other), held_out, _ = opened(asked)
    assert one == other == set(WORDS) - {"owl"} and held_out == {"owl", "bee"}


def test_nothing_left_to_train_on_is_refused_by_the_name_of_the_environment(tmp_path: Path) -> None:
    tasks = write_rows(tmp_path / "tasks.jsonl")
    few = write_rows(tmp_path / "few.jsonl", WORDS[:2], prefix="few")
    asked = settings([dataset("b", few), dataset("a", tasks)], {"environment": "a", "tasks": tasks})
    with pytest.raises(UsageError, match=r"environment 'b' has no task left .* all 2 have the prompt or the"):
        read_pools(asked, lambda _: None)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"name": "arithmetic", "wieght": 2}, "unknown key 'environments[1].wieght'; did you mean 'weight'?"),
        ({"name": "arithmetic", "max_turn": 2}, "'environments[1].max_turn'; did you mean 'max_turns'?"),
        ({"name": "arithmetic", "sistem": "x"}, "'environments[1].sistem'; did you mean 'system'?"),
        ({"name": "dataset", "task": "x"}, "'environments[1].task'; did you mean 'tasks'?"),
        (
            {"name": "dataset", "colour": "x"},
            "unknown key 'environments[1].colour'; known keys: answer_key, ",
        ),
        ({"name": "arithmetic", "max_valu": 2}, "'environments[1].max_valu'; did you mean 'max_value'?"),
        ({"name": "arithmetic", "shade": 2}, "'environments[1].shade'; arithmetic takes: operations, max"),
        ({"name": "arithmetic", "digits": 99}, "environments[1].digits is 99; it may be at most 6"),
        (
            {"name": "dataset", "grader": "exakt"},
            "environments[1].grader 'exakt' is not known; there are: ex",
        ),
        ({"name": "aritmetic"}, "environments[1].name 'aritmetic' is not known; did you mean 'arithmetic'?"),
        ({"name": "env.py:grade"}, "environments[1].name 'env.py:grade': no file env.py; looked for /"),
        ({"name": "dataset"}, "environments[1].tasks: dataset makes no tasks of its own; write tasks: FILE"),
        ({"name": "dataset", "tasks": 5}, "environments[1].tasks: dataset makes no tasks of its own; write"),
        (
            {"name": "dataset", "tasks": "none.jsonl"},
            "environments[1].tasks: there is no file none.jsonl in ",
        ),
        ({"name": "dataset", "tasks": "/none.jsonl"}, "environments[1].tasks: there is no file /none.jsonl"),
    ],
)
def test_what_is_wrong_with_an_environment_is_said_with_its_place(entry: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_pools(settings([{"name": "arithmetic", "as": "first"}, entry]), lambda _: None)
    assert said in str(refused.value)


def test_what_is_wrong_with_the_tasks_of_an_evaluation_is_said_with_its_place(tmp_path: Path) -> None:
    environments = [dataset("a", write_rows(tmp_path / "tasks.jsonl"))]
    for tasks, said in (
        ("none.jsonl", "there is no file none.jsonl"),
        (6, "'eval1' holds out 6 tasks, but 'a'"),
    ):
        wrong = {"environment": "a", "tasks": tasks}
        with pytest.raises(UsageError) as refused:
            read_pools(settings(environments, {"environment": "a", "tasks": 1}, wrong), lambda _: None)
        assert str(refused.value).startswith(f"evals[1].tasks: {said}")


def test_how_many_tasks_an_environment_makes_is_said(tmp_path: Path) -> None:
    wide = {"name": "arithmetic", "digits": 6}
    *_, lines = opened(settings([wide | {"as": "most"}, wide | {"as": "some", "tasks": 20}]))
    assert lines == [
        f"environment most: {GENERATED_TASKS:,} tasks (it was asked for {GENERATED_TASKS:,}; `tasks` sets "
        "another number)",
        "environment some: 20 tasks",
    ]


def test_no_iteration_of_a_run_trains_on_what_is_held_out(tmp_path: Path) -> None:
    """The digests that the records have, after a run, its resume, and by the audit."""
    import rollbook

    setup = write_setup(tmp_path)
    tasks = write_rows(tmp_path / "words.jsonl")
    environments = [dataset(label, tasks, grader="contains") for label in "ab"]
    evals = [{"name": "test", "environment": "a", "tasks": 3}]
    changes: dict[str, Any] = {"environments": environments, "evals": evals, "sampler": {"max_tokens": 3}}
    for iterations in (2, 3):
        asked = settings_of(setup, tmp_path / "run", iterations=iterations, **changes)
        train(asked, resume=iterations > 2, log=lambda _: None)
    run = rollbook.open_run(tmp_path / "run")
    of_eval = {rollout.task_digest for rollout in run.rollouts(0, "eval/test")}
    trained = list(run.rollouts(split="train"))
    assert len(of_eval) == 3 and {tag for rollout in trained for tag in rollout.tags} == {"a", "b"}
    assert of_eval.isdisjoint({rollout.task_digest for rollout in trained})
    assert rollbook.audit(tmp_path / "run").verdict == "balanced"


def test_two_tasks_with_one_id_are_drawn_and_held_out_apart(tmp_path: Path) -> None:
    """As NeMo Gym's own data has them; a row that shows the same is the same task."""
    words = ["one", "two", "three", "three"]
    rows = [{"id": "1000", "prompt": word, "expected_answer": word} for word in words]
    held_rows = [row | {"prompt": f"{row['prompt']}?"} for row in rows]
    path, held = tmp_path / "tasks.jsonl", tmp_path / "held.jsonl"
    for file, some in ((path, rows), (held, held_rows)):
        file.write_text("".join(json.dumps(row) + "\n" for row in some))
    log: list[str] = []
    environments = [dataset("a", str(path)), dataset("b", write_rows(tmp_path / "others.jsonl"))]
    asked = settings(environments, {"environment": "b", "tasks": str(held)})
    pools, held_out = read_pools(asked, log.append)
    assert prompts(pools[0]) == {"one", "two", "three"}
    assert prompts(held_out["eval0"]) == {"one?", "two?", "three?"}
    assert "eval eval0: 3 tasks; 1 more are equal to one of them and left out" in log
    for file, some in ((path, rows), (held, held_rows)):
        names = ", ".join(f"1000~{str(task_digest(row))[:8]}" for row in some[1:3])
        (said,) = [
            line for line in log if line.startswith(f"2 tasks of {file} have the id of an earlier row")
        ]
        assert said.endswith(f"queries show them as {names}")
