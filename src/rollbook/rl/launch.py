"""From settings to a supervised job."""

from __future__ import annotations

from pathlib import Path

from rollbook.records.locks import FileLock
from rollbook.rl.settings import RlSettings
from rollbook.rl.start import Start, run_files
from rollbook.runs.launch import Launch


def refuse_a_second_writer(settings: RlSettings) -> None:
    """Before the history knows of it: an attempt that could only fail would be the newest of its name."""
    if (run := run_files(settings).run).exists():
        FileLock(run).release()


def launch_of(start: Start, artifacts: Path, config: Path, *, resume: bool, overwrite: bool) -> Launch:
    settings = start.settings
    return Launch(
        kind="rl",
        module="rollbook.rl.main",
        settings=settings,
        name=settings.run_name,
        output_dir=Path(settings.log_path).expanduser(),
        artifacts=artifacts,
        config=config if config.suffix in (".yaml", ".yml") else None,
        data=data_files(settings),
        resume=resume,
        overwrite=overwrite,
        resumed_from=str(start.checkpoint) if start.checkpoint else None,
    )


def data_files(settings: RlSettings) -> list[Path]:
    """The files that tasks are read from."""
    named = [environment.tasks for environment in settings.environments]
    named += [evaluation.tasks for evaluation in settings.evals]
    return [Path(tasks) for tasks in named if isinstance(tasks, str)]
