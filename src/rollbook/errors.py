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

    def __init__(self, path: Path, line: int, why: str, unit: str = "line") -> None:
        """`unit` is "element" where the number is not that of a line but of an element of an array."""
        super().__init__(f"{path}:{line}: {why}" if unit == "line" else f"{path}: {unit} {line}: {why}")
        self.path, self.line, self.why, self.unit = path, line, why, unit

    def __reduce__(self) -> tuple[type[BadLineError], tuple[Path, int, str, str]]:
        return type(self), (self.path, self.line, self.why, self.unit)  # errors cross process pools


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


class OtherProcessError(RollbookError):
    """Another process of the same job has failed. It says why, and this one ends without a word.

    It ends with 0: a launcher that sees this one fail would end the other before it has said anything.
    """

    exit_code = 0

    def __init__(self, rank: int) -> None:
        super().__init__(f"process {rank} of this job failed; its own message says why")


class WriteError(RollbookError):
    """The operating system refused a write; everything acknowledged before it is safe."""


# What is imported only by those who need it -> the extra that brings it.
_EXTRAS = {"torch": "train", "transformers": "train", "peft": "train", "safetensors": "train", "ray": "ray"}


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """What to type where a package of an extra is not installed; None for any other module."""
    package = (error.name or "").partition(".")[0]
    extra = _EXTRAS.get(package)
    return None if extra is None else f"this needs {package}; type: pip install 'rollbook[{extra}]'"
