"""The weights of a run before one of its iterations, and the way to the next one, by the record alone.

There is no sampler and no environment: rewards and tokens are read, and everything after them is made again
by the functions of the loop (`steps.py`).
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from rollbook.errors import BadFileError, UsageError
from rollbook.records.complete import complete_directory, problem
from rollbook.records.iterations import IterationRecord
from rollbook.rl.opening import Trainer, open_trainer
from rollbook.rl.replay.compare import DIGESTS_ARE_EXACT, Promise, compare_records, slack_of
from rollbook.rl.replay.findings import Difference, Findings, Stage, StageFound, Verdict
from rollbook.rl.replay.recorded import Origin, RecordedRun, read_groups
from rollbook.rl.replay.seen_tokens import SeenTokens, compare_tokens
from rollbook.rl.settings import RlSettings
from rollbook.rl.start import Start
from rollbook.rl.steps import assemble, take_steps, trained_record
from rollbook.train.processes import Processes
from rollbook.train.state import save_training_state, weights_digest

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
        self._compare_weights_before(recorded, promise, found)
        groups = read_groups(run, recorded, found, vocabulary=vocabulary_of(self.trainer))
        seen = SeenTokens(run.settings.loss)
        processes = recorded.processes or 1
        assembled = assemble(self.trainer, run.settings, groups, i, processes=processes, only=run.only)
        steps = take_steps(self.trainer, run.settings, assembled.plan, seen)
        before, self.digest = self.digest, weights_digest(self.trainer.model)
        made = trained_record(run.settings, i, assembled, steps, before=before, after=self.digest)
        compare_tokens(run, i, seen, found, within=slack.logprob)
        compare_records(recorded, made, found, seen=seen, slack=slack)
        self.at, self._steps = i + 1, self._steps + len(steps)
        self.has_diverged |= self.digest != recorded.weights_digest
        return Replayed(
            iteration=i,
            origin=self.origin.name,
            verdict=found.verdict(),
            promise=promise,
            first=found.first(),
            loss=[step.loss for step in steps],
            grad_norm=[step.grad_norm for step in steps],
            weights_digest=self.digest,
            stages=found.stages(),
            seconds=time.perf_counter() - began,
        )

    def _compare_weights_before(self, recorded: IterationRecord, promise: Promise, found: Findings) -> None:
        if recorded.weights_digest_before is None:
            found.leave_out(Stage.WEIGHTS_BEFORE, "the record is older than this digest")
        elif promise.bits or self.at == self.origin.iteration:
            what = "the digest of the weights before"
            found.compare(Stage.WEIGHTS_BEFORE, what, recorded.weights_digest_before, self.digest)
        else:
            found.leave_out(Stage.WEIGHTS_BEFORE, DIGESTS_ARE_EXACT)

    def _promise(self, recorded: IterationRecord) -> Promise:
        here, processes = self.trainer.machine, recorded.processes or 1
        why = None
        if recorded.machine is not None and recorded.machine != here:
            why = f"it was recorded with {_unlike(recorded.machine, here)}"
        elif processes > _EXACT_PROCESSES:
            why = f"{processes} processes added up their gradients in an order that only they know"
        elif self.trainer.processes.device.type != "cpu":
            why = "a GPU adds up in an order of its own"
        elif not self._is_exact and self.digest != recorded.weights_digest_before:
            why = "an iteration before it was recorded elsewhere"
        if why is None:
            known = "the machine, the threads and the versions are those of the run"
            unknown = "the record is older than its note of the machine"
            return Promise(bits=True, why=unknown if recorded.machine is None else known)
        self._is_exact = False
        noise = self.run.noise(self.at)
        if noise is None:
            raise UsageError(
                f"{self.run.root}: iteration {self.at} cannot be compared: {why}, and the run did not "
                "measure what two machines may differ by; replay it where it was recorded"
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
    start = Start(settings, resume=False, checkpoint=origin.directory)
    _, trainer = open_trainer(start, processes, lambda _: None)
    for adapters in getattr(trainer.model.model, "peft_config", {}).values():
        # Who saves adapters looks there for the model below, on the network if there is no such directory.
        adapters.base_model_name_or_path = settings.model.path
    return trainer


def keep_weights(trainer: Trainer, i: int, directory: Path) -> Origin:
    """Write the present weights down, from which iteration i goes on, so that they can be opened again."""
    with complete_directory(directory) as aside:
        save_training_state(aside, trainer.model, trainer.optimizer)
    return Origin(i, "the same weights", directory)


def _unlike(recorded: str, here: str) -> str:
    """What two machines do not have in common; their descriptions are lists."""
    parts = recorded.split(", "), here.split(", ")
    if len(parts[0]) == len(parts[1]):
        pairs = [(one, other) for one, other in zip(*parts, strict=True) if one != other]
        return ", ".join(f"{one} (here {other})" for one, other in pairs)
    return f"{recorded} (here {here})"


def vocabulary_of(trainer: Trainer) -> int:
    """How many tokens the model knows."""
    size: int = trainer.model.base.get_input_embeddings().weight.shape[0]
    return size
