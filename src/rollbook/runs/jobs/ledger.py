"""The history of every run: what was started, how it ended, and what came of it.

A run is two events in `artifacts/index.yaml`, `started` before its process runs and `ended` after, folded by
id; `updated` and `note` events may follow. Whoever reads the history first closes the runs whose process is
gone without a word (kill -9, power cut) as `lost`, with the reason, so no run stays `running` for ever and
none is ever recorded as completed because nobody was left to say otherwise. Runs of other hosts are never
judged from here; one whose log has stopped moving is shown as `stale`.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import psutil

from rollbook.errors import BadFileError, LockedError, UsageError, WriteError
from rollbook.records.identity import new_history_id
from rollbook.records.layout import INDEX_YAML
from rollbook.records.plain import utc_now
from rollbook.records.record import Record
from rollbook.runs.jobs import signs_of_life
from rollbook.runs.jobs.index_file import Event, IndexFile, zulu
from rollbook.runs.jobs.processes import (
    ProcessIdentity,
    boot_id,
    identify,
    is_visible,
    why_gone,
)

LATEST = "latest"
_STALE_AFTER_S = 600
_MERGED = ("metrics", "checkpoint", "tracker")  # an update adds to these instead of replacing them
_PLACE = ("output_dir", "output")  # what two runs have in common that write the same files
_FREE_TEXT = ("command", "error", "reason", "note", "notes")  # where a secret could stand


class Status(StrEnum):
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    LOST = "lost"


class RunStart(Record, kw_only=True):
    """What is known when a run begins. `Ledger.start` fills in the id, the time, the host and the process."""

    name: str
    kind: str
    id: str | None = None
    started_at: str | None = None
    command: list[str] | None = None
    host: str | None = None
    user: str | None = None
    pid: int | None = None  # of the supervisor
    process: ProcessIdentity | None = None
    git: dict[str, Any] | None = None  # sha, dirty, branch
    output_dir: str | None = None
    log: str | None = None
    archive: str | None = None
    config: str | None = None
    resumed_from: str | None = None


class RunEnd(Record, kw_only=True):
    """How a run ended. `exit_code` is 128+n for a process that died of signal n, as in a shell."""

    status: Status
    id: str | None = None
    completed_at: str | None = None
    duration_s: float | None = None
    exit_code: int | None = None
    signal: str | None = None
    oom: bool | None = None
    reason: str | None = None
    error: dict[str, Any] | None = None  # type, message, last_line
    checkpoint: dict[str, Any] | None = None  # path, step
    metrics: dict[str, Any] | None = None
    tracker: dict[str, Any] | None = None


class Note(msgspec.Struct):
    text: str
    at: str | None = None


class RunRecord(Record, kw_only=True):
    """A run as folded from its events. Paths are relative to the directory that holds `artifacts/`."""

    id: str
    status: str = "unknown"  # a Status, or whatever another program wrote
    name: str | None = None
    kind: str | None = None
    started_at: str | None = None
    completed_at: str | None = None
    duration_s: float | None = None
    exit_code: int | None = None
    signal: str | None = None
    oom: bool | None = None
    reason: str | None = None
    error: dict[str, Any] | None = None
    host: str | None = None
    user: str | None = None
    pid: int | None = None
    process: ProcessIdentity | None = None
    git: dict[str, Any] | None = None
    command: list[str] | None = None
    output_dir: str | None = None
    log: str | None = None
    archive: str | None = None
    config: str | None = None
    resumed_from: str | None = None
    checkpoint: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    tracker: dict[str, Any] | None = None
    notes: list[Note] = []
    stale: bool | None = None  # a view: running on another host, and its log has not moved for a while

    @property
    def is_running(self) -> bool:
        return self.status == Status.RUNNING


class Ledger:
    def __init__(self, artifacts: Path | str, *, lock_timeout_s: float = 30.0) -> None:
        self.artifacts = Path(artifacts).expanduser().absolute()
        self.root = self.artifacts.parent
        self.path = self.artifacts / INDEX_YAML
        self._file = IndexFile(self.path, lock_timeout_s=lock_timeout_s)

    def start(self, run: RunStart) -> str:
        run.id = run.id or new_history_id(run.name)
        run.started_at = run.started_at or utc_now()
        run.host = run.host or socket.gethostname()
        run.user = run.user or _user()
        if run.process is None:
            run.process = identify(run.pid)
        run.pid = run.process.pid
        self._append({"id": run.id, "event": "started", "status": Status.RUNNING, **self._fields(run)})
        return run.id

    def end(self, run_id: str, end: RunEnd) -> None:
        end.id = run_id
        end.completed_at = end.completed_at or utc_now()
        self._append({"id": run_id, "event": "ended", **self._fields(end)})

    def note(self, run_id: str, text: str) -> None:
        self._append({"id": run_id, "event": "note", "at": utc_now(), "note": text})

    def update(self, run_id: str, **fields: Any) -> None:
        """Add to a run's record; `metrics`, `checkpoint` and `tracker` are merged key by key."""
        refused = {"id", "event", "status"} & fields.keys()
        if refused:
            raise UsageError(f"an update cannot set {', '.join(sorted(refused))}; start and end do")
        self._append({"id": run_id, "event": "updated", "at": utc_now(), **fields})

    def records(self, *, reconcile: bool = True) -> list[RunRecord]:
        """Every run, oldest first; `reconcile` first closes those whose process is gone."""
        return [self._record(run) for run in self._runs(reconcile).values()]

    def _runs(self, reconcile: bool) -> dict[str, Event]:
        runs = self._fold(self._file.events())
        if reconcile and any(self._lost(run, runs) for run in runs.values()):
            try:
                runs = self._close_lost()
            except (WriteError, LockedError):  # a history we may only read is still shown as it is
                for run in runs.values():
                    if lost := self._lost(run, runs):
                        run.update(lost)
        return runs

    def get(self, ref: str, *, reconcile: bool = True) -> RunRecord:
        """The run of an id, the beginning of one, a name, a directory or something in it, or `latest`.

        Of several runs of a name or a directory it is the newest. `name@step` is the run of that name.
        """
        runs = list(self._runs(reconcile).values())
        if not runs:
            raise UsageError(
                f"{self.path}: no run has been recorded yet; --artifacts names another history's directory"
            )
        if ref == LATEST:
            return self._record(runs[-1])
        for key in ("id", "name"):
            if named := [run for run in runs if run.get(key) == ref]:
                return self._record(named[-1])
        if here := [run for run in runs if run.get("output_dir") in self._directories(ref)]:
            return self._record(here[-1])
        name, _, step = ref.rpartition("@")
        if step.isdigit() and (named := [run for run in runs if name in (run.get("id"), run.get("name"))]):
            return self._record(named[-1])
        begun = [run["id"] for run in runs if ref and run["id"].startswith(ref)]
        if len(begun) == 1:
            return self._record(next(run for run in runs if run["id"] == begun[0]))
        raise UsageError(_refusal(ref, begun, runs))

    def _directories(self, ref: str) -> set[str]:
        """A path and what is above it, as records hold them."""
        place = Path(self.relative(ref))
        return {str(one) for one in (place, *place.parents) if one.name}

    def relative(self, path: Path | str) -> str:
        """A path as records hold it: relative to the directory of `artifacts/` if it lies below it."""
        full = Path(os.path.abspath(Path(path).expanduser()))  # noqa: PTH100 - resolve() would follow links
        return full.relative_to(self.root).as_posix() if full.is_relative_to(self.root) else str(full)

    def resolve(self, path: str) -> Path:
        """Where a recorded path is now: the artifacts directory may have been renamed since."""
        recorded = self.root / path
        moved = self.artifacts.joinpath(*Path(path).parts[1:])
        return moved if not recorded.exists() and len(Path(path).parts) > 1 and moved.exists() else recorded

    def _fields(self, record: RunStart | RunEnd) -> dict[str, Any]:
        plain = {key: value for key, value in record.to_plain().items() if key != "id"}
        if isinstance(record, RunStart) and record.process is not None:
            plain["process"] = msgspec.to_builtins(record.process)
        for key in ("output_dir", "log", "archive", "config"):
            if isinstance(plain.get(key), str):
                plain[key] = self.relative(plain[key])
        return plain

    def _append(self, event: Event) -> None:
        with self._file.appending() as index:
            index.append(_without_secrets(event))

    def _close_lost(self) -> dict[str, Event]:
        with self._file.appending() as index:  # and look again: another command may have just done it
            runs = self._fold(self._file.events())
            for run in runs.values():
                if lost := self._lost(run, runs):
                    index.append(_without_secrets({"id": run["id"], "event": "ended", **lost}))
                    run.update(lost)
        return runs

    def _lost(self, run: Event, runs: dict[str, Event]) -> Event | None:
        """The end of a run that nobody recorded; None for one that ended, lives, or is not ours to judge."""
        if run.get("status") != Status.RUNNING or not _is_ours_to_judge(run):
            return None
        process = _process_of(run)
        why = why_gone(process) if process else None
        if process is None or why is None:
            return None
        if process.boot_id not in (None, boot_id()) and self._lives_elsewhere(run, runs):
            return None
        moved = self._log_moved_at(run)
        lost: Event = {"status": Status.LOST, "reason": why, "noticed_at": utc_now()}
        if moved:
            lost["completed_at"] = zulu(datetime.fromtimestamp(moved, UTC))
            lost["reason"] = f"{why}; its log last moved at {lost['completed_at']}"
        return lost

    def _lives_elsewhere(self, run: Event, runs: dict[str, Event]) -> bool:
        """Whether a run of another boot left signs of life after this one: another machine has our name."""
        record = _lenient(run)
        place = [run.get(key) for key in _PLACE]
        later = list(runs.values())[list(runs).index(record.id) + 1 :]
        owns = all(place != [other.get(key) for key in _PLACE] for other in later)
        moved = signs_of_life.files_moved_at(record, self, owns_directory=owns)
        if moved and moved > psutil.boot_time() + 60:
            return True
        return owns and signs_of_life.holds_a_lock(record, self)

    def _log_moved_at(self, run: Event) -> float | None:
        log = run.get("log")
        if not isinstance(log, str):
            return None
        with contextlib.suppress(OSError, ValueError):
            return self.resolve(log).stat().st_mtime
        return None

    def _fold(self, events: Iterable[Event]) -> dict[str, Event]:
        runs: dict[str, Event] = {}
        for event in events:
            if event.get("id") in (None, ""):
                raise BadFileError(
                    self.path, f"a record without an id: {str(event)[:80]}; correct it by hand"
                )
            run_id = str(event["id"])
            if event.get("event") == "started" and run_id not in runs:
                runs[run_id] = {key: value for key, value in event.items() if key != "event"}
            else:
                _fold_into(runs.setdefault(run_id, {"id": run_id}), event)
        return runs

    def _record(self, run: Event) -> RunRecord:
        if "notes" in run:
            notes = [
                note if isinstance(note, dict) else {"text": str(note)} for note in _listed(run, "notes")
            ]
            run = {**run, "notes": notes}
        record = _lenient(run)
        if record.is_running and not _is_ours_to_judge(run):
            moved = self._log_moved_at(run)
            record.stale = moved is not None and time.time() - moved > _STALE_AFTER_S
        return record


def _fold_into(run: Event, event: Event) -> None:
    kind = event.get("event")
    if kind == "note":
        run["notes"] = [*_listed(run, "notes"), {"text": str(event.get("note")), "at": event.get("at")}]
        return
    ended = run.get("status") not in (None, Status.RUNNING)
    if kind == "ended" and event.get("status") == Status.LOST and ended:
        return  # a run that reported its own end was not lost, whatever it looked like from elsewhere
    if kind == "ended" and run.get("status") == Status.LOST:
        for key in ("reason", "noticed_at"):
            run.pop(key, None)
    for key, value in event.items():
        if key in ("event", "id") or (kind == "updated" and key == "at") or value is None:
            continue
        if key in _MERGED and isinstance(value, dict) and isinstance(run.get(key), dict):
            value = {**run[key], **value}
        run[key] = value


def _is_ours_to_judge(run: Event) -> bool:
    process = _process_of(run)
    return process is not None and run.get("host") == socket.gethostname() and is_visible(process)


def _process_of(run: Event) -> ProcessIdentity | None:
    known = run.get("process")
    pid = run.get("pid")
    if not isinstance(pid, int):
        return None
    if not isinstance(known, dict):
        return ProcessIdentity(pid)
    try:
        return msgspec.convert({**known, "pid": pid}, ProcessIdentity)
    except msgspec.ValidationError:
        return ProcessIdentity(pid)


def _lenient(run: Event) -> RunRecord:
    """Another program's value of another type is kept under its key, in `extra`, and not an error."""
    plain, odd = dict(run), Event()
    for key in ("status", "name", "kind", "started_at", "completed_at", "log", "archive", "output_dir"):
        if isinstance(plain.get(key), bool | int | float):
            plain[key] = str(plain[key])
    while True:
        try:
            record = RunRecord.from_plain(plain)
        except msgspec.ValidationError as error:
            key = str(error).partition("$.")[2].partition("`")[0].partition("[")[0].partition(".")[0]
            if key not in plain or key == "id":
                raise
            odd[key] = plain.pop(key)
            continue
        record.extra.update(odd)
        return record


def _listed(run: Event, key: str) -> list[Any]:
    value = run.get(key)
    return value if isinstance(value, list) else [] if value in (None, "") else [value]


def _without_secrets(event: Event) -> Event:
    from rollbook.records.redact import redact_tree  # its patterns are no business of a command that reads

    return {key: redact_tree(value) if key in _FREE_TEXT else value for key, value in event.items()}


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _refusal(ref: str, begun: list[str], runs: list[Event]) -> str:
    if begun:
        return f"{ref!r} begins {len(begun)} ids: {', '.join(begun[-5:])}; give more of it"
    known = [str(run[key]) for key in ("id", "name") for run in reversed(runs) if run.get(key)]
    import difflib

    near = difflib.get_close_matches(ref, list(dict.fromkeys(known)), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"the latest is {runs[-1]['id']}."
    return f"no run {ref!r}; {hint} `rollbook history` lists them all"
