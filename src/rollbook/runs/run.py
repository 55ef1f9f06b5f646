"""The writer of a run: everything a training loop leaves behind goes through `Run`.

    with rollbook.Run("runs/a", config=config, total_iterations=100) as run:
        for i in range(run.next_iteration, 100):
            with run.rollouts(iteration=i) as rollouts: ...
            run.log_metrics(rollouts.metrics(), step=i)
            with run.checkpoint(f"{i + 1:06d}", batch=i + 1) as directory: ...

A directory that already holds a run is refused unless `resume` is given; then the run goes back to its
newest complete checkpoint (see `rewind`) and the loop continues as if nothing had happened. One process
writes a run; a second one is refused with the pid and host of the first.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollbook.errors import UsageError
from rollbook.records import logtree
from rollbook.records.alerts import Alert, Level
from rollbook.records.atomic import copy_whole
from rollbook.records.checkpoints import CheckpointRecord, is_complete, read_checkpoints
from rollbook.records.code_state import capture_code, write_code_diff
from rollbook.records.complete import COMPLETE, complete_directory
from rollbook.records.config import dump_config
from rollbook.records.iterations import IterationRecord
from rollbook.records.jsonl import JsonlWriter
from rollbook.records.layout import TRAIN, Artifact, Layout, RunFiles, base_name
from rollbook.records.locks import FileLock
from rollbook.records.metrics import as_step, encode_metrics
from rollbook.records.plain import utc_now
from rollbook.records.redact import redact_text
from rollbook.records.rollouts import describe_error
from rollbook.records.run_info import write_run_info
from rollbook.records.run_inputs import RunInput, with_new
from rollbook.records.token_files import TOKEN_EXPORTS
from rollbook.runs.announce import HistoryEntry, write_output_dir_note
from rollbook.runs.config_history import keep_old, renew_config
from rollbook.runs.finished import Again, FinishedIterations
from rollbook.runs.random_state import RANDOM_STATE, encode_random_state, read_random_state
from rollbook.runs.rewind import attempt_directory, set_aside
from rollbook.runs.rollout_log import RolloutLog
from rollbook.runs.run_logs import RunLogs
from rollbook.runs.start import Resume, parse_layout, start_run
from rollbook.runs.stop_signals import Stopped
from rollbook.runs.trackers import Trackers, parse_trackers, trackers_in

_log = logging.getLogger("rollbook")


class Run:
    def __init__(
        self,
        log_path: str | Path,
        *,
        config: object = None,
        kind: str = "rl",
        total_iterations: int | None = None,
        layout: Layout | str = Layout.FLAT,
        num_groups_to_log: int = 4,
        resume: Resume = False,
        trackers: Any = None,
        history: str | Path | None = None,
        code: Path | None = None,
    ) -> None:
        """`resume` is True for the newest complete checkpoint (or a fresh start), or a checkpoint's name; its
        files are compared with their digests. A `Choice` is one that the caller has made and spoken of.

        `trackers` names wandb, trackio or tensorboard: one, a list, or a mapping with their settings; by
        default those under `trackers` in the config.
        `history` is an `artifacts` directory whose index.yaml gets the start and the end of this process; a
        process under `rollbook run` is in the history already and ignores it.
        `code` is a path inside the repository that `code.diff` describes; by default the running script's.
        """
        if not str(log_path):
            raise UsageError("log_path is empty; name a directory for the run")
        # Absolute, so that a loop that changes its directory later does not split the run in two.
        self.files = RunFiles(Path(log_path).expanduser().absolute(), parse_layout(layout))
        total_iterations = None if total_iterations is None else as_step(total_iterations)
        self.num_groups_to_log = num_groups_to_log
        self.total_iterations = total_iterations
        self._pid = os.getpid()
        self._eval_names: dict[str, str] = {}
        self._open_rollouts: set[RolloutLog] = set()
        self._opened: ExitStack | None = None
        # What is refused is refused before anything is written, so that the corrected call succeeds.
        named = parse_trackers(trackers if trackers is not None else trackers_in(config))
        dumped = None if config is None else dump_config(config)
        with ExitStack() as opened:
            self._lock = opened.enter_context(FileLock(self.files.run))
            start = start_run(self.files, kind=kind, total_iterations=total_iterations, resume=resume)
            self.info, self.resumed_from = start.info, start.resumed_from
            self._logs = RunLogs(self.files, self.info, self._lock)
            opened.callback(self._logs.close)
            self._finished = FinishedIterations(self.files, self._logs.iterations)
            self._checkpoint_names = {c.record.name for c in read_checkpoints(self.files.checkpoints)}
            for text in start.passed_over:
                self.alert("a damaged checkpoint was passed over", text)
                if resume is True:
                    _log.warning("%s: %s", self.files.root, text)
            if config is not None and (changes := renew_config(self.files, self.attempt, config)):
                listed = "\n".join(f"{change.key}: {change.old!r} -> {change.new!r}" for change in changes)
                self.alert("resumed with another config", listed, level=Level.INFO)
            keep_old(self.files.code_diff, self.files, self.attempt)
            write_code_diff(self.files.code_diff, capture_code(code))
            self._trackers = Trackers(named, self.files, self.info, dumped, self.alert)
            opened.callback(self._trackers.close)
            write_output_dir_note(self.files.root)
            resumed_from = self.resumed_from.name if self.resumed_from else None
            self._history = HistoryEntry(history, self.files, self.info, resumed_from, self.alert)
            self.restore_random_state()
            self._opened = opened.pop_all()

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def attempt(self) -> int:
        """1 for the first process that wrote this run, one more for each resume."""
        return len(self.info.attempts)

    @property
    def next_iteration(self) -> int:
        """Where the loop begins: 0, or the iteration the checkpoint was saved for."""
        return (self.resumed_from.batch or 0) if self.resumed_from else 0

    def restore_random_state(self) -> bool:
        """Put the random generators (random, numpy, torch, CUDA) back to where the checkpoint has them.

        Opening a run does it on resume. Call it again right before the loop where something in between draws
        random numbers, such as the first weights of a model. False: there is nothing to go back to.
        """
        state_path = self.resumed_from.state_path if self.resumed_from else None
        if state_path is None or not (self.files.root / state_path / RANDOM_STATE).exists():
            return False
        read_random_state(self.files.root / state_path / RANDOM_STATE)
        return True

    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        self._logs.metrics.append(encode_metrics(metrics, step, self.total_iterations))
        self._trackers.log(metrics, step)

    def alert(
        self, title: str, text: str = "", *, level: str = Level.WARNING, step: int | None = None
    ) -> None:
        """Note something a person should look at."""
        if level not in list(Level):
            raise UsageError(f"alert level {level!r} is not one of {', '.join(Level)}")
        title, text = redact_text(str(title)), redact_text(str(text))
        record = Alert(raised_at=utc_now(), level=Level(level), title=title, text=text, step=step)
        self._logs.alerts.append(record.encode())

    @contextmanager
    def rollouts(
        self, iteration: int, split: str = TRAIN, *, title: str | None = None, again: Again | None = None
    ) -> Iterator[RolloutLog]:
        """Record the rollouts of one iteration; `split` is `train` or `eval/<name>`.

        An iteration is recorded once. `again="append"` adds groups to it in another block, and
        `again="replace"` sets what was recorded aside, as happens by itself after a resume or an exception.
        """
        iteration = as_step(iteration)
        title = title or (f"Iteration {iteration}" if split == TRAIN else f"{split} at iteration {iteration}")
        with self._recording(split, iteration, tuple(Artifact), again) as path_of:
            log = RolloutLog(
                run_id=self.id,
                split=split,
                iteration=iteration,
                path_of=path_of,
                num_groups_to_log=self.num_groups_to_log,
                lock=self._lock,
                appends=again == "append",
            )
            self._open_rollouts.add(log)
            trace = logtree.Trace(title)
            try:
                with logtree.trace(trace):
                    yield log
            finally:
                self._open_rollouts.discard(log)
                log.close()
                log.write_report(trace)

    @contextmanager
    def report(self, iteration: int, split: str = TRAIN, *, title: str) -> Iterator[logtree.Trace]:
        """A report of the loop's own making, for an iteration that `rollouts` does not record."""
        parts = (Artifact.HTML, Artifact.LOGTREE)
        with self._recording(split, as_step(iteration), parts, "replace") as path_of:
            trace = logtree.Trace(title)
            try:
                with logtree.trace(trace):
                    yield trace
            finally:
                if self.num_groups_to_log > 0:
                    logtree.write(trace, html=path_of(Artifact.HTML), json=path_of(Artifact.LOGTREE))

    def append_log(self, name: str) -> JsonlWriter:
        """A log of the loop's own, by its path below the run's directory, as `token_exports/rank_0.jsonl`.

        Its length is in every checkpoint, and a resume cuts it back. A log named for `rank_0` stands for
        those of all ranks, which the other processes write themselves (see `NullRun`).
        """
        self._refuse_if_closed()
        return self._logs.append_log(name)

    def add_token_export(self, manifest: Path) -> None:
        """Note in run.json where the run exports its tokens; a resume takes the export back with the logs."""
        root = self.files.root
        name = str(manifest.relative_to(root) if manifest.is_relative_to(root) else manifest)
        known = self.info.extra.get(TOKEN_EXPORTS) or []
        if name not in known:
            self.info.extra[TOKEN_EXPORTS] = [*known, name]
            write_run_info(self.files.run, self.info)

    def note_inputs(self, inputs: Iterable[RunInput]) -> None:
        """Note in run.json what the run is made from, for `rollbook lineage`.

        They are made by `file_input("data", path)` and `directory_input("model", path)` of
        `rollbook.records.run_inputs`.
        """
        self._refuse_if_closed()
        known = self.info.inputs or []
        self.info.inputs = with_new(known, inputs, self.attempt)
        if len(self.info.inputs) > len(known):
            write_run_info(self.files.run, self.info)

    def finish_iteration(self, record: IterationRecord) -> None:
        """Note in iterations.jsonl that an iteration or evaluation is complete, and what became of it.

        Call it after the `rollouts` block; the line is on the disk when this returns, and so are the files it
        names. For what a loop does not finish itself, the next checkpoint notes only that it is complete.
        """
        self._refuse_if_closed()
        self._finished.finish(record)

    @contextmanager
    def _recording(
        self, split: str, iteration: int, parts: tuple[Artifact, ...], again: Again | None
    ) -> Iterator[Callable[[Artifact], Path]]:
        """These files are being written; what an earlier recording left of them is set aside."""
        self._refuse_if_closed()
        base = base_name(split)
        known = self._eval_names.setdefault(base, split)
        if known != split:
            raise UsageError(
                f"{split!r} and {known!r} would write the same files ({base}_...); rename one of them"
            )
        self._finished.begin(split, iteration, again)
        ended: str | None = None
        try:
            path_of = partial(self.files.iteration, split, iteration)
            goes_on = (
                {path_of(Artifact.SUMMARIES), path_of(Artifact.TRANSCRIPTS)} if again == "append" else ()
            )
            for path in filter(Path.exists, map(path_of, parts)):
                kept = self._set_aside(path)
                if path in goes_on:  # what a checkpoint knows as complete stays as it was
                    copy_whole(kept, path)
            yield path_of
        except BaseException as error:
            ended = describe_error(error)
            raise
        finally:
            self._finished.end(split, iteration, ended)

    @contextmanager
    def checkpoint(
        self,
        name: str,
        *,
        batch: int,
        final: bool = False,
        log_lengths: Mapping[str, int] | None = None,
        **loop_state: Any,
    ) -> Iterator[Path]:
        """Save into the directory this yields; it becomes `checkpoints/<name>` complete, or not at all.

        The state of the random generators is saved with it, unless the block has written one of its own.
        `log_lengths` win over the lengths of the logs now: those of logs that other processes write, where
        this one cannot see them, or of logs that have gone on since the moment that is saved.
        """
        self._refuse_checkpoint(name, loop_state)
        target = self.files.checkpoint(name)
        batch = as_step(batch)
        with complete_directory(target, displace=self._set_aside) as aside:
            yield aside
            random_state = aside / RANDOM_STATE
            if not random_state.exists():
                random_state.write_bytes(encode_random_state())
        path = str(target.relative_to(self.files.root))
        self.record_checkpoint(
            name, batch=batch, final=final, state_path=path, log_lengths=log_lengths, **loop_state
        )

    def record_checkpoint(
        self,
        name: str,
        *,
        batch: int,
        state_path: str | None = None,
        sampler_path: str | None = None,
        final: bool = False,
        log_lengths: Mapping[str, int] | None = None,
        **loop_state: Any,
    ) -> CheckpointRecord:
        """Note a checkpoint that was saved elsewhere; every log is on the disk before the record is."""
        self._refuse_checkpoint(name, loop_state)
        batch = as_step(batch)
        self._finished.finish_rest()
        self.sync()
        record = CheckpointRecord(
            name=name,
            batch=batch,
            final=final or None,
            state_path=state_path,
            sampler_path=sampler_path,
            saved_at=utc_now(),
            log_lengths=self._logs.lengths(log_lengths),
            extra=loop_state,
        )
        if not is_complete(record, self.files.root):
            raise UsageError(
                f"checkpoint {name!r}: {state_path or sampler_path} is not there or has no {COMPLETE} file, "
                "so no run could resume from it; save first, and give paths relative to the run directory"
            )
        self._logs.checkpoints.append(record.encode())
        self._checkpoint_names.add(name)
        return record

    def sync(self) -> None:
        """Put everything logged so far on the disk."""
        self._logs.sync()
        for log in list(self._open_rollouts):
            log.sync()

    def close(self, outcome: str = "completed", error: str | None = None) -> None:
        """End the run; safe to call twice. Leaving the `with` block calls it with what happened."""
        if self._opened is None or os.getpid() != self._pid:  # a forked child leaves the parent's run alone
            return
        current = self.info.attempts[-1]
        current.ended_at, current.outcome, current.error = utc_now(), outcome, error
        opened, self._opened = self._opened, None
        with opened:
            self._finished.finish_rest()
            self.sync()
            write_run_info(self.files.run, self.info)
            self._history.end(outcome, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        elif isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            self.close("interrupted", repr(error))
        elif isinstance(error, Stopped):
            self.close("interrupted", str(error))
        else:
            self.close("failed", redact_text(f"{type(error).__name__}: {error}"))

    def _set_aside(self, path: Path) -> Path:
        return set_aside(path, self.files, attempt_directory(self.files, self.attempt))

    def _refuse_checkpoint(self, name: str, loop_state: Mapping[str, Any]) -> None:
        self._refuse_if_closed()
        if not isinstance(name, str) or not name:
            raise UsageError(f"a checkpoint's name is text, not {name!r}; f'{{batch:06d}}' is the custom")
        if name in self._checkpoint_names:
            raise UsageError(f"checkpoint {name!r} is already recorded; choose another name")
        if taken := loop_state.keys() & set(CheckpointRecord.__struct_fields__):
            raise UsageError(
                f"loop state {', '.join(sorted(taken))}: these keys are the record's own; rename them"
            )

    def _refuse_if_closed(self) -> None:
        if self._opened is None:
            raise UsageError(f"{self.files.root}: the run is closed")
