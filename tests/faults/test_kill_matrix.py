"""Whatever is killed: the history says what happened, nothing is left running, the log is complete."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from rollbook.runs.jobs.ledger import Ledger, RunRecord, Status
from supervision import Talker, is_alive, poll, start_supervisor

faults = pytest.mark.faults  # the other cells of the matrix: `make test` has one or two of each scenario
SLACK_S = 4.0  # for a busy machine: scheduling, process start, the look every 0.1 s
STOPS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def one_end(artifacts: Path) -> RunRecord:
    """The folded record, after checking that the file itself holds exactly one end."""
    record = Ledger(artifacts).get("demo")
    events = yaml.safe_load((artifacts / "index.yaml").read_bytes())["runs"]
    assert [event["event"] for event in events] == ["started", "ended"]
    return record


@pytest.mark.parametrize(
    ("number", "to_group"),
    [
        pytest.param(signal.SIGTERM, False, id="SIGTERM-supervisor"),
        pytest.param(signal.SIGINT, True, id="SIGINT-group"),  # Ctrl-C
        pytest.param(signal.SIGTERM, True, id="SIGTERM-group", marks=faults),
        pytest.param(signal.SIGINT, False, id="SIGINT-supervisor", marks=faults),
        pytest.param(signal.SIGHUP, False, id="SIGHUP-supervisor", marks=faults),
        pytest.param(signal.SIGHUP, True, id="SIGHUP-group", marks=faults),
    ],
)
def test_a_stop_signal_is_forwarded_and_recorded(
    tmp_path: Path, number: signal.Signals, to_group: bool
) -> None:
    with Talker(tmp_path) as talker:
        (os.killpg if to_group else os.kill)(talker.supervisor.pid, number)
        assert talker.supervisor.wait(timeout=30) == 128 + number
        assert not any(is_alive(pid) for pid in talker.pids.values())
        record = one_end(talker.artifacts)
        assert (record.status, record.signal) == (Status.INTERRUPTED, number.name)
        assert record.exit_code == 128 + number
        talker.check_log()
        assert talker.log().count(f"goodbye after {number.name}".encode()) == 1


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGHUP,
        pytest.param(signal.SIGTERM, marks=faults),
        pytest.param(signal.SIGINT, marks=faults),
    ],
    ids=lambda number: number.name,
)
def test_what_ignores_the_signal_is_killed_after_the_grace_period(
    tmp_path: Path, number: signal.Signals
) -> None:
    with Talker(tmp_path, stubborn=True) as talker:
        talker.supervisor.send_signal(number)
        assert talker.supervisor.wait(timeout=30) == 128 + signal.SIGKILL
        assert not any(is_alive(pid) for pid in talker.pids.values())
        record = one_end(talker.artifacts)
        assert (record.status, record.signal) == (Status.INTERRUPTED, number.name)
        assert "grace period" in str(record.reason)
        talker.check_log()


def test_the_same_signal_again_kills_at_once(tmp_path: Path) -> None:
    with Talker(tmp_path, stubborn=True, grace_s=120) as talker:
        talker.supervisor.send_signal(signal.SIGINT)
        poll(lambda: b"goodbye after SIGINT" in talker.log())
        time.sleep(0.6)  # one key press may arrive twice; this is a second one
        talker.supervisor.send_signal(signal.SIGINT)
        talker.supervisor.wait(timeout=60)
        assert not any(is_alive(pid) for pid in talker.pids.values())
        assert one_end(talker.artifacts).status == Status.INTERRUPTED


@pytest.mark.parametrize(
    ("whom", "stubborn"),
    [
        pytest.param("supervisor", False, id="supervisor-polite"),
        pytest.param("group", True, id="group-stubborn"),
        pytest.param("supervisor", True, id="supervisor-stubborn", marks=faults),
        pytest.param("group", False, id="group-polite", marks=faults),
    ],
)
def test_a_killed_supervisor_leaves_nothing_running(tmp_path: Path, whom: str, stubborn: bool) -> None:
    with Talker(tmp_path, stubborn=stubborn) as talker:
        (os.killpg if whom == "group" else os.kill)(talker.supervisor.pid, signal.SIGKILL)
        killed_at = time.monotonic()
        talker.supervisor.wait()
        record = one_end(talker.artifacts)
        assert record.status == Status.LOST
        assert f"pid {talker.supervisor.pid}" in str(record.reason)
        talker.wait_until_gone()
        assert talker.last_sign_of_life() - killed_at < talker.grace_s + SLACK_S
        poll(lambda: b"[rollbook] the supervisor of this run is gone" in talker.log())
        talker.check_log()
        assert talker.log().count(b"goodbye after SIGTERM") == 1


def test_a_killed_child_is_a_failure(tmp_path: Path) -> None:
    with Talker(tmp_path) as talker:
        os.kill(talker.pids["talker"], signal.SIGKILL)
        assert talker.supervisor.wait(timeout=30) == 128 + signal.SIGKILL
        assert not any(is_alive(pid) for pid in talker.pids.values())
        record = one_end(talker.artifacts)
        assert (record.status, record.signal, record.exit_code) == (Status.FAILED, "SIGKILL", 137)
        assert "kill -9" in str(record.reason)
        assert record.extra["leftovers"] == 2
        talker.check_log()


@pytest.mark.parametrize("first", ["supervisor", pytest.param("talker", marks=faults)])
def test_both_killed_is_lost(tmp_path: Path, first: str) -> None:
    with Talker(tmp_path, stubborn=True) as talker:
        pids = [talker.supervisor.pid, talker.pids["talker"]]
        for pid in pids if first == "supervisor" else reversed(pids):
            os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        talker.supervisor.wait()
        assert one_end(talker.artifacts).status == Status.LOST
        talker.wait_until_gone()
        assert talker.last_sign_of_life() - killed_at < talker.grace_s + SLACK_S
        poll(lambda: b"[rollbook] the supervisor of this run is gone" in talker.log())
        talker.check_log()


def test_a_killed_guardian_is_replaced(tmp_path: Path) -> None:
    with Talker(tmp_path) as talker:
        (guardian,) = guardians_of(talker.supervisor.pid)
        os.kill(guardian, signal.SIGKILL)
        before = talker.said()
        poll(lambda: talker.said() > before + 20)
        talker.supervisor.send_signal(signal.SIGKILL)
        talker.supervisor.wait()
        talker.wait_until_gone()
        assert one_end(talker.artifacts).status == Status.LOST


def guardians_of(supervisor: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if parent == supervisor and b"rollbook.runs.jobs.guardian" in words:
                found.append(int(entry.name))
    return found


def run(artifacts: Path, *command: str) -> tuple[int, RunRecord]:
    done = start_supervisor(artifacts, *command).wait(timeout=60)
    return done, one_end(artifacts)


def test_an_exception_is_recorded_with_its_last_line(tmp_path: Path) -> None:
    code, record = run(
        tmp_path / "artifacts", sys.executable, "-c", "print('a'); raise ValueError('no such layer')"
    )
    assert (code, record.status, record.exit_code) == (1, Status.FAILED, 1)
    assert record.error == {
        "type": "ValueError",
        "message": "no such layer",
        "last_line": "ValueError: no such layer",
    }


def test_an_exit_code_is_mirrored(tmp_path: Path) -> None:
    code, record = run(tmp_path / "artifacts", "sh", "-c", "echo going; echo badly >&2; exit 7")
    assert (code, record.status, record.exit_code) == (7, Status.FAILED, 7)
    assert record.error == {"message": "badly", "last_line": "badly"}


def test_out_of_memory_in_the_child_is_a_failure_that_says_so(tmp_path: Path) -> None:
    hungry = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 29,) * 2)\n"
        "print('allocating', flush=True)\n"
        "kept = bytearray(1 << 30)\n"
    )
    code, record = run(tmp_path / "artifacts", sys.executable, "-c", hungry)
    assert (code, record.status) == (1, Status.FAILED)
    assert record.error is not None
    assert record.error["type"] == "MemoryError"


@pytest.mark.skipif(
    "ROLLBOOK_TEST_CGROUP" not in os.environ,
    reason="ROLLBOOK_TEST_CGROUP names no cgroup v2 directory with a memory.max that we may join",
)
def test_the_kernels_out_of_memory_kill_is_recognised(tmp_path: Path) -> None:
    procs = Path(os.environ["ROLLBOOK_TEST_CGROUP"]) / "cgroup.procs"
    supervisor = subprocess.Popen(
        [
            "sh",
            "-c",
            f'echo $$ > {procs}; exec "$@"',
            "sh",
            sys.executable,
            "-c",
            OOM_SUPERVISOR,
            str(tmp_path),
        ],
    )
    assert supervisor.wait(timeout=120) == 137
    record = Ledger(tmp_path / "artifacts").get("demo")
    assert (record.status, record.signal, record.oom) == (Status.FAILED, "SIGKILL", True)


OOM_SUPERVISOR = """
import sys
from pathlib import Path
from rollbook.runs.jobs.job import Job
from rollbook.runs.jobs.outcome import exit_code_for
from rollbook.runs.jobs.supervise import supervise
first = "open('/proc/self/oom_score_adj', 'w').write('1000')"  # the supervisor is not the one to go
eat = f"{first}\\nkept = []\\nwhile True: kept.append(bytearray(1 << 24))"
artifacts = Path(sys.argv[1]) / "artifacts"
job = Job(name="demo", command=[sys.executable, "-c", eat], artifacts=artifacts, grace_s=1)
sys.exit(exit_code_for(supervise(job)))
"""


@faults
@pytest.mark.parametrize("seed", range(40))
def test_killed_at_any_moment_while_it_talks_as_fast_as_it_can(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with Talker(tmp_path, stubborn=chance.random() < 0.5, pause_s=0.0) as talker:
        time.sleep(chance.uniform(0, 0.5))
        number = chance.choice([*STOPS, signal.SIGKILL, signal.SIGKILL])
        (os.killpg if chance.random() < 0.5 else os.kill)(talker.supervisor.pid, number)
        killed_at = time.monotonic()
        talker.supervisor.wait(timeout=60)
        expected = Status.LOST if number == signal.SIGKILL else Status.INTERRUPTED
        assert one_end(talker.artifacts).status == expected
        talker.wait_until_gone()
        assert talker.last_sign_of_life() - killed_at < talker.grace_s + SLACK_S
        if expected is Status.LOST:
            poll(lambda: b"[rollbook] the supervisor of this run is gone" in talker.log())
        talker.check_log()


@faults
@pytest.mark.parametrize("delay_ms", range(0, 1000, 40))
def test_killed_at_any_moment_of_the_start(tmp_path: Path, delay_ms: int) -> None:
    """Before the history has a start there is nothing to say; after it, the run is lost and nothing lives."""
    sign = tmp_path / "sign"
    child = "import os, sys, time\nopen(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(600)"
    supervisor = start_supervisor(tmp_path / "artifacts", sys.executable, "-c", child, str(sign))
    time.sleep(delay_ms / 1000)
    supervisor.kill()
    supervisor.wait()
    records = Ledger(tmp_path / "artifacts").records()
    assert [record.status for record in records] in ([], [Status.LOST])
    time.sleep(0.3)
    if sign.exists() and sign.read_text():
        assert records
        poll(lambda: not is_alive(int(sign.read_text())))
