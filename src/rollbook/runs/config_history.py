"""Since when the config.json of a run holds: a resume with other settings keeps the one before."""

from __future__ import annotations

from rollbook.records.checkpoints import read_checkpoints
from rollbook.records.layout import RunFiles
from rollbook.records.run_info import RunInfo


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
