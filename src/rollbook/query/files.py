"""Which files a query reads, and whose they are.

A path may be a run directory, a directory of runs, an `artifacts/` directory, a collection or one file of
any of them. A run found twice counts once. Of a directory with collections the datasets made of them are left
out, or their rows would count twice; by name they are read. Nothing is opened here but run.json and the
manifests, which say who a run is.
"""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson

from rollbook.data.inputs import manifest_owner
from rollbook.errors import BadFileError, UsageError
from rollbook.records.layout import TRAIN, Artifact, RunFiles, eval_split
from rollbook.records.run_info import RunInfo, read_run_info
from rollbook.records.token_files import TOKEN_EXPORTS
from rollbook.records.token_places import TokenSource, manifest_beside, token_source


class Role(StrEnum):
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
_ROW_ENDINGS = (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst", ".parquet")
_PART_OF_A_RUN = re.compile(r"iteration_\d{6,}|checkpoints|checkpoint-\d+|superseded|token_exports|\..*")
_COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True)
class DataFile:
    path: Path
    role: Role
    run: str
    split: str | None = None

    @property
    def is_parquet(self) -> bool:
        return self.path.suffix == ".parquet"

    @property
    def is_plain(self) -> bool:
        return not self.is_parquet and self.path.suffix not in _COMPRESSED


@dataclass
class Owner:
    """A run or a collection: who it is, and its files."""

    root: Path  # the directory of a run, the output file of a collection
    name: str
    info: dict[str, Any]
    files: list[tuple[Path, Role, str | None]] = field(default_factory=list)
    tokens: TokenSource | None = None


@dataclass(frozen=True)
class Sources:
    runs: list[dict[str, Any]]  # rows of the view of that name
    files: list[DataFile]
    tokens: dict[str, TokenSource]  # by the run
    left_out: list[Path]  # datasets that stand beside collections and were not named

    def of(self, *roles: Role) -> list[DataFile]:
        return [file for file in self.files if file.role in roles]


def find_sources(paths: Iterable[str | Path]) -> Sources:
    owners: dict[Path, Owner] = {}
    left_out: dict[Path, None] = {}
    for path in _expanded(paths):
        found = list(_owners_at(Path(path).expanduser().absolute(), str(path)))
        if Path(path).is_dir() and any(_kind(owner) == "collect" for owner in found):
            left_out |= {owner.root: None for owner in found if _kind(owner) == "data"}
            found = [owner for owner in found if _kind(owner) != "data"]
        if not found:
            raise UsageError(
                f"{path}: nothing to query here: no run (run.json, metrics.jsonl, trainer_log.jsonl, "
                "iteration files, token_exports/) and no collection (X.jsonl with X_manifest.json); "
                "name a .jsonl file to have it read as rows"
            )
        for owner in found:
            _add(owners, owner)
    if not owners:
        raise UsageError("nothing to query; name run directories, collections or directories of them")
    _tell_apart(list(owners.values()))
    files = [
        DataFile(path, role, owner.name, split)
        for owner in owners.values()
        for path, role, split in sorted(owner.files)
    ]
    rows = [{**owner.info, "run": owner.name} for owner in owners.values()]
    named = {owner.root for owner in owners.values()}
    tokens = {owner.name: owner.tokens for owner in owners.values() if owner.tokens is not None}
    return Sources(rows, files, tokens, [path for path in left_out if path not in named])


def _kind(owner: Owner) -> Any:
    return owner.info.get("kind")


def _expanded(paths: Iterable[str | Path]) -> Iterator[str | Path]:
    """Patterns that no shell expanded, as the commands over datasets take them; names as they are."""
    for path in paths:
        if not Path(path).exists() and glob.has_magic(str(path)):
            found = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - it may be absolute
            yield from [match for match in found if _can_be_meant(match, found)] or [str(path)]
        else:
            yield path


def _can_be_meant(path: str, found: list[str]) -> bool:
    """Whatever holds records; a collection's manifest does not, and its tasks are no rows of it."""
    if path.endswith("_tasks.jsonl") and path.removesuffix("_tasks.jsonl") + ".jsonl" in found:
        return False
    return Path(path).is_dir() or _role_of_file(Path(path)) is not None


def _add(owners: dict[Path, Owner], owner: Owner) -> None:
    known = owners.setdefault(owner.root.resolve(), owner)
    known.files = list(dict.fromkeys([*known.files, *owner.files]))
    if known.tokens is None or (owner.tokens is not None and owner.tokens.only is None):
        known.tokens = owner.tokens  # the whole run, where it was named beside one of its files


def _owners_at(path: Path, typed: str) -> Iterator[Owner]:
    if path.is_dir():
        source = token_source(path)
        if source.only is None:
            yield from _walk(path)
        else:  # `token_exports/` or a directory in it
            yield _tokens_only(source)
    elif path.is_file():
        yield _named_file(path)
    else:
        raise UsageError(f"{typed}: no such file or directory")


def _walk(directory: Path) -> Iterator[Owner]:
    try:
        entries = sorted(directory.iterdir())
    except PermissionError as error:
        raise UsageError(f"{directory}: cannot be listed: {error.strerror}") from error
    run = _run_at(directory)
    if run is not None:
        yield run
    names = {entry.name for entry in entries}
    for entry in entries:
        stem = _stem(entry.name)
        if stem is not None and f"{stem}_manifest.json" in names and not entry.name.startswith("."):
            owner = manifest_owner(entry.with_name(f"{stem}_manifest.json"))
            if owner is None or owner.name == entry.name or not owner.exists():
                yield _collection(entry, stem)
    for entry in entries:
        if not _PART_OF_A_RUN.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
            yield from _walk(entry)


def _run_at(directory: Path) -> Owner | None:
    files: list[tuple[Path, Role, str | None]] = []
    for name, role in _ROLE_OF_NAME.items():
        if (directory / name).is_file():
            files.append((directory / name, role, None))
    if any(role is Role.METRICS for _, role, _ in files):  # which a trainer's log repeats
        files = [file for file in files if file[1] is not Role.TRAINER_LOG]
    has_iterations = False
    for found in RunFiles(directory).iteration_files():
        has_iterations = True
        if found.artifact in _ROLE_OF_ARTIFACT:
            files.append((found.path, _ROLE_OF_ARTIFACT[found.artifact], found.split))
    has_run = has_iterations or (directory / "run.json").is_file() or (directory / TOKEN_EXPORTS).is_dir()
    if not files and not has_run:
        return None
    owner = _run(directory, has_iterations=has_iterations)
    owner.files, owner.tokens = files, token_source(directory)
    return owner


def _run(directory: Path, *, has_iterations: bool) -> Owner:
    marker = directory / "run.json"
    if marker.is_file():
        info = read_run_info(marker)
        return Owner(directory, info.id, _run_row(directory, info))
    is_trainers = (directory / "trainer_log.jsonl").exists()
    kind = "sft" if is_trainers else "rl" if has_iterations else None
    row = {"kind": kind, "config": _json(directory / "config.json"), "file": str(directory)}
    return Owner(directory, directory.resolve().name, row)


def _run_row(directory: Path, info: RunInfo) -> dict[str, Any]:
    last = info.attempts[-1] if info.attempts else None
    return {
        "kind": info.kind,
        "started_at": info.started_at,
        "ended_at": last.ended_at if last else None,
        "outcome": last.outcome if last else None,
        "attempts": len(info.attempts),
        "total_iterations": info.total_iterations,
        "host": info.host,
        "config": _json(directory / "config.json"),
        "file": str(directory),
    }


def _stem(name: str) -> str | None:
    for ending in sorted(_ROW_ENDINGS, key=len, reverse=True):
        if name.endswith(ending):
            return name.removesuffix(ending)
    return None


def _collection(output: Path, stem: str) -> Owner:
    manifest = _read_json(output.with_name(f"{stem}_manifest.json")) or {}
    coverage, sessions = manifest.get("coverage") or {}, manifest.get("sessions")
    so_far = coverage or _so_far(output.with_name(f"{stem}_progress.json"))
    row = {
        "kind": "collect" if "meaning" in manifest else "data",
        "started_at": manifest.get("created_at"),
        "ended_at": manifest.get("updated_at") if coverage else None,
        "attempts": len(sessions) if isinstance(sessions, list) else sessions,
        "config": orjson.dumps(manifest.get("meaning") or manifest).decode(),
        "file": str(output),
        **{key: so_far.get(key) for key in ("expected", "ok", "failed", "missing")},
    }
    owner = Owner(output, stem, row, [(output, Role.ROWS, "collect")])
    failures = output.with_name(f"{stem}_failures.jsonl")
    if failures.is_file():
        owner.files.append((failures, Role.FAILURES, "collect"))
    return owner


def _so_far(progress: Path) -> dict[str, Any]:
    """Of a collection under way, whose manifest has no coverage yet."""
    found = _read_json(progress) or {}
    return {**found, "ok": found.get("done")}


def _named_file(path: Path) -> Owner:
    """One file: it belongs to the run or collection it stands in, and only it is read."""
    role = _role_of_file(path)
    if role is None:
        raise UsageError(f"{path}: neither a file of a run nor rows ({', '.join(_ROW_ENDINGS)})")
    if role is Role.ROWS:
        return _collection(path, _stem(path.name) or path.stem)
    if role is Role.FAILURES:
        stem = path.name.removesuffix("_failures.jsonl")
        owner = _collection(path.with_name(f"{stem}.jsonl"), stem)
        owner.files = [(path, role, "collect")]
        return owner
    if role is Role.TOKENS:
        return _tokens_only(token_source(path))
    nested = re.fullmatch(r"iteration_\d{6,}", path.parent.name) is not None
    root = path.parent.parent if nested else path.parent
    owner = _run(root, has_iterations=role in (Role.SUMMARIES, Role.TRANSCRIPTS))
    base = path.name.split("_iteration_")[0] if not nested else path.name
    split = TRAIN if base.startswith(TRAIN) else None
    if split is None and base.startswith("eval_"):
        name = base.removeprefix("eval_")
        split = eval_split(re.sub(r"_(rollout_summaries|transcripts)\.jsonl$", "", name))
    owner.files = [(path, role, split)]
    if role is Role.TRANSCRIPTS:
        owner.tokens = token_source(path)
    return owner


def _tokens_only(source: TokenSource) -> Owner:
    owner = _run(source.root, has_iterations=False)
    owner.tokens = source
    return owner


def _role_of_file(path: Path) -> Role | None:
    if path.name in _ROLE_OF_NAME:
        return _ROLE_OF_NAME[path.name]
    for artifact, role in _ROLE_OF_ARTIFACT.items():
        if path.name.endswith(artifact):
            return role
    if any(above.name == TOKEN_EXPORTS for above in path.parents) or manifest_beside(path) is not None:
        return Role.TOKENS
    if path.name.endswith("_failures.jsonl"):
        return Role.FAILURES
    return Role.ROWS if _stem(path.name) is not None else None


def _tell_apart(owners: list[Owner]) -> None:
    """Two collections called `rollouts.jsonl` get as much of their paths as it takes to differ."""
    depth = 1
    while True:
        counts = Counter(owner.name for owner in owners)
        shared = [owner for owner in owners if counts[owner.name] > 1]
        if not shared or depth > max(len(owner.root.parts) for owner in shared):
            return
        for owner in shared:
            above = owner.root.parts[-1 - depth : -depth]
            owner.name = "/".join((*above, owner.name))
        depth += 1


def _json(path: Path) -> str | None:
    value = _read_json(path)
    return None if value is None else orjson.dumps(value).decode()


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except orjson.JSONDecodeError as error:
        raise BadFileError(path, f"not valid JSON ({error})") from error
    return value if isinstance(value, dict) else None
