"""Side by side in one run: collectors and clients against a local server that answers at once.

    python bench/collect.py [--rounds 3] [--quick]     how fast
    python bench/collect.py --million                  how it bears a million rows
    python bench/collect.py --errors                   what a server's errors cost

Every measurement is a fresh process; the sides take turns, in the opposite order every second round, and the
table shows medians. `steady` is rollouts a second from the first request to the last, by the server's clock,
without those still in flight then; `whole` counts from the start of the process to its end, imports,
planning, the last fsync and the final check of the output included. Processor time and peak memory are the
kernel's, of the whole process.

What each side does: `bare` parses the answer and forgets it (`collect_bare.py`); `openai` too, by the client
library; `verifiers` grades and appends traces to a file that it does not sync; Rollbook plans, grades, keeps
every rollout durably and exactly once, and checks the finished file against the plan. Two sides stand before
an agent server that answers `/run` at once with a graded response: NeMo Gym's collector (`collect_gym.py`),
which appends it to a file that it does not sync, and Rollbook by its bridge, which keeps it as ever.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from collect_errors import errors_section
from collect_measure import (
    HERE,
    Measured,
    Server,
    collect_command,
    count_lines,
    instant_server,
    measure,
    write_input,
)
from collect_million import million_section
from report import markdown_table, provenance, write_section
from setup_collectors import COLLECTORS
from setup_collectors import GYM as GYM_ENVIRONMENT

IN_FLIGHT = (64, 256)
GYM, BRIDGE = "NeMo Gym's collector", "rollbook, bridge"
Case = tuple[str, int]  # side, in flight


@dataclass(frozen=True)
class Side:
    name: str
    rollouts: int  # fewer for the slow ones, enough that the start does not matter to `steady`
    command: Callable[[Server, Path, Path, int], list[str | Path]]
    keeps: bool = False  # a line for each in out.jsonl


def script(python: str | Path, name: str) -> Callable[[Server, Path, Path, int], list[str | Path]]:
    return lambda server, rows, _, in_flight: [python, HERE / name, server.url, rows, str(in_flight)]


def rollbook(*words: str, agent: str = "bench") -> Callable[[Server, Path, Path, int], list[str | Path]]:
    return lambda server, rows, directory, in_flight: collect_command(
        server, rows, directory, f"num_samples_in_parallel={in_flight}", *words, agent=agent
    )


SIDES = (
    Side("bare aiohttp", 40_000, script(sys.executable, "collect_bare.py")),
    Side("openai", 3_000, script(COLLECTORS.python, "collect_openai.py")),
    Side("verifiers", 2_000, script(COLLECTORS.python, "collect_verifiers.py")),
    Side(GYM, 10_000, script(GYM_ENVIRONMENT.python, "collect_gym.py"), keeps=True),
    Side(BRIDGE, 40_000, rollbook(agent="bridge"), keeps=True),
    Side("rollbook", 40_000, rollbook(), keeps=True),
    Side("rollbook, 2 workers", 40_000, rollbook("workers=2"), keeps=True),
)


def run_once(side: Side, in_flight: int, server: Server, rollouts: int) -> Measured:
    with tempfile.TemporaryDirectory(prefix="rollbook-bench-") as name:
        directory = Path(name)
        rows = write_input(directory / "in.jsonl", rollouts)
        command = side.command(server, rows, directory, in_flight)
        measured = measure(command, server, directory, in_flight=in_flight)
        kept = count_lines(directory / "out.jsonl") if side.keeps else rollouts
    if measured.requests != rollouts or kept != rollouts:
        raise SystemExit(f"{side.name}: {measured.requests} requests, {kept} lines for {rollouts} rollouts")
    return measured


def run_rounds(rounds: int, scale: float) -> dict[Case, list[Measured]]:
    results: dict[Case, list[Measured]] = defaultdict(list)
    jobs = [(side, in_flight) for in_flight in IN_FLIGHT for side in SIDES]
    with instant_server() as server:
        for turn in range(rounds):
            for side, in_flight in jobs if turn % 2 == 0 else reversed(jobs):
                measured = run_once(side, in_flight, server, max(1_000, round(side.rollouts * scale)))
                results[side.name, in_flight].append(measured)
                print(
                    f"round {turn + 1} of {rounds}: {side.name}, {in_flight} in flight: "
                    f"{measured.steady_rate:,.0f}/s, {_cpu_ms(measured):.3f} ms",
                    file=sys.stderr,
                )
    return results


def _cpu_ms(measured: Measured) -> float:
    return measured.cpu_seconds / measured.requests * 1000


def median(results: list[Measured], value: Callable[[Measured], float]) -> float:
    return statistics.median(map(value, results))


def _steady(measured: Measured) -> float:
    return measured.steady_rate


def speed_table(results: dict[Case, list[Measured]], rollouts: dict[str, int]) -> str:
    rows = []
    for (name, in_flight), measured in results.items():
        ratios = [
            median(measured, _steady) / median(results[other, in_flight], _steady)
            for other in ("bare aiohttp", "verifiers")
        ]
        rows.append(
            [
                f"{name}, {in_flight} in flight",
                f"{rollouts[name]:,}",
                f"{median(measured, _steady):,.0f}",
                f"{median(measured, lambda one: one.whole_rate):,.0f}",
                f"{median(measured, _cpu_ms):.3f}",
                f"{median(measured, lambda one: one.peak_bytes) / 1e6:.0f} MB",
                f"{ratios[0]:.0%}",
                f"{ratios[1]:.1f}x",
            ]
        )
    header = ["side", "rollouts", "steady/s", "whole/s", "CPU ms", "peak memory", "of bare", "of verifiers"]
    return markdown_table(header, sorted(rows, key=lambda row: "256" in row[0]))


def goals_table(results: dict[Case, list[Measured]]) -> str:
    rows = []
    for in_flight in IN_FLIGHT:
        for what, side, times, other in (
            ("40 % of the bare loop", "rollbook", 0.4, "bare aiohttp"),
            ("30x verifiers", "rollbook", 30, "verifiers"),
            ("ahead of NeMo Gym's collector alone", "rollbook", 1, GYM),
            ("the same, both before an agent server", BRIDGE, 1, GYM),
        ):
            rate = median(results[side, in_flight], _steady)
            goal = times * median(results[other, in_flight], _steady)
            verdict = "met" if rate > goal else "MISSED"
            rows.append([f"{what}, {in_flight} in flight", f"{goal:,.0f}/s", f"{rate:,.0f}/s", verdict])
    return markdown_table(["goal for one process", "wanted", "measured", ""], rows)


def versions() -> dict[str, str]:
    found = {name: version(name) for name in ("rollbook", "aiohttp", "uvloop")}
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    for python, peers in (
        (COLLECTORS.python, ("openai", "verifiers")),
        (GYM_ENVIRONMENT.python, ("nemo-gym",)),
    ):
        printed = subprocess.check_output([python, "-c", code, *peers], text=True).split()
        found |= dict(zip(peers, printed, strict=True))
    return found


def speed_section(rounds: int, scale: float) -> str:
    results = run_rounds(rounds, scale)
    rollouts = {name: measured[0].requests for (name, _), measured in results.items()}
    return (
        f"## Collection (`bench/collect.py`)\n\n{provenance(versions(), rounds)}\n\n"
        f"{speed_table(results, rollouts)}\n\n{goals_table(results)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Collection beside other clients and collectors.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one small round, to try it out; writes nothing")
    parser.add_argument("--million", action="store_true", help="a million rows instead of the comparison")
    parser.add_argument(
        "--errors", action="store_true", help="a server with errors instead of the comparison"
    )
    arguments = parser.parse_args()
    scale = 0.05 if arguments.quick else 1.0
    if arguments.million:
        origin = provenance({"rollbook": version("rollbook")}, 1)
        name, body = "collect-million", million_section(scale, origin)
    elif arguments.errors:
        rounds = 1 if arguments.quick else arguments.rounds
        origin = provenance({"rollbook": version("rollbook")}, rounds)
        name, body = "collect-errors", errors_section(rounds, scale, origin)
    else:
        if not (COLLECTORS.is_ready() and GYM_ENVIRONMENT.is_ready()):
            raise SystemExit("the peers are not installed: run `python bench/setup_collectors.py`")
        rounds = 1 if arguments.quick else arguments.rounds
        name, body = "collect", f"{speed_section(rounds, scale)}\n\n{NOTES}"
    print(body)
    if not arguments.quick:
        write_section(name, body)


NOTES = """\
`bare aiohttp` (on uvloop) and `openai` parse each answer and forget it. `verifiers` is its evaluator in one
process with a harness that makes its call in that process too (those it ships start a program a rollout);
it grades and appends traces to a file, without syncing it. *NeMo Gym's collector* is its own command, on the
same Python as the others (it asks for a newer one), before an agent server that answers `/run` at once with a
graded response; it appends that to a file, without syncing it; its metrics, an agent server's work, are off.
*rollbook, bridge* stands before the same server. The other sides of Rollbook: environment `arithmetic` with
its reward. All of Rollbook's: every line on the disk before it counts, exactly once, the finished file
checked against the plan.
*steady*: from the first request to the last, without those still in flight then; *whole*: from the start of
the process to its end. *CPU ms*: user and system time a rollout, start included, of all its processes. *Peak
memory*: of the largest process."""


if __name__ == "__main__":
    main()
