"""What a fine-tuning leaves behind: a run like any other, with the files of LLaMA-Factory and the Trainer.

`Run` writes metrics.jsonl, checkpoints.jsonl, alerts.jsonl and config.json; `records/trainer_log.py` makes
trainer_log.jsonl, trainer_state.json and the results. A `checkpoint-<step>/` is complete or absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from rollbook.errors import RollbookError
from rollbook.records.alerts import Level
from rollbook.records.atomic import write_atomic
from rollbook.records.checkpoints import NOTHING_SAVED, Choice
from rollbook.records.complete import complete_directory, remove_directory, remove_unfinished
from rollbook.records.metrics import ALIASES
from rollbook.records.run_inputs import RunInput
from rollbook.records.token_files import RunIdentity
from rollbook.records.trainer_log import (
    ALL_RESULTS,
    LOG,
    PICTURE,
    RESULTS,
    STATE,
    TrainerLog,
    best_point,
    pretty,
    read_points,
    trainer_state,
    write_results,
)
from rollbook.runs.jobs.finish import HANDED_OVER
from rollbook.runs.null_run import open_writer
from rollbook.runs.rewind import attempt_directory, set_aside
from rollbook.runs.saved_models import saved_models
from rollbook.sft.resume import Progress
from rollbook.sft.settings import SftSettings


class SftRecord:
    """The files of one session of a run. Use as a context manager."""

    def __init__(
        self,
        directory: Path,
        settings: SftSettings,
        artifacts: Path,
        progress: Progress,
        total_steps: int,
        choice: Choice = NOTHING_SAVED,
        *,
        rank: int = 0,
    ) -> None:
        """Rewinds the run that is there to the checkpoint that `progress` is of, or to its beginning.

        Only the first process writes; the others have the same methods.
        """
        self.directory, self._settings, self._total = directory, settings, total_steps
        self._writes = rank == 0
        self._run = open_writer(
            directory,
            rank=rank,
            config=msgspec.to_builtins(settings),
            kind="sft",
            resume=choice,
            trackers=settings.trackers,
            history=artifacts,
        )
        if self._writes:
            self._clear(progress.step)
        self._log = TrainerLog(
            self._run.append_log(LOG).append,
            total_steps=total_steps,
            step=progress.step,
            elapsed_s=progress.elapsed_s,
        )

    @property
    def elapsed_s(self) -> float:
        """Over all sessions of the run."""
        return self._log.elapsed_s

    def point(self, values: Mapping[str, float], progress: Progress) -> None:
        """One line of each log: loss, learning_rate, grad_norm, epoch, or eval_loss and what goes with it."""
        self._log.add(progress.step, values, progress.tokens)
        named = {ALIASES.get(name, name): value for name, value in values.items()}
        done = {"tokens": progress.tokens, "progress/done_frac": progress.step / self._total}
        self._run.log_metrics({**named, **done}, step=progress.step)

    @property
    def identity(self) -> RunIdentity:
        """Whose records a token export holds."""
        return RunIdentity(self._run.id, self._run.attempt)

    def note_inputs(self, inputs: Iterable[RunInput]) -> None:
        """Note in run.json what the run is made from."""
        self._run.note_inputs(inputs)

    def add_token_export(self, manifest: Path) -> None:
        self._run.add_token_export(manifest)

    def alert(self, title: str, text: str, step: int | None) -> None:
        self._run.alert(title, text, level=Level.ERROR, step=step)

    @contextmanager
    def checkpoint(self, step: int) -> Iterator[None]:
        """While it is open, all processes write into `unfinished_path(directory / "checkpoint-<step>")`."""
        name = f"checkpoint-{step}"
        path = self.directory / name
        with complete_directory(path, displace=self._set_aside) if self._writes else nullcontext():
            yield
        self._run.record_checkpoint(name, batch=step, final=step == self._total, state_path=name)
        if self._writes:
            self._rotate()

    def write_state(
        self, progress: Progress, totals: Mapping[str, float], copy: Path | None = None, **summary: Any
    ) -> None:
        """Replace trainer_state.json, and write a `copy` into a checkpoint."""
        if not self._writes:
            return
        made = trainer_state(
            self.directory / LOG,
            step=progress.step,
            total_steps=self._total,
            tokens=progress.tokens,
            training=msgspec.to_builtins(self._settings.training),
            summary=summary,
            **totals,
        )
        write_atomic(self.directory / STATE, pretty(made))
        if copy is not None:
            copy.write_bytes(pretty(made))

    def finish(self, results: Mapping[str, Any], progress: Progress, totals: Mapping[str, float]) -> None:
        """The summary of a run that reached its end."""
        self._log.add(progress.step, {"epoch": results["epoch"]}, progress.tokens)
        self.write_state(progress, totals, **results)
        if self._writes:
            write_results(self.directory, results)
            self._draw()

    def __enter__(self) -> SftRecord:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._run.__exit__(*raised)

    def _clear(self, step: int) -> None:
        """Remove what a killed save left, and what stands for steps that are about to be taken again."""
        remove_unfinished(self.directory)
        for name in (RESULTS, ALL_RESULTS, PICTURE):
            (self.directory / name).unlink(missing_ok=True)
        for model in saved_models(self.directory):
            if model.step > step:
                self._set_aside(model.path)

    def _set_aside(self, path: Path) -> None:
        set_aside(path, self._run.files, attempt_directory(self._run.files, self._run.attempt))

    def _rotate(self) -> None:
        """Remove the oldest beyond save_total_limit; never the newest, the best or one handed over."""
        keep = self._settings.training.save_total_limit
        if keep is None:
            return
        best, marker = best_point(read_points(self.directory / LOG)), self.directory / HANDED_OVER
        spared = set(marker.read_text().splitlines()) if marker.exists() else set[str]()
        models = saved_models(self.directory)
        old = [
            model.path
            for model in models[:-1]
            if str(model.path.absolute()) not in spared and (best is None or model.step != best[0])
        ]
        for path in old[: max(0, len(models) - keep)]:
            remove_directory(path)

    def _draw(self) -> None:
        from rollbook.runs.plots import curves_of, draw

        try:
            if curves := curves_of(self.directory):
                draw(curves, self.directory / PICTURE, self.directory.name)
        except (RollbookError, OSError, ValueError, ImportError) as error:  # the run itself is complete
            self._run.alert(f"{PICTURE} was not drawn", str(error), level=Level.WARNING)
