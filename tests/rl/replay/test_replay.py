"""Steps of real runs, taken again: equal to the bit; what was altered is named, with its stage and place."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import rollbook
from helpers.rl_runs import config_of, settings_of, write_setup, write_tool_setup
from helpers.trainer import run_several
from rollbook.errors import BadFileError, RollbookError, UsageError
from rollbook.records.iterations import Fate
from rollbook.rl.replay.findings import Difference, Stage, Verdict
from rollbook.rl.replay.replay import Replay, replay
from rollbook.rl.replay.what_if import what_if
from rollbook.rl.train import train
from rollbook.tiny import CHAT_TEMPLATE
from rollbook.train.losses import ImportanceSampling
from rollbook.train.machine import describe_machine

EXPORT = {"experimental": {"token_export": {}}}
PARQUET = {"experimental": {"token_export": {"format": "parquet"}}}
BANDED = {"name": "ppo", "clip_low": 0.0001, "clip_high": 0.0001}
OF_TOKENS = {Stage.LOGPROBS, Stage.RATIOS, Stage.MASKS}
Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_setup(tmp_path_factory.mktemp("rl"))


@pytest.fixture(scope="module")
def run(setup: Path) -> Path:
    """Six iterations with checkpoints after every second; exported."""
    return made(setup, setup / "run", trainer=EXPORT)


def made(setup: Path, log_path: Path, **changes: Any) -> Path:
    train(settings_of(setup, log_path, **({"evals": []} | changes)), log=lambda _: None)
    return log_path


def altered(run: Path, target: Path, name: str, change: Callable[[Lines], Any]) -> Path:
    """A copy of a run with changed lines in one file."""
    if not target.exists():
        shutil.copytree(run, target)
    path = target / name
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return target


def without_export(run: Path, target: Path) -> Path:
    shutil.copytree(run, target)
    shutil.rmtree(target / "token_exports")
    return target


def transcripts(i: int) -> str:
    return f"train_iteration_{i:06d}_transcripts.jsonl"


def first(result: Replay) -> Difference:
    assert result.verdict is Verdict.DIFFERS and result.first is not None
    return result.first


def trained(run: Path, i: int) -> list[tuple[int, int]]:
    (record,) = [one for one in rollbook.open_run(run).finished_iterations() if one.iteration == i]
    return [(fate.group_idx, fate.traj_idx) for fate in record.rollouts or () if fate.fate is Fate.TRAINED]


KINDS: dict[str, dict[str, Any]] = {
    "adapters": {"model": {"lora": {"rank": 2}}, "trainer": EXPORT},
    "minibatches and epochs": {"minibatches": 2, "epochs": 2, "loss": BANDED, "trainer": EXPORT},
    "masked": {"truncated": "mask"},
    "dropped": {"truncated": "drop", "advantage": "std"},
    "oversampled": {"oversample": 2.0, "advantage": "leave_one_out", "minibatches": 3},
    "half precision": {"model": {"dtype": "bfloat16"}, "trainer": PARQUET},
    "schedule": {"lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.1,
                 "micro_batch_tokens": 40},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_iteration_is_equal_to_the_bit(setup: Path, tmp_path: Path, kind: str) -> None:
    all_is_equal(made(setup, tmp_path / "run", **KINDS[kind]), has_tokens="trainer" in KINDS[kind])


def all_is_equal(run: Path, *, has_tokens: bool) -> None:
    result = rollbook.replay(run)
    assert (result.verdict, result.first) == (Verdict.EQUAL, None)
    records = [one for one in rollbook.open_run(run).finished_iterations() if one.split == "train"]
    assert [one.iteration for one in result.iterations] == [record.iteration for record in records]
    compared: dict[Stage, int] = dict.fromkeys(Stage, 0)
    for one, record in zip(result.iterations, records, strict=True):
        assert one.promise.bits
        assert one.weights_digest == record.weights_digest
        assert one.loss == [step.loss for step in record.steps or ()]
        for stage in one.stages:
            compared[stage.stage] += stage.compared
            assert stage.verdict is Verdict.EQUAL or stage.compared == 0
    silent = set() if has_tokens else OF_TOKENS
    assert {stage for stage, count in compared.items() if not count} == silent


def test_so_are_those_of_a_run_with_its_tokens_exported(run: Path) -> None:
    all_is_equal(run, has_tokens=True)


def test_so_are_episodes_of_several_turns_with_tools(setup: Path, tmp_path: Path) -> None:
    changes = write_tool_setup(tmp_path / "tools")
    made(setup, tmp_path / "run", trainer=EXPORT, **changes)
    turns = [len(one.turns or ()) for one in rollbook.open_run(tmp_path / "run").transcripts(split="train")]
    assert max(turns) >= 3
    records = list(rollbook.open_run(tmp_path / "run").finished_iterations())
    fates = {fate.fate for record in records for fate in record.rollouts or ()}
    assert fates >= {Fate.TRAINED, Fate.FAILED}
    all_is_equal(tmp_path / "run", has_tokens=True)


def test_so_are_episodes_that_ran_out_of_room_between_two_replies(setup: Path, tmp_path: Path) -> None:
    changes = write_tool_setup(tmp_path / "tools")
    look = tmp_path / "tools" / "look.py"
    look.write_text(look.read_text().replace('"ab"', '"ab" * 20'))  # no room for a reply after that
    changes["sampler"] = {"max_tokens": 24, "max_length": 48}
    run = made(setup, tmp_path / "run", truncated="drop", trainer=EXPORT, **changes)
    cut = [
        one
        for one in rollbook.open_run(run).transcripts(split="train")
        if one.stop_reason == "max_length" and one.turns and one.turns[-1]["finish_reason"] != "length"
    ]
    assert cut
    all_is_equal(run, has_tokens=True)


def test_so_are_trajectories_of_several_rows(setup: Path, tmp_path: Path) -> None:
    """The template cannot be continued after a tool has answered, so every turn is a row of its own."""
    changes = write_tool_setup(tmp_path / "tools")
    refusing = "{%- if messages | length > 2 and messages[0].content | length > 2 -%}"
    template = tmp_path / "template.jinja"
    template.write_text(f"{refusing}{{{{ raise_exception('no') }}}}{{%- endif -%}}\n{CHAT_TEMPLATE}")
    changes["model"]["chat_template"] = str(template)
    run = made(setup, tmp_path / "run", trainer=EXPORT, **changes)
    template.unlink()  # nothing is rendered again
    records = list(rollbook.open_run(run).finished_iterations())
    assert max(example.part for record in records for example in record.examples or ()) >= 1
    all_is_equal(run, has_tokens=True)


def test_so_is_a_resumed_run(setup: Path, tmp_path: Path) -> None:
    made(setup, tmp_path / "run", iterations=4, trainer=EXPORT)
    settings = settings_of(setup, tmp_path / "run", evals=[], trainer=EXPORT)
    train(settings, resume="000002", log=lambda _: None)
    all_is_equal(tmp_path / "run", has_tokens=True)


@pytest.mark.parametrize("processes", [2, 3])
def test_one_process_takes_the_steps_of_several(setup: Path, tmp_path: Path, processes: int) -> None:
    """Two gradients have one sum; three have several, and which one it was is not known."""
    settings = settings_of(
        setup, tmp_path / "run", processes=processes, minibatches=2, iterations=3, evals=[], trainer=EXPORT
    )
    environment = {"ROLLBOOK_SETTINGS": msgspec.json.encode(settings).decode()}
    run_several(processes, "rollbook.rl.main", "--artifacts", tmp_path / "artifacts", **environment)
    if processes == 2:
        return all_is_equal(tmp_path / "run", has_tokens=True)
    result = replay(tmp_path / "run")
    assert result.verdict in (Verdict.EQUAL, Verdict.WITHIN)
    assert not result.iterations[0].promise.bits and "3 processes" in result.iterations[0].promise.why
    return None


def test_an_iteration_is_reached_from_the_checkpoint_before_it(run: Path) -> None:
    result = replay(run, 3)
    assert [(one.iteration, one.origin) for one in result.iterations] == [
        (2, "checkpoint 000002"), (3, "checkpoint 000002")
    ]  # fmt: skip
    assert [one.iteration for one in replay(run, range(1, 3)).iterations] == [0, 1, 2]


def test_nothing_of_this_process_is_changed(run: Path) -> None:
    threads, drawn, state = torch.get_num_threads(), torch.get_rng_state(), random.getstate()
    replay(run, 2)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), drawn) and random.getstate() == state


def test_an_altered_logprob_is_named_by_its_token(run: Path, tmp_path: Path) -> None:
    group, trajectory = trained(run, 3)[1]
    place = group * 4 + trajectory

    def change(lines: Lines) -> None:
        lines[place]["turns"][0]["logprobs"][2] -= 0.5

    altered(run, tmp_path / "altered", transcripts(3), change)
    found = first(replay(tmp_path / "altered", 3))
    prompt = len(
        json.loads((run / transcripts(3)).read_text().splitlines()[place])["turns"][0]["prompt_token_ids"]
    )
    assert (found.iteration, found.stage, found.what) == (3, Stage.EXAMPLES, "inference_logprobs")
    assert (found.group_idx, found.traj_idx, found.turn, found.token) == (group, trajectory, 0, prompt + 2)
    assert found.recorded == pytest.approx(found.replayed + 0.5)

    shutil.rmtree(tmp_path / "altered" / "token_exports")
    found = first(replay(tmp_path / "altered", 3))
    assert (found.iteration, found.stage) == (3, Stage.EXAMPLES)
    assert (found.group_idx, found.traj_idx) == (group, trajectory)
    assert found.hint is not None and f"token {prompt + 2}, by 0.5" in found.hint


def test_an_altered_advantage_is_named(run: Path, tmp_path: Path) -> None:
    group, trajectory = trained(run, 2)[0]

    def change(lines: Lines) -> None:
        (line,) = [line for line in lines if line["iteration"] == 2]
        line["rollouts"][group * 4 + trajectory][3] += 0.125

    found = first(replay(altered(run, tmp_path / "altered", "iterations.jsonl", change), 2))
    assert (found.stage, found.group_idx, found.traj_idx) == (Stage.ADVANTAGES, group, trajectory)
    assert found.recorded == found.replayed + 0.125


def test_an_altered_reward_is_named_whichever_file_has_it(run: Path, tmp_path: Path) -> None:
    group, trajectory = trained(run, 2)[2]
    place = group * 4 + trajectory

    def in_turn(lines: Lines) -> None:
        lines[place]["turns"][0]["reward"] += 1
        lines[place]["total_reward"] += 1

    def in_step(lines: Lines) -> None:
        lines[place]["steps"][0]["reward"] += 1
        lines[place]["total_reward"] += 1

    altered(run, tmp_path / "altered", transcripts(2), in_turn)
    found = first(replay(tmp_path / "altered", 2))
    assert (found.stage, found.group_idx, found.traj_idx, found.turn) == (Stage.REWARDS, group, trajectory, 0)
    # In both of them it is a reward like any other, and its group has other advantages.
    altered(run, tmp_path / "altered", "train_iteration_000002_rollout_summaries.jsonl", in_step)
    found = first(replay(tmp_path / "altered", 2))
    assert (found.stage, found.group_idx, found.traj_idx) == (Stage.ADVANTAGES, group, 0)


def test_swapped_trajectories_are_named(run: Path, tmp_path: Path) -> None:
    """Two rollouts of one task with one reward: only what was sampled tells them apart."""
    rewards = {(one.group_idx, one.traj_idx): one.total_reward for one in rollbook.open_run(run).rollouts(3)}
    group, one, other = next(
        (group, one, other)
        for group, one in trained(run, 3)
        for other in range(one + 1, 4)
        if rewards[group, one] == rewards[group, other]
    )

    def swap(lines: Lines) -> None:
        first, second = lines[group * 4 + one], lines[group * 4 + other]
        for key in ("turns", "messages"):
            first[key], second[key] = second[key], first[key]

    altered(run, tmp_path / "altered", transcripts(3), swap)
    for has_export in (True, False):
        if not has_export:
            shutil.rmtree(tmp_path / "altered" / "token_exports")
        found = first(replay(tmp_path / "altered", 3))
        assert found.stage in (Stage.ROLLOUTS, Stage.EXAMPLES)  # lengths, if they differ, else the tokens
        assert (found.iteration, found.group_idx, found.traj_idx) == (3, group, one)


def test_a_line_that_is_missing_or_doubled_is_named(run: Path, tmp_path: Path) -> None:
    group, trajectory = trained(run, 2)[0]
    for name, change in (
        ("missing", lambda lines: lines.pop(group * 4 + trajectory)),
        ("doubled", lambda lines: lines.append(lines[group * 4 + trajectory])),
    ):
        found = first(replay(altered(run, tmp_path / name, transcripts(2), change), 2))
        assert (found.stage, found.group_idx, found.traj_idx) == (Stage.ROLLOUTS, group, trajectory)


def test_a_file_that_says_the_same_in_other_bytes_is_named_as_a_whole(run: Path, tmp_path: Path) -> None:
    altered(run, tmp_path / "altered", transcripts(2), lambda lines: lines[0].update(new="key"))
    found = first(replay(tmp_path / "altered", 2))
    assert found.stage is Stage.FILES and transcripts(2) in found.what


STEP_CHANGES: dict[Stage, Callable[[dict[str, Any]], Any]] = {
    Stage.FATES: lambda line: line["rollouts"][0].__setitem__(2, "surplus"),
    Stage.BATCHES: lambda line: line["steps"][0]["micro_batches"][0].reverse(),
    Stage.LOSS: lambda line: line["steps"][0].update(loss=line["steps"][0]["loss"] + 1e-9),
    Stage.GRAD_NORM: lambda line: line["steps"][0].update(grad_norm=1.0),
    Stage.WEIGHTS: lambda line: line.update(weights_digest="0" * 32),
    Stage.WEIGHTS_BEFORE: lambda line: line.update(weights_digest_before="0" * 32),
}


@pytest.mark.parametrize("stage", STEP_CHANGES)
def test_every_number_of_the_record_is_compared(run: Path, tmp_path: Path, stage: Stage) -> None:
    def change(lines: Lines) -> None:
        (line,) = [line for line in lines if line["iteration"] == 4]
        STEP_CHANGES[stage](line)

    altered(run, tmp_path / "altered", "iterations.jsonl", change)
    found = first(replay(tmp_path / "altered", 4))
    assert (found.iteration, found.stage) == (4, stage)


@pytest.mark.parametrize(
    ("column", "stage"),
    [
        ("trainer_logprobs", Stage.LOGPROBS),
        ("importance_ratio", Stage.RATIOS),
        ("is_masked_high", Stage.MASKS),
        ("token_ids", Stage.EXAMPLES),
    ],
)
def test_every_column_of_the_export_is_compared(run: Path, tmp_path: Path, column: str, stage: Stage) -> None:
    seen: dict[str, Any] = {}

    def change(lines: Lines) -> None:
        line = [line for line in lines if line["iteration"] == 2][1]
        seen.update(group_idx=line["group_idx"], traj_idx=line["traj_idx"], token=len(line["token_ids"]) - 1)
        old = line[column][-1]
        line[column][-1] = not old if isinstance(old, bool) else old + 1

    altered(run, tmp_path / "altered", "token_exports/rank_0.jsonl", change)
    # Its lengths are not those of the file any more; without it every line counts.
    (tmp_path / "altered" / "token_exports" / "manifest.jsonl").unlink()
    found = first(replay(tmp_path / "altered", 2))
    assert (found.stage, found.what) == (stage, column)
    assert {name: getattr(found, name) for name in seen} == seen and found.turn == 0


def test_what_follows_a_checkpoint_does_not_suffer_from_what_was_before(run: Path, tmp_path: Path) -> None:
    def change(lines: Lines) -> None:
        for line in lines:
            for turn in line["turns"]:
                turn["logprobs"] = [value - 0.1 for value in turn["logprobs"]]

    result = replay(
        altered(without_export(run, tmp_path / "altered"), tmp_path / "altered", transcripts(2), change)
    )
    verdicts = {one.iteration: one.verdict for one in result.iterations}
    assert [i for i, verdict in verdicts.items() if verdict is Verdict.DIFFERS] == [2, 3]
    assert (first(result).iteration, first(result).stage) == (2, Stage.EXAMPLES)


def test_what_cannot_be_reached_is_refused_with_the_nearest_that_can(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "cut")
    (tmp_path / "cut" / transcripts(2)).unlink()
    with pytest.raises(UsageError, match=f"{transcripts(2)} is gone; the nearest that can is --iteration 4"):
        replay(tmp_path / "cut", 3)
    with pytest.raises(UsageError, match="--iteration 1"):
        replay(tmp_path / "cut", 2)
    with pytest.raises(UsageError, match=f"iteration 2 of .* {transcripts(2)} is gone; .* --iteration 1"):
        replay(tmp_path / "cut")
    with pytest.raises(UsageError, match="has no iteration 9; it has 0 to 5"):
        replay(tmp_path / "cut", 9)
    weights = tmp_path / "cut" / "checkpoints" / "000004" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(BadFileError, match="digest is not the recorded one"):
        replay(tmp_path / "cut", 4)


def test_the_first_weights_must_still_be_there_and_the_same(setup: Path, tmp_path: Path) -> None:
    shutil.copytree(setup / "model", tmp_path / "model")
    made(setup, tmp_path / "run", model={"path": str(tmp_path / "model")}, iterations=4)
    (tmp_path / "model").rename(tmp_path / "moved")
    with pytest.raises(UsageError, match=r"no such directory.*; the nearest that can is --iteration 2"):
        replay(tmp_path / "run", 1)
    assert replay(tmp_path / "run", 1, model=tmp_path / "moved").verdict is Verdict.EQUAL
    shutil.copytree(tmp_path / "run" / "checkpoints" / "000002", tmp_path / "model")
    with pytest.raises(UsageError, match=r"is not the one that it began with; the nearest .* --iteration 2"):
        replay(tmp_path / "run", 0)


def test_adapters_need_the_model_below_them(setup: Path, tmp_path: Path) -> None:
    shutil.copytree(setup / "model", tmp_path / "model")
    model = {"path": str(tmp_path / "model"), "lora": {"rank": 2}}
    made(setup, tmp_path / "run", model=model, iterations=3)
    plain = made(setup, tmp_path / "plain", iterations=2)
    (tmp_path / "model").rename(tmp_path / "moved")
    with pytest.raises(UsageError, match="the model below its adapters is not the one"):
        replay(tmp_path / "run", 2, model=plain / "checkpoints" / "000002")


def test_elsewhere_a_tolerance_is_promised(run: Path, tmp_path: Path) -> None:
    """Other kernels of the same library add up in another order, as another processor does."""
    code = (
        "import sys, torch; from rollbook.rl.replay.replay import replay; found = replay(sys.argv[1]);"
        "promise = found.iterations[-1].promise;"
        "print(torch.backends.cpu.get_cpu_capability(), found.verdict, promise.bits, found.first)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code, run], env={**os.environ, "ATEN_CPU_CAPABILITY": "default"},
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    if shown[0] == torch.backends.cpu.get_cpu_capability():
        assert shown[1:] == ["equal", "True", "None"]
    else:
        assert shown[1:] == ["within", "False", "None"]


def test_elsewhere_what_is_beyond_the_tolerance_is_named(run: Path, tmp_path: Path) -> None:
    """What does not depend on a machine is compared to the bit, and the rest within what the run measured."""
    here = describe_machine(torch.device("cpu"))

    def elsewhere(lines: Lines) -> None:
        for line in lines:
            assert line["machine"].split(", ")[0] == here.split(", ")[0]
            line["machine"] = "abacus"

    altered(run, tmp_path / "altered", "iterations.jsonl", elsewhere)
    result = replay(tmp_path / "altered", 2)
    promise = result.iterations[0].promise
    assert not promise.bits and "abacus" in promise.why and promise.noise is not None
    assert 0 < promise.noise.logprob < 1e-4 and 0 < promise.noise.gradient < 1e-4

    def loss(change: float) -> Callable[[Lines], None]:
        return lambda lines: lines[2]["steps"][0].update(loss=lines[2]["steps"][0]["loss"] + change)

    altered(run, tmp_path / "altered", "iterations.jsonl", loss(1e-8))
    assert replay(tmp_path / "altered", 2).verdict is Verdict.WITHIN
    altered(run, tmp_path / "altered", "iterations.jsonl", loss(1e-3))
    assert first(replay(tmp_path / "altered", 2)).stage is Stage.LOSS
    altered(
        run,
        tmp_path / "altered",
        "iterations.jsonl",
        lambda lines: [line.pop("noise", None) for line in lines],
    )
    with pytest.raises(UsageError, match="did not measure what two machines may differ by"):
        replay(tmp_path / "altered", 2)


class Doubled(ImportanceSampling, tag="doubled", frozen=True, kw_only=True):
    """Nobody else has it."""


def test_a_loss_of_the_callers_own_must_be_given(setup: Path, tmp_path: Path) -> None:
    config = config_of(setup, tmp_path / "run", iterations=2, evals=[])
    rollbook.rl(config, loss=Doubled(), log=lambda _: None)
    with pytest.raises(UsageError, match=r"'doubled' is not one of Rollbook's.*loss=\.\.\."):
        replay(tmp_path / "run")
    assert replay(tmp_path / "run", loss=Doubled()).verdict is Verdict.EQUAL
    with pytest.raises(UsageError, match="not with ImportanceSampling"):
        replay(tmp_path / "run", loss=ImportanceSampling())


def test_what_other_settings_would_have_done(run: Path) -> None:
    (record,) = [one for one in rollbook.open_run(run).finished_iterations() if one.iteration == 2]
    (step,) = record.steps or ()
    found = what_if(run, 2, "learning_rate=0.02")
    assert (found.recorded.loss, found.recorded.grad_norm) == (step.loss, step.grad_norm)
    assert (found.changed.loss, found.changed.grad_norm) == (step.loss, step.grad_norm)
    assert found.changed.weight_change == pytest.approx(2 * found.recorded.weight_change, rel=1e-3)
    assert found.changes == {"learning_rate": 0.02}
    found = what_if(run, 3, "loss={name: ppo, clip_high: 0.0}", "epochs=2")
    assert found.recorded.masked == 0 and found.changed.optim_steps == 2
    assert found.changed.masked_high is not None and 0 < found.changed.masked_high < 1
    assert found.changed.masked == pytest.approx(found.changed.masked_high + (found.changed.masked_low or 0))
    assert found.changes["loss"] == {"name": "ppo", "clip_low": 0.2, "clip_high": 0.0}
    assert what_if(run, 3, loss=Doubled()).changed.loss == pytest.approx(found.recorded.loss)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seed=4"], "seed cannot be asked about"),
        ([], "no other setting is given"),
        (["loss={name: pppo}"], "loss"),
        (["group_size=2"], "group_size cannot be asked about"),
    ],
)
def test_what_would_have_made_other_rollouts_is_not_asked(run: Path, words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        what_if(run, 2, *words)


def test_what_is_no_run_of_the_loop_is_refused(tmp_path: Path) -> None:
    with rollbook.Run(tmp_path / "other") as own:
        own.log_metrics({"loss": 1.0}, step=0)
    with pytest.raises(RollbookError, match="names no step of `rollbook rl`"):
        replay(tmp_path / "other")


def test_a_token_that_the_model_does_not_know_is_refused(run: Path, tmp_path: Path) -> None:
    group, trajectory = trained(run, 2)[0]

    def change(lines: Lines) -> None:
        lines[group * 4 + trajectory]["turns"][0]["token_ids"][0] = 5000

    altered(run, tmp_path / "altered", transcripts(2), change)
    with pytest.raises(BadFileError, match="a token that the model does not know"):
        replay(tmp_path / "altered", 2)
