"""`rollbook demo`: the whole loop on a tiny model, with the commands that a user would type."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rollbook.demo.files import DemoFiles

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_BAR_WIDTH = 30


@app.command()
def demo(
    directory: Annotated[Path, typer.Argument(help="where everything is written")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="of the data, the weights and the rollouts")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Fine-tune a tiny model on two ways to answer, then let rewards choose: on a CPU, in a minute or two."""
    from rollbook.cli.common import print_json
    from rollbook.demo.files import write_files
    from rollbook.errors import UsageError

    if directory.exists() and any(directory.iterdir()):
        raise UsageError(f"{directory} is not empty; name another directory: rollbook demo {directory}-2")
    began = time.monotonic()
    files = write_files(directory, seed=seed)
    _say(as_json, f"wrote a tiny model, its examples and its tasks to {directory}")
    _run(as_json, "sft", str(files.sft), "--artifacts", str(files.artifacts))
    _run(as_json, "rl", str(files.rl), "--artifacts", str(files.artifacts))
    summary = read_back(files) | {"seconds": round(time.monotonic() - began, 1)}
    if as_json:
        print_json(summary)
    else:
        _show(files, summary)


def _run(as_json: bool, *arguments: str) -> None:
    """Type a command; its output is shown, and its failure is the demo's."""
    _say(as_json, f"\n$ {shlex.join(['rollbook', *arguments])}")
    from rollbook.runs.children import python_command

    command = python_command("rollbook", *arguments)
    done = subprocess.run(command, stdout=sys.stderr if as_json else None, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def _say(as_json: bool, text: str) -> None:
    print(text, file=sys.stderr if as_json else sys.stdout, flush=True)


def read_back(files: DemoFiles) -> dict[str, Any]:
    """What the run's own record says about it."""
    from rollbook.records.layout import Artifact
    from rollbook.runs.reader import open_run

    run = open_run(files.run)
    rows = run.metrics.by_step()
    held_out = {
        int(row["step"]): row["test/env/all/reward/total"]
        for row in rows
        if "test/env/all/reward/total" in row
    }
    rewards = [row["env/all/reward/total"] for row in rows if "env/all/reward/total" in row]
    alerts = [f"{alert.title}: {alert.text}" for alert in run.alerts()]
    report = next(item for item in run.iterations("train") if item.iteration == len(rewards) // 2)
    return {
        "run": str(files.run),
        "rollouts": int(sum(row.get("env/all/rollouts/ok", 0) for row in rows)),
        "failed": int(sum(row.get("env/all/rollouts/failed", 0) for row in rows)),
        "reward_by_iteration": rewards,
        "held_out_by_iteration": held_out,
        "before": held_out[min(held_out)],
        "after": held_out[max(held_out)],
        "alerts": alerts,
        "checkpoints": [checkpoint.name for checkpoint in run.checkpoints()],
        "report": os.path.relpath(report.files[Artifact.HTML]),
    }


def _show(files: DemoFiles, summary: dict[str, Any]) -> None:
    from rollbook.cli.output import console

    out = console()
    out.print("\nmean reward on tasks that were held out of training", style="bold")
    for iteration, reward in summary["held_out_by_iteration"].items():
        bar = "█" * round(reward * _BAR_WIDTH)
        out.print(f"  before iteration {iteration:>3}  [green]{bar:<{_BAR_WIDTH}}[/]  {reward:.3f}")
    checkpoints = ", ".join(summary["checkpoints"])
    out.print(
        f"\n{summary['rollouts']:,} rollouts, {summary['failed']} failed, {len(summary['alerts'])} alerts; "
        f"checkpoints {checkpoints}; {summary['seconds']:.0f} s in all",
        markup=False,
    )
    question = "select split, count(*) as n, avg(reward) as reward from rollouts group by split"
    out.print("\nnext:")
    for command in (
        f"open {summary['report']}     # prompts, answers and rewards, in a browser",
        f'rollbook query "{question}" {files.run}',
        f"rollbook rl {files.rl} log_path={files.directory / 'run-2'} loss.name=ppo",
    ):
        out.print(f"  {command}", markup=False)
