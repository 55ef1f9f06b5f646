"""system.jsonl says what a run takes, and a sampler that fails is nobody's problem."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollbook.errors import RollbookError
from rollbook.records.record import read_records
from rollbook.runs.jobs.job import Job
from rollbook.runs.jobs.ledger import Ledger, Status
from rollbook.runs.jobs.supervise import supervise
from rollbook.runs.jobs.system import SYSTEM_LOG, Machine, SystemSample, SystemSampler, query_gpus
from supervision import poll

BUSY = """
import subprocess, sys, time
kept = bytearray(60 << 20)
child = subprocess.Popen([sys.executable, "-c", "kept = bytearray(60 << 20)\\nwhile True: pass"])
print("ready", flush=True)
while True: pass
"""


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi of our own that prints the file it is given."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec sh "{tmp_path}/answer"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "answer"


def test_a_busy_tree_of_processes_is_seen_whole(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.3)
        machine = Machine(tmp_path, child.pid)
        time.sleep(1.0)
        sample = machine.sample()
    finally:
        os.killpg(child.pid, 9)
        child.wait()
    assert sample.processes == 2
    assert sample.rss_bytes is not None and sample.rss_bytes > 120 << 20
    assert sample.cpu_percent is not None and sample.cpu_percent > 5
    assert sample.machine_cpu_percent is not None and 0 < sample.machine_cpu_percent <= 100
    assert sample.machine_memory_total_bytes and sample.machine_memory_used_bytes
    assert 0 < sample.machine_memory_used_bytes < sample.machine_memory_total_bytes
    assert sample.disk_free_bytes and sample.disk_total_bytes
    assert 0 < sample.disk_free_bytes <= sample.disk_total_bytes


def test_a_run_leaves_samples(tmp_path: Path) -> None:
    job = Job(
        name="demo",
        command=["sleep", "2"],
        artifacts=tmp_path / "artifacts",
        sample_every_s=0.2,
        grace_s=1,
    )
    end = supervise(job, terminal=None)
    assert end.status == Status.COMPLETED
    archive = Ledger(job.artifacts).get("latest").archive
    assert archive is not None
    samples = list(read_records(tmp_path / archive / SYSTEM_LOG, SystemSample))
    assert len(samples) >= 2
    assert samples[0].processes == 1
    assert [sample.at for sample in samples] == sorted(sample.at for sample in samples)


def samples_of(directory: Path, number: int) -> list[SystemSample]:
    sampler = SystemSampler(directory, os.getpid(), every_s=0.01)

    def enough() -> bool:
        sampler.tick()
        path = directory / SYSTEM_LOG
        return path.exists() and path.read_bytes().count(b"\n") >= number

    poll(enough)
    sampler.close()
    return list(read_records(directory / SYSTEM_LOG, SystemSample))


def test_a_sampler_that_cannot_write_gives_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / SYSTEM_LOG).mkdir()
    sampler = SystemSampler(tmp_path, os.getpid(), every_s=0.01)
    for _ in range(20):
        time.sleep(0.01)
        sampler.tick()
    sampler.close()
    assert caplog.text.count("no longer sampled") == 1


def test_off_is_off(tmp_path: Path) -> None:
    sampler = SystemSampler(tmp_path, os.getpid(), every_s=0)
    sampler.tick()
    sampler.close()
    assert list(tmp_path.iterdir()) == []


def test_gpus_are_read(tmp_path: Path, gpus: Path) -> None:
    gpus.write_text(
        "echo '0, NVIDIA H200, 37, 1024, 143771, 41, 120.50'\n"
        "echo '1, NVIDIA H200, [N/A], 0, 143771, 40, [Not Supported]'\n"
    )
    assert samples_of(tmp_path, 2)[1].gpus == [
        {
            "index": 0,
            "name": "NVIDIA H200",
            "percent": 37,
            "memory_used_mib": 1024,
            "memory_total_mib": 143771,
            "temperature_c": 41,
            "power_w": 120.5,
        },
        {
            "index": 1,
            "name": "NVIDIA H200",
            "percent": None,
            "memory_used_mib": 0,
            "memory_total_mib": 143771,
            "temperature_c": 40,
            "power_w": None,
        },
    ]


def test_a_driver_that_fails_is_asked_three_times_and_no_more(tmp_path: Path, gpus: Path) -> None:
    gpus.write_text(f"echo asked >> {tmp_path}/asked; echo driver mismatch; exit 9\n")
    assert [sample.gpus for sample in samples_of(tmp_path, 6)] == [None] * 6
    assert (tmp_path / "asked").read_text().count("asked") == 3


def test_a_driver_that_hangs_is_given_up(gpus: Path) -> None:
    gpus.write_text("exec sleep 600\n")
    with pytest.raises(RollbookError, match="did not answer"):
        query_gpus({"index": "index"}, timeout_s=0.2)


def test_a_driver_that_hangs_does_not_hold_up_the_loop(tmp_path: Path, gpus: Path) -> None:
    gpus.write_text("exec sleep 600\n")
    sampler = SystemSampler(tmp_path, os.getpid(), every_s=0.01)
    for _ in range(10):
        time.sleep(0.01)
        sampler.tick()
    sampler.close()
    assert not (tmp_path / SYSTEM_LOG).exists()  # the sample still waits; nobody waited for it


def test_a_machine_without_gpus_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RollbookError, match="not installed"):
        query_gpus({"index": "index"})
    assert samples_of(tmp_path, 1)[0].gpus is None
