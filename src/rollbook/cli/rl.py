"""`rollbook rl CONFIG`: reinforcement learning, with the record, the history and the handoff."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollbook.cli.common import ARTIFACTS, Artifacts, AsJson, print_json

if TYPE_CHECKING:
    from rollbook.rl.settings import RlSettings

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
    from rollbook.rl.launch import launch_of, refuse_a_second_writer
    from rollbook.rl.opening import settle
    from rollbook.rl.settings import load_settings

    settings = load_settings(config, overrides or [])
    if dry_run:
        _preview(settings, as_json)
        return
    if resume and overwrite:
        raise UsageError("--resume continues a run and --overwrite starts over; choose one")
    refuse_a_second_writer(settings)
    start = settle(settings, "start-over" if overwrite else resume)
    launch = launch_of(start, artifacts, config, resume=resume, overwrite=overwrite)
    run_job(launch.job(), detach=detach, as_json=as_json, on_stop="it saves first; --resume continues")


def _preview(settings: RlSettings, as_json: bool) -> None:
    from rollbook.cli.output import printable
    from rollbook.rl.preview import preview

    found = preview(settings, lambda text: print(text, file=sys.stderr, flush=True))
    if as_json:
        print_json(found)
        return
    print(f"\nthe first prompt, {found.prompt_tokens} tokens, as the model sees it:")
    print(printable(found.prompt))
    print(f"\none group of {len(found.group)}:")
    for rollout in found.group:
        said = " | ".join(repr(m.get("content")) for m in rollout.messages if m.get("role") != "user")
        print(printable(f"  reward {rollout.reward:g}  {rollout.finish_reason:<10} {said[:200]}"))
    reward = "unknown" if found.reward is None else f"{found.reward:.3f}"
    print(f"\n{found.groups} groups: mean reward {reward}, {found.mixed:.0%} with different rewards")
    sample_s, train_s = found.seconds_sample, found.seconds_train
    print(f"an iteration: about {sample_s:.1f} s of sampling and {train_s:.1f} s of training")
    parts = ("weights", "optimizer", "cache", "used", "free")
    sizes = {part: getattr(found, f"bytes_{part}") / 2**20 for part in parts}
    print(
        "memory in MiB: weights {weights:,.0f}, optimiser {optimizer:,.0f}, cache of the sampler "
        "{cache:,.0f}; at most {used:,.0f} in use, {free:,.0f} free".format(**sizes)
    )
    for advice in found.advice:
        print(f"note: {advice}")
