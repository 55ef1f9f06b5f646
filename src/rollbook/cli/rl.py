"""`rollbook rl CONFIG`: reinforcement learning, with the record, the history and the handoff."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.common import ARTIFACTS, Artifacts, AsJson

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def rl(
    config: Annotated[Path, typer.Argument(help="config.yaml, or the config.json of a run")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value on top of it")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="continue from the newest complete checkpoint")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="start over; what is there is kept under superseded/")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show a prompt, a group with its rewards, and the cost")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="start it in the background and return")] = False,
    artifacts: Artifacts = ARTIFACTS,
    as_json: AsJson = False,
) -> None:
    """Train with rewards: model, environments and sampler come from CONFIG, changes as learning_rate=1e-5."""
    from rollbook.cli.launched import run_job
    from rollbook.errors import UsageError
    from rollbook.rl.launch import launch_of
    from rollbook.rl.opening import settle
    from rollbook.rl.settings import load_settings

    settings = load_settings(config, overrides or [])
    if resume and overwrite:
        raise UsageError("--resume continues a run and --overwrite starts over; choose one")
    settle(settings, "start-over" if overwrite else resume)
    launch = launch_of(settings, artifacts, config, resume=resume, overwrite=overwrite)
    run_job(launch.job(), detach=detach, as_json=as_json)
