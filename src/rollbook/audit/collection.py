"""The audit of a collection: every planned (task, repeat) is collected once, failed, or missing."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from rollbook.audit.auditor import Auditor
from rollbook.audit.missing import LeftOut
from rollbook.audit.places import NUMBERS, Bools, Floats, Ints, Rollouts
from rollbook.audit.planned import Planned, find_input
from rollbook.audit.result import Audit, Kind
from rollbook.audit.scan import Scan
from rollbook.collect.files import CollectionFiles
from rollbook.collect.manifest import Manifest, read_manifest
from rollbook.errors import BadFileError, UsageError
from rollbook.records.progress import read_progress
from rollbook.records.row_keys import KEY, key_of, parted
from rollbook.runs.standing import why_collector_is_gone

_EXAMPLES = 10
_SAME_COMMAND = "rerun the command that collected it: it collects what is missing"


class _Usage(msgspec.Struct, gc=False):
    output_tokens: int | None = None


class _Response(msgspec.Struct, gc=False):
    usage: _Usage | None = None


class _OutputLine(msgspec.Struct, gc=False):
    key: str = msgspec.field(name=KEY)
    reward: float | None = None
    num_turns: int | None = None
    response: _Response | None = None

    @property
    def tokens(self) -> float:
        usage = self.response.usage if self.response is not None else None
        return np.nan if usage is None or usage.output_tokens is None else usage.output_tokens


class _FailureLine(msgspec.Struct, gc=False):
    key: str = msgspec.field(name=KEY)
    kind: str | None = None


class _Keys:
    """Rollouts by their keys, in the order of a file; rows are -1 where nothing of that key was planned."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.lines: list[int] = []
        self.rewards: list[float | None] = []
        self.turns: list[int] = []
        self.tokens: list[float] = []

    def add(self, numbers: Sequence[int], rows: Sequence[_OutputLine]) -> None:
        self.lines.extend(numbers)
        self.keys.extend([row.key for row in rows])
        self.rewards.extend([row.reward for row in rows])
        self.turns.extend([row.num_turns or 1 for row in rows])
        self.tokens.extend([row.tokens for row in rows])


class CollectionAudit:
    def __init__(self, output: Path, auditor: Auditor, *, input: Path | None) -> None:
        self._files, self._auditor = CollectionFiles(output), auditor
        manifest = read_manifest(self._files.manifest)
        if manifest is None:
            raise UsageError(
                f"{output} has no manifest ({self._files.manifest.name}), so nobody knows what was planned; "
                "rollbook data stats shows what is there"
            )
        self._manifest: Manifest = manifest
        self._session = manifest.sessions[-1]
        progress = read_progress(self._files.progress)
        is_said = progress is not None and progress.status == "running"
        self._is_running = is_said and progress is not None and why_collector_is_gone(progress) is None
        self._input = input or find_input(self._files.output, self._session)
        self._left_out = LeftOut()
        self._done = 0

    @property
    def _expected(self) -> int:
        return self._session.rows * self._session.repeats

    def run(self) -> Audit:
        planned = self._read_input()
        found = self._read_output()
        failed = self._read_failures()
        is_first = self._find_doubles(found)
        if planned is None:
            self._count_keys(found, is_first, failed)
        else:
            self._account(planned, found, is_first, failed)
        if not self._is_running:
            self._compare_coverage()
        return self._result()

    def _read_input(self) -> Planned | None:
        if self._input is None:
            self._auditor.unanswered.append(
                f"which rollouts are missing: {self._session.input or 'the input'} is gone; --input names it"
            )
            return None
        try:
            planned = Planned(self._input, self._session)
        except (UsageError, BadFileError) as error:
            self._auditor.find(Kind.UNREADABLE, str(error), file=self._input)
            return None
        self._auditor.read(planned.size)
        if not planned.is_same:
            what = "it is not the file that was collected from: its digest is not that of the manifest"
            self._auditor.find(Kind.DIFFERS, what, file=self._input)
        return planned

    def _read_output(self) -> _Keys:
        found = _Keys()
        if not self._files.output.exists():
            self._auditor.find(Kind.MISSING, "it is not there", file=self._files.output, next=_SAME_COMMAND)
            return found
        # A killed collector may have left half a line, which the next one cuts.
        is_open = self._is_running or not self._manifest.coverage
        for numbers, _, rows in Scan(self._auditor, self._files.output, _OutputLine, is_open=is_open):
            found.add(numbers, rows)
        for place, reward in enumerate(found.rewards):
            if reward is None:
                what = f"{found.keys[place]} has no reward: a rollout without one belongs into the failures"
                self._auditor.find(
                    Kind.DIFFERS,
                    what,
                    file=self._files.output,
                    line=found.lines[place],
                    key=found.keys[place],
                )
        return found

    def _read_failures(self) -> list[str]:
        """The keys of all rollouts that were ever given up."""
        failed: dict[str, None] = {}
        if self._files.failures.exists():
            for _, _, rows in Scan(self._auditor, self._files.failures, _FailureLine, is_open=True):
                failed |= dict.fromkeys(row.key for row in rows)
        return list(failed)

    def _find_doubles(self, found: _Keys) -> Bools:
        """Which lines are the first of their key."""
        first: dict[str, int] = {}
        is_first = np.ones(len(found.keys), np.bool_)
        for place, key in enumerate(found.keys):
            if (before := first.setdefault(key, place)) != place:
                is_first[place] = False
                self._auditor.find(
                    Kind.DOUBLED,
                    f"{key} is on line {found.lines[before]} already",
                    file=self._files.output,
                    line=found.lines[place],
                    key=key,
                    next=self._drop(found.lines[place]),
                )
        return is_first

    def _drop(self, line: int) -> str:
        return f"to drop it: sed -i '{line}d' {shlex.quote(str(self._files.output))}"

    def _count_keys(self, found: _Keys, is_first: Bools, failed: list[str]) -> None:
        """Without the input: how many there are, not which are missing."""
        tasks = [parted(key)[0] for key in found.keys]
        numbers = {task: number for number, task in enumerate(dict.fromkeys(tasks))}
        rows = np.array([numbers[task] for task in tasks], np.int64)
        self._add(found, rows, is_first)
        only_failed = set(failed) - set(found.keys)
        prompts = len({parted(key)[0] for key in only_failed} - numbers.keys())
        self._auditor.places.add_count("collect", "failed", prompts=prompts, rollouts=len(only_failed))
        missing = self._expected - int(is_first.sum()) - len(only_failed)
        if missing > 0 and not self._is_running:
            what = f"{missing:,} of {self._expected:,} planned rollouts are in no file"
            self._auditor.find(Kind.MISSING, what, file=self._files.output, next=_SAME_COMMAND)
        self._auditor.places.add_count("collect", "missing", prompts=0, rollouts=max(0, missing))

    def _account(self, planned: Planned, found: _Keys, is_first: Bools, failed: list[str]) -> None:
        rows, repeats = self._places_of(planned, found.keys)
        is_planned = rows >= 0
        for place in np.flatnonzero(~is_planned).tolist():
            self._auditor.find(
                Kind.FOREIGN,
                f"{found.keys[place]} was not planned: there were {planned.rows} rows x {planned.repeats}",
                file=self._files.output,
                line=found.lines[place],
                key=found.keys[place],
                next=self._drop(found.lines[place]),
            )
        counts = is_planned & is_first
        self._add(found, rows, counts)
        done: Bools = np.zeros((planned.rows, planned.repeats), np.bool_)
        done[rows[counts], repeats[counts]] = True
        failed_rows, failed_repeats = self._places_of(planned, failed)
        given_up = np.zeros_like(done)
        known = failed_rows >= 0
        given_up[failed_rows[known], failed_repeats[known]] = True
        given_up &= ~done
        tokens, rewards = np.array(found.tokens, np.float64), np.array(found.rewards, np.float64)
        for name, absent in (("failed", given_up), ("missing", ~done & ~given_up)):
            places = np.flatnonzero(absent.any(axis=1))
            of_prompts = int((~done[places].any(axis=1)).sum()) if name == "failed" else 0
            self._auditor.places.add_count("collect", name, prompts=of_prompts, rollouts=int(absent.sum()))
            groups = np.nonzero(absent)[0]
            self._left_out.add(name, rows[counts], tokens[counts], rewards[counts], groups)
        missing = ~done & ~given_up
        if missing.any() and not self._is_running:
            named = [
                key_of(planned.task(row), repeat) for row, repeat in np.argwhere(missing)[:_EXAMPLES].tolist()
            ]
            more = f" and {int(missing.sum()) - len(named):,} more" if missing.sum() > len(named) else ""
            what = f"{int(missing.sum()):,} of {missing.size:,} planned rollouts are in no file: "
            self._auditor.find(
                Kind.MISSING,
                f"{what}{', '.join(named)}{more}",
                file=self._files.output,
                key=named[0],
                next=_SAME_COMMAND,
            )
        self._auditor.check("planned rollouts that are in one place", int((done | given_up).sum()), done.size)

    def _places_of(self, planned: Planned, keys: Sequence[str]) -> tuple[Ints, Ints]:
        """(row, repeat) of each key; rows are -1 where it was not planned."""
        pairs = [parted(key) for key in keys]
        repeats = np.array([-1 if repeat is None else repeat for _, repeat in pairs], np.int64)
        rows = planned.rows_of([task for task, _ in pairs])
        is_planned = (repeats >= 0) & (repeats < planned.repeats)
        return np.where(is_planned, rows, -1), repeats

    def _add(self, found: _Keys, rows: Ints, counts: Bools) -> None:
        tokens: Floats = np.array(found.tokens, np.float64)
        rewards: Floats = np.array(found.rewards, np.float64)
        turns = np.array(found.turns, np.int64)
        self._done = int(counts.sum())
        places = np.full(self._done, NUMBERS["collected"])
        self._auditor.places.add(
            "collect", Rollouts(rows[counts], places, turns[counts], tokens[counts], rewards[counts])
        )

    def _compare_coverage(self) -> None:
        said = self._manifest.coverage
        if not said:
            return
        for key, counted in (("expected", self._expected), ("ok", self._done)):
            agrees = said.get(key) == counted
            self._auditor.check("counts of the manifest", agrees)
            if not agrees:
                what = f"coverage says {said.get(key)} {key}; counted again {counted}"
                is_less = key == "ok" and self._done < said.get(key, 0)  # as when lines are missing
                kind = Kind.MISSING if is_less else Kind.DIFFERS
                self._auditor.find(kind, what, file=self._files.manifest, key=key, next=_SAME_COMMAND)

    def _result(self) -> Audit:
        return self._auditor.result(
            kind="collect",
            is_running=self._is_running,
            done=self._done,
            expected=self._expected,
            unit="rollouts",
            comparisons=self._left_out.comparisons(self._auditor.places),
        )
