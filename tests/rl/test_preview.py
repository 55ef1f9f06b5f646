"""`--dry-run` looks at sixteen groups, changes nothing, and says what an iteration is like and costs."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest

from helpers.rl_runs import config_of, write_setup
from rollbook.cli.main import main
from rollbook.rl import preview as previews
from rollbook.rl.preview import Preview, preview
from rollbook.rl.settings import load_settings
from rollbook.tiny import write_tiny_model
from rollbook.train import memory

ENVIRONMENTS = """\
from rollbook.envs import single_turn


@single_turn
def never(task, answer):
    return 0.0


@single_turn
def broken(task, answer):
    raise ValueError("no \\x1b[31mgrade")
"""


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_setup(tmp_path_factory.mktemp("preview"))
    (directory / "envs.py").write_text(ENVIRONMENTS)
    return directory


def config(setup: Path, *names: str, **changes: Any) -> dict[str, Any]:
    tasks = str(setup / "tasks.jsonl")
    entries = [{"name": f"{setup / 'envs.py'}:{name}", "tasks": tasks} for name in names]
    given = config_of(setup, setup / "run", evals=[], **changes)
    return given | {"environments": [*given["environments"], *entries]}


def look(given: dict[str, Any]) -> Preview:
    return preview(load_settings(given), lambda _: None)


def test_sixteen_groups_are_looked_at_whatever_an_iteration_has(setup: Path) -> None:
    found = look(config(setup))
    (environment,) = found.environments
    assert (found.groups, environment.groups, environment.name) == (16, 16, "vowels")
    assert 0 < found.mixed <= 1 and found.reward == environment.reward and found.failed == 0
    assert environment.prompt.startswith("<|user|>") and environment.prompt.endswith("<|assistant|>")
    assert len(environment.group) == 4
    assert [rollout.replies[0]["role"] for rollout in environment.group] == ["assistant"] * 4
    assert found.seconds_sample > 0 and found.seconds_train > 0
    assert not (setup / "run").exists()


def test_the_prompt_is_the_one_that_the_environment_shows(setup: Path) -> None:
    """Which opens with tools that are in no task."""
    given = config_of(setup, setup / "run", evals=[])
    given["model"]["path"] = str(setup / "wide")
    write_tiny_model(setup / "wide", string.printable, hidden=32, heads=2, intermediate=64, positions=512)
    (found,) = look(given | {"environments": [{"name": "calculator", "digits": 1}]}).environments
    assert found.prompt.startswith("<|system|>calculator<|im_end|><|user|>Use the calculator")
    assert found.prompt_tokens > len("Use the calculator")


def test_an_environment_whose_groups_teach_nothing_is_named(setup: Path) -> None:
    found = look(config(setup, "never"))
    shares = {environment.name: environment.mixed for environment in found.environments}
    assert shares["never"] == 0 and shares["vowels"] > 0.2
    (advice,) = [text for text in found.advice if "different rewards" in text]
    assert (
        advice.startswith("never: only 0% of the groups have different rewards") and "easier tasks" in advice
    )


def test_rollouts_that_fail_are_told_with_their_reason(
    setup: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = config(setup, "broken")
    given["environments"] = given["environments"][1:]
    (setup / "broken.yaml").write_text(json.dumps(given))
    with pytest.raises(SystemExit) as ended:
        main(["rl", str(setup / "broken.yaml"), "--dry-run"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "16 groups: mean reward unknown, 0% with different rewards" in shown
    assert "note: 64 of 64 rollouts failed: environment: broken.step: ValueError: no " in shown
    assert "\x1b" not in shown


def test_memory_is_worked_out_and_compared_with_what_is_free(
    setup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = look(config(setup)).memory
    needs = memory.needs_of(load_settings(config(setup)).model)
    assert needs is not None and (found.weights, found.optimizer) == needs
    assert found.cache > 0 and found.free is not None
    monkeypatch.setattr(previews, "free_bytes", lambda _: found.weights)
    (advice,) = [text for text in look(config(setup)).advice if "were free" in text]
    assert "micro_batch_tokens" in advice
