"""Ways in which a disk or a person damages a checkpoint after it was complete."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def change_a_byte(path: Path) -> None:
    """The size stays, so only the digest shows it."""
    with path.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        byte = file.read(1)
        file.seek(-3, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))


def remove(path: Path) -> None:
    path.unlink()


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {  # with what is said of it
    "cut off": (cut_off, r"{file} has [\d,]+ bytes instead of [\d,]+"),
    "changed": (change_a_byte, r"{file} was changed: its digest is not the recorded one"),
    "removed": (remove, r"{file} is missing"),
}
