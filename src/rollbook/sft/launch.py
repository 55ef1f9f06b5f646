"""From settings to a supervised job: which directory, what is resumed, and the command that trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from rollbook.errors import UsageError
from rollbook.records.layout import RunFiles
from rollbook.records.locks import FileLock
from rollbook.runs.jobs.job import Job
from rollbook.runs.launch import Launch
from rollbook.runs.saved_models import newest_model
from rollbook.sft.conversations import files_of
from rollbook.sft.lf_data import write_lf_data
from rollbook.sft.llamafactory import check_supported, llamafactory_job
from rollbook.sft.places import checkpoint_to_resume, refuse_occupied
from rollbook.sft.resumable import is_finished, refuse_changed_data
from rollbook.sft.settings import SftSettings


class StartPlan(msgspec.Struct, frozen=True):
    """What is about to happen, to be printed before it does."""

    output_dir: Path
    resume: bool
    overwrite: bool
    checkpoint: Path | None  # that is resumed from
    data: list[Path]
    is_finished: bool = False  # nothing is left to train

    def lines(self) -> list[str]:
        found = [f"output: {self.output_dir}"]
        if self.checkpoint is not None:
            found.append(f"resume: from {self.checkpoint.name}")
        elif self.resume:
            found.append("resume: starting over (no checkpoint was saved)")
        return found


def plan_start(settings: SftSettings, artifacts: Path, *, resume: bool, overwrite: bool) -> StartPlan:
    """Refuses what cannot be started, before anything is changed."""
    if resume and overwrite:
        raise UsageError("--resume continues a run and --overwrite starts over; choose one")
    directory = settings.output_dir(artifacts)
    data = [path for dataset in (*settings.data.train, *settings.data.eval) for path in files_of(dataset)]
    if settings.engine == "llamafactory":
        check_supported(settings)
    refuse_occupied(directory, resume=resume, overwrite=overwrite)
    if RunFiles(directory).run.exists():
        FileLock(RunFiles(directory).run).release()  # refused while a trainer is at work there
    checkpoint = None
    if resume and settings.engine == "llamafactory":
        model = newest_model(directory)
        checkpoint = model.path if model else None
    elif resume:  # the process that trains looks at every byte
        checkpoint = checkpoint_to_resume(directory, verify=False).path(directory)
    if checkpoint is not None and settings.engine == "rollbook":
        if is_finished(directory, settings):
            return StartPlan(directory, resume, overwrite, checkpoint, data, is_finished=True)
        refuse_changed_data(checkpoint, settings)
    return StartPlan(directory, resume, overwrite, checkpoint, data)


def prepare_job(
    plan: StartPlan, settings: SftSettings, artifacts: Path, config: Path, *, log: Callable[[str], None]
) -> Job:
    """Convert the data, which reads every row of it, and say what is to be run."""
    if settings.engine == "llamafactory":
        job = llamafactory_job(settings, artifacts, config, resume_from=plan.checkpoint, log=log)
        return msgspec.structs.replace(job, data=[path.absolute() for path in plan.data])
    converted = write_lf_data(settings, artifacts)
    log(f"{converted.train.path}: {converted.train.report.summary()}")
    return Launch(
        kind="sft",
        module="rollbook.sft.main",
        settings=settings,
        name=settings.run_name,
        output_dir=plan.output_dir,
        artifacts=artifacts,
        config=config,
        data=plan.data,
        resume=plan.resume,
        overwrite=plan.overwrite,
        resumed_from=str(plan.checkpoint) if plan.checkpoint else None,
    ).job()
