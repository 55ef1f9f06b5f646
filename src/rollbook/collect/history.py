"""A collection is a run like any other: in the history from its first request to its end.

In the foreground it notes itself; under a supervisor (`--detach`, `rollbook run`), which notes it already, it
only leaves word of where its progress is. A collection that is refused before it begins (bad rows, other
settings, an output that is locked) is no run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rollbook.collect.files import CollectionFiles
from rollbook.collect.input import Input
from rollbook.collect.settings import CollectSettings
from rollbook.errors import Interrupted, RollbookError, WriteError
from rollbook.records.progress import Progress, read_progress
from rollbook.runs.jobs.collected import PROGRESS_KEY, set_collection_outcome, write_output_note
from rollbook.runs.jobs.job import Job
from rollbook.runs.jobs.recorder import Recorder

INTERRUPTED = 130
# Between being asked to stop and being killed. Most rollouts in flight are done by then; what is not costs
# only itself, and a server that hangs does not keep anyone waiting for ever.
_GRACE_S = 600.0


def job_of(settings: CollectSettings, command: Sequence[str], *, name: str, artifacts: Path) -> Job:
    """A collection as the history and a supervisor know it."""
    files = CollectionFiles(Path(settings.output_jsonl_fpath))
    given = settings.input_jsonl_fpath
    return Job(
        name=name,
        kind="collect",
        command=list(command),
        artifacts=artifacts,
        config=settings,
        output_dir=files.output.parent,
        data=[Path(given).absolute()] if given else [],
        grace_s=_GRACE_S,
        finisher="rollbook.runs.jobs.finish:record_result",
        extra={"output": files.output.name, PROGRESS_KEY: files.progress.name},
    )


class History:
    """What a collection in this process tells of itself."""

    def __init__(self, job: Job, log: Callable[[str], None]) -> None:
        # An environment may go to another directory, and the history must not go with it.
        artifacts, cwd = job.artifacts.expanduser().absolute(), job.cwd or Path.cwd()
        self._job, self._log = msgspec.structs.replace(job, artifacts=artifacts, cwd=cwd), log
        self._recorder: Recorder | None = None

    def began(self, rows: Input) -> None:
        if archive := os.environ.get("ROLLBOOK_RUN_DIR"):
            try:
                write_output_note(Path(archive), self._progress)
            except WriteError as error:
                self._log(f"`rollbook status` will not show this collection: {error}")
            return
        self._recorder = Recorder(msgspec.structs.replace(self._job, data=[rows.file]), log=self._log)

    def ended(self, progress: Progress, exit_code: int) -> None:
        self._record(exit_code, progress)

    def failed(self, error: BaseException) -> None:
        stopped = isinstance(error, Interrupted | KeyboardInterrupt)
        code = error.exit_code if isinstance(error, RollbookError) else INTERRUPTED if stopped else 1
        progress = read_progress(self._progress)
        self._record(code, progress if progress and progress.pid == os.getpid() else None, error)

    @property
    def _progress(self) -> Path:
        assert self._job.output_dir is not None
        return self._job.output_dir / str(self._job.extra[PROGRESS_KEY])

    def _record(self, code: int, progress: Progress | None, error: BaseException | None = None) -> None:
        if self._recorder is None:
            return
        from rollbook.runs.jobs.ledger import RunEnd, Status

        end = RunEnd(status=Status.FAILED, exit_code=code)
        if code == INTERRUPTED:
            end.status, end.reason = Status.INTERRUPTED, "stopped at once"
        elif error is not None:
            end.error = {"type": type(error).__name__, "message": str(error)}
        set_collection_outcome(end, progress)
        self._recorder.end(end)


@contextmanager
def recorded(job: Job, log: Callable[[str], None]) -> Iterator[History]:
    """Around a collection in this process; whoever gets to its end says `ended`."""
    history = History(job, log)
    try:
        yield history
    except BaseException as error:
        history.failed(error)
        raise
