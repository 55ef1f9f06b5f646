"""system.jsonl: what a run takes from its machine, every few seconds.

Read by psutil in the supervisor's loop, in a few milliseconds; the GPUs are asked through nvidia-smi where it
is installed, without waiting for it. There is no thread: the kernel's signal to a child
whose parent dies would come once a thread. A sampler that fails says so once and stops; the run does not
notice. Memory is the sum of the processes' resident pages, so pages they share count more than once.
"""

from __future__ import annotations

import contextlib
import csv
import logging
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from rollbook.errors import RollbookError
from rollbook.records.jsonl import JsonlWriter
from rollbook.records.plain import utc_now
from rollbook.records.record import Record
from rollbook.runs.jobs.processes import tree_of

SYSTEM_LOG = "system.jsonl"

_log = logging.getLogger("rollbook")
_FIRST_AFTER_S = 1.0
_NVIDIA_TIMEOUT_S = 5.0
_GPU_STRIKES = 3
_GPU_FIELDS = {
    "index": "index",
    "name": "name",
    "utilization.gpu": "percent",
    "memory.used": "memory_used_mib",
    "memory.total": "memory_total_mib",
    "temperature.gpu": "temperature_c",
    "power.draw": "power_w",
}


class SystemSample(Record, kw_only=True):
    at: str
    elapsed_s: float
    cpu_percent: float | None = None  # of the run's processes; 100 is one core
    rss_bytes: int | None = None
    processes: int | None = None
    machine_cpu_percent: float | None = None  # of all cores
    machine_memory_used_bytes: int | None = None
    machine_memory_total_bytes: int | None = None
    disk_free_bytes: int | None = None
    disk_total_bytes: int | None = None
    gpus: list[dict[str, Any]] | None = None


class SystemSampler:
    """Samples the processes below `child` into `directory` as `tick` is called; `every_s=0` is off."""

    def __init__(self, directory: Path, child: int, *, every_s: float) -> None:
        self._path, self._every_s = directory / SYSTEM_LOG, every_s
        self._machine = Machine(directory, child) if every_s > 0 else None
        self._due = time.monotonic() + min(_FIRST_AFTER_S, every_s)
        self._log: JsonlWriter | None = None
        self._sample: SystemSample | None = None  # waits for what the GPUs have to say
        self._gpus = GpuSeries()

    def tick(self) -> None:
        """Take a sample if one is due; call it at least once a second. Never raises, never waits."""
        if self._machine is None:
            return
        try:
            if self._sample is None and time.monotonic() >= self._due:
                self._due = time.monotonic() + self._every_s
                self._sample = self._machine.sample()
                self._gpus.ask()
            if self._sample is not None and not self._gpus.is_waiting():
                self._sample.gpus = self._gpus.answer
                self._write(self._sample)
                self._sample = None
        except (RollbookError, OSError, ValueError) as error:
            self._machine = None
            _log.warning("%s: no longer sampled: %s", self._path, error)

    def close(self) -> None:
        self._gpus.forget()
        if self._log is not None:
            with contextlib.suppress(RollbookError):
                self._log.close()

    def _write(self, sample: SystemSample) -> None:
        if self._log is None:
            self._log = JsonlWriter(self._path)
        self._log.append(sample.encode())


class GpuSeries:
    """Asks the GPUs again and again, until three times in a row there was no answer."""

    def __init__(self) -> None:
        self.answer: list[dict[str, Any]] | None = None
        self._strikes = 0 if shutil.which("nvidia-smi") else _GPU_STRIKES
        self._query: GpuQuery | None = None

    def ask(self) -> None:
        self.answer = None
        if self._strikes < _GPU_STRIKES:
            try:
                self._query = GpuQuery(_GPU_FIELDS)
            except RollbookError as error:
                self._strike(error)

    def is_waiting(self) -> bool:
        try:
            if self._query is None or not self._query.is_over():
                return self._query is not None
            self.answer = self._query.answer()
            self._strikes = 0
        except RollbookError as error:
            self._strike(error)
        self._query = None
        return False

    def forget(self) -> None:
        if self._query is not None:
            self._query.give_up()

    def _strike(self, error: RollbookError) -> None:
        self._strikes += 1
        if self._strikes == _GPU_STRIKES:
            _log.warning("the GPUs are no longer sampled: %s", error)


class Machine:
    """Counters as they stood at the last sample, from which rates are made."""

    def __init__(self, directory: Path, child: int) -> None:
        self._directory, self._child = directory, child
        self._began = self._last = time.monotonic()
        self._cpu_s: dict[int, float] = {}
        psutil.cpu_percent()  # each call is about the time since the one before
        self._tree()

    def sample(self) -> SystemSample:
        now = time.monotonic()
        elapsed, self._last = now - self._last, now
        sample = SystemSample(at=utc_now(), elapsed_s=round(now - self._began, 3))
        processes, rss_bytes, spent_s = self._tree()
        if processes:
            sample.processes, sample.rss_bytes = processes, rss_bytes
            sample.cpu_percent = round(100 * spent_s / max(elapsed, 1e-3), 1)
        sample.machine_cpu_percent = psutil.cpu_percent()
        memory, disk = psutil.virtual_memory(), psutil.disk_usage(str(self._directory))
        sample.machine_memory_total_bytes = memory.total
        sample.machine_memory_used_bytes = memory.total - memory.available
        sample.disk_free_bytes, sample.disk_total_bytes = disk.free, disk.total
        return sample

    def _tree(self) -> tuple[int, int, float]:
        """How many processes the run has, their memory, and the seconds of processor since the last look."""
        held, now = 0, {}
        for pid in tree_of(self._child):
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                held += process.memory_info().rss
                now[pid] = sum(process.cpu_times()[:2])
        spent_s = sum(max(0.0, seconds - self._cpu_s.get(pid, 0.0)) for pid, seconds in now.items())
        self._cpu_s = now
        return len(now), held, spent_s


class GpuQuery:
    """One question to nvidia-smi; `fields` maps its names to ours. RollbookError: why it was not answered."""

    def __init__(self, fields: dict[str, str], timeout_s: float = _NVIDIA_TIMEOUT_S) -> None:
        self._fields, self._timeout_s = fields, timeout_s
        self._asked_at = time.monotonic()
        program = shutil.which("nvidia-smi")
        if program is None:
            raise RollbookError("nvidia-smi is not installed")
        command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        try:
            # The answer of even the largest machine fits into a pipe, so it need not be read on the way.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        except OSError as error:
            raise RollbookError(f"nvidia-smi cannot be run: {error.strerror or error}") from error

    def is_over(self) -> bool:
        if self._process.poll() is not None:
            return True
        if time.monotonic() - self._asked_at < self._timeout_s:
            return False
        self.give_up()
        raise RollbookError(f"nvidia-smi did not answer within {self._timeout_s:g} s")

    def give_up(self) -> None:
        """Killed, and not waited for: with a stuck driver it cannot even be killed."""
        self._process.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def answer(self) -> list[dict[str, Any]]:
        if self._process.stdout is None:
            return []
        with self._process.stdout as pipe:
            text = pipe.read().decode("utf-8", "replace").strip()
        if self._process.returncode != 0:
            raise RollbookError(f"nvidia-smi failed: {text[:200] or self._process.returncode}")
        rows = csv.reader(text.splitlines(), skipinitialspace=True)
        return [dict(zip(self._fields.values(), map(_number, row), strict=False)) for row in rows if row]


def query_gpus(fields: dict[str, str], timeout_s: float = _NVIDIA_TIMEOUT_S) -> list[dict[str, Any]]:
    """Ask and wait for the answer."""
    query = GpuQuery(fields, timeout_s)
    while not query.is_over():
        time.sleep(0.02)
    return query.answer()


def _number(text: str) -> float | int | str | None:
    text = text.strip()
    if text.startswith("[") or text in ("", "N/A"):  # `[N/A]`, `[Not Supported]`
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def cpu_facts() -> dict[str, str]:
    """What the system says of its first processor, such as its `model name`, which psutil does not know."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in reversed(lines))
    return {key.strip(): value.strip() for key, _, value in pairs}
