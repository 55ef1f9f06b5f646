"""`rollbook data profile`: per task, how often it is passed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rollbook.cli.common import AsJson, number
from rollbook.cli.data.common import InputFiles, Overwrite, PassReward, print_manifest, reading

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def profile(
    inputs: InputFiles,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="one line a task: .jsonl, .jsonl.zst or .parquet")
    ] = None,
    pass_reward: PassReward = 1.0,
    k: Annotated[
        list[int] | None, typer.Option("-k", min=1, help="of pass@k; repeatable; powers of two by default")
    ] = None,
    band: Annotated[
        str | None, typer.Option(help="a curriculum: only tasks with a pass rate in 0.1..0.9, say")
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Pass rate, pass@k, reward and lengths of every task; without -o, the summary alone."""
    from rollbook.data.profile import Band
    from rollbook.data.profile import profile as make_profile

    with reading("profile", quiet=as_json) as progress:
        manifest = make_profile(
            inputs,
            output,
            pass_reward=pass_reward,
            ks=k or (),
            band=Band.parse(band) if band else None,
            overwrite=overwrite,
            progress=progress,
        )
    print_manifest(manifest, as_json, lines=_lines(manifest.details))


def _lines(details: dict[str, Any]) -> list[str]:
    lines = [
        f"  {details['tasks']} tasks: {details['always_passed']} always passed, "
        f"{details['never_passed']} never, {details['without_reward']} without a reward"
    ]
    if details.get("tasks_without_rollouts"):
        lines.append(f"  {details['tasks_without_rollouts']} more were planned and have no rollout here")
    for k, estimate in details["pass_at_k"].items():
        lines.append(f"  pass@{k:<4} {number(estimate['mean'])} over {estimate['tasks']} tasks")
    most = max(details["pass_rate_histogram"]) or 1
    for place, count in enumerate(details["pass_rate_histogram"]):
        bar = "#" * round(40 * count / most)
        end = "]" if place == 9 else ")"
        lines.append(f"  pass rate [{place / 10:.1f}, {(place + 1) / 10:.1f}{end} {count:>8} {bar}")
    return lines
