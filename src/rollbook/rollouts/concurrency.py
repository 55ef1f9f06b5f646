"""How many rollouts may be in flight: as many as somebody says, and fewer while the server cannot take them.

Any busy service refuses a request now and then. That costs the rollout it hits another attempt, and nobody
else anything. A server is overloaded when more than a tenth of the latest attempts were pushed back. Then the
number is lowered to a little less than the server did serve at a time, which the latency of its answers says:
the seconds they took, by the seconds in which they came (Little's law). It is lowered by at least a tenth, so
that it takes a while until the server is tried again, and at most a half, since a moment may say too little.
Attempts that began before that say nothing of what comes after it. Each round of answers makes it one more
again; where that was too many the last time, it takes ten rounds.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from rollbook.rollouts.types import FailureKind

_PUSH_BACK = frozenset({FailureKind.RATE_LIMIT, FailureKind.SERVER_ERROR, FailureKind.TIMEOUT})
_NOISE = 0.1  # of the latest attempts
_LEAST_LATEST = 50  # of fewer, a tenth is chance
_ROOM = 0.9  # of what the server served
_ROUNDS_AT_THE_EDGE = 10


class _Ended(NamedTuple):
    at: float
    served_s: float  # 0.0: it was pushed back


class Concurrency:
    """The number of rollouts that may be in flight now."""

    def __init__(self, most: int, *, adaptive: bool) -> None:
        self.most = most
        self._adaptive = adaptive
        self._limit = float(most)
        self._lowered_at = -1.0
        self._too_many = 0  # the limit when it was lowered last
        self._latest: deque[_Ended] = deque()
        self._pushed_back, self._served_s = 0, 0.0  # in `_latest`

    @property
    def limit(self) -> int:
        return int(self._limit)

    def succeeded(self, started: float, seconds: float) -> None:
        """`started` is when the attempt began, on the monotonic clock."""
        if self._adaptive:
            rounds = _ROUNDS_AT_THE_EDGE if self.limit + 1 == self._too_many else 1
            self._limit = min(self.most, self._limit + 1 / (self._limit * rounds))
            self._note(started, seconds)

    def failed(self, kind: FailureKind, started: float) -> None:
        if self._adaptive and kind in _PUSH_BACK:
            self._note(started, 0.0)
            if self._pushed_back > _NOISE * self._window:
                self._lower()

    @property
    def _window(self) -> int:
        return max(self.limit, _LEAST_LATEST)

    def _note(self, started: float, served_s: float) -> None:
        if started <= self._lowered_at:
            return
        self._latest.append(_Ended(time.monotonic(), served_s))
        self._count(served_s, 1)
        while len(self._latest) > self._window:
            self._count(self._latest.popleft().served_s, -1)

    def _count(self, served_s: float, step: int) -> None:
        self._pushed_back += step * (served_s == 0.0)
        self._served_s += step * served_s

    def _lower(self) -> None:
        now, oldest = time.monotonic(), self._latest[0]
        since = now - oldest.at
        at_a_time = (self._served_s - oldest.served_s) / since if since > 0 else 0.0
        self._too_many = self.limit
        self._limit = max(1.0, self._limit / 2, _ROOM * min(self._limit, at_a_time))
        self._lowered_at = now
        self._latest.clear()
        self._pushed_back, self._served_s = 0, 0.0
