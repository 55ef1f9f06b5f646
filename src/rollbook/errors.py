"""Every error a user can cause or meet, in one family.

A message says what happened, where (file, line or key), and what to type next. The command line prints
it without a traceback and exits with `exit_code`.
"""

from __future__ import annotations

from pathlib import Path


class RollbookError(Exception):
    exit_code = 1


class UsageError(RollbookError):
    """Wrong arguments: an unknown key, a value of the wrong type."""

    exit_code = 2


class BadLineError(RollbookError):
    """A complete line of a JSONL file that is not what it must be."""

    def __init__(self, path: Path, line: int, why: str) -> None:
        super().__init__(f"{path}:{line}: {why}")
        self.path, self.line, self.why = path, line, why

    def __reduce__(self) -> tuple[type[BadLineError], tuple[Path, int, str]]:
        return type(self), (self.path, self.line, self.why)  # errors cross process pools


class BadFileError(RollbookError):
    """A whole-file record (run.json, config.json, a logtree) that cannot be read."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path, self.why = path, why

    def __reduce__(self) -> tuple[type[BadFileError], tuple[Path, str]]:
        return type(self), (self.path, self.why)


class Interrupted(Exception):
    """A second signal: stop at once."""


class LockedError(RollbookError):
    """Another writer holds the file."""


class WriteError(RollbookError):
    """The operating system refused a write; everything acknowledged before it is safe."""
