"""The audit of a fine-tuning: rows kept and dropped, tokens trained, steps, points of both logs, checkpoints.

A run of another trainer (LLaMA-Factory, TRL) is audited by its trainer_log.jsonl and its checkpoints.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from rollbook.audit.auditor import Auditor
from rollbook.audit.checkpoints import audit_checkpoints, audit_logs
from rollbook.audit.exports import ExportAudit
from rollbook.audit.metric_lines import MetricLines
from rollbook.audit.result import Audit, Kind
from rollbook.audit.scan import size_of
from rollbook.errors import BadLineError
from rollbook.records.jsonl import read_lines
from rollbook.records.metrics import ALIASES
from rollbook.records.record import decode_json, decode_line
from rollbook.records.token_places import manifests_of
from rollbook.records.trainer_log import LOG
from rollbook.runs.reader import RunReader
from rollbook.runs.saved_models import saved_models
from rollbook.runs.status import writer_of

_STATE = "training_state.json"
_STORES = "data.train (the files, or the tokenizer)"  # [[key, weight], ...]
_LOGGED = {"lr": "learning_rate"}  # what trainer_log.jsonl calls a value of metrics.jsonl
_COMPARED = ("loss", "eval_loss", "lr", "grad_norm", "epoch")


class _Rows(msgspec.Struct):
    """report.json of tokenised data: what became of the rows."""

    rows: int
    samples: int
    tokens: int
    trained_tokens: int
    truncated: int = 0
    dropped_too_long: int = 0
    dropped_untrained: int = 0


class SftAudit:
    def __init__(self, reader: RunReader, auditor: Auditor, *, verify: bool) -> None:
        self._reader, self._auditor, self._verify = reader, auditor, verify
        self._files, self._info = reader.files, reader.info
        self._training: dict[str, Any] = dict(reader.config.get("training") or {})
        self._is_running = self._info is not None and writer_of(self._files, self._info) is not None
        self._is_open = self._info is None or not self._info.attempts or not self._info.attempts[-1].ended_at
        self._done, self._total = 0, 0

    def run(self) -> Audit:
        points = self._read_log()
        if self._info is not None:
            metrics = MetricLines(self._auditor, self._files.metrics, is_open=self._is_open, is_ours=True)
            self._compare_logs(points, metrics)
            tokens = {
                step: int(point["total_tokens"]) for step, _, point in points if "total_tokens" in point
            }
            self._audit_exports(tokens)
            self._account_for_rows(tokens)
            audit_logs(self._auditor, self._files, self._info, is_open=self._is_open)
            rotates = self._training.get("save_total_limit") is not None
            audit_checkpoints(self._auditor, self._files, None, rotates=rotates, verify=self._verify)
        else:
            self._audit_foreign_checkpoints()
        if self._done < self._total and not self._is_running:
            what = f"{self._total - self._done} of {self._total} steps were not taken"
            self._auditor.find(Kind.MISSING, what, file=self._files.root / LOG, next=self._resume)
        return self._result()

    @property
    def _resume(self) -> str:
        if self._info is None:
            return "resume it with its own trainer"
        return f"rollbook sft {shlex.quote(str(self._files.config))} --resume"

    def _read_log(self) -> list[tuple[int, int, dict[str, Any]]]:
        """(step, number of the line, content) of every point of trainer_log.jsonl."""
        path = self._files.root / LOG
        points: list[tuple[int, int, dict[str, Any]]] = []
        self._auditor.read(size_of(path))
        for number, row in self._rows(path):
            step = row.get("current_steps")
            if not isinstance(step, int):
                continue
            self._done = max(self._done, step)
            self._total = max(self._total, int(row.get("total_steps") or 0))
            if "loss" in row or "eval_loss" in row:
                points.append((step, number, row))
        self._check_steps(path, [(step, number) for step, number, row in points if "loss" in row])
        return points

    def _check_steps(self, path: Path, logged: list[tuple[int, int]]) -> None:
        """Every step that was to be logged has a line, and each comes behind the ones before."""
        every = int(self._training.get("logging_steps") or 0)
        steps = {step for step, _ in logged}
        for step in range(every, self._done + 1, every) if every else ():
            if step not in steps:
                self._auditor.find(Kind.MISSING, f"step {step} has no line", file=path)
        for (earlier, _), (later, number) in pairwise(logged):
            if later > earlier:
                continue
            if self._info is None:
                self._auditor.notes.append(f"line {number} goes back to step {later}: it was resumed there")
            else:
                what = f"step {later} is behind step {earlier}"
                self._auditor.find(Kind.DOUBLED, what, file=path, line=number)

    def _rows(self, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
        for line in read_lines(path) if path.exists() else ():
            try:
                yield line.number, decode_line(path, line)
            except BadLineError as error:
                self._auditor.find(Kind.UNREADABLE, error.why, file=path, line=line.number)

    def _compare_logs(self, points: list[tuple[int, int, dict[str, Any]]], metrics: MetricLines) -> None:
        """Every point is in both logs, with the same values."""
        for step, number, point in points:
            key = "loss" if "loss" in point else "eval_loss"
            lines = [(at, row) for at, row in metrics.at(step) if key in row]
            wrong = [] if lines else ["it is not in metrics.jsonl"]
            for at, row in lines:
                names = [name for name in _COMPARED if name in point]
                other = {
                    name: row.get(ALIASES.get(_LOGGED.get(name, name), _LOGGED.get(name, name)))
                    for name in names
                }
                wrong += [
                    f"{name} is {point[name]} here, and {other[name]} in metrics.jsonl:{at}"
                    for name in names
                    if other[name] != point[name]
                ]
            self._auditor.check("points that both logs have", not wrong)
            if wrong:
                what = f"{key} of step {step}: {'; '.join(wrong)}"
                self._auditor.find(Kind.DIFFERS, what, file=self._files.root / LOG, line=number, key=key)
        metrics.find_all_doubles()

    def _audit_exports(self, tokens: dict[int, int]) -> None:
        assert self._info is not None
        for manifest in manifests_of(self._files.root, self._info):
            export = ExportAudit(self._auditor, manifest, self._info.id)
            for step in sorted(export.iterations):
                exported = export.audit(step, plan=None, transcripts=None, trained=None, fates=None)
                before = tokens.get(step - 1, 0 if step == 1 else None)
                if exported is None or before is None or step not in tokens or exported.step.fraction < 1:
                    continue
                found, trained = exported.step.tokens, tokens[step] - before
                self._auditor.check("steps whose tokens are in the export", found == trained)
                if found != trained:
                    what = f"step {step} has {found} tokens here, and trained {trained}"
                    self._auditor.find(Kind.DIFFERS, what, file=manifest)
            export.find_rest(self._done + 1)

    def _account_for_rows(self, tokens: dict[int, int]) -> None:
        """What became of the rows of the data, by the report that tokenising them left."""
        reports = self._reports()
        if not reports:
            self._auditor.unanswered.append(
                "which rows were dropped, and why: the tokenised data is gone from artifacts/data/tokens"
            )
            return
        for name, report in reports.items():
            lost = report.dropped_too_long + report.dropped_untrained
            self._auditor.check("datasets whose rows add up", report.rows == report.samples + lost)
            self._auditor.notes.append(
                f"{name}: {report.rows:,} rows, {report.samples:,} kept ({report.truncated:,} cut off), "
                f"{report.dropped_too_long:,} dropped as too long, {report.dropped_untrained:,} as empty"
            )
        self._compare_tokens([report.tokens for report in reports.values()], tokens)

    def _reports(self) -> dict[str, _Rows]:
        """What was read of each dataset, from the keys in a checkpoint and the stores beside it; empty if
        one is gone."""
        datasets = [
            str(dataset.get("path")) for dataset in (self._reader.config.get("data") or {}).get("train", ())
        ]
        for model in reversed(saved_models(self._files.root)):
            try:
                state = decode_json((model.path / _STATE).read_bytes())
                keys = [key for key, _ in state["sft"]["data"][_STORES]]
                stores = self._files.root.parent.parent / "data" / "tokens"
                found = [
                    msgspec.json.decode((stores / key / "report.json").read_bytes(), type=_Rows)
                    for key in keys
                ]
            except (OSError, ValueError, KeyError, TypeError, msgspec.MsgspecError):
                continue
            return dict(zip(datasets, found, strict=False))
        return {}

    def _compare_tokens(self, sizes: list[int], tokens: dict[int, int]) -> None:
        """A run of whole epochs over all of its data has trained every token of it as often."""
        epochs = self._training.get("num_train_epochs")
        datasets = (self._reader.config.get("data") or {}).get("train", ())
        is_plain = all(dataset.get("weight", 1.0) == 1.0 for dataset in datasets)
        is_whole = isinstance(epochs, int | float) and float(epochs).is_integer()
        if not is_plain or not is_whole or self._training.get("max_steps") or self._done < self._total:
            return
        wanted, found = int(epochs or 0) * sum(sizes), tokens.get(self._done)
        self._auditor.check("tokens of the data that were trained in every epoch", found == wanted)
        if found != wanted:
            what = f"{found} tokens were trained, and {int(epochs or 0)} epochs have {wanted}"
            self._auditor.find(Kind.DIFFERS, what, file=self._files.root / LOG)

    def _audit_foreign_checkpoints(self) -> None:
        for model in saved_models(self._files.root):
            self._auditor.check("checkpoints that are complete", model.complete)
            if not model.complete:
                self._auditor.find(Kind.MISSING, str(model.problem), file=model.path, next=self._resume)
        self._auditor.unanswered.append("which rows were trained or dropped: this trainer does not record it")

    def _result(self) -> Audit:
        return self._auditor.result(
            kind="sft",
            id=self._info.id if self._info is not None else None,
            is_running=self._is_running,
            done=self._done,
            expected=self._total or None,
            unit="steps",
        )
