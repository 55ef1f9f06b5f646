"""What a run came to: its last numbers and its checkpoint, for the history and for the handoff.

Read from the files of its output directory, whatever wrote them. The supervisor calls `record_result` when a
job has ended; `rollbook promote` uses the same for any checkpoint of any run, later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollbook.errors import RollbookError, UsageError
from rollbook.records import complete
from rollbook.records.atomic import write_atomic
from rollbook.records.checkpoints import flaw, has_mark, read_checkpoints
from rollbook.records.progress import read_progress
from rollbook.records.record import decode_json
from rollbook.records.trainer_log import (
    LOG,
    PICTURE,
    RESULTS,
    STATE,
    last_line,
    nonfinite_steps,
    read_points,
)
from rollbook.runs.divergence import MOST, WINDOW, StepsLeftOut
from rollbook.runs.jobs.collected import judge_collection, progress_file_of_job
from rollbook.runs.jobs.job import Job, Started
from rollbook.runs.jobs.ledger import Ledger, RunEnd, RunRecord, Status
from rollbook.runs.saved_models import SavedModel, newest_model, saved_models
from rollbook.runs.standing import standing_of

if TYPE_CHECKING:
    from rollbook.runs.handoff import HandoffResult

OUTPUT_DIR_NOTE = "output_dir"  # written into a run's archive by whoever learns the directory first
HANDED_OVER = "handed_over"  # in an output directory: checkpoints that somebody was told to use, a line each
_FALLBACK = "output.yaml"
_log = logging.getLogger("rollbook")
_CLOCK_SLACK_S = 2.0  # file systems keep times to the second or two


def record_result(job: Job, started: Started, end: RunEnd) -> None:
    """Add metrics and checkpoint to the end of a run; publish them if it succeeded and has a config."""
    directory = job.output_dir or noted_output_dir(started.archive)
    saved = None
    launched = _launched_at(started.archive)
    if (progress := progress_file_of_job(job, started.archive)) is not None:
        end.extra["output_dir"] = str(directory or progress.parent)
        if _is_newer(progress, launched):
            judge_collection(end, read_progress(progress))
    elif directory is not None:
        end.extra["output_dir"] = str(directory)
        _add_metrics(directory, end, launched)
        saved = newest_model(directory) or _newest_recorded(directory)
        if saved is not None and not _is_newer(saved.path, launched):
            # An earlier run's in the same directory, unless this run went on with it and had nothing to save.
            went_on = _is_newer(directory / "run.json", launched)
            saved = _newest_recorded(directory) if went_on else None
        if saved is not None:
            end.checkpoint = {"path": str(saved.path), "step": saved.step}
        if _is_newer(directory / LOG, launched):
            _draw_loss(directory)  # also of a run that was killed
        if (tracker := _tracker_id(directory)) is not None:
            end.tracker = {"id": tracker}
    if job.config_path is not None and end.status is Status.COMPLETED:
        end.extra["handoff"] = _why_not(job, directory, launched) or _hand_over(
            job.config_path, directory, saved, started
        )


def _hand_over(config: Path, directory: Path | None, saved: SavedModel | None, started: Started) -> str:
    """What became of the handoff, in words for the history and the terminal."""
    if directory is None:
        return "nothing to publish: the run did not say where it writes (--output-dir)"
    if saved is None:
        return f"nothing to publish: no complete checkpoint of this run in {directory}"
    _draw_loss(directory)
    outcome = publish_checkpoint(config, directory, saved, log=started.log, archive=started.archive)
    if not outcome.published:
        return f"{config} was left alone: {outcome.reason}. {outcome.next_step}".strip()
    newest = max((model.step for model in saved_models(directory)), default=saved.step)
    skipped = f"; checkpoint-{newest} is not complete and was passed over" if newest > saved.step else ""
    return f"{outcome.state}: checkpoint of step {saved.step}{skipped}"


def _draw_loss(directory: Path) -> None:
    """Draw the loss unless the trainer did since its last line. No result is held back for want of it."""
    picture, log = directory / PICTURE, directory / LOG
    if picture.exists() and (not log.exists() or picture.stat().st_mtime >= log.stat().st_mtime):
        return
    from rollbook.runs.plots import curves_of, draw

    try:
        draw(curves_of(directory), picture, directory.name)
    except (RollbookError, OSError, ValueError, ImportError) as error:
        _log.warning("%s was not drawn: %s", picture, error)


def _add_metrics(directory: Path, end: RunEnd, launched: float) -> None:
    logs = [directory / name for name in (LOG, "metrics.jsonl", STATE)]
    if not any(_is_newer(log, launched) for log in logs):
        return
    end.metrics = final_metrics(directory)


def final_metrics(directory: Path) -> dict[str, Any] | None:
    """The last numbers of a run, for the history."""
    step = standing_of(directory).step
    return {**result_values(directory), **({} if step is None else {"steps": step})} or None


def _why_not(job: Job, directory: Path | None, launched: float) -> str | None:
    """Why the result of a command that ended with 0 is not handed over."""
    if job.ends_diverged or directory is None:
        return None
    if not any(_is_newer(directory / name, launched) for name in (LOG, STATE)):
        return None
    why = why_diverged(directory)
    return why and f"nothing published: {why}. To publish it all the same: rollbook promote {job.name}"


def why_diverged(directory: Path, most: int = MOST, setting: str = "a run") -> str | None:
    """Why the numbers that a trainer of others has logged are no result; None where they are finite."""
    points = [*(_json(directory / STATE).get("log_history") or []), *read_points(directory / LOG)]
    points = [point for point in points if "loss" in point and isinstance(point.get("step"), int)]
    last = max((point["step"] for point in points), default=0)
    left_out = sorted({step for step in nonfinite_steps(points) if step > last - WINDOW})
    return StepsLeftOut(most, setting, taken=last, left_out=left_out).problem(is_last=True)


def _launched_at(archive: Path) -> float:
    """The snapshot is the last thing written before the command starts."""
    return (archive / "snapshot.json").stat().st_mtime if (archive / "snapshot.json").exists() else 0.0


def _is_newer(path: Path, launched: float) -> bool:
    if not path.exists():
        return False
    files = [path, *path.iterdir()] if path.is_dir() else [path]
    # Of a link its own time counts: where it leads may be gone.
    return max(file.lstat().st_mtime for file in files) >= launched - _CLOCK_SLACK_S


def publish_checkpoint(
    config: Path,
    directory: Path,
    saved: SavedModel,
    *,
    log: Path | None,
    archive: Path,
    curves: str | None = None,
    retry: str = "rollbook promote RUN",
) -> HandoffResult:
    from rollbook.runs.handoff import HandoffOutput, publish  # late: `status` reads this module, not YAML

    newest = max((model.step for model in saved_models(directory) if model.complete), default=saved.step)
    # An earlier checkpoint gets the numbers of its own trainer state, not those of the end of the run.
    values = result_values(directory if saved.step >= newest else saved.path)
    files = {name: directory / file for name, file in _FILES.items() if (directory / file).exists()}
    output = HandoffOutput(
        checkpoint_path=saved.path,
        final_loss=values.get("final_loss"),
        train_runtime=values.get("train_runtime"),
        total_steps=saved.step,
        last_loss=values.get("last_loss"),
        mean_loss=values.get("mean_loss"),
        final_reward=values.get("last_reward"),
        train_results=files.get("train_results"),
        train_loss_plot=files.get("train_loss_plot"),
        training_log=log if log is not None and log.exists() else None,
        training_curves=curves or _tracker_id(directory),
    )
    result = publish(config, output, fallback=archive / _FALLBACK, retry=retry)
    if result.published:
        _note_handed_over(directory, saved.path)
    return result


def publish_again(ledger: Ledger, record: RunRecord, config: Path, saved: SavedModel) -> HandoffResult:
    """Publish a checkpoint of a run that the history knows."""
    directory = output_dir_of(record, ledger)
    assert directory is not None  # `saved` was found there
    return publish_checkpoint(
        config,
        directory,
        saved,
        log=ledger.resolve(record.log) if record.log else None,
        archive=ledger.resolve(record.archive) if record.archive else directory,
        curves=str(record.tracker["id"]) if record.tracker and record.tracker.get("id") else None,
        retry=f"rollbook promote {record.name}@{saved.step} --config {config}",
    )


def _note_handed_over(directory: Path, checkpoint: Path) -> None:
    """For whoever rotates the checkpoints of a run that goes on: this one is in use."""
    path = directory / HANDED_OVER
    known = path.read_text().splitlines() if path.exists() else []
    line = str(checkpoint.absolute())
    if line not in known:
        write_atomic(path, "".join(f"{entry}\n" for entry in (*known, line)).encode())


_FILES = {"train_results": RESULTS, "train_loss_plot": PICTURE}


def result_values(directory: Path) -> dict[str, Any]:
    """final_loss and train_runtime as the trainer reports them; last_loss and mean_loss from its points."""
    values: dict[str, Any] = {}
    log = directory / LOG
    results = _json(directory / RESULTS) or last_line(log)
    for name, key in (("final_loss", "train_loss"), ("train_runtime", "train_runtime")):
        if isinstance(results.get(key), int | float):
            values[name] = results[key]
    history = read_points(log) if log.exists() else _json(directory / STATE).get("log_history") or []
    losses = [row["loss"] for row in history if isinstance(row.get("loss"), int | float)]
    if losses:
        values["last_loss"], values["mean_loss"] = losses[-1], sum(losses) / len(losses)
    standing = standing_of(directory)
    if standing.value is not None and standing.headline != "loss":
        values["last_reward"] = standing.value
    elif standing.value is not None:
        values.setdefault("last_loss", standing.value)
    return values


def _tracker_id(directory: Path) -> str | None:
    """The id under which a tracker knows the run, as a recorded loop notes it."""
    trackers = _json(directory / "run.json").get("trackers") or {}
    return next((str(known) for known in trackers.values()), None)


def find_checkpoint(
    directory: Path, step: int | None, *, log: Callable[[str], None] = lambda _: None
) -> SavedModel:
    """The checkpoint of a step, or the newest that is whole; a clear error when there is none.

    Its files are compared with their digests. Newer ones that are damaged are named in the log.
    """
    found = {model.path: model for model in (*saved_models(directory), *_recorded(directory))}
    models = sorted(found.values(), key=lambda model: model.step)
    for model in reversed(models):
        if step not in (None, model.step):
            continue
        if (problem := _problem_of(model, directory)) is None:
            return model
        if step is not None:
            raise UsageError(f"{model.path} is not complete: {problem}")
        log(f"{model.path} is passed over: {problem}")
    if step is None:
        raise UsageError(f"{directory} has no complete checkpoint")
    steps = ", ".join(str(model.step) for model in models if model.complete) or "none"
    raise UsageError(f"{directory} has no checkpoint of step {step}; complete ones: {steps}")


def _problem_of(model: SavedModel, directory: Path) -> str | None:
    """What is wrong with a checkpoint, having read every byte of it."""
    if model.problem is not None or not has_mark(model.path, directory):
        return model.problem
    return complete.problem(model.path, verify=True)


def output_dir_of(record: RunRecord, ledger: Ledger) -> Path | None:
    """Where a run's files are, as far as it has said."""
    if record.output_dir:
        return ledger.resolve(record.output_dir)
    return noted_output_dir(ledger.resolve(record.archive)) if record.archive else None


def noted_output_dir(archive: Path) -> Path | None:
    try:
        return Path((archive / OUTPUT_DIR_NOTE).read_text().strip())
    except OSError:
        return None


def _newest_recorded(directory: Path) -> SavedModel | None:
    return next((model for model in reversed(_recorded(directory)) if model.complete), None)


def _recorded(directory: Path) -> list[SavedModel]:
    """Checkpoints of a run directory with a checkpoints.jsonl."""
    found = []
    for stored in read_checkpoints(directory / "checkpoints.jsonl"):
        record = stored.record
        path = record.state_path or record.sampler_path
        if path is not None and record.batch is not None:
            why = flaw(record, directory)
            found.append(SavedModel(directory / path, record.batch, "full", why is None, why))
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        value = decode_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
