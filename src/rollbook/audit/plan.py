"""What a run of `rollbook rl` was to do, by its config.json: how many prompts, rollouts, passes and
evaluations. A loop of the user's own has no such plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from rollbook.audit.places import Ints
from rollbook.audit.tables import keys_of
from rollbook.records.layout import TRAIN, RunFiles, eval_split
from rollbook.records.run_info import RunInfo
from rollbook.records.token_settings import PlannedExport, is_chosen, planned_export
from rollbook.rl.schedule import Schedule, groups_drawn, is_evaluated
from rollbook.runs.config_history import first_with_config


class _Environment(msgspec.Struct):
    label: str
    weight: float


class _Eval(msgspec.Struct):
    name: str
    every: int


class _Sampler(msgspec.Struct):
    max_tokens: int


class RlPlan(msgspec.Struct):
    """The settings that say what there is to account for."""

    seed: int
    environments: list[_Environment]
    groups_per_batch: int
    group_size: int
    oversample: float
    sampler: _Sampler
    iterations: int
    epochs: int
    evals: list[_Eval]
    save_total_limit: int | None
    trainer: dict[str, Any]
    since: int = 0  # the first iteration that these settings are known to hold for
    _schedule: Any = None

    @property
    def groups(self) -> int:
        return groups_drawn(self.groups_per_batch, self.oversample)

    @property
    def keys(self) -> Ints:
        """The keys of all rollouts of an iteration."""
        groups = np.repeat(np.arange(self.groups), self.group_size)
        return keys_of(groups, np.tile(np.arange(self.group_size), self.groups))

    @property
    def export(self) -> PlannedExport | None:
        """The settings of the token export; None where it is off."""
        return planned_export(self.trainer)

    def exports(self, i: int) -> bool:
        return self.export is not None and i >= self.since and i % self.export.every == 0

    def is_exported(self, i: int, group: int, trajectory: int, part: int) -> bool:
        """Whether the export has this row, of an iteration that is exported."""
        assert self.export is not None
        return is_chosen(self.export.fraction, self.seed, (TRAIN, i, group, trajectory, part))

    def splits_before(self, i: int) -> list[str]:
        """The evaluations that are due before an iteration, or at the end."""
        if i < self.since:
            return []
        due = [evaluation for evaluation in self.evals if is_evaluated(evaluation.every, i, self.iterations)]
        return [eval_split(evaluation.name) for evaluation in due]

    def labels(self, i: int) -> list[str] | None:
        """The environment of each group, where there are several; how many tasks they have plays no part."""
        if len(self.environments) < 2:
            return None
        if self._schedule is None:
            weights = [environment.weight for environment in self.environments]
            self._schedule = Schedule(self.seed, weights, [1] * len(weights), self.groups)
        return [self.environments[draw.environment].label for draw in self._schedule.draws(i)]


def read_plan(config: Mapping[str, Any], files: RunFiles, info: RunInfo) -> RlPlan | None:
    try:
        plan = msgspec.convert(config, RlPlan)
    except msgspec.ValidationError:
        return None
    plan.since = first_with_config(files, info)
    return plan
