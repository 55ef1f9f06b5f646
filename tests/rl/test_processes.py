"""Several processes train one run: the first reads the weights, and all end when one of them cannot go on."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.rl_runs import settings_of, write_setup
from helpers.trainer import start_several
from helpers.without_weights import LOSES, VARIABLE
from rollbook.errors import UsageError
from rollbook.records.iterations import IterationRecord
from rollbook.records.record import read_records
from rollbook.rl.settings import RlSettings
from rollbook.rl.train import train

QUIET: Any = lambda _: None  # noqa: E731
BROKEN = """\
from rollbook.envs import single_turn


@single_turn
def broken(task, answer):
    raise ValueError("no grade")
"""
LORA = {"model": {"dtype": "bfloat16", "lora": {"rank": 2}}}


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_setup(tmp_path_factory.mktemp("rl"))


def two(
    settings: RlSettings,
    *words: str,
    without_weights: int = 1,
    own: dict[int, dict[str, str]] | None = None,
) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of two processes, of which one can read no file of weights."""
    environment = {"ROLLBOOK_SETTINGS": msgspec.json.encode(settings).decode()}
    artifacts = Path(settings.log_path).parent / "artifacts"
    words = ("rollbook.rl.main", "--artifacts", str(artifacts), *words)
    own = {without_weights: {VARIABLE: "1"}} if own is None else own
    with ExitStack() as opened:
        trainers = start_several(2, "helpers.without_weights", *words, own=own, **environment)
        for trainer in trainers:
            opened.enter_context(trainer)
        return [trainer.wait() for trainer in trainers], [trainer.output for trainer in trainers]


def digests(run: Path) -> list[str | None]:
    records = read_records(run / "iterations.jsonl", IterationRecord)
    return [record.weights_digest for record in records if record.split == "train"]


@pytest.mark.parametrize(
    "model", [{}, pytest.param(LORA, marks=pytest.mark.faults)], ids=["whole", "adapters"]
)
def test_only_the_first_process_reads_weights_also_on_a_resume(
    setup: Path, tmp_path: Path, model: Any
) -> None:
    common = {"processes": 2, "save_every": 2, "evals": [], **model}
    whole = settings_of(setup, tmp_path / "whole", iterations=4, **common)
    halved = settings_of(setup, tmp_path / "halved", iterations=2, **common)
    for settings, words in (
        (whole, ()),
        (halved, ()),
        (msgspec.structs.replace(halved, iterations=4), ("--resume",)),
    ):
        codes, outputs = two(settings, *words)
        assert codes == [0, 0], outputs
    assert len(set(digests(tmp_path / "whole"))) == 4
    assert digests(tmp_path / "halved") == digests(tmp_path / "whole")


@pytest.mark.parametrize(
    "why",
    [
        "no weights",
        pytest.param("no tasks", marks=pytest.mark.faults),
        pytest.param("no reward", marks=pytest.mark.faults),
    ],
)
def test_what_the_first_process_cannot_open_ends_both_with_one_message(
    setup: Path, tmp_path: Path, why: str
) -> None:
    changes: dict[str, Any] = {"processes": 2}
    if why == "no tasks":
        changes["environments"] = [
            {"name": "dataset", "tasks": str(tmp_path / "none.jsonl"), "grader": "contains"}
        ]
        changes["evals"] = []
    if why == "no reward":
        (tmp_path / "broken.py").write_text(BROKEN)
        changes["environments"] = [
            {"name": f"{tmp_path}/broken.py:broken", "tasks": str(setup / "tasks.jsonl")}
        ]
        changes["evals"] = []
    settings = settings_of(setup, tmp_path / "run", **changes)
    codes, outputs = two(settings, without_weights=0 if why == "no weights" else 1)
    assert codes == [1 if why == "no reward" else 2, 0], outputs
    assert outputs[0].count("rollbook: ") == 1 and "Traceback" not in outputs[0]
    assert outputs[1] == ""


def test_a_process_that_computes_something_else_is_refused(setup: Path, tmp_path: Path) -> None:
    """Its gradients would be added to those of the others."""
    codes, outputs = two(settings_of(setup, tmp_path / "run", processes=2), own={1: {LOSES: "1"}})
    assert codes == [0, 1] and "rollbook:" not in outputs[0]
    assert outputs[1].startswith(
        "rollbook: process 1 computes other log-probabilities than the one that read"
    )


@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 1)])
def test_another_number_of_processes_is_refused(setup: Path, tmp_path: Path, before: int, now: int) -> None:
    first = settings_of(setup, tmp_path / "run", processes=before, iterations=1, save_every=1, evals=[])
    if before == 1:
        train(first, log=QUIET)
    else:
        assert two(first)[0] == [0, 0]
    other = msgspec.structs.replace(first, processes=now, iterations=2)
    named = f"settings changed since it was started: processes: {before} -> {now}. Undo the change"
    if now == 1:
        with pytest.raises(UsageError, match=named):
            train(other, resume=True, log=QUIET)
    else:
        codes, outputs = two(other, "--resume")
        assert codes == [2, 0] and named in outputs[0] and outputs[1] == ""
    assert len(digests(tmp_path / "run")) == 1
