"""Resume is a rewind: the run directory goes back to what it was when a checkpoint was saved.

Each log is cut to the length the checkpoint recorded, and per-iteration files that came later leave the
directory. Nothing is destroyed: what is cut or removed is kept under `superseded/attempt_NNN/`. A rewind
that is itself killed can simply be run again, because a tail is copied and synced before it is cut.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from rollbook.errors import BadFileError
from rollbook.records.atomic import fsync_directory
from rollbook.records.checkpoints import CheckpointRecord, StoredCheckpoint, read_checkpoints
from rollbook.records.complete import FileFacts, file_facts, remove_unfinished
from rollbook.records.iterations import read_iterations
from rollbook.records.layout import RunFiles, is_iteration_file
from rollbook.records.run_info import RunInfo
from rollbook.records.token_files import TOKEN_EXPORTS, files_of_manifest, plan_rewind
from rollbook.runs.run_logs import log_paths

_COPY_CHUNK = 1 << 20
_SAVING = ".saving"  # the end of the name of an unfinished checkpoint of an older version


def rewind(files: RunFiles, info: RunInfo, to: StoredCheckpoint | None) -> None:
    """Go back to a checkpoint, or to the very beginning."""
    keep = attempt_directory(files, len(info.attempts))
    record = to.record if to else None
    lengths = (record.log_lengths if record else None) or {}
    if record is not None and record.log_lengths is None:
        raise BadFileError(
            files.checkpoints,
            f"checkpoint {record.name!r} has no log_lengths: it was not written by rollbook, "
            "so the logs cannot be cut back to it; start a new run from its state_path",
        )
    # First: if this is killed, it is done again to this checkpoint, not to a newer one without its logs.
    _cut(files.checkpoints, to.end if to else 0, files, keep)
    _drop_later_iterations(files, record, lengths, keep)
    logs = {path.relative_to(files.root).as_posix() for path in log_paths(files, info)}
    for name in sorted(logs | {name for name in lengths if not is_iteration_file(name)}):
        _cut(files.root / name, lengths.get(name, 0), files, keep)
    _rewind_exports(files, info, record, keep)
    _drop_later_checkpoints(files, record, keep)
    fsync_directory(files.root)


def _drop_later_iterations(
    files: RunFiles, record: CheckpointRecord | None, lengths: Mapping[str, int], keep: Path
) -> None:
    """Set aside the files of every iteration that was not complete when the checkpoint was saved."""
    end = lengths.get(files.iterations.name)
    if record is not None and end is None:
        _drop_by_number(files, record, lengths, keep)
        return
    complete = {
        name: facts
        for finished in read_iterations(files.iterations, end=end or 0)
        for name, facts in finished.files.items()
    }
    for found in list(files.iteration_files()):
        if found.path.relative_to(files.root).as_posix() not in complete:
            set_aside(found.path, files, keep)
    for name, facts in complete.items():
        path = files.root / name
        if not path.exists() or path.stat().st_size != facts.bytes:
            _bring_back(path, facts, files, keep)


def _rewind_exports(files: RunFiles, info: RunInfo, record: CheckpointRecord | None, keep: Path) -> None:
    """Take token exports back too. Of one outside of the run directory nothing is kept aside."""
    for name in info.extra.get(TOKEN_EXPORTS) or ():
        plan = plan_rewind(files_of_manifest(files.root / name), batch=(record and record.batch) or 0)
        for path, length in plan.lengths.items():
            _cut(path, length, files, keep if path.is_relative_to(files.root) else None)
        for path in plan.dropped:
            if path.is_relative_to(files.root):
                set_aside(path, files, keep)
            else:
                path.unlink()


def _bring_back(path: Path, facts: FileFacts, files: RunFiles, keep: Path) -> None:
    """Put a file back that was complete, and was recorded again after the checkpoint."""
    relative = path.relative_to(files.root)
    for earlier in sorted(files.superseded.glob("attempt_*")):
        for candidate in earlier.joinpath(relative).parent.glob(glob.escape(path.name) + "*"):
            if candidate.stat().st_size == facts.bytes and file_facts(candidate) == facts:
                if path.exists():
                    set_aside(path, files, keep)
                path.parent.mkdir(exist_ok=True)
                candidate.rename(path)
                return


def _drop_by_number(
    files: RunFiles, record: CheckpointRecord, lengths: Mapping[str, int], keep: Path
) -> None:
    """The same for a run of an older version, which noted only the files of the coming iterations."""
    for found in list(files.iteration_files()):
        came_later = record.batch is None or found.iteration >= record.batch
        if came_later and found.path.relative_to(files.root).as_posix() not in lengths:
            set_aside(found.path, files, keep)


def attempt_directory(files: RunFiles, attempt: int) -> Path:
    """Where the leftovers of an attempt are kept."""
    return files.superseded / f"attempt_{attempt:03d}"


def set_aside(path: Path, files: RunFiles, keep: Path) -> Path:
    """Move a file or directory of the run below `keep`, beside earlier ones of its name; where it is now."""
    target = keep / path.relative_to(files.root)
    number = 1
    while target.exists():
        number += 1
        target = keep / path.relative_to(files.root).with_name(f"{path.name}.{number}")
    target.parent.mkdir(parents=True, exist_ok=True)
    path.rename(target)
    if (
        path.parent != files.root
        and path.parent.name.startswith("iteration_")
        and not any(path.parent.iterdir())
    ):
        path.parent.rmdir()
    return target


def _cut(path: Path, length: int, files: RunFiles, keep: Path | None) -> None:
    size = path.stat().st_size if path.exists() else 0
    if size < length:
        raise BadFileError(
            path,
            f"is {size} bytes long, but the checkpoint was saved when it had {length}; "
            "lines are missing. Restore the file, or resume from an older checkpoint by its name",
        )
    if size == length:
        return
    with path.open("r+b") as log:
        if keep is not None:
            # The offset in the name: a second rewind to an older place must not overwrite this tail.
            relative = path.relative_to(files.root)
            _copy_tail(path, length, keep / relative.with_name(f"{path.name}.from_byte_{length}"))
        log.truncate(length)
        os.fsync(log.fileno())


def _copy_tail(path: Path, start: int, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with path.open("rb") as source, target.open("wb") as copy:
        source.seek(start)
        shutil.copyfileobj(source, copy, _COPY_CHUNK)
        copy.flush()
        os.fsync(copy.fileno())
    fsync_directory(target.parent)


def _drop_later_checkpoints(files: RunFiles, record: CheckpointRecord | None, keep: Path) -> None:
    directory = files.checkpoint_root
    if not directory.is_dir():
        return
    kept = set() if record is None else _recorded_paths(files, upto=record)
    holding = kept | {parent for path in kept for parent in path.parents}
    remove_unfinished(directory)
    for entry in list(directory.iterdir()):
        if entry.name.startswith(".") and entry.name.endswith(_SAVING):
            shutil.rmtree(entry)
        elif entry.is_dir() and not entry.is_symlink():
            place = entry.resolve()
            if place not in holding and kept.isdisjoint(place.parents):
                set_aside(entry, files, keep)


def _recorded_paths(files: RunFiles, upto: CheckpointRecord) -> set[Path]:
    """Where the checkpoints up to this one are, by their real names."""
    paths: set[Path] = set()
    for stored in read_checkpoints(files.checkpoints):
        named = (stored.record.state_path, stored.record.sampler_path)
        paths |= {(files.root / path).resolve() for path in named if path and "://" not in path}
        if stored.record.name == upto.name and stored.record.saved_at == upto.saved_at:
            break
    return paths
