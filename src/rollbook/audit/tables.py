"""The rollouts of an iteration as columns: from its summaries, its transcripts, and iterations.jsonl.

What several files say of the same rollouts is then compared column by column, and only where two columns
differ is a single rollout looked at.
"""

from __future__ import annotations

from array import array
from collections import Counter
from math import nan
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from rollbook.audit.auditor import Auditor
from rollbook.audit.places import Bools, Floats, Ints
from rollbook.audit.result import Kind
from rollbook.audit.scan import Scan
from rollbook.audit.token_rows import UNKNOWN, RowDigests, TurnColumns, TurnLine, digests_of, parts_of
from rollbook.records.complete import FileFacts
from rollbook.records.turns import NO_ROOM, OUT_OF_TOKENS

_Index = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Length = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]
_TRAJECTORY_BITS = 31


class _Step(msgspec.Struct, gc=False):
    ob_len: _Length | None = None
    ac_len: _Length | None = None
    metrics: dict[str, Any] = {}


class _Ids(msgspec.Struct, gc=False):
    split: str
    iteration: int
    group_idx: _Index
    traj_idx: _Index
    run_id: str | None = None
    task_id: str | None = None
    task_digest: str | None = None
    status: str = "ok"
    total_reward: float | None = None
    stop_reason: str | None = None


class SummaryLine(_Ids, gc=False):
    tags: list[str] = []
    steps: list[_Step] = []
    trajectory_metrics: dict[str, Any] = {}


class TranscriptLine(_Ids, gc=False):
    turns: list[TurnLine] | None = None


class Identity(msgspec.Struct, frozen=True):
    """Whose lines a file should hold; None where that is not known."""

    run_id: str | None
    split: str
    iteration: int


class Table:
    """The columns that summaries and transcripts share, in the order of the file."""

    what = "lines"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = array("q")
        self._groups, self._trajectories = array("q"), array("q")
        self._rewards = array("d")  # NaN: there is none
        self._texts: dict[str | None, str | None] = {}  # each text once: most rollouts have the same
        self.statuses: list[str | None] = []
        self.stops: list[str | None] = []
        self.tasks: list[str | None] = []
        self.digests: list[str | None] = []
        self.foreign: Counter[Identity] = Counter()
        self.claimed: set[tuple[str, int]] = set()  # what the lines say they are of, where that was not asked
        self.facts = FileFacts(0, "")

    def __len__(self) -> int:
        return len(self.lines)

    def _own(self, numbers: Any, rows: list[Any], identity: Identity | None) -> tuple[Any, list[Any]]:
        """The rows that are of this run and iteration; the others are counted."""
        if identity is None:
            self.claimed |= {(row.split, row.iteration) for row in rows}
            return numbers, rows
        runs, splits = {row.run_id for row in rows}, {row.split for row in rows}
        iterations = {row.iteration for row in rows}
        if runs <= {identity.run_id} and splits <= {identity.split} and iterations <= {identity.iteration}:
            return numbers, rows
        kept: tuple[list[int], list[Any]] = [], []
        for number, row in zip(numbers, rows, strict=True):
            own = Identity(row.run_id if identity.run_id else None, row.split, row.iteration)
            if own == identity:
                kept[0].append(number)
                kept[1].append(row)
            else:
                self.foreign[own] += 1
        return kept

    def _add_ids(self, numbers: Any, rows: list[Any]) -> None:
        """Append ids and numbers, column after column: this runs for every rollout of a run."""
        self.lines.extend(numbers)
        self._groups.extend([row.group_idx for row in rows])
        self._trajectories.extend([row.traj_idx for row in rows])
        self._rewards.extend([nan if row.total_reward is None else row.total_reward for row in rows])
        once = self._texts.setdefault
        self.statuses.extend([once(row.status, row.status) for row in rows])
        self.stops.extend([once(row.stop_reason, row.stop_reason) for row in rows])
        self.tasks.extend([once(row.task_id, row.task_id) for row in rows])
        self.digests.extend([once(row.task_digest, row.task_digest) for row in rows])

    def _freeze(self, turns: Ints, seen: Ints, sampled: Ints) -> None:
        """Make arrays of the columns that are numbers. `seen` and `sampled` are of every turn, or UNKNOWN."""
        self.groups = np.array(self._groups, np.int64)
        self.keys = keys_of(self.groups, self._trajectories)
        self.rewards: Floats = np.array(self._rewards, np.float64)
        self.ok: Bools = np.array([status == "ok" for status in self.statuses], np.bool_)
        self.turns, self.seen, self.sampled = turns, seen, sampled
        self.seen_tokens = _per_rollout(seen, turns)
        self.tokens = _per_rollout(sampled, turns)  # NaN: nobody counted


class Summaries(Table):
    what = "summary"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.tags: list[tuple[str, ...]] = []
        self.metrics: dict[str, Floats] = {}  # by name the value of each rollout, NaN where it has none

    def read(self, auditor: Auditor, identity: Identity | None, *, is_open: bool = False) -> None:
        """`identity` is whose lines they must be, if that matters."""
        turns, seen, sampled = array("q"), array("q"), array("q")
        metrics: list[tuple[int, dict[str, Floats]]] = []
        tags: dict[tuple[str, ...], tuple[str, ...]] = {}
        scan = Scan(auditor, self.path, SummaryLine, is_open=is_open)
        for numbers, _, _, rows in scan:
            numbers, rows = self._own(numbers, rows, identity)
            self._add_ids(numbers, rows)
            self.tags.extend([tags.setdefault(own := tuple(row.tags), own) for row in rows])
            metrics.append((len(rows), _columns_of([_metrics_of(row) for row in rows])))
            steps = [step for row in rows for step in row.steps]
            turns.extend([len(row.steps) for row in rows])
            seen.extend([UNKNOWN if step.ob_len is None else step.ob_len for step in steps])
            sampled.extend([UNKNOWN if step.ac_len is None else step.ac_len for step in steps])
        self.facts = scan.facts
        self._freeze(np.array(turns), np.array(seen), np.array(sampled))
        for name in sorted({name for _, block in metrics for name in block}):
            self.metrics[name] = np.concatenate(
                [block.get(name, np.full(count, nan)) for count, block in metrics]
            )


class Transcripts(Table):
    """`parts` are the token rows of a rollout: one, and one more wherever its history was rewritten."""

    what = "transcript"

    def __init__(self, path: Path, *, with_digests: bool = False) -> None:
        """`with_digests`: also of the tokens of every part, for the comparison with a token export."""
        super().__init__(path)
        self._with_digests = with_digests
        self._columns = TurnColumns()
        self.digests_of_parts: list[RowDigests] = []
        self._has_turns: list[bool] = []

    def read(self, auditor: Auditor, identity: Identity | None, *, is_open: bool = False) -> None:
        scan = Scan(auditor, self.path, TranscriptLine, is_open=is_open)
        for numbers, _, _, rows in scan:
            numbers, rows = self._own(numbers, rows, identity)
            self._add_ids(numbers, rows)
            self._columns.add([row.turns or [] for row in rows])
            self._has_turns.extend([row.turns is not None for row in rows])
            if self._with_digests:
                for row in rows:
                    self.digests_of_parts += digests_of(row.turns or [])
        self.facts = scan.facts
        found = parts_of(self._columns)
        self._freeze(np.array(self._columns.counts, np.int64), found.seen, found.sampled)
        self.has_turns: Bools = np.array(self._has_turns, np.bool_)  # False: nobody says what they were
        self._cut_replies = found.cut_off
        # A limit may end an episode between two replies, too.
        ended: Bools = np.array([stop in OUT_OF_TOKENS for stop in self.stops], np.bool_)
        self.cut_off: Bools = self._any_turn(self._cut_replies) | ended
        self.trained, self.logprobs = found.trained, found.logprobs
        self.parts: Ints = found.counts
        self.first_part: Ints = np.cumsum(self.parts) - self.parts  # of each rollout in the arrays of parts
        self._check_logprobs(auditor, found.misaligned)

    def cuts(self, max_tokens: int) -> tuple[Bools, Bools]:
        """Which rollouts had a reply that reached `max_tokens`, and which had no room for a whole reply."""
        is_whole = self.sampled >= max_tokens
        replies = self._any_turn(self._cut_replies & is_whole)
        ended: Bools = np.array([stop == NO_ROOM for stop in self.stops], np.bool_)
        return replies, ended | self._any_turn(self._cut_replies & ~is_whole)

    def _any_turn(self, of_turns: Bools) -> Bools:
        """Which rollouts have a turn that is marked."""
        rollout = np.repeat(np.arange(len(self)), self.turns)
        found: Bools = np.bincount(rollout, weights=of_turns, minlength=len(self)) > 0
        return found

    def _check_logprobs(self, auditor: Auditor, misaligned: Ints) -> None:
        rollout = np.repeat(np.arange(len(self)), self.turns)
        for turn in misaligned.tolist():
            place = int(rollout[turn])
            counts = self._columns.sampled[turn], self._columns.logprob_counts[turn]
            auditor.find(
                Kind.DIFFERS,
                f"{rollout_name(int(self.keys[place]))}: a turn has {counts[0]} tokens, {counts[1]} logprobs",
                file=self.path,
                line=self.lines[place],
            )


def rollout_name(key: int) -> str:
    return f"rollout {key & (2**_TRAJECTORY_BITS - 1)} of group {key >> _TRAJECTORY_BITS}"


def rollout_place(key: int) -> tuple[int, int]:
    """(group, rollout) of a key."""
    return key >> _TRAJECTORY_BITS, key & (2**_TRAJECTORY_BITS - 1)


def keys_of(groups: Any, trajectories: Any) -> Ints:
    keys: Ints = (np.asarray(groups, np.int64) << _TRAJECTORY_BITS) | np.asarray(trajectories, np.int64)
    return keys


def groups_of(keys: Ints) -> Ints:
    groups: Ints = keys >> _TRAJECTORY_BITS
    return groups


def _per_rollout(values: Ints, turns: Ints) -> Floats:
    """The sum over the turns of each rollout; NaN where one of them is not known."""
    ends = np.cumsum(turns)
    total = np.concatenate([[0], np.cumsum(values)])
    unknown = np.concatenate([[0], np.cumsum(values == UNKNOWN)])
    sums: Floats = (total[ends] - total[ends - turns]).astype(np.float64)
    sums[unknown[ends] > unknown[ends - turns]] = np.nan
    return sums


def _metrics_of(row: SummaryLine) -> dict[str, Any]:
    """Each metric of a rollout once: its own, or the mean over the steps that have it."""
    if len(row.steps) == 1 and not row.trajectory_metrics:
        return row.steps[0].metrics
    values: dict[str, list[Any]] = {}
    for step in row.steps:
        for name, value in step.metrics.items():
            if isinstance(value, int | float):
                values.setdefault(name, []).append(value)
    own = {name: value for name, value in row.trajectory_metrics.items() if isinstance(value, int | float)}
    return {name: sum(some) / len(some) for name, some in values.items()} | own


def _columns_of(metrics: list[dict[str, Any]]) -> dict[str, Floats]:
    """A column for each metric of some rollouts, NaN where one has no number."""
    names = set().union(*metrics)
    return {
        name: np.array(
            [value if isinstance(value := own.get(name), (int, float)) else nan for own in metrics],
            np.float64,
        )
        for name in names
    }
