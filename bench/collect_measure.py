"""Measures a client from outside: a process of its own against the instant server, its wall time, processor
time and peak memory from the kernel, the requests from the server's clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROLLBOOK = [sys.executable, "-c", "from rollbook.cli.main import main; main()", "collect", "--json"]
# They name the server, so the config is written anew for each.
_CONFIG = """\
agents:
  bench:
    env: {{name: arithmetic}}
    policy: {{kind: openai, base_url: {url}, model: instant}}
  bridge:
    env: {{name: gym, url: {agent_url}}}
"""


@dataclass(frozen=True)
class Server:
    url: str

    @property
    def agent_url(self) -> str:
        """Where it answers `/run` like an agent server of NeMo Gym."""
        return self.url.removesuffix("/v1")

    def take_stats(self) -> dict[str, float]:
        with urllib.request.urlopen(self.url + "/stats") as response:
            stats: dict[str, float] = json.load(response)
        return stats


@contextlib.contextmanager
def instant_server(*words: str) -> Iterator[Server]:
    """`words` are for a server that is not: see there."""
    process = subprocess.Popen(
        [sys.executable, HERE / "collect_server.py", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Server(f"http://127.0.0.1:{int(process.stdout.readline())}/v1")
    finally:
        process.stdin.close()
        process.wait()


@dataclass
class Measured:
    """One process, from its start to its end."""

    seconds: float  # wall
    cpu_seconds: float  # user and system, of its child processes too
    peak_bytes: int  # resident, of the largest process
    requests: int
    refused: int  # of the requests
    first_request_s: float  # after the start
    requests_s: float  # from the first request to the last
    in_flight: int

    @property
    def steady_rate(self) -> float:
        """When the last request arrives, as many as may be in flight are not done yet."""
        return (self.requests - self.in_flight) / self.requests_s

    @property
    def whole_rate(self) -> float:
        return self.requests / self.seconds


Watcher = Callable[[subprocess.Popen[bytes]], None]


def measure(
    command: Sequence[str | Path],
    server: Server,
    directory: Path,
    *,
    in_flight: int = 128,
    watch: Watcher = lambda _: None,
    may_be_killed: bool = False,
) -> Measured:
    """Run a command to its end; `watch` may look on meanwhile, or end it."""
    server.take_stats()
    with (directory / "stderr.txt").open("wb") as errors:
        started = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, cwd=directory)
        watch(process)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0 and not may_be_killed:
        raise SystemExit(f"{command} failed:\n{(directory / 'stderr.txt').read_text()[-3000:]}")
    stats = server.take_stats()
    return Measured(
        seconds=seconds,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        peak_bytes=usage.ru_maxrss * 1024,
        requests=int(stats["count"]),
        refused=int(stats["refused"]),
        first_request_s=stats["first"] - started,
        requests_s=stats["last"] - stats["first"],
        in_flight=in_flight,
    )


def write_input(path: Path, rows: int, *, first: int = 0) -> Path:
    """Sums, one a line; the server's answer is right for some and wrong for most."""
    with path.open("w") as file:
        for number in range(first, first + rows):
            question = f"What is {number % 97} + {number % 89}? Answer with the number only."
            file.write(
                f'{{"id": "sum-{number:07d}", "responses_create_params": {{"input": [{{"role": "user", '
                f'"content": "{question}"}}]}}, "expected_answer": "{number % 97 + number % 89}"}}\n'
            )
    return path


def collect_command(
    server: Server, rows: Path, directory: Path, *words: str, agent: str = "bench"
) -> list[str | Path]:
    """`rollbook collect` of an input into out.jsonl of a directory."""
    config = directory / "rollbook.yaml"
    config.write_text(_CONFIG.format(url=server.url, agent_url=server.agent_url))
    return [
        *ROLLBOOK,
        f"--config={config}",
        f"agent_name={agent}",
        f"input_jsonl_fpath={rows}",
        f"output_jsonl_fpath={directory / 'out.jsonl'}",
        *words,
    ]


def count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
