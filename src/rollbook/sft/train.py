"""Supervised fine-tuning: the story of a run, from its settings to its last checkpoint.

Any kill leaves a directory from which the same command with `--resume` continues, to the same weights and the
same log as a run that was never killed. SIGTERM and Ctrl-C save and then end; a second Ctrl-C ends at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from rollbook.records.checkpoints import NOTHING_SAVED, Choice
from rollbook.records.complete import unfinished_path
from rollbook.records.run_inputs import RunInput
from rollbook.records.token_files import RunIdentity, export_files
from rollbook.records.token_settings import TokenExportSettings
from rollbook.records.trainer_log import STATE
from rollbook.runs.divergence import DivergedError, StepsLeftOut
from rollbook.runs.stop_signals import Stopped, StopSignals
from rollbook.sft.epochs import in_groups, rows_in_order
from rollbook.sft.job import Job, open_engine, open_job
from rollbook.sft.places import checkpoint_to_resume, refuse_occupied, set_aside_run
from rollbook.sft.record import SftRecord
from rollbook.sft.resumable import changes, refuse_changed_data
from rollbook.sft.resume import Progress, load_progress, saved_state
from rollbook.sft.settings import SftSettings
from rollbook.train.engine import Engine, StepOutput
from rollbook.train.export import NoTokenExport, open_export
from rollbook.train.losses import CrossEntropy
from rollbook.train.model_files import model_input
from rollbook.train.processes import Processes
from rollbook.train.schedule import learning_rate
from rollbook.train.state import load_training_state, save_training_state

Log = Callable[[str], None]
LOSS = CrossEntropy()


def train(
    settings: SftSettings,
    artifacts: Path = Path("artifacts"),
    *,
    resume: bool = False,
    overwrite: bool = False,
    log: Log = print,
) -> dict[str, Any]:
    """Fine-tune as the settings say; returns the summary that is in train_results.json.

    `overwrite` sets the run that is in the directory aside, once the new one is ready to begin.
    """
    processes = Processes()
    settings = msgspec.structs.replace(settings, processes=processes.count)
    log = log if processes.is_first else _silence
    directory = settings.output_dir(artifacts)
    try:
        with processes.together():
            refuse_occupied(directory, resume=resume, overwrite=overwrite)
            choice = checkpoint_to_resume(directory) if resume and processes.is_first else NOTHING_SAVED
        choice = processes.share(choice)
        checkpoint = choice.path(directory)
        for text in choice.passed_over:
            log(text)
        if checkpoint is not None:
            with processes.together():
                refuse_changed_data(checkpoint, settings)
        job = open_job(settings, artifacts, processes, checkpoint, log)
        with processes.together():
            progress = Progress() if checkpoint is None else load_progress(checkpoint, job)
        engine = open_engine(job)
        if checkpoint is not None:
            load_training_state(checkpoint, job.model, engine.optimizer, processes)
            log(f"resuming from {checkpoint}")
            for change in changes(directory, settings):
                log(f"changed since it was saved: {change}")
        with ExitStack() as opened:
            with processes.together():
                record = opened.enter_context(
                    open_record(job, artifacts, progress, choice, overwrite=overwrite)
                )
                if processes.is_first:
                    record.note_inputs(inputs_of(job, checkpoint))
            stop = opened.enter_context(StopSignals("saving after this step"))
            describe(job)
            export = opened.enter_context(open_export_of(job, record))
            return take_steps(job, engine, record, progress, export, lambda: processes.any(stop.asked))
    finally:
        processes.close()


def take_steps(
    job: Job,
    engine: Engine,
    record: SftRecord,
    progress: Progress,
    export: NoTokenExport,
    is_stopping: Callable[[], bool],
) -> dict[str, Any]:
    """Every step that is left, then the summary."""
    training = job.settings.training
    batches = job.batches(job.corpus, full_width=job.compiles)
    left_out = StepsLeftOut(
        training.max_nonfinite_steps,
        "training.max_nonfinite_steps",
        taken=progress.step,
        left_out=progress.left_out,
    )
    for step in range(progress.step + 1, job.total_steps + 1):
        is_last, rate = step == job.total_steps, rate_of(job, step)
        began = time.monotonic()
        micro_batches = list(batches.of(job.epochs.micro_batches(step)))
        result = engine.step(micro_batches, LOSS, rate, seen=export.seen(step, 0))
        add_to(progress, step, result, time.monotonic() - began)
        left_out.note(result.is_left_out)
        progress.left_out = left_out.left_out
        progress.window_export_s += export.commit(step, LOSS, [result], batch=step)
        if not result.applied:
            text = f"step {step}: loss {result.loss}, grad_norm {result.grad_norm}; the step was skipped"
            job.log(f"NOT FINITE: {text}")
            record.alert("gradients are not finite", text, step)
        if step % training.logging_steps == 0 or is_last or not result.applied:
            log_step(job, record, progress, result, rate)
        if (why := left_out.problem(is_last=is_last)) is not None:
            record.alert("the run has diverged", why, step)
            with job.processes.together():  # all of them came to the same
                raise DivergedError(why)
        if job.eval_corpus and (is_last or (training.eval_steps and step % training.eval_steps == 0)):
            evaluate(job, engine, record, progress)
        is_stopped = is_stopping()  # asked of all processes: they must decide the same
        is_saved = step % training.save_steps == 0 or is_last or is_stopped
        if is_saved:
            export.end_part(is_last=is_last)
            save(job, engine, record, progress)
        if is_stopped and not is_last:
            raise Stopped(f"stopped after step {step}, checkpoint saved; continue with --resume")
    return summarise(job, record, progress)


def open_export_of(job: Job, record: SftRecord) -> NoTokenExport:
    """The token export of this process, or one that is off."""
    settings, processes = job.settings.trainer.token_export, job.processes
    if settings is None:
        return NoTokenExport()
    export = NoTokenExport()
    with processes.together():
        if processes.is_first:  # before the others: it looks who else has written there
            export = _open_export(job, settings, record, record.identity)
            record.add_token_export(export_files(job.directory, settings).manifest)
    identity = processes.share(record.identity if processes.is_first else None)
    return export if processes.is_first else _open_export(job, settings, record, identity)


def _open_export(
    job: Job, settings: TokenExportSettings, record: SftRecord, identity: RunIdentity
) -> NoTokenExport:
    return open_export(
        settings,
        job.directory,
        identity,
        job.model.tokenizer,
        job.processes,
        seed=job.settings.training.seed,
        alert=lambda title, text: record.alert(title, text, None),
    )


def rate_of(job: Job, step: int) -> float:
    training, total = job.settings.training, job.total_steps
    return learning_rate(
        step,
        peak=training.learning_rate,
        total=total,
        warmup=training.warmup(total),
        kind=training.lr_scheduler_type,
    )


def add_to(progress: Progress, step: int, result: StepOutput, seconds: float) -> None:
    progress.step = step
    progress.tokens += result.real_tokens
    if result.applied:
        progress.loss_sum += result.loss
    else:
        progress.skipped_steps += 1
    progress.window_loss += result.loss
    progress.window_steps += 1
    progress.window_tokens += result.real_tokens
    progress.window_allocated += result.allocated_tokens
    progress.window_s += seconds


def log_step(job: Job, record: SftRecord, progress: Progress, result: StepOutput, rate: float) -> None:
    """The means over the steps since the last logged one. Speed is that of the steps alone."""
    values = {
        "loss": progress.window_loss / progress.window_steps,
        "grad_norm": result.grad_norm,
        "learning_rate": rate,
        "epoch": job.epochs.epochs_after(progress.step),
        "packing_efficiency": progress.window_tokens / max(1, progress.window_allocated),
    }
    if job.settings.trainer.token_export is not None:
        values["time/token_export"] = progress.window_export_s
    speed = progress.window_tokens / max(1e-9, progress.window_s)
    progress.clear_window()
    record.point(values, progress)
    job.log(
        f"step {progress.step}/{job.total_steps}: loss {values['loss']:.4f}, "
        f"grad_norm {result.grad_norm:.3g}, lr {rate:.3g}, {speed:,.0f} tok/s"
    )


def evaluate(job: Job, engine: Engine, record: SftRecord, progress: Progress) -> None:
    assert job.eval_corpus is not None
    data = job.settings.data
    rows = rows_in_order(job.eval_corpus, capacity=data.max_length, packed=job.model.packs)
    groups = in_groups(rows, job.epochs.rows_per_micro_batch)
    began = time.monotonic()
    loss = engine.evaluate(job.batches(job.eval_corpus).of(groups))
    seconds = time.monotonic() - began
    values = {
        "epoch": job.epochs.epochs_after(progress.step),
        "eval_loss": loss,
        "eval_runtime": seconds,
        "eval_samples_per_second": len(job.eval_corpus) / seconds,
        "eval_steps_per_second": len(groups) / seconds,
    }
    record.point(values, progress)
    job.log(f"step {progress.step}: eval_loss {loss:.4f}")


def save(job: Job, engine: Engine, record: SftRecord, progress: Progress) -> None:
    """A checkpoint that is complete or absent, written by all processes together."""
    path = job.directory / f"checkpoint-{progress.step}"
    progress.elapsed_s = record.elapsed_s
    aside = unfinished_path(path)
    with ExitStack() as opened:
        with job.processes.together():
            opened.enter_context(record.checkpoint(progress.step))
        state = saved_state(job, progress)
        save_training_state(aside, job.model, engine.optimizer, state, job.processes)
        with job.processes.together():
            record.write_state(progress, totals_of(job, progress), copy=aside / STATE)
            opened.pop_all().close()  # now it has its name
    job.log(f"saved {path}")


def summarise(job: Job, record: SftRecord, progress: Progress) -> dict[str, Any]:
    elapsed, epochs = record.elapsed_s, job.epochs.epochs_after(progress.step)
    totals = totals_of(job, progress)
    results = {
        "epoch": epochs,
        "num_input_tokens_seen": progress.tokens,
        "total_flos": totals["flos"],
        "train_loss": progress.loss_sum / max(1, progress.step - progress.skipped_steps),
        "train_runtime": elapsed,
        "train_samples_per_second": job.epochs.samples_per_epoch * epochs / elapsed,
        "train_steps_per_second": progress.step / elapsed,
        "train_tokens_per_second": progress.tokens / elapsed,
    }
    record.finish(results, progress, totals)
    return results


def totals_of(job: Job, progress: Progress) -> dict[str, float]:
    """For trainer_state.json. A token costs two operations per weight forwards, and four backwards."""
    return {
        "epoch": job.epochs.epochs_after(progress.step),
        "epochs": job.epochs.epochs_after(job.total_steps),
        "flos": 6.0 * job.model.count()[0] * progress.tokens,
    }


def describe(job: Job) -> None:
    tokens = int(job.corpus.lengths.sum())
    room = job.epochs.rows_per_epoch * job.settings.data.max_length
    packed = f", packed to {tokens / room:.1%}" if job.model.packs else ""
    job.log(f"{len(job.corpus)} samples, {tokens:,} tokens{packed}")
    job.log(f"{job.total_steps} steps of {job.epochs.rows_per_step} rows")


def inputs_of(job: Job, checkpoint: Path | None) -> list[RunInput]:
    """What run.json says the run is made from. The model was noted when it began."""
    found = list(job.corpus.sources)
    if job.eval_corpus is not None:
        found += [msgspec.structs.replace(one, what="eval data") for one in job.eval_corpus.sources]
    source = model_input(job.settings.model) if checkpoint is None else None
    return found if source is None else [*found, source]


def open_record(
    job: Job, artifacts: Path, progress: Progress, choice: Choice, *, overwrite: bool
) -> SftRecord:
    """The last thing to be opened: until now nothing in the directory was touched."""
    if overwrite and job.processes.is_first and (kept := set_aside_run(job.directory)):
        job.log(f"the files of the run that was here are now in {kept}")
    rank = job.processes.rank
    return SftRecord(job.directory, job.settings, artifacts, progress, job.total_steps, choice, rank=rank)


def _silence(_: str) -> None:
    return None
