"""A command that is typed in a shell, run as a fork of the process that `preloaded.py` has started.

Imports next to nothing, so that it begins at once: python -SI typed.py rollbook WORDS.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Sequence

ADDRESS = "ROLLBOOK_TEST_PRELOADED"  # a variable: where that process listens


def send(
    address: str, words: Sequence[str], cwd: str, environment: dict[str, str], files: Sequence[int]
) -> socket.socket:
    """Asks for a command with these as stdin, stdout and stderr; closing the connection kills it."""
    request = json.dumps({"words": words, "cwd": cwd, "environment": environment}).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    socket.send_fds(connection, [len(request).to_bytes(4, "big")], files)
    connection.sendall(request)
    return connection


def receive(connection: socket.socket) -> int:
    """The next answer: first the command's process id, then its exit status when it has ended."""
    answer = connection.recv(4, socket.MSG_WAITALL)
    assert len(answer) == 4, "the process that forks commands has ended"
    return int.from_bytes(answer, "big", signed=True)


def main() -> None:
    connection = send(os.environ[ADDRESS], sys.argv[1:], os.getcwd(), dict(os.environ), [0, 1, 2])  # noqa: PTH109
    receive(connection)
    code = receive(connection)
    if code < 0:  # ended by a signal, as the shell is to see
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
