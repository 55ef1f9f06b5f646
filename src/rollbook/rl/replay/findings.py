"""What a replay compares, stage by stage, and the first difference of each.

Only the first difference of a stage is kept, with how many there are: memory does not grow with what is
wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rollbook.records.token_writers import Array


class Stage(StrEnum):
    """In the order in which a step is made: what differs in one shows in those after it."""

    FILES = "files"  # those that are read are the ones that iterations.jsonl names
    WEIGHTS_BEFORE = "weights before"
    ROLLOUTS = "rollouts"  # the same ones in every file
    REWARDS = "rewards"
    ADVANTAGES = "advantages"
    FATES = "fates"
    EXAMPLES = "examples"  # tokens, and all that came with them
    BATCHES = "batches"
    LOGPROBS = "logprobs"
    RATIOS = "ratios"
    MASKS = "masks"
    LOSS = "loss"
    GRAD_NORM = "grad_norm"
    WEIGHTS = "weights"


class Verdict(StrEnum):
    EQUAL = "equal"
    WITHIN = "within"  # the tolerance
    DIFFERS = "differs"
    NOT_COMPARED = "not compared"


class Place(NamedTuple):
    """Where in an iteration."""

    group_idx: int | None = None
    traj_idx: int | None = None
    part: int | None = None
    turn: int | None = None
    token: int | None = None  # the offset in the row
    optim_step: int | None = None
    micro_batch: int | None = None


ANYWHERE = Place()


class Difference(msgspec.Struct, kw_only=True, omit_defaults=True):
    iteration: int
    stage: Stage
    what: str
    recorded: Any = None
    replayed: Any = None
    group_idx: int | None = None
    traj_idx: int | None = None
    part: int | None = None
    turn: int | None = None
    token: int | None = None
    optim_step: int | None = None
    micro_batch: int | None = None
    hint: str | None = None

    def __str__(self) -> str:
        names = {
            "optim_step": "optimiser step",
            "micro_batch": "micro-batch",
            "group_idx": "group",
            "traj_idx": "trajectory",
            "part": "part",
            "turn": "turn",
            "token": "token",
        }
        places = [f"iteration {self.iteration}"]
        for field, name in names.items():
            value = getattr(self, field)
            if value is not None and (field != "part" or value):  # nearly all rows are whole trajectories
                places.append(f"{name} {value}")
        text = f"{self.stage}: {', '.join(places)}: {self.what}"
        if self.recorded is not None or self.replayed is not None:
            text += f": recorded {_shown(self.recorded)}, replayed {_shown(self.replayed)}"
        return text if self.hint is None else f"{text} ({self.hint})"


class StageFound(msgspec.Struct, kw_only=True):
    """What became of one stage of one iteration."""

    stage: Stage
    verdict: Verdict
    compared: int = 0  # values
    differing: int = 0
    distance: float = 0.0  # the largest between two numbers that are not equal and need not be
    first: Difference | None = None
    why: str | None = None  # it was not compared


class Findings:
    """Collects what is compared in one iteration."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration
        self._stages: dict[Stage, StageFound] = {}

    def compare(
        self,
        stage: Stage,
        what: str,
        recorded: Any,
        replayed: Any,
        place: Place = ANYWHERE,
        *,
        within: float = 0.0,
        hint: str | None = None,
    ) -> bool:
        """Whether two values are equal; two numbers may be `within` a distance of each other."""
        found = self._of(stage)
        found.compared += 1
        if recorded == replayed or _both_nan(recorded, replayed):
            return True
        if within and _are_near(recorded, replayed, within):
            found.distance = max(found.distance, abs(recorded - replayed))
            return True
        self._differs(found, what, recorded, replayed, place, hint=hint)
        return False

    def compare_columns(
        self,
        stage: Stage,
        what: str,
        recorded_T: Array,
        replayed_T: Array,
        place: Place,
        *,
        turn_T: Sequence[int] | Array,
        within_T: Array | float = 0.0,
    ) -> None:
        """The same for one value per token of a row; `turn_T` is -1 where no turn sampled the token."""
        found = self._of(stage)
        found.compared += len(recorded_T)
        if len(recorded_T) != len(replayed_T):
            self._differs(found, f"the length of {what}", len(recorded_T), len(replayed_T), place)
            return
        differs_T = recorded_T != replayed_T
        if recorded_T.dtype.kind == "f":
            differs_T &= ~(np.isnan(recorded_T) & np.isnan(replayed_T))
            distance_T = np.abs(recorded_T.astype(np.float64) - replayed_T)
            near_T = differs_T & (distance_T <= within_T)
            found.distance = max(found.distance, float(distance_T[near_T].max(initial=0.0)))
            differs_T &= ~near_T
        places = np.flatnonzero(differs_T)
        if len(places):
            token = int(places[0])
            turn = int(turn_T[token])
            place = place._replace(token=token, turn=None if turn < 0 else turn)
            self._differs(found, what, recorded_T[token].item(), replayed_T[token].item(), place)
            found.differing += len(places) - 1

    def leave_out(self, stage: Stage, why: str) -> None:
        """Say why a stage is not compared, where nothing of it was."""
        self._stages.setdefault(stage, StageFound(stage=stage, verdict=Verdict.NOT_COMPARED, why=why))

    def differing(self, stage: Stage) -> int:
        return self._stages[stage].differing if stage in self._stages else 0

    def stages(self) -> list[StageFound]:
        found = []
        for stage in Stage:
            one = self._stages.get(stage)
            if one is None:
                one = StageFound(stage=stage, verdict=Verdict.NOT_COMPARED, why="there is none")
            elif one.verdict is not Verdict.NOT_COMPARED:
                one.verdict = (
                    Verdict.DIFFERS if one.differing else Verdict.WITHIN if one.distance else Verdict.EQUAL
                )
            found.append(one)
        return found

    def verdict(self) -> Verdict:
        """Equal only where the new weights are."""
        if any(found.differing for found in self._stages.values()):
            return Verdict.DIFFERS
        is_near = any(found.distance for found in self._stages.values())
        weights = self._stages.get(Stage.WEIGHTS)
        has_digest = weights is not None and weights.verdict is not Verdict.NOT_COMPARED
        return Verdict.EQUAL if has_digest and not is_near else Verdict.WITHIN

    def first(self) -> Difference | None:
        """The first difference; that of a file as a whole only where nothing in it differs."""
        order = list(Stage)
        firsts = [found.first for found in self._stages.values() if found.first is not None]
        return min(
            firsts,
            key=lambda one: (
                one.stage is Stage.FILES,
                one.stage is Stage.WEIGHTS,
                -1 if one.optim_step is None else one.optim_step,
                order.index(one.stage),
            ),
            default=None,
        )

    def _of(self, stage: Stage) -> StageFound:
        return self._stages.setdefault(stage, StageFound(stage=stage, verdict=Verdict.EQUAL))

    def _differs(
        self,
        found: StageFound,
        what: str,
        recorded: Any,
        replayed: Any,
        place: Place,
        *,
        hint: str | None = None,
    ) -> None:
        found.differing += 1
        if found.first is None:
            found.first = Difference(
                iteration=self.iteration,
                stage=found.stage,
                what=what,
                recorded=recorded,
                replayed=replayed,
                hint=hint,
                **place._asdict(),
            )


def _both_nan(one: Any, other: Any) -> bool:
    both_floats = isinstance(one, float) and isinstance(other, float)
    return both_floats and math.isnan(one) and math.isnan(other)


def _are_near(one: Any, other: Any, within: float) -> bool:
    both_numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return both_numbers and abs(one - other) <= within


def _shown(value: Any) -> str:
    return "nothing" if value is None else str(value)
