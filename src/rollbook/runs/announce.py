"""Tells others that a run is being written: the history of the project, and a supervisor above us."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rollbook.errors import RollbookError
from rollbook.records.atomic import write_atomic
from rollbook.records.checkpoints import newest_complete, read_checkpoints
from rollbook.records.layout import RunFiles
from rollbook.records.run_info import RunInfo

_log = logging.getLogger("rollbook")
_SUPERVISED = "ROLLBOOK_RUN_DIR"  # set where `rollbook run` started this process, and has it in the history


def write_output_dir_note(log_path: Path) -> None:
    """Under `rollbook run`, note where this run writes, so that `status` finds its files.

    The first run of a command is the one that it is about; an evaluation that follows has a place of its own.
    """
    if archive := os.environ.get(_SUPERVISED):
        note = Path(archive) / "output_dir"
        if not note.exists():
            write_atomic(note, f"{log_path.absolute()}\n".encode())


class HistoryEntry:
    """This process in the history of the project; the next reader finds out a killed one.

    Without `artifacts`, and under `rollbook run`, there is none. A training never fails because its history
    cannot be written: there is an alert, and a warning on the terminal.
    """

    def __init__(
        self,
        artifacts: str | Path | None,
        files: RunFiles,
        info: RunInfo,
        resumed_from: str | None,
        alert: Callable[[str, str], None],
    ) -> None:
        self._files, self._alert, self._began = files, alert, time.monotonic()
        self._id: str | None = None
        if artifacts is None or os.environ.get(_SUPERVISED):
            return
        from rollbook.runs.jobs.ledger import Ledger, RunStart

        start = RunStart(name=files.root.name, kind=info.kind, command=info.command)
        start.output_dir, start.resumed_from = str(files.root), resumed_from
        with self._alerting():
            self._ledger = Ledger(artifacts)
            self._id = self._ledger.start(start)

    def end(self, outcome: str, error: str | None) -> None:
        if self._id is None:
            return
        from rollbook.runs.jobs.finish import final_metrics
        from rollbook.runs.jobs.ledger import RunEnd, Status

        files = self._files
        with self._alerting():
            record = RunEnd(status=Status(outcome), reason=error, metrics=final_metrics(files.root))
            record.duration_s = round(time.monotonic() - self._began, 3)
            saved = newest_complete(read_checkpoints(files.checkpoints), files.root)
            if saved is not None:
                path = saved.record.state_path or saved.record.sampler_path or ""
                whole = path if "://" in path else str(files.root / path)
                record.checkpoint = {"path": whole, "step": saved.record.batch}
            self._ledger.end(self._id, record)

    @contextmanager
    def _alerting(self) -> Iterator[None]:
        try:
            yield
        except (RollbookError, OSError) as error:
            self._alert("the history was not written", str(error))
            _log.warning("the history was not written: %s", error)
