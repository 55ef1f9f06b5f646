"""The history: folded from events, shared by many writers, and truthful about runs nobody saw end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollbook.errors import BadFileError, UsageError
from rollbook.records.identity import new_history_id
from rollbook.runs.jobs import processes
from rollbook.runs.jobs.index_file import HEADER, encode_item
from rollbook.runs.jobs.ledger import Ledger, RunEnd, RunStart, Status
from rollbook.runs.jobs.processes import ProcessIdentity, identify


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "artifacts")


def start(ledger: Ledger, name: str = "demo", **fields: Any) -> str:
    return ledger.start(RunStart(name=name, kind="sft", **fields))


def events(ledger: Ledger) -> list[dict[str, Any]]:
    content: dict[str, list[dict[str, Any]]] = yaml.safe_load(ledger.path.read_bytes())
    return content["runs"]


def test_start_and_end_are_folded_into_one_run(ledger: Ledger) -> None:
    run_id = start(
        ledger,
        command=["python", "train.py", "--api-key", "k3y-0123456789abcdef"],
        log=str(ledger.artifacts / "logs" / "demo.log"),
        output_dir="/elsewhere/model",
        git={"sha": "abc", "dirty": True, "branch": "main"},
        extra={"seed": 7},
    )
    running = ledger.get(run_id)
    assert running.is_running
    assert running.process == identify()
    assert running.log == "artifacts/logs/demo.log"
    assert ledger.resolve(running.log) == ledger.artifacts / "logs" / "demo.log"
    assert running.output_dir == "/elsewhere/model"
    assert running.command == ["python", "train.py", "--api-key", "[redacted]"]
    ledger.update(run_id, checkpoint={"path": "model/checkpoint-5", "step": 5}, metrics={"loss": 2.0})
    ledger.update(run_id, metrics={"lr": 1e-5})
    ledger.note(run_id, "looks: good # so far")
    ledger.end(run_id, RunEnd(status=Status.COMPLETED, exit_code=0, metrics={"loss": 1.5}, duration_s=3.5))
    (record,) = ledger.records()
    assert (record.status, record.exit_code, record.duration_s) == ("completed", 0, 3.5)
    assert record.metrics == {"loss": 1.5, "lr": 1e-5}
    assert record.checkpoint == {"path": "model/checkpoint-5", "step": 5}
    assert [note.text for note in record.notes] == ["looks: good # so far"]
    assert record.git == {"sha": "abc", "dirty": True, "branch": "main"}
    assert record.extra["seed"] == 7
    assert record.started_at and record.completed_at and record.started_at < record.completed_at
    assert record.completed_at.endswith("Z")
    assert [event["event"] for event in events(ledger)] == ["started", "updated", "updated", "note", "ended"]


def test_an_update_cannot_end_a_run(ledger: Ledger) -> None:
    run_id = start(ledger)
    with pytest.raises(UsageError, match="status"):
        ledger.update(run_id, status="completed")


def test_ids_are_unique_sortable_and_file_names() -> None:
    ids = [new_history_id("my run/ü!" * 30) for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert all(len(run_id) < 80 and run_id.isascii() and "/" not in run_id for run_id in ids)
    stamps = [run_id.split("-")[0] for run_id in ids]
    assert stamps == sorted(stamps)
    assert new_history_id("ü").split("-")[1] == "unnamed"


def test_a_run_is_found_by_id_prefix_name_or_latest(ledger: Ledger) -> None:
    with pytest.raises(UsageError, match="no run has been recorded"):
        ledger.get("latest")
    first, other, second = start(ledger, "demo"), start(ledger, "other"), start(ledger, "demo")
    assert ledger.get(first).id == first
    assert ledger.get("demo").id == second
    assert ledger.get("latest").id == second
    assert ledger.get(other[:-3]).id == other
    with pytest.raises(UsageError, match="begins 3 ids"):
        ledger.get(first[:4])
    with pytest.raises(UsageError, match="did you mean demo"):
        ledger.get("demmo")


def test_a_run_is_found_by_its_directory(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = ledger.artifacts.parent / "runs" / "one"
    start(ledger, "one", output_dir=str(output))
    newest = start(ledger, "again", output_dir=str(output))
    start(ledger, "one", output_dir=str(output.with_name("two")))
    monkeypatch.chdir(output.parent.parent)
    for written in ("runs/one", "runs/one/", "./runs/one", str(output)):
        assert ledger.get(written).id == newest
    with pytest.raises(UsageError, match="no run 'runs/three'"):
        ledger.get("runs/three")


def test_eight_processes_fifty_records_each_lose_none(ledger: Ledger) -> None:
    script = (
        "import sys; from rollbook.runs.jobs.ledger import *\n"
        "ledger = Ledger(sys.argv[1])\n"
        "for number in range(50):\n"
        "    ledger.start(RunStart(name=f'{sys.argv[2]}-{number}', kind='sft', command=['x' * 200]))\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", script, str(ledger.artifacts), str(number)])
        for number in range(8)
    ]
    seen = b""
    while any(writer.poll() is None for writer in writers):
        now = ledger.path.read_bytes() if ledger.path.exists() else b""
        assert now.startswith(seen)
        whole = now[: now.rfind(b"\n") + 1]
        yaml.load(whole, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        seen = now
        time.sleep(0.3)
    assert [writer.returncode for writer in writers] == [0] * 8
    names = [event["name"] for event in events(ledger)]
    assert len(names) == 400
    assert sorted(names) == sorted(f"{writer}-{number}" for writer in range(8) for number in range(50))
    assert len({event["id"] for event in events(ledger)}) == 400


def dead_process() -> ProcessIdentity:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = identify(child.pid)
    child.communicate()
    return identity


def test_a_run_whose_process_is_gone_becomes_lost(ledger: Ledger) -> None:
    log = ledger.artifacts / "logs" / "demo.log"
    log.parent.mkdir(parents=True)
    log.write_text("last words\n")
    os.utime(log, (1_800_000_000, 1_800_000_000))
    run_id = start(ledger, process=dead_process(), log=str(log))
    before = ledger.path.read_bytes()
    record = ledger.get(run_id, reconcile=False)
    assert record.is_running
    assert ledger.path.read_bytes() == before
    record = ledger.get(run_id)
    assert record.status == Status.LOST
    assert record.completed_at == "2027-01-15T08:00:00.000Z"
    assert "is gone; its log last moved at 2027-01-15" in str(record.reason)
    after = ledger.path.read_bytes()
    assert after.startswith(before)
    assert events(ledger)[-1]["status"] == "lost"
    ledger.records()
    assert ledger.path.read_bytes() == after


def test_a_living_run_is_left_alone(ledger: Ledger) -> None:
    start(ledger)
    assert ledger.records()[0].is_running
    assert len(events(ledger)) == 1


def test_a_zombie_is_gone(ledger: Ledger) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    run_id = start(ledger, process=identify(child.pid))
    assert ledger.get(run_id).is_running
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert ledger.get(run_id).status == Status.LOST
    child.communicate()


def test_a_pid_that_another_process_has_now_is_noticed(ledger: Ledger) -> None:
    me = identify()
    assert me.start_ticks is not None
    run_id = start(ledger, process=ProcessIdentity(me.pid, me.start_ticks - 1, me.boot_id, me.pid_namespace))
    record = ledger.get(run_id)
    assert record.status == Status.LOST
    assert "is another one now" in str(record.reason)


def test_a_restart_of_the_machine_ends_its_runs(ledger: Ledger) -> None:
    me = identify()
    run_id = start(ledger, process=ProcessIdentity(me.pid, me.start_ticks, "another boot", me.pid_namespace))
    record = ledger.get(run_id)
    assert record.status == Status.LOST
    assert "restarted" in str(record.reason)


def test_another_machine_of_the_same_name_is_not_judged(ledger: Ledger) -> None:
    log = ledger.artifacts / "demo.log"
    log.parent.mkdir(parents=True)
    log.write_text("written after this machine was started\n")
    future = time.time() + 3600
    os.utime(log, (future, future))
    run_id = start(ledger, process=ProcessIdentity(1, 1, "another boot"), log=str(log))
    assert ledger.get(run_id).is_running


@pytest.mark.parametrize(
    "foreign", [{"host": "elsewhere"}, {"process": ProcessIdentity(1, 1, None, "pid:[1]")}]
)
def test_other_hosts_and_containers_are_never_rewritten_but_shown_as_stale(
    ledger: Ledger, foreign: dict[str, Any]
) -> None:
    log = ledger.artifacts / "demo.log"
    log.parent.mkdir(parents=True)
    log.touch()
    run_id = start(ledger, log=str(log), **{"process": dead_process(), **foreign})
    record = ledger.get(run_id)
    assert (record.status, record.stale) == ("running", False)
    os.utime(log, (0, 0))
    record = ledger.get(run_id)
    assert (record.status, record.stale) == ("running", True)
    assert len(events(ledger)) == 1


def test_two_commands_that_reconcile_at_once_append_one_end(ledger: Ledger) -> None:
    gone = dead_process()
    ids = [start(ledger, f"run{number}", process=gone) for number in range(20)]
    script = (
        "import sys; from rollbook.runs.jobs.ledger import Ledger\n"
        "sys.stdin.readline(); Ledger(sys.argv[1]).records()"
    )
    readers = [
        subprocess.Popen([sys.executable, "-c", script, str(ledger.artifacts)], stdin=subprocess.PIPE)
        for _ in range(6)
    ]
    time.sleep(0.5)
    for reader in readers:
        reader.communicate(b"go\n")
        assert reader.returncode == 0
    ends = [event["id"] for event in events(ledger) if event["event"] == "ended"]
    assert sorted(ends) == sorted(ids)


def test_a_real_end_counts_more_than_a_presumed_one(ledger: Ledger) -> None:
    run_id = start(ledger, process=dead_process())
    assert ledger.get(run_id).status == Status.LOST
    ledger.end(run_id, RunEnd(status=Status.COMPLETED, exit_code=0))
    record = ledger.get(run_id)
    assert (record.status, record.reason) == ("completed", None)
    with ledger.path.open("ab") as file:
        file.write(encode_item({"id": run_id, "event": "ended", "status": "lost", "reason": "a late guess"}))
    assert ledger.get(run_id).status == Status.COMPLETED


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_history_we_may_only_read_is_shown_as_it_is_by_permission(ledger: Ledger) -> None:
    start(ledger, process=dead_process())
    ledger.artifacts.chmod(0o555)
    try:
        assert ledger.records()[0].status == Status.LOST
    finally:
        ledger.artifacts.chmod(0o755)


def test_a_history_we_cannot_lock_is_shown_as_it_is(ledger: Ledger) -> None:
    from rollbook.records.locks import FileLock

    start(ledger, process=dead_process())
    holder = FileLock(ledger.path)
    try:
        assert Ledger(ledger.artifacts, lock_timeout_s=0.05).records()[0].status == Status.LOST
    finally:
        holder.release()
    assert len(events(ledger)) == 1


def test_a_history_of_the_original_kind_is_read_and_continued(ledger: Ledger) -> None:
    ledger.artifacts.mkdir()
    ledger.path.write_text(
        "runs:\n"
        "- id: run_001\n"
        "  started_at: 2026-08-12T10:00:00Z\n"
        "  completed_at: '2026-08-12T11:00:00Z'\n"
        "  status: completed\n"
        "  archive: artifacts/archives/run_001\n"
        "  notes: first try\n"
        "  exit_code: unknown\n"
        "- id: 2\n"
        "  status: running\n"
    )
    run_id = start(ledger)
    first, second, ours = ledger.records()
    assert (first.id, first.status, first.started_at) == ("run_001", "completed", "2026-08-12T10:00:00.000Z")
    assert [note.text for note in first.notes] == ["first try"]
    assert first.extra["exit_code"] == "unknown"
    assert (second.id, second.status) == ("2", "running")
    assert ours.id == run_id
    ledger.note("run_001", "seen")
    assert [note.text for note in ledger.get("run_001").notes] == ["first try", "seen"]


def test_a_record_without_an_id_is_an_error(ledger: Ledger) -> None:
    ledger.artifacts.mkdir()
    ledger.path.write_bytes(HEADER + encode_item({"name": "nobody"}))
    with pytest.raises(BadFileError, match="without an id"):
        ledger.records()


def test_unknown_keys_survive(ledger: Ledger) -> None:
    run_id = start(ledger, extra={"planet": {"name": "mars"}})
    ledger.end(run_id, RunEnd(status=Status.FAILED, extra={"weather": [1, 2]}))
    plain = ledger.get(run_id).to_plain()
    assert plain["planet"] == {"name": "mars"}
    assert plain["weather"] == [1, 2]


def test_a_thousand_runs_are_read_without_yaml(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [HEADER]
    for number in range(1000):
        run = {
            "id": f"run{number}",
            "name": "demo",
            "status": "running",
            "event": "started",
            "host": "elsewhere",
        }
        lines += [
            encode_item(run),
            encode_item({"id": f"run{number}", "event": "ended", "status": "completed"}),
        ]
    ledger.artifacts.mkdir()
    ledger.path.write_bytes(b"".join(lines))
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert [record.status for record in ledger.records()] == ["completed"] * 1000
    assert ledger.get("demo").id == "run999"


def test_reading_the_history_imports_neither_yaml_nor_the_redactor(ledger: Ledger) -> None:
    start(ledger)
    script = (
        "import sys; from rollbook.runs.jobs.ledger import *; Ledger(sys.argv[1]).records()\n"
        "print([name for name in ('yaml', 'numpy', 'rollbook.records.redact') if name in sys.modules])"
    )
    # Another process: for it, this run is alive, so nothing is to be written.
    done = subprocess.run(
        [sys.executable, "-c", script, str(ledger.artifacts)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_processes_are_identified_beyond_their_pid() -> None:
    me = identify()
    assert processes.why_gone(me) is None
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    assert me.start_ticks == int(stat[19])  # what histories written before psutil have


def test_a_clock_that_is_set_does_not_make_a_process_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    me = identify()
    boots = iter([1_000.0, 5_000.0])  # set between the two looks that one start time takes, then left alone
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: next(boots, 5_000.0))
    assert identify() == me
    assert processes.why_gone(me) is None


@pytest.mark.parametrize("pid", [-1, 0, 1 << 40, 1 << 80])
def test_a_number_that_is_no_pid_is_no_process(pid: int) -> None:
    assert processes.why_gone(ProcessIdentity(pid)) == f"its process (pid {pid}) is gone"
    assert processes.started_at(pid) is None
