"""One iteration of one split: its files, its rollouts, their fates, and what was trained of them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from rollbook.audit import recount
from rollbook.audit.auditor import RESTORE, Auditor
from rollbook.audit.compare import Source, Step, aligned, compare_tables, label
from rollbook.audit.fates import Fates, audit_fates
from rollbook.audit.missing import LeftOut
from rollbook.audit.places import NUMBERS, Ints, Rollouts
from rollbook.audit.plan import RlPlan
from rollbook.audit.recount import Values
from rollbook.audit.result import Kind
from rollbook.audit.scan import file_digest
from rollbook.audit.tables import Identity, Summaries, Table, Transcripts, groups_of, rollout_name
from rollbook.audit.training import Trained, audit_steps
from rollbook.records.complete import FileFacts
from rollbook.records.iterations import RolloutFate, TrainStep
from rollbook.records.layout import TRAIN, Artifact, is_iteration_file


class IterationLine(msgspec.Struct):
    """A line of iterations.jsonl."""

    split: str
    iteration: int
    rollouts: list[RolloutFate] | None = None
    steps: list[TrainStep] | None = None
    weights_digest_before: str | None = None
    weights_digest: str | None = None
    error: str | None = None
    files: dict[str, FileFacts] = {}


class Asked(NamedTuple):
    """What the audit of every iteration is given."""

    root: Path
    iterations: Path
    run_id: str
    plan: RlPlan | None
    left_out: LeftOut


class Counted(NamedTuple):
    """What an iteration comes to."""

    values: Values  # of its metrics
    transcripts: Transcripts | None
    trained: Trained | None
    fates: Fates | None


class IterationAudit:
    def __init__(self, auditor: Auditor, asked: Asked, line: IterationLine, number: int) -> None:
        """`number` is that of its line in iterations.jsonl."""
        self._auditor, self._asked, self._line, self._number = auditor, asked, line, number
        self._step: Step = (line.split, line.iteration)
        self._is_train = line.split == TRAIN
        self._fates = None if line.rollouts is None else Fates(line.rollouts)
        self._summaries: Summaries | None = None
        self._transcripts: Transcripts | None = None
        self._trained: Trained | None = None
        self._values: Values = {}

    def run(self, *, with_digests: bool = False) -> Counted:
        """`with_digests`: also of the tokens, for the comparison with a token export."""
        self._read_files(with_digests)
        both: tuple[Table | None, ...] = (self._summaries, self._transcripts)
        if tables := [table for table in both if table is not None and (len(table) or not table.foreign)]:
            self._account(tables)
        elif self._fates is not None:
            self._auditor.places.add_count("train", "missing", prompts=0, rollouts=len(self._fates.keys))
        # Numbers that were counted in files that are known to be damaged say nothing about metrics.jsonl.
        values = self._values if self._is_whole else {}
        if self._line.steps is not None:
            values |= recount.of_steps(self._line.steps)
        return Counted(values, self._transcripts, self._trained, self._fates)

    @property
    def _is_whole(self) -> bool:
        """Whether all files of rollouts are there, as they were when recorded."""
        named = {name: facts for name, facts in self._line.files.items() if name.endswith(".jsonl")}
        return all(self._facts.get(self._asked.root / name) == facts for name, facts in named.items())

    def _read_files(self, with_digests: bool) -> None:
        found: dict[Path, FileFacts] = {}
        for name in self._line.files:
            path = self._asked.root / name
            if not is_iteration_file(name):  # it might be anywhere
                what = f"{self._where} names {name!r}, which is no file of an iteration"
                self._auditor.find(Kind.DIFFERS, what, file=self._asked.iterations, line=self._number)
            elif not path.is_file():
                self._auditor.find(
                    Kind.MISSING, f"it is not there; {self._where} was recorded with it", file=path
                )
            elif name.endswith(Artifact.SUMMARIES):
                self._summaries = Summaries(path)
                found[path] = self._read(self._summaries)
            elif name.endswith(Artifact.TRANSCRIPTS):
                self._transcripts = Transcripts(path, with_digests=with_digests)
                found[path] = self._read(self._transcripts)
            else:
                found[path] = file_digest(self._auditor, path)
        self._facts = found

    @property
    def _where(self) -> str:
        return f"iteration {self._line.iteration} of {self._line.split}"

    def _read(self, table: Summaries | Transcripts) -> FileFacts:
        table.read(self._auditor, Identity(self._asked.run_id, *self._step))
        for other, count in table.foreign.items():
            whose = f"of the run {other.run_id}" if other.run_id != self._asked.run_id else "of this run"
            self._auditor.find(
                Kind.FOREIGN,
                f"{count} of its lines are {whose}, {other.split} at iteration {other.iteration}",
                file=table.path,
            )
        return table.facts

    def compare_digests(self) -> None:
        """Last, because a line that is known to be missing explains a digest that is not the recorded one."""
        for name, recorded in self._line.files.items():
            path = self._asked.root / name
            if (facts := self._facts.get(path)) is None:
                continue
            self._auditor.check("files as they were when recorded", facts == recorded)
            if facts == recorded:
                continue
            size = f"it has {facts.bytes:,} bytes instead of {recorded.bytes:,}"
            kinds = self._auditor.has_found(path)
            self._auditor.find(
                Kind.MISSING if kinds == {Kind.MISSING} else Kind.DIFFERS,
                f"it was changed after it was complete: {size}"
                if facts.bytes != recorded.bytes
                else "it was changed after it was complete: its digest is not the recorded one",
                file=path,
                next=self._restore(name),
            )

    def _restore(self, name: str) -> str:
        """Where no token export tells which row was changed, a replay does."""
        if not name.endswith(Artifact.TRANSCRIPTS) or not self._is_train or self._asked.plan is None:
            return RESTORE
        root = shlex.quote(str(self._asked.root))
        replay = f"rollbook replay {root} --iteration {self._line.iteration}"
        return f"{RESTORE}; {replay} names the row that differs"

    def _account(self, tables: list[Table]) -> None:
        """Every rollout once, in one place."""
        sources = [
            Source(table.what, table.path, table.keys, table.lines, not table.foreign) for table in tables
        ]
        if self._fates is not None:
            lines = [self._number] * len(self._fates.keys)
            sources.append(Source("fate", self._asked.iterations, self._fates.keys, lines))
        rows, everywhere = aligned(self._auditor, self._step, sources)
        base, at = tables[0], rows[0]
        places = self._places(base, at, rows[-1])
        self._find_missing(everywhere, base, at)
        if len(tables) == 2:
            assert self._summaries is not None and self._transcripts is not None
            compare_tables(self._auditor, self._step, self._summaries, self._transcripts, rows[:2])
        split = "train" if self._is_train else "eval"
        self._auditor.places.add(split, _rollouts(base, at, places))
        if self._summaries is not None:
            self._check_environments(self._summaries)
            self._values |= recount.of_rollouts(self._summaries, self._line.split)
        if self._transcripts is not None and self._transcripts in tables and self._fates is not None:
            self._account_for_training(self._transcripts, self._fates, places, rows)

    def _places(self, base: Table, at: Ints, fate_at: Ints) -> Ints:
        if self._fates is not None:
            return self._fates.places[fate_at]
        good = NUMBERS["recorded" if self._is_train else "evaluated"]
        return np.where(base.ok[at], good, NUMBERS["failed"])

    def _find_missing(self, everywhere: Ints, base: Table, at: Ints) -> None:
        """What no file has, what was never asked for, and what these are like."""
        keys = base.keys[at]
        plan = self._asked.plan if self._is_train else None
        wanted = everywhere if plan is None or np.array_equal(plan.keys, everywhere) else plan.keys
        for key in np.setdiff1d(wanted, everywhere).tolist() if wanted is not everywhere else ():
            self._auditor.find(
                Kind.MISSING,
                f"{rollout_name(key)} was to be sampled, and is in no file",
                file=self._asked.iterations,
                line=self._number,
                key=label(self._step, key),
                next=RESTORE,
            )
        for key in np.setdiff1d(everywhere, wanted).tolist() if wanted is not everywhere else ():
            self._auditor.find(
                Kind.DIFFERS,
                f"{rollout_name(key)} was never to be sampled by config.json",
                file=base.path,
                key=label(self._step, key),
            )
        self._auditor.check("rollouts asked for that are in every file", len(keys), len(wanted))
        absent = np.setdiff1d(wanted, keys) if len(keys) < len(wanted) else keys[:0]
        is_there = base.ok[at]
        failed = groups_of(keys[~is_there])
        groups, tokens, rewards = (
            groups_of(keys)[is_there],
            base.tokens[at][is_there],
            base.rewards[at][is_there],
        )
        split = "train" if self._is_train else "eval"
        self._auditor.places.add_count(split, "missing", prompts=0, rollouts=len(absent))
        self._asked.left_out.add("missing", groups, tokens, rewards, groups_of(absent))
        self._asked.left_out.add("failed", groups, tokens, rewards, failed)

    def _check_environments(self, summaries: Summaries) -> None:
        """Each group is of the environment that the schedule has drawn for it."""
        labels = (
            self._asked.plan.labels(self._line.iteration) if self._asked.plan and self._is_train else None
        )
        if labels is None:
            return
        for place, group in enumerate(summaries.groups.tolist()):
            drawn = labels[group] if group < len(labels) else None
            if summaries.tags[place] != (drawn,):
                self._auditor.find(
                    Kind.DIFFERS,
                    f"group {group} is of {list(summaries.tags[place])}; the schedule has drawn {drawn!r}",
                    file=summaries.path,
                    line=summaries.lines[place],
                )

    def _account_for_training(
        self, transcripts: Transcripts, fates: Fates, places: Ints, rows: list[Ints]
    ) -> None:
        at, fate_at = rows[-2], rows[-1]
        keys, ok = transcripts.keys[at], transcripts.ok[at]
        if len(keys) == len(fates.keys):  # else a group may look constant because one of it is missing
            audit_fates(
                self._auditor,
                self._step,
                self._asked.iterations,
                self._number,
                keys,
                places,
                fates.advantages[fate_at],
                np.where(ok, transcripts.rewards[at], np.nan),
                transcripts.cut_off[at],
            )
        self._values |= recount.of_fates(
            groups_of(keys), places, transcripts.cut_off[at], ok, transcripts.tokens[at]
        )
        if self._asked.plan is not None:
            replies, episodes = transcripts.cuts(self._asked.plan.sampler.max_tokens)
            self._values |= recount.of_cuts(replies[at], episodes[at], ok)
        if self._line.steps is None:
            return
        self._trained = audit_steps(
            self._auditor,
            self._step,
            self._asked.iterations,
            self._number,
            self._line.steps,
            transcripts,
            fates.places_of(transcripts.keys),
            np.setdiff1d(fates.keys, transcripts.keys),
            passes=self._asked.plan.epochs if self._asked.plan is not None else None,
        )
        self._values["tokens/trained"] = self._trained.tokens
        if self._trained.entropy_sampled is not None:
            self._values["entropy_sampled"] = self._trained.entropy_sampled


def _rollouts(table: Table, at: Ints, places: Ints) -> Rollouts:
    return Rollouts(table.groups[at], places, table.turns[at], table.tokens[at], table.rewards[at])
