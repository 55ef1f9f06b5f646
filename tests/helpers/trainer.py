"""Training processes to be killed, that begin at once: forks of what `preloaded` has imported.

Each is a process of its own with its own signals, output and exit status, as `python -m rollbook.sft.main` is
in all but the import.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Mapping

from helpers.places import REPOSITORY
from helpers.preloaded import PATIENCE_S, Process


class TrainingProcess:
    """A running `python -m MODULE WORDS`; leaving the block kills it."""

    def __init__(self, module: str, *words: object, **environment: str) -> None:
        self._output = tempfile.NamedTemporaryFile("a+", prefix="rollbook-trainer-")  # noqa: SIM115
        path = os.pathsep.join(filter(None, [str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH")]))
        self._process = Process(
            ["python", "-P", "-m", module, *words],
            stdout=self._output,
            stderr=self._output,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def output(self) -> str:
        """What it has printed so far, on stdout and stderr."""
        self._output.seek(0)
        return self._output.read()

    def wait_for(self, pattern: str) -> None:
        """Waits until a line that begins like this is printed."""
        deadline = time.monotonic() + PATIENCE_S
        while not re.search(f"^(?:{pattern})", self.output, re.MULTILINE):
            assert self.is_alive(), f"it ended without a line {pattern!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no line {pattern!r}:\n{self.output}"
            time.sleep(0.005)

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        """Its exit status when it has ended; minus the signal's number if one killed it."""
        return self._process.wait()

    def __enter__(self) -> TrainingProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.__exit__()
        self._output.close()


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
