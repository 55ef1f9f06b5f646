"""The audit of a folder that one of Tinker's loops wrote, as far as it records what happened.

Its files hold the lengths and rewards of rollouts and no tokens, no fates and no failures; what was there
before a resume is overwritten. So the numbers of metrics.jsonl are counted again from the rollouts, and the
rest is said to be unanswered.
"""

from __future__ import annotations

import numpy as np

from rollbook.audit import recount
from rollbook.audit.auditor import Auditor
from rollbook.audit.metric_lines import MetricLines
from rollbook.audit.places import NUMBERS, Rollouts
from rollbook.audit.recount import Values
from rollbook.audit.result import Audit, Kind
from rollbook.audit.tables import Summaries, rollout_name
from rollbook.records.layout import TRAIN, Artifact
from rollbook.records.metrics import Row
from rollbook.runs.reader import RunReader

# Means over turns, one-hot stop reasons and rounding are its own; counts, lengths and rewards are ours too.
_SAME = (
    "rollouts", "total_episodes", "total_turns", "total_ac_tokens", "total_ob_tokens", "turns_per_episode",
    "ob_tokens_per_turn", "ac_tokens_per_turn", "reward/total", "by_group/frac_mixed",
    "by_group/frac_all_good", "by_group/frac_all_bad",
)  # fmt: skip
_UNANSWERED = (
    "what a resume replaced: its files are overwritten",
    "whether a file was changed later: there are no digests",
)
_OF_ROLLOUTS = (
    "which rollouts were trained, and with which advantages: there are no fates",
    "which tokens were sampled: only their numbers are recorded",
    "which prompts: a group is known by its place in the batch, which shifts when an earlier group fails",
    "which groups failed: they leave no record, so the others close the gap",
)


class TinkerAudit:
    def __init__(self, reader: RunReader, auditor: Auditor) -> None:
        self._reader, self._auditor = reader, auditor
        self._metrics = MetricLines(auditor, reader.files.metrics, is_open=True, is_ours=False)
        self._config = reader.config
        auditor.unanswered += _UNANSWERED

    def run(self) -> Audit:
        counted: dict[int, Values] = {}
        with_rollouts: dict[str, set[int]] = {}
        for found in self._reader.iterations():
            if (path := found.files.get(Artifact.SUMMARIES)) is None:
                continue
            table = Summaries(path)
            table.read(self._auditor, None, is_open=True)
            with_rollouts.setdefault(found.split, set()).add(found.iteration)
            self._check(table, found.split, found.iteration)
            counted.setdefault(found.iteration, {}).update(self._count(table, found.split))
        for step in sorted(counted):
            self._metrics.compare(step, counted[step])
        steps = self._training_steps()
        self._find_missing(steps, with_rollouts.get(TRAIN, set()))
        done, total = self._progress(steps)
        return self._auditor.result(kind="tinker", done=done, expected=total)

    def _check(self, table: Summaries, split: str, iteration: int) -> None:
        for other in sorted(table.claimed - {(split, iteration)}):
            what = f"its lines are of {other[0]} at iteration {other[1]}"
            self._auditor.find(Kind.FOREIGN, what, file=table.path)
        keys, first, counts = np.unique(table.keys, return_index=True, return_counts=True)
        for key, at in zip(keys[counts > 1].tolist(), first[counts > 1].tolist(), strict=True):
            what = f"{rollout_name(key)} is here more than once"
            self._auditor.find(Kind.DOUBLED, what, file=table.path, line=table.lines[at])
        sizes = np.bincount(table.groups) if len(table) else np.zeros(0, np.int64)
        for group in np.flatnonzero(sizes == 0).tolist():
            self._auditor.find(
                Kind.MISSING, f"group {group} is not here, and later ones are", file=table.path
            )

    def _count(self, table: Summaries, split: str) -> Values:
        kind, name = ("train", "recorded") if split == TRAIN else ("eval", "evaluated")
        places = np.full(len(table), NUMBERS[name])
        self._auditor.places.add(
            kind, Rollouts(table.groups, places, table.turns, table.tokens, table.rewards)
        )
        if split == TRAIN and self._config.get("remove_constant_reward_groups"):
            return {}  # its metrics leave out groups that its rollouts have, or both do
        values = recount.of_rollouts(table, split)
        return {key: value for key, value in values.items() if key.endswith(_SAME)}

    def _training_steps(self) -> dict[int, Row]:
        """The lines of training by step; evaluations have lines of their own in asynchronous runs."""
        found = {}
        for step in self._metrics.steps:
            lines = [row for _, row in self._metrics.at(step) if "progress/done_frac" in row]
            if lines:
                found[step] = lines[-1]
            if len(lines) > 1:
                self._auditor.notes.append(f"step {step} was run {len(lines)} times: the run was resumed")
        return found

    def _find_missing(self, steps: dict[int, Row], with_rollouts: set[int]) -> None:
        path = self._reader.files.metrics
        of_data = ["which rows or rollouts were trained: none are recorded"]
        self._auditor.unanswered += _OF_ROLLOUTS if with_rollouts else of_data
        for step in sorted(set(steps) - with_rollouts if with_rollouts else ()):
            what = f"step {step} has metrics, and no file of rollouts"
            self._auditor.find(Kind.MISSING, what, file=path)
        for step in sorted(with_rollouts - set(steps)):
            what = f"iteration {step} has rollouts, and no line of metrics: it did not come to its end"
            self._auditor.find(Kind.MISSING, what, file=path, next=_RESUME)
        done, total = self._progress(steps)
        for step in sorted(set(range(done)) - set(steps)):
            self._auditor.find(Kind.MISSING, f"step {step} has no line, and later ones have", file=path)
        if total is not None and done < total:
            what = f"{total - done} of {total} iterations were not run, or are being run"
            self._auditor.find(Kind.MISSING, what, file=path, next=_RESUME)
        if steps and (skipped := steps[max(steps)].get("rollout_errors/groups_skipped")):
            self._auditor.notes.append(f"{skipped} groups failed since the last resume, and are in no file")

    def _progress(self, steps: dict[int, Row]) -> tuple[int, int | None]:
        if not steps:
            return 0, None
        last = max(steps)
        fraction = steps[last].get("progress/done_frac")
        return last + 1, round((last + 1) / fraction) if fraction else None


_RESUME = "start the same loop again on this directory: it resumes from its last checkpoint"
