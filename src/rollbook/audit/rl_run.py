"""The audit of a run of rollouts, ours or of a loop recorded with `rollbook.Run`: by iterations every
prompt, rollout, turn and token, then what is around the iterations."""

from __future__ import annotations

import shlex
import sys
from collections import Counter

import msgspec

from rollbook.audit.auditor import RESTORE, Auditor
from rollbook.audit.checkpoints import Complete, audit_checkpoints, audit_logs
from rollbook.audit.compare import Step
from rollbook.audit.exports import ExportAudit
from rollbook.audit.iteration import Asked, IterationAudit, IterationLine
from rollbook.audit.leftovers import audit_unnamed_files, count_superseded
from rollbook.audit.manifest_line import NOT_WRITTEN
from rollbook.audit.metric_lines import MetricLines
from rollbook.audit.missing import LeftOut
from rollbook.audit.plan import RlPlan, read_plan
from rollbook.audit.recount import Values
from rollbook.audit.result import Audit, Kind
from rollbook.audit.scan import Scan, size_of
from rollbook.errors import BadFileError
from rollbook.records.layout import TRAIN
from rollbook.records.metrics import Row
from rollbook.records.run_info import RunInfo
from rollbook.records.token_places import manifests_of
from rollbook.runs.reader import RunReader
from rollbook.runs.status import writer_of

_OF_WEIGHTS = "whether losses and weights follow from these tokens: rollbook replay computes a step again"
_OF_BYTES = "whether the bytes of checkpoints are those that were saved: --verify reads them"
_NEVER = "nothing to restore: the loop ended its group without them"


class _IndexLine(msgspec.Struct, gc=False):
    split: str
    iteration: int


class RlAudit:
    def __init__(self, reader: RunReader, info: RunInfo, auditor: Auditor, *, verify: bool) -> None:
        self._auditor, self._info, self._files, self._verify = auditor, info, reader.files, verify
        # A killed writer may have left half a line, which the next one cuts.
        self._is_open = not info.attempts or info.attempts[-1].ended_at is None
        self._is_running = writer_of(reader.files, info) is not None
        self._plan = self._read_plan(reader) if info.kind == "rl" else None
        self._left_out = LeftOut()
        root = reader.files.root
        self._asked = Asked(root, reader.files.iterations, info.id, self._plan, self._left_out)
        self._end = size_of(reader.files.iterations)  # what is written from now on is not looked at
        self._lines: dict[Step, int] = {}  # of each complete iteration, the line that counts
        self._last: IterationLine | None = None  # of training
        self._complete_at: dict[int, int] = {}  # where the line of each training iteration ends

    def _read_plan(self, reader: RunReader) -> RlPlan | None:
        try:
            return read_plan(reader.config, reader.files, self._info)
        except BadFileError as error:
            self._auditor.find(Kind.UNREADABLE, error.why, file=error.path)
            return None

    def run(self) -> Audit:
        self._index_iterations()
        metrics = MetricLines(
            self._auditor, self._files.metrics, is_open=self._is_open, is_ours=self._plan is not None
        )
        exports = [
            ExportAudit(self._auditor, manifest, self._info.id)
            for manifest in manifests_of(self._files.root, self._info)
        ]
        self._audit_iterations(metrics, exports)
        self._audit_steps_of_metrics(metrics)
        self._find_missing_iterations()
        for export in exports:
            export.find_rest(self._next)
        audit_unnamed_files(
            self._auditor,
            self._files,
            self._info.id,
            self._lines,
            following=self._following,
            is_running=self._is_running,
            resume=self._resume,
        )
        count_superseded(self._auditor, self._files)
        audit_logs(self._auditor, self._files, self._info, is_open=self._is_open)
        rotates = self._plan is None or self._plan.save_total_limit is not None
        complete = Complete(self._complete_at, self._end)
        audit_checkpoints(self._auditor, self._files, complete, rotates=rotates, verify=self._verify)
        return self._result()

    @property
    def _next(self) -> int:
        """The first training iteration that is not complete."""
        done = [iteration for split, iteration in self._lines if split == TRAIN]
        return max(done) + 1 if done else 0

    @property
    def _following(self) -> range:
        """The iterations that may be under way; a loop that finishes none itself does so at a checkpoint."""
        is_one = self._plan is not None and not self._is_running
        return range(self._next, self._next + 1 if is_one else sys.maxsize)

    @property
    def _total(self) -> int | None:
        return self._plan.iterations if self._plan is not None else self._info.total_iterations

    @property
    def _resume(self) -> str:
        if self._plan is None:
            return "run the loop again with resume=True"
        return f"rollbook rl {shlex.quote(str(self._files.config))} --resume"

    def _index_iterations(self) -> None:
        if not self._files.iterations.exists():
            self._auditor.unanswered.append("which iterations are complete: there is no iterations.jsonl")
            return
        scan = Scan(self._auditor, self._files.iterations, _IndexLine, end=self._end, is_first_of_two=True)
        for numbers, _, ends, rows in scan:
            for number, end, row in zip(numbers, ends, rows, strict=True):
                step = (row.split, row.iteration)
                if step in self._lines and self._plan is not None:
                    what = f"iteration {step[1]} of {step[0]} is on line {self._lines[step]} already"
                    self._auditor.find(Kind.DOUBLED, what, file=self._files.iterations, line=number)
                self._lines[step] = number
                if row.split == TRAIN:
                    self._complete_at.setdefault(row.iteration, int(end))

    def _audit_iterations(self, metrics: MetricLines, exports: list[ExportAudit]) -> None:
        """Each in the order of the file; the metrics of a step once all its splits are counted."""
        if not self._files.iterations.exists():
            return
        left = Counter(iteration for _, iteration in self._lines)
        counted: dict[int, Values] = {}
        count = set(self._lines.values())
        scan = Scan(
            self._auditor, self._files.iterations, IterationLine, end=self._end, is_open=self._is_open
        )
        for numbers, _, _, lines in scan:
            for number, line in zip(numbers, lines, strict=True):
                if number not in count:
                    continue
                values = self._audit_iteration(line, number, exports)
                counted.setdefault(line.iteration, {}).update(values)
                left[line.iteration] -= 1
                if not left[line.iteration]:
                    rows = metrics.compare(line.iteration, counted.pop(line.iteration))
                    self._find_known_missing(metrics, rows)

    def _audit_iteration(self, line: IterationLine, number: int, exports: list[ExportAudit]) -> Values:
        iteration = line.iteration
        is_train = line.split == TRAIN
        is_exported = is_train and any(iteration in export.iterations for export in exports)
        audit = IterationAudit(self._auditor, self._asked, line, number)
        found = audit.run(with_digests=is_exported)
        values = found.values
        if is_exported:
            for export in exports:
                exported = export.audit(
                    iteration,
                    plan=self._plan,
                    transcripts=found.transcripts,
                    trained=found.trained,
                    fates=found.fates,
                )
                values |= exported.values if exported is not None else {}
        elif is_train and self._plan is not None and self._plan.exports(iteration):
            what = f"iteration {iteration} is in no token export"
            self._auditor.find(Kind.MISSING, what, file=self._files.iterations, line=number, next=NOT_WRITTEN)
        audit.compare_digests()
        if is_train:
            self._compare_weights(line, number)
        if line.error is not None:
            self._auditor.notes.append(
                f"iteration {iteration} of {line.split} was left with an error: {line.error}"
            )
        return values

    def _compare_weights(self, line: IterationLine, number: int) -> None:
        """An iteration begins with the weights that the one before has ended with."""
        before, self._last = self._last, line
        if before is None or before.iteration != line.iteration - 1:
            return
        ended, begun = before.weights_digest, line.weights_digest_before
        if ended is None or begun is None:
            return
        self._auditor.check("iterations that begin where the one before has ended", ended == begun)
        if ended != begun:
            what = f"iteration {line.iteration} began with weights {begun}, and {ended} were left"
            self._auditor.find(Kind.DIFFERS, what, file=self._files.iterations, line=number)

    def _find_known_missing(self, metrics: MetricLines, rows: list[tuple[int, Row]]) -> None:
        """Rollouts of which the run itself says that they never came; a plan knows those of training."""
        for number, row in rows:
            for key in [key for key in row if key.endswith("env/all/rollouts/missing") and row[key]]:
                prefix = key.removesuffix("env/all/rollouts/missing")
                if self._plan is not None and not prefix:
                    continue
                split = "eval" if prefix else "train"
                expected = row.get(f"{prefix}env/all/rollouts/expected")
                self._auditor.places.add_count(split, "missing", prompts=0, rollouts=int(row[key]))
                what = f"{row[key]} of {expected} rollouts that were asked for were never recorded"
                self._auditor.find(Kind.MISSING, what, file=metrics.path, line=number, key=key, next=_NEVER)

    def _audit_steps_of_metrics(self, metrics: MetricLines) -> None:
        """A line for each iteration, and an iteration for each line."""
        if self._plan is None:
            return
        steps = {iteration for _, iteration in self._lines}
        for step in sorted(steps - metrics.steps):
            if self._is_running and step >= self._next - 1:
                continue  # it comes next
            what = f"step {step} has no line, and the iteration is complete"
            self._auditor.find(Kind.MISSING, what, file=self._files.metrics, next=self._restore(step))
        for step in sorted(metrics.steps - steps):
            if self._is_running and step >= self._next:
                continue  # it was finished meanwhile
            what = f"step {step} has a line, and the iteration is not in iterations.jsonl"
            (number, _), *_ = metrics.at(step)
            self._auditor.find(Kind.DIFFERS, what, file=self._files.metrics, line=number)

    def _restore(self, step: int) -> str:
        """The last iteration of a run that was killed comes again; earlier lines do not."""
        return self._resume if self._is_open and step >= self._next - 1 else RESTORE

    def _find_missing_iterations(self) -> None:
        total = self._total
        done = {iteration for split, iteration in self._lines if split == TRAIN}
        holes = [i for i in range(self._next) if i not in done]
        for i in holes:
            what = f"iteration {i} is not here, and later ones are"
            self._auditor.find(Kind.MISSING, what, file=self._files.iterations)
        if self._plan is not None:
            groups = self._plan.groups * len(holes)
            rollouts = groups * self._plan.group_size
            self._auditor.places.add_count("train", "missing", prompts=groups, rollouts=rollouts)
            self._find_missing_evals(self._plan)
        if total is not None and self._next < total and not self._is_running:
            what = f"{total - self._next} of {total} iterations were not run, from {self._next} on"
            self._auditor.find(Kind.MISSING, what, file=self._files.iterations, next=self._resume)

    def _find_missing_evals(self, plan: RlPlan) -> None:
        is_over = self._next == plan.iterations and not self._is_running
        for i in range(self._next + is_over):
            for split in plan.splits_before(i):
                if (split, i) not in self._lines:
                    what = f"{split} is due at iteration {i}, and is not here"
                    hint = self._resume if i == plan.iterations else RESTORE
                    self._auditor.find(Kind.MISSING, what, file=self._files.iterations, next=hint)

    def _result(self) -> Audit:
        self._auditor.unanswered += [_OF_WEIGHTS] if self._verify else [_OF_WEIGHTS, _OF_BYTES]
        return self._auditor.result(
            kind=self._info.kind,
            id=self._info.id,
            is_running=self._is_running,
            done=self._next,
            expected=self._total,
            comparisons=self._left_out.comparisons(self._auditor.places),
        )
