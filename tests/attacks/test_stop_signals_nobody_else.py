"""A history whose record names a stranger's process: `rollbook stop` leaves the stranger alone."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rollbook.errors import UsageError
from rollbook.records.jsonl import JsonlWriter
from rollbook.records.progress import Progress, write_progress
from rollbook.runs.jobs.detach import stop
from rollbook.runs.jobs.ledger import Ledger, RunRecord, RunStart, Status
from rollbook.runs.jobs.processes import ProcessIdentity, identify
from rollbook.runs.status import reason_collector_ended

OTHER_BOOT = "00000000-0000-0000-0000-000000000000"


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "artifacts")


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def of_another_boot(pid: int) -> ProcessIdentity:
    return msgspec.structs.replace(identify(pid), boot_id=OTHER_BOOT)


def in_an_hour(path: Path) -> Path:
    """A file that was written after this machine was started, as one of a machine with our name is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (time.time() + 3600,) * 2)
    return path


def test_a_pid_of_another_boot(ledger: Ledger, stranger: subprocess.Popen[bytes]) -> None:
    log = in_an_hour(ledger.artifacts / "logs" / "x.log")
    ledger.start(RunStart(name="x", kind="sft", log=str(log), process=of_another_boot(stranger.pid)))
    with pytest.raises(
        UsageError, match=r"was not signalled: the machine was restarted.* type `rollbook stop"
    ):
        stop(ledger, "x", timeout_s=0.1)
    assert stranger.poll() is None


def test_a_pid_without_a_start_time(ledger: Ledger, stranger: subprocess.Popen[bytes]) -> None:
    ledger.start(RunStart(name="x", kind="sft", process=ProcessIdentity(stranger.pid)))
    with pytest.raises(UsageError, match="may be another process by now"):
        stop(ledger, "x", timeout_s=0.1)
    assert stranger.poll() is None


def test_a_pid_that_was_used_again(ledger: Ledger, stranger: subprocess.Popen[bytes]) -> None:
    was = identify(stranger.pid)
    assert was.start_ticks is not None
    other = msgspec.structs.replace(was, start_ticks=was.start_ticks - 1)
    ledger.start(RunStart(name="x", kind="sft", process=other))
    with pytest.raises(UsageError, match="is not running: it is lost"):
        stop(ledger, "x", timeout_s=0.1)
    assert stranger.poll() is None


@pytest.mark.parametrize("file", ["out_progress.json", "out.jsonl"])
def test_a_collection_of_another_boot_is_not_lost_while_its_files_grow(ledger: Ledger, file: str) -> None:
    in_an_hour(ledger.root / "data" / file)
    assert _collection(ledger).is_running


def test_a_run_of_another_boot_is_not_lost_while_its_files_grow(ledger: Ledger) -> None:
    in_an_hour(ledger.root / "data" / "metrics.jsonl")
    ledger.start(
        RunStart(
            name="x", kind="rl", output_dir=str(ledger.root / "data"), process=of_another_boot(os.getpid())
        )
    )
    assert ledger.get("x").is_running


def test_a_collection_of_another_boot_is_not_lost_while_it_holds_its_lock(ledger: Ledger) -> None:
    with contextlib.closing(JsonlWriter(ledger.root / "data" / "out.jsonl")):
        os.utime(ledger.root / "data" / "out.jsonl", (0, 0))
        assert _collection(ledger).is_running
    assert ledger.get("x").status == Status.LOST


def test_a_collection_of_another_boot_that_a_later_one_took_over_is_lost(ledger: Ledger) -> None:
    in_an_hour(ledger.root / "data" / "out_progress.json")
    first = _collection(ledger)
    ledger.start(_start(ledger, identify()))
    assert ledger.get(first.id).status == Status.LOST
    assert ledger.get("x").is_running


def _start(ledger: Ledger, process: ProcessIdentity) -> RunStart:
    return RunStart(
        name="x",
        kind="collect",
        output_dir=str(ledger.root / "data"),
        process=process,
        extra={"output": "out.jsonl", "progress_file": "out_progress.json"},
    )


def _collection(ledger: Ledger) -> RunRecord:
    ledger.start(_start(ledger, of_another_boot(os.getpid())))
    return ledger.get("x")


def test_a_collector_of_another_container_is_not_gone_while_it_holds_its_lock(tmp_path: Path) -> None:
    output, progress = tmp_path / "out.jsonl", tmp_path / "out_progress.json"
    told = Progress(status="running", expected=2, done=1, failed=0, missing=1, output=output.name)
    told.host, told.pid = socket.gethostname(), 2**22 - 1  # above every pid that this kernel gives out
    write_progress(progress, told)
    with contextlib.closing(JsonlWriter(output)):
        assert reason_collector_ended(told, progress) is None
    assert "is gone" in str(reason_collector_ended(told, progress))
