"""What to run: all a supervisor needs, as plain data, so that a detached one can be told through a pipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


class Job(msgspec.Struct, kw_only=True, frozen=True):
    name: str
    command: list[str]
    artifacts: Path
    kind: str = "command"
    cwd: Path | None = None
    env: dict[str, str] = {}
    config: Any = None  # resolved, for the snapshot
    config_path: Path | None = None
    output_dir: Path | None = None
    run_dir: Path | None = None  # for system.jsonl and the child's own files; by default the run's archive
    data: list[Path] = []  # files to fingerprint
    resumed_from: str | None = None
    tracker: dict[str, Any] | None = None
    grace_s: float = 10.0
    sample_every_s: float = 10.0  # 0: no system.jsonl
    # `package.module:function`, called as f(job, started, end) in the supervisor before the end is recorded;
    # it may add metrics and a checkpoint to `end`. Named, not passed, so that it works detached too.
    finisher: str | None = None
    ends_diverged: bool = False  # it fails by itself where its numbers are not finite any more
    extra: dict[str, Any] = {}  # further keys for the history


class Started(msgspec.Struct, frozen=True):
    """A run that is under way."""

    id: str
    log: Path
    archive: Path
    pid: int  # of the supervisor
    child: int


def encode_job(job: Job) -> bytes:
    from rollbook.records.config import dump_config

    config = None if job.config is None else dump_config(job.config)
    return msgspec.json.encode(msgspec.structs.replace(job, config=config), enc_hook=str)


def decode_job(data: bytes) -> Job:
    return msgspec.json.decode(data, type=Job, dec_hook=_from_text)


def encode_started(started: Started) -> bytes:
    return msgspec.json.encode(started, enc_hook=str)


def decode_started(data: bytes) -> Started:
    return msgspec.json.decode(data, type=Started, dec_hook=_from_text)


def _from_text(kind: type, value: Any) -> Any:
    return kind(value)
