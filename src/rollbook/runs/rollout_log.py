"""One iteration's rollouts, recorded as they finish.

A line goes to the summaries and the transcripts the moment a trajectory ends, so a process killed in the
middle of sampling loses nothing that was done. When the iteration ends, the lines are put in the order of the
batch, and the logtree and its HTML page are made from them: every group with its Trajectory Details, and the
conversations of `num_groups_to_log` groups spread over the range of rewards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from rollbook.errors import UsageError
from rollbook.records import logtree
from rollbook.records.identity import task_digest, task_id
from rollbook.records.layout import TRAIN, Artifact
from rollbook.records.locks import FileLock
from rollbook.records.rollout_stats import RolloutStats
from rollbook.records.rollouts import (
    RolloutSummary,
    Trajectory,
    prompt_of,
    summarize,
    summarize_failure,
)
from rollbook.records.transcripts import transcript_of
from rollbook.runs.report import Notes, group_sections
from rollbook.runs.rollout_files import RolloutFiles


class GroupLog:
    """The trajectories of one problem. Made by `RolloutLog.group`."""

    def __init__(
        self,
        log: RolloutLog,
        node: logtree.Node,
        group_idx: int,
        task_id: str | None,
        size: int | None,
        ids: dict[str, Any],
    ) -> None:
        self.group_idx = group_idx
        self.task_id = task_id
        self.node = node
        self._log = log
        self._size = size
        self._ids = ids
        self._recorded: set[int] = set()
        self._shown: tuple[list[dict[str, Any]], list[Any]] | None = None
        self._digest: str | None = None  # of what was shown last
        self._guard = threading.RLock()

    def add(self, trajectory: Trajectory, traj_idx: int | None = None) -> RolloutSummary:
        """Record a trajectory that came to its end."""
        return self._record(trajectory, None, traj_idx)

    def fail(
        self, error: BaseException | str, traj_idx: int | None = None, partial: Trajectory | None = None
    ) -> RolloutSummary:
        """Record a trajectory that did not; what it said until then may be given as `partial`."""
        return self._record(partial, error, traj_idx)

    @contextmanager
    def trajectory(self, traj_idx: int) -> Iterator[None]:
        """Logtree calls inside belong to this trajectory; an exception is recorded as its failure."""
        try:
            ids = {"group_idx": self.group_idx, "traj_idx": traj_idx}
            with logtree.under(self.node), logtree.scope(f"Trajectory {traj_idx} log", **ids):
                yield
        except Exception as error:
            if traj_idx not in self._recorded:
                self.fail(error, traj_idx)
            raise

    def _record(
        self, trajectory: Trajectory | None, error: BaseException | str | None, traj_idx: int | None
    ) -> RolloutSummary:
        with self._guard:  # trajectories of one group may end in several threads at once
            ids = {**self._ids, "group_idx": self.group_idx, **self._task_ids(trajectory)}
            ids["traj_idx"] = index = self._free_index(traj_idx)
            if error is None:
                assert trajectory is not None
                summary = summarize(trajectory, **ids)
            else:
                summary = summarize_failure(error, trajectory, **ids)
            self._log.write(summary, trajectory)
            self._recorded.add(index)  # only now: a trajectory that could not be written can still fail
        return summary

    def _free_index(self, traj_idx: int | None) -> int:
        if traj_idx is None:
            return next(index for index in count() if index not in self._recorded)
        if traj_idx in self._recorded:
            raise UsageError(f"trajectory {traj_idx} of group {self.group_idx} is already recorded")
        return traj_idx

    def _task_ids(self, trajectory: Trajectory | None) -> dict[str, str | None]:
        prompt = [dict(message) for message in prompt_of(trajectory)] if trajectory is not None else []
        if trajectory is None or not prompt:
            return {"task_id": self.task_id, "task_digest": None}
        shown = (prompt, list(trajectory.tools))
        if shown != self._shown:  # nearly always the same for the whole group
            self._shown, self._digest = shown, task_digest(*shown)
        if self.task_id is None:
            self.task_id = task_id(*shown)
        return {"task_id": self.task_id, "task_digest": self._digest}

    def close(self, error: BaseException | None) -> None:
        """An exception that left the group fails every trajectory that was still to come.

        Without a size the number is unknown, unless none came at all.
        """
        if error is not None:
            expected = self._size if self._size is not None else not self._recorded
            for traj_idx in range(expected):
                if traj_idx not in self._recorded:
                    self.fail(error, traj_idx)
        expected = self._size if self._size is not None else len(self._recorded)
        self._log.stats.expect(max(expected, len(self._recorded)))


class RolloutLog:
    """The rollouts of one (split, iteration). Made by `Run.rollouts`."""

    def __init__(
        self,
        *,
        run_id: str,
        split: str,
        iteration: int,
        path_of: Callable[[Artifact], Path],
        num_groups_to_log: int,
        lock: FileLock,
    ) -> None:
        self.split, self.iteration = split, iteration
        self.stats = RolloutStats()
        self._run_id = run_id
        self._path_of = path_of
        self._num_groups_to_log = num_groups_to_log
        self._claimed: set[int] = set()
        self._guard = threading.Lock()
        self._files = RolloutFiles(path_of(Artifact.SUMMARIES), path_of(Artifact.TRANSCRIPTS), lock)
        self._notes = Notes(path_of(Artifact.SUMMARIES).parent)

    @contextmanager
    def group(
        self,
        group_idx: int | None = None,
        *,
        task_id: str | None = None,
        tags: Sequence[str] = (),
        sampling_client_step: int | None = None,
        size: int | None = None,
    ) -> Iterator[GroupLog]:
        """The rollouts of one problem.

        `group_idx` is its place in the batch, `task_id` its own lasting name (a hash of the prompt when
        there is none), `size` how many trajectories are expected: those that never come count as missing,
        or as failed when an exception leaves the block. The exception reaches the caller.
        """
        ids = {
            "run_id": self._run_id,
            "split": self.split,
            "iteration": self.iteration,
            "tags": [tags] if isinstance(tags, str) else [str(tag) for tag in tags],
            "sampling_client_step": sampling_client_step,
        }
        index = self._claim(group_idx)
        task_id = None if task_id is None else str(task_id)
        # A section of its own, not a child of the open scope: groups run in threads and tasks where none is.
        node = (
            logtree.section(f"Group {index}", group_idx=index) if self._num_groups_to_log else logtree.NOWHERE
        )
        with logtree.under(node):
            group = GroupLog(self, node, index, task_id, size, ids)
            try:
                yield group
            except BaseException as error:
                group.close(error)
                raise
            else:
                group.close(None)
            finally:
                self._notes.keep(index, node)

    def metrics(self) -> dict[str, float]:
        """The `env/...` metrics of what was recorded; an evaluation's carry its name in front."""
        prefix = "" if self.split == TRAIN else f"{self.split.removeprefix('eval/')}/"
        return self.stats.metrics(prefix)

    def write(self, summary: RolloutSummary, trajectory: Trajectory | None) -> None:
        line, text = summary.encode(), transcript_of(trajectory, summary).encode()
        with self._guard:
            self._files.append(summary.group_idx, summary.traj_idx, line, text)
            self.stats.add(summary)

    def sync(self) -> None:
        self._files.sync()

    def close(self) -> None:
        """Close the files of rollouts, their lines in the order of the batch."""
        self._files.close()

    def write_report(self, trace: logtree.Trace) -> None:
        """Write the page and the tree from the closed files: every group in order, some in full."""
        if self._num_groups_to_log > 0:
            html, json = self._path_of(Artifact.HTML), self._path_of(Artifact.LOGTREE)
            with self._files.reading() as reader:
                groups = group_sections(reader, self._claimed, self._num_groups_to_log, self._notes)
                logtree.write(trace, html=html, json=json, more=groups)
        self._notes.close()

    def _claim(self, group_idx: int | None) -> int:
        with self._guard:
            index = len(self._claimed) if group_idx is None else group_idx
            while group_idx is None and index in self._claimed:
                index += 1
            if index in self._claimed:
                raise UsageError(f"group {index} of iteration {self.iteration} is already recorded")
            self._claimed.add(index)
            return index
