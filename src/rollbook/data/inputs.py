"""Which files a command reads: what was typed, as files, globs and directories.

The files that stand beside a collection (its failures, its tasks) are not rows of the dataset: where the
collection itself is among the inputs they are left out, because `rollouts_*.jsonl` matches them too. So are,
of a directory or a quoted pattern, datasets that were made of others in it: their rows would count twice.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import orjson

from rollbook.errors import BadFileError, UsageError

ENDINGS = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".ndjson", ".parquet")
_BESIDE = ("_failures.jsonl", "_tasks.jsonl")


class Inputs(NamedTuple):
    paths: list[Path]
    left_out: list[Path]

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)


def find_inputs(words: Sequence[str | Path]) -> Inputs:
    found: dict[Path, None] = {}
    left_out: list[Path] = []
    for word in words:
        meant = _meant_by(str(word))
        derived = [] if meant == [Path(word)] else _derived(meant)
        left_out += derived
        for path in meant:
            if not path.name.endswith(ENDINGS):
                raise UsageError(f"{path}: not a dataset file; these are: {', '.join(ENDINGS)}")
            if path not in derived:
                found[path] = None
    if not found:
        raise UsageError("no input; name files, directories or 'globs'")
    paths = _distinct(list(found))
    stems = {_without_ending(path) for path in paths}
    left_out += [path for path in paths if len(paths) > 1 and _stands_beside(path, stems)]
    return Inputs([path for path in paths if path not in left_out], left_out)


def manifest_path(output: Path) -> Path:
    name = output.name
    for ending in sorted(ENDINGS, key=len, reverse=True):
        name = name.removesuffix(ending)
    return output.with_name(f"{name}_manifest.json")


def manifest_owner(path: Path) -> Path | None:
    """The file a manifest tells of; None where it does not say. `x.jsonl` and `x.parquet` would share one."""
    try:
        output = orjson.loads(path.read_bytes()).get("output")
    except (orjson.JSONDecodeError, AttributeError) as error:
        raise BadFileError(path, f"not a manifest ({error}); restore it or move it away") from None
    return path.with_name(Path(output).name) if isinstance(output, str) and output else None


def _derived(paths: list[Path]) -> list[Path]:
    """Those whose manifest names another one of them as an input."""
    here = {path.resolve() for path in paths}
    return [path for path in paths if any(source in here for source in _made_of(path))]


def _made_of(path: Path) -> list[Path]:
    """The inputs of a dataset by its manifest; paths in it are relative to where the command was typed."""
    beside = manifest_path(path)
    try:
        inputs = orjson.loads(beside.read_bytes()).get("inputs") or []
        named = [Path(record["path"]) for record in inputs]
    except (OSError, orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
        return []
    return [place for name in named for place in (name.resolve(), (path.parent / name.name).resolve())]


def _meant_by(word: str) -> list[Path]:
    path = Path(word)
    if path.is_dir():
        inside = sorted(child for child in path.iterdir() if child.name.endswith(ENDINGS))
        inside = [child for child in inside if not child.name.startswith(".")]
        if not inside:
            raise UsageError(f"{word}: no .jsonl, .jsonl.zst or .parquet file in this directory")
        return inside
    if path.exists():
        return [path]
    # The pattern may be absolute or begin with `..`, which Path.glob does not take.
    matches = sorted(Path(match) for match in glob.glob(word, recursive=True))  # noqa: PTH207
    matches = [match for match in matches if match.is_file()]
    if not matches:
        raise UsageError(f"{word}: no such file")
    return matches


def _distinct(paths: list[Path]) -> list[Path]:
    """A file named twice would be counted twice; whoever wants that says so with two names of a mix."""
    seen: dict[Path, Path] = {}
    for path in paths:
        if (other := seen.setdefault(path.resolve(), path)) is not path:
            raise UsageError(f"{path}: given twice (also as {other}); name it once")
    return paths


def _stands_beside(path: Path, stems: set[str]) -> bool:
    return any(path.name.endswith(end) and str(path)[: -len(end)] in stems for end in _BESIDE)


def _without_ending(path: Path) -> str:
    text = str(path)
    for ending in sorted(ENDINGS, key=len, reverse=True):
        if text.endswith(ending):
            return text[: -len(ending)]
    return text
