"""From settings to a supervised job."""

from __future__ import annotations

from pathlib import Path

from rollbook.rl.settings import RlSettings
from rollbook.runs.launch import Launch


def launch_of(
    settings: RlSettings, artifacts: Path, config: Path, *, resume: bool, overwrite: bool
) -> Launch:
    return Launch(
        kind="rl",
        module="rollbook.rl.main",
        settings=settings,
        name=settings.run_name,
        output_dir=Path(settings.log_path),
        artifacts=artifacts,
        config=config if config.suffix in (".yaml", ".yml") else None,
        data=data_files(settings),
        resume=resume,
        overwrite=overwrite,
    )


def data_files(settings: RlSettings) -> list[Path]:
    """The files that tasks are read from."""
    named = [environment.tasks for environment in settings.environments]
    named += [evaluation.tasks for evaluation in settings.evals]
    return [Path(tasks) for tasks in named if isinstance(tasks, str)]
