"""`<stem>_progress.json`: the state of a collection, replaced whole about once a second.

Any program can read it, while the collection runs or after it was killed. Its status then
says `running`, too: whether its process lives is another question.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from rollbook.records.atomic import write_atomic
from rollbook.records.datasets import manifest_owner, side_file
from rollbook.records.plain import encode_document

# Words of earlier versions.
_STATUSES = {"complete": "completed", "incomplete": "failed", "stopped": "interrupted"}


class Progress(msgspec.Struct, kw_only=True):
    """The content of the file. None means unknown."""

    status: str  # running, completed, failed, interrupted; lost, where its process is gone
    expected: int
    done: int  # lines on the disk, of this and earlier sessions
    failed: int  # given up in this session
    missing: int
    in_flight: int = 0
    waiting: int = 0  # for a retry
    concurrency: int | None = None
    done_before: int = 0  # by earlier sessions
    rate_per_s: float | None = None  # over the last minute
    eta_s: float | None = None
    elapsed_s: float | None = None
    input_tokens: int | None = None  # of the lines on the disk, as is the reward
    output_tokens: int | None = None
    without_usage: int = 0  # of the lines, those that tokens and cost leave out, or count in part
    lost_input_tokens: int = 0  # of attempts that failed, of this and earlier sessions
    lost_output_tokens: int = 0
    cost: float | None = None  # of all those; None without prices, or where no tokens are known
    reward_mean: float | None = None
    reward_std: float | None = None  # of a sample: n - 1
    reward_std_error: float | None = None
    reward_count: int | None = None
    failures: dict[str, int] = {}  # by kind, this session, retried ones included
    latency_p50_s: float | None = None  # of the latest rollouts
    latency_p90_s: float | None = None
    started_at: str | None = None
    updated_at: str | None = None
    host: str | None = None
    pid: int | None = None
    output: str = ""
    reason: str | None = None  # why it stopped

    @property
    def coverage(self) -> dict[str, int]:
        """What a manifest keeps of it."""
        return {"expected": self.expected, "ok": self.done, "failed": self.failed, "missing": self.missing}


_ENDING = "_progress.json"


def progress_path(output: Path) -> Path:
    """The file beside the output of a collection."""
    return side_file(output, _ENDING)


def output_of_progress(progress: Path) -> Path:
    """The output of a collection, by its progress file."""
    stem = progress.name.removesuffix(_ENDING)
    return manifest_owner(progress.with_name(f"{stem}_manifest.json")) or progress.with_name(f"{stem}.jsonl")


def write_progress(path: Path, progress: Progress) -> None:
    write_atomic(path, encode_document(msgspec.to_builtins(progress)), durable=False)


def read_progress(path: Path) -> Progress | None:
    """None where there is none that can be read."""
    try:
        progress = msgspec.json.decode(path.read_bytes(), type=Progress)
    except (OSError, msgspec.MsgspecError):
        return None
    progress.status = _STATUSES.get(progress.status, progress.status)
    return progress
