"""run.json: who this run is, and every attempt at it.

An attempt is one process that wrote the run: the first start, and each resume. `log_lengths` are the
lengths of the logs when it began, so that a line's attempt follows from its offset. An attempt without
`ended_at` is under way, or its process was killed.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import orjson

from rollbook.errors import BadFileError
from rollbook.records.atomic import write_atomic
from rollbook.records.plain import encode_document, utc_now
from rollbook.records.record import Record
from rollbook.records.run_inputs import RunInput
from rollbook.records.versions import made_by_newer
from rollbook.version import __version__

# A variable: what was typed, as JSON, for the processes that a command of ours starts.
TYPED = "ROLLBOOK_TYPED"

_REPORTED_PACKAGES = ("torch", "transformers", "peft", "vllm", "trl", "numpy", "datasets")


class Attempt(Record, kw_only=True):
    attempt: int
    started_at: str
    host: str
    pid: int
    log_lengths: dict[str, int]
    resumed_from: str | None = None  # the name of a checkpoint
    ended_at: str | None = None
    outcome: str | None = None  # completed, failed or interrupted
    error: str | None = None


class RunInfo(Record, kw_only=True):
    id: str
    kind: str
    started_at: str
    host: str
    pid: int
    layout: str
    versions: dict[str, str]
    attempts: list[Attempt]
    total_iterations: int | None = None
    command: list[str] | None = None
    logs: list[str] | None = None  # what `append_log` was asked for: a resume cuts these back too
    inputs: list[RunInput] | None = None  # what it was made from

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> RunInfo:
        info = super().from_plain(plain)
        info.attempts = [Attempt.from_plain(attempt) for attempt in plain.get("attempts", [])]
        return info

    def to_plain(self) -> dict[str, Any]:
        return {**super().to_plain(), "attempts": [attempt.to_plain() for attempt in self.attempts]}


def new_attempt(number: int, log_lengths: dict[str, int], resumed_from: str | None) -> Attempt:
    return Attempt(
        attempt=number,
        started_at=utc_now(),
        host=socket.gethostname(),
        pid=os.getpid(),
        log_lengths=log_lengths,
        resumed_from=resumed_from,
    )


def versions() -> dict[str, str]:
    """The versions of Python, Rollbook and known packages that are installed; none is imported."""
    return dict(_versions())


@cache
def _versions() -> dict[str, str]:
    from importlib import metadata  # takes a while, and readers do without

    found = {"rollbook": __version__, "python": platform.python_version()}
    for package in _REPORTED_PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_run_info(path: Path, info: RunInfo) -> None:
    write_atomic(path, encode_document(info.to_plain()))


def read_run_info(path: Path) -> RunInfo:
    try:
        plain = orjson.loads(path.read_bytes())
        if why := made_by_newer(plain.get("schema_version"), RunInfo.KNOWN_VERSION):
            raise BadFileError(path, why)
        return RunInfo.from_plain(plain)
    except (orjson.JSONDecodeError, msgspec.ValidationError, AttributeError) as error:
        raise BadFileError(path, f"not a run.json ({error}); restore it from a copy") from error


def command_line() -> list[str]:
    """What was typed; in a process that a command of ours started, what that was."""
    module = getattr(sys.modules.get("__main__"), "__spec__", None)
    if TYPED in os.environ and module is not None and module.name.startswith("rollbook."):
        return msgspec.json.decode(os.environ[TYPED], type=list[str])
    return [Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv else []
