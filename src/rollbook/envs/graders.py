"""Graders: an answer, what was expected, a reward.

`exact`, `contains` and `number` take time linear in the answer and run at once. Whatever involves a pattern
that somebody wrote, or a formula, runs in a process of its own with a time limit (`workers.py`): such a
pattern can take forever on a short text, and must not stop a thousand other rollouts. Past its time it is a
failure, for a reward would depend on how busy the machine is.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from rollbook.envs.answers import as_number, beginning, last_number, look_up, same_number
from rollbook.envs.judge import Judge, JudgeSettings
from rollbook.envs.workers import TooMuchWork, Workers, WorkFailed
from rollbook.errors import UsageError
from rollbook.rollouts.types import FailureKind, Feedback, RolloutFailure, Task
from rollbook.runs.settings import typed

Kind = Literal["exact", "contains", "number", "regex", "math", "judge"]


class GraderSettings(msgspec.Struct, kw_only=True):
    grader: Kind = "exact"
    answer_key: str = "expected_answer"  # dots descend; a list means that any of them will do
    ignore_case: bool = False
    strip: bool = True
    # `regex`: what must be found. Others: what to grade of the answer, as the last match captures it.
    pattern: str | None = None
    tolerance: float = 0.0  # of `number`, absolute
    timeout_s: float = 5.0  # of one pattern or formula
    judge: JudgeSettings | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < math.inf or not self.timeout_s > 0:  # within infinity all are right
            raise ValueError("tolerance must be finite and not negative, and timeout_s must be above 0")


def make_grader(values: Mapping[str, Any]) -> Grader:
    if (grader := values.get("grader", "exact")) not in get_args(Kind):
        raise UsageError(f"env.grader {grader!r} is not known; there are: {', '.join(get_args(Kind))}")
    settings = typed(values, GraderSettings, "env")
    _check(settings)
    return Grader(settings)


class Grader:
    """Serves all episodes of an agent."""

    def __init__(self, settings: GraderSettings) -> None:
        self._settings = settings
        self._flags = int(re.IGNORECASE) if settings.ignore_case else 0
        self._workers = Workers(maths=settings.grader == "math", limit_s=settings.timeout_s)
        self._judge = Judge(settings.judge) if settings.judge is not None else None

    def expected(self, row: Mapping[str, Any]) -> Any:
        """What a row expects, checked before a policy is asked for the answer."""
        settings = self._settings
        if settings.grader == "regex":
            if settings.pattern is not None:
                return {"patterns": [settings.pattern]}
            if isinstance(row.get("verifier"), Mapping):
                return _row_verifier(row["verifier"])
        try:
            value = look_up(row, settings.answer_key)
        except KeyError as error:
            raise KeyError(f"{error.args[0]}; set answer_key to the field that holds the answer") from None
        values = value if isinstance(value, list) else [value]
        # An empty one is found in every answer, or in none; either way the reward would say nothing.
        if not values or any(item is None or not self._normal(str(item)) for item in values):
            raise ValueError(f"{settings.answer_key} is {value!r}, which is no answer, or holds an empty one")
        if settings.grader == "number":
            return [as_number(item, settings.answer_key) for item in values]
        texts = [str(item) for item in values]
        if settings.grader == "regex":
            return {"patterns": texts}
        return texts if settings.grader in ("math", "judge") else [self._normal(text) for text in texts]

    def grade(self, task: Task, expected: Any, answer: str) -> Feedback | Awaitable[Feedback]:
        if self._settings.grader == "regex":
            return self._by_regex(expected, answer)
        if self._settings.pattern is not None:
            return self._extracted(task, expected, answer)
        return self._compared(task, expected, answer)

    async def close(self) -> None:
        await self._workers.close()
        if self._judge is not None:
            await self._judge.close()

    def _compared(self, task: Task, expected: Any, answer: str) -> Feedback | Awaitable[Feedback]:
        if self._settings.grader == "math":
            return self._by_maths(expected, answer)
        if self._judge is not None:
            return self._judge.grade(task, expected, answer)
        if self._settings.grader == "number":
            number = last_number(answer)
            same = number is not None and any(
                same_number(number, item, self._settings.tolerance) for item in expected
            )
            return _verdict(same, format_parse=number is not None)
        given = self._normal(answer)
        if self._settings.grader == "contains":
            return _verdict(any(text in given for text in expected))
        return _verdict(given in expected)

    async def _extracted(self, task: Task, expected: Any, answer: str) -> Feedback:
        part = await self._work("extract", pattern=self._settings.pattern, text=answer, flags=self._flags)
        if part is None:
            return _verdict(False, format_parse=False)
        compared = self._compared(task, expected, part)
        feedback = await compared if isinstance(compared, Awaitable) else compared
        feedback.metrics.setdefault("format_parse", 1.0)
        return feedback

    async def _by_regex(self, expected: dict[str, Any], answer: str) -> Feedback:
        if "markers" in expected:
            missing = sum(marker not in answer for marker in expected["markers"])
            unexpected = await self._work(
                "unexpected", patterns=expected["patterns"], text=answer, allowed=expected["markers"]
            )
            return _verdict(not missing and not unexpected, missing=missing, unexpected=unexpected)
        if "min_matches" in expected:
            lines = await self._work("count_lines", patterns=expected["patterns"], text=answer)
            return _verdict(lines >= expected["min_matches"], matching_lines=lines)
        text = answer.strip() if self._settings.strip else answer
        found = await self._work("search", patterns=expected["patterns"], text=text, flags=self._flags)
        return _verdict(found)

    async def _by_maths(self, expected: Sequence[str], answer: str) -> Feedback:
        try:
            result = await self._workers.do("equal_in_maths", answer=answer, expected=list(expected))
        except TooMuchWork as error:  # be it the formula, or a busy machine: nobody found it wrong
            raise RolloutFailure(
                FailureKind.ENVIRONMENT,
                f"math-verify: {error}; it was given {self._settings.timeout_s:g} s (env.timeout_s) for an "
                f"answer of {len(answer)} characters, {beginning(answer)}",
            ) from error
        except WorkFailed as error:
            raise RolloutFailure(FailureKind.ENVIRONMENT, f"math-verify: {error}") from error
        return _verdict(result["correct"], format_parse=result["parsed"])

    async def _work(self, job: str, **arguments: Any) -> Any:
        try:
            return await self._workers.do(job, **arguments)
        except (TooMuchWork, WorkFailed) as error:
            patterns = arguments.get("patterns") or [arguments.get("pattern")]
            size = len(arguments["text"])
            raise RolloutFailure(
                FailureKind.ENVIRONMENT, f"the pattern {patterns} on an answer of {size} characters: {error}"
            ) from error

    def _normal(self, text: str) -> str:
        text = text.strip() if self._settings.strip else text
        return text.casefold() if self._settings.ignore_case else text


def _check(settings: GraderSettings) -> None:
    if settings.pattern == "":
        raise UsageError("env.pattern is empty, so it would match every answer; write one, or leave it out")
    if settings.pattern is not None:
        try:
            re.compile(settings.pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise UsageError(f"env.pattern is no regular expression: {error}") from None
    if settings.grader == "math" and importlib.util.find_spec("math_verify") is None:
        raise UsageError("env.grader 'math' needs math-verify; type: pip install 'rollbook[math]'")
    if settings.grader == "judge" and settings.judge is None:
        raise UsageError("env.grader 'judge' needs env.judge: {base_url: ..., model: ...}")
    if settings.grader != "judge" and settings.judge is not None:
        raise UsageError(f"env.judge is set, but env.grader is {settings.grader!r}; write grader: judge")


def _row_verifier(verifier: Mapping[str, Any]) -> dict[str, Any]:
    """The `verifier` of NeMo Gym's format-verification rows."""
    kind = verifier.get("type", "regex")
    if kind in ("regex", "inline_prose"):
        patterns = _texts(verifier, "verify_regex")
        least = verifier.get("verify_min_matches", 1)
        if type(least) is not int or least < 1:
            raise ValueError(f"verifier.verify_min_matches is {least!r}; it must be a number, at least 1")
        if patterns:
            return {"patterns": patterns, "min_matches": least}
        raise ValueError("verifier.verify_regex is empty, so there is nothing to grade by")
    if kind == "string_match":
        markers, patterns = _texts(verifier, "expected_markers"), _texts(verifier, "patterns")
        if markers or patterns:
            return {"markers": markers, "patterns": patterns}
        raise ValueError(
            "verifier.expected_markers and verifier.patterns are both empty: any answer is right"
        )
    raise ValueError(f"verifier.type is {kind!r}; known: regex, inline_prose, string_match")


def _texts(verifier: Mapping[str, Any], key: str) -> list[str]:
    texts = verifier.get(key)
    if texts is None:
        return []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"verifier.{key} is {texts!r}; it must be a list of texts, none of them empty")
    return texts


def _verdict(correct: bool, **metrics: float) -> Feedback:
    numbers = {key: float(value) if isinstance(value, bool) else value for key, value in metrics.items()}
    return Feedback(reward=float(correct), metrics={"correct": float(correct), **numbers})
