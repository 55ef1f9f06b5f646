"""A supervised command behaves as it does by itself, and its run is in the history with a log."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rollbook.errors import RollbookError, UsageError
from rollbook.runs.jobs.detach import stop, supervise_detached
from rollbook.runs.jobs.job import Job, Started
from rollbook.runs.jobs.ledger import Ledger, RunEnd, Status
from rollbook.runs.jobs.processes import identify
from rollbook.runs.jobs.supervise import supervise
from supervision import SOURCE, SUPERVISOR, is_alive, poll, start_supervisor


def job(root: Path, *command: str, **fields: Any) -> Job:
    settings = {"grace_s": 1.0, "sample_every_s": 0.0, **fields}
    return Job(name="demo", command=list(command), artifacts=root / "artifacts", **settings)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def log_of(root: Path) -> bytes:
    log = Ledger(root / "artifacts").get("demo", reconcile=False).log
    assert log is not None
    return (root / log).read_bytes()


def test_a_run_that_works(tmp_path: Path) -> None:
    seen: list[Started] = []
    end = supervise(job(tmp_path, "echo", "hello"), terminal=None, on_start=seen.append)
    record = Ledger(tmp_path / "artifacts").get("latest")
    assert (end.status, end.exit_code, end.id) == (Status.COMPLETED, 0, record.id)
    assert (record.status, record.exit_code, record.name, record.kind) == ("completed", 0, "demo", "command")
    assert record.command == ["echo", "hello"]
    assert record.duration_s is not None
    assert record.pid == os.getpid()
    assert record.log is not None
    assert record.log.startswith("artifacts/logs/demo_2")
    assert log_of(tmp_path) == b"hello\n"
    assert record.archive == f"artifacts/archives/{record.id}"
    assert (tmp_path / record.archive / "snapshot.json").exists()
    assert [started.id for started in seen] == [record.id]


def test_the_child_knows_its_run(tmp_path: Path) -> None:
    code = (
        "import os\n"
        "for name, value in os.environ.items():\n"
        "    if name.startswith(('ROLLBOOK', 'PYTHONUNB', 'MINE')): print(name, value)"
    )
    supervise(job(tmp_path, *python(code), output_dir=tmp_path / "model", env={"MINE": "yes"}), terminal=None)
    record = Ledger(tmp_path / "artifacts").get("latest")
    told = dict(line.split(" ", 1) for line in log_of(tmp_path).decode().splitlines())
    assert told == {
        "MINE": "yes",
        "PYTHONUNBUFFERED": "1",
        "ROLLBOOK_RUN_ID": record.id,
        "ROLLBOOK_RUN_NAME": "demo",
        "ROLLBOOK_ARTIFACTS": str(tmp_path / "artifacts"),
        "ROLLBOOK_RUN_DIR": str(tmp_path / "artifacts" / "archives" / record.id),
        "ROLLBOOK_OUTPUT_DIR": str(tmp_path / "model"),
    }


def test_output_is_copied_byte_by_byte_and_logged_without_carriage_returns(tmp_path: Path) -> None:
    code = (
        "import os\n"
        "os.write(1, b'\\xff\\xfe not text\\n')\n"
        "for i in range(101): os.write(2, b'\\r%3d%%' % i)\n"
        "os.write(2, b'\\n')\n"
        "os.write(1, b'end without newline')\n"
    )
    raw = b"\xff\xfe not text\n" + b"".join(b"\r%3d%%" % i for i in range(101)) + b"\nend without newline"
    supervisor = start_supervisor(tmp_path / "artifacts", *python(code), stdout=subprocess.PIPE)
    assert supervisor.communicate()[0] == raw
    assert log_of(tmp_path) == b"\xff\xfe not text\n100%\nend without newline\n"


def test_a_lot_of_output_arrives_whole(tmp_path: Path) -> None:
    code = "import sys\nfor i in range(200_000): sys.stdout.write(f'line {i}\\n')"
    expected = b"".join(b"line %d\n" % i for i in range(200_000))
    supervisor = start_supervisor(
        tmp_path / "artifacts", "env", "PYTHONUNBUFFERED=", *python(code), stdout=subprocess.PIPE
    )
    assert supervisor.communicate()[0] == expected
    assert log_of(tmp_path) == expected


def test_a_reader_that_goes_away_does_not_stop_the_run(tmp_path: Path) -> None:
    code = "import time\nfor i in range(50): print('line', i); time.sleep(0.01)"
    supervisor = start_supervisor(tmp_path / "artifacts", *python(code), stdout=subprocess.PIPE)
    assert supervisor.stdout is not None
    supervisor.stdout.readline()
    supervisor.stdout.close()
    assert supervisor.wait(timeout=60) == 0
    assert log_of(tmp_path).count(b"line") == 50


def test_a_terminal_stays_one_for_the_child(tmp_path: Path) -> None:
    code = (
        "import os, sys; print(sys.stdout.isatty(), tuple(os.get_terminal_size()))\n"
        "sys.stdout.write('\\r1%\\r2%\\n')"
    )
    child, terminal = pty.fork()
    if child == 0:
        os.environ["PYTHONPATH"] = str(SOURCE)
        os.execv(
            sys.executable,
            [sys.executable, "-c", SUPERVISOR, str(tmp_path / "artifacts"), "1", *python(code)],
        )
    import fcntl
    import struct
    import termios

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
    shown = read_terminal(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert shown == b"True (77, 33)\r\n\r1%\r2%\r\n"
    assert log_of(tmp_path) == b"True (77, 33)\n2%\n"


def read_terminal(descriptor: int) -> bytes:
    data = b""
    with contextlib.suppress(OSError):  # EIO: the other side has closed it
        while select.select([descriptor], [], [], 60)[0] and (piece := os.read(descriptor, 4096)):
            data += piece
    os.close(descriptor)
    return data


def test_ctrl_c_on_a_terminal_interrupts(tmp_path: Path) -> None:
    code = "import time; print('ready', flush=True); time.sleep(600)"
    child, terminal = pty.fork()
    if child == 0:
        os.environ["PYTHONPATH"] = str(SOURCE)
        os.execv(
            sys.executable,
            [sys.executable, "-c", SUPERVISOR, str(tmp_path / "artifacts"), "5", *python(code)],
        )
    shown = b""
    while b"ready" not in shown:
        shown += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    shown += read_terminal(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    record = Ledger(tmp_path / "artifacts").get("demo")
    assert (record.status, record.signal) == ("interrupted", "SIGINT")
    assert b"KeyboardInterrupt" in log_of(tmp_path)


def test_a_piped_stdin_reaches_the_child(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path / "artifacts"), "1", "tr", "a-z", "A-Z"],
        input=b"hello\n",
        capture_output=True,
        check=True,
    )
    assert done.stdout == b"HELLO\n"


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (["no-such-program"], 127, "command not found"),
        (["{file}"], 126, "not executable"),
        (["bad\0word"], 126, "null"),
    ],
)
def test_a_command_that_cannot_be_run_is_a_recorded_failure(
    tmp_path: Path, command: list[str], code: int, says: str
) -> None:
    (tmp_path / "script").write_text("echo hi\n")
    words = [word.format(file=tmp_path / "script") for word in command]
    end = supervise(job(tmp_path, *words), terminal=None)
    assert (end.status, end.exit_code) == (Status.FAILED, code)
    record = Ledger(tmp_path / "artifacts").get("latest")
    assert record.status == "failed"
    assert says in str(record.reason)
    assert says.encode() in log_of(tmp_path)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    end = supervise(job(tmp_path, "echo", cwd=tmp_path / "nowhere"), terminal=None)
    assert (end.status, end.exit_code) == (Status.FAILED, 127)
    assert "nowhere: no such directory" in str(end.reason)


def test_nothing_to_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no command"):
        supervise(job(tmp_path), terminal=None)
    assert not (tmp_path / "artifacts").exists()


def test_artifacts_that_cannot_be_written_are_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "artifacts").write_text("a file")
    with pytest.raises(UsageError, match="cannot write here"):
        supervise(job(tmp_path, "touch", str(tmp_path / "ran")), terminal=None)
    assert not (tmp_path / "ran").exists()


def test_two_runs_of_one_name_and_second_have_two_logs(tmp_path: Path) -> None:
    for _ in range(3):
        supervise(job(tmp_path, "true"), terminal=None)
    logs = [record.log for record in Ledger(tmp_path / "artifacts").records()]
    assert len(set(logs)) == 3


def test_a_child_that_ends_well_after_a_stop_was_still_interrupted(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('saved') or 0))\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    supervisor = start_supervisor(tmp_path / "artifacts", *python(code), grace_s=30)
    poll(lambda: Ledger(tmp_path / "artifacts").records() and b"ready" in log_of(tmp_path))
    supervisor.terminate()
    assert supervisor.wait(timeout=60) == 143
    record = Ledger(tmp_path / "artifacts").get("demo")
    assert (record.status, record.exit_code, record.signal) == ("interrupted", 0, "SIGTERM")
    assert log_of(tmp_path) == b"ready\nsaved\n"


def test_nohup_is_respected(tmp_path: Path) -> None:
    code = "import time; print('ready', flush=True); time.sleep(1.5); print('done')"
    supervisor = subprocess.Popen(
        ["nohup", sys.executable, "-c", SUPERVISOR, str(tmp_path / "artifacts"), "1", *python(code)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    poll(lambda: Ledger(tmp_path / "artifacts").records() and b"ready" in log_of(tmp_path))
    supervisor.send_signal(signal.SIGHUP)
    assert supervisor.wait(timeout=60) == 0
    assert Ledger(tmp_path / "artifacts").get("demo").status == "completed"


def test_processes_left_behind_get_the_grace_period_and_are_then_ended(tmp_path: Path) -> None:
    sleeper = "import time; time.sleep(600)"
    code = (
        "import subprocess, sys\n"
        f"for apart in (False, True): print(subprocess.Popen([sys.executable, '-c', {sleeper!r}], "
        "start_new_session=apart, stdout=subprocess.DEVNULL if apart else None).pid)"
    )
    end = supervise(job(tmp_path, *python(code)), terminal=None)
    assert (end.status, end.extra["leftovers"]) == (Status.COMPLETED, 2)
    assert not any(is_alive(int(pid)) for pid in log_of(tmp_path).split())


def test_a_process_that_finishes_its_work_after_the_child_is_waited_for(tmp_path: Path) -> None:
    code = "import subprocess; subprocess.Popen(['sh', '-c', 'sleep 0.5; echo uploaded'])"
    end = supervise(job(tmp_path, *python(code), grace_s=20), terminal=None)
    assert "leftovers" not in end.extra
    assert log_of(tmp_path) == b"uploaded\n"


def add_metrics(job: Job, started: Started, end: RunEnd) -> None:
    end.metrics = {"lines": len(started.log.read_bytes().splitlines())}
    end.checkpoint = {"path": str(job.output_dir), "step": 3}


def fail(job: Job, started: Started, end: RunEnd) -> None:
    raise KeyError("no results")


def test_a_finisher_adds_to_the_end(tmp_path: Path) -> None:
    named = f"{__name__}:add_metrics"
    supervise(job(tmp_path, "echo", "x", finisher=named, output_dir=Path("model")), terminal=None)
    record = Ledger(tmp_path / "artifacts").get("latest")
    assert (record.metrics, record.checkpoint) == ({"lines": 1}, {"path": "model", "step": 3})


@pytest.mark.parametrize("named", [f"{__name__}:fail", "no.such.module:at_all"])
def test_a_finisher_that_fails_does_not_change_the_outcome(tmp_path: Path, named: str) -> None:
    end = supervise(job(tmp_path, "true", finisher=named), terminal=None)
    assert end.status == Status.COMPLETED
    record = Ledger(tmp_path / "artifacts").get("latest")
    assert record.status == "completed"
    assert record.extra["finisher_error"]


def handlers_and_descriptors() -> tuple[list[Any], int]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGWINCH)
    return [signal.getsignal(number) for number in numbers], len(list(Path("/proc/self/fd").iterdir()))


def test_handlers_and_descriptors_are_as_they_were_afterwards(tmp_path: Path) -> None:
    supervise(job(tmp_path, "true"), terminal=None)
    before = handlers_and_descriptors()
    supervise(job(tmp_path, "true"), terminal=None)
    supervise(job(tmp_path, "no-such-program"), terminal=None)
    assert handlers_and_descriptors() == before


def test_a_thread_cannot_supervise(tmp_path: Path) -> None:
    caught: list[Exception] = []

    def attempt() -> None:
        try:
            supervise(job(tmp_path, "true"), terminal=None)
        except UsageError as error:
            caught.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])
    assert not (tmp_path / "artifacts").exists()


def test_a_signal_before_the_child_begins_is_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    ledger = Ledger(tmp_path / "artifacts")
    begin = ledger.start

    def start_and_be_stopped(run: Any) -> str:
        run_id = begin(run)
        signal.raise_signal(signal.SIGTERM)
        return run_id

    monkeypatch.setattr(ledger, "start", start_and_be_stopped)
    end = supervise(job(tmp_path, "touch", str(ran)), ledger=ledger, terminal=None)
    assert (end.status, end.exit_code) == (Status.INTERRUPTED, 143)
    assert not ran.exists()
    assert Ledger(tmp_path / "artifacts").get("demo").status == "interrupted"


def test_an_error_of_our_own_ends_the_child_and_is_recorded(tmp_path: Path) -> None:
    pids: list[int] = []

    def break_down(started: Started) -> None:
        pids.append(started.child)
        raise RuntimeError("our own mistake")

    with pytest.raises(RuntimeError):
        supervise(job(tmp_path, "sleep", "600"), terminal=None, on_start=break_down)
    assert not is_alive(pids[0])
    record = Ledger(tmp_path / "artifacts").get("demo")
    assert record.status == "failed"
    assert "our own mistake" in str(record.reason)


LAUNCHER = """
import sys
from pathlib import Path
from rollbook.runs.jobs.detach import supervise_detached
from rollbook.runs.jobs.job import Job
code = "import time\\nfor i in range(6000): print('line', i, flush=True); time.sleep(0.1)"
job = Job(name="demo", command=[sys.executable, "-c", code], artifacts=Path(sys.argv[1]), grace_s=2.0)
started = supervise_detached(job)
print("started", started.id, started.pid, started.child, flush=True)
import time; time.sleep(600)
"""


def test_a_detached_run_survives_its_terminal_and_can_be_stopped(tmp_path: Path) -> None:
    shell, terminal = pty.fork()  # a terminal with a session of its own
    if shell == 0:
        os.environ["PYTHONPATH"] = str(SOURCE)
        os.execv(sys.executable, [sys.executable, "-c", LAUNCHER, str(tmp_path / "artifacts")])
    said = b""
    while not said.endswith(b"\n"):
        said += os.read(terminal, 4096)
    _, run_id, supervisor, child = said.decode().split()
    for pid in processes_of_session(shell):
        os.kill(pid, signal.SIGHUP)
        os.kill(pid, signal.SIGKILL)
    os.close(terminal)
    os.waitpid(shell, 0)
    assert processes_of_session(shell) == []
    ledger = Ledger(tmp_path / "artifacts")
    before = log_of(tmp_path).count(b"\n")
    poll(lambda: log_of(tmp_path).count(b"\n") > before + 5)
    assert ledger.get("demo").is_running
    assert is_alive(int(child))
    record = stop(ledger, "demo")
    assert (record.id, record.status, record.signal) == (run_id, "interrupted", "SIGTERM")
    assert not is_alive(int(child))
    assert not is_alive(int(supervisor))
    with pytest.raises(UsageError, match="not running: it is interrupted"):
        stop(ledger, "demo")


def processes_of_session(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] not in "ZX":
                    found.append(int(entry.name))
    return found


def test_a_detached_run_ends_by_itself(tmp_path: Path) -> None:
    started = supervise_detached(job(tmp_path, "sh", "-c", "echo one; pwd; exit 3", config={"lr": 1e-5}))
    ledger = Ledger(tmp_path / "artifacts")
    poll(lambda: not ledger.get(started.id).is_running)
    record = ledger.get(started.id)
    assert (record.status, record.exit_code) == ("failed", 3)
    assert started.log.read_text() == f"one\n{Path.cwd()}\n"
    assert started.archive.is_dir()


def test_a_detached_command_that_cannot_start_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(RollbookError, match="no-such-program: command not found"):
        supervise_detached(job(tmp_path, "no-such-program"))
    assert Ledger(tmp_path / "artifacts").get("demo").exit_code == 127


def test_stopping_what_does_not_listen_kills_it(tmp_path: Path) -> None:
    code = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    started = supervise_detached(job(tmp_path, *python(code), grace_s=600.0))
    poll(lambda: b"ready" in started.log.read_bytes())
    record = stop(Ledger(tmp_path / "artifacts"), started.id, timeout_s=1.0)
    assert record.status == "interrupted"
    assert not is_alive(started.child)


def test_a_run_elsewhere_cannot_be_stopped_from_here(tmp_path: Path) -> None:
    from rollbook.runs.jobs.ledger import RunStart

    ledger = Ledger(tmp_path / "artifacts")
    ledger.start(RunStart(name="far", kind="sft", host="elsewhere", process=identify()))
    with pytest.raises(UsageError, match="runs on host elsewhere"):
        stop(ledger, "far")
