"""`rollbook data reverify`: grade stored responses again, without the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rollbook.cli.common import AsJson, number
from rollbook.cli.data.common import InputFiles, Output, Overwrite, PassReward, print_manifest, reading
from rollbook.errors import UsageError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def reverify(
    inputs: InputFiles,
    output: Output,
    agent: Annotated[
        str | None, typer.Option(help="grade with the environment of this agent of rollbook.yaml")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            help="name=..., then settings as key=value; repeatable: --env name=dataset --env grader=exact"
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="where the agents are; rollbook.yaml by default")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="also an environment that does not say it is stateless")
    ] = False,
    pass_reward: PassReward = 1.0,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Run the grader on stored responses, to a new file, with a table of what changed."""
    from rollbook.data.reverify import reverify as grade_again

    chosen = _environment(agent, env or [], config)
    with reading("reverify", quiet=as_json) as progress:
        manifest = grade_again(
            inputs,
            output,
            chosen,
            force=force,
            pass_reward=pass_reward,
            overwrite=overwrite,
            progress=progress,
        )
    print_manifest(manifest, as_json, lines=_lines(manifest.details))


def _environment(agent: str | None, words: list[str], config: Path | None) -> dict[str, Any]:
    from rollbook.runs.settings import parse_words, read_yaml

    if (agent is None) == (not words):
        raise UsageError("name the grader: --agent NAME of rollbook.yaml, or --env name=ENVIRONMENT")
    if agent is None:
        return parse_words(words)
    path = config or Path("rollbook.yaml")
    agents = (read_yaml(path).get("agents") or {}) if path.exists() else {}
    found = agents.get(agent)
    if not isinstance(found, dict) or not isinstance(found.get("env"), dict):
        raise UsageError(f"agent {agent!r} is not in {path}; there are: {', '.join(agents) or 'none'}")
    environment: dict[str, Any] = found["env"]
    return environment


def _lines(details: dict[str, Any]) -> list[str]:
    mean = f"{number(details['mean_before'])} -> {number(details['mean_after'])}"
    lines = [
        f"  mean reward {mean} over {details['compared']} rows",
        f"  {'unchanged':<14} {details['unchanged']:>8}",
        f"  {'raised':<14} {details['raised']:>8}   of them now pass {details['now_pass']}",
        f"  {'lowered':<14} {details['lowered']:>8}   of them now fail {details['now_fail']}",
        f"  {'had no reward':<14} {details['had_no_reward']:>8}",
        f"  {'not graded':<14} {details['failed']:>8}",
    ]
    for example in details["examples"]:
        lines.append(f"    {example['key']}: {number(example['before'])} -> {number(example['after'])}")
    return lines
