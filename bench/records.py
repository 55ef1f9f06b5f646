"""Side by side in one run: plain `json`, tinker-cookbook's store, and Rollbook, writing the same records.

    python bench/records.py [--rounds 3] [--only metrics summaries ...] [--scale 1.0]

Every measurement is a fresh process; the sides take turns, in the opposite order every second round, and
the table shows medians. A ratio above 1 means that Rollbook is better. What each side does, and how durable
it is, stands at the top of `side_plain.py`, `side_tinker.py` and `side_rollbook.py`.

The trees hold 64 groups x 16 trajectories x 10 turns with 4,096 new characters a turn: 42 MB of text, below
which no side can go while its tree holds the text. `iteration` rows record the same episodes the way each
system's own loop does; `same tree` makes the same calls on both sides; `text only` is the conversations and
nothing else, to show how much of the difference is not text.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from report import markdown_table, provenance, write_section

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TINKER_PYTHON = ROOT / ".venvs" / "tinker" / "bin" / "python"
SIDES = ("json", "tinker-cookbook", "rollbook")
COMMANDS = {
    "json": (Path(sys.executable), HERE / "side_plain.py"),
    "tinker-cookbook": (TINKER_PYTHON, HERE / "side_tinker.py"),
    "rollbook": (Path(sys.executable), HERE / "side_rollbook.py"),
}
Numbers = dict[str, float]
Results = dict[tuple[str, str], list[Numbers]]  # (side, case) -> one entry a round


@dataclass(frozen=True)
class Goal:
    below: float = float("inf")
    times_tinker: float = 1.0

    def verdict(self, value: float, ratio: float) -> str:
        wanted = f"{self.times_tinker:g}x" + (f", < {self.below:g}" if self.below < float("inf") else "")
        return f"{wanted}: {'met' if value < self.below and ratio >= self.times_tinker else 'MISSED'}"


@dataclass(frozen=True)
class Row:
    label: str
    key: str
    show: Callable[[float], str]
    higher_is_better: bool = False
    goal: Goal | None = None

    def ratio(self, peer: float, ours: float) -> float:
        return ours / peer if self.higher_is_better else peer / ours


@dataclass(frozen=True)
class Group:
    """Rows that come from one case of each side."""

    name: str
    cases: dict[str, str]
    rows: tuple[Row, ...]


def seconds(value: float) -> str:
    return f"{value:.2f} s"


def megabytes(value: float) -> str:
    return f"{value / 1e6:.1f} MB"


def number(value: float) -> str:
    return f"{value:,.0f}"


def tree_rows(label: str, goal: Goal | None) -> tuple[Row, ...]:
    return (
        Row(f"{label}: time", "seconds", seconds, goal=goal),
        Row(f"{label}: logtree JSON", "json_bytes", megabytes, goal=goal),
        Row(f"{label}: HTML", "html_bytes", megabytes),
        Row(f"{label}: memory on top", "peak_growth", megabytes),
    )


def all_sides(case: str) -> dict[str, str]:
    return dict.fromkeys(SIDES, case)


FIVE_TIMES = Goal(times_tinker=5)
GROUPS = (
    Group(
        "metrics",
        all_sides("metrics"),
        (
            Row(
                "`log_metrics` of 100 keys, µs (median call)",
                "call_us",
                number,
                goal=Goal(below=100, times_tinker=3),
            ),
            Row("metrics written, rows/s", "rows_per_s", number, higher_is_better=True),
            Row("metrics, bytes a row", "row_bytes", number),
            Row("metrics read, rows/s", "read_rows_per_s", number, higher_is_better=True),
        ),
    ),
    Group(
        "summaries",
        all_sides("summaries"),
        (
            Row("1,024 summaries x 10 turns: write", "seconds", seconds),
            Row("1,024 summaries x 10 turns: size", "bytes", megabytes),
            Row("1,024 summaries x 10 turns: read", "read_seconds", seconds),
        ),
    ),
    *(
        Group(
            f"iteration_{kind}",
            {"tinker-cookbook": f"iteration_{kind}", "rollbook": "iteration"},
            tree_rows(f"iteration, {label}", FIVE_TIMES),
        )
        for kind, label in (
            ("tool_env", "tool env"),
            ("chat_new", "new messages a turn"),
            ("chat_whole", "whole prompt a turn"),
        )
    ),
    Group(
        "tree_calls",
        {"tinker-cookbook": "tree_calls", "rollbook": "tree_calls"},
        tree_rows("same tree", FIVE_TIMES),
    ),
    Group(
        "tree_text",
        {"tinker-cookbook": "tree_text", "rollbook": "tree_text"},
        tree_rows("text only", None),
    ),
)


def measure(side: str, case: str, scale: float) -> dict[str, object]:
    python, script = COMMANDS[side]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="rollbook-bench-") as directory:
        done = subprocess.run(
            [python, script, case, directory, "--scale", str(scale)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": path},
        )
    if done.returncode != 0:
        raise SystemExit(f"{side} failed at {case}:\n{done.stderr}")
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def run_rounds(groups: Iterable[Group], rounds: int, scale: float) -> tuple[Results, dict[str, str]]:
    jobs = list(dict.fromkeys((side, case) for group in groups for side, case in group.cases.items()))
    results: Results = defaultdict(list)
    versions: dict[str, str] = {}
    for turn in range(rounds):
        for side, case in jobs if turn % 2 == 0 else reversed(jobs):
            print(f"round {turn + 1} of {rounds}: {case} by {side}", file=sys.stderr)
            answer = measure(side, case, scale)
            versions[side] = str(answer["version"])
            results[side, case].append({k: v for k, v in answer.items() if isinstance(v, int | float)})
    return results, {side: versions[side] for side in SIDES if side in versions and side != "json"}


def table_rows(group: Group, results: Results) -> Iterable[list[str]]:
    for row in group.rows:
        values = {
            side: statistics.median(numbers[row.key] for numbers in results[side, case])
            for side, case in group.cases.items()
        }
        ratios = {side: row.ratio(value, values["rollbook"]) for side, value in values.items()}
        shown = [row.show(values[side]) if side in values else "" for side in SIDES]
        compared = [f"{ratios[side]:.1f}x" if side in ratios else "" for side in SIDES[:2]]
        verdict = row.goal.verdict(values["rollbook"], ratios["tinker-cookbook"]) if row.goal else ""
        yield [row.label, *shown, *compared, verdict]


def main() -> None:
    parser = argparse.ArgumentParser(description="Record benchmarks against plain json and tinker-cookbook.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=[group.name for group in GROUPS])
    parser.add_argument("--scale", type=float, default=1.0, help="a fraction of the full size, to try it out")
    arguments = parser.parse_args()
    if not TINKER_PYTHON.exists():
        raise SystemExit("tinker-cookbook is not installed: run `python tests/interop/setup_tinker.py`")
    groups = [group for group in GROUPS if not arguments.only or group.name in arguments.only]
    results, versions = run_rounds(groups, arguments.rounds, arguments.scale)
    header = ["what", *SIDES, "vs json", "vs tinker", "goal vs tinker"]
    table = markdown_table(header, [cells for group in groups for cells in table_rows(group, results)])
    body = f"## Records (`bench/records.py`)\n\n{provenance(versions, arguments.rounds)}\n\n{table}"
    print(body)
    if arguments.scale == 1.0 and not arguments.only:
        write_section("records", f"{body}\n\n{NOTES}")


NOTES = """\
Durability of what is timed: `json` flushes each line to the page cache; tinker-cookbook opens, writes and
closes without fsync; Rollbook writes each line with one write(2) and has everything fsynced when the clock
stops. `iteration` rows: tinker-cookbook writes summaries, tree and HTML; Rollbook writes the same and the
full transcripts. *tool env*: what its shipped multi-turn tool env logs (text in `logs`, no conversation).
*New messages a turn* and *whole prompt a turn*: its `ProblemEnv` sections at each turn, with the messages
new in that turn, or with all the policy saw. *Same tree*: the same sections, tables and conversations
through each system's logtree. *Text only*: 42 MB of conversations and no tables. *Memory on top*: peak
resident memory above the level before logging began. What tinker-cookbook pays for beyond the text are its
tables, above all Trajectory Details: each cell is a node of its own in indented JSON."""


if __name__ == "__main__":
    main()
