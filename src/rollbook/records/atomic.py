"""Whole files appear complete or not at all.

A reader, or the next process after a power cut, sees either the old content or the new one: write aside,
fsync, rename, fsync the directory. A file that is replaced keeps its mode. A symlink is replaced, not
followed: somebody else may have put it there to have another file overwritten. Only where a user named the
path (`follow_links`) does it keep pointing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from rollbook.errors import WriteError

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{12}\.tmp", re.DOTALL)
_BUFFER = 1 << 20


def write_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace a file whole. `durable=False` spares the disk where losing the newest version is harmless."""
    with replacing(path, durable=durable) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(
    path: Path, *, durable: bool = True, is_locked: bool = False, follow_links: bool = False
) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when all is written; after any exception nothing is left of it.

    `is_locked`: nobody else replaces it now, so what a killed process left of its attempt is removed.
    """
    target = path.resolve() if follow_links and path.is_symlink() else path
    aside = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        make_directory(target.parent)
        if is_locked:
            remove_leftovers(target.parent, of=target.name)
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise WriteError(f"{path}: cannot write here: {error.strerror or error}") from error
    try:
        with os.fdopen(descriptor, "wb", buffering=_BUFFER) as file:
            _take_mode_of(target, file.fileno())  # before the data: a private file is never open to others
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        aside.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        if not isinstance(error, OSError):
            raise
        raise WriteError(
            f"{path}: not written ({error.strerror or error}); the previous content is untouched"
        ) from error
    if durable:
        fsync_directory(target.parent)


class Writeback:
    """Has the disk begin with what is appended to a large file, and does not wait for it.

    An fsync that comes later finds little left to do.
    """

    def __init__(self, descriptor: int, begun: int = 0) -> None:
        self._descriptor, self._begun = descriptor, begun

    def up_to(self, end: int) -> None:
        """The file was written up to `end`."""
        if end - self._begun >= _BUFFER and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # what cannot be written is said by the fsync
                # Linux begins to write what is said to be needed no more.
                os.posix_fadvise(self._descriptor, self._begun, end - self._begun, os.POSIX_FADV_DONTNEED)
            self._begun = end


def copy_whole(source: Path, path: Path) -> None:
    """Replace a file by a copy of another."""
    with source.open("rb") as original, replacing(path) as file:
        shutil.copyfileobj(original, file, _BUFFER)


def remove_leftovers(directory: Path, *, of: str | None = None) -> None:
    """Remove what killed processes left here, of one file or of all; for the one process that writes them."""
    for entry in directory.glob(".*.tmp"):
        leftover = _LEFTOVER.fullmatch(entry.name)
        if leftover and of in (None, leftover["name"]):
            entry.unlink(missing_ok=True)


def make_directory(directory: Path) -> None:
    """Create a directory and its missing parents, each so that it survives a power cut."""
    missing = []
    while not directory.is_dir():
        missing.append(directory)
        directory = directory.parent
    for new in reversed(missing):
        try:
            new.mkdir(exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(new)) from None
        fsync_directory(new.parent)


def fsync_directory(directory: Path) -> None:
    """Make a rename or a new name survive a power cut."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise WriteError(
            f"{directory}: the disk did not confirm a new name here ({error.strerror or error})"
        ) from error


def _take_mode_of(target: Path, descriptor: int) -> None:
    with contextlib.suppress(FileNotFoundError):  # a new file has the mode that the umask gave it
        if not target.is_symlink():
            os.fchmod(descriptor, target.stat().st_mode & 0o777)
