"""From settings to a job: where it writes, what it may replace, and the command that trains."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from rollbook.data.inputs import find_inputs
from rollbook.errors import UsageError
from rollbook.records.atomic import make_directory, write_atomic
from rollbook.records.locks import FileLock
from rollbook.runs.children import python_command
from rollbook.runs.jobs.job import Job
from rollbook.runs.saved_models import SavedModel, newest_model
from rollbook.train.lf_data import write_lf_data
from rollbook.train.llamafactory_engine import (
    FINISHER,
    llamafactory_command,
    llamafactory_environment,
    refuse_what_it_cannot,
)
from rollbook.train.settings import SftSettings

SETTINGS = "settings.json"
_GRACE_S = 120.0  # a step and a checkpoint have to fit in
_TORCHRUN_WAITS = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(_GRACE_S))}  # it would kill them after 30 s
_OURS = re.compile(  # what a run writes; everything else in its directory is the user's
    r"checkpoint-\d+|(?:trainer_log|alerts)\.jsonl|handed_over|training_(?:eval_)?loss\.png|training_args\.bin"
    r"|(?:trainer_state|train_results|all_results|eval_results|settings|config|generation_config)\.json"
    r"|model(?:-\d+-of-\d+)?\.safetensors(?:\.index\.json)?|adapter_(?:model\.safetensors|config\.json)"
    r"|chat_template\.jinja|tokenizer(?:_config)?\.json|(?:special_tokens_map|added_tokens)\.json"
)


class Plan(msgspec.Struct, frozen=True):
    """What is about to happen, to be printed before it does."""

    output_dir: Path
    resumed_from: SavedModel | None
    begins_again: bool  # it was to be resumed, and died before its first checkpoint
    replaced: list[Path]
    data: list[Path]

    def lines(self) -> list[str]:
        found = [f"output: {self.output_dir}"]
        if self.resumed_from is not None:
            found.append(f"resume: from step {self.resumed_from.step} ({self.resumed_from.path.name})")
        elif self.begins_again:
            found.append("resume: from the beginning, for nothing was saved yet")
        if self.replaced:
            found.append(f"set aside: {len(self.replaced)} files and checkpoints of the run that is there")
        return found


def plan_run(settings: SftSettings, artifacts: Path, *, resume: bool, overwrite: bool) -> Plan:
    """Refuses a directory with something in it unless told what to do with it. Changes nothing yet."""
    if resume and overwrite:
        raise UsageError("--resume goes on with a run and --overwrite starts over; choose one")
    directory, data = settings.output_dir(artifacts), input_files(settings)
    if settings.engine == "llamafactory":
        refuse_what_it_cannot(settings)
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"training.output_dir {directory} is a file; choose another")
    there = sorted(path for path in directory.iterdir()) if directory.is_dir() else []
    newest = newest_model(directory)
    has_run = (directory / SETTINGS).exists()
    if there and not resume and not overwrite:
        begins_again = "--resume begins its run again, " if has_run else ""
        hint = f"--resume goes on from step {newest.step}, " if newest else begins_again
        raise UsageError(
            f"{directory} is not empty; {hint}--overwrite starts over, or choose another output_dir"
        )
    if resume and newest is None and there and not has_run:
        raise UsageError(f"{directory} has no run in it to resume; choose another output_dir")
    ours = [path for path in there if _OURS.fullmatch(path.name)]
    return Plan(
        directory, newest if resume else None, resume and newest is None, ours if overwrite else [], data
    )


def carry_out(
    plan: Plan, settings: SftSettings, artifacts: Path, config: Path, *, say: Callable[[str], None]
) -> Job:
    """Say what is to be run, once the data has been read and nobody else is at work in the directory.

    Only then the run that is there makes room: it is kept below `superseded/`.
    """
    command = _command(plan, settings, artifacts, say)
    make_directory(plan.output_dir)
    with FileLock(plan.output_dir / SETTINGS):  # as the process that trains does
        if plan.replaced:
            keep = _new_directory(plan.output_dir / "superseded")
            for path in plan.replaced:
                path.rename(keep / path.name)
            say(f"the files of the run that was here are now in {keep}")
        write_atomic(plan.output_dir / SETTINGS, msgspec.json.format(msgspec.json.encode(settings)) + b"\n")
    external = settings.engine == "llamafactory"
    return Job(
        name=settings.run_name,
        command=command,
        env=llamafactory_environment(settings) if external else _TORCHRUN_WAITS,
        artifacts=artifacts,
        kind="sft",
        config=msgspec.to_builtins(settings),
        config_path=config.absolute(),
        output_dir=plan.output_dir.absolute(),
        data=[path.absolute() for path in plan.data],
        resumed_from=str(plan.resumed_from.path) if plan.resumed_from else None,
        grace_s=_GRACE_S,
        finisher=FINISHER if external else "rollbook.runs.jobs.finish:record_result",
    )


def _new_directory(parent: Path) -> Path:
    number = 1
    while (parent / f"run_{number:03d}").exists():
        number += 1
    make_directory(parent / f"run_{number:03d}")
    return parent / f"run_{number:03d}"


def input_files(settings: SftSettings) -> list[Path]:
    sets = [*settings.data.train, *settings.data.eval]
    return [path for dataset in sets for path in find_inputs([dataset.path]).paths]


def _command(plan: Plan, settings: SftSettings, artifacts: Path, say: Callable[[str], None]) -> list[str]:
    if settings.engine == "llamafactory":
        return llamafactory_command(settings, artifacts, resume=plan.resumed_from is not None, say=say)
    converted = write_lf_data(settings, artifacts)
    say(f"{converted.train.path}: {converted.train.report.told()}")
    own = ["-m", "rollbook.train.main", "--settings", str(plan.output_dir / SETTINGS)]
    own += ["--artifacts", str(artifacts), *(["--resume"] if plan.resumed_from else [])]
    if settings.processes == 1:
        return python_command(*own[1:])
    several = ["--standalone", f"--nproc-per-node={settings.processes}"]
    return python_command("torch.distributed.run", *several, *own)
