"""What a person sees while a run trains: a line per iteration, and now and then a rollout to read.

On a terminal the last line shows what is under way and how long the rest will take; a log gets whole lines.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from statistics import median
from typing import Any

from rollbook.records.numbers import mean_text
from rollbook.records.printable import printable
from rollbook.rl.groups import Group
from rollbook.rl.live_line import LiveLine
from rollbook.rl.player import Played
from rollbook.rl.watch import Finding
from rollbook.rollouts.types import Episode, Message

Log = Callable[[str], None]

_HEADER_EVERY = 20
_RECENT = 20  # iterations that the time left is estimated from
_TEXT_WIDTH = 400  # characters of a message that are shown


class Column:
    def __init__(self, title: str, width: int, key: str, form: str, error_key: str = "") -> None:
        """`error_key` is that of the standard error, where the value is a mean that has one."""
        self.title, self.width, self.key, self.form, self.error_key = title, width, key, form, error_key

    def cell(self, values: Mapping[str, float]) -> str:
        return mean_text(values.get(self.key), values.get(self.error_key), self.form).rjust(self.width)


_COLUMNS = (
    Column("reward", 15, "env/all/reward/total", ".3f", "env/all/reward/std_error"),
    Column("mixed", 6, "env/all/by_group/frac_mixed", ".0%"),
    Column("kl v3", 9, "kl_sample_train_v3", ".2g"),
    Column("entropy", 8, "entropy", ".3f"),
    Column("tok/turn", 9, "ac_tokens_per_turn", ".1f"),
    Column("cut", 5, "truncated/share", ".0%"),
    Column("failed", 7, "env/all/rollouts/failed", ".0f"),
    Column("sample s", 9, "time/sample", ".2f"),
    Column("train s", 8, "time/train", ".2f"),
    Column("tok/s", 8, "tokens_per_second", ",.0f"),
)


class Console:
    def __init__(self, log: Log, *, total: int, samples_every: int) -> None:
        self._log, self._total, self._samples_every = log, total, samples_every
        self._lines = 0
        self._live = LiveLine(sys.stdout)
        self._width = len(str(total))
        self._next = 0
        self._seconds: deque[float] = deque(maxlen=_RECENT)  # of the last iterations

    def log(self, text: str) -> None:
        self._live.clear()
        self._log(printable(text))

    def clear(self) -> None:
        self._live.clear()

    def now(self, text: str) -> None:
        """Show what is under way, until there is a line to stay."""
        self._live.show(f"{text}{self._rest()}")

    def iteration(self, i: int, values: Mapping[str, float], played: Played) -> None:
        if self._lines % _HEADER_EVERY == 0:
            titles = " ".join(column.title.rjust(column.width) for column in _COLUMNS)
            self.log(f"{'iteration'.ljust(self._width * 2 + 8)} {titles}")
        self._lines += 1
        self._next = i + 1
        self._seconds.append(values.get("time/total", 0.0))
        cells = " ".join(column.cell(values) for column in _COLUMNS)
        label = f"{i:>{self._width}}/{self._total}".ljust(self._width * 2 + 8)
        self.log(f"{label} {cells}")
        self._failures(played)
        if self._samples_every and i % self._samples_every == 0:
            self._sample(i, played.groups)

    def evaluation(self, name: str, before: int, values: Mapping[str, float], played: Played) -> None:
        reward = values.get(f"{name}/env/all/reward/total")
        ok, failed = (values.get(f"{name}/env/all/rollouts/{key}", 0) for key in ("ok", "failed"))
        error = values.get(f"{name}/env/all/reward/std_error")
        shown = "no reward" if reward is None else f"mean reward {mean_text(reward, error, '.3f')}"
        self.log(
            f"eval {name} before iteration {before}: {shown} over {ok:.0f} rollouts, {failed:.0f} failed"
        )
        self._failures(played)

    def alert(self, i: int, finding: Finding) -> None:
        self.log(f"ALERT in iteration {i}: {finding.title}: {finding.text}")

    def progress(self, stage: str, done: int, expected: int) -> None:
        self.now(f"{stage}: {done} of {expected} rollouts")

    def _rest(self) -> str:
        if not self._seconds or self._next >= self._total:
            return ""
        left = timedelta(seconds=round(median(self._seconds) * (self._total - self._next)))
        return f"; about {left} left"

    def _failures(self, played: Played) -> None:
        """Say why rollouts failed."""
        if played.errors:
            self.log(f"  {shortened(played.why_failed)}")

    def _sample(self, i: int, groups: Sequence[Group]) -> None:
        """One rollout, another one each time."""
        episodes = [episode for group in groups for episode in group.episodes if episode is not None]
        if not episodes:
            return
        episode = episodes[(i * 7919) % len(episodes)]
        reward = episode.reward
        self.log(f"  a rollout of iteration {i}, reward {'unknown' if reward is None else f'{reward:g}'}:")
        for message in conversation_of(episode):
            self.log(f"  {line_of(message)}")


def conversation_of(episode: Episode) -> list[Message]:
    return [*episode.prompt, *episode.messages]


def line_of(message: Mapping[str, Any]) -> str:
    """A message in one line, its control characters spelled out."""
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else str(content)
    calls = "".join(f" [calls {call.get('function', call)}]" for call in message.get("tool_calls") or ())
    return f"{message.get('role')}: {shortened(text)!r}{calls}"


def shortened(text: str) -> str:
    return text if len(text) <= _TEXT_WIDTH else f"{text[:_TEXT_WIDTH]}... ({len(text)} characters)"
