"""The weights of a run before one of its iterations, and the way to the next one, by the record alone.

There is no sampler and no environment: rewards and tokens are read, and everything after them is made again
by the functions of the loop (`steps.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from rollbook.errors import BadFileError, UsageError
from rollbook.records.complete import problem
from rollbook.records.iterations import IterationRecord
from rollbook.records.layout import Artifact
from rollbook.rl.compare import Promise, compare_records, slack_of
from rollbook.rl.findings import Difference, Findings, Stage, StageFound, Verdict
from rollbook.rl.groups import Group
from rollbook.rl.opening import Start, Trainer, open_trainer
from rollbook.rl.recorded import Origin, RecordedRun, read_groups
from rollbook.rl.seen_tokens import SeenTokens, compare_tokens
from rollbook.rl.settings import RlSettings
from rollbook.rl.steps import assemble, take_steps, trained_record
from rollbook.train.engine import StepOutput
from rollbook.train.processes import Processes
from rollbook.train.state import weights_digest

_EXACT_PROCESSES = 2  # the sum of two gradients is the same in any order, that of more is not


class Replayed(msgspec.Struct, kw_only=True):
    """One iteration, taken again."""

    iteration: int
    origin: str  # the weights that the replay began with
    verdict: Verdict
    promise: Promise
    first: Difference | None = None
    loss: list[float | None] = []  # of each optimiser step
    grad_norm: list[float | None] = []
    weights_digest: str | None = None
    stages: list[StageFound] = []
    seconds: float = 0.0


class OtherWeightsError(UsageError):
    """The weights that were loaded are not those of the run."""


class Taken(NamedTuple):
    """What an iteration comes to when it is trained."""

    record: IterationRecord
    steps: list[StepOutput]
    seen: SeenTokens


class Replayer:
    def __init__(self, run: RecordedRun, origin: Origin) -> None:
        """Load the weights from which `origin.iteration` goes on."""
        self.run, self.origin = run, origin
        self.at = origin.iteration
        self.trainer = open_weights(run.settings, origin)
        self.digest = weights_digest(self.trainer.model)
        self.has_diverged = False  # from what the run wrote down
        self._is_exact, self._steps = True, 0  # since the origin
        self._check()

    def next(self) -> Replayed:
        """Take the present iteration again, and compare."""
        began, i, run = time.perf_counter(), self.at, self.run
        recorded, found = run.record(i), Findings(i)
        promise = self._promise(recorded)
        slack = slack_of(promise, self._steps)
        if promise.bits and recorded.weights_digest_before is not None:
            what = "the digest of the weights before"
            found.compare(Stage.WEIGHTS_BEFORE, what, recorded.weights_digest_before, self.digest)
        groups = read_groups(run, recorded, found)
        taken = train_again(self.trainer, run, groups, recorded, before=self.digest)
        compare_tokens(run, i, taken.seen, found, within=slack.logprob)
        compare_records(recorded, taken.record, found, seen=taken.seen, slack=slack)
        self.digest = str(taken.record.weights_digest)
        self.at, self._steps = i + 1, self._steps + len(taken.steps)
        self.has_diverged |= self.digest != recorded.weights_digest
        first, stages = found.first(), found.stages()
        is_within = any(one.verdict is Verdict.WITHIN for one in stages)
        return Replayed(
            iteration=i,
            origin=self.origin.name,
            verdict=Verdict.DIFFERS if first else Verdict.WITHIN if is_within else Verdict.EQUAL,
            promise=promise,
            first=first,
            loss=[step.loss for step in taken.steps],
            grad_norm=[step.grad_norm for step in taken.steps],
            weights_digest=self.digest,
            stages=stages,
            seconds=time.perf_counter() - began,
        )

    def _promise(self, recorded: IterationRecord) -> Promise:
        here, processes = self.trainer.machine, recorded.processes or 1
        why = None
        if recorded.machine is not None and recorded.machine != here:
            why = f"it was recorded on {recorded.machine}, and this is {here}"
        elif processes > _EXACT_PROCESSES:
            why = f"{processes} processes added up their gradients in an order that only they know"
        elif self.trainer.processes.device.type != "cpu":
            why = "a GPU adds up in an order of its own"
        elif not self._is_exact:
            why = "an iteration before it was recorded elsewhere"
        if why is None:
            known = "the machine, the threads and the versions are those of the run"
            unknown = "the record is older than its note of the machine"
            return Promise(bits=True, why=unknown if recorded.machine is None else known)
        self._is_exact = False
        noise = self.run.noise(self.at)
        if noise is None:
            raise UsageError(
                f"{self.run.root}: iteration {self.at} cannot be compared: {why}, and the run has not measured "
                "what two machines may differ by; replay it where it was recorded"
            )
        return Promise(bits=False, why=why, noise=noise)

    def _check(self) -> None:
        """The weights must be those of the run: else nothing that follows would say anything about it."""
        recorded = self.run.record(self.at) if self.run.missing(self.at) is None else None
        if recorded is None:
            return
        frozen = recorded.frozen_digest
        if frozen is not None and frozen != self.trainer.frozen_digest:
            raise OtherWeightsError("the model below its adapters is not the one that the run had")
        if self.origin.directory is None and recorded.weights_digest_before is None:
            raise OtherWeightsError("the record does not say with which weights it began")
        if self.origin.directory is None and recorded.weights_digest_before != self.digest:
            raise OtherWeightsError("the model of its settings is not the one that it began with")


def open_weights(settings: RlSettings, origin: Origin) -> Trainer:
    if origin.directory is not None and (wrong := problem(origin.directory, verify=True)):
        raise BadFileError(origin.directory, f"cannot be replayed from: {wrong}")
    processes = Processes()
    if processes.are_several:
        processes.close()
        raise UsageError("a replay runs in one process, whatever the run had; start it without torchrun")
    start = Start(settings, resume=False, record=None, checkpoint=origin.directory)
    return open_trainer(start, processes, lambda _: None)[1]


def train_again(
    trainer: Trainer,
    run: RecordedRun,
    groups: Sequence[Group],
    recorded: IterationRecord,
    *,
    before: str,
    settings: RlSettings | None = None,
) -> Taken:
    """Train the rollouts of an iteration with the run's settings, or with others."""
    settings, i = settings or run.settings, recorded.iteration
    _check_tokens(trainer, run, i, groups)
    processes = recorded.processes or 1
    assembled = assemble(trainer, settings, groups, i, processes=processes, only=run.only)
    seen = SeenTokens(settings.loss)
    steps = take_steps(trainer, settings, assembled.plan, seen)
    after = weights_digest(trainer.model)
    return Taken(trained_record(settings, i, assembled, steps, before=before, after=after), steps, seen)


def _check_tokens(trainer: Trainer, run: RecordedRun, i: int, groups: Sequence[Group]) -> None:
    size = trainer.model.base.get_input_embeddings().weight.shape[0]
    for group in groups:
        for traj_idx, episode in enumerate(group.episodes):
            turns = episode.turns if episode is not None else ()
            tokens = {token for turn in turns for token in turn.prompt_token_ids or ()}
            tokens |= {token for turn in turns for token in turn.token_ids or ()}
            if tokens and not 0 <= min(tokens) <= max(tokens) < size:
                raise BadFileError(
                    run.path(i, Artifact.TRANSCRIPTS),
                    f"group {group.group_idx}, trajectory {traj_idx} has a token that is not among the "
                    f"{size} of the model",
                )
