"""`rollbook status`: how the newest run stands, and what to type next.

Exit codes: 0 nothing is running, 3 a run is running, 4 the last run failed.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollbook.cli.common import ARTIFACTS, STYLES, Artifacts, AsJson, duration, local_time, number, print_json

if TYPE_CHECKING:
    from rollbook.runs.jobs.ledger import Ledger, RunRecord

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
IDLE, RUNNING, FAILED = 0, 3, 4
_BAD = ("failed", "lost")


@app.command()
def status(
    ref: Annotated[
        str, typer.Argument(help="the run: its id, the beginning of it, its name, or latest")
    ] = "latest",
    artifacts: Artifacts = ARTIFACTS,
    watch: Annotated[bool, typer.Option("--watch", help="show it again every second until it ends")] = False,
    as_json: AsJson = False,
) -> None:
    """Show how a run stands: step, ETA, loss, last checkpoint, and why it failed if it did."""
    from rollbook.runs.jobs.ledger import Ledger

    ledger = Ledger(artifacts)
    if ref == "latest" and not ledger.path.exists():
        print_json({"status": "idle"}) if as_json else print(
            f"no run yet in {artifacts}/; try: rollbook run NAME -- COMMAND"
        )
        return
    if watch and not as_json:
        _watch(ledger, ref)
    record = ledger.get(ref)
    report = _report(record, ledger)
    if as_json:
        print_json(report)
    else:
        print("\n".join(_lines(report)))
    sys.exit(_exit_code(record))


def _exit_code(record: RunRecord) -> int:
    if record.is_running:
        return RUNNING
    return FAILED if record.status in _BAD else IDLE


def _report(record: RunRecord, ledger: Ledger) -> dict[str, Any]:
    from rollbook.runs.jobs.finish import output_dir_of
    from rollbook.runs.standing import standing_of

    directory = output_dir_of(record, ledger)
    standing = standing_of(directory) if directory is not None and directory.is_dir() else None
    started = _timestamp(record.started_at)
    elapsed = record.duration_s
    if record.is_running and started is not None:
        elapsed = round(time.time() - started, 1)
    return {
        "id": record.id,
        "name": record.name,
        "kind": record.kind,
        "status": record.status,
        "stale": record.stale,
        "started_at": record.started_at,
        "elapsed_s": elapsed,
        "pid": record.pid,
        "host": record.host,
        "standing": standing,
        "output_dir": str(directory) if directory else None,
        "log": str(ledger.resolve(record.log)) if record.log else None,
        "exit_code": record.exit_code,
        "signal": record.signal,
        "reason": record.reason,
        "error": record.error,
        "checkpoint": record.checkpoint,
        "metrics": record.metrics,
        "next": _next(record),
    }


def _next(record: RunRecord) -> str:
    name = record.name or record.id
    if record.is_running:
        return f"rollbook logs -f {name}   or   rollbook stop {name}"
    if record.status == "completed":
        return f"rollbook history show {record.id}"
    if record.checkpoint:
        return f"rollbook logs {name}   or publish what it has: rollbook promote {record.id}"
    return f"rollbook logs -n 50 {name}"


def _lines(report: dict[str, Any]) -> list[str]:
    from rollbook.cli.output import printable

    lines = [f"{report['name'] or report['id']}: {_painted(report['status'])}  ({report['id']})"]
    when = f"started {local_time(report['started_at'])}, {duration(report['elapsed_s'])}"
    lines.append(f"  {when}, pid {report['pid']} on {report['host']}")
    lines += [f"  {line}" for line in _standing_lines(report["standing"])]
    why = report["reason"] or (report["error"] or {}).get("message")
    if why and report["status"] != "completed":
        lines.append(f"  why:        {printable(str(why))}")
    last = (report["error"] or {}).get("last_line")
    if last and last != why and report["status"] != "completed":
        lines.append(f"  last error: {printable(str(last))}")
    if report["log"]:
        lines.append(f"  log:        {report['log']}")
    lines.append(f"  next:       {report['next']}")
    return lines


def _standing_lines(standing: Any) -> list[str]:
    if standing is None or standing.source is None:
        return []
    lines = []
    if standing.step is not None:
        total = f" of {standing.total_steps}" if standing.total_steps else ""
        percent = f", {standing.percent:.1f} %" if standing.percent is not None else ""
        eta = f", {duration(standing.eta_s)} left" if standing.eta_s else ""
        lines.append(f"step:       {standing.step}{total}{percent}{eta}")
    if standing.headline:
        trend = f", {standing.trend}" if standing.trend else ""
        lines.append(f"{standing.headline + ':':<11} {number(standing.value)}{trend}")
    if standing.nonfinite:
        lines.append(f"NOT FINITE: {', '.join(standing.nonfinite)}")
    if checkpoint := standing.checkpoint:
        whole = "complete" if checkpoint.complete else f"NOT complete: {checkpoint.problem}"
        lines.append(f"checkpoint: {checkpoint.path} (step {checkpoint.step}, {whole})")
    if collection := standing.collection:
        lines.append(
            f"rollouts:   {collection.get('done')} done, {collection.get('failed')} failed, "
            f"{collection.get('missing')} missing, {number(collection.get('rate_per_s'))}/s"
        )
    return lines


def _painted(status: str) -> str:
    if not sys.stdout.isatty():
        return status
    codes = {"cyan": 36, "green": 32, "red": 31, "yellow": 33, "magenta": 35}
    return f"\x1b[{codes[STYLES.get(status, 'cyan')]}m{status}\x1b[0m"


def _watch(ledger: Ledger, ref: str) -> None:
    """Redraw every second while the run lives; the caller prints the last state."""
    record = ledger.get(ref)
    while record.is_running:
        lines = _lines(_report(record, ledger))
        if sys.stdout.isatty():
            print("\x1b[H\x1b[2J" + "\n".join(lines), flush=True)
        else:
            print("\n".join(lines), flush=True)
        time.sleep(1.0)
        record = ledger.get(record.id)


def _timestamp(text: str | None) -> float | None:
    from datetime import datetime

    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None
