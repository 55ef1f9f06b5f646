"""Datasets: the endings of their names, and the manifest beside each, `<stem>_manifest.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import orjson

from rollbook.errors import BadFileError, UsageError
from rollbook.records.plain import encode_document, utc_now
from rollbook.records.run_info import versions
from rollbook.records.versions import made_by_newer

SCHEMA_VERSION = 3
ENDINGS = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".ndjson", ".parquet")
# Files beside the output of a collection. They do not end as results do: `<stem>*.jsonl` matches only those.
_FAILURES, _TASKS = "_failures.ndjson", "_tasks.ndjson"
_BEFORE = {_FAILURES: "_failures.jsonl", _TASKS: "_tasks.jsonl"}  # of collections begun before 0.2
_WHAT = {_FAILURES: "failures", _TASKS: "tasks", _BEFORE[_FAILURES]: "failures", _BEFORE[_TASKS]: "tasks"}


class InputRecord(msgspec.Struct, kw_only=True):
    path: str
    bytes: int  # how much of it was read: a file may have grown meanwhile
    xxh3_128: str  # of these bytes, as `xxh128sum` prints it
    rows: int | None = None  # None where it was not counted


class DataManifest(msgspec.Struct, kw_only=True):
    """How a dataset was made."""

    schema_version: int = SCHEMA_VERSION
    command: str
    created_at: str = msgspec.field(default_factory=utc_now)
    directory: str = ""  # where it was typed: paths are relative to it
    inputs: list[InputRecord] = []
    left_out: dict[str, str] = {}  # files that a directory or pattern matched and that were skipped, and why
    arguments: dict[str, Any] = {}
    seed: int | None = None
    output: str | None = None
    output_bytes: int | None = None
    output_xxh3_128: str | None = None
    rows_in: int = 0
    rows_out: int = 0
    counts: dict[str, int] = {}  # everything else that was counted, by name
    coverage: dict[str, int] = {}  # expected, ok, failed, missing, where that is known
    graders: list[dict[str, Any]] = []  # the environments that gave the rewards, where that is known
    details: dict[str, Any] = {}  # what the command reports besides
    versions: dict[str, str] = msgspec.field(default_factory=versions)

    def encoded(self) -> bytes:
        return encode_document(msgspec.to_builtins(self))


def stem_of(name: str) -> str | None:
    """The name of a dataset without its ending; None where the ending is not that of a dataset."""
    for ending in sorted(ENDINGS, key=len, reverse=True):
        if name.endswith(ending):
            return name.removesuffix(ending)
    return None


def side_file(path: Path, ending: str) -> Path:
    """A file beside a dataset that belongs to it, such as `<stem>_manifest.json`."""
    return path.with_name(f"{stem_of(path.name) or path.name}{ending}")


def failures_path(output: Path) -> Path:
    """Where a collection lists the rollouts that it gave up."""
    return _kept(output, _FAILURES)


def tasks_path(output: Path) -> Path:
    """Where a collection without an input writes the environment's own tasks."""
    return _kept(output, _TASKS)


def _kept(output: Path, ending: str) -> Path:
    """A collection that began with a name of before goes on with it."""
    now, before = side_file(output, ending), side_file(output, _BEFORE[ending])
    return before if before.exists() and not now.exists() and manifest_path(output).exists() else now


class Beside(NamedTuple):
    """What a file beside the output of a collection is."""

    what: str  # failures or tasks
    output: Path


def beside_output(path: Path) -> Beside | None:
    """By its name alone; None for any other file."""
    for ending, what in _WHAT.items():
        if path.name.endswith(ending):
            return Beside(what, path.with_name(f"{path.name.removesuffix(ending)}.jsonl"))
    return None


def manifest_path(path: Path) -> Path:
    return side_file(path, "_manifest.json")


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a dataset or collection; empty where there is none, or where it is another file's.

    `x.jsonl` and `x.parquet` would share one: it belongs to the file it names, while that is there.
    """
    owner = manifest_owner(manifest := manifest_path(path))
    if owner is not None and owner.name != path.name and owner.exists():
        return {}
    return _load(manifest)


def manifest_owner(manifest: Path) -> Path | None:
    """The file a manifest describes; None where it does not say, or where there is no manifest."""
    output = _load(manifest).get("output")
    return manifest.with_name(Path(output).name) if isinstance(output, str) and output else None


def refuse_foreign_manifest(output: Path) -> None:
    """`rollouts.parquet` beside `rollouts.jsonl` must not take the name of its manifest."""
    path = manifest_path(output)
    if not path.exists():
        return
    try:
        owner = manifest_owner(path)
    except BadFileError:
        owner = None
    if owner is None or (owner.name != output.name and owner.exists()):
        raise UsageError(
            f"{path} belongs to {owner or 'another file'}, and {output.name} would share it; "
            "choose a name that differs before the ending"
        )


def is_collection(manifest: Mapping[str, Any]) -> bool:
    return "meaning" in manifest


def made_from(path: Path, manifest: Mapping[str, Any]) -> list[Path]:
    """The files a dataset was made from, or the tasks of a collection, by its manifest."""
    inputs = manifest.get("inputs")
    named = [one.get("path") for one in inputs if isinstance(one, dict)] if isinstance(inputs, list) else []
    directory = str(manifest.get("directory") or "")  # where the paths were typed
    return [
        _place_of(Path(directory, name), path)
        for name in [*named, manifest.get("input")]
        if isinstance(name, str) and name
    ]


def _place_of(recorded: Path, path: Path) -> Path:
    """Where an input is now: beside the dataset if it is not where it was, as both may have been moved."""
    return (recorded if recorded.exists() else path.with_name(recorded.name)).resolve()


def _load(manifest: Path) -> dict[str, Any]:
    try:
        found = orjson.loads(manifest.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except orjson.JSONDecodeError as error:
        raise BadFileError(manifest, f"not a manifest ({error}); restore it or move it away") from None
    if not isinstance(found, dict):
        raise BadFileError(manifest, "not a manifest (no JSON object); restore it or move it away")
    if why := made_by_newer(found.get("schema_version"), SCHEMA_VERSION):
        raise BadFileError(manifest, why)
    return found
