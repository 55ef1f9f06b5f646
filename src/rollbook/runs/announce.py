"""Tells others that a run is being written: the history of the project, and a supervisor above us."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from rollbook.records.atomic import write_atomic
from rollbook.records.checkpoints import newest_complete, read_checkpoints
from rollbook.records.layout import RunFiles
from rollbook.records.run_info import RunInfo

End = Callable[[str, str | None], None]  # outcome, error


def is_supervised() -> bool:
    """Whether `rollbook run` started this process, and so has it in the history already."""
    return bool(os.environ.get("ROLLBOOK_RUN_DIR"))


def write_output_dir_note(log_path: Path) -> None:
    """Under `rollbook run`, note where this run writes, so that `status` finds its files.

    The first run of a command is the one that it is about; an evaluation that follows has a place of its own.
    """
    if archive := os.environ.get("ROLLBOOK_RUN_DIR"):
        note = Path(archive) / "output_dir"
        if not note.exists():
            write_atomic(note, f"{log_path.absolute()}\n".encode())


def enter_history(artifacts: Path, files: RunFiles, info: RunInfo, resumed_from: str | None) -> End:
    """Note the start; what is returned notes the end. The next reader finds out a killed process."""
    from rollbook.runs.jobs.finish import final_metrics
    from rollbook.runs.jobs.ledger import Ledger, RunEnd, RunStart, Status

    ledger = Ledger(artifacts)
    run_id = ledger.start(
        RunStart(
            name=files.root.name,
            kind=info.kind,
            command=info.command,
            output_dir=str(files.root),
            resumed_from=resumed_from,
        )
    )

    began = time.monotonic()

    def end(outcome: str, error: str | None) -> None:
        record = RunEnd(status=Status(outcome), reason=error, metrics=final_metrics(files.root))
        record.duration_s = round(time.monotonic() - began, 3)
        saved = newest_complete(read_checkpoints(files.checkpoints), files.root)
        if saved is not None:
            path = saved.record.state_path or saved.record.sampler_path or ""
            whole = path if "://" in path else str(files.root / path)
            record.checkpoint = {"path": whole, "step": saved.record.batch}
        ledger.end(run_id, record)

    return end
