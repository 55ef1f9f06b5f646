"""Answers that are equal as mathematics, whatever they look like; and formulas nobody can work out."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from env_helpers import grade, grade_failure, question, run, task_of
from rollbook.envs.agents import build_agent
from rollbook.rollouts.types import FailureKind, Request

pytestmark = pytest.mark.skipif(find_spec("math_verify") is None, reason="needs rollbook[math]")

MATHS = {"grader": "math"}
CASES: list[tuple[Any, str, float, float]] = [
    ("1/2", "so it is \\boxed{0.5}", 1, 1),
    ("\\frac{1}{2}", "$\\frac{2}{4}$", 1, 1),
    ("$x^2 + 1$", "\\boxed{1 + x^2}", 1, 1),
    ("x^2 + 1", "\\boxed{x^2 - 1}", 0, 1),
    ("\\sqrt{2}", "The answer is $2^{1/2}$.", 1, 1),
    (["3", "-3"], "\\boxed{-3}", 1, 1),
    (42, "42", 1, 1),
    ("42", "43", 0, 1),
    ("42", "no idea", 0, 0),
]


def echo(request: Request) -> str:
    return str(request.messages[-1]["content"])


def test_equal_in_maths() -> None:
    agent = build_agent(
        {"name": "dataset", **MATHS}, {"kind": "scripted", "script": "envs.test_math_grader:echo"}
    )
    tasks = [
        task_of({"responses_create_params": {"input": answer}, "expected_answer": expected})
        for expected, answer, _, _ in CASES
    ]
    for episode, (expected, answer, correct, parsed) in zip(run(agent, *tasks), CASES, strict=True):
        assert episode.reward == correct, (expected, answer)
        metrics = {"correct": correct, "format_parse": parsed}
        assert episode.turns[0].metrics == metrics, (expected, answer)


def test_an_expected_answer_without_a_formula_is_a_failure() -> None:
    assert "no formula" in str(grade_failure(MATHS, "1", question("$$")))


@pytest.mark.parametrize("answer", ["\\boxed{9^{9^{9^{9^{9}}}}}", "$\\sum_{k=1}^{10^{9}} \\frac{1}{k^2+1}$"])
def test_a_formula_not_worked_out_in_its_time_is_a_failure_not_a_zero(answer: str) -> None:
    failure = grade_failure({**MATHS, "timeout_s": 1.0}, answer, question("\\pi^2"))
    assert failure.kind is FailureKind.ENVIRONMENT
    assert "1 s (env.timeout_s)" in str(failure)
    assert repr(answer) in str(failure)


def test_the_formula_can_be_picked_out_first() -> None:
    feedback = grade({**MATHS, "pattern": "A: (.*)"}, "A: $\\frac{84}{2}$\nnot 7", question("42"))
    assert feedback.metrics == {"correct": 1.0, "format_parse": 1.0}
