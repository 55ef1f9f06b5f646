"""`rollbook demo`: a first look at what a run leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_BAR_WIDTH = 30


@app.command()
def demo(
    path: Annotated[Path, typer.Argument(help="where to write the run")] = Path("demo/run"),
    iterations: Annotated[int, typer.Option(help="how many training iterations", min=1)] = 10,
    layout: Annotated[str, typer.Option(help="flat, or nested (one directory an iteration)")] = "flat",
    as_json: Annotated[bool, typer.Option("--json", help="print what was written as JSON")] = False,
) -> None:
    """Write a small synthetic run with the public API and read it back."""
    from rollbook.cli.output import progress
    from rollbook.errors import UsageError
    from rollbook.samples import SampleConfig, write_sample_run

    if (path / "run.json").exists():
        raise UsageError(f"{path} holds a run already; name another directory: rollbook demo {path}-2")

    with progress(total=iterations, label="iterations", quiet=as_json) as advance:
        config = SampleConfig(iterations=iterations)
        write_sample_run(path, config=config, layout=layout, on_iteration=lambda _: advance())
    summary = _read_back(path)
    if as_json:
        print(json.dumps(summary))
    else:
        _show(summary)


def _read_back(path: Path) -> dict[str, Any]:
    from rollbook.records.layout import Artifact
    from rollbook.records.rollouts import Status
    from rollbook.runs.reader import open_run

    run = open_run(path)
    statuses = [rollout.status for rollout in run.rollouts()]
    return {
        "path": str(path),
        "run_id": run.id,
        "rollouts": len(statuses),
        "failed": statuses.count(Status.ERROR),
        "checkpoints": [checkpoint.name for checkpoint in run.checkpoints()],
        "reward_by_step": [row["env/all/reward/total"] for row in run.metrics.by_step()],
        "page": str(run.iterations("train")[-1].files[Artifact.HTML]),
    }


def _show(summary: dict[str, Any]) -> None:
    from rollbook.cli.output import console

    out = console()
    out.print(f"{summary['path']} holds run {summary['run_id']}\n", markup=False)
    out.print("mean reward of each iteration")
    for step, reward in enumerate(summary["reward_by_step"]):
        out.print(f"  {step:>3}  [green]{'█' * round(reward * _BAR_WIDTH):<{_BAR_WIDTH}}[/]  {reward:.2f}")
    out.print(
        f"\n{summary['rollouts']} rollouts, {summary['failed']} failed; "
        f"checkpoints {', '.join(summary['checkpoints'])}"
    )
    out.print(f"\nopen {summary['page']} in a browser: prompts, answers, rewards, turn by turn", markup=False)
    out.print(f"python: rollbook.open_run({summary['path']!r}).metrics.to_pandas()", markup=False)
