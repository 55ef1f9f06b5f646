"""A run of reinforcement learning, read back: its settings, and what its loop was given in an iteration.

One iteration is in memory at a time. What the files of an iteration say twice is compared on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec

from rollbook.errors import BadFileError, UsageError
from rollbook.records.checkpoints import is_complete, read_checkpoints
from rollbook.records.complete import file_facts
from rollbook.records.config import read_config
from rollbook.records.iterations import IterationRecord, Noise, TrainRow
from rollbook.records.jsonl import read_lines
from rollbook.records.layout import TRAIN, Artifact
from rollbook.records.record import decode_record, read_records
from rollbook.records.rollouts import RolloutSummary, Status, Trajectory
from rollbook.records.transcripts import Transcript
from rollbook.records.turns import Turn
from rollbook.rl.groups import Group
from rollbook.rl.replay.findings import Findings, Place, Stage
from rollbook.rl.settings import RlSettings, load_settings
from rollbook.rollouts.types import Episode
from rollbook.runs.reader import open_run
from rollbook.train.losses import AnyLoss, Loss

READ = (Artifact.TRANSCRIPTS, Artifact.SUMMARIES)  # of an iteration; nothing else is needed
INITIAL = "the initial weights"
_Rollout = tuple[int, int]  # group_idx, traj_idx


class Origin(NamedTuple):
    """Weights that are kept: those from which an iteration goes on."""

    iteration: int
    name: str
    directory: Path | None  # None: those that the settings give


class RecordedRun:
    """What is needed of a run to take its steps again.

    `loss` is the run's, where it is the caller's own; `model` is where its model lies now, if that has moved;
    `only` names the rows that were trained, in a part of a run.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        loss: Loss | None = None,
        model: Path | None = None,
        only: frozenset[TrainRow] | None = None,
    ) -> None:
        self.only = only
        reader = open_run(root)
        self.root, self.files, self.info = reader.files.root, reader.files, reader.info
        self._where: dict[int, tuple[int, int]] = {}  # of the line of each iteration
        self._noise: dict[int, Noise] = {}
        self._index()
        self.settings = settings_of(self.files.config, loss, model)

    @property
    def iterations(self) -> list[int]:
        """Those that were trained, in order."""
        return sorted(self._where)

    def record(self, i: int) -> IterationRecord:
        if i not in self._where:
            have = self.iterations
            raise UsageError(f"{self.root} has no iteration {i}; it has {have[0]} to {have[-1]}")
        start, end = self._where[i]
        path = self.files.iterations
        (line,) = read_lines(path, start=start, end=end)
        return decode_record(path, line, IterationRecord)

    def noise(self, i: int) -> Noise | None:
        """What was measured last before the end of an iteration, else first after it."""
        before = [number for number in self._noise if number <= i]
        chosen = max(before) if before else min(self._noise, default=None)
        return None if chosen is None else self._noise[chosen]

    def path(self, i: int, artifact: Artifact) -> Path:
        return self.files.iteration(TRAIN, i, artifact)

    def missing(self, i: int) -> str | None:
        """What keeps an iteration from being taken again, in words."""
        if i not in self._where:
            return f"iterations.jsonl does not name iteration {i}"
        gone = [path.name for path in (self.path(i, part) for part in READ) if not path.exists()]
        return f"{gone[0]} is gone" if gone else None

    def origins(self) -> list[Origin]:
        """The weights that are kept, in the order of their iterations."""
        kept = {0: Origin(0, INITIAL, None)}
        for stored in read_checkpoints(self.files.checkpoints):
            record = stored.record
            if record.batch is not None and record.state_path and is_complete(record, self.root):
                directory = self.root / record.state_path
                kept[record.batch] = Origin(record.batch, f"checkpoint {record.name}", directory)
        return [kept[i] for i in sorted(kept)]

    def _index(self) -> None:
        path = self.files.iterations
        for line in read_lines(path) if path.exists() else ():
            record = decode_record(path, line, IterationRecord)
            if record.split == TRAIN and record.steps is not None and record.rollouts is not None:
                self._where[record.iteration] = line.start, line.end
                if record.noise is not None:
                    self._noise[record.iteration] = record.noise
        if not self._where:
            raise UsageError(
                f"{self.root} cannot be replayed: its iterations.jsonl names no step of `rollbook rl`"
            )


def settings_of(path: Path, loss: Loss | None, moved: Path | None) -> RlSettings:
    """The settings of a run's config.json, without what only sampling needs to find again."""
    values = read_config(path)
    recorded = values.get("loss")
    if loss is not None and msgspec.to_builtins(loss) != recorded:
        raise UsageError(f"{path}: the run was trained with the loss {recorded}, not with {loss!r}")
    own = recorded.get("name") if isinstance(recorded, Mapping) else None
    if loss is None and own not in _KNOWN_LOSSES:
        raise UsageError(
            f"{path}: the loss {own!r} is not one of Rollbook's; give the object from Python: "
            "rollbook.replay(run, iteration, loss=...)"
        )
    settings = load_settings(values, loss=loss)
    model = msgspec.structs.replace(settings.model, chat_template=None)
    if moved is not None:
        model = msgspec.structs.replace(model, path=str(moved), handed_over=None, config=None, tokenizer=None)
    return msgspec.structs.replace(settings, model=model)


_KNOWN_LOSSES = {kind.__struct_config__.tag for kind in get_args(AnyLoss)}


def read_groups(
    run: RecordedRun, record: IterationRecord, found: Findings, *, vocabulary: int
) -> list[Group]:
    """The rollouts of an iteration as they were played; no token may be beyond the `vocabulary`."""
    i = record.iteration
    for part in READ:
        path = run.path(i, part)
        name = path.relative_to(run.root).as_posix()
        if name in record.files:
            facts = record.files[name]
            found.compare(Stage.FILES, f"the digest of {name}", facts.xxh3_128, file_facts(path).xxh3_128)
    summaries = _by_rollout(run.path(i, Artifact.SUMMARIES), RolloutSummary, found)
    transcripts = _by_rollout(run.path(i, Artifact.TRANSCRIPTS), Transcript, found)
    fates = {(fate.group_idx, fate.traj_idx) for fate in record.rollouts or ()}
    episodes: dict[_Rollout, Episode | None] = {}
    for key in sorted(fates | summaries.keys() | transcripts.keys()):
        summary, transcript = summaries.get(key), transcripts.get(key)
        if not 0 <= key[1] < run.settings.group_size:
            raise BadFileError(
                run.path(i, Artifact.TRANSCRIPTS), f"no group of this run has a trajectory {key[1]}"
            )
        present = [key in fates, summary is not None, transcript is not None]
        what = "whether iterations.jsonl, summaries and transcripts have it"
        found.compare(Stage.ROLLOUTS, what, [True] * 3, present, Place(*key))
        episodes[key] = None
        if summary is not None and transcript is not None:
            turns = _turns(run.path(i, Artifact.TRANSCRIPTS), transcript, vocabulary)
            _compare_rollout(summary, transcript, turns, found, Place(*key))
            if transcript.status is Status.OK:
                episodes[key] = Episode(
                    prompt=[],
                    turns=turns,
                    stop_reason=transcript.stop_reason or "stop",
                    final_reward=summary.final_reward or 0.0,
                )
    return _grouped(episodes)


def _grouped(episodes: Mapping[_Rollout, Episode | None]) -> list[Group]:
    sizes: dict[int, int] = {}
    for group_idx, traj_idx in episodes:
        sizes[group_idx] = max(sizes.get(group_idx, 0), traj_idx + 1)
    return [
        Group(group_idx, [episodes.get((group_idx, traj_idx)) for traj_idx in range(size)])
        for group_idx, size in sorted(sizes.items())
    ]


def _by_rollout(path: Path, kind: Any, found: Findings) -> dict[_Rollout, Any]:
    rollouts: dict[_Rollout, Any] = {}
    for line in read_records(path, kind):
        key = line.group_idx, line.traj_idx
        if key in rollouts:
            found.compare(Stage.ROLLOUTS, f"its lines in {path.name}", 1, 2, Place(*key))
        rollouts[key] = line
    return rollouts


def _compare_rollout(
    summary: RolloutSummary, transcript: Transcript, turns: list[Turn], found: Findings, place: Place
) -> None:
    """Two files tell of each rollout; the transcript is what is replayed."""
    for name in ("task_id", "task_digest", "status", "stop_reason"):
        recorded, replayed = getattr(summary, name), getattr(transcript, name)
        found.compare(Stage.ROLLOUTS, f"{name} in summary and transcript", recorded, replayed, place)
    lengths = [step.ac_len for step in summary.steps]
    sampled = [None if turn.token_ids is None else len(turn.token_ids) for turn in turns]
    found.compare(Stage.ROLLOUTS, "sampled tokens per turn", lengths, sampled, place)
    for index, (step, turn) in enumerate(zip(summary.steps, turns, strict=False)):
        at = place._replace(turn=index)
        found.compare(Stage.REWARDS, "reward in summary and transcript", step.reward, turn.reward, at)
    what = "total reward in summary and transcript"
    found.compare(Stage.REWARDS, what, summary.total_reward, transcript.total_reward, place)
    if transcript.status is Status.OK:
        total = Trajectory(turns=turns, final_reward=summary.final_reward).total_reward()
        found.compare(Stage.REWARDS, "total reward and its parts", transcript.total_reward, total, place)


def _turns(path: Path, transcript: Transcript, vocabulary: int) -> list[Turn]:
    try:
        turns = transcript.to_turns()
    except (msgspec.ValidationError, KeyError, TypeError) as error:
        raise BadFileError(path, f"{_name(transcript)} has turns that cannot be read: {error}") from None
    for index, turn in enumerate(turns):
        lengths = {len(turn.token_ids or ()), len(turn.logprobs or ())}
        if transcript.status is Status.OK and (turn.prompt_token_ids is None or len(lengths) > 1):
            raise BadFileError(path, f"turn {index} of {_name(transcript)} lacks tokens or logprobs")
        tokens = [*(turn.prompt_token_ids or ()), *(turn.token_ids or ())]
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise BadFileError(
                path, f"turn {index} of {_name(transcript)} has a token that the model does not know"
            )
    return turns


def _name(transcript: Transcript) -> str:
    return f"group {transcript.group_idx}, trajectory {transcript.traj_idx}"
