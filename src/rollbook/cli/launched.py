"""A supervised job as a command shows it: attached until it ends, or detached with what to type next."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rollbook.cli.common import ARTIFACTS, print_json, why_failed

if TYPE_CHECKING:
    from rollbook.runs.jobs.job import Job


def run_job(job: Job, *, detach: bool, as_json: bool, on_stop: str = "") -> None:
    """Start it; `on_stop` says what `rollbook stop` does to it."""
    if detach:
        start_detached(job, as_json, on_stop=on_stop)
    else:
        run_attached(job, as_json)


def say_complete(text: str, name: str, directory: Path, artifacts: Path, config: Path, as_json: bool) -> None:
    """Nothing is left to train; the result is published once more, in case the config has lost it."""
    from rollbook.runs.jobs.finish import find_checkpoint, publish_again
    from rollbook.runs.jobs.ledger import Ledger

    ledger = Ledger(artifacts)
    record = next((one for one in reversed(ledger.records()) if one.name == name), None)
    lines, published = [text], None
    if record is not None and config.suffix in (".yaml", ".yml"):
        saved = find_checkpoint(directory, None)
        handoff = publish_again(ledger, record, config, saved)
        published = handoff.published
        where = f"{config}: checkpoint_path is {saved.path}"
        lines.append(where if published else f"{config} was left alone: {handoff.reason}")
    if as_json:
        print_json({"status": "completed", "reason": text, "published": published})
    else:
        print("\n".join(lines))


def start_detached(job: Job, as_json: bool, *, on_stop: str = "") -> None:
    from rollbook.runs.jobs.detach import supervise_detached

    started = supervise_detached(job)
    if as_json:
        print_json({"id": started.id, "log": started.log, "pid": started.pid, "status": "running"})
        return
    where = "" if job.artifacts == ARTIFACTS else f" --artifacts {shlex.quote(str(job.artifacts))}"
    which = f"{where} {shlex.quote(job.name)}"
    print(f"{started.id} is running (pid {started.pid})")
    print(f"follow it:  rollbook logs -f{which}")
    print(f"see it:     rollbook status{which}")
    print(f"end it:     rollbook stop{which}{f'   ({on_stop})' if on_stop else ''}")


def run_attached(job: Job, as_json: bool) -> NoReturn:
    """Exits as the job did. With --json its output goes to stderr, so that stdout holds the record alone."""
    from rollbook.cli.output import printable
    from rollbook.runs.jobs.outcome import exit_code_for
    from rollbook.runs.jobs.supervise import supervise

    end = supervise(job, terminal=2 if as_json else 1)
    if as_json:
        print_json(end)
        sys.exit(exit_code_for(end))
    if end.status != "completed":
        why = why_failed(end.reason, None, end.exit_code)  # the error itself has just been shown
        print(printable(f"rollbook: {job.name} {end.status}: {why}"), file=sys.stderr)
    if handoff := end.extra.get("handoff"):
        print(printable(f"rollbook: handoff: {handoff}"), file=sys.stderr)
    sys.exit(exit_code_for(end))
