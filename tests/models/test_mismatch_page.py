"""`docs/mismatch.md`: its config and its commands, taken from the page and run on the real model.

The numbers differ from machine to machine; what the page concludes from them must hold.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import rollbook
from helpers.places import REPOSITORY
from models.setup_smollm2 import MODEL, is_ready
from rollbook.records.token_places import token_source
from rollbook.tokens.report import TokenReport, token_report

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not is_ready(), reason="no SmolLM2 here; type: make test-model"),
]
PAGE = REPOSITORY / "docs" / "mismatch.md"
_AT = re.compile(r"--at \S+ --optim-step \d+")
_FENCE = re.compile(r"^```(yaml|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Command(NamedTuple):
    typed: str
    printed: list[str]  # as the page has it


def commands(block: str) -> list[Command]:
    """What stands behind a `$`, until its quotes are closed, and what stands below it."""
    found: list[Command] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append(Command(line[2:], []))
        elif is_open(found[-1].typed):
            found[-1] = Command(f"{found[-1].typed}\n{line}", [])
        else:
            found[-1].printed.append(line)
    return found


def is_open(typed: str) -> bool:
    try:
        shlex.split(typed)
    except ValueError:
        return True
    return False


def plain(line: str) -> str:
    return " ".join(line.split())


def largest(run: Path) -> str:
    """The place that the page takes from the first line of a table, which on another machine is another."""
    first = report(run).top[0]
    place = f"{first.iteration}/{first.group_idx}/{first.traj_idx}:{first.token_idx}"
    return f"--at {place} --optim-step {first.optim_step}"


def report(run: Path, **options: Any) -> TokenReport:
    return token_report(token_source(run), **options)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every command of the page has run, in its order."""
    place = tmp_path_factory.mktemp("mismatch")
    (place / MODEL.name).symlink_to(MODEL)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "2"}
    for language, block in _FENCE.findall(PAGE.read_text()):
        if language == "yaml":
            (place / "sums.yaml").write_text(block)
            continue
        for command in commands(block):
            typed = _AT.sub(lambda _: largest(place / "runs/sums"), command.typed)
            done = subprocess.run(
                ["bash", "-c", typed],
                cwd=place,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            print(f"$ {typed}\n{done.stdout}")
            assert done.returncode == 0, typed
            shown = {plain(line) for line in done.stdout.splitlines()}
            for line in command.printed:  # those without a number, such as the titles of tables
                assert re.search(r"\d|^\.\.\.$", line) or plain(line) in shown, line
    return place


def value(query: str, run: Path) -> Any:
    (row,) = rollbook.query(query, run).fetchall()
    return row[0]


def test_in_float32_there_is_no_mismatch_before_a_step(directory: Path) -> None:
    exact, rounded = (report(directory / "runs" / name).first_step for name in ("float32", "sums"))
    assert exact is not None and exact.mismatch_kl is not None and exact.mismatch_kl < 1e-8
    assert (exact.masked, exact.outside_share) == (0, 0.0)
    assert rounded is not None and rounded.mismatch_kl is not None
    assert 1e4 * exact.mismatch_kl < rounded.mismatch_kl < 0.05


def test_the_mismatch_is_of_tokens_that_the_model_is_unsure_of(directory: Path) -> None:
    mean = "select avg(mismatch_kl) from tokens where loss_mask and optim_step = 0 and inference_logprob"
    sure, unsure = (value(f"{mean} {bound}", directory / "runs/sums") for bound in ("> -0.01", "< -2.3"))
    assert sure < unsure / 100


def test_masks_are_the_rule_of_the_loss(directory: Path) -> None:
    for name in ("sums", "float32"):
        run = directory / "runs" / name
        rule = "(advantage > 0 and importance_ratio > 1.28) or (advantage < 0 and importance_ratio < 0.8)"
        broken = f"select count(*) from tokens where loss_mask and is_masked is distinct from ({rule})"
        assert value(broken, run) == 0
        (same,) = report(run, what_if=["clip_high=0.28"]).what_if
        assert (same.more, same.fewer) == (0, 0) and same.was_masked and same.masked == same.was_masked


def test_every_trained_token_is_exported_once_per_pass_and_joins_its_rollout(directory: Path) -> None:
    run = directory / "runs" / "sums"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = sum(row["tokens/trained"] for row in rows)
    join = "tokens t join rollouts r using (run, split, iteration, group_idx, traj_idx)"
    for steps in ("t.optim_step < 2", "t.optim_step >= 2"):  # two minibatches are a pass
        assert value(f"select count(*) from {join} where t.loss_mask and {steps}", run) == trained
    other = f"select count(*) from {join} where t.loss_mask and t.reward is distinct from r.reward"
    assert value(other, run) == 0
