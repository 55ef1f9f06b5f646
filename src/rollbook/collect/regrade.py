"""Grades stored replies again, without the model: with another grader, or with the same one fixed.

A collection whose policy replays: each stored reply is played to the environment as if it had just been
given, turn by turn, with the retries of a collection. That is only fair to an environment whose grade depends
on nothing but the task and the replies, which is what `stateless` says; others are refused unless forced.
Each grade is appended to `.<output>.grades.jsonl`, so the same command resumes after a kill; at the end the
output is made of the rows and these lines. The old reward stays in the row (`reward_before`), and so does
what the old grading measured (`metrics_before`): the metrics that the row names in `_rb_metrics`, what the
new grading measures too, and the logs. A line of a failures file that holds a reply becomes a row.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from rollbook.collect.loop import run_in_loop
from rollbook.data.job import DataJob
from rollbook.data.progress import NO_PROGRESS, Progress
from rollbook.data.rollouts import reward_of, stored_reply
from rollbook.envs.agents import EnvironmentAgent
from rollbook.envs.source import EnvironmentSource
from rollbook.errors import RollbookError, UsageError
from rollbook.policies.conversion import text_of, to_chat
from rollbook.records.atomic import make_directory
from rollbook.records.datasets import DataManifest
from rollbook.records.identity import KEY, METRICS, ROLLOUT_INDEX, STEPS, TASK_INDEX, repeat_of, task_id
from rollbook.records.jsonl import JsonlWriter, every_ms, read_lines
from rollbook.records.plain import encode_exactly
from rollbook.records.rollout_stats import ExactMean
from rollbook.records.rows import Row
from rollbook.rollouts.retry import RetrySettings
from rollbook.rollouts.runner import Done, GivenUp, run_all
from rollbook.rollouts.types import Completion, FailureKind, Message, Request, RolloutFailure, Task
from rollbook.runs.settings import parse_words, read_yaml

OLD_REWARD, OLD_METRICS, _ERROR = "reward_before", "metrics_before", "reverify_error"
_LOGS = "logs"
_NO_METRICS = frozenset({OLD_REWARD, OLD_METRICS, _ERROR, "reward", "response", "responses_create_params"})
_CONCURRENCY = 64  # a judge answers over the network
_SAME = 1e-9
_SYNC = every_ms(500)


class Item(NamedTuple):
    """A row to grade, and its number over all inputs."""

    number: int
    row: Row


class GradedTurn(msgspec.Struct, omit_defaults=True):
    reward: float | None = None
    metrics: dict[str, Any] = {}
    logs: dict[str, Any] = {}


class Grade(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A line of the file of grades: what became of a row."""

    number: int
    xxh3: str  # of the row
    reward: float | None = None
    turns: list[GradedTurn] = []
    answered_otherwise: bool = False  # the environment, in between
    error: str | None = None
    kind: FailureKind | None = None


def environment_of(agent: str | None, words: Sequence[str], config: Path | None = None) -> dict[str, Any]:
    """The environment of an agent of a config, or the one that `name=...` and settings as words give."""
    if (agent is None) == (not words):
        raise UsageError("name the grader: --agent NAME of rollbook.yaml, or --env name=ENVIRONMENT")
    if agent is None:
        return parse_words(words)
    path = config or Path("rollbook.yaml")
    agents = (read_yaml(path).get("agents") or {}) if path.exists() else {}
    found = agents.get(agent)
    if not isinstance(found, dict) or not isinstance(found.get("env"), dict):
        raise UsageError(f"agent {agent!r} is not in {path}; there are: {', '.join(agents) or 'none'}")
    environment: dict[str, Any] = found["env"]
    return environment


def regrade(
    inputs: Sequence[str | Path],
    output: Path,
    env: Mapping[str, Any],
    *,
    force: bool = False,
    pass_reward: float = 1.0,
    overwrite: bool = False,
    retry: RetrySettings | None = None,
    progress: Progress = NO_PROGRESS,
) -> DataManifest:
    """`env` is the environment of a config: its name and settings."""
    source = _grader(env, force)
    with DataJob(
        "reverify", inputs, output, arguments={"env": dict(env)}, overwrite=overwrite, progress=progress
    ) as job:
        changes = _Changes(pass_reward)
        with _Grades(output, source) as grades:
            run_in_loop(_grade_all(job, source, grades, retry or RetrySettings()))
            for number, row in enumerate(job.rows()):
                if (line := _regraded(row, grades.of(number), job, changes)) is not None:
                    job.write(line)
            if changes.failed and changes.failed == job.rows_in:
                grades.path.unlink()
                why = "; ".join(changes.first_failures.values())
                raise RollbookError(
                    f"none of {changes.failed} rows could be graded ({why}); fix the grader or choose "
                    f"another; {output} was not written"
                )
        job.manifest.details = changes.report()
        job.manifest.graders = [source.describe()]
    grades.path.unlink()
    return job.manifest


def _grader(env: Mapping[str, Any], force: bool) -> EnvironmentSource:
    source = EnvironmentSource(env)
    if not source.kind.stateless and not force:
        raise UsageError(
            f"env {source.name} does not say that it is stateless, so grading again may mean something else; "
            "set stateless = True on the class, or add --force"
        )
    return source.open()


async def _grade_all(job: DataJob, source: EnvironmentSource, grades: _Grades, retry: RetrySettings) -> None:
    async def grade(item: Item) -> Grade:
        return await _grade(item, source)

    try:
        running = run_all(grades.missing(job.rows()), grade, concurrency=_CONCURRENCY, retry=retry)
        async with aclosing(running) as events:
            async for event in events:
                match event:
                    case Done(_, result):
                        grades.add(result)
                    case GivenUp(item, failure):
                        grades.add(_failed(item, failure))
    finally:
        await source.close()  # a judge's connections


async def _grade(item: Item, source: EnvironmentSource) -> Grade:
    value = _without_failure(item.row.value())
    replies = [message for message in stored_reply(value) if message["role"] == "assistant"]
    if not replies:
        return _failed(item, RolloutFailure(FailureKind.BAD_ANSWER, "the row holds no reply to grade"))
    try:
        params = value["responses_create_params"]
        task = Task(
            id=task_id(value),
            row=value,
            messages=to_chat(params["input"], params.get("instructions")),
            tools=params.get("tools") or [],
            repeat=repeat_of(value) or 0,
        )
    except (KeyError, TypeError, AttributeError):
        raise item.row.error("has no responses_create_params.input, so there is nothing to grade") from None
    agent = EnvironmentAgent(source, _Replay(replies), max_turns=len(replies))
    episode = await agent.run(task)
    before = [text_of(message) for message in stored_reply(value) if message["role"] != "assistant"]
    now = [text_of(message) for message in episode.messages if message.get("role") != "assistant"]
    return Grade(
        number=item.number,
        xxh3=_digest(item.row),
        reward=episode.reward,
        turns=[GradedTurn(turn.reward, turn.metrics, turn.logs) for turn in episode.turns],
        answered_otherwise=before[: len(now)] != now[: len(before)],
    )


def _failed(item: Item, failure: RolloutFailure) -> Grade:
    return Grade(number=item.number, xxh3=_digest(item.row), error=str(failure), kind=failure.kind)


class _Grades:
    """The file of grades beside an output. Those of another grader, or of another row, do not count."""

    def __init__(self, output: Path, source: EnvironmentSource) -> None:
        self.path = output.with_name(f".{output.name}.grades.jsonl")
        self._head = encode_exactly({"grader": source.describe()})
        self._places = array("q")  # where the latest grade of each row is, plus one
        self._opened = ExitStack()

    def __enter__(self) -> _Grades:
        make_directory(self.path.parent)
        if self.path.exists() and next((line.data for line in read_lines(self.path)), None) != self._head:
            self.path.unlink()
        self._log = self._opened.enter_context(JsonlWriter(self.path, sync=_SYNC))
        if self._log.position == 0:
            self._log.append(self._head)
        self._file = self._opened.enter_context(self.path.open("rb"))
        for line in read_lines(self.path):
            if line.number > 1:
                self._note(_decode_grade(line.data).number, line.start)
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def missing(self, rows: Iterator[Row]) -> Iterator[Item]:
        """The rows that have no grade yet, or one that failed."""
        for number, row in enumerate(rows):
            known = self._read(number)
            if known is None or known.error is not None or known.xxh3 != _digest(row):
                yield Item(number, row)

    def add(self, grade: Grade) -> None:
        start = self._log.position
        self._log.append(encode_exactly(grade))
        self._note(grade.number, start)

    def of(self, number: int) -> Grade:
        grade = self._read(number)
        assert grade is not None
        return grade

    def _note(self, number: int, start: int) -> None:
        self._places.extend([0] * (number + 1 - len(self._places)))
        self._places[number] = start + 1

    def _read(self, number: int) -> Grade | None:
        place = self._places[number] if number < len(self._places) else 0
        if not place:
            return None
        self._file.seek(place - 1)
        return _decode_grade(self._file.readline())


_decode_grade = msgspec.json.Decoder(Grade).decode


def _digest(row: Row) -> str:
    return xxhash.xxh3_64_hexdigest(row.data)


def _without_failure(value: dict[str, Any]) -> dict[str, Any]:
    """A line of a failures file as the rollout that it might have been; other rows unchanged."""
    if "failed_at" not in value or not isinstance(row := value.get("row"), dict):
        return value
    names = {KEY, TASK_INDEX, ROLLOUT_INDEX, "response"}
    own = {name: item for name, item in value.items() if name in names}
    return own | {name: item for name, item in row.items() if name not in {*own, *names, "reward"}}


def _regraded(row: Row, grade: Grade, job: DataJob, changes: _Changes) -> bytes | None:
    """The row with its new grade; one that could not be graded keeps its reward and says why."""
    value = _without_failure(row.value())
    value.pop(_ERROR, None)
    if "failed_at" in value and "response" not in value:
        job.count("failures_without_reply")
        return None
    if grade.error is not None:
        job.count(f"failed_{grade.kind}")
        value[_ERROR] = grade.error
        changes.fail(grade)
    else:
        _take_over(value, grade, job, changes)
    return encode_exactly(value)


def _take_over(value: dict[str, Any], grade: Grade, job: DataJob, changes: _Changes) -> None:
    old = reward_of(value)
    if grade.answered_otherwise:
        job.count("environment_answered_otherwise")
    changes.add(value.get(KEY), old, grade.reward)
    _replace_metrics(value, grade)
    value[OLD_REWARD] = old
    value["reward"] = grade.reward
    if isinstance(value.get(STEPS), list):
        value[STEPS] = _graded_again(value[STEPS], grade)


def _graded_again(steps: list[dict[str, Any]], grade: Grade) -> list[dict[str, Any]]:
    """The turns up to which it was played again, with what they earn now."""
    return [
        {**old, "reward": new.reward, "episode_done": new is grade.turns[-1], "metrics": new.metrics}
        for old, new in zip(steps, grade.turns, strict=False)
        if isinstance(old, dict)
    ]


def _replace_metrics(value: dict[str, Any], grade: Grade) -> None:
    """What the old grading measured must not look like a measurement of the new one."""
    named = value.get(METRICS)
    old_names = {_LOGS, *(named if isinstance(named, list) else ())} - _NO_METRICS
    new: dict[str, Any] = {}
    for turn in grade.turns:
        new |= {name: number for name, number in turn.metrics.items() if name not in _NO_METRICS}
    if logs := {str(number): turn.logs for number, turn in enumerate(grade.turns) if turn.logs}:
        new[_LOGS] = logs
    value.pop(OLD_METRICS, None)
    if before := {name: value.pop(name) for name in sorted((old_names | new.keys()) & value.keys())}:
        value[OLD_METRICS] = before
    value |= new
    value[METRICS] = [name for name in new if name != _LOGS]


class _Replay:
    """A policy that gives the stored replies."""

    def __init__(self, replies: Sequence[Message]) -> None:
        self._replies = iter(replies)

    async def act(self, request: Request) -> Completion:
        return Completion(message=next(self._replies))

    async def close(self) -> None:
        return None


class _Changes:
    """What became of the rewards."""

    def __init__(self, pass_reward: float) -> None:
        self._pass = pass_reward
        self.failed = 0
        self.first_failures: dict[str, str] = {}
        self._same = self._up = self._down = self._new = 0
        self._now_pass = self._now_fail = 0
        self._before, self._after = ExactMean(), ExactMean()
        self._examples: list[dict[str, Any]] = []

    def fail(self, grade: Grade) -> None:
        self.failed += 1
        self.first_failures.setdefault(str(grade.kind), str(grade.error))

    def add(self, key: Any, old: float | None, new: float | None) -> None:
        if old is None or new is None:
            self._new += 1
            return
        self._before.add(old)
        self._after.add(new)
        if abs(new - old) <= _SAME:
            self._same += 1
            return
        self._up += new > old
        self._down += new < old
        self._now_pass += old < self._pass <= new
        self._now_fail += new < self._pass <= old
        if len(self._examples) < 10:
            self._examples.append({"key": key, "before": old, "after": new})

    def report(self) -> dict[str, Any]:
        compared = self._before.count
        return {
            "unchanged": self._same,
            "raised": self._up,
            "lowered": self._down,
            "now_pass": self._now_pass,
            "now_fail": self._now_fail,
            "had_no_reward": self._new,
            "failed": self.failed,
            "compared": compared,
            "mean_before": self._before.mean if compared else None,
            "std_error_before": self._before.std_error,
            "mean_after": self._after.mean if compared else None,
            "std_error_after": self._after.std_error,
            "examples": self._examples,
        }
