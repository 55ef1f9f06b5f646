"""A token export against the training: every row that a process trained is in its file once, and says of
every token what the transcript says."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rollbook.audit.auditor import Auditor
from rollbook.audit.checkpoints import ends_a_line
from rollbook.audit.compare import label
from rollbook.audit.fates import Fates
from rollbook.audit.plan import RlPlan
from rollbook.audit.result import Kind
from rollbook.audit.scan import size_of
from rollbook.audit.tables import Transcripts, rollout_name, rollout_place
from rollbook.audit.token_rows import row_digests, row_on
from rollbook.audit.training import Trained
from rollbook.errors import BadFileError, BadLineError
from rollbook.records.jsonl import Line, read_lines
from rollbook.records.layout import TRAIN
from rollbook.records.token_files import PARQUET, STREAM, ExportedStep, RankPart, decode_step, on_disk
from rollbook.records.tokens import TokenSequence, decode_sequence, read_sequences, wanted_columns

_COLUMNS = ("loss_mask", "rewards", "advantages", "inference_logprobs")


class _Place(NamedTuple):
    """The line of a manifest."""

    number: int
    start: int
    end: int


class _Record(NamedTuple):
    number: int  # of its line, or row
    sequence: TokenSequence


class _Row(NamedTuple):
    """A row that a process trained, and where its record says that it was."""

    key: int
    part: int
    flat: int  # its place among the parts of the transcripts
    optim_step: int


class ExportAudit:
    """One manifest with the files of all processes; iterations are asked for in their order."""

    def __init__(self, auditor: Auditor, manifest: Path, run_id: str) -> None:
        self._auditor, self._manifest, self._run_id = auditor, manifest, run_id
        self._places: dict[int, _Place] = {}
        self._files: dict[int, dict[str, int]] = {}  # by rank: the files in their order, and their lengths
        self._read_manifest()
        self._records = {rank: _RankRecords(auditor, manifest, files) for rank, files in self._files.items()}

    @property
    def iterations(self) -> set[int]:
        return set(self._places)

    def _read_manifest(self) -> None:
        self._auditor.read(size_of(self._manifest))
        for line in read_lines(self._manifest):
            try:
                step = decode_step(self._manifest, line)
            except (BadLineError, BadFileError) as error:
                self._auditor.find(Kind.UNREADABLE, error.why, file=self._manifest, line=line.number)
                continue
            if step.iteration in self._places:
                before = self._places[step.iteration].number
                what = f"iteration {step.iteration} is on line {before} already"
                self._auditor.find(Kind.DOUBLED, what, file=self._manifest, line=line.number)
                continue
            self._places[step.iteration] = _Place(line.number, line.start, line.end)
            for part in step.ranks:
                if part.file is not None:
                    self._files.setdefault(part.rank, {})[part.file] = part.end

    def audit(
        self,
        iteration: int,
        *,
        plan: RlPlan | None,
        transcripts: Transcripts | None,
        trained: Trained | None,
        fates: Fates | None,
    ) -> ExportedStep | None:
        """The manifest's line of an iteration, if any. Without transcripts only records are counted."""
        place = self._places.get(iteration)
        if place is None:
            return None
        step = self._step_at(place)
        if step.run_id != self._run_id:
            what = f"iteration {iteration} is of the run {step.run_id}"
            self._auditor.find(Kind.FOREIGN, what, file=self._manifest, line=place.number)
        if not step.complete:
            errors = "; ".join(sorted({part.error for part in step.ranks if part.error}))
            what = (
                f"{step.records} of {step.selected} records of iteration {iteration} were written: {errors}"
            )
            self._auditor.find(Kind.MISSING, what, file=self._manifest, line=place.number, next=_NO_WAY)
        rows: dict[int, dict[tuple[int, int], _Row]] | None = None
        if trained is not None and transcripts is not None and fates is not None:
            rows = _rows_by_rank(trained, iteration, plan)
            selected = sum(map(len, rows.values()))
            claimed = (step.sequences, step.selected, [part.rank for part in step.ranks])
            if claimed != (len(trained.flat), selected, list(range(max(1, len(rows))))):
                what = (
                    f"iteration {iteration} has {step.sequences} rows, {step.selected} chosen, of processes "
                    f"{claimed[2]}; iterations.jsonl has {len(trained.flat)}, {selected}, {[*rows]}"
                )
                self._auditor.find(Kind.DIFFERS, what, file=self._manifest, line=place.number)
        for part in step.ranks:
            content = None
            if rows is not None and transcripts is not None and fates is not None:
                content = _Content(self._auditor, iteration, transcripts, fates, rows.get(part.rank, {}))
            self._audit_part(step, part, place, content)
        return step

    def _step_at(self, place: _Place) -> ExportedStep:
        (line,) = read_lines(self._manifest, start=place.start, end=place.end, number=place.number)
        return decode_step(self._manifest, line)

    def _audit_part(
        self, step: ExportedStep, part: RankPart, place: _Place, content: _Content | None
    ) -> None:
        share = self._auditor.rank(part.rank)
        share.exported = (share.exported or 0) + part.records
        records = self._records.get(part.rank)
        if records is None or part.file is None:
            return
        counts = [0, 0, 0]
        for record, path in records.of(step.iteration):
            counts[0] += 1
            counts[1] += len(record.sequence)
            counts[2] += int(record.sequence.sampled.sum())
            self._check_keys(record, path, part.rank)
            if content is not None:
                content.compare(record, path)
        path = records.path_of(part.file)
        if not path.exists():
            return
        if content is not None and step.complete:
            content.find_missing(path)
        given = [part.records, part.tokens, part.trained_tokens]
        self._auditor.check("parts of the token export", given == counts)
        if given != counts:
            self._auditor.find(
                Kind.MISSING if counts[0] < given[0] else Kind.DIFFERS,
                f"iteration {step.iteration} has {_amounts(counts)} here; "
                f"the manifest says {_amounts(given)} (line {place.number})",
                file=path,
            )

    def _check_keys(self, record: _Record, path: Path, rank: int) -> None:
        sequence = record.sequence
        if sequence.run_id not in (None, self._run_id):
            what = f"the record is of the run {sequence.run_id}"
            self._auditor.find(Kind.FOREIGN, what, file=path, line=record.number)
        elif sequence.rank not in (None, rank):
            what = f"the record is of process {sequence.rank}, in the file of process {rank}"
            self._auditor.find(Kind.DIFFERS, what, file=path, line=record.number)

    def find_rest(self, complete: int) -> None:
        """Records of no iteration; `complete` is the first one that is not complete."""
        for records in self._records.values():
            for record, path in records.rest(complete):
                what = (
                    f"the record is of iteration {record.sequence.iteration}, which the manifest has not here"
                )
                self._auditor.find(Kind.DIFFERS, what, file=path, line=record.number)


_NO_WAY = "what was not written then cannot be had back; rollbook replay computes it again"


class _RankRecords:
    """The records of one process through all its files, once."""

    def __init__(self, auditor: Auditor, manifest: Path, files: dict[str, int]) -> None:
        self._auditor, self._manifest, self._files = auditor, manifest, files
        self._iterator = self._all()
        self._next: deque[tuple[_Record, Path]] = deque(islice(self._iterator, 1))

    def path_of(self, name: str) -> Path:
        return on_disk(self._manifest.with_name(name))

    def of(self, iteration: int) -> Iterator[tuple[_Record, Path]]:
        """Those of an iteration; earlier ones, which nobody asked for, are findings."""
        while self._next and self._next[0][0].sequence.iteration <= iteration:
            record, path = self._next.popleft()
            self._next.extend(islice(self._iterator, 1))
            if record.sequence.iteration == iteration:
                yield record, path
            else:
                what = f"the record is of iteration {record.sequence.iteration}, behind later ones"
                self._auditor.find(Kind.DOUBLED, what, file=path, line=record.number)

    def rest(self, complete: int) -> Iterator[tuple[_Record, Path]]:
        for record, path in (*self._next, *self._iterator):
            if record.sequence.iteration < complete:
                yield record, path

    def _all(self) -> Iterator[tuple[_Record, Path]]:
        for name, end in self._files.items():
            path = self.path_of(name)
            if not path.exists():
                self._auditor.find(Kind.MISSING, "it is not there; the manifest names it", file=path)
                continue
            size = path.stat().st_size
            self._auditor.read(size)
            if path.suffix != PARQUET and size < end:
                what = f"it has {size:,} bytes instead of {end:,}"
                self._auditor.find(Kind.MISSING, what, file=path)
            try:
                for record in self._records(path, end):
                    yield record, path
            except BadFileError as error:
                self._auditor.find(Kind.UNREADABLE, error.why, file=path)

    def _records(self, path: Path, end: int) -> Iterator[_Record]:
        if path.suffix in (PARQUET, STREAM):
            found = read_sequences(path, end=None if path.suffix == PARQUET else end, columns=_COLUMNS)
            yield from (_Record(number, sequence) for number, sequence in enumerate(found, 1))
            return
        # Where a line was added or lost, the length of the manifest means nothing.
        wanted = wanted_columns(_COLUMNS)
        is_so_long = path.stat().st_size >= end and ends_a_line(path, end)
        for line in read_lines(path, end=end if is_so_long else None, accept_tail=True):
            try:
                yield _Record(line.number, decode_sequence(path, line, wanted))
            except BadLineError as error:
                self._auditor.find(Kind.UNREADABLE, error.why, file=path, line=line.number)


def _rows_by_rank(
    trained: Trained, iteration: int, plan: RlPlan | None
) -> dict[int, dict[tuple[int, int], _Row]]:
    """For each process its exported rows, by (micro-batch of the process, place in it)."""
    rows = trained.rows
    found: dict[int, dict[tuple[int, int], _Row]] = {rank: {} for rank in np.unique(rows.rank).tolist()}
    first_of_rank: dict[int, int] = {}
    own_number = []
    for rank in rows.rank.tolist():
        own_number.append(first_of_rank.get(rank, 0))
        first_of_rank[rank] = own_number[-1] + 1
    is_first = np.diff(rows.micro_batch, prepend=-1) != 0
    place = 0
    for number, (key, part, step, batch, flat) in enumerate(
        zip(
            rows.keys.tolist(),
            rows.parts.tolist(),
            rows.step.tolist(),
            rows.micro_batch.tolist(),
            trained.flat.tolist(),
            strict=True,
        )
    ):
        place = 0 if is_first[number] else place + 1
        is_exported = (
            plan is None or plan.export is None or plan.is_exported(iteration, *rollout_place(key), part)
        )
        if is_exported:
            found[int(rows.rank[batch])][own_number[batch], place] = _Row(key, part, flat, step)
    return found


class _Content:
    """What the records of one process and iteration must say."""

    def __init__(
        self,
        auditor: Auditor,
        iteration: int,
        transcripts: Transcripts,
        fates: Fates,
        rows: dict[tuple[int, int], _Row],
    ) -> None:
        self._auditor, self._step = auditor, (TRAIN, iteration)
        self._transcripts, self._rows = transcripts, rows
        self._advantages = fates.advantage_of()
        self._left = dict(rows)

    def compare(self, record: _Record, path: Path) -> None:
        sequence = record.sequence
        place = (sequence.micro_step or 0, sequence.micro_sequence_idx or 0)
        row = self._left.pop(place, None)
        if row is None:
            kind = Kind.DOUBLED if place in self._rows else Kind.DIFFERS
            what = (
                f"micro-batch {place[0]} has no such record"
                if kind is Kind.DIFFERS
                else "the record is here twice"
            )
            self._auditor.find(kind, f"{what}: sequence {place[1]}", file=path, line=record.number)
            return
        wrong = self._wrong(sequence, row)
        self._auditor.check("exported rows that are those of the transcripts", not wrong)
        if wrong:
            self._auditor.find(
                Kind.DIFFERS,
                f"{rollout_name(row.key)}: {'; '.join(wrong)}",
                file=path,
                line=record.number,
                key=label(self._step, row.key),
            )

    def _wrong(self, sequence: TokenSequence, row: _Row) -> list[str]:
        there = (*rollout_place(row.key), row.part, row.optim_step)
        claimed = (sequence.group_idx, sequence.traj_idx, sequence.part, sequence.optim_step)
        if claimed != there:
            return [f"group, rollout, part and step are {claimed}, and {there} were trained in this place"]
        if row.flat < 0:
            return []
        logprobs = sequence.get("inference_logprobs")
        digests = row_digests(sequence.token_ids, sequence.sampled, logprobs)
        wanted = self._transcripts.digests_of_parts[row.flat]
        if digests[:2] != wanted[:2] or (logprobs is not None and digests[2] != wanted[2]):
            return [self._first_difference(sequence, row)]
        rollout = int(np.searchsorted(self._transcripts.first_part, row.flat, side="right")) - 1
        wrong = []
        for name, value in (
            ("rewards", float(self._transcripts.rewards[rollout])),
            ("advantages", self._advantages.get(row.key, np.nan)),
        ):
            column = sequence.get(name)
            if column is not None and not (column[sequence.sampled] == np.float32(value)).all():
                wrong.append(f"{name} are not {value:.10g}")
        return wrong

    def _first_difference(self, sequence: TokenSequence, row: _Row) -> str:
        """In words, from the line of the transcript, which is read again for it."""
        rollout = int(np.searchsorted(self._transcripts.first_part, row.flat, side="right")) - 1
        path, number = self._transcripts.path, self._transcripts.lines[rollout]
        line: Line = next(islice(read_lines(path), number - 1, None))
        where = f"{self._auditor.name(path)}:{number}"
        token_ids, mask, logprobs = row_on(line.data, row.part)
        if len(token_ids) != len(sequence):
            return f"it has {len(sequence)} tokens here and {len(token_ids)} in {where}"
        for name, here, there in (
            ("token", sequence.token_ids, token_ids),
            ("loss_mask", sequence.sampled, mask),
            ("logprob", sequence.get("inference_logprobs"), logprobs),
        ):
            if here is None:
                continue
            differs = here != there
            if name == "logprob":
                differs &= mask
            if differs.any():
                at = int(np.flatnonzero(differs)[0])
                return f"{name} {at} is {here[at]} here and {there[at]} in {where}"
        return f"its tokens are not those of {where}"

    def find_missing(self, path: Path) -> None:
        for (batch, place), row in self._left.items():
            self._auditor.find(
                Kind.MISSING,
                f"{rollout_name(row.key)} has no record here: sequence {place} of micro-batch {batch}",
                file=path,
                key=label(self._step, row.key),
            )


def _amounts(counts: list[int]) -> str:
    return f"{counts[0]} records of {counts[1]} tokens, {counts[2]} of them trained"
