"""Commands that begin at once: forks of a process that has imported torch, transformers and rollbook.

    done = preloaded.run("rollbook", "sft", "config.yaml", cwd=directory)   # as subprocess.run
    with preloaded.Process(["python", "-m", MODULE, *words], stdout=file, stderr=file) as process: ...

Importing torch and transformers takes seconds, training a tiny model takes less. A fork has its own signals,
output and exit status: it is a started process in all but the imports. What these read from the environment
is fixed, so a command with other values there is refused here and is to be started as any other. So is one
whose own start is tested, or that must not find torch loaded.
"""

from __future__ import annotations

import functools
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from helpers import typed

PATIENCE_S = 300.0
_ENVIRONMENT = dict(os.environ)  # before any test changes it
# Those of the package `datasets` are not among them: it is not imported.
_READ_BY_IMPORTS = re.compile(
    r"(ATEN|HF(?!_DATASETS)|HUGGINGFACE|TRANSFORMERS|TORCH|PYTORCH|CUDA|OMP|MKL|LC)_|MPL|LANG"
    r"|PYTHON(WARNINGS|IOENCODING|UTF8|HASHSEED|UNBUFFERED)"
)


class Process:
    """A running command; leaving the block kills it. The first of its words is `rollbook` or `python`."""

    def __init__(
        self,
        words: Sequence[object],
        *,
        stdout: IO[Any],
        stderr: IO[Any],
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        env = dict(os.environ if env is None else env)
        unlike = dict(_read_by_imports(env) ^ _read_by_imports(_started_with()))
        assert not unlike, f"imports read {sorted(unlike)} from the environment; start this with subprocess"
        with open(os.devnull) as stdin:  # noqa: PTH123
            files = [file.fileno() for file in (stdin, stdout, stderr)]
            self._connection = typed.send(
                _address(), list(map(str, words)), str(cwd or Path.cwd()), env, files
            )
        self.returncode: int | None = None
        self.pid = typed.receive(self._connection)

    def poll(self) -> int | None:
        """Its exit status once it has ended; minus the signal's number if one killed it."""
        return self._ended_within(0)

    def wait(self, timeout: float = PATIENCE_S) -> int:
        """Waits for its end and returns its exit status."""
        code = self._ended_within(timeout)
        assert code is not None, f"process {self.pid} does not end"
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _ended_within(self, seconds: float) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], seconds)[0]:
            self.returncode = typed.receive(self._connection)
        return self.returncode

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()
        self._connection.close()


def run(
    *words: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, as `subprocess.run` does, with its output captured as text."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with Process(words, stdout=out, stderr=err, cwd=cwd, env=env) as process:
            code = process.wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(list(map(str, words)), code, out.read(), err.read())


def installed_environment() -> dict[str, str]:
    """The environment of a shell that finds this installation."""
    return {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


def typed_environment(directory: Path) -> dict[str, str]:
    """The same, but `rollbook` is a preloaded one, by a script in `directory`."""
    script = directory / "rollbook"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -SI "{typed.__file__}" rollbook "$@"\n')
    script.chmod(0o755)
    installed = installed_environment()
    return {
        **installed,
        "PATH": os.pathsep.join([str(directory), installed["PATH"]]),
        typed.ADDRESS: _address(),
    }


def _read_by_imports(environment: Mapping[str, str]) -> set[tuple[str, str]]:
    return {(name, value) for name, value in environment.items() if _READ_BY_IMPORTS.match(name)}


def _started_with() -> dict[str, str]:
    return {**_ENVIRONMENT, "OMP_NUM_THREADS": "1"}  # no threads, which a fork would not have


_kept: list[subprocess.Popen[str]] = []


@functools.cache
def _address() -> str:
    """Where the process listens that is forked; it ends with this one, and with it whatever still runs."""
    server = subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).with_name("preloaded_server.py"))],
        env=_started_with(),
        stdin=subprocess.PIPE,  # never written: its end says that we have ended
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    assert address, "the process that imports everything could not"
    _kept.append(server)
    return address
