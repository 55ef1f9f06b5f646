"""What commands share in talking to a person: a console, progress, safe text.

Progress is a bar on a terminal and, in a log, a plain line now and then without carriage returns. Model
output that reaches a terminal goes through `printable` first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rollbook.records.printable import printable as printable

if TYPE_CHECKING:
    from rich.console import Console

    from rollbook.data.progress import Progress

_LINE_EVERY_SECONDS = 10.0


def console(*, stderr: bool = False) -> Console:
    """As wide as the terminal; in a file or a pipe nothing is folded."""
    from rich.console import Console

    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, highlight=False, soft_wrap=True, width=None if is_terminal else 240)


@contextmanager
def progress(*, total: int, label: str, quiet: bool = False) -> Iterator[Callable[[], None]]:
    """Yields a function to call once for each thing done."""
    if quiet:
        yield lambda: None
    elif sys.stderr.isatty():
        with _bar(total, label) as advance:
            yield advance
    else:
        yield _LogLines(total, label).advance


@contextmanager
def byte_progress(label: str, *, quiet: bool = False) -> Iterator[Progress]:
    """Yields a Progress that shows each pass over bytes as a bar of its own."""
    from rollbook.data.progress import NO_PROGRESS

    if quiet:
        yield NO_PROGRESS
    elif sys.stderr.isatty():
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console(stderr=True), transient=True) as bar:
            yield _ByteBar(bar, label)
    else:
        yield _ByteLines(label)


class _ByteBar:
    def __init__(self, bar: Any, label: str) -> None:
        self._bar, self._label = bar, label
        self._task = bar.add_task(label, total=None)

    def begin(self, what: str, size: int) -> None:
        self._bar.reset(self._task, total=size, description=f"{self._label}: {what}")

    def advance(self, size: int) -> None:
        self._bar.advance(self._task, size)


class _ByteLines:
    """Prints a plain line now and then, for a log."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._lines = _LogLines(0, label)

    def begin(self, what: str, size: int) -> None:
        self._lines = _LogLines(size, f"{self._label}: {what}", unit=1 << 20)

    def advance(self, size: int) -> None:
        self._lines.advance(size)


@contextmanager
def _bar(total: int, label: str) -> Iterator[Callable[[], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)


class _LogLines:
    def __init__(self, total: int, label: str, unit: int = 1) -> None:
        self._total, self._label, self._unit = total, label, unit
        self._done = 0
        self._last = time.monotonic()

    def advance(self, count: int = 1) -> None:
        self._done += count
        now = time.monotonic()
        is_over = self._done >= self._total and self._unit == 1
        if is_over or now - self._last >= _LINE_EVERY_SECONDS:
            self._last = now
            done, total = self._done // self._unit, self._total // self._unit
            unit = "" if self._unit == 1 else " MB"
            print(f"{self._label}: {done} of {total}{unit}", file=sys.stderr, flush=True)
