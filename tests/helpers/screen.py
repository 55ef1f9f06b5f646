"""A command on a terminal of its own, and what it wrote there, byte for byte."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

ROLLBOOK = str(Path(sys.executable).parent / "rollbook")


def on_a_terminal(*words: str, directory: Path, columns: int = 80, code: int | None = 0) -> str:
    """What `rollbook WORDS` shows on a terminal that is so wide."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    process = subprocess.Popen(
        [ROLLBOOK, *words],
        cwd=directory,
        env={**environment, "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the last writer has gone
        while chunk := os.read(ours, 1 << 16):
            shown += chunk
    os.close(ours)
    returned = process.wait(timeout=120)
    text = shown.decode("utf-8", "surrogateescape").replace("\r\n", "\n")
    assert code is None or returned == code, f"{words}: {returned}\n{text}"
    return text
