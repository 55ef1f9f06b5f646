"""Training processes to be killed, that begin at once.

Importing torch and transformers takes seconds, training a tiny model takes less. So one process imports them
and every trainer is a fork of it: a process of its own with its own signals, output and exit status, as
`python -m rollbook.sft.main` is in all but the import.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import runpy
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

PATIENCE_S = 300.0
PRELOADED = (
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "matplotlib.pyplot",
    "rollbook.sft.train",
    "rollbook.rl.train",
)
_forks = multiprocessing.get_context("forkserver")


class TrainingProcess:
    """A running `python -m MODULE WORDS`; leaving the block kills it."""

    def __init__(self, module: str, *words: object, **environment: str) -> None:
        file, name = tempfile.mkstemp(prefix="rollbook-trainer-")
        os.close(file)
        self._output = Path(name)
        _forks.set_forkserver_preload(list(PRELOADED))
        self._process: BaseProcess = _forks.Process(
            target=_run,
            args=(
                module,
                [str(word) for word in words],
                name,
                str(Path.cwd()),
                {**os.environ, **environment},
            ),
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def output(self) -> str:
        """What it has printed so far, on stdout and stderr."""
        return self._output.read_text()

    def wait_for(self, pattern: str) -> None:
        """Waits until a line that begins like this is printed."""
        deadline = time.monotonic() + PATIENCE_S
        while not re.search(f"^(?:{pattern})", self.output, re.MULTILINE):
            assert self.is_alive(), f"it ended without a line {pattern!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no line {pattern!r}:\n{self.output}"
            time.sleep(0.005)

    def send_signal(self, number: signal.Signals) -> None:
        if self.is_alive():
            os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit status when it has ended; minus the signal's number if one killed it."""
        self._process.join(PATIENCE_S)
        assert self._process.exitcode is not None, f"it does not end:\n{self.output}"
        return self._process.exitcode

    def __enter__(self) -> TrainingProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._output.unlink()


def run(module: str, *words: object, **environment: str) -> str:
    """Runs one to its good end; returns what it printed."""
    with TrainingProcess(module, *words, **environment) as trainer:
        assert trainer.wait() == 0, trainer.output
        return trainer.output


def start_several(
    count: int, module: str, *words: object, own: Mapping[int, Mapping[str, str]] = {}, **environment: str
) -> list[TrainingProcess]:
    """Starts so many together, as torchrun does; `own` is what one of them has in its environment alone."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    together = environment | {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        TrainingProcess(module, *words, **together, RANK=str(rank), LOCAL_RANK=str(rank), **own.get(rank, {}))
        for rank in range(count)
    ]


def run_several(count: int, module: str, *words: object, **environment: str) -> str:
    """Runs so many to their good end; returns what they printed."""
    trainers = start_several(count, module, *words, **environment)
    try:
        codes = [trainer.wait() for trainer in trainers]
        output = "".join(trainer.output for trainer in trainers)
        assert codes == [0] * count, f"{codes}:\n{output}"
        return output
    finally:
        for trainer in trainers:
            trainer.__exit__()


def _run(module: str, words: list[str], output: str, directory: str, environment: dict[str, str]) -> None:
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    assert "torch" in sys.modules, f"no longer importable: {PRELOADED}"
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *words]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception:  # what the interpreter does at the end of a program, and a fork does not
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()
