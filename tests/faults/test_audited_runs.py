"""Fifty kills anywhere, an audit after each, and the books of the resumed run balance to the last token."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest

import rollbook
from faults.harness import seeded
from helpers.rl_runs import finish, settings_of, start, write_setup
from helpers.tampered import balanced, copy_of, cut_line, double_line, drop_line, found
from rollbook.audit.result import Kind
from rollbook.rl.settings import RlSettings

pytestmark = pytest.mark.faults
KILLS, ITERATIONS = 50, 2 * 50 + 10
SUMMARIES = "train_iteration_000007_rollout_summaries.jsonl"


def asked(setup: Path, name: str, kind: str, iterations: int = ITERATIONS) -> RlSettings:
    export = {"experimental": {"token_export": {"format": kind}}}
    return settings_of(
        setup, setup / name, iterations=iterations, minibatches=2, learning_rate=1e-5, trainer=export
    )


def moments_between_checkpoints(setup: Path, kind: str) -> Counter[str]:
    """Everything that happens from one checkpoint to the next, and how often: no session ends before it."""
    finish(asked(setup, "short", kind, 6), log=setup / "moments")
    moments = (setup / "moments").read_text().splitlines()
    saved = [place for place, moment in enumerate(moments) if moment == "after write checkpoints.jsonl"]
    return Counter(moments[saved[0] + 1 : saved[1] + 1])


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_run_that_was_killed_fifty_times_balances(tmp_path: Path, kind: str) -> None:
    setup = write_setup(tmp_path / "rl")
    moments = moments_between_checkpoints(setup, kind)
    settings = asked(setup, "run", kind)
    run = setup / "run"
    with seeded("kills of an audited run") as chance:
        for number in range(KILLS):
            moment = chance.choice(sorted(moments))
            nth = chance.randint(1, moments[moment])
            words = ["--resume"] if number else []
            with start(settings, *words, kill_at=moment, nth=nth) as trainer:
                assert trainer.wait() == -signal.SIGKILL, f"{moment}, {nth}: {trainer.output}"
            audit = rollbook.audit(run)
            wrong = [finding for finding in audit.findings if finding.kind is not Kind.MISSING]
            assert not wrong, f"killed {moment}, {nth}: {wrong}"
    finish(settings, "--resume")
    audit = balanced(run)
    sampled = sum(p.rollouts for p in audit.places if p.split == "train" and p.name != "superseded")
    assert (audit.done, sampled) == (ITERATIONS, ITERATIONS * 4 * 4)
    for number, (change, kind_of_finding, where) in enumerate(
        (
            (lambda path: drop_line(path, 5), Kind.MISSING, {"key": "train/7/1/0"}),
            (lambda path: double_line(path, 5), Kind.DOUBLED, {"line": 6}),
            (lambda path: cut_line(path, 5), Kind.UNREADABLE, {"line": 5}),
        )
    ):
        other = copy_of(run, tmp_path / f"wrong-{number}")
        change(other / SUMMARIES)
        found(rollbook.audit(other), kind_of_finding, SUMMARIES, **where)
    (first,) = sorted((run / "token_exports").glob("rank_0*"))[:1]
    first.unlink()
    found(rollbook.audit(run), Kind.MISSING, f"token_exports/{first.name}")
