"""`rollbook diff A B`: what differs between two runs, in config and in numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from rollbook.cli.common import ARTIFACTS, Artifacts, AsJson, open_ledger, print_json
from rollbook.errors import UsageError

_Series = dict[int | None, Any]  # a value for each step; that of a whole run is under None


class _Pair(NamedTuple):
    a: Any
    b: Any
    steps: list[int | None]


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(help="a run (its name, id or directory) or the output of a collection")],
    b: Annotated[str, typer.Argument(help="another one")],
    artifacts: Artifacts = ARTIFACTS,
    as_json: AsJson = False,
) -> None:
    """Compare the settings and the last metrics of two runs, or of two collections."""
    from rollbook.cli.output import printable
    from rollbook.records.config import diff_configs

    sides = [_side(ref, artifacts) for ref in (a, b)]
    config = diff_configs(sides[0]["config"], sides[1]["config"])
    names = list(sides[0]["metrics"] | sides[1]["metrics"])
    pairs = {name: _same_step(*(side["metrics"].get(name) or {} for side in sides)) for name in names}
    changed = {name: pair for name, pair in pairs.items() if pair.a != pair.b}
    if as_json:
        listed = [{"key": change.key, "a": change.old, "b": change.new} for change in config]
        values = {name: [pair.a, pair.b] for name, pair in changed.items()}
        steps = {name: pair.steps for name, pair in changed.items()}
        names_of = {"a": sides[0]["name"], "b": sides[1]["name"]}
        print_json({**names_of, "config": listed, "metrics": values, "steps": steps})
        return
    print(printable(f"{sides[0]['name']} -> {sides[1]['name']}"))
    print("config:" if config else "config: the same")
    for change in config:
        print(printable(f"  {change.key}: {change.old!r} -> {change.new!r}"))
    print("metrics:" if changed else "metrics: the same")
    for name, pair in changed.items():
        shown = f"{_shown(pair.a)} -> {_shown(pair.b)}"
        print(printable(f"  {name}{_at(pair.steps)}: {shown}{_difference(pair)}"))


def _side(ref: str, artifacts: Path) -> dict[str, Any]:
    from rollbook.records.config import read_config
    from rollbook.runs.references import find
    from rollbook.runs.settings import read_yaml

    found = find(ref, artifacts)
    if found.path.is_file():
        return {"name": found.name, **_collection(found.path)}
    directory, record = found.run_directory, found.record
    places = [directory]
    metrics: dict[str, _Series] = {}
    if record is not None:
        metrics = {name: {None: value} for name, value in (record.metrics or {}).items()}
        if record.archive:
            places.insert(0, open_ledger(artifacts).resolve(record.archive))
    config: dict[str, Any] = {}
    for place in reversed(places):
        if (place / "config.yaml").exists():
            config = read_yaml(place / "config.yaml")
        if (place / "config.json").exists():
            config = read_config(place / "config.json")
    if (directory / "metrics.jsonl").exists():
        metrics |= _series(directory)
    runtime = config.get("runtime_info")
    if isinstance(runtime, dict):  # what a run hands over is its result, not its config
        config = {**config, "runtime_info": {key: value for key, value in runtime.items() if key != "output"}}
    if not config and not metrics:
        raise UsageError(f"{ref} has neither a config nor metrics to compare")
    return {"name": found.name, "config": config, "metrics": metrics}


def _collection(output: Path) -> dict[str, Any]:
    """What its last session was to do, environment and policy first, and how far it got."""
    from rollbook.records.datasets import is_collection, manifest_path, read_manifest
    from rollbook.records.progress import progress_path, read_progress

    manifest = read_manifest(output)
    if not is_collection(manifest):
        raise UsageError(f"{output}: no run, and no collection: no {manifest_path(output).name} is beside it")
    meaning = manifest["meaning"]
    settings = {key: manifest[key] for key in ("repeats", "input", "input_sha256", "rows") if key in manifest}
    progress = read_progress(progress_path(output))
    metrics = {}
    if progress is not None:
        reward = {"reward_mean": progress.reward_mean, "reward_std_error": progress.reward_std_error}
        metrics = {**progress.coverage, **reward}
    whole = metrics or manifest.get("coverage") or {}
    return {
        "config": {**meaning, **settings},
        "metrics": {name: {None: value} for name, value in whole.items()},
    }


def _series(directory: Path) -> dict[str, _Series]:
    from rollbook.runs.reader import open_run

    found: dict[str, _Series] = {}
    for row in open_run(directory).metrics:
        for name, value in row.items():
            if isinstance(value, int | float) and name not in ("step", "attempt"):
                found.setdefault(name, {})[row.get("step")] = value
    return found


def _same_step(a: _Series, b: _Series) -> _Pair:
    """The values of the last step that both have; without one, the last of each, with their steps."""
    common = [step for step in a if step in b]
    last_a, last_b = (next(reversed(common or list(side)), None) for side in (a, b))
    return _Pair(a.get(last_a), b.get(last_b), [last_a, last_b])


def _at(steps: list[int | None]) -> str:
    if steps[0] == steps[1]:
        return "" if steps[0] is None else f" at step {steps[0]}"
    known = [("-" if step is None else str(step)) for step in steps]
    return f" (no step in common: {known[0]} and {known[1]})" if "-" not in known else ""


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _difference(pair: _Pair) -> str:
    both = isinstance(pair.a, int | float) and isinstance(pair.b, int | float)
    return f"  ({pair.b - pair.a:+.4g})" if both and pair.steps[0] == pair.steps[1] else ""
