"""A million rows: how soon the first request leaves, whether memory stays flat, how fast a resume is.

The input is read for the first time, or 1,000,000 of its rows are done already, in lines of 2 KB. Times count
from the start of the process to the moment the first request reaches the server. Files are in the page cache,
as after writing them.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import orjson
import psutil
from collect_measure import (
    Measured,
    Server,
    collect_command,
    count_lines,
    instant_server,
    measure,
    write_input,
)
from report import markdown_table

ROWS = 1_000_000
LEFT_OVER = 1_000  # rows that a resume finds undone
LINE_BYTES = 2_048
STARTS = 7
_SAMPLE_EVERY_S = 0.1


@dataclass
class Sample:
    done: int
    resident: int


def kill_when_output_grows(output: Path) -> Callable[[subprocess.Popen[bytes]], None]:
    """The first answer is in the file, so the first request has been made: enough."""
    size = output.stat().st_size if output.exists() else 0

    def watch(process: subprocess.Popen[bytes]) -> None:
        while (output.stat().st_size if output.exists() else 0) <= size:
            if process.poll() is not None:
                raise SystemExit(f"the collector ended with {process.returncode} before its first request")
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)

    return watch


def sample_memory(directory: Path, samples: list[Sample]) -> Callable[[subprocess.Popen[bytes]], None]:
    """Resident memory against rollouts done, until all are."""
    progress = directory / "out_progress.json"

    def watch(process: subprocess.Popen[bytes]) -> None:
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(_SAMPLE_EVERY_S)
            if progress.exists():
                standing = orjson.loads(progress.read_bytes())
                samples.append(Sample(standing["done"], psutil.Process(process.pid).memory_info().rss))

    return watch


def first_requests(server: Server, rows: Path, directory: Path) -> list[Measured]:
    """Fresh starts, each ended after its first answer."""
    found = []
    for _ in range(STARTS):
        for path in directory.glob("out*"):
            path.unlink()
        command = collect_command(server, rows, directory)
        watch = kill_when_output_grows(directory / "out.jsonl")
        found.append(measure(command, server, directory, watch=watch, may_be_killed=True))
    return found


def whole(server: Server, rows: Path, directory: Path) -> tuple[Measured, list[Sample]]:
    for path in directory.glob("out*"):
        path.unlink()
    samples: list[Sample] = []
    command = collect_command(server, rows, directory)
    measured = measure(command, server, directory, watch=sample_memory(directory, samples))
    if count_lines(directory / "out.jsonl") != count_lines(rows):
        raise SystemExit("the output has another number of lines than the input")
    return measured, samples


def write_done_rows(server: Server, rows: Path, directory: Path, count: int) -> None:
    """The output of a collection that did the first `count` rows."""
    for path in directory.glob("out*"):
        path.unlink()
    measure(collect_command(server, rows, directory, "limit=1"), server, directory)  # manifest, a real line
    output = directory / "out.jsonl"
    line = output.read_bytes().rstrip()
    padding = b',"padding":"' + b"." * (LINE_BYTES - len(line) - len(b',"padding":""') - 1) + b'"}\n'
    template = line[:-1] + padding
    with output.open("wb", buffering=1 << 20) as file:
        for number in range(count):
            file.write(template.replace(b"sum-0000000", b"sum-%07d" % number))


def resumes(server: Server, rows: Path, directory: Path) -> list[Measured]:
    """Resumes of the same state, each ended after its first answer."""
    output = directory / "out.jsonl"
    size = output.stat().st_size
    found = []
    for _ in range(STARTS):
        os.truncate(output, size)
        command = collect_command(server, rows, directory)
        watch = kill_when_output_grows(output)
        found.append(measure(command, server, directory, watch=watch, may_be_killed=True))
    os.truncate(output, size)
    return found


def start_row(what: str, found: list[Measured], within_s: float, below_mb: float) -> list[str]:
    """Time and memory of a start, against its goal."""
    seconds = statistics.median(one.first_request_s for one in found)
    peak = max(one.peak_bytes for one in found) / 1e6
    verdict = "met" if seconds < within_s and peak < below_mb else "MISSED"
    goal = f"< {within_s:g} s, < {below_mb:g} MB: {verdict}"
    return [what, f"{seconds:.2f} s to the first request", f"{peak:.0f} MB", goal]


def whole_row(count: int, measured: Measured, samples: list[Sample], below_mb: float) -> list[str]:
    running = [sample for sample in samples if sample.done > 0] or samples
    at = [
        next((one for one in running if one.done >= share * count), running[-1]).resident / 1e6
        for share in (0.1, 0.5, 0.99)
    ]
    peak = measured.peak_bytes / 1e6
    is_flat = max(at) - min(at) < 0.1 * max(at)
    shown = ", ".join(f"{value:.0f}" for value in at)
    verdict = "met" if peak < below_mb and is_flat else "MISSED"
    return [
        f"{count:,} rows collected and checked, {measured.seconds:.0f} s, {measured.steady_rate:,.0f}/s",
        f"{shown} MB at 10, 50 and 99 %",
        f"{peak:.0f} MB",
        f"flat, < {below_mb:g} MB: {verdict}",
    ]


def million_section(scale: float, origin: str) -> str:
    count, left = round(ROWS * scale), round(LEFT_OVER * scale)
    with tempfile.TemporaryDirectory(prefix="rollbook-bench-") as name, instant_server() as server:
        directory = Path(name)
        rows = write_input(directory / "in.jsonl", count)
        table = [start_row(f"{count:,} new rows", first_requests(server, rows, directory), 3, 250)]
        table.append(whole_row(count, *whole(server, rows, directory), 250))
        longer = write_input(directory / "longer.jsonl", count + left)
        write_done_rows(server, longer, directory, count)
        found = resumes(server, longer, directory)
        table.append(start_row(f"resume, {count:,} rows of 2 KB done", found, 5, 300))
        end = measure(collect_command(server, longer, directory), server, directory)
        if end.requests != left or count_lines(directory / "out.jsonl") != count + left:
            raise SystemExit(f"the resume made {end.requests} requests for {left} rows")
        table.append(
            [
                "the same to its end, output of 2 GB checked",
                f"{end.seconds:.1f} s",
                f"{end.peak_bytes / 1e6:.0f} MB",
                "",
            ]
        )
    header = ["a million rows, one process, 128 in flight", "", "peak memory", "goal"]
    return (
        f"## A million rows (`bench/collect.py --million`)\n\n{origin}\n\n{markdown_table(header, table)}\n\n"
        f"Starts are medians of {STARTS}, counted from the start of the process until its first request "
        "reaches the server; files are in the page cache."
    )
