"""Counts what a collection has done, from what is on the disk: right also after a resume."""

from __future__ import annotations

import math
import os
import socket
import time
from collections import Counter, deque
from pathlib import Path

import msgspec

from rollbook.collect.items import Line
from rollbook.collect.settings import Prices
from rollbook.records.numbers import std_error
from rollbook.records.plain import utc_now
from rollbook.records.progress import Progress
from rollbook.records.turns import Usage

_RATE_WINDOW_S = 60.0
_LATENCIES = 2000


class Totals(msgspec.Struct):
    """What the lines of a file come to."""

    rewards: int = 0
    reward_sum: float = 0.0
    reward_squares: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    without_usage: int = 0  # lines

    @property
    def reward_mean(self) -> float | None:
        return self.reward_sum / self.rewards if self.rewards else None

    @property
    def reward_std(self) -> float | None:
        """Of a sample (n - 1)."""
        if self.rewards < 2:
            return None
        spread = self.reward_squares - self.reward_sum * self.reward_sum / self.rewards
        return math.sqrt(max(0.0, spread) / (self.rewards - 1))


class Tally:
    """Counts rollouts; makes a Progress of them."""

    def __init__(
        self, output: Path, expected: int, done: int, totals: Totals, prices: Prices | None, lost: Usage
    ) -> None:
        """`done` and `totals` are of the lines that are there, `lost` of attempts of earlier sessions."""
        self.expected, self.done_before = expected, done
        self.finished = self.given_up = 0
        self.failures: Counter[str] = Counter()
        self._totals, self._lost, self._prices = totals, lost, prices
        self._output = output.name
        self._started, self._started_at = time.monotonic(), utc_now()
        self._marks: deque[tuple[float, int]] = deque([(self._started, 0)])
        self._latencies: deque[float] = deque(maxlen=_LATENCIES)

    @property
    def is_complete(self) -> bool:
        return self.expected == self.done_before + self.finished

    def add(self, line: Line, seconds: float) -> None:
        """Count a line that is on the disk."""
        self.finished += 1
        totals, usage = self._totals, line.usage or Usage()
        totals.rewards += 1
        totals.reward_sum += line.reward
        totals.reward_squares += line.reward * line.reward
        totals.input_tokens += usage.input_tokens
        totals.output_tokens += usage.output_tokens
        totals.without_usage += line.usage is None
        self._latencies.append(seconds)

    def add_lost(self, usage: Usage) -> None:
        """Count tokens of an attempt that failed."""
        self._lost.input_tokens += usage.input_tokens
        self._lost.output_tokens += usage.output_tokens

    def progress(
        self, status: str, *, in_flight: int, waiting: int, concurrency: int, reason: str | None
    ) -> Progress:
        done, totals = self.done_before + self.finished, self._totals
        rate = self._rate()
        left = self.expected - done - self.given_up
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
            input_tokens=totals.input_tokens,
            output_tokens=totals.output_tokens,
            without_usage=totals.without_usage,
            lost_input_tokens=self._lost.input_tokens,
            lost_output_tokens=self._lost.output_tokens,
            cost=self._cost(),
            reward_mean=totals.reward_mean,
            reward_std=totals.reward_std,
            reward_std_error=std_error(totals.reward_std, totals.rewards),
            reward_count=totals.rewards,
            failures=dict(self.failures),
            latency_p50_s=self._latency(0.5),
            latency_p90_s=self._latency(0.9),
            started_at=self._started_at,
            updated_at=utc_now(),
            host=socket.gethostname(),
            pid=os.getpid(),
            output=self._output,
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
        input_tokens = self._totals.input_tokens + self._lost.input_tokens
        output_tokens = self._totals.output_tokens + self._lost.output_tokens
        if self._prices is None or (input_tokens + output_tokens == 0 and self._totals.without_usage):
            return None
        return round((input_tokens * self._prices.input + output_tokens * self._prices.output) / 1e6, 6)

    def _latency(self, share: float) -> float | None:
        if not self._latencies:
            return None
        return round(sorted(self._latencies)[int(len(self._latencies) * share)], 4)
