"""What the fault tests share: processes to kill, lines that prove they are whole, a seed to start from again.

Set ROLLBOOK_FAULT_SEED to repeat the choices of a failed campaign; where exactly a kill lands is up to the
scheduler.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest

from rollbook.records.jsonl import EVERY_LINE, ON_CLOSE, SyncPolicy, every_ms

HERE = Path(__file__).parent
PATIENCE = 60.0
NAMESPACES = {
    "unprivileged": ["unshare", "--user", "--map-root-user", "--mount"],
    "root": ["unshare", "--mount"],
}

POLICIES: dict[str, SyncPolicy] = {
    "every_line.jsonl": EVERY_LINE,
    "every_ms.jsonl": every_ms(3),
    "on_close.jsonl": ON_CLOSE,
    "big.jsonl": ON_CLOSE,
}
ACKS = "acks"


def make_line(identity: str, size: int) -> bytes:
    """A line whose every byte follows from its identity and size."""
    pad = (f"{identity} é\u2028 " * (size // len(identity) + 1))[:size]
    return orjson.dumps({"id": identity, "size": size, "pad": pad})


def identity_of(line: bytes) -> str:
    """The identity of a whole line; any changed, lost or foreign byte is an AssertionError."""
    found = orjson.loads(line)
    assert line == make_line(found["id"], found["size"]), f"a damaged line: {line[:200]!r}"
    identity = found["id"]
    assert isinstance(identity, str)
    return identity


@contextmanager
def seeded(what: str) -> Iterator[random.Random]:
    """Random choices whose seed is told when something fails."""
    seed = int(os.environ.get("ROLLBOOK_FAULT_SEED") or random.SystemRandom().randrange(2**32))
    try:
        yield random.Random(seed)
    except BaseException as error:
        error.add_note(f"{what}: ROLLBOOK_FAULT_SEED={seed} makes the same choices again")
        raise


def run(
    command: list[str], *, patience: float = PATIENCE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A command to its end, also where there is no such program."""
    every = {**os.environ, **environment}
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=patience, check=False, env=every
        )
    except FileNotFoundError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def mountable(rights: str, directory: Path) -> list[str]:
    """What a command begins with that is to mount a file system of its own; skips the test where none can."""
    tried = run([*NAMESPACES[rights], "mount", "-t", "tmpfs", "none", str(directory)])
    if tried.returncode:
        pytest.skip(f"no tmpfs can be mounted here with the rights {rights!r}: {tried.stderr.strip()}")
    return NAMESPACES[rights]


class Victim:
    """A process to be killed; one that ends in any other way than expected fails the test with its words."""

    def __init__(self, script: str, *arguments: object) -> None:
        command = [sys.executable, str(HERE / script), *map(str, arguments)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            self._expect(-9)
            raise AssertionError("the victim was killed by someone else")

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """SIGKILL. A forked child of the victim, if it made one, lives until `forget`."""
        self._process.kill()
        self._expect(-9)

    def kill_unless_done(self) -> bool:
        """True when it had come to its good end before the SIGKILL."""
        self._process.kill()
        return self._expect(-9, 0) == 0

    def _expect(self, *codes: int) -> int:
        found = self._process.wait(PATIENCE)
        if found not in codes:
            self.forget()
            assert self._process.stderr is not None
            raise AssertionError(f"the victim ended with {found}:\n{self._process.stderr.read()}")
        return found

    def forget(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def __enter__(self) -> Victim:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.__exit__(None, None, None)
