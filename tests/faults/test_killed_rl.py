"""Hundreds of reinforcement learning runs, killed at every kind of moment and at any time, and resumed.

What is left equals what one run leaves that nobody touched: nothing lost or doubled, every weight to the bit.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from faults.harness import seeded
from helpers.kills import KilledRun, moments_of
from helpers.rl_runs import finish, settings_of, write_setup, write_tool_setup
from rollbook.rl.settings import RlSettings

KILLS, LIVES = 50, 5  # of each kind of run; of one run before it is left to come to its end
JSONL = {"experimental": {"token_export": {"format": "jsonl"}}}
PARQUET = {"experimental": {"token_export": {"format": "parquet"}}}
PPO = {"loss": {"name": "ppo", "clip_low": 0.0001, "clip_high": 0.0001}, "minibatches": 2, "epochs": 2}


class Kind(NamedTuple):
    """A kind of run: how it differs from `config_of`, and whether a stop leaves more than a checkpoint."""

    changes: dict[str, Any]
    has_tools: bool = False
    may_stop: bool = True


KINDS = {
    "plain": Kind({}),
    "tools": Kind({}, has_tools=True),
    "adapters": Kind({"model": {"lora": {"rank": 4, "dropout": 0.1}}, "save_every": 1}),
    "jsonl": Kind({"trainer": JSONL, **PPO}),
    "parquet": Kind({"trainer": PARQUET, **PPO}, may_stop=False),
    "dropped": Kind(
        {"truncated": "drop", "oversample": 1.5, "save_total_limit": 1, "layout": "nested",
         "sampler": {"stop": ["z", "q", "x"]}},
        may_stop=False,
    ),
    "two processes": Kind({"processes": 2, "trainer": PARQUET}, may_stop=False),
}  # fmt: skip


class Moment(NamedTuple):
    """Something that happens in one process of a run, and how often it does."""

    rank: int
    name: str
    times: int


class Campaign:
    """Runs of one kind, killed until there were enough kills."""

    def __init__(self, directory: Path, kind: Kind, chance: random.Random, seen: set[str]) -> None:
        self._directory, self._kind, self._chance, self._seen = directory, kind, chance, seen
        self._setup = write_setup(directory / "setup")
        self._changes = (write_tool_setup(self._setup) if kind.has_tools else {}) | kind.changes
        self.kills: Counter[str] = Counter()
        self.runs = self.stops = 0
        whole = self._settings("whole")
        self._whole = Path(whole.log_path)
        began = time.monotonic()
        finish(whole)
        self._seconds = time.monotonic() - began
        self._first: list[Moment] = []
        self._later: list[Moment] = []
        for rank in range(whole.processes):
            self._list_moments(rank)

    def kill_a_run(self) -> None:
        """Some lives, one after the other, and the end."""
        run = KilledRun(self._settings(f"killed-{self.runs}"))
        told: list[str] = []
        try:
            for life in range(LIVES):
                if not self._live(run, self._later if life else self._first, told):
                    break  # it was at its end before that
            run.end(self._whole)
        except BaseException as error:
            error.add_note(f"killed at: {told}; it is in {run.root}")
            raise
        self.runs, self.stops = self.runs + 1, self.stops + run.stops
        shutil.rmtree(run.root)

    def _live(self, run: KilledRun, moments: list[Moment], told: list[str]) -> bool:
        """One life; False if it was not cut short."""
        how = self._chance.random()
        if how < 0.2:
            rank, seconds = self._chance.randrange(run.settings.processes), how / 0.2 * self._seconds
            told.append(f"after {seconds:.3f} s, process {rank}")
            is_cut = run.kill_after(seconds, rank=rank)
            self.kills["at any time"] += is_cut
            return is_cut
        is_stop = self._kind.may_stop and how < 0.25
        stages = [moment for moment in moments if " of " in moment.name]
        moment = self._choose(stages if is_stop else moments)
        nth = self._chance.randint(1, max(1, moment.times // (1 if moments is self._first else 3)))
        told.append(f"{'stop ' if is_stop else ''}{moment.name}, {nth}, process {moment.rank}")
        if is_stop:
            return run.stop_at(moment.name, nth, rank=moment.rank)
        is_cut = run.kill_at(moment.name, nth, rank=moment.rank)
        self.kills["at a moment"] += is_cut
        self._seen |= {moment.name} if is_cut else set()
        return is_cut

    def _settings(self, name: str) -> RlSettings:
        return settings_of(self._setup, self._directory / name, **self._changes)

    def _list_moments(self, rank: int) -> None:
        """Those of a run from its start, and those of one that is resumed."""
        log, settings = self._directory / f"first-{rank}", self._settings(f"listed-{rank}")
        finish(settings, rank=rank, log=log)
        self._first += [Moment(rank, *found) for found in sorted(moments_of(log).items())]
        log, settings = self._directory / f"later-{rank}", self._settings(f"listed-again-{rank}")
        assert KilledRun(settings).kill_at("before step of the optimizer", 3)
        finish(settings, "--resume", rank=rank, log=log)
        self._later += [Moment(rank, *found) for found in sorted(moments_of(log).items())]

    def _choose(self, moments: list[Moment]) -> Moment:
        """Any one, but those first at which nothing was killed yet."""
        fresh = [moment for moment in moments if moment.name not in self._seen]
        return self._chance.choice(fresh or moments)


@pytest.fixture(scope="module")
def seen() -> set[str]:
    """The moments at which some run was killed."""
    return set()


@pytest.mark.faults
@pytest.mark.parametrize("name", KINDS)
def test_killed_at_any_moment(tmp_path: Path, name: str, seen: set[str], capsys: Any) -> None:
    with seeded(f"killed runs, {name}") as chance:
        campaign = Campaign(tmp_path, KINDS[name], chance, seen)
        while campaign.kills.total() < KILLS:
            campaign.kill_a_run()
    with capsys.disabled():
        kinds = ", ".join(f"{count} {how}" for how, count in sorted(campaign.kills.items()))
        print(
            f"\n{name}: {campaign.kills.total()} kills ({kinds}) and {campaign.stops} stops, "
            f"{campaign.runs} runs; {len(seen)} different moments so far"
        )
