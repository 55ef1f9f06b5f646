"""`rollbook run NAME -- COMMAND`: any command, with a history, a log and a status."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.common import ARTIFACTS, Artifacts, AsJson, Detach
from rollbook.errors import UsageError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="the run's name; it may be used again")],
    command: Annotated[list[str], typer.Argument(help="what to run, after --")],
    artifacts: Artifacts = ARTIFACTS,
    output_dir: Annotated[
        Path | None, typer.Option(help="where the command writes its checkpoints and logs, for status")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="a config.yaml that gets the result (runtime_info.output) on success")
    ] = None,
    data: Annotated[list[Path] | None, typer.Option(help="a data file to fingerprint; repeatable")] = None,
    grace: Annotated[
        float, typer.Option(help="seconds between asking the command to end and killing it")
    ] = 10.0,
    detach: Detach = False,
    as_json: AsJson = False,
) -> None:
    """Run COMMAND, given after `--`, under supervision."""
    from rollbook.cli.launched import run_job
    from rollbook.runs.jobs.job import Job

    if not name.strip() or name == "latest" or "@" in name:
        raise UsageError(f"{name!r} cannot name a run; use a word without @, and not 'latest'")
    if config is not None and not config.is_file():
        raise UsageError(f"--config {config}: no such file, so the result could not be handed over")
    for path in data or []:
        if not path.exists():
            raise UsageError(f"--data {path}: no such file")
    job = Job(
        name=name,
        command=command[1:] if command[:1] == ["--"] else command,
        artifacts=artifacts,
        output_dir=output_dir.absolute() if output_dir else None,
        config_path=config.absolute() if config else None,
        data=[path.absolute() for path in data or []],
        grace_s=grace,
        finisher="rollbook.runs.jobs.finish:record_result",
    )
    run_job(job, detach=detach, as_json=as_json)
