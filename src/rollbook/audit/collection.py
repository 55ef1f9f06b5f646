"""The audit of a collection: every planned (task, repeat) is collected once, failed, or missing."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollbook.audit.auditor import LISTED, Auditor
from rollbook.audit.missing import LeftOut
from rollbook.audit.places import NUMBERS, Bools, Floats, Ints, Rollouts
from rollbook.audit.planned import InputTasks, Tasks, UnknownTasks, find_input, hashes_of
from rollbook.audit.result import Audit, Kind
from rollbook.audit.scan import Scan
from rollbook.collect.files import CollectionFiles
from rollbook.collect.manifest import Manifest, read_manifest
from rollbook.errors import BadFileError, UsageError
from rollbook.records.jsonl import read_lines
from rollbook.records.progress import read_progress
from rollbook.records.row_keys import KEY, key_of, parted
from rollbook.runs.status import reason_collector_ended

_EXAMPLES = 10
_SAME_COMMAND = "rerun the command that collected it: it collects what is missing"


class _Usage(msgspec.Struct, gc=False):
    output_tokens: int | None = None


class _Response(msgspec.Struct, gc=False):
    usage: _Usage | None = None


class _FailureLine(msgspec.Struct, gc=False):
    key: str = msgspec.field(name=KEY)


class _OutputLine(_FailureLine, gc=False):
    reward: float | None = None
    num_turns: int | None = None
    response: _Response | None = None

    @property
    def tokens(self) -> float:
        usage = self.response.usage if self.response is not None else None
        return np.nan if usage is None or usage.output_tokens is None else usage.output_tokens


class _Lines:
    """The lines of an output or of the failures, column by column."""

    def __init__(self) -> None:
        self._blocks: list[dict[str, Any]] = []

    def add(self, starts: Any, numbers: Any, rows: list[Any]) -> None:
        pairs = [parted(row.key) for row in rows]
        block: dict[str, Any] = {
            "starts": starts,
            "numbers": numbers,
            "tasks": hashes_of([task for task, _ in pairs]),
            "repeats": [-1 if repeat is None else repeat for _, repeat in pairs],
        }
        if rows and isinstance(rows[0], _OutputLine):
            block["rewards"] = [np.nan if row.reward is None else row.reward for row in rows]
            block["turns"] = [row.num_turns or 1 for row in rows]
            block["tokens"] = [row.tokens for row in rows]
        self._blocks.append({name: np.asarray(column) for name, column in block.items()})

    def column(self, name: str, kind: Any = np.int64) -> Any:
        found = [block[name] for block in self._blocks if len(block["starts"])]
        return np.concatenate([*found, np.zeros(0, kind)]).astype(kind)


class CollectionAudit:
    def __init__(self, output: Path, auditor: Auditor, *, input: Path | None) -> None:
        self._files, self._auditor = CollectionFiles(output), auditor
        manifest = read_manifest(self._files.manifest)
        if manifest is None:
            raise UsageError(
                f"{output} has no manifest ({self._files.manifest.name}), so what was planned is unknown; "
                "rollbook data stats shows what is there"
            )
        self._manifest: Manifest = manifest
        self._session = manifest.sessions[-1]
        progress = read_progress(self._files.progress)
        is_said = progress is not None and progress.status == "running"
        self._is_running = is_said and progress is not None and reason_collector_ended(progress) is None
        self._input = input or find_input(self._files.output, self._session)
        self._left_out = LeftOut()
        self._done = 0

    @property
    def _expected(self) -> int:
        return self._session.rows * self._session.repeats

    def run(self) -> Audit:
        self._account(self._read_input(), self._read_output(), self._read_failures())
        if not self._is_running:
            self._compare_coverage()
        return self._auditor.result(
            kind="collect",
            is_running=self._is_running,
            done=self._done,
            expected=self._expected,
            unit="rollouts",
            comparisons=self._left_out.comparisons(self._auditor.places),
        )

    def _read_input(self) -> Tasks:
        if self._input is None:
            named = self._session.input or "the input"
            self._auditor.unanswered.append(f"which rollouts are missing: {named} is gone; --input names it")
            return UnknownTasks(self._session.rows)
        try:
            tasks = InputTasks(self._input, self._session)
        except (UsageError, BadFileError) as error:
            self._auditor.find(Kind.UNREADABLE, str(error), file=self._input)
            return UnknownTasks(self._session.rows)
        self._auditor.read(tasks.size)
        if not tasks.is_same:
            what = "it is not the file that was collected from: its digest is not that of the manifest"
            self._auditor.find(Kind.DIFFERS, what, file=self._input)
        return tasks

    def _read_output(self) -> _Lines:
        found = _Lines()
        if not self._files.output.exists():
            self._auditor.find(Kind.MISSING, "it is not there", file=self._files.output, next=_SAME_COMMAND)
            return found
        # A killed collector may have left half a line, which the next one cuts.
        is_open = self._is_running or not self._manifest.coverage
        scan = Scan(self._auditor, self._files.output, _OutputLine, is_open=is_open)
        for numbers, starts, _, rows in scan:
            found.add(starts, numbers, rows)
        return found

    def _read_failures(self) -> _Lines:
        """Every rollout that was ever given up."""
        found = _Lines()
        if self._files.failures.exists():
            for numbers, starts, _, rows in Scan(
                self._auditor, self._files.failures, _FailureLine, is_open=True
            ):
                found.add(starts, numbers, rows)
        return found

    def _account(self, tasks: Tasks, found: _Lines, failures: _Lines) -> None:
        """Every planned rollout in one place, and every line for one of them."""
        shape = (tasks.rows, self._session.repeats)
        done, given_up = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
        rows, repeats = self._places_of(tasks, found), found.column("repeats")
        is_planned = rows >= 0
        self._find_unplanned(found, is_planned)
        counts = is_planned & ~self._find_doubles(found, rows * shape[1] + repeats, is_planned)
        done[rows[counts], repeats[counts]] = True
        failed = self._places_of(tasks, failures)
        given_up[failed[failed >= 0], failures.column("repeats")[failed >= 0]] = True
        given_up &= ~done
        missing = ~done & ~given_up
        tokens: Floats = found.column("tokens", np.float64)[counts]
        rewards: Floats = found.column("rewards", np.float64)[counts]
        self._find_unrewarded(found, counts)
        self._done = int(counts.sum())
        places = np.full(self._done, NUMBERS["collected"])
        turns = found.column("turns")[counts]
        self._auditor.places.add("collect", Rollouts(rows[counts], places, turns, tokens, rewards))
        for name, absent in (("failed", given_up), ("missing", missing)):
            prompts = int((given_up.any(axis=1) & ~done.any(axis=1)).sum()) if name == "failed" else 0
            self._auditor.places.add_count("collect", name, prompts=prompts, rollouts=int(absent.sum()))
            self._left_out.add(name, rows[counts], tokens, rewards, np.nonzero(absent)[0])
        if missing.any() and not self._is_running:
            self._find_missing(tasks, missing)
        self._auditor.check("planned rollouts that are in one place", int((~missing).sum()), missing.size)

    def _places_of(self, tasks: Tasks, lines: _Lines) -> Ints:
        """The task of each line, -1 where it was not planned."""
        repeats = lines.column("repeats")
        is_planned = (repeats >= 0) & (repeats < self._session.repeats)
        return np.where(is_planned, tasks.find(lines.column("tasks", np.uint64)), -1)

    def _find_unplanned(self, found: _Lines, is_planned: Bools) -> None:
        for place in np.flatnonzero(~is_planned).tolist():
            rows = f"{self._session.rows} rows x {self._session.repeats}"
            self._find_line(Kind.FOREIGN, found, place, f"was not planned: the last session had {rows}")

    def _find_doubles(self, found: _Lines, keys: Ints, is_planned: Bools) -> Bools:
        """Which lines repeat the key of an earlier one."""
        order = np.argsort(keys, kind="stable")
        repeats_before = np.concatenate([[False], np.diff(keys[order]) == 0]) if len(keys) else order > 0
        is_again = np.zeros(len(keys), np.bool_)
        is_again[order[repeats_before]] = True
        is_again &= is_planned
        numbers = found.column("numbers")
        for place in np.flatnonzero(is_again).tolist():
            first = order[np.searchsorted(keys[order], keys[place])]
            self._find_line(Kind.DOUBLED, found, place, f"is on line {numbers[first]} already")
        return is_again

    def _find_unrewarded(self, found: _Lines, counts: Bools) -> None:
        for place in np.flatnonzero(np.isnan(found.column("rewards", np.float64)) & counts).tolist():
            self._find_line(Kind.DIFFERS, found, place, "has no reward, so it belongs into the failures")

    def _find_line(self, kind: Kind, found: _Lines, place: int, what: str) -> None:
        number, path = int(found.column("numbers")[place]), self._files.output
        key = None
        if self._auditor.count(kind, path) < LISTED:  # reading lines again is for those that are shown
            (line,) = _line_at(path, int(found.column("starts")[place]))
            key = msgspec.json.decode(line, type=_FailureLine).key
        drop = f"to drop it: sed -i '{number}d' {shlex.quote(str(path))}"
        self._auditor.find(kind, f"{key} {what}", file=path, line=number, key=key, next=drop)

    def _find_missing(self, tasks: Tasks, missing: Bools) -> None:
        count = int(missing.sum())
        named: list[str] = []
        if isinstance(tasks, InputTasks):
            places = np.argwhere(missing)[:_EXAMPLES].tolist()
            named = [key_of(tasks.task(row), repeat) for row, repeat in places]
        names = f": {', '.join(named)}" if named else ""
        more = f" and {count - len(named):,} more" if named and count > len(named) else ""
        self._auditor.find(
            Kind.MISSING,
            f"{count:,} of {missing.size:,} planned rollouts are in no file{names}{more}",
            file=self._files.output,
            key=named[0] if named else None,
            next=_SAME_COMMAND,
        )

    def _compare_coverage(self) -> None:
        coverage = self._manifest.coverage
        for key, counted in (("expected", self._expected), ("ok", self._done)) if coverage else ():
            agrees = coverage.get(key) == counted
            self._auditor.check("counts of the manifest", agrees)
            if not agrees:
                what = f"coverage says {coverage.get(key)} {key}; counted again {counted}"
                is_less = key == "ok" and self._done < coverage.get(key, 0)  # as when lines are missing
                kind = Kind.MISSING if is_less else Kind.DIFFERS
                self._auditor.find(kind, what, file=self._files.manifest, key=key, next=_SAME_COMMAND)


def _line_at(path: Path, start: int) -> list[bytes]:
    return [next(read_lines(path, start=start, accept_tail=True)).data]
