"""Which files a command reads: what was typed, as files, globs and directories.

The files that stand beside a collection (its failures, its tasks) are not rows of the dataset: where the
collection itself is among the inputs they are left out, because `rollouts_*.jsonl` matches them too.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rollbook.errors import UsageError

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
    for word in words:
        for path in _meant_by(str(word)):
            if not path.name.endswith(ENDINGS):
                raise UsageError(f"{path}: not a dataset file; these are: {', '.join(ENDINGS)}")
            found[path] = None
    if not found:
        raise UsageError("no input; name files, directories or 'globs'")
    paths = _distinct(list(found))
    stems = {_without_ending(path) for path in paths}
    left_out = [path for path in paths if len(paths) > 1 and _stands_beside(path, stems)]
    return Inputs([path for path in paths if path not in left_out], left_out)


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
