"""Where outcomes come to rest: results, failures, counts.

A result's line is appended at once and counts once it is on the disk: a background commit every 50 ms makes
all lines since the last one durable together, then the counters learn of them. Failures are made durable by
the same commits. The slot a rollout held is free long before.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable
from pathlib import Path

import orjson

from rollbook.collect.paths import CollectionFiles
from rollbook.collect.progress import Tally
from rollbook.collect.rows import Item, Outcome, response_of_reply
from rollbook.errors import BadLineError
from rollbook.records.jsonl import JsonlWriter
from rollbook.records.plain import encode, utc_now
from rollbook.records.row_keys import KEY, ROLLOUT_INDEX, TASK_INDEX, key_of
from rollbook.records.turns import Usage
from rollbook.rollouts.retry import Attempts
from rollbook.rollouts.usage import clamp_tokens

_COMMIT_EVERY_S = 0.05


class ResultSink:
    def __init__(
        self,
        files: CollectionFiles,
        output: JsonlWriter,
        tally: Tally,
        *,
        max_failure_rate: float,
        min_samples: int,
        say: Callable[[str], None],
    ) -> None:
        self.tally = tally
        self._output = output
        self._failures = _failures_writer(files.failures)
        self._max_failure_rate, self._min_samples = max_failure_rate, min_samples
        self._say = say
        self._uncommitted: list[tuple[Outcome, int]] = []
        self._said: set[str] = set()
        self._stop: str | None = None

    def done(self, item: Item, outcome: Outcome) -> None:
        end = self._output.append(outcome.line)
        outcome.line = b""
        self._uncommitted.append((outcome, end))

    def failed(self, item: Item, outcome: Outcome, attempts: Attempts) -> None:
        is_counted = outcome.reply is None and outcome.response != b""  # with the rest of its episode
        if (reply := outcome.reply or item.reply) and not is_counted:  # nobody will judge it any more
            usage = reply.usage or Usage()
            outcome.input_tokens += clamp_tokens(usage.input_tokens)
            outcome.output_tokens += clamp_tokens(usage.output_tokens)
            outcome.response = outcome.response or response_of_reply(item, reply)
        self._count_failure(outcome)
        self.tally.given_up += 1
        record = {
            KEY: key_of(item.task_id, item.repeat),
            TASK_INDEX: orjson.loads(item.line).get(TASK_INDEX, item.row),  # as in a result's line
            ROLLOUT_INDEX: item.repeat,
            "kind": outcome.failure,
            "message": outcome.message,
            "status": outcome.status,
            "attempts": attempts.failures,
            "failed_at": utc_now(),
        }
        if outcome.response:
            record["response"] = orjson.Fragment(outcome.response)
        self._failures.append(encode(record))
        self._judge()

    def retrying(self, item: Item, outcome: Outcome, wait: float) -> None:
        self._count_failure(outcome)

    def should_stop(self) -> str | None:
        return self._stop

    def stop(self, reason: str) -> None:
        self._stop = self._stop or reason

    async def commit_forever(self) -> None:
        while True:
            await asyncio.sleep(_COMMIT_EVERY_S)
            await self.commit()

    async def commit(self) -> None:
        """Make what is appended durable, then count it."""
        if self._uncommitted:
            await self._commit_results()
        if self._failures.durable < self._failures.position:
            await asyncio.to_thread(self._failures.sync)

    def close(self) -> None:
        self._failures.close()

    async def _commit_results(self) -> None:
        count = len(self._uncommitted)
        # fsync waits for the disk, not for the interpreter: in a thread, requests go on meanwhile.
        await asyncio.to_thread(self._output.wait, self._uncommitted[-1][1])
        # Taken out only now: whoever cancels the wait leaves them to the next commit.
        batch, self._uncommitted = self._uncommitted[:count], self._uncommitted[count:]
        for outcome, _ in batch:
            self.tally.add(outcome)

    def _count_failure(self, outcome: Outcome) -> None:
        kind = str(outcome.failure)
        self.tally.add_failed_attempt(kind, outcome)
        if kind not in self._said:
            self._said.add(kind)
            self._say(f"first {kind} failure: {outcome.message}")

    def _judge(self) -> None:
        tried = self.tally.finished + len(self._uncommitted) + self.tally.given_up
        rate = self.tally.given_up / tried
        if tried >= self._min_samples and rate > self._max_failure_rate:
            self.stop(
                f"{self.tally.given_up} of {tried} rollouts failed, more than max_failure_rate="
                f"{self._max_failure_rate}; the first reasons stand above and in the failures file"
            )


def _failures_writer(path: Path) -> JsonlWriter:
    try:
        return JsonlWriter(path)
    except BadLineError as error:
        aside = shlex.join(["mv", str(path), f"{path}.bad"])
        raise BadLineError(
            path, error.line, f"{error.why}; results do not depend on it: type {aside}, then the same command"
        ) from None
