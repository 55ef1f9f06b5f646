"""What the parts of an audit share: where findings go, what was compared, and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rollbook.audit.places import Places
from rollbook.audit.result import Audit, Check, Comparison, Finding, Kind, RankShare, verdict_of

LISTED = 20  # findings of one kind in one file; the others are counted

RESTORE = "restore the file from a copy"


class Auditor:
    def __init__(self, thing: Path, advance: Callable[[int], None] = lambda _: None) -> None:
        """`thing` is a run directory or an output, as it was typed; `advance` is told of bytes just read."""
        self.thing = thing
        self.root = thing.absolute() if thing.is_dir() else thing.absolute().parent
        self.places = Places()
        self.ranks: dict[int, RankShare] = {}
        self.notes: list[str] = []
        self.unanswered: list[str] = []
        self.bytes_read = 0
        self._advance = advance
        self._checks: dict[str, Check] = {}
        self._found: dict[tuple[Kind, str | None], list[Finding]] = {}

    def read(self, count: int) -> None:
        self.bytes_read += count
        self._advance(count)

    def find(
        self,
        kind: Kind,
        what: str,
        *,
        file: Path | None = None,
        line: int | None = None,
        key: str | None = None,
        next: str = RESTORE,
    ) -> None:
        name = None if file is None else self.name(file)
        alike = self._found.setdefault((kind, name), [])
        if len(alike) == LISTED:
            alike[-1].more += 1
            return
        alike.append(Finding(kind=kind, what=what, file=name, line=line, key=key, next=next))

    def count(self, kind: Kind, file: Path) -> int:
        """How many findings of this kind are listed for a file."""
        return len(self._found.get((kind, self.name(file)), ()))

    def findings(self) -> list[Finding]:
        """In the order in which their files were met."""
        return [finding for alike in self._found.values() for finding in alike]

    def has_found(self, file: Path) -> set[Kind]:
        """What is wrong with a file so far."""
        name = self.name(file)
        return {kind for kind, other in self._found if other == name}

    def check(self, name: str, agreed: bool | int, compared: int = 1, *, unknown: int = 0) -> None:
        known = self._checks.setdefault(name, Check(name=name))
        known.agreed += agreed
        known.compared += compared
        known.unknown += unknown

    def result(
        self,
        *,
        kind: str,
        id: str | None = None,
        is_running: bool = False,
        done: int,
        expected: int | None,
        unit: str = "iterations",
        comparisons: Sequence[Comparison] = (),
    ) -> Audit:
        findings = self.findings()
        return Audit(
            path=str(self.thing),
            kind=kind,
            id=id,
            verdict=verdict_of(findings, is_running=is_running),
            done=done,
            expected=expected,
            unit=unit,
            findings=findings,
            places=self.places.listed(),
            ranks=[share for _, share in sorted(self.ranks.items())],
            checks=list(self._checks.values()),
            comparisons=list(comparisons),
            notes=self.notes,
            unanswered=self.unanswered,
            bytes_read=self.bytes_read,
        )

    def rank(self, number: int) -> RankShare:
        return self.ranks.setdefault(number, RankShare(rank=number))

    def name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)
