"""A reply that was paid for is kept, whatever failed after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from collecting import command, results, script, small_input
from rollbook.records.progress import read_progress

REPLY = """
from rollbook.records.turns import Usage
from rollbook.rollouts.types import Completion
return Completion(
    {"role": "assistant", "content": f"reply {request.turn}"},
    usage=Usage(input_tokens=5, output_tokens=3),
    model="m",
    finish_reason="length",
    token_ids=[7, 8],
    logprobs=[-0.5, -0.25],
)
"""
GRADER = """
from rollbook.envs import single_turn

@single_turn
def grader(task, answer):
    return 1 / 0
"""
JUDGED_ONCE = """
import os, pathlib
from rollbook.envs import single_turn
from rollbook.rollouts.types import FailureKind, RolloutFailure

@single_turn
def grader(task, answer):
    asked = pathlib.Path(__file__).with_name("asked")
    if asked.exists():
        os._exit(9)
    asked.touch()
    raise RolloutFailure(FailureKind.JUDGE, "the judge is down")
"""
ENVIRONMENT = """
from rollbook.envs import Environment, Feedback

class Own(Environment):
    turn = 0

    def step(self, message):
        self.turn += 1
        %s

    def close(self):
        %s
"""
GOES_ON = 'return Feedback(done=False, messages=[{"role": "user", "content": "and then?"}])'


def failed(directory: Path, environment: str, *words: str, body: str = REPLY) -> dict[str, Any]:
    """The record of the one rollout of a collection."""
    small_input(directory, 1)
    (directory / "own.py").write_text(environment)
    name = "grader" if "def grader" in environment else "Own"
    agent = {"env": {"name": f"{directory}/own.py:{name}"}, "policy": script(directory, body)}
    (directory / "rollbook.yaml").write_text(yaml.safe_dump({"agents": {"a": agent}}))
    ended = command(directory, *words, "retry.first_wait_s=0")
    assert ended.returncode == 3, ended.stderr
    (record,) = results(directory / "out_failures.ndjson")
    return record


def said(record: dict[str, Any]) -> list[str]:
    contents = [item["content"] for item in record["response"]["output"]]
    return [content if isinstance(content, str) else content[0]["text"] for content in contents]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_reply_whose_grading_crashed_is_in_the_record_as_in_a_result(workers: int, tmp_path: Path) -> None:
    record = failed(tmp_path, GRADER, f"workers={workers}")
    assert record["kind"] == "environment"
    response = record["response"]
    assert said(record) == ["reply 0"]
    assert (response["model"], response["usage"]["total_tokens"]) == ("m", 8)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["generation_token_ids"] == [7, 8]
    assert response["output"][0]["generation_log_probs"] == [-0.5, -0.25]


@pytest.mark.parametrize(
    ("step", "close", "body", "expected"),
    [
        (f"if self.turn == 1: {GOES_ON}", "pass", REPLY, ["reply 0", "and then?", "reply 1"]),
        (GOES_ON, "pass", "assert request.turn == 0, 'no more'\n" + REPLY, ["reply 0", "and then?"]),
        ("return Feedback(messages=None)", "pass", REPLY, ["reply 0"]),
        ("return Feedback(done=False, messages=['what?'])", "1 / 0", REPLY, ["reply 0"]),
    ],
    ids=["grading", "asking again", "no messages", "messages of another shape"],
)
def test_all_that_was_said_is_kept_wherever_it_failed(
    step: str, close: str, body: str, expected: list[str], tmp_path: Path
) -> None:
    words = ("agents.a.max_turns=2", "retry.bad_answer=2")
    record = failed(tmp_path, ENVIRONMENT % (step, close), *words, body=body)
    assert said(record) == expected
    replies = sum(text.startswith("reply") for text in expected)
    assert record["attempts"][-1]["output_tokens"] == 3 * replies
    lost = read_progress(tmp_path / "out_progress.json").lost_output_tokens
    assert lost == 3 * replies * len(record["attempts"])


def test_a_reply_that_waited_for_its_judge_outlives_the_worker_that_had_it(tmp_path: Path) -> None:
    record = failed(tmp_path, JUDGED_ONCE, "workers=2", "retry.worker_lost=1")
    assert [attempt["kind"] for attempt in record["attempts"]] == ["judge", "worker_lost"]
    assert said(record) == ["reply 0"]
    assert record["response"]["status"] == "incomplete"


def test_a_record_without_any_reply_has_no_response(tmp_path: Path) -> None:
    record = failed(tmp_path, GRADER, "retry.bad_answer=1", body="raise ValueError('broken')")
    assert record["kind"] == "bad_answer"
    assert "response" not in record
