"""Rows with an expected answer: every grader on answers that are right, wrong, and meant to break it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from env_helpers import grade, grade_failure, question, run, task_of
from rollbook.envs.agents import build_agent
from rollbook.envs.dataset import Dataset
from rollbook.errors import UsageError
from rollbook.policies.conversion import text_of, to_chat
from rollbook.rollouts.types import FailureKind, Request

CATASTROPHE = "(a+)+$"
VICTIM = "a" * 64 + "b"


@pytest.mark.parametrize(
    ("settings", "expected", "answer", "reward"),
    [
        ({}, "Paris", "  Paris\n", 1),
        ({}, "Paris", "paris", 0),
        ({"ignore_case": True}, "Paris", "PARIS", 1),
        ({"strip": False}, "Paris", "Paris ", 0),
        ({}, ["Paris", "Lutetia"], "Lutetia", 1),
        ({}, 42, "42", 1),
        ({"grader": "contains"}, "Eiffel", "It is the Eiffel tower", 1),
        ({"grader": "contains"}, "Eiffel", "It is the eiffel tower", 0),
        ({"grader": "contains", "ignore_case": True}, "Eiffel", "It is the eiffel tower", 1),
        ({"grader": "number"}, "1,000", "so 1000.0", 1),
        ({"grader": "number"}, "#### 18", "18 dollars", 1),
        ({"grader": "number"}, "3.14159", "about 3.14", 0),
        ({"grader": "number", "tolerance": 0.01}, "3.14159", "about 3.14", 1),
        ({"grader": "number"}, [1, 2], "2", 1),
        ({"grader": "number"}, "1/2", "so 0.5", 1),
        ({"grader": "number"}, "1/2", "2", 0),
        ({"grader": "number"}, "0.75", "the rest is 3/4.", 1),
        ({"grader": "regex"}, r"^\d{4}$", "1984", 1),
        ({"grader": "regex"}, r"^\d{4}$", "year 1984", 0),
        ({"grader": "regex"}, ["no", "y[eo]s"], "oh yes", 1),
        ({"grader": "regex", "pattern": "(?i)thanks"}, "unused", "Thanks!", 1),
        ({"grader": "regex", "pattern": "thanks", "ignore_case": True}, "unused", "Thanks!", 1),
        ({"pattern": r"ANSWER: (\w+)"}, "B", "ANSWER: A, no. ANSWER: B", 1),
        ({"pattern": r"ANSWER: (\w+)"}, "A", "ANSWER: A, no. ANSWER: B", 0),
        ({"pattern": r"\b[A-D]\b"}, "C", "I take C", 1),
        ({"pattern": r"ANSWER: (\w+)"}, "B", "B", 0),
        ({"grader": "number", "pattern": r"<a>(.*?)</a>"}, "7", "<a>seven: 7</a> not 8", 1),
    ],
)
def test_graders(settings: dict[str, Any], expected: Any, answer: str, reward: int) -> None:
    feedback = grade(settings, answer, question(expected))
    assert feedback.reward == reward
    assert feedback.metrics["correct"] == reward


def test_what_could_not_be_read_is_counted() -> None:
    assert grade({"grader": "number"}, "none").metrics == {"correct": 0.0, "format_parse": 0.0}
    assert grade({"pattern": "A: (.)"}, "none").metrics == {"correct": 0.0, "format_parse": 0.0}
    assert grade({"pattern": "A: (..)"}, "A: 42").metrics == {"correct": 1.0, "format_parse": 1.0}


def test_the_answer_may_lie_deep_in_the_row() -> None:
    task = question("unused", reward_model={"ground_truth": "7"})
    assert grade({"answer_key": "reward_model.ground_truth"}, "7", task).reward == 1.0
    failure = grade_failure({"answer_key": "reward_model.truth"}, "7", task)
    assert "reward_model.truth" in str(failure)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({}, []),
        ({"grader": "number"}, "none"),
        ({"grader": "number"}, "about 7 of 1000"),
        ({"grader": "contains"}, ""),
        ({"grader": "exact"}, " \n"),
        ({"grader": "exact"}, ["Paris", ""]),
        ({"grader": "contains"}, ["Paris", " "]),
        ({"grader": "regex"}, ""),
        ({"grader": "regex"}, ["a", ""]),
        ({"grader": "judge", "judge": {"base_url": "http://127.0.0.1:9/v1", "model": "m"}}, " "),
    ],
)
def test_a_row_nothing_can_be_graded_by_is_a_failure_not_a_zero(
    settings: dict[str, Any], expected: Any
) -> None:
    failure = grade_failure(settings, "x", question(expected))
    assert failure.kind is FailureKind.ENVIRONMENT
    assert f"expected_answer is {expected!r}" in str(failure)


def test_a_row_without_the_field_of_the_answer_says_which_setting_names_it() -> None:
    failure = grade_failure({}, "4", msgspec.structs.replace(question("4"), row={"answer": "4"}))
    assert "the row has no 'expected_answer'; it has: " in str(failure)
    assert "set answer_key to the field that holds the answer" in str(failure)


def test_blanks_are_an_answer_where_they_are_not_stripped() -> None:
    assert grade({"grader": "contains", "strip": False}, "a\n", question("\n")).reward == 1.0


def test_a_catastrophic_pattern_fails_alone_and_the_loop_goes_on() -> None:
    """One row's pattern takes forever; the others are graded meanwhile, in the same event loop."""
    tasks = [question(CATASTROPHE if n == 0 else "b$") for n in range(40)]
    agent = build_agent(
        {"name": "dataset", "grader": "regex", "timeout_s": 1.0}, {"kind": "scripted", "script": [VICTIM]}
    )

    async def play() -> list[Any]:
        results = await asyncio.gather(*map(agent.run, tasks), return_exceptions=True)
        await agent.close()
        return results

    results = asyncio.run(play())
    assert [episode.reward for episode in results[1:]] == [1.0] * 39
    assert results[0].kind is FailureKind.ENVIRONMENT
    assert CATASTROPHE in str(results[0])


def test_a_catastrophic_pattern_in_the_settings_is_bounded_too() -> None:
    failure = grade_failure({"pattern": CATASTROPHE, "timeout_s": 0.3}, VICTIM)
    assert "longer than 0.3 s" in str(failure)


def test_a_rows_own_broken_pattern_is_that_rows_failure() -> None:
    assert "(open" in str(grade_failure({"grader": "regex"}, "x", question("(open")))


def test_hostile_text_reaches_the_grader_whole() -> None:
    hostile = "\x00\ud800\u2028" + "\N{PILE OF POO}" * 50_000 + "end"
    assert grade({"grader": "regex"}, hostile, question("end$")).reward == 1.0


def test_wrong_settings_are_refused_with_the_nearest_name() -> None:
    for settings, said in (
        ({"grader": "exakt"}, "env.grader 'exakt' is not known; there are: exact, contains, number, regex"),
        ({"patern": "x"}, "did you mean 'pattern'"),
        ({"pattern": "(open"}, "env.pattern"),
        ({"grader": "regex", "pattern": ""}, "env.pattern is empty"),
        ({"tolerance": -1}, "tolerance"),
        ({"tolerance": float("inf")}, "tolerance"),
        ({"grader": "judge"}, "env.judge"),
        ({"judge": {"base_url": "http://h/v1", "model": "m"}}, "grader: judge"),
        ({"grader": "judge", "judge": {"base_url": "http://h/v1", "modl": "m"}}, "did you mean 'model'"),
    ):
        with pytest.raises(UsageError, match=said.replace(".", r"\.")):
            build_agent({"name": "dataset", **settings}, {"kind": "scripted", "script": ["1"]})


def test_dataset_can_be_used_alone() -> None:
    async def play() -> float:
        environment = Dataset(grader="regex")
        environment.start(question("4"))
        grading = environment.step({"role": "assistant", "content": "42"})
        feedback = grading if not asyncio.iscoroutine(grading) else await grading
        closing = environment.close()
        if closing is not None:
            await closing
        return float(feedback.reward)

    assert asyncio.run(play()) == 1.0
    assert asyncio.run(play()) == 1.0


STRING_MATCH = {"type": "string_match", "expected_markers": ["[1]", "[2]"], "patterns": [r"\[\d\]"]}


@pytest.mark.parametrize(
    ("verifier", "answer", "reward"),
    [
        ({"verify_regex": ["^- .+", r"^\* .+"], "verify_min_matches": 2}, "- a\n* b\nc", 1),
        ({"verify_regex": ["^- .+", "^- a"], "verify_min_matches": 2}, "- a", 0),
        ({"type": "inline_prose", "verify_regex": ["a"]}, "cat", 1),
        (STRING_MATCH, "so [1] and [2]", 1),
        (STRING_MATCH, "so [1]", 0),
        (STRING_MATCH, "so [1] [2] [3]", 0),
        ({"type": "string_match", "patterns": [r"\[\d\]"]}, "no [1]", 0),
        ({"type": "string_match", "expected_markers": ["[1]"]}, "so [1]", 1),
    ],
)
def test_a_rows_own_verifier(verifier: dict[str, Any], answer: str, reward: int) -> None:
    assert grade({"grader": "regex"}, answer, question("unused", verifier=verifier)).reward == reward


def test_an_unknown_verifier_is_a_failure() -> None:
    task = question("unused", verifier={"type": "magic"})
    assert "verifier.type" in str(grade_failure({"grader": "regex"}, "x", task))


@pytest.mark.parametrize(
    ("verifier", "key"),
    [
        ({"verify_regex": ["^- ", ""]}, "verify_regex"),
        ({"verify_regex": []}, "verify_regex"),
        ({}, "verify_regex"),
        ({"verify_regex": ["^- "], "verify_min_matches": 0}, "verify_min_matches"),
        ({"type": "string_match"}, "expected_markers"),
        ({"type": "string_match", "expected_markers": [], "patterns": []}, "expected_markers"),
        ({"type": "string_match", "expected_markers": [""]}, "expected_markers"),
        ({"type": "string_match", "expected_markers": "x"}, "expected_markers"),
        ({"type": "string_match", "expected_markers": ["x"], "patterns": [""]}, "patterns"),
    ],
)
def test_a_verifier_that_asks_for_nothing_is_a_failure(verifier: dict[str, Any], key: str) -> None:
    task = question("unused", verifier=verifier)
    assert f"verifier.{key}" in str(grade_failure({"grader": "regex"}, "x", task))


def test_stored_rollouts_of_format_verification_get_the_reward_they_had(peer_fixtures: Path) -> None:
    lines = (
        (peer_fixtures / "nemo_gym" / "format_verification_example_rollouts.jsonl").read_text().splitlines()
    )
    rows = [json.loads(line) for line in lines]
    said = {id(row): text_of(to_chat(row["response"]["output"])[-1]) for row in rows}
    tasks = [task_of({**row, "said": said[id(row)]}) for row in rows]
    answers = {task.messages[0]["content"]: task.row["said"] for task in tasks}

    from rollbook.envs.agents import EnvironmentAgent
    from rollbook.envs.source import open_environment
    from rollbook.policies.scripted import ScriptedPolicy

    def remember(request: Request) -> str:
        return answers[request.messages[0]["content"]]

    source = open_environment({"name": "dataset", "grader": "regex"})
    episodes = run(EnvironmentAgent(source, ScriptedPolicy(remember)), *tasks)
    assert [episode.reward for episode in episodes] == [row["reward"] for row in rows]
    assert [episode.turns[0].metrics["matching_lines"] for episode in episodes] == [
        row["match_details"]["matching_lines"] for row in rows
    ]
    wrong = run(EnvironmentAgent(source, ScriptedPolicy("nothing of the kind")), *tasks)
    assert {episode.reward for episode in wrong} == {0.0}


def test_input_rows_of_format_verification_run_as_they_are(peer_fixtures: Path) -> None:
    lines = (peer_fixtures / "nemo_gym" / "format_verification_example.jsonl").read_text().splitlines()
    agent = build_agent(
        {"name": "dataset", "grader": "regex"}, {"kind": "scripted", "script": ["-- a\n" * 9]}
    )
    episodes = run(agent, *(task_of(json.loads(line)) for line in lines))
    assert sorted(episode.reward for episode in episodes) == [0.0, 0.0, 0.0, 0.0, 1.0]
