"""A line of a token export's manifest: whether it agrees with itself, with the training, and is complete,
process by process."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from pathlib import Path

from rollbook.audit.auditor import RESTORE, Auditor
from rollbook.audit.result import Kind
from rollbook.records.token_files import ExportedStep, RankPart

NOT_WRITTEN = "what was not written then cannot be had back; rollbook replay computes it again"
# Of a line the sums over the processes, by the key that both have.
_SUMS = ("sequences", "selected", "records", "tokens", "trained_tokens")


class ManifestLine:
    """One line, and where it is."""

    def __init__(self, auditor: Auditor, manifest: Path, number: int, step: ExportedStep) -> None:
        self._auditor, self._manifest, self._number, self._step = auditor, manifest, number, step

    def check(self, run_id: str) -> None:
        """What the line says by itself."""
        step = self._step
        if step.run_id != run_id:
            self._find(Kind.FOREIGN, f"iteration {step.iteration} is of the run {step.run_id}")
        wrong = [name for name in _SUMS if not _adds_up(step, name)]
        told = [part.complete for part in step.ranks]
        if None not in told and step.complete != all(told):
            wrong.append("complete")
        for part in step.ranks:
            if part.complete is not None and part.complete != (part.records == part.selected):
                wrong.append(f"complete of process {part.rank}")
        self._auditor.check("lines of the token export's manifest that agree with themselves", not wrong)
        if wrong:
            what = f"iteration {step.iteration}: its processes do not give {', '.join(wrong)}"
            self._find(Kind.DIFFERS, what)
        if not step.complete:
            self._find_incomplete()

    def compare(self, trained: int, rows: Mapping[int, Sized]) -> None:
        """With the rows that were `trained`, and by process those of them that were to be exported."""
        step = self._step
        selected = sum(map(len, rows.values()))
        said = (step.sequences, step.selected, [part.rank for part in step.ranks])
        if said != (trained, selected, list(range(max(1, len(rows))))):
            self._find(
                Kind.DIFFERS,
                f"iteration {step.iteration} has {step.sequences} rows, {step.selected} chosen, of processes "
                f"{said[2]}; iterations.jsonl has {trained}, {selected}, {[*rows]}",
            )
        for part in step.ranks:
            own = len(rows.get(part.rank, ()))
            if part.selected not in (None, own):
                what = f"iteration {step.iteration}: {part.selected} rows of process {part.rank} were chosen"
                self._find(Kind.DIFFERS, f"{what}; by iterations.jsonl there are {own}")

    def _find_incomplete(self) -> None:
        """Each process of which records are missing; an older manifest says it of all together."""
        step = self._step
        named = [part for part in step.ranks if part.complete is False]
        for part in named:
            what = (
                f"process {part.rank} has written {part.records} of {part.selected} records of iteration "
                f"{step.iteration}: {part.error}"
            )
            self._find(Kind.MISSING, what, NOT_WRITTEN)
        if not named:
            errors = "; ".join(sorted({part.error for part in step.ranks if part.error}))
            what = f"{step.records} of {step.selected} records of iteration {step.iteration} were written"
            self._find(Kind.MISSING, f"{what}: {errors}", NOT_WRITTEN)

    def _find(self, kind: Kind, what: str, hint: str = RESTORE) -> None:
        self._auditor.find(kind, what, file=self._manifest, line=self._number, next=hint)


def is_complete(part: RankPart) -> bool:
    """Whether all of it was written; of an older manifest, whether no error is known."""
    return part.error is None if part.complete is None else part.complete


def _adds_up(step: ExportedStep, name: str) -> bool:
    parts = [getattr(part, name) for part in step.ranks]
    return None in parts or sum(parts) == getattr(step, name)
