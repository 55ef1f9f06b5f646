"""`rollbook promote ID[@STEP]`: publish any complete checkpoint of any run as the handoff."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rollbook.cli.common import ARTIFACTS, Artifacts, AsJson, print_json
from rollbook.errors import UsageError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def promote(
    ref: Annotated[str, typer.Argument(help="the run, and the step after an @: demo@200")],
    config: Annotated[
        Path | None, typer.Option(help="the config.yaml to write to; the run's own by default")
    ] = None,
    artifacts: Artifacts = ARTIFACTS,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint of a run, also of one that failed, into runtime_info.output of a config."""
    from rollbook.runs.jobs.finish import find_checkpoint, output_dir_of, publish_again
    from rollbook.runs.jobs.ledger import Ledger
    from rollbook.runs.references import split_step

    name, step = split_step(ref)
    ledger = Ledger(artifacts)
    record = ledger.get(name)
    directory = output_dir_of(record, ledger)
    if directory is None:
        raise UsageError(f"{record.id} did not say where it writes; start it with --output-dir next time")
    if config is None:
        if record.config is None:
            raise UsageError(f"{record.id} had no config; name one with --config path/to/config.yaml")
        config = ledger.resolve(record.config)
    saved = find_checkpoint(directory, step, log=_log)
    result = publish_again(ledger, record, config, saved)
    if as_json:
        print_json(
            {
                "run": record.id,
                "checkpoint": saved.path,
                "step": saved.step,
                "state": result.state,
                "config": config,
                "reason": result.reason,
                "fallback": result.fallback,
            }
        )
    elif result.published:
        print(f"{config}: checkpoint_path is now {saved.path} (step {saved.step})")
    else:
        print(f"{config} was left alone: {result.reason}\n{result.next_step}", file=sys.stderr)
    if not result.published:
        sys.exit(1)


def _log(text: str) -> None:
    print(text, file=sys.stderr)
