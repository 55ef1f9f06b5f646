"""The config.json of a run, and since when it holds: a resume with other settings keeps the one before."""

from __future__ import annotations

from pathlib import Path

from rollbook.records.checkpoints import read_checkpoints
from rollbook.records.config import ConfigChange, diff_configs, dump_config, read_config, write_config
from rollbook.records.layout import RunFiles
from rollbook.records.run_info import RunInfo
from rollbook.runs.rewind import attempt_directory, set_aside


def renew_config(files: RunFiles, attempt: int, config: object) -> list[ConfigChange]:
    """Write config.json; returns what it changes in the one of the attempt before, which is set aside."""
    changes: list[ConfigChange] = []
    if files.config.exists():
        changes = diff_configs(read_config(files.config), dump_config(config))
        if not changes:
            return changes
        keep_old(files.config, files, attempt)
    write_config(files.config, config)
    return changes


def keep_old(path: Path, files: RunFiles, attempt: int) -> None:
    """Set a file of the attempt before this one aside."""
    if path.exists():
        set_aside(path, files, attempt_directory(files, attempt - 1))


def first_with_config(files: RunFiles, info: RunInfo) -> int:
    """The first iteration with the present config.json: a resume keeps one that differs beside the others."""
    changed = [
        int(old.parent.name.removeprefix("attempt_"))
        for old in files.superseded.glob("attempt_[0-9]*/config.json*")
    ]
    if not changed:
        return 0
    batches = {stored.record.name: stored.record.batch or 0 for stored in read_checkpoints(files.checkpoints)}
    later = [attempt.resumed_from for attempt in info.attempts if attempt.attempt > max(changed)]
    # A checkpoint that is no longer recorded was left behind by a resume from an older one, which counts.
    begun = [0 if name is None else batches[name] for name in later if name is None or name in batches]
    return min(begun, default=0)
