"""How a collection stands: counted from what is on the disk, right also after a resume.

`<stem>_progress.json` is replaced whole about once a second, so that any program, `rollbook status` among
them, can read it while the collection runs or after it was killed.
"""

from __future__ import annotations

import math
import os
import random
import socket
import time
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import orjson

from rollbook.collect.items import Line
from rollbook.collect.settings import Prices
from rollbook.errors import BadFileError
from rollbook.records.atomic import write_atomic
from rollbook.records.plain import utc_now
from rollbook.records.turns import Usage

_RATE_WINDOW_S = 60.0
_LATENCIES_KEPT = 2000


class Progress(msgspec.Struct, kw_only=True):
    """The content of the progress file."""

    status: str  # running, complete, incomplete, stopped
    expected: int
    done: int  # lines on the disk, of this and earlier sessions
    failed: int  # given up in this session
    missing: int
    in_flight: int
    waiting: int  # for a retry
    concurrency: int
    done_before: int  # by earlier sessions
    rate_per_s: float  # over the last minute
    eta_s: float | None
    elapsed_s: float
    input_tokens: int  # of the lines on the disk, as is the reward
    output_tokens: int
    without_usage: int = 0  # of the lines, those that tokens and cost leave out, or count in part
    lost_input_tokens: int = 0  # of attempts that failed, of this and earlier sessions
    lost_output_tokens: int = 0
    cost: float | None  # of all those; None without prices, or where no tokens are known
    reward_mean: float | None
    reward_std: float | None
    reward_count: int
    failures: dict[str, int]  # by kind, this session, retried ones included
    latency_p50_s: float | None
    latency_p90_s: float | None
    started_at: str
    updated_at: str
    host: str
    pid: int
    output: str
    reason: str | None = None  # why it stopped


class RunningMean:
    """Mean and spread of a stream (Welford)."""

    def __init__(self, count: int = 0, mean: float = 0.0, std: float = 0.0) -> None:
        """A stream may go on where another one, of which this much is known, has ended."""
        self.count = count
        self.mean = mean
        self._squares = std * std * count

    def add(self, value: float) -> None:
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self._squares += delta * (value - self.mean)

    @property
    def std(self) -> float:
        return math.sqrt(self._squares / self.count) if self.count else 0.0


class Totals(msgspec.Struct):
    """What the lines of a file come to."""

    reward: RunningMean = msgspec.field(default_factory=RunningMean)
    input_tokens: int = 0
    output_tokens: int = 0
    without_usage: int = 0  # lines


class Tally:
    """Counts outcomes; makes a Progress of them."""

    def __init__(self, output: Path, expected: int, done: int, totals: Totals, prices: Prices | None) -> None:
        self.expected, self.done_before = expected, done
        self.finished = self.given_up = 0
        self.failures: Counter[str] = Counter()
        self.reward = totals.reward
        self.input_tokens, self.output_tokens = totals.input_tokens, totals.output_tokens
        self.without_usage = totals.without_usage
        self.lost_input_tokens = self.lost_output_tokens = 0
        self._output = output
        self._prices = prices
        self._started = time.monotonic()
        self._started_at = utc_now()
        self._marks: deque[tuple[float, int]] = deque([(self._started, 0)])
        self._latencies: list[float] = []
        self._chance = random.Random(0)

    @property
    def is_complete(self) -> bool:
        return self.expected == self.done_before + self.finished

    def add(self, line: Line, seconds: float) -> None:
        """Count a line that is on the disk."""
        self.finished += 1
        usage = line.usage or Usage()
        self.input_tokens += usage.input_tokens
        self.output_tokens += usage.output_tokens
        self.without_usage += line.usage is None
        self.reward.add(line.reward)
        if len(self._latencies) < _LATENCIES_KEPT:
            self._latencies.append(seconds)
        elif (place := int(self._chance.random() * self.finished)) < _LATENCIES_KEPT:
            self._latencies[place] = seconds  # a uniform sample of all so far

    def add_failed_attempt(self, kind: str, usage: Usage) -> None:
        self.failures[kind] += 1
        self.add_lost(usage)

    def add_lost(self, usage: Usage) -> None:
        self.lost_input_tokens += usage.input_tokens
        self.lost_output_tokens += usage.output_tokens

    def snapshot(
        self, status: str, *, in_flight: int, waiting: int, concurrency: int, reason: str | None
    ) -> Progress:
        done = self.done_before + self.finished
        rate = self._rate()
        left = self.expected - done - self.given_up
        p50, p90 = self._percentiles()
        return Progress(
            status=status,
            expected=self.expected,
            done=done,
            failed=self.given_up,
            missing=self.expected - done,
            in_flight=in_flight,
            waiting=waiting,
            concurrency=concurrency,
            done_before=self.done_before,
            rate_per_s=round(rate, 3),
            eta_s=round(left / rate, 1) if rate > 0 and status == "running" else None,
            elapsed_s=round(time.monotonic() - self._started, 3),
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            without_usage=self.without_usage,
            lost_input_tokens=self.lost_input_tokens,
            lost_output_tokens=self.lost_output_tokens,
            cost=self._cost(),
            reward_mean=self.reward.mean if self.reward.count else None,
            reward_std=self.reward.std if self.reward.count else None,
            reward_count=self.reward.count,
            failures=dict(self.failures),
            latency_p50_s=p50,
            latency_p90_s=p90,
            started_at=self._started_at,
            updated_at=utc_now(),
            host=socket.gethostname(),
            pid=os.getpid(),
            output=self._output.name,
            reason=reason,
        )

    def _rate(self) -> float:
        now = time.monotonic()
        self._marks.append((now, self.finished))
        while len(self._marks) > 2 and self._marks[1][0] < now - _RATE_WINDOW_S:
            self._marks.popleft()
        since, count = self._marks[0]
        return (self.finished - count) / (now - since) if now > since else 0.0

    def _cost(self) -> float | None:
        seen = self.input_tokens + self.lost_input_tokens
        said = self.output_tokens + self.lost_output_tokens
        if self._prices is None or (seen + said == 0 and self.without_usage):
            return None
        return round((seen * self._prices.input + said * self._prices.output) / 1e6, 6)

    def add_earlier_losses(self, last: Progress) -> None:
        """What failed attempts of earlier sessions used stands in no line: only the last session knows it."""
        self.lost_input_tokens += last.lost_input_tokens
        self.lost_output_tokens += last.lost_output_tokens

    def _percentiles(self) -> tuple[float | None, float | None]:
        if not self._latencies:
            return None, None
        ordered = sorted(self._latencies)
        p50, p90 = (ordered[int(len(ordered) * share)] for share in (0.5, 0.9))
        return round(p50, 4), round(p90, 4)


def coverage_of(progress: Progress) -> dict[str, int]:
    """What a manifest keeps of it."""
    return {
        "expected": progress.expected,
        "ok": progress.done,
        "failed": progress.failed,
        "missing": progress.missing,
    }


def write_progress(path: Path, progress: Progress) -> None:
    plain: dict[str, Any] = msgspec.to_builtins(progress)
    write_atomic(path, orjson.dumps(plain, option=orjson.OPT_INDENT_2) + b"\n", durable=False)


def last_progress(path: Path, output: Path) -> Progress | None:
    """How the last session of this output stood, if it is known."""
    with suppress(BadFileError):
        last = read_progress(path)
        return last if last.output == output.name else None  # or of rollouts.json beside rollouts.jsonl
    return None


def read_progress(path: Path) -> Progress:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Progress)
    except (OSError, msgspec.MsgspecError) as error:
        raise BadFileError(path, f"not a progress file ({error})") from error
