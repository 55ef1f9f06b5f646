"""What a run was started with, kept under `artifacts/archives/<id>/` before it begins.

Taken at the start, because at the end the config and the code may no longer be the ones that ran. Secrets are
redacted. Nothing here can stop a run: what could not be captured is listed under `missing` in
`snapshot.json`, with the reason.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import psutil

from rollbook.records.atomic import replacing, write_atomic
from rollbook.records.code_state import CodeState, capture_code, write_code_diff
from rollbook.records.config import write_config
from rollbook.records.plain import encode_document, to_plain, utc_now
from rollbook.records.redact import redact_tree
from rollbook.records.redact_configs import redact_yaml
from rollbook.runs.jobs.fingerprint import Fingerprinter
from rollbook.runs.jobs.job import Job
from rollbook.runs.jobs.system import cpu_facts, query_gpus
from rollbook.version import __version__

_log = logging.getLogger("rollbook")
_VERSIONS_TIMEOUT_S = 20.0
_GPU_FIELDS = {
    "index": "index",
    "name": "name",
    "memory.total": "memory_total_mib",
    "driver_version": "driver",
}
_RECORDED_VARIABLES = re.compile(
    r"CUDA_VISIBLE_DEVICES|CONDA_DEFAULT_ENV|VIRTUAL_ENV|HF_HOME|HF_HUB_OFFLINE|TOKENIZERS_PARALLELISM"
    r"|(?:LOCAL_)?RANK|WORLD_SIZE|MASTER_(?:ADDR|PORT)|OMP_NUM_THREADS|SLURM_JOB_ID|WANDB_(?:MODE|PROJECT)"
    r"|(?:NCCL|PYTORCH|TORCH|VLLM|ROLLBOOK)_.*"
)
_LIST_PACKAGES = (
    "import sys; sys.path = [path for path in sys.path if path]\n"  # without the working directory
    "import json, platform; from importlib import metadata\n"
    "found = {d.metadata['Name']: d.version for d in metadata.distributions() if d.metadata['Name']}\n"
    "print(json.dumps({'python': platform.python_version(), 'packages': dict(sorted(found.items()))}))"
)


@dataclass(frozen=True)
class Snapshot:
    """What was written, and why the rest was not."""

    files: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


def take_snapshot(
    directory: Path, job: Job, code: CodeState | None = None, *, of_this_process: bool = False
) -> Snapshot:
    """Write everything that can be known of a job before it starts. Never raises.

    `of_this_process`: the job is what this very process does.
    """
    snapshot = Snapshot()
    versions = _own_versions if of_this_process else partial(_versions, job)
    parts: dict[str, Callable[[Path], None]] = {
        "command.json": lambda path: _write_json(path, _command(job)),
        "code.diff": lambda path: write_code_diff(path, code or capture_code(_code_of(job))),
        "versions.json": lambda path: _write_json(path, versions()),
        "host.json": lambda path: _write_json(path, _host(snapshot)),
    }
    if job.config is not None:
        parts["config.json"] = lambda path: write_config(path, job.config)
    if job.config_path is not None:
        source = job.config_path
        parts["config.yaml"] = lambda path: _copy_config(path, source)
    if job.data:
        parts["data.json"] = lambda path: _write_json(path, Fingerprinter().files(job.data))
    for name, write in parts.items():
        try:
            write(directory / name)
            snapshot.files.append(name)
        except Exception as error:  # a broken package's metadata, a full disk: the run is worth more
            snapshot.missing[name] = f"{type(error).__name__}: {error}"
    try:
        summary = {"taken_at": utc_now(), "files": snapshot.files, "missing": snapshot.missing}
        _write_json(directory / "snapshot.json", summary)
    except Exception as error:
        snapshot.missing["snapshot.json"] = f"{type(error).__name__}: {error}"
    return snapshot


def capture_job_code(job: Job) -> CodeState | None:
    """The user's repository as it stands now; None if even looking at it went wrong."""
    try:
        return capture_code(_code_of(job))
    except Exception as error:
        _log.warning("the state of the code could not be captured: %r", error)
        return None


def git_of(code: CodeState | None) -> dict[str, Any] | None:
    """What the history keeps of it."""
    if code is None or code.root is None:
        return None
    found = {"sha": code.sha, "dirty": code.dirty, "branch": code.branch}
    return {key: value for key, value in found.items() if value is not None}


def _code_of(job: Job) -> Path:
    """The script that runs, if the command names one, else where it runs."""
    directory = (job.cwd or Path.cwd()).absolute()
    scripts = (directory / word for word in job.command if word.endswith((".py", ".sh")))
    return next((script for script in scripts if script.is_file()), directory)


def _command(job: Job) -> dict[str, Any]:
    environment = {**os.environ, **job.env}
    recorded = {
        name: value
        for name, value in sorted(environment.items())
        if _RECORDED_VARIABLES.fullmatch(name) or name in job.env
    }
    return {
        "command": redact_tree(list(job.command)),
        "cwd": str(job.cwd or Path.cwd()),
        "env": redact_tree(recorded),
    }


def _copy_config(path: Path, source: Path) -> None:
    """Copy the file with its comments, without its secrets, and no more open to others than it is."""
    text = source.read_bytes().decode("utf-8", "surrogateescape")
    with replacing(path) as file:
        os.fchmod(file.fileno(), source.stat().st_mode & os.fstat(file.fileno()).st_mode & 0o777)
        file.write(redact_yaml(text).encode("utf-8", "surrogateescape"))


def _versions(job: Job) -> dict[str, Any]:
    """The versions of the interpreter that will run the command, which need not be ours."""
    interpreter = interpreter_of(job.command, {**os.environ, **job.env}.get("PATH"))
    listed = subprocess.run(
        [interpreter or sys.executable, "-c", _LIST_PACKAGES],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_VERSIONS_TIMEOUT_S,
        cwd=job.cwd,
        env={**os.environ, **job.env},
        check=True,
    )
    return {
        "rollbook": __version__,
        "interpreter": interpreter or sys.executable,
        **orjson.loads(listed.stdout),
    }


def _own_versions() -> dict[str, Any]:
    """The versions of this process, by the names of installed directories: metadata takes far longer."""
    packages: dict[str, str] = {}
    for place in sys.path:
        for found in Path(place or ".").glob("*.dist-info"):
            name, _, version = found.name.removesuffix(".dist-info").partition("-")
            packages.setdefault(name.replace("_", "-"), version)
    return {
        "rollbook": __version__,
        "interpreter": sys.executable,
        "python": platform.python_version(),
        "packages": dict(sorted(packages.items())),
    }


def interpreter_of(command: list[str], path: str | None = None) -> str | None:
    """The Python behind a command: `python x.py`, or a script such as `torchrun` by its first line."""
    program = shutil.which(command[0], path=path)
    if program is None:
        return None
    if Path(program).name.startswith("python"):
        return program
    try:
        with Path(program).open("rb") as file:
            first = file.readline(512)
    except OSError:
        return None
    words = first[2:].split() if first.startswith(b"#!") else []
    found = [os.fsdecode(word) for word in words if Path(os.fsdecode(word)).name.startswith("python")]
    return shutil.which(found[0], path=path) if found else None


def _host(snapshot: Snapshot) -> dict[str, Any]:
    try:
        gpus = query_gpus(_GPU_FIELDS) if shutil.which("nvidia-smi") else []
    except Exception as error:
        gpus, snapshot.missing["gpus"] = [], str(error)
    return {
        "hostname": socket.gethostname(),
        "os": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "cpu_model": cpu_facts().get("model name") or platform.processor() or None,
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
    }


def _write_json(path: Path, content: Any) -> None:
    write_atomic(path, encode_document(to_plain(content)))
