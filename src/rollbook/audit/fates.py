"""What became of each rollout of a training iteration, and whether its reward explains it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rollbook.audit.auditor import Auditor
from rollbook.audit.compare import Step, label
from rollbook.audit.places import NUMBERS, Bools, Floats, Ints, numbered
from rollbook.audit.result import Kind
from rollbook.audit.tables import groups_of, keys_of, rollout_name
from rollbook.records.iterations import Fate, RolloutFate
from rollbook.rl.advantages import are_equal


class Fates:
    """Column by column, as iterations.jsonl has them."""

    def __init__(self, rollouts: list[RolloutFate]) -> None:
        self.keys = keys_of([one.group_idx for one in rollouts], [one.traj_idx for one in rollouts])
        self.places: Ints = np.array([NUMBERS[one.fate] for one in rollouts], np.int64)
        self.advantages: Floats = np.array([one.advantage for one in rollouts], np.float64)

    def places_of(self, keys: Ints) -> Ints:
        """The place of each rollout by its fate; -1 where it has none."""
        if not len(self.keys):
            return np.full(len(keys), -1)
        order = np.argsort(self.keys, kind="stable")
        at = order[np.minimum(np.searchsorted(self.keys[order], keys), len(order) - 1)]
        return np.where(self.keys[at] == keys, self.places[at], -1)

    def advantage_of(self) -> dict[int, float]:
        return dict(zip(self.keys.tolist(), self.advantages.tolist(), strict=True))


def audit_fates(
    auditor: Auditor,
    step: Step,
    file: Path,
    line: int,
    keys: Ints,
    places: Ints,
    advantages: Floats,
    rewards: Floats,
    cut_off: Bools | None,
) -> None:
    """One value per rollout; rewards are NaN where there is none, as where a rollout failed."""
    failed = places == NUMBERS[Fate.FAILED]
    truncated = places == NUMBERS[Fate.TRUNCATED]
    wrong = {"it failed, and has a reward": failed & ~np.isnan(rewards)}
    wrong["it has no reward, and did not fail"] = ~failed & np.isnan(rewards)
    if cut_off is not None:
        wrong["it is left out as cut off, and no reply of it is"] = truncated & ~cut_off
    wrong["it is trained, and has no advantage"] = (places == NUMBERS[Fate.TRAINED]) & np.isnan(advantages)
    compared = ~failed & ~np.isnan(rewards) & ~(truncated & np.isnan(advantages))
    wrong |= _against_group(groups_of(keys), places, rewards, compared)
    bad = np.zeros(len(keys), np.bool_)
    for why, these in wrong.items():
        bad |= these
        for key, place in zip(keys[these].tolist(), places[these].tolist(), strict=True):
            auditor.find(
                Kind.DIFFERS,
                f"{rollout_name(key)} is {list(NUMBERS)[place]!r} here, but {why}",
                file=file,
                line=line,
                key=label(step, key),
            )
    auditor.check("fates that fit the rewards", int((~bad).sum()), len(bad))


def _against_group(groups: Ints, places: Ints, rewards: Floats, compared: Bools) -> dict[str, Bools]:
    """What the other rewards of a group say about each of its rollouts."""
    names, group = numbered(groups)
    low, high = np.full(len(names), np.inf), np.full(len(names), -np.inf)
    np.minimum.at(low, group[compared], rewards[compared])
    np.maximum.at(high, group[compared], rewards[compared])
    count = np.bincount(group[compared], minlength=len(names))
    with np.errstate(invalid="ignore"):
        alone, equal = (count < 2)[group], ((count >= 2) & are_equal(low, high))[group]
    of = {fate: compared & (places == NUMBERS[fate]) for fate in Fate}
    mixed = of[Fate.TRAINED] | of[Fate.SURPLUS] | of[Fate.TRUNCATED]
    return {
        "the rewards of its group differ": of[Fate.CONSTANT] & ~equal,
        "others of its group have a reward": of[Fate.LONE] & ~alone,
        "the rewards of its group are all equal": mixed & (equal | alone),
    }
