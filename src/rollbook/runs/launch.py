"""Starts a job that trains, of any kind, as a supervised child; and the child's side of it.

    launch = Launch(kind="sft", module="rollbook.sft.main", settings=settings, name=..., output_dir=..., ...)
    run_job(launch.job(), detach=detach, as_json=as_json)              # in the command (cli/launched.py)

    run_child("rollbook.sft.main", SftSettings, train)                 # in the module

The child gets its settings through its environment: they are in no list of processes, and no file has to
exist before the child has locked its directory.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from rollbook.errors import OtherProcessError, RollbookError, UsageError, missing_extra
from rollbook.records.printable import printable
from rollbook.records.run_info import TYPED, command_line
from rollbook.runs.children import python_command
from rollbook.runs.jobs.job import Job

_SETTINGS = "ROLLBOOK_SETTINGS"
GRACE_S = 120.0  # a step and a checkpoint have to fit in
RECORD_RESULT = "rollbook.runs.jobs.finish:record_result"

S = TypeVar("S", bound=msgspec.Struct)
Log = Callable[[str], None]


class Launch(msgspec.Struct, kw_only=True, frozen=True):
    """All that a job needs to be started. `module` is run with `python -m` and calls `run_child`."""

    kind: str
    module: str
    settings: msgspec.Struct
    name: str
    output_dir: Path
    artifacts: Path
    config: Path | None = None  # where the result is handed over
    data: list[Path] = []
    resume: bool = False
    overwrite: bool = False
    resumed_from: str | None = None

    def job(self) -> Job:
        refuse_without_torch()  # before it is entered in the history
        command = python_command(self.module, "--artifacts", str(self.artifacts))
        command += ["--resume"] if self.resume else []
        command += ["--overwrite"] if self.overwrite else []
        return Job(
            name=self.name,
            command=command,
            env={
                _SETTINGS: msgspec.json.encode(self.settings).decode(),
                TYPED: msgspec.json.encode(command_line()).decode(),
            },
            artifacts=self.artifacts,
            kind=self.kind,
            config=msgspec.to_builtins(self.settings),
            config_path=self.config.absolute() if self.config else None,
            output_dir=self.output_dir.absolute(),
            data=[path.absolute() for path in self.data],
            resumed_from=self.resumed_from,
            grace_s=GRACE_S,
            finisher=RECORD_RESULT,
            ends_diverged=True,
        )


def refuse_without_torch() -> None:
    try:
        found = importlib.util.find_spec("torch")
    except ValueError:  # a module that somebody put there by hand
        found = None
    if found is None:
        raise RollbookError(missing_extra(ModuleNotFoundError(name="torch")) or "")


class Started(NamedTuple, Generic[S]):
    """What a child was started with."""

    settings: S
    artifacts: Path
    resume: bool
    overwrite: bool


def run_child(
    module: str,
    settings: type[S],
    train: Callable[[Started[S], Log], object],
) -> None:
    """Train as the settings say; exits with the code of a RollbookError, after printing its message.

    Where `settings.processes` is more than one, this process becomes the torchrun that starts them.
    """
    try:
        started = _read(settings)
        processes = getattr(started.settings, "processes", 1)
        if processes > 1 and "RANK" not in os.environ:
            _become_torchrun(module, processes)
        train(started, log_line)
    except OtherProcessError as error:
        sys.exit(error.exit_code)
    except RollbookError as error:
        print(printable(f"rollbook: {error}"), file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error)) is None:
            raise
        print(f"rollbook: {missing}", file=sys.stderr, flush=True)
        sys.exit(1)


def log_line(text: str) -> None:
    print(text, flush=True)


def _read(settings: type[S]) -> Started[S]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--artifacts", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--overwrite", action="store_true")
    given = parser.parse_args()
    if _SETTINGS not in os.environ:
        raise UsageError(f"this module is started by a command of rollbook; {_SETTINGS} is not set")
    decoded = msgspec.json.decode(os.environ[_SETTINGS], type=settings)
    return Started(decoded, given.artifacts, given.resume, given.overwrite)


def _become_torchrun(module: str, processes: int) -> None:
    own = ["--standalone", f"--nproc-per-node={processes}", "-m", module, *sys.argv[1:]]
    environment = os.environ | {
        "PYTHONSAFEPATH": "1",  # its children have no -P
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # as it would set it, with a warning
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(GRACE_S)),  # it would kill them after 30 s
    }
    command = python_command("rollbook.runs.torchrun", *own)
    os.execve(command[0], command, environment)
