"""A server that fails at random, and one that takes fewer at a time than the collection has in flight.

The same collection before four servers of the same latency: one without fault, two that answer 1 % and 3 % of
the requests with 429, 500 or 503, and one that answers 429 at once to whatever is more than 50 at a time. The
sides take turns. A rate is of rollouts, from the first request to the last, retries included.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from collect_measure import Measured, collect_command, count_lines, instant_server, measure, write_input
from report import markdown_table

IN_FLIGHT, LATENCY_S, ROLLOUTS = 64, 0.05, 10_000
ROOM = 50
MOST_REFUSED = 0.05  # of the requests to the overloaded server


@dataclass(frozen=True)
class Side:
    name: str
    errors: float = 0.0
    room: int = sys.maxsize
    goal: float = 0.0  # of the rate before the server without fault

    def run(self, rollouts: int) -> Measured:
        with (
            instant_server(str(LATENCY_S), str(self.errors), str(self.room)) as server,
            tempfile.TemporaryDirectory(prefix="rollbook-bench-") as name,
        ):
            directory = Path(name)
            rows = write_input(directory / "in.jsonl", rollouts)
            words = (f"num_samples_in_parallel={IN_FLIGHT}",)
            command = collect_command(server, rows, directory, *words)
            measured = measure(command, server, directory, in_flight=IN_FLIGHT)
            kept = count_lines(directory / "out.jsonl")
        if kept != rollouts or measured.requests - measured.refused != rollouts:
            raise SystemExit(
                f"{self.name}: {measured.requests} requests, {kept} lines for {rollouts} rollouts"
            )
        return measured


SIDES = (
    Side("no errors"),
    Side("1 % errors", errors=0.01, goal=0.85),
    Side("3 % errors", errors=0.03, goal=0.7),
    Side(f"429 above {ROOM} at a time", room=ROOM, goal=0.8 * ROOM / IN_FLIGHT),
)


def errors_section(rounds: int, scale: float, origin: str) -> str:
    results: dict[Side, list[Measured]] = defaultdict(list)
    rollouts = max(1_000, round(ROLLOUTS * scale))
    for turn in range(rounds):
        for side in SIDES if turn % 2 == 0 else reversed(SIDES):
            measured = side.run(rollouts)
            results[side].append(measured)
            print(
                f"round {turn + 1} of {rounds}: {side.name}: {rollouts / measured.requests_s:,.0f}/s",
                file=sys.stderr,
            )
    rates = {side: statistics.median(rollouts / one.requests_s for one in results[side]) for side in SIDES}
    rows = [_row(side, rates[side], rates[SIDES[0]], results[side]) for side in SIDES]
    header = ["server", "rollouts/s", "of no errors", "refused", "goals"]
    return (
        f"## Collection from a server with errors (`bench/collect.py --errors`)\n\n{origin}\n\n"
        f"{markdown_table(header, rows)}\n\n"
        f"{rollouts:,} rollouts each, {IN_FLIGHT} in flight, answers after {LATENCY_S * 1000:.0f} ms. "
        f"*refused*: of all requests. The last server takes {ROOM} of {IN_FLIGHT} at a time: "
        f"{ROOM / IN_FLIGHT:.0%}."
    )


def _row(side: Side, rate: float, without: float, measured: list[Measured]) -> list[str]:
    refused = statistics.median(one.refused / one.requests for one in measured)
    goals = []
    if side.goal:
        goals.append(f"at least {side.goal:.0%}: {_verdict(rate >= side.goal * without)}")
    if side.room == ROOM:
        goals.append(f"under {MOST_REFUSED:.0%} refused: {_verdict(refused < MOST_REFUSED)}")
    return [side.name, f"{rate:,.0f}", f"{rate / without:.0%}", f"{refused:.1%}", "; ".join(goals)]


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"
