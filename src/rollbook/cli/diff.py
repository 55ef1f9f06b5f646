"""`rollbook diff A B`: what differs between two runs, in config and in numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rollbook.cli.common import ARTIFACTS, Artifacts, AsJson, open_ledger, print_json
from rollbook.errors import UsageError

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
    metrics = {name: [side["metrics"].get(name) for side in sides] for name in names}
    changed = {name: pair for name, pair in metrics.items() if pair[0] != pair[1]}
    if as_json:
        listed = [{"key": change.key, "a": change.old, "b": change.new} for change in config]
        print_json({"a": sides[0]["name"], "b": sides[1]["name"], "config": listed, "metrics": changed})
        return
    print(f"{sides[0]['name']} -> {sides[1]['name']}")
    print("config:" if config else "config: the same")
    for change in config:
        print(printable(f"  {change.key}: {change.old!r} -> {change.new!r}"))
    print("metrics:" if changed else "metrics: the same")
    for name, (old, new) in changed.items():
        print(printable(f"  {name}: {_shown(old)} -> {_shown(new)}{_difference(old, new)}"))


def _side(ref: str, artifacts: Path) -> dict[str, Any]:
    from rollbook.records.config import read_config
    from rollbook.runs.references import find
    from rollbook.runs.settings import read_yaml

    found = find(ref, artifacts)
    if found.path.is_file():
        return {"name": found.name, **_collection(found.path)}
    directory, record = found.run_directory, found.record
    places = [directory]
    metrics: dict[str, Any] = {}
    if record is not None:
        metrics = dict(record.metrics or {})
        if record.archive:
            places.insert(0, open_ledger(artifacts).resolve(record.archive))
    config: dict[str, Any] = {}
    for place in reversed(places):
        if (place / "config.yaml").exists():
            config = read_yaml(place / "config.yaml")
        if (place / "config.json").exists():
            config = read_config(place / "config.json")
    if (directory / "metrics.jsonl").exists():
        metrics |= _last_metrics(directory)
    runtime = config.get("runtime_info")
    if isinstance(runtime, dict):  # what a run hands over is its result, not its config
        config = {**config, "runtime_info": {key: value for key, value in runtime.items() if key != "output"}}
    if not config and not metrics:
        raise UsageError(f"{ref} has neither a config nor metrics to compare")
    return {"name": found.name, "config": config, "metrics": metrics}


def _collection(output: Path) -> dict[str, Any]:
    """What its last session was to do, environment and policy first, and how it stands."""
    from rollbook.records.datasets import is_collection, manifest_path, read_manifest
    from rollbook.records.progress import progress_path, read_progress

    manifest = read_manifest(output)
    if not is_collection(manifest):
        raise UsageError(f"{output}: no run, and no collection: no {manifest_path(output).name} is beside it")
    meaning = manifest["meaning"]
    settings = {key: manifest[key] for key in ("repeats", "input", "input_sha256", "rows") if key in manifest}
    progress = read_progress(progress_path(output))
    metrics = {} if progress is None else {**progress.coverage, "reward_mean": progress.reward_mean}
    return {"config": {**meaning, **settings}, "metrics": metrics or manifest.get("coverage") or {}}


def _last_metrics(directory: Path) -> dict[str, Any]:
    from rollbook.runs.reader import open_run

    last: dict[str, Any] = {}
    for row in open_run(directory).metrics:
        last.update({key: value for key, value in row.items() if isinstance(value, int | float)})
    return {key: value for key, value in last.items() if key not in ("step", "attempt")}


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _difference(old: Any, new: Any) -> str:
    both = isinstance(old, int | float) and isinstance(new, int | float)
    return f"  ({new - old:+.4g})" if both else ""
