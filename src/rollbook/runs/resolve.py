"""What a path means: the files of runs, collections and datasets, and whose they are.

A path may be a run directory, a directory of them such as `artifacts/`, a collection, a dataset, one file of
any of these, or a pattern that no shell expanded. A directory stands for the runs, collections and datasets
in it and below it, and for files of rows that lie directly in it. Files that belong to a collection (its
failures, its tasks) are no rows of it. A dataset made from other files that are read too is skipped unless it
is named, or its rows would count twice. Nothing is opened here but run.json and manifests.
"""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from rollbook.errors import UsageError
from rollbook.records.datasets import (
    ENDINGS,
    beside_output,
    failures_path,
    is_collection,
    made_from,
    read_manifest,
    stem_of,
)
from rollbook.records.layout import INDEX_YAML, TRAIN, Artifact, RunFiles, eval_split
from rollbook.records.run_info import RunInfo, read_run_info
from rollbook.records.token_files import TOKEN_EXPORTS
from rollbook.records.token_places import TokenSource, manifest_beside, token_source
from rollbook.runs.lineage import run_of_checkpoint


class Role(StrEnum):
    """What the records of a file are."""

    METRICS = "metrics"
    TRAINER_LOG = "trainer_log"
    SUMMARIES = "summaries"
    TRANSCRIPTS = "transcripts"
    CHECKPOINTS = "checkpoints"
    TOKENS = "tokens"
    ROWS = "rows"
    FAILURES = "failures"


_ROLE_OF_NAME = {
    "metrics.jsonl": Role.METRICS,
    "trainer_log.jsonl": Role.TRAINER_LOG,
    "checkpoints.jsonl": Role.CHECKPOINTS,
}
_ROLE_OF_ARTIFACT = {Artifact.SUMMARIES: Role.SUMMARIES, Artifact.TRANSCRIPTS: Role.TRANSCRIPTS}
_PART_OF_A_RUN = re.compile(r"iteration_\d{6,}|checkpoints|checkpoint-\d+|superseded|token_exports|\..*")
_COMPRESSED = (".gz", ".zst")
_RUN_FILES = "run.json, metrics.jsonl, trainer_log.jsonl, iteration files, token_exports/"


@dataclass(frozen=True)
class DataFile:
    path: Path
    role: Role
    run: str
    split: str | None = None
    end: int | None = None  # how much of it is read; None for all that is there

    @property
    def is_parquet(self) -> bool:
        return self.path.suffix == ".parquet"

    @property
    def is_plain(self) -> bool:
        return not self.is_parquet and self.path.suffix not in _COMPRESSED


@dataclass
class Owner:
    """A run, a collection or a dataset: who it is, and its files."""

    root: Path  # the directory of a run, the file of a collection or dataset
    name: str
    files: list[tuple[Path, Role, str | None]]
    typed: Path | None = None  # the one file of it that was named or found
    info: RunInfo | None = None  # of a run of ours
    manifest: dict[str, Any] = field(default_factory=dict)  # of a collection or dataset
    tokens: TokenSource | None = None  # of a run


class Skipped(NamedTuple):
    path: Path
    why: str


@dataclass(frozen=True)
class Sources:
    """What a query reads."""

    owners: list[Owner]
    files: list[DataFile]
    skipped: list[Skipped]
    tokens: dict[str, TokenSource] = field(default_factory=dict)  # by the run
    histories: list[Path] = field(default_factory=list)  # directories with an index.yaml

    def of(self, *roles: Role) -> list[DataFile]:
        return [file for file in self.files if file.role in roles]


class Inputs(NamedTuple):
    """The files of rows that a command over datasets reads."""

    paths: list[Path]
    skipped: list[Skipped]

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)


def find_sources(things: Iterable[str | Path]) -> Sources:
    """The runs, collections and datasets of these paths, each once."""
    things = list(things)
    histories = _histories(things)
    found, skipped = _found(things, may_be_empty=bool(histories))
    owners: dict[Path, Owner] = {}
    for owner in found:
        known = owners.setdefault(owner.root.resolve(), owner)
        known.files = list(dict.fromkeys([*known.files, *owner.files]))
        if known.tokens is None or (owner.tokens is not None and owner.tokens.only is None):
            known.tokens = owner.tokens  # the whole run, where it was named beside one of its files
    _make_names_unique(list(owners.values()))
    files = [
        DataFile(path.absolute(), role, owner.name, split)
        for owner in owners.values()
        for path, role, split in sorted(owner.files)
    ]
    # The failures of a collection are read as such.
    skipped = [one for one in skipped if role_of(one.path) is not Role.FAILURES]
    tokens = {owner.name: owner.tokens for owner in owners.values() if owner.tokens is not None}
    return Sources(list(owners.values()), files, skipped, tokens, histories)


def find_inputs(things: Iterable[str | Path]) -> Inputs:
    """Each file once; one that is named is read as rows, whatever its name says."""
    owners, skipped = _found(things)
    paths = [owner.typed for owner in owners if owner.typed is not None]
    for path in paths:
        if stem_of(path.name) is None:
            raise UsageError(f"{path}: not a file of rows; these are: {', '.join(ENDINGS)}")
    if not paths:
        raise UsageError(f"{owners[0].root}: a run, and no rows; name files, directories of them or 'globs'")
    return Inputs(paths, skipped)


def rows_of(ends: Mapping[Path, int]) -> Sources:
    """These files as rows in this order, each up to its end."""
    files = [
        DataFile(path.absolute(), Role.ROWS, stem_of(path.name) or path.name, "collect", end)
        for path, end in ends.items()
    ]
    return Sources([], files, [])


def role_of(path: Path) -> Role | None:
    """The role of a file, by its name; None for one that is neither of a run nor rows."""
    if path.name in _ROLE_OF_NAME:
        return _ROLE_OF_NAME[path.name]
    for artifact, role in _ROLE_OF_ARTIFACT.items():
        if path.name.endswith(artifact):
            return role
    if any(above.name == TOKEN_EXPORTS for above in path.parents) or manifest_beside(path) is not None:
        return Role.TOKENS
    if (beside := beside_output(path)) is not None and beside.what == "failures":
        return Role.FAILURES
    return Role.ROWS if stem_of(path.name) is not None else None


def _histories(things: Iterable[str | Path]) -> list[Path]:
    """The nearest directory with an index.yaml at or above each of these."""
    above = [(path, *path.parents) for thing in things for path in [Path(thing).expanduser().absolute()]]
    nearest = (next((path for path in paths if (path / INDEX_YAML).is_file()), None) for paths in above)
    return list(dict.fromkeys(path for path in nearest if path is not None))


def _found(things: Iterable[str | Path], *, may_be_empty: bool = False) -> tuple[list[Owner], list[Skipped]]:
    named: set[Path] = set()
    owners: dict[Path, Owner] = {}
    for thing in things:
        for path in _expanded(str(thing)):
            if path.name == INDEX_YAML and may_be_empty:
                continue
            inside = _owners_in(path) if path.is_dir() else [_owner_of_file(path)]
            if not inside and not (may_be_empty and (path / INDEX_YAML).is_file()):
                raise UsageError(
                    f"{thing}: nothing to read here: no run ({_RUN_FILES}) "
                    f"and no file of rows ({', '.join(ENDINGS)})"
                )
            for owner in inside:
                owners.setdefault((owner.typed or owner.root).resolve(), owner)
        named.add(Path(thing).expanduser().resolve())
    if not owners and not may_be_empty:
        raise UsageError("nothing to read; name run directories, collections, files or directories of them")
    skipped = _skipped({real: owner for real, owner in owners.items() if owner.typed is not None}, named)
    return [owner for real, owner in owners.items() if real not in skipped], list(skipped.values())


def _expanded(thing: str) -> list[Path]:
    path = Path(thing).expanduser()
    if path.exists():
        return [path]
    # The pattern may be absolute or begin with `..`, which Path.glob does not take.
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207
    if not (found := [match for match in matches if match.is_dir() or role_of(match) is not None]):
        return [_of_history(thing)]
    return found


def _of_history(name: str) -> Path:
    """What a name, an id or `latest` stands for in the history."""
    from rollbook.runs.references import ARTIFACTS, find  # only names need the history

    try:
        found = find(name, ARTIFACTS)
    except UsageError:
        raise UsageError(f"{name}: no such file or directory, and no run of the history") from None
    return found.run_directory if found.path.is_dir() else found.path


def _owners_in(directory: Path) -> list[Owner]:
    source = token_source(directory)
    if source.only is not None:  # `token_exports/` or a directory in it
        return [_tokens_only(source)]
    return list(_inside(run_of_checkpoint(directory) or directory, is_top=True))


def _inside(directory: Path, *, is_top: bool) -> Iterator[Owner]:
    """The directory itself if it is a run, then the files of rows in it, then what is below it."""
    try:
        entries = sorted(entry for entry in directory.iterdir() if not entry.name.startswith("."))
    except PermissionError as error:
        raise UsageError(f"{directory}: cannot be listed: {error.strerror}") from error
    run = _run_at(directory)
    if run is not None:
        yield run
    for entry in entries:
        if stem_of(entry.name) is not None and (read_manifest(entry) or (is_top and run is None)):
            yield _owner_of_file(entry)
    for entry in entries:
        if not _PART_OF_A_RUN.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
            yield from _inside(entry, is_top=False)


def _skipped(owners: dict[Path, Owner], named: set[Path]) -> dict[Path, Skipped]:
    """Files that belong to a collection, and datasets made from other files that are read too."""
    paths = {real: owner.typed or owner.root for real, owner in owners.items()}
    stems = {(path.parent, stem_of(path.name)) for path in paths.values()}
    sources = {real: made_from(owner.root, owner.manifest) for real, owner in owners.items()}
    collections = [real for real, owner in owners.items() if is_collection(owner.manifest)]
    tasks = {source: paths[real] for real in collections for source in sources[real]}
    skipped = {}
    for real, path in paths.items():
        beside = beside_output(path)
        if beside is not None and (path.parent, beside.output.stem) in stems:
            skipped[real] = Skipped(path, f"{beside.what} of {beside.output.stem}")
        elif real in named or real in collections:
            continue
        elif read := [paths[source] for source in sources[real] if source in paths]:
            why = f"made from {read[0]}, which is read too (name it to include it)"
            skipped[real] = Skipped(path, why)
        elif real in tasks:
            skipped[real] = Skipped(path, f"tasks of {tasks[real]} (name it to include it)")
    return skipped


def _run_at(directory: Path) -> Owner | None:
    files: list[tuple[Path, Role, str | None]] = []
    for name, role in _ROLE_OF_NAME.items():
        if (directory / name).is_file():
            files.append((directory / name, role, None))
    if any(role is Role.METRICS for _, role, _ in files):  # which a trainer's log repeats
        files = [file for file in files if file[1] is not Role.TRAINER_LOG]
    iterations = list(RunFiles(directory).iteration_files())
    for found in iterations:
        if found.artifact in _ROLE_OF_ARTIFACT:
            files.append((found.path, _ROLE_OF_ARTIFACT[found.artifact], found.split))
    marks = (directory / "run.json").is_file(), (directory / TOKEN_EXPORTS).is_dir()
    if not files and not iterations and not any(marks):
        return None
    owner = _run(directory, files)
    owner.tokens = token_source(directory)
    return owner


def _run(directory: Path, files: list[tuple[Path, Role, str | None]]) -> Owner:
    marker = directory / "run.json"
    info = read_run_info(marker) if marker.is_file() else None
    return Owner(directory, info.id if info else directory.resolve().name, files, info=info)


def _owner_of_file(path: Path) -> Owner:
    """One file: it belongs to the run or collection it is in, and only it is read."""
    role = role_of(path)
    if role is None:
        raise UsageError(f"{path}: neither a file of a run nor rows ({', '.join(ENDINGS)})")
    if role is Role.ROWS:
        owner = _collection(path)
        if (failures := failures_path(path)).is_file():
            owner.files.append((failures, Role.FAILURES, "collect"))
    elif role is Role.FAILURES:
        beside = beside_output(path)
        assert beside is not None
        owner = _collection(beside.output)
        owner.files = [(path, role, "collect")]
    else:
        owner = _run_of_file(path, role)
    owner.typed = path
    return owner


def _collection(path: Path) -> Owner:
    files: list[tuple[Path, Role, str | None]] = [(path, Role.ROWS, "collect")]
    return Owner(path, stem_of(path.name) or path.stem, files, manifest=read_manifest(path))


def _tokens_only(source: TokenSource) -> Owner:
    owner = _run(source.root, [])
    owner.tokens = source
    return owner


def _run_of_file(path: Path, role: Role) -> Owner:
    if role is Role.TOKENS:
        return _tokens_only(token_source(path))
    is_nested = re.fullmatch(r"iteration_\d{6,}", path.parent.name) is not None
    root = path.parent.parent if is_nested else path.parent
    base = path.name if is_nested else path.name.split("_iteration_")[0]
    split = TRAIN if base.startswith(TRAIN) else None
    if split is None and base.startswith("eval_"):
        name = base.removeprefix("eval_")
        split = eval_split(re.sub(r"_(rollout_summaries|transcripts)\.jsonl$", "", name))
    owner = _run(root, [(path, role, split)])
    if role is Role.TRANSCRIPTS:
        owner.tokens = token_source(path)
    return owner


def _make_names_unique(owners: list[Owner]) -> None:
    """Two collections called `rollouts.jsonl` get as much of their paths as it takes to differ."""
    depth = 1
    while True:
        counts = Counter(owner.name for owner in owners)
        shared = [owner for owner in owners if counts[owner.name] > 1]
        if not shared or depth > max(len(owner.root.absolute().parts) for owner in shared):
            return
        for owner in shared:
            above = owner.root.absolute().parts[-1 - depth : -depth]
            owner.name = "/".join((*above, owner.name))
        depth += 1
