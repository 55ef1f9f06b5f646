"""The results of one session: what is written of each rollout, what it comes to, and when it is too much.

A line is appended at once and counts once it is on the disk, which a thread of the writer sees to; the slot
that a rollout held is free long before.
"""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import msgspec
import orjson

from rollbook.collect.check import Checked
from rollbook.collect.files import CollectionFiles
from rollbook.collect.items import Attempted, Failure, Item, Line
from rollbook.collect.progress import Tally
from rollbook.collect.settings import CollectSettings
from rollbook.errors import BadLineError
from rollbook.records.identity import DIGEST, KEY, ROLLOUT_INDEX, TASK_INDEX, rollout_key, task_digest
from rollbook.records.jsonl import JsonlWriter, every_ms
from rollbook.records.plain import encode, utc_now
from rollbook.records.progress import Progress, read_progress, write_progress
from rollbook.records.record import decode_exactly
from rollbook.records.turns import Usage
from rollbook.rollouts.concurrency import Concurrency
from rollbook.rollouts.runner import Done, GivenUp, Retry, Runner, Stop
from rollbook.rollouts.types import RolloutFailure
from rollbook.rollouts.usage import clamp_tokens

SYNC = every_ms(50)


class Results:
    def __init__(
        self,
        settings: CollectSettings,
        files: CollectionFiles,
        checked: Checked,
        output: JsonlWriter,
        log: Callable[[str], None],
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._settings, self._files, self._log, self._on_progress = settings, files, log, on_progress
        self._output = output
        self.stop = Stop()
        self.concurrency = Concurrency(settings.num_samples_in_parallel, adaptive=settings.adaptive)
        self.runner: Runner[Item, Line] | None = None
        done = checked.done
        last, lost = read_progress(files.progress), Usage()
        if last is not None and last.output == files.output.name and (output.position > 0 or last.done == 0):
            lost = Usage(last.lost_input_tokens, last.lost_output_tokens)  # which no line holds
        self._tally = Tally(files.output, checked.expected, done.count, done.totals, settings.prices, lost)
        self._not_durable: deque[tuple[int, Line, float]] = deque()  # where it ends, what, how long it took
        self._kinds: set[str] = set()  # of failures that were logged
        self._failed_too_often = False
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        self._failures = self._opened.enter_context(_failures_writer(self._files.failures))
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def take(self, event: Done[Item, Line] | Retry[Item] | GivenUp[Item]) -> None:
        match event:
            case Done(_, line, seconds):
                end = self._output.append(line.data)
                line.data = b""
                self._not_durable.append((end, line, seconds))
            case Retry(item, failure):
                kept = self._count(failure)
                if kept.reply is not None:
                    event.item = msgspec.structs.replace(item, unjudged=kept)
                elif event.attempts.may_be_the_culprit(self._settings.retry):
                    event.item = msgspec.structs.replace(item, alone=True)
            case GivenUp():
                self._give_up(event)

    def sync(self) -> None:
        """Put everything on the disk; returns when it is there."""
        self._output.sync()
        self._failures.sync()

    def report(self, status: str | None = None) -> Progress:
        """Write and show how it stands. Without a status it has ended."""
        while self._not_durable and self._not_durable[0][0] <= self._output.durable:
            _, line, seconds = self._not_durable.popleft()
            self._tally.add(line, seconds)
        if status is None:
            was_asked = self.stop.reason is not None and not self._failed_too_often
            status = "completed" if self._tally.is_complete else "interrupted" if was_asked else "failed"
        assert self.runner is not None
        progress = self._tally.progress(
            status,
            in_flight=self.runner.num_in_flight if status == "running" else 0,
            waiting=self.runner.num_waiting,
            concurrency=self.concurrency.limit,
            reason=self._reason(),
        )
        write_progress(self._files.progress, progress)
        self._on_progress(progress)
        return progress

    def _reason(self) -> str | None:
        if not self.stop.abandoned:
            return self.stop.reason
        return f"{self.stop.reason}, {self.stop.abandoned} abandoned {self._settings.drain_for} later"

    def _count(self, failure: RolloutFailure) -> Failure:
        """Count a failed attempt; returns what is kept of it."""
        kept = failure.kept if isinstance(failure, Attempted) else Failure(failure.kind, str(failure))
        self._tally.failures[str(kept.kind)] += 1
        self._tally.add_lost(kept.usage)
        if kept.kind not in self._kinds:
            self._kinds.add(kept.kind)
            self._log(f"first {kept.kind} failure: {kept.message}")
        return kept

    def _give_up(self, event: GivenUp[Item]) -> None:
        item, kept = event.item, self._count(event.failure)
        unjudged = kept if kept.reply else item.unjudged if not kept.response else None
        if unjudged is not None and unjudged.reply is not None:  # nobody will judge it any more
            usage = unjudged.reply.usage or Usage()
            self._tally.add_lost(Usage(clamp_tokens(usage.input_tokens), clamp_tokens(usage.output_tokens)))
        self._tally.given_up += 1
        row = decode_exactly(item.line)
        record = {
            KEY: rollout_key(item.task_id, item.repeat),
            TASK_INDEX: row.get(TASK_INDEX, item.row),  # as in a result's line
            ROLLOUT_INDEX: item.repeat,
            DIGEST: task_digest(row) if item.with_digest else None,
            "kind": kept.kind,
            "message": kept.message,
            "status": kept.status,
            "attempts": event.attempts.failures,
            "failed_at": utc_now(),
        }
        if response := (unjudged or kept).response:
            record["response"] = orjson.Fragment(response)
            record["row"] = orjson.Fragment(item.line)  # with both it can be graded later
        self._failures.append(encode(record))
        self._judge()

    def _judge(self) -> None:
        settings, failed = self._settings, self._tally.given_up
        tried = self._tally.finished + len(self._not_durable) + failed
        if tried >= settings.min_samples and failed / tried > settings.max_failure_rate:
            self._failed_too_often = self._failed_too_often or self.stop.reason is None
            self.stop.request(
                f"{failed} of {tried} rollouts failed, more than max_failure_rate="
                f"{settings.max_failure_rate}; the first reasons are above and in the failures file"
            )


def _failures_writer(path: Path) -> JsonlWriter:
    try:
        return JsonlWriter(path, sync=SYNC)
    except BadLineError as error:
        aside = shlex.join(["mv", str(path), f"{path}.bad"])
        raise BadLineError(
            path, error.line, f"{error.why}; results do not depend on it: type {aside}, then the same command"
        ) from None
