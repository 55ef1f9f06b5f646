"""The traps that only a whole run can fall into, by the number under which tests/test_traps.py lists them."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import rollbook
from env_helpers import grade, question
from helpers.equal_runs import differences
from helpers.rl_runs import LETTERS, settings_of, start, write_setup
from helpers.trainer import run_several
from rollbook.envs import Environment, Feedback, Task
from rollbook.errors import RollbookError, UsageError
from rollbook.records.iterations import Fate, IterationRecord
from rollbook.records.rollouts import RolloutSummary, Status
from rollbook.rl.settings import RlSettings, load_settings
from rollbook.rl.train import AlertError, train
from rollbook.runs.rollout_files import RolloutFiles
from rollbook.samplers.engine import Engine
from rollbook.samplers.thread import SamplerError
from rollbook.tiny import write_tiny_model
from tiny_model import LLAMA


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_setup(tmp_path_factory.mktemp("rl"))


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(10)  # what was told to end may need a moment
    assert set(threading.enumerate()) <= before


def quiet(_: str) -> None:
    return None


def iterations(run: Path, split: str = "train") -> list[IterationRecord]:
    return [record for record in rollbook.open_run(run).finished_iterations() if record.split == split]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def rollouts(run: Path, iteration: int = 0) -> list[RolloutSummary]:
    return list(rollbook.open_run(run).rollouts(iteration, "train"))


@pytest.mark.parametrize("setting", [{"top_p": 0.9}, {"top_k": 20}, {"temperature": 0}])
def test_t03_what_cuts_the_distribution_is_refused(setup: Path, tmp_path: Path, setting: Any) -> None:
    with pytest.raises(UsageError, match=next(iter(setting))):
        settings_of(setup, tmp_path / "run", sampler=setting)


def test_t04_a_generation_config_changes_no_sample(setup: Path, tmp_path: Path) -> None:
    """What a model's directory says of top-p, temperature and penalties is for those who ask `generate`."""
    other = tmp_path / "model"
    shutil.copytree(setup / "model", other)
    stored = json.loads((other / "generation_config.json").read_text())
    tastes = {"do_sample": True, "top_p": 0.2, "top_k": 3, "temperature": 0.1, "repetition_penalty": 5.0}
    (other / "generation_config.json").write_text(json.dumps(stored | tastes))
    for name, path in (("plain", setup / "model"), ("tasteful", other)):
        train(settings_of(setup, tmp_path / name, model={"path": str(path)}, iterations=2), log=quiet)
    one, two = (iterations(tmp_path / name)[-1].weights_digest for name in ("plain", "tasteful"))
    assert one == two


def test_t09_two_processes_take_the_steps_of_one(setup: Path, tmp_path: Path) -> None:
    """The same rollouts in the first iteration, for one process or for two: the same losses and gradients."""

    def steps(name: str, processes: int) -> list[tuple[float | None, float | None, int | None]]:
        settings = settings_of(
            setup, tmp_path / name, processes=processes, iterations=1, minibatches=2, loss={"name": "ppo"}
        )
        if processes == 1:
            train(settings, log=quiet)
        else:
            environment = {"ROLLBOOK_SETTINGS": msgspec.json.encode(settings).decode()}
            run_several(processes, "rollbook.rl.main", "--artifacts", tmp_path / "artifacts", **environment)
        (record,) = iterations(tmp_path / name)
        return [(step.loss, step.grad_norm, step.trained_tokens) for step in record.steps or ()]

    alone, together = steps("one", 1), steps("two", 2)
    assert len(alone) == 2
    for one, two in zip(alone, together, strict=True):
        assert two == pytest.approx(one, rel=1e-4, abs=1e-6)
    values = [metrics(tmp_path / name)[0] for name in ("one", "two")]
    compared = [key for key in values[0] if key.startswith(("loss/", "kl_", "entropy", "optim/", "logprob_"))]
    assert len(compared) > 12
    assert {key: values[1][key] for key in compared} == pytest.approx(
        {key: values[0][key] for key in compared}, rel=1e-4, abs=1e-6
    )


def test_t15_equal_prompts_of_two_tasks_are_two_groups(setup: Path, tmp_path: Path) -> None:
    """One wants an `a`, the other anything: a reply is compared with those of its own task alone."""
    rows = [
        {"id": "anything", "prompt": "word", "expected_answer": list("abcdefghijklmnopqrstuvwxyz")},
        {"id": "vowels", "prompt": "word", "expected_answer": list("aeiou")},
    ]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {"name": "dataset", "tasks": str(tasks), "grader": "contains"}
    train(
        settings_of(setup, tmp_path / "run", environments=[environment], evals=[], iterations=1,
                    groups_per_batch=2, group_size=6), log=quiet,
    )  # fmt: skip
    by_group: dict[int, set[str | None]] = {}
    for rollout in rollouts(tmp_path / "run"):
        by_group.setdefault(rollout.group_idx, set()).add(rollout.task_id)
    assert sorted(by_group.values(), key=str) == [{"anything"}, {"vowels"}]
    rewards = {(one.group_idx, one.traj_idx): one.total_reward or 0.0 for one in rollouts(tmp_path / "run")}
    (record,) = iterations(tmp_path / "run")
    for fate in record.rollouts or ():
        own = [reward for (group, _), reward in rewards.items() if group == fate.group_idx]
        mean = sum(own) / len(own)
        assert fate.advantage == pytest.approx(rewards[fate.group_idx, fate.traj_idx] - mean)


def test_t17_every_iteration_samples_with_the_weights_of_the_last_step(setup: Path, tmp_path: Path) -> None:
    """The weights change each time, and the trainer finds the logprobs that the sampler had."""
    train(settings_of(setup, tmp_path / "run", minibatches=2, epochs=2), log=quiet)
    digests = [record.weights_digest for record in iterations(tmp_path / "run")]
    assert len(set(digests)) == len(digests) == 6
    for row in metrics(tmp_path / "run")[:-1]:
        assert row["kl_sample_train_v3"] < 1e-9 and row["logprob_diff_max"] < 1e-4
        assert abs(row["loss/ess"] - 1) < 1e-4 < abs(row["loss/ratio"] - 1)  # of the first step, of all steps


def test_t26_every_rollout_of_an_iteration_has_a_seed_of_its_own(setup: Path, tmp_path: Path) -> None:
    train(settings_of(setup, tmp_path / "run", iterations=3), log=quiet)
    run = rollbook.open_run(tmp_path / "run")
    told = [told for i in range(3) for told in run.transcripts(i, "train")]
    seeds = [turn.seed for one in told for turn in one.to_turns()]
    assert None not in seeds and len(set(seeds)) == len(seeds) == 48
    of_evals = [
        [turn.seed for one in run.transcripts(i, "eval/test") for turn in one.to_turns()] for i in (0, 2)
    ]
    assert of_evals[0] == of_evals[1] and set(of_evals[0]).isdisjoint(seeds)


def test_t31_a_rate_of_zero_changes_nothing(setup: Path, tmp_path: Path) -> None:
    """Not the weights, nor what is sampled with the same seeds."""
    settings = settings_of(setup, tmp_path / "run", learning_rate=0, weight_decay=0.1, iterations=5)
    evals = [msgspec.structs.replace(settings.evals[0], every=1, temperature=1.0)]
    train(msgspec.structs.replace(settings, evals=evals), log=quiet)
    assert len({record.weights_digest for record in iterations(tmp_path / "run")}) == 1
    run = rollbook.open_run(tmp_path / "run")
    said = [[told.messages for told in run.transcripts(i, "eval/test")] for i in range(6)]
    assert said == said[:1] * 6
    assert all(row["kl_sample_train_v3"] < 1e-9 for row in metrics(tmp_path / "run")[:-1])


VERDICTS = {
    "-5": [("x = -5", 1), ("5", 0), ("\N{MINUS SIGN}5", 1), ("- 5", 0), ("a loss of -$5", 1), ("-5.0", 1),
           ("10-5", 0), ("(-5)", 1), ("\\boxed{-5}", 1), ("-50", 0), ("minus 5", 0)],
    "3/4": [("3/4", 1), ("0.75", 1), ("it is 6/8.", 1), ("-3/4", 0), ("75%", 0), ("3 / 4", 0),
            ("\\boxed{3/4}", 1)],
    "1234.5": [("1,234.5", 1), ("$1,234.50", 1), ("1234.5 m", 1), ("1.234,5", 0), ("1234", 0),
               ("12345e-1", 1), ("1,234.5 km in all", 1)],
    "0": [("0", 1), ("-0", 1), ("0.0", 1), ("none", 0), ("", 0), ("0 or 1", 0), ("1 - 1 = 0", 1)],
    "50": [("50%", 1), ("50 apples", 1), ("5e1", 1), ("500", 0), ("0.5", 0), ("50/1", 1), ("50, not 49", 0),
           ("fifty", 0)],
}  # fmt: skip


@pytest.mark.parametrize("expected", VERDICTS)
def test_t32_signs_separators_fractions_and_units_are_read(expected: str) -> None:
    assert sum(map(len, VERDICTS.values())) == 40
    found = [
        (answer, int(grade({"grader": "number"}, answer, question(expected)).reward))
        for answer, _ in VERDICTS[expected]
    ]
    assert found == VERDICTS[expected]


class Fragile(Environment):
    """Breaks in the way that is told, in one rollout of each group."""

    def __init__(self, how: str) -> None:
        self._how, self._broken = how, False

    def start(self, task: Task) -> Any:
        self._broken = task.repeat == 1
        if self._broken and self._how == "start":
            raise KeyError("no such thing")
        return super().start(task)

    async def step(self, message: dict[str, Any]) -> Feedback:
        if self._broken and self._how == "step":
            raise ValueError("cannot be graded")
        reward = float(len(message["content"]) % 2)
        return Feedback(reward=float("nan") if self._broken and self._how == "reward" else reward)

    def close(self) -> None:
        if self._how == "close":
            raise OSError("does not close")

    @classmethod
    def tasks(cls, count: int, seed: int = 0, **settings: Any) -> Any:
        return ({"id": f"task-{number}", "prompt": "ab"[: 1 + number % 2]} for number in range(count))


def fragile(setup: Path, run: Path, how: str, **changes: Any) -> RlSettings:
    environment = {"name": Fragile, "how": how, "tasks": 8}
    return settings_of(
        setup, run, **({"environments": [environment], "evals": [], "iterations": 2} | changes)
    )


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("start", r"environment: Fragile\.start: KeyError: 'no such thing' \(.*test_run_traps\.py:\d+\)"),
        ("step", r"environment: Fragile\.step: ValueError: cannot be graded \(.*test_run_traps\.py:\d+\)"),
        ("reward", r"environment: Fragile\.step gave the reward nan, which is not a finite number"),
    ],
)
def test_t34_a_broken_environment_is_recorded_with_its_place(
    setup: Path, tmp_path: Path, how: str, why: str
) -> None:
    """T25, too: such a rollout has no reward, and its group goes on without it."""
    train(fragile(setup, tmp_path / "run", how), log=quiet)
    for i in range(2):
        for rollout in rollouts(tmp_path / "run", i):
            is_broken = rollout.traj_idx == 1
            assert (rollout.status is Status.ERROR) == is_broken == (rollout.total_reward is None)
            assert not is_broken or re.search(why, rollout.error or ""), rollout.error
    for record, row in zip(iterations(tmp_path / "run"), metrics(tmp_path / "run"), strict=True):
        assert (row["env/all/rollouts/ok"], row["env/all/rollouts/failed"]) == (12, 4)
        for fate in record.rollouts or ():
            assert (fate.fate is Fate.FAILED) == (fate.traj_idx == 1)


def test_t34_an_environment_that_does_not_close_costs_no_rollout(setup: Path, tmp_path: Path) -> None:
    train(fragile(setup, tmp_path / "run", "close"), log=quiet)
    assert [row["env/all/rollouts/failed"] for row in metrics(tmp_path / "run")] == [0, 0]


def test_t34_an_error_in_the_sampling_thread_ends_the_run(
    setup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    step = Engine.step

    def broken(engine: Engine) -> Any:
        steps.append(1)
        if len(steps) == 60:
            raise MemoryError("no memory left")
        return step(engine)

    monkeypatch.setattr(Engine, "step", broken)
    with pytest.raises(SamplerError, match="MemoryError: no memory left"):
        train(settings_of(setup, tmp_path / "run"), log=quiet)
    monkeypatch.undo()
    resumed(setup, tmp_path)


def test_t34_a_writer_that_fails_ends_the_run(
    setup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[int] = []
    append = RolloutFiles.append

    def full(files: RolloutFiles, *line: Any) -> None:
        lines.append(1)
        if len(lines) == 70:
            raise RollbookError("cannot write transcripts: no space left on device")
        append(files, *line)

    monkeypatch.setattr(RolloutFiles, "append", full)
    with pytest.raises(RollbookError, match="no space left"):
        train(settings_of(setup, tmp_path / "run"), log=quiet)
    monkeypatch.undo()
    resumed(setup, tmp_path)


def resumed(setup: Path, directory: Path) -> None:
    """The run that broke goes on to the files of one that did not."""
    train(settings_of(setup, directory / "run"), resume=True, log=quiet)
    train(settings_of(setup, directory / "whole"), log=quiet)
    assert differences(directory / "run", directory / "whole") == []


class Hangs(Fragile):
    async def step(self, message: dict[str, Any]) -> Feedback:
        if self._broken:
            await asyncio.sleep(3600)
        return Feedback(reward=1.0)


@pytest.mark.parametrize(
    ("limit", "what"),
    [("episode_timeout_s", "the episode, now in Hangs.step,"), ("call_timeout_s", "Hangs.step")],
)
def test_t25_and_t34_rollouts_that_hang_are_named_and_then_failures(
    setup: Path, tmp_path: Path, limit: str, what: str
) -> None:
    """A timeout is neither a reward of zero nor a reply that was cut."""
    settings = fragile(
        setup, tmp_path / "run", "", environments=[{"name": Hangs, "how": "", "tasks": 8}], iterations=1,
        stall_after_s=0.3, retry={"timeout": 1}, groups_per_batch=2, **{limit: 1.5},
    )  # fmt: skip
    said: list[str] = []
    train(settings, log=said.append)
    run = tmp_path / "run"
    hung = [rollout for rollout in rollouts(run) if rollout.traj_idx == 1]
    for rollout in hung:
        assert (rollout.status, rollout.total_reward) == (Status.ERROR, None)
        assert rollout.error == f"timeout: {what} took longer than 1.5 s"
    (record,) = iterations(run)
    assert (record.timeouts, record.retries) == (2, 0) and not record.steps
    (row,) = metrics(run)
    assert row["env/all/rollouts/failed"] == len(hung) == 2 and row["groups/trained"] == 0
    assert row["env/all/reward/total"] == 1.0 and row["env/all/rollouts/ok"] == 6
    stalls = [json.loads(line) for line in (run / "stalls.jsonl").read_text().splitlines()]
    assert len(stalls[0]["waiting"]) == 2
    assert stalls[0]["waiting"][0]["name"].startswith("group ")
    stall = "STALL in iteration 0: 2 rollouts are open; the oldest"
    assert any(line.startswith(stall) for line in said)


def test_t29_a_model_with_experts_is_refused_before_anything_is_written(setup: Path, tmp_path: Path) -> None:
    """Which experts a token goes to in sampling is not known to the trainer."""
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {**LLAMA, **size, "model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4}
    model = {"path": None, "config": config, "tokenizer": str(setup / "model")}
    with start(settings_of(setup, tmp_path / "run", model=model)) as trainer:
        assert trainer.wait() == 1
        last = trainer.output.splitlines()[-1]
    assert last.startswith(
        "rollbook: what a mixtral model samples for a request depends on the requests that"
    )
    assert "so a run could not be repeated or resumed bit for bit. Choose a dense model" in last
    assert not (tmp_path / "run").exists()


def test_t35_evaluations_change_nothing_of_the_training(setup: Path, tmp_path: Path) -> None:
    """But that their tasks are held out, which here are none of those that are trained on."""
    words = [json.loads(line)["id"].split("-")[1] for line in (setup / "held-out.jsonl").open()]
    tasks = tmp_path / "tasks.jsonl"
    kept = [line for line in (setup / "tasks.jsonl").open() if not any(word in line for word in words)]
    tasks.write_text("".join(kept))
    environment = {"name": "dataset", "as": "vowels", "tasks": str(tasks), "grader": "contains"}
    changes: dict[str, Any] = {"environments": [environment], "iterations": 4}
    train(settings_of(setup, tmp_path / "with", **changes), log=quiet)
    train(settings_of(setup, tmp_path / "without", evals=[], **changes), log=quiet)
    found = [line for line in differences(tmp_path / "with", tmp_path / "without") if "eval_" not in line]
    of_evaluations = {"config.json", "metrics.jsonl", "iterations.jsonl", "checkpoints.jsonl"}
    assert {line.partition(":")[0] for line in found} == of_evaluations
    rows = [metrics(tmp_path / name)[:4] for name in ("with", "without")]
    for one, two in zip(*rows, strict=True):
        may_differ = ("time/", "tokens_per_second", "logged_at")
        assert {key: one[key] for key in two if not key.startswith(may_differ)}.items() <= two.items()


def test_an_evaluation_may_reply_at_greater_length_than_training(setup: Path, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", LETTERS, hidden=32, heads=2, intermediate=64, positions=256)
    held_out = str(setup / "held-out.jsonl")
    evals = [{"name": "test", "environment": "vowels", "tasks": held_out, "max_tokens": 100}]
    train(
        settings_of(setup, tmp_path / "run", model={"path": str(model)}, evals=evals, iterations=1), log=quiet
    )
    run = rollbook.open_run(tmp_path / "run")
    turns = [turn for told in run.transcripts(0, "eval/test") for turn in told.to_turns()]
    assert max(len(turn.token_ids or ()) for turn in turns) == 100


def test_a_vocabulary_padded_beyond_the_tokenizer_is_no_reason_for_an_alert(
    setup: Path, tmp_path: Path
) -> None:
    """Random weights spread over all of it: an entropy above the logarithm of the tokenizer's size."""
    config = {**LLAMA, "vocab_size": 200, "hidden_size": 32, "num_attention_heads": 2}
    model = {"path": None, "config": config, "tokenizer": str(setup / "model")}
    train(settings_of(setup, tmp_path / "run", model=model, iterations=1), log=quiet)
    assert metrics(tmp_path / "run")[0]["entropy"] > 5.2
    texts = [alert.text for alert in rollbook.open_run(tmp_path / "run").alerts()]
    assert not any("entropy" in text for text in texts)


def test_an_alert_stops_a_run_that_says_so(setup: Path, tmp_path: Path) -> None:
    """The checkpoint is saved; resumed, the run does not stop for the same alert again."""
    settings = settings_of(setup, tmp_path / "run", on_alert="stop", save_every=4)
    with pytest.raises(AlertError, match=r"after iteration 0 \(alert: many replies are cut off\)"):
        train(settings, log=quiet)
    alerts = list(rollbook.open_run(tmp_path / "run").alerts())
    assert "many replies are cut off" in {alert.title for alert in alerts}
    assert (tmp_path / "run/checkpoints/000001").is_dir()
    assert train(settings, resume=True, log=quiet).iterations == 6
    assert list(rollbook.open_run(tmp_path / "run").alerts()) == alerts


def test_the_settings_of_a_run_are_settings_again(setup: Path, tmp_path: Path) -> None:
    settings = fragile(setup, tmp_path / "run", "")
    train(settings, log=quiet)
    again = load_settings(tmp_path / "run/config.json")
    assert again.environments == settings.environments
