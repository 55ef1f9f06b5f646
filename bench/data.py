"""Side by side in one run: the commands people use on a million rollouts, and Rollbook's.

    python bench/data.py [--rounds 3] [--quick] [--only merge mean mix profile] [--directory DIR]

`cat` of 100 chunks against `merge` with every check; `jq -s` for a mean against `stats`; the usual mixing
script (`data_mix_script.py`) against `mix`; and `profile` of 250,000 tasks x 4, which has no other side here.
Each is a process of its own; its seconds and its peak memory come from the kernel. The sides take turns, in
the opposite order every second round, and medians are compared. Before every clock starts the outputs of the
last command are gone, nothing is on its way to the disk, and the inputs have been read once, so they are in
the page cache for both. Ratios above 1 mean that Rollbook needs less. `--quick` takes a hundredth of the
rows, to try it out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import psutil
from data_rows import REPEATS, make_chunks
from report import markdown_table, provenance, write_section

HERE = Path(__file__).resolve().parent
ROLLBOOK = [sys.executable, "-c", "from rollbook.cli.main import main; main()", "data"]
FULL_ROWS, QUICK_ROWS, CHUNKS = 1_000_000, 10_000, 100
MIX_TOTAL = 10_000
SHARES = {"high_quality": "0.6", "exploration": "0.3", "hard": "0.1"}
JQ_BYTES_A_ROW = 13_000  # `jq -s` needs this much memory; without it, it would take the machine down


@dataclass(frozen=True)
class Measured:
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    printed: str


@dataclass
class Case:
    """One question asked of both sides."""

    name: str
    label: str
    theirs_label: str
    ours: list[str]
    theirs: list[str] | None = None
    reads: tuple[str, ...] = ("all.jsonl",)
    times: int = 1  # more rounds where they are cheap and the sides are close
    goals: list[tuple[str, Callable[[Measured, Measured | None], bool | None]]] = field(default_factory=list)
    makes: tuple[str, ...] = ()
    same_answer: Callable[[str, str], bool] = lambda theirs, ours: True
    bytes_needed: int = 0


def make_ready(directory: Path, reads: Sequence[str]) -> None:
    """The same state for both sides: inputs in the page cache, nothing left to write."""
    buffer = bytearray(1 << 20)
    for name in reads:
        with (directory / name).open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    os.sync()


def measure(command: Sequence[str], directory: Path) -> Measured:
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
        started = time.monotonic()
        process = subprocess.Popen(command, cwd=directory, stdout=printed, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        printed.seek(0)
        errors.seek(0)
        if process.returncode != 0:
            raise SystemExit(f"{command} failed ({process.returncode}):\n{errors.read().decode()[-3000:]}")
        text = printed.read().decode()
    return Measured(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, text)


def times_faster(least: float) -> Callable[[Measured, Measured | None], bool | None]:
    return lambda ours, theirs: None if theirs is None else theirs.seconds >= least * ours.seconds


def times_less_memory(least: float) -> Callable[[Measured, Measured | None], bool | None]:
    return lambda ours, theirs: None if theirs is None else theirs.peak_bytes >= least * ours.peak_bytes


def cases(directory: Path, rows: int, chunks: list[Path]) -> list[Case]:
    size = sum(chunk.stat().st_size for chunk in chunks)
    names = [chunk.name for chunk in chunks]
    sources = [f"{name}={name}.jsonl:{share}" for name, share in SHARES.items()]
    total = str(MIX_TOTAL * rows // FULL_ROWS)
    mix_script = [sys.executable, str(HERE / "data_mix_script.py"), "script_mix.jsonl", total, *sources]
    jq = shutil.which("jq")
    return [
        Case(
            "merge",
            f"{CHUNKS} chunks, {size / 1e9:.1f} GB, into one",
            "`cat`",
            [*ROLLBOOK, "merge", *names, "-o", "merged.jsonl"],
            ["sh", "-c", f"cat {' '.join(names)} > cat.jsonl"],
            tuple(names),
            3,
            [("at most 3x `cat`", times_faster(1 / 3))],
            ("merged.jsonl", "merged_manifest.json", "cat.jsonl"),
        ),
        Case(
            "merge_durable",
            "the same, on the disk when it returns",
            "`cat`, `sync`",
            [*ROLLBOOK, "merge", *names, "-o", "merged.jsonl"],
            ["sh", "-c", f"cat {' '.join(names)} > cat.jsonl && sync cat.jsonl"],
            tuple(names),
            3,
            makes=("merged.jsonl", "merged_manifest.json", "cat.jsonl"),
        ),
        Case(
            "mean",
            "mean reward",
            "`jq -s`",
            [*ROLLBOOK, "stats", "all.jsonl", "--field", "reward", "--json"],
            [jq, "-s", "map(.reward) | add/length", "all.jsonl"] if jq else None,
            goals=[("20x faster", times_faster(20)), ("a tenth of the memory", times_less_memory(10))],
            same_answer=lambda theirs, ours: math.isclose(float(theirs), _mean_reward(ours), rel_tol=1e-9),
            bytes_needed=JQ_BYTES_A_ROW * rows,
        ),
        Case(
            "mix",
            f"mix of {int(total):,}",
            "the script",
            [*ROLLBOOK, "mix", *sources, "--total", total, "--seed", "7", "-o", "mixed.jsonl"],
            mix_script,
            tuple(f"{name}.jsonl" for name in SHARES),
            1,
            [("30x faster", times_faster(30)), ("a thirtieth of the memory", times_less_memory(30))],
            ("mixed.jsonl", "mixed_manifest.json", "script_mix.jsonl"),
            bytes_needed=8_500 * rows,
        ),
        Case(
            "profile",
            f"profile of {rows // REPEATS:,} tasks x {REPEATS}",
            "",
            [*ROLLBOOK, "profile", "all.jsonl", "-o", "profile.jsonl"],
            goals=[("under a minute", lambda ours, _: ours.seconds < 60)],
            makes=("profile.jsonl", "profile_manifest.json"),
        ),
    ]


def _mean_reward(printed: str) -> float:
    before, brace, rest = printed.partition("{")
    if before:
        print(f"stats --json printed more than JSON: {before[:60]!r}", file=sys.stderr)
    [reward] = json.loads(brace + rest)["fields"]
    return float(reward["mean"])


def make_inputs(directory: Path, rows: int) -> list[Path]:
    """The chunks, all of them in one file, and the three sources of the mix."""
    chunks = make_chunks(directory, rows, CHUNKS)
    parts = {"all": chunks}
    bounds = {"high_quality": (0, 60), "exploration": (60, 90), "hard": (90, 100)}
    parts |= {name: chunks[first:last] for name, (first, last) in bounds.items()}
    for name, of in parts.items():
        with (directory / f"{name}.jsonl").open("wb") as target:
            for chunk in of:
                with chunk.open("rb") as source:
                    shutil.copyfileobj(source, target, 1 << 20)
    return chunks


def run(case: Case, directory: Path, rounds: int) -> tuple[list[Measured], list[Measured]]:
    ours: list[Measured] = []
    theirs: list[Measured] = []
    can_run_theirs = case.theirs is not None and psutil.virtual_memory().available > case.bytes_needed * 1.1
    if case.theirs is not None and not can_run_theirs:
        print(
            f"{case.theirs_label}: left out, it would need {case.bytes_needed / 1e9:.0f} GB", file=sys.stderr
        )
    for turn in range(rounds * case.times):
        sides = [(ours, case.ours)] + ([(theirs, case.theirs)] if case.theirs and can_run_theirs else [])
        for results, command in sides if turn % 2 else reversed(sides):
            print(f"round {turn + 1} of {rounds * case.times}: {' '.join(command)[:80]}", file=sys.stderr)
            make_ready(directory, case.reads)
            results.append(measure(command, directory))
            for name in case.makes:
                (directory / name).unlink(missing_ok=True)
    if theirs and not case.same_answer(theirs[0].printed, ours[0].printed):
        raise SystemExit(
            f"{case.name}: the two sides disagree:\n{theirs[0].printed}\n{ours[0].printed[:2000]}"
        )
    return ours, theirs


def median(results: list[Measured]) -> Measured | None:
    if not results:
        return None
    seconds, cpu, peak = (
        statistics.median(getattr(result, name) for result in results)
        for name in ("seconds", "cpu_seconds", "peak_bytes")
    )
    return Measured(seconds, cpu, int(peak), "")


def quickest(results: list[Measured]) -> Measured | None:
    return min(results, key=lambda result: result.seconds, default=None)


def table_row(label: str, case: Case, ours: Measured | None, theirs: Measured | None) -> list[str]:
    assert ours is not None
    cells = [label, case.theirs_label]
    for side in (theirs, ours):
        cells += (
            [f"{side.seconds:.2f} s", f"{side.cpu_seconds:.2f} s", f"{side.peak_bytes / 1e6:,.0f} MB"]
            if side
            else [""] * 3
        )
    cells += (
        [f"{theirs.seconds / ours.seconds:.2f}x", f"{theirs.peak_bytes / ours.peak_bytes:.2f}x"]
        if theirs
        else [""] * 2
    )
    verdicts = {True: "met", False: "MISSED", None: "not measured"}
    return [*cells, "; ".join(f"{text}: {verdicts[meets(ours, theirs)]}" for text, meets in case.goals)]


def program_versions() -> dict[str, str]:
    found = {name: version(name) for name in ("rollbook", "duckdb", "numpy")}
    if jq := shutil.which("jq"):
        said = subprocess.run([jq, "--version"], capture_output=True, text=True, check=True).stdout.strip()
        found["jq"] = said.removeprefix("jq-")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Benchmarks of commands over a million rollouts.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a hundredth of the rows, one round, no record")
    parser.add_argument("--only", nargs="+", choices=["merge", "merge_durable", "mean", "mix", "profile"])
    parser.add_argument("--directory", type=Path, help="where the files go, which take 10 GB")
    arguments = parser.parse_args()
    rows, rounds = (QUICK_ROWS, 1) if arguments.quick else (FULL_ROWS, arguments.rounds)
    with tempfile.TemporaryDirectory(prefix="rollbook-bench-", dir=arguments.directory) as made:
        directory = Path(made)
        print(f"making {rows:,} rows", file=sys.stderr)
        chunks = make_inputs(directory, rows)
        lines = []
        for case in cases(directory, rows, chunks):
            if arguments.only and case.name not in arguments.only:
                continue
            measured = run(case, directory, rounds)
            if arguments.quick:
                case.goals.clear()  # they are about a million rows
            lines.append(table_row(case.label, case, *map(median, measured)))
            if case.times > 1:
                lines.append(table_row("its quickest round of each", case, *map(quickest, measured)))
            print("\n".join(" | ".join(line) for line in lines[-2:]), file=sys.stderr)
    header = ["what", "the other side", "time", "cpu", "memory", "rollbook: time", "cpu", "memory"]
    header += ["times faster", "times less memory", "goals"]
    load = f"load {os.getloadavg()[1]:.1f}"
    title = f"## Data (`bench/data.py`)\n\n{provenance(program_versions(), rounds)} · {load}"
    body = f"{title} · {rows:,} rows\n\n{markdown_table(header, lines)}"
    print(body)
    if not arguments.quick and not arguments.only:
        write_section("data", f"{body}\n\n{NOTES}")


NOTES = """\
Time and memory are of a whole process, from the kernel; *cpu* adds up its cores; memory under 20 MB is not
resolved. `merge` parses every line, compares all keys, takes a digest of every input and has the result on
the disk when it returns; `cat` copies into the page cache. *The script* (`bench/data_mix_script.py`) parses
every row of every source, samples with `random.sample` and shuffles in memory; it is unseeded, and takes
fewer rows without a word where a source is short. Where memory is in small pieces, the kernel takes up to six
times as long for the same writes, on either side: *its quickest round of each* leaves that out. *Load* is the
machine's average over the last five minutes: more than the number of cores means that others used it, and
then ratios count and seconds do not."""


if __name__ == "__main__":
    main()
