"""`rollbook rl CONFIG`: reinforcement learning, with the record, the history and the handoff."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollbook.cli.common import ARTIFACTS, Artifacts, AsJson, Detach, Overrides, Overwrite, Resume, print_json
from rollbook.records.numbers import mean_text

if TYPE_CHECKING:
    from rollbook.rl.preview import EnvironmentPreview
    from rollbook.rl.settings import RlSettings

_WIDTH = 200  # characters of a rollout that are shown

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def rl(
    config: Annotated[Path, typer.Argument(help="config.yaml, or the config.json of a run")],
    overrides: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show a prompt, a group with its rewards, and the cost")
    ] = False,
    detach: Detach = False,
    artifacts: Artifacts = ARTIFACTS,
    as_json: AsJson = False,
) -> None:
    """Train with rewards: model, environments and sampler come from CONFIG, changes as learning_rate=1e-5."""
    from rollbook.cli.launched import run_job, say_complete
    from rollbook.errors import UsageError
    from rollbook.rl.launch import launch_of, refuse_a_second_writer
    from rollbook.rl.settings import load_settings
    from rollbook.rl.start import complete_text, settle

    settings = load_settings(config, overrides or [])
    if dry_run:
        _preview(settings, as_json)
        return
    if resume and overwrite:
        raise UsageError("--resume continues a run and --overwrite starts over; choose one")
    refuse_a_second_writer(settings)
    start = settle(settings, "start-over" if overwrite else resume)
    if start.is_complete:  # is what it left still what it was?
        start = settle(settings, resume, verify=True)
    if start.is_complete:
        directory = Path(settings.log_path).expanduser()
        say_complete(complete_text(settings), settings.run_name, directory, artifacts, config, as_json)
        return
    launch = launch_of(start, artifacts, config, resume=resume, overwrite=overwrite)
    if launch.config is None:
        what = "the result is handed over by a YAML file only; `rollbook promote` can name one"
        print(f"rollbook: {config}: {what}", file=sys.stderr)
    run_job(launch.job(), detach=detach, as_json=as_json, on_stop="it saves first; --resume continues")


def _shown_reward(mean: float | None, error: float | None) -> str:
    return "unknown" if mean is None else mean_text(mean, error, ".3f")


def _preview(settings: RlSettings, as_json: bool) -> None:
    from rollbook.cli.output import printable
    from rollbook.rl.preview import preview
    from rollbook.train.memory import gib

    found = preview(settings, lambda text: print(text, file=sys.stderr, flush=True))
    if as_json:
        print_json(found)
        return
    for environment in found.environments:
        _show_environment(environment)
    reward = _shown_reward(found.reward, found.reward_std_error)
    print(f"\n{found.groups} groups: mean reward {reward}, {found.mixed:.0%} with different rewards")
    if len(found.environments) > 1:
        for environment in found.environments:
            own = _shown_reward(environment.reward, environment.reward_std_error)
            mixed = f"{environment.mixed:.0%} with different rewards"
            print(printable(f"  {environment.name}: {environment.groups} groups, mean reward {own}, {mixed}"))
    sample_s, train_s = found.seconds_sample, found.seconds_train
    print(f"an iteration: about {sample_s:.2g} s of sampling and {train_s:.2g} s of training")
    print(f"sampler: {found.slots} sequences at once, each of at most {found.max_length:,} tokens")
    memory = found.memory
    activations = "not measured" if memory.activations is None else gib(memory.activations)
    print(
        f"memory: weights {gib(memory.weights)}, optimiser {gib(memory.optimizer)}, keys and values "
        f"{gib(memory.cache)}, activations {activations}: {gib(memory.total)} of {gib(memory.free)} that "
        "were free"
    )
    for advice in found.advice:
        print(printable(f"note: {advice}"))


def _show_environment(found: EnvironmentPreview) -> None:
    from rollbook.cli.output import printable
    from rollbook.rl.console import line_of

    print(printable(f"\n{found.name}: the first prompt, {found.prompt_tokens} tokens, as the model sees it:"))
    print(printable(found.prompt))
    print(f"its rollouts, {len(found.group)} that did not fail:")
    for rollout in found.group:
        replies = " | ".join(map(line_of, rollout.replies))
        reward = "unknown" if rollout.reward is None else f"{rollout.reward:g}"
        print(printable(f"  reward {reward}  {rollout.finish_reason or '-':<10} {replies[:_WIDTH]}"))
