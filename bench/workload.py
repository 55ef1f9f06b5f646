"""What the record benchmarks write, the same for every side, and how a side measures itself.

Standard library only, so that a peer's own environment can import it. Everything comes from a fixed seed.
A side is a script `python <side>.py CASE DIRECTORY [--scale S]`, always a fresh process, that prints one
JSON object of numbers. The inputs are built before the clock starts and kept out of the garbage
collector's way, so that only the logging is timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

SENTENCE = (
    'the model adds both sides of x < y && y > 0 and then it\'s "done" so we return <answer> 42 </answer> '
    "because for every step the next value is the sum of all earlier values minus one\n def solve(n): "
    "if n & 1: return n // 2 - check that 17 * 23 = 391 , hence the claim holds ;"
)
WORDS = SENTENCE.split(" ")


@dataclass(frozen=True)
class Turn:
    """One step of an episode: what the environment said, and what the policy answered."""

    observation: str
    action: str
    ob_len: int
    ac_len: int
    reward: float
    metrics: dict[str, float]
    logs: dict[str, str | int | float]


@dataclass(frozen=True)
class Episode:
    group: int
    index: int
    turns: list[Turn]

    @property
    def task_id(self) -> str:
        return f"task-{self.group:04d}"

    def messages(self) -> list[dict[str, str]]:
        """The whole conversation: a user message, then assistant and tool in turn."""
        conversation: list[dict[str, str]] = []
        for number, turn in enumerate(self.turns):
            conversation.append({"role": "tool" if number else "user", "content": turn.observation})
            conversation.append({"role": "assistant", "content": turn.action})
        return conversation


def text_of(rng: random.Random, size: int) -> str:
    """`size` ASCII characters that look like reasoning and code: quotes, angle brackets, newlines."""
    words: list[str] = []
    length = 0
    while length <= size:
        word = rng.choice(WORDS)
        words.append(word)
        length += len(word) + 1
    return " ".join(words)[:size]


def metric_rows(distinct: int, keys: int) -> list[dict[str, float | int]]:
    rng = random.Random(1)
    names = [f"env/all/some_metric_{number:03d}" for number in range(keys - 2)]
    return [
        {
            "progress/batch": row,
            "progress/done_frac": row / distinct,
            **{name: rng.random() for name in names},
        }
        for row in range(distinct)
    ]


def summary_episodes(groups: int, size: int, turns: int) -> list[list[Episode]]:
    """Episodes without text of their own; each step logs a note of 200 characters."""
    return _episodes(groups, size, turns, observation=0, action=0, note=200)


def text_episodes(groups: int, size: int, turns: int) -> list[list[Episode]]:
    """4,096 new characters a turn: 1,024 from the environment, 3,072 from the policy."""
    return _episodes(groups, size, turns, observation=1024, action=3072, note=0)


def _episodes(
    groups: int, size: int, turns: int, *, observation: int, action: int, note: int
) -> list[list[Episode]]:
    rng = random.Random(2)
    made = []
    for group in range(groups):
        # All trajectories of a group answer the same problem, so they share their first observation.
        problem = text_of(rng, observation)
        made.append(
            [
                Episode(
                    group,
                    index,
                    [_turn(rng, t, turns, problem, observation, action, note) for t in range(turns)],
                )
                for index in range(size)
            ]
        )
    return made


def _turn(
    rng: random.Random, number: int, turns: int, problem: str, observation: int, action: int, note: int
) -> Turn:
    last = number == turns - 1
    return Turn(
        observation=text_of(rng, observation) if number else problem,
        action=text_of(rng, action),
        ob_len=200 + 900 * number,
        ac_len=rng.randrange(400, 900),
        reward=float(rng.random() < 0.5) if last else 0.0,
        metrics={"format": 1.0, "correct": rng.random()},
        logs={"note": text_of(rng, note)} if note else {},
    )


@dataclass
class Watch:
    """Times a block, and tells how far resident memory rose above its level at the start."""

    seconds: float = 0.0
    peak_growth: int = 0
    _start: float = field(default=0.0, repr=False)
    _before: int = field(default=0, repr=False)

    def __enter__(self) -> Watch:
        gc.collect()
        gc.freeze()
        _reset_peak()
        self._before = _status("VmRSS")
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self.peak_growth = _status("VmHWM") - self._before


def _reset_peak() -> None:
    # Without this, VmHWM would still hold a peak from the building of the inputs.
    Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def total_size(*paths: Path) -> int:
    return sum(path.stat().st_size for path in paths)


Case = Callable[[Path, float], dict[str, float]]


def side_main(cases: dict[str, Case], version: str) -> None:
    """Run one case in this process and print its numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=sorted(cases))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--scale", type=float, default=1.0)
    arguments = parser.parse_args()
    numbers = cases[arguments.case](arguments.directory, arguments.scale)
    json.dump({"version": version, "python": platform.python_version(), **numbers}, sys.stdout)


def scaled(count: int, scale: float) -> int:
    return max(1, round(count * scale))
