"""The process in which other people's patterns and formulas are worked out.

A regular expression can take longer than the universe on a short text, and so can a formula; neither lets
go of the interpreter meanwhile. Here each job gets a time limit and the process a memory limit, and whoever
asks (`workers.py`) kills a process that keeps to neither. Jobs and results are JSON in frames.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

from rollbook.runs.frames import frame, read_frame

_MOST_MEMORY = 4 << 30
_AFTER_ORPHANED_S = 10.0


class _TimeUp(BaseException):
    """Raised when the time of a job is over. No Exception, which a library might suppress."""


def main() -> None:
    requests, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not end up among the results
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGALRM, _time_up)
    while (job := read_frame(requests)) is not None:
        results.write(frame(json.dumps(_result(json.loads(job))).encode()))
        results.flush()


def _time_up(signum: int, frame: object) -> None:
    raise _TimeUp


def _result(job: dict[str, Any]) -> dict[str, Any]:
    limit = job.pop("limit_s")
    work = JOBS[job.pop("do")]
    # Should nobody be left to kill this process, its own processor time does.
    signal.setitimer(signal.ITIMER_PROF, limit + _AFTER_ORPHANED_S)
    try:
        # Again and again: a bare `except:` somewhere may swallow the first.
        signal.setitimer(signal.ITIMER_REAL, limit, 0.2)
        result = {"result": work(**job)}
        signal.setitimer(signal.ITIMER_REAL, 0)
    except _TimeUp:
        result = {"too_much": f"longer than {limit:g} s"}
    except (MemoryError, RecursionError) as error:
        result = {"too_much": type(error).__name__}
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
    return result


def _warm_up(maths: bool) -> bool:
    if maths:
        import_module("math_verify")  # takes a second, once
    return True


def _extract(pattern: str, text: str, flags: int) -> str | None:
    """What the pattern's last match captured, or matched when it captures nothing."""
    last = None
    for last in re.compile(pattern, flags).finditer(text):  # noqa: B007
        pass
    return None if last is None else last.group(1 if last.re.groups else 0)


def _search(patterns: list[str], text: str, flags: int) -> bool:
    return any(re.search(pattern, text, flags) for pattern in patterns)


def _count_lines(patterns: list[str], text: str) -> int:
    compiled = [re.compile(pattern) for pattern in patterns]
    return sum(any(one.search(line) for one in compiled) for line in text.split("\n"))


def _unexpected(patterns: list[str], text: str, allowed: list[str]) -> int:
    """How many matches of the patterns are not among those allowed."""
    return sum(match.group() not in allowed for pattern in patterns for match in re.finditer(pattern, text))


def _equal_in_maths(answer: str, expected: list[str]) -> dict[str, bool]:
    maths = import_module("math_verify")
    golds = [_parsed_gold(gold) for gold in expected]
    # Its own time limits are signals too, and cannot be had beside ours.
    given = maths.parse(answer, parsing_timeout=None)
    correct = bool(given) and any(maths.verify(list(gold), given, timeout_seconds=None) for gold in golds)
    return {"correct": correct, "parsed": bool(given)}


@lru_cache(maxsize=1024)
def _parsed_gold(text: str) -> tuple[Any, ...]:
    # Outside of $...$ or a box only plain numbers are recognised; an expected answer is all formula.
    boxed = text if "$" in text or "\\boxed" in text else f"\\boxed{{{text}}}"
    parsed = import_module("math_verify").parse(boxed, parsing_timeout=None)
    if not parsed:
        raise ValueError(f"the expected answer {text!r} is no formula that math-verify understands")
    return tuple(parsed)


JOBS: dict[str, Callable[..., Any]] = {
    "warm_up": _warm_up,
    "extract": _extract,
    "search": _search,
    "count_lines": _count_lines,
    "unexpected": _unexpected,
    "equal_in_maths": _equal_in_maths,
}

if __name__ == "__main__":
    main()
