"""`rollbook status`: the state of the newest run, and what to type next.

Exit codes: 0 nothing is running, 3 a run is running, 4 the last run failed.
"""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from rollbook.cli.common import (
    ARTIFACTS,
    STYLES,
    Artifacts,
    AsJson,
    duration,
    local_time,
    open_ledger,
    print_json,
    why_failed,
)
from rollbook.records.numbers import mean_text
from rollbook.records.plain import unix_time

if TYPE_CHECKING:
    from rollbook.runs.jobs.ledger import Ledger, RunRecord
    from rollbook.runs.status import RunStatus

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
IDLE, RUNNING, FAILED = 0, 3, 4
LATEST = "latest"
_BAD = ("failed", "lost")


@app.command()
def status(
    ref: Annotated[
        str,
        typer.Argument(
            help="the run: its id, the beginning of it, its name, or latest; or the output of a collection"
        ),
    ] = "latest",
    artifacts: Artifacts = ARTIFACTS,
    watch: Annotated[bool, typer.Option("--watch", help="show it again every second until it ends")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the state of a run: step, ETA, loss, last checkpoint, and why it failed if it did."""
    from rollbook.cli.collection_status import progress_of_output

    if (progress := progress_of_output(ref)) is not None:
        _show_output(progress, watch, as_json)
    ledger = open_ledger(artifacts)
    if ref == LATEST and not ledger.path.exists():
        if as_json:
            print_json({"status": "idle"})
        else:
            print(f"no run yet in {artifacts}/; try: rollbook run NAME -- COMMAND")
        return
    record, others = _chosen(ledger, ref)
    if watch and not as_json:
        _watch(ledger, record)
        record = ledger.get(record.id)
    report = _report(record, ledger, artifacts)
    report["also_running"] = others
    if as_json:
        print_json(report)
    else:
        print("\n".join(_lines(report)))
    sys.exit(RUNNING if others and ref == LATEST else _exit_code(record.status))


def _chosen(ledger: Ledger, ref: str) -> tuple[RunRecord, list[str]]:
    """The run to show, without a name the newest that runs, and the ids of the others that run."""
    running = [record for record in ledger.records() if record.is_running]
    record = running[-1] if ref == LATEST and running else ledger.get(ref)
    return record, [other.id for other in running if other.id != record.id]


def _show_output(progress: Path, watch: bool, as_json: bool) -> NoReturn:
    """A collection by its output's path, without the history."""
    from rollbook.cli.collection_status import report_of_output

    report = report_of_output(progress)
    while watch and not as_json and report["status"] == "running":
        _draw(report)
        report = report_of_output(progress)
    if as_json:
        print_json(report)
    else:
        print("\n".join(_lines(report)))
    sys.exit(_exit_code(report["status"]))


def _exit_code(status: str) -> int:
    if status == "running":
        return RUNNING
    return FAILED if status in _BAD else IDLE


def _report(record: RunRecord, ledger: Ledger, artifacts: Path) -> dict[str, Any]:
    from rollbook.cli.collection_status import status_of_run
    from rollbook.runs.jobs.collected import progress_file_of
    from rollbook.runs.jobs.finish import output_dir_of
    from rollbook.runs.status import read_status

    directory = output_dir_of(record, ledger)
    if (progress := progress_file_of(record, ledger)) is not None:
        state: RunStatus | None = status_of_run(record, ledger, progress)
    else:
        state = read_status(directory) if directory is not None and directory.is_dir() else None
    if state is not None and not record.is_running:
        state.eta_s = None
    started, ended = unix_time(record.started_at), unix_time(record.completed_at)
    elapsed = record.duration_s
    if elapsed is None and started is not None:
        elapsed = round((time.time() if record.is_running else ended or started) - started, 1)
        if not record.is_running and ended is None and state is not None and state.collection:
            elapsed = state.collection.elapsed_s or elapsed
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
        "progress": state,
        "output_dir": str(directory) if directory else None,
        "log": str(ledger.resolve(record.log)) if record.log else None,
        "exit_code": record.exit_code,
        "signal": record.signal,
        "reason": record.reason,
        "error": record.error,
        "checkpoint": record.checkpoint,
        "metrics": record.metrics,
        "handoff": record.extra.get("handoff"),
        "next": _next(record, state, artifacts, directory),
    }


def _next(record: RunRecord, state: RunStatus | None, artifacts: Path, directory: Path | None) -> str:
    flag = "" if artifacts == ARTIFACTS else f" --artifacts {shlex.quote(str(artifacts))}"
    if record.is_running and not record.log:
        return f"rollbook status --watch{flag} {record.id}   or   rollbook stop{flag} {record.id}"
    if record.is_running:
        return f"rollbook logs -f{flag} {record.id}   or   rollbook stop{flag} {record.id}"
    if record.status == "completed":
        return f"rollbook history show{flag} {record.id}"
    from rollbook.cli.collection_status import resume_command

    if again := resume_command(record) or _resumed_training(record, directory):
        logs = f"rollbook logs{flag} -n 50 {record.id}   or   " if record.log else ""
        return f"{logs}to resume: {again}"
    saved = state.checkpoint if state else None
    if record.checkpoint or (saved is not None and saved.complete):
        return f"rollbook logs{flag} {record.id}   or publish what it has: rollbook promote{flag} {record.id}"
    return f"rollbook logs{flag} -n 50 {record.id}"


def _resumed_training(record: RunRecord, directory: Path | None) -> str | None:
    """What to type to go on with a run of `sft` or `rl`: what was typed, with --resume."""
    from rollbook.errors import RollbookError
    from rollbook.records.layout import RunFiles
    from rollbook.records.run_info import read_run_info

    if record.kind not in ("sft", "rl") or directory is None:
        return None
    try:
        typed = read_run_info(RunFiles(directory).run).command or []
    except (OSError, RollbookError):
        return None
    if typed[:2] != ["rollbook", record.kind]:
        return None
    others = [word for word in typed if word not in ("--resume", "--overwrite", "--detach", "--json")]
    return shlex.join([*others, "--resume"])


def _lines(report: dict[str, Any]) -> list[str]:
    from rollbook.cli.output import printable

    known = f"  ({report['id']})" if report.get("id") else ""
    name = printable(str(report["name"] or report["id"]))
    lines = [f"{name}: {_painted(report['status'])}{known}"]
    when = f"started {local_time(report['started_at'])}, {duration(report['elapsed_s'])}"
    lines.append(f"  {when}, pid {report['pid']} on {report['host']}")
    lines += [f"  {line}" for line in _state_lines(report["progress"])]
    why = why_failed(report["reason"], report.get("error"), report.get("exit_code"))
    if why and report["status"] != "completed":
        lines.append(f"  why:        {printable(str(why))}")
    last = (report.get("error") or {}).get("last_line")
    if last and last != why and report["status"] != "completed":
        lines.append(f"  last error: {printable(str(last))}")
    if report.get("log"):
        lines.append(f"  log:        {report['log']}")
    if report.get("handoff"):
        lines.append(f"  handoff:    {printable(str(report['handoff']))}")
    if report.get("also_running"):
        lines.append(f"  also running: {', '.join(report['also_running'])}")
    if report["next"]:
        lines.append(f"  next:       {printable(report['next'])}")
    return lines


def _state_lines(state: Any) -> list[str]:
    if state is None:
        return []
    if state.collection:
        from rollbook.cli.output import printable
        from rollbook.cli.progress_lines import progress_lines

        return [printable(line) for line in progress_lines(state.collection)]
    lines = []
    if state.step is not None:
        total = f" of {state.total_steps}" if state.total_steps else ""
        percent = f", {state.percent:.1f} %" if state.percent is not None else ""
        eta = f", {duration(state.eta_s)} left" if state.eta_s else ""
        lines.append(f"step:       {state.step}{total}{percent}{eta}")
    if state.headline:
        trend = f", {state.trend}" if state.trend else ""
        lines.append(f"{state.headline + ':':<11} {mean_text(state.value, state.std_error)}{trend}")
    if state.nonfinite:
        lines.append(f"NOT FINITE: {', '.join(state.nonfinite)} at the last step")
    if checkpoint := state.checkpoint:
        whole = "complete" if checkpoint.complete else f"NOT complete: {checkpoint.problem}"
        lines.append(f"checkpoint: {checkpoint.path} (step {checkpoint.step}, {whole})")
    return lines


def _painted(status: str) -> str:
    if not sys.stdout.isatty():
        return status
    codes = {"cyan": 36, "green": 32, "red": 31, "yellow": 33, "magenta": 35}
    return f"\x1b[{codes[STYLES.get(status, 'cyan')]}m{status}\x1b[0m"


def _watch(ledger: Ledger, record: RunRecord) -> None:
    """Redraw every second while the run lives; the caller prints the last state."""
    while record.is_running:
        _draw(_report(record, ledger, ledger.artifacts))
        record = ledger.get(record.id)


def _draw(report: dict[str, Any]) -> None:
    print(("\x1b[H\x1b[2J" if sys.stdout.isatty() else "") + "\n".join(_lines(report)), flush=True)
    time.sleep(1.0)
