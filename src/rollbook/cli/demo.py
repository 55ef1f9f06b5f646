"""`rollbook demo`: the whole loop on a tiny model, with the commands that a user would type."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
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
    """Fine-tune a tiny model on two ways to answer, then let rewards choose: on a CPU, in a minute."""
    from rollbook.cli.common import print_json
    from rollbook.demo.files import write_files
    from rollbook.errors import UsageError

    if directory.exists() and any(directory.iterdir()):
        raise UsageError(f"{directory} is not empty; name another directory: rollbook demo {directory}-2")
    began = time.monotonic()
    files = write_files(directory, seed=seed)
    _print(as_json, f"wrote a tiny model, its examples and its tasks to {directory}")
    _run(as_json, "sft", str(files.sft), "--artifacts", str(files.artifacts))
    _run(as_json, "rl", str(files.rl), "--artifacts", str(files.artifacts))
    summary = read_back(files) | {"seconds": round(time.monotonic() - began, 1)}
    if as_json:
        print_json(summary)
    else:
        _show(files, summary)


def _run(as_json: bool, *arguments: str) -> None:
    """Type a command; its output is shown, and its failure is the demo's."""
    _print(as_json, f"\n$ {shlex.join(['rollbook', *arguments])}")
    from rollbook.runs.children import python_command

    command = python_command("rollbook", *arguments)
    done = subprocess.run(command, stdout=sys.stderr if as_json else None, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def _print(as_json: bool, text: str) -> None:
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
    undecided = min(range(len(rewards)), key=lambda i: abs(rewards[i] - 0.5))  # where there is most to see
    report = next(item for item in run.iterations("train") if item.iteration == undecided)
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
        "report": {
            "iteration": report.iteration,
            "groups_in_full": groups_in_full(report.files[Artifact.LOGTREE]),
            "file": _from_here(report.files[Artifact.HTML]),
        },
    }


def groups_in_full(logtree: Path) -> list[int]:
    """The groups of a report that show their conversations."""
    from rollbook.records.logtree import find_conversations, read

    return sorted({int(found.ids["group_idx"]) for found in find_conversations(read(logtree))})


def _show(files: DemoFiles, summary: dict[str, Any]) -> None:
    from rich.table import Table

    from rollbook.cli.output import console

    out = console()
    rewards = summary["reward_by_iteration"]
    table = Table(title="what happened: mean reward", title_justify="left", box=None, padding=(0, 2))
    table.add_column("before iteration", justify="right")
    table.add_column("held-out tasks", justify="right")
    table.add_column("", width=_BAR_WIDTH, style="green")
    table.add_column("training, last 10", justify="right")
    for iteration, held_out in summary["held_out_by_iteration"].items():
        recent = rewards[max(0, iteration - 10) : iteration]
        trained = f"{fmean(recent):.3f}" if recent else "-"
        table.add_row(str(iteration), f"{held_out:.3f}", "█" * round(held_out * _BAR_WIDTH), trained)
    out.print()
    out.print(table)
    report = summary["report"]
    conversations = ", ".join(map(str, report["groups_in_full"]))
    for line in (
        "",
        f"{summary['rollouts']:,} rollouts, {summary['failed']} failed, {len(summary['alerts'])} alerts; "
        f"checkpoints {', '.join(summary['checkpoints'])}; {summary['seconds']:.0f} s in all",
        f"to read in a browser: {report['file']}",
        f"    iteration {report['iteration']}: prompts, answers, rewards; groups {conversations} in full",
        "",
        "next:",
        *(f"  {_program()} {' '.join(map(_quoted, command))}" for command in next_commands(files)),
    ):
        out.print(line, markup=False)


def next_commands(files: DemoFiles) -> list[list[str]]:
    """What to type after `rollbook`: which tasks are still wrong; train otherwise; compare the two runs."""
    wrong = (
        "select task_id, content as answer from transcripts join rollouts "
        "using (run, split, iteration, group_idx, traj_idx, task_id) "
        "where role = 'assistant' and split = 'eval/test' and reward < 1 order by iteration desc limit 5"
    )
    other = str(files.directory / "run-2")
    artifacts = ["--artifacts", str(files.artifacts)]
    return [
        ["query", wrong, str(files.run)],
        ["rl", str(files.rl), f"log_path={other}", "loss.name=ppo", "minibatches=2", *artifacts],
        ["diff", str(files.run), other],
    ]


def _quoted(word: str) -> str:
    """A word for a shell, in double quotes where that is easier to read."""
    return f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word)


def _program() -> str:
    """How this program is called from here: its name alone where the PATH leads to it."""
    program = Path(sys.argv[0])
    found = shutil.which(program.name)
    if found is not None and program.exists() and Path(found).samefile(program):
        return program.name
    return _from_here(program)


def _from_here(path: Path) -> str:
    """A path below the working directory without it."""
    path, here = path.absolute(), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
