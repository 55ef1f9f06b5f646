"""How far a command is: passes over the inputs, each of so many bytes."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    def begin(self, what: str, size: int) -> None:
        """A pass over so many bytes begins; `what` is done in it, such as `reading`."""

    def advance(self, size: int) -> None:
        """So many bytes more are done."""


class _NoProgress:
    def begin(self, what: str, size: int) -> None:
        pass

    def advance(self, size: int) -> None:
        pass


NO_PROGRESS: Progress = _NoProgress()
