"""Reading a run, ours or one of Tinker's, finished or still being written.

    run = rollbook.open_run("runs/a")
    run.metrics.to_pandas()
    for rollout in run.rollouts(iteration=10): ...

Everything streams; nothing is read before it is asked for. Neither torch nor pandas is imported unless a
method that returns their objects is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rollbook.errors import UsageError
from rollbook.records import logtree
from rollbook.records.alerts import Alert
from rollbook.records.checkpoints import CheckpointRecord, newest_complete, read_checkpoints
from rollbook.records.config import read_config
from rollbook.records.iterations import IterationRecord, read_iterations
from rollbook.records.layout import TRAIN, Artifact, IterationFile, Layout, RunFiles, base_name
from rollbook.records.record import AnyRecord, read_records
from rollbook.records.rollouts import RolloutSummary
from rollbook.records.run_info import Attempt, RunInfo, read_run_info
from rollbook.records.token_files import TOKEN_EXPORTS
from rollbook.records.transcripts import Transcript
from rollbook.runs.follow import Follower
from rollbook.runs.metrics_view import Metrics

if TYPE_CHECKING:
    from rollbook.records.tokens import TokenSequence


class Iteration(NamedTuple):
    """What one iteration left for one split."""

    iteration: int
    split: str
    files: dict[Artifact, Path]


class Conversation(NamedTuple):
    """The messages of one trajectory, or of one node of a tree that does not say whose they are."""

    split: str
    iteration: int
    group_idx: int | None
    traj_idx: int | None
    messages: list[dict[str, Any]]


class RunReader:
    def __init__(self, path: str | Path) -> None:
        root = Path(path).expanduser().absolute()
        self.info: RunInfo | None = None
        if (root / "run.json").exists():
            self.info = read_run_info(root / "run.json")
        self.files = RunFiles(root, Layout(self.info.layout) if self.info else Layout.FLAT)

    def __repr__(self) -> str:
        return f"RunReader({str(self.files.root)!r})"

    @property
    def id(self) -> str:
        return self.info.id if self.info else self.files.root.resolve().name

    @property
    def attempts(self) -> list[Attempt]:
        """The processes that wrote this run; empty for a run of another system (see metrics' `attempt`)."""
        return self.info.attempts if self.info else []

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_config(self.files.config) if self.files.config.exists() else {}

    @property
    def metrics(self) -> Metrics:
        return Metrics(self.files.metrics, self.info)

    def iterations(self, split: str | None = None) -> list[Iteration]:
        """What is on disk for each (iteration, split), in order."""
        grouped: dict[tuple[int, str], dict[Artifact, Path]] = {}
        for found in self._files_of(None, split):
            grouped.setdefault((found.iteration, found.split), {})[found.artifact] = found.path
        return [Iteration(number, of, files) for (number, of), files in sorted(grouped.items())]

    def finished_iterations(self) -> Iterator[IterationRecord]:
        """What iterations.jsonl says; of an iteration that was recorded again the last record counts."""
        return read_iterations(self.files.iterations)

    def rollouts(self, iteration: int | None = None, split: str | None = None) -> Iterator[RolloutSummary]:
        """The summary of every trajectory, failed ones included."""
        return self._records(Artifact.SUMMARIES, RolloutSummary, iteration, split)

    def transcripts(self, iteration: int | None = None, split: str | None = None) -> Iterator[Transcript]:
        return self._records(Artifact.TRANSCRIPTS, Transcript, iteration, split)

    def tokens(self, iteration: int | None = None, split: str | None = TRAIN) -> Iterator[TokenSequence]:
        """What the trainer saw of every token, by the sequence: from the token exports of all processes."""
        from rollbook.records.token_places import exported_sequences

        return exported_sequences(self.files.root, self.info, iteration=iteration, split=split)

    def conversations(self, iteration: int | None = None, split: str | None = None) -> Iterator[Conversation]:
        """Every conversation: from the transcripts, or from the logtree where there are none."""
        for number, of, files in self.iterations(split):
            if iteration is not None and number != iteration:
                continue
            if Artifact.TRANSCRIPTS in files:
                for record in read_records(files[Artifact.TRANSCRIPTS], Transcript):
                    yield Conversation(
                        record.split, number, record.group_idx, record.traj_idx, record.messages
                    )
            elif Artifact.LOGTREE in files:
                for found in logtree.find_conversations(logtree.read(files[Artifact.LOGTREE]).root):
                    group, trajectory = (_as_int(found.ids.get(key)) for key in ("group_idx", "traj_idx"))
                    yield Conversation(of, number, group, trajectory, found.messages)

    def logtree(self, iteration: int, split: str = TRAIN) -> logtree.Trace:
        for found in self._files_of(iteration, split):
            if found.artifact is Artifact.LOGTREE:
                return logtree.read(found.path)
        have = sorted({f.iteration for f in self._files_of(None, split) if f.artifact is Artifact.LOGTREE})
        raise UsageError(
            f"{self.files.root} has no logtree of {split!r} at iteration {iteration}; "
            f"there are: {', '.join(map(str, have)) or 'none'}"
        )

    def checkpoints(self) -> list[CheckpointRecord]:
        return [stored.record for stored in read_checkpoints(self.files.checkpoints)]

    def latest_checkpoint(self) -> CheckpointRecord | None:
        """The newest checkpoint whose files are all there."""
        stored = newest_complete(read_checkpoints(self.files.checkpoints), self.files.root)
        return stored.record if stored else None

    def alerts(self) -> Iterator[Alert]:
        return read_records(self.files.alerts, Alert)

    def follow(self) -> Follower:
        """A view of a run that is being written: each `poll()` returns what is new."""
        return Follower(self.files, foreign=self.info is None)

    def _records(
        self, artifact: Artifact, kind: type[AnyRecord], iteration: int | None, split: str | None
    ) -> Iterator[AnyRecord]:
        for number, _, files in self.iterations(split):
            if artifact in files and iteration in (None, number):
                yield from read_records(files[artifact], kind)

    def _files_of(self, iteration: int | None, split: str | None) -> Iterator[IterationFile]:
        base = None if split is None else base_name(split)
        for found in self.files.iteration_files():
            if iteration in (None, found.iteration) and base in (None, found.base):
                yield found


def open_run(path: str | Path) -> RunReader:
    """Open a run directory for reading; a clear error when there is none."""
    root = Path(path).expanduser()
    if not root.is_dir():
        raise UsageError(f"{root}: no such directory")
    if not _holds_run(root):
        below = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and _holds_run(entry))
        hint = f"; its runs are below it, e.g. {root / below[0]}" if below else ""
        raise UsageError(
            f"{root} is not a run: it has no run.json, metrics.jsonl, iteration files "
            f"or {TOKEN_EXPORTS}/{hint}"
        )
    return RunReader(root)


def _holds_run(root: Path) -> bool:
    names = ("run.json", "metrics.jsonl", "checkpoints.jsonl", TOKEN_EXPORTS)
    if any((root / name).exists() for name in names):
        return True
    return next(RunFiles(root).iteration_files(), None) is not None


def _as_int(text: str | None) -> int | None:
    return int(text) if text is not None and text.lstrip("-").isdigit() else None
