"""What may change when a run is resumed, what may not, and when there is nothing left to resume."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.equal_runs import content, differences
from helpers.rl_runs import LETTERS, config_of, settings_of, write_setup, write_tool_setup
from rollbook.cli.main import main
from rollbook.errors import UsageError
from rollbook.rl.settings import load_settings
from rollbook.rl.train import train
from rollbook.tiny import write_tiny_model
from rollbook.train.losses import ImportanceSampling, LossInputs, LossOutput

QUIET: Any = lambda _: None  # noqa: E731


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_setup(tmp_path_factory.mktemp("rl"))


@pytest.fixture(scope="module")
def finished(setup: Path) -> Path:
    """A run of four iterations that is at its end; nothing may change it."""
    train(settings_of(setup, setup / "finished", iterations=4), log=QUIET)
    return setup / "finished"


def of_training(run: Path) -> list[dict[str, Any]]:
    """What each iteration sampled and trained, and the digest of the weights after it."""
    lines = [line for line in content(run)["iterations.jsonl"] if line["split"] == "train"]
    return [{key: value for key, value in line.items() if key != "files"} for line in lines]


def snapshot(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_iterations_saving_evaluations_and_logging_may_change(setup: Path, tmp_path: Path) -> None:
    train(settings_of(setup, tmp_path / "whole", iterations=6), log=QUIET)
    settings = settings_of(setup, tmp_path / "run", iterations=3, save_every=3)
    train(settings, log=QUIET)
    evals = [{**config_of(setup, tmp_path)["evals"][0], "name": "other", "every": 1, "samples": 2}]
    changes = {
        "evals": evals,
        "save_every": 1,
        "save_total_limit": 2,
        "num_groups_to_log": 0,
        "on_alert": "stop",
    }
    more = settings_of(setup, tmp_path / "run", iterations=6, samples_every=1, stall_after_s=60, **changes)
    train(more, resume=True, log=QUIET)
    assert of_training(tmp_path / "run") == of_training(tmp_path / "whole")
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert [row["step"] for row in rows if "test/env/all/reward/total" in row] == [0, 2]
    assert [row["step"] for row in rows if "other/env/all/reward/total" in row] == [3, 4, 5, 6]
    saved = [json.loads(line)["name"] for line in (tmp_path / "run/checkpoints.jsonl").open()]
    assert saved == ["000003", "000004", "000005", "000006"]
    alert = json.loads((tmp_path / "run/alerts.jsonl").read_text().splitlines()[-1])
    assert alert["title"] == "resumed with another config" and "iterations: 3 -> 6" in alert["text"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 4}, r"seed: 3 -> 4"),
        ({"learning_rate": 0.5}, r"learning_rate: 0\.01 -> 0\.5"),
        ({"group_size": 8}, r"group_size: 4 -> 8"),
        ({"loss": {"name": "ppo"}}, r"loss\.name: 'importance_sampling' -> 'ppo'"),
        ({"advantage": "std"}, r"advantage: 'mean' -> 'std'"),
        ({"truncated": "drop"}, r"truncated: 'train' -> 'drop'"),
        ({"sampler": {"max_tokens": 7}}, r"sampler\.max_tokens: 6 -> 7"),
        ({"sampler": {"slots": 3}}, r"sampler\.slots: 16 -> 3"),
        ({"threads": 2}, r"threads: 1 -> 2"),
        ({"processes": 2}, r"processes: 1 -> 2"),
        ({"model": {"lora": {"rank": 2}}}, r"model\.lora: None -> "),
        (
            {"environments": [{"name": "arithmetic"}], "evals": []},
            r"environments\[0\]\.name: 'dataset' -> 'ar",
        ),
        ({"seed": 4, "epochs": 2}, r"seed: 3 -> 4; epochs: 1 -> 2"),
        ({"lr_scheduler_type": "cosine"}, r"lr_scheduler_type: 'constant' -> 'cosine'"),
    ],
)
def test_any_other_difference_is_named(finished: Path, setup: Path, changes: Any, named: str) -> None:
    before = snapshot(finished)
    with pytest.raises(UsageError, match=f"settings changed since it was started: {named}"):
        train(settings_of(setup, finished, iterations=4, **changes), resume=True, log=QUIET)
    assert snapshot(finished) == before


def test_iterations_may_not_change_where_the_rate_follows_from_them(setup: Path, tmp_path: Path) -> None:
    train(settings_of(setup, tmp_path, iterations=1, lr_scheduler_type="linear"), log=QUIET)
    with pytest.raises(UsageError, match=r"iterations: 1 -> 2 \(the rate of each iteration follows from"):
        train(settings_of(setup, tmp_path, iterations=2, lr_scheduler_type="linear"), resume=True, log=QUIET)


def test_a_finished_run_says_that_it_is_complete(
    finished: Path, setup: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(finished)
    said: list[str] = []
    result = train(settings_of(setup, finished, iterations=4), resume=True, log=said.append)
    (text,) = said
    assert text.startswith(f"{finished} is complete: all 4 iterations are done") and "iterations=8" in text
    assert result.checkpoint == finished / "checkpoints/000004" and result.evals.keys() == {"test"}
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["rl", str(finished / "config.json"), "--resume", "--artifacts", str(tmp_path)])
    assert text in capsys.readouterr().out
    assert not list(tmp_path.iterdir()), "nothing was started"
    with pytest.raises(UsageError, match="already holds a run; --resume continues it"):
        train(settings_of(setup, finished, iterations=4), log=QUIET)
    with pytest.raises(UsageError, match="has done 4 iterations; iterations: 3 would take some back"):
        train(settings_of(setup, finished, iterations=3), resume=True, log=QUIET)
    assert snapshot(finished) == before


def test_a_finished_run_is_evaluated_again_where_the_evaluations_changed(setup: Path, tmp_path: Path) -> None:
    train(settings_of(setup, tmp_path, iterations=1), log=QUIET)
    evals = [{**config_of(setup, tmp_path)["evals"][0], "samples": 2}]
    result = train(settings_of(setup, tmp_path, iterations=1, evals=evals), resume=True, log=QUIET)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [0, 1]
    assert (
        rows[-1]["test/env/all/rollouts/ok"] == 12
        and result.evals["test"] == rows[-1]["test/env/all/reward/total"]
    )


def test_the_config_of_a_run_gives_the_same_run_elsewhere(
    setup: Path, finished: Path, tmp_path: Path
) -> None:
    train(load_settings(finished / "config.json", [f"log_path={tmp_path / 'again'}"]), log=QUIET)
    assert differences(tmp_path / "again", finished) == []


def test_the_config_of_a_run_of_adapters_too(setup: Path, tmp_path: Path) -> None:
    """With rates that JSON writes in powers of ten, a loss with settings, and the tokens exported."""
    changes: dict[str, Any] = {
        "model": {"lora": {"rank": 2}},
        "learning_rate": 1e-5,
        "adam_epsilon": 1e-12,
        "loss": {"name": "ppo", "clip_low": 1e-5},
        "trainer": {"experimental": {"token_export": {}}},
    }
    train(settings_of(setup, tmp_path / "first", iterations=2, **changes), log=QUIET)
    train(load_settings(tmp_path / "first/config.json", [f"log_path={tmp_path / 'again'}"]), log=QUIET)
    assert differences(tmp_path / "again", tmp_path / "first") == []


class SometimesInfinite(ImportanceSampling, tag="sometimes_infinite"):
    """Every second micro-batch has a loss that is not finite."""

    calls = 0

    def __call__(self, inputs: LossInputs) -> LossOutput:
        made = super().__call__(inputs)
        type(self).calls += 1
        if type(self).calls % 2:
            return made
        return made._replace(loss_sum=made.loss_sum * torch.inf)


def test_a_run_with_steps_that_were_not_finite_is_resumed(setup: Path, tmp_path: Path) -> None:
    for iterations in (2, 4):
        config = config_of(setup, tmp_path, iterations=iterations)
        train(load_settings(config, loss=SometimesInfinite()), resume=iterations > 2, log=QUIET)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    nonfinite = [row["step"] for row in rows if "optim/loss" in row and row["optim/loss"] is None]
    assert nonfinite in ([0, 2], [1, 3])
    alerts = [json.loads(line) for line in (tmp_path / "alerts.jsonl").open()]
    assert [alert["step"] for alert in alerts if alert["title"] == "a step was not finite"] == nonfinite


def void(_: object) -> None:
    """For a function that is not to return anything."""


def halves(setup: Path, run: Path, *, between: Callable[[], None], **changes: Any) -> list[str]:
    """A run of four iterations in two, with something done in between; returns what the second one says."""
    said: list[str] = []
    train(settings_of(setup, run, iterations=2, **changes), log=QUIET)
    between()
    train(settings_of(setup, run, iterations=4, **changes), resume=True, log=said.append)
    return said


def test_other_tasks_are_refused(setup: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_bytes((setup / "tasks.jsonl").read_bytes())
    environment = {"name": "dataset", "as": "vowels", "tasks": str(tasks), "grader": "contains"}
    with pytest.raises(
        UsageError, match="000002: the tasks of environment 'vowels' changed since it was saved"
    ):
        halves(
            setup,
            tmp_path / "run",
            between=lambda: void(tasks.write_text(tasks.read_text().replace('"0-', '"00-'))),
            environments=[environment],
        )
    assert len(of_training(tmp_path / "run")) == 2


def test_other_code_is_named(setup: Path, tmp_path: Path) -> None:
    changes = write_tool_setup(tmp_path / "tools")
    code = tmp_path / "tools/look.py"
    assert not [
        text
        for text in halves(setup, tmp_path / "same", between=lambda: None, **changes)
        if "changed" in text
    ]
    corrected = code.read_text().replace('raise RuntimeError("broken")', "return Feedback(reward=0.0)")
    said = halves(setup, tmp_path / "run", between=lambda: void(code.write_text(corrected)), **changes)
    named = f"the code of environment 'look' changed since {tmp_path}/run/checkpoints/000002 was saved"
    assert named in said
    alerts = [json.loads(line) for line in (tmp_path / "run/alerts.jsonl").open()]
    assert named in [
        alert["text"] for alert in alerts if alert["title"] == "resumed with another environment"
    ]


def test_adapters_are_not_put_on_another_model(setup: Path, tmp_path: Path) -> None:
    model = shutil.copytree(setup / "model", tmp_path / "model")

    def replace() -> None:
        write_tiny_model(model, LETTERS, hidden=32, heads=2, intermediate=64, positions=64, seed=1)

    changes = {"path": str(model), "lora": {"rank": 2}}
    with pytest.raises(UsageError, match="000002: the model below the adapters changed since it was saved"):
        halves(setup, tmp_path / "run", between=replace, model=changes)


def test_a_model_that_is_handed_over_later_is_none_of_this_run(setup: Path, tmp_path: Path) -> None:
    handoff = tmp_path / "sft.yaml"

    def hand_over(directory: Path) -> None:
        handoff.write_text(f"runtime_info:\n  output:\n    checkpoint_path: {directory}\n")

    hand_over(setup / "model")
    other = write_tiny_model(
        tmp_path / "other", LETTERS, hidden=32, heads=2, intermediate=64, positions=64, seed=1
    )
    changes = {"path": None, "from": str(handoff), "lora": {"rank": 2}}
    halves(setup, tmp_path / "run", between=lambda: hand_over(other), model=changes)
    config = json.loads((tmp_path / "run/config.json").read_text())["model"]
    assert (config["path"], config["from"]) == (str(setup / "model"), str(handoff))
    train(load_settings(tmp_path / "run/config.json", [f"log_path={tmp_path / 'again'}"]), log=QUIET)
    assert of_training(tmp_path / "again") == of_training(tmp_path / "run")
