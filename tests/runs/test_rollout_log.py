"""What a rollout log keeps of each trajectory."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rollbook import Run, Step, Trajectory, open_run
from rollbook.errors import UsageError
from rollbook.records.identity import task_digest
from rollbook.records.rollouts import RolloutSummary
from rollbook.records.transcripts import Transcript
from rollbook.records.turns import Turn, Usage

USER = {"role": "user", "content": "17 * 23?"}
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}


def recorded(path: Path, *trajectories: Trajectory) -> list[tuple[RolloutSummary, Transcript]]:
    with Run(path) as run, run.rollouts(0) as rollouts:
        for trajectory in trajectories:
            with rollouts.group() as group:
                group.add(trajectory)
    reader = open_run(path)
    return list(zip(reader.rollouts(), reader.transcripts(), strict=True))


def turns() -> list[Turn]:
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function"}]}
    first = Turn(
        messages=[call, {"role": "tool", "tool_call_id": "c1", "content": "391"}],
        reward=0.0,
        metrics={"calls": 1},
        prompt_token_ids=[1, 2, 3],
        token_ids=[4, 5],
        logprobs=[-0.25, -1e-7],
        temperature=0.7,
        policy_version=3,
        finish_reason="tool_calls",
        seed=2**62,
    )
    second = Turn(
        messages=[{"role": "assistant", "content": "391"}],
        reward=1.0,
        logs={"expected": 391},
        prompt_token_ids=[6, 7],
        token_ids=[8],
        logprobs=[-0.5],
    )
    third = Turn(
        messages=[{"role": "assistant", "content": "Yes."}],
        reward=0.5,
        prompt_token_ids=[1, 2, 9, 9],
        token_ids=[10],
        logprobs=[-2.0],
        new_row="reasoning dropped",
    )
    return [first, second, third]


@dataclass
class State:
    parent: Any = None
    children: list[Any] = field(default_factory=list)


def test_cyclic_logs_do_not_hang(tmp_path: Path) -> None:
    root = State()
    root.children = [State(root) for _ in range(3)]
    ((summary, _),) = recorded(tmp_path, Trajectory.single_turn("q", "a", 1.0, logs={"state": root}))
    assert summary.steps[0].logs["state"]["children"][0]["parent"] == "[circular: State]"


def test_a_turn_is_recorded_whole_and_comes_back(tmp_path: Path) -> None:
    episode = Trajectory(prompt=[USER], turns=turns(), tools=[TOOL], stop_reason="stop", final_reward=0.25)
    ((summary, transcript),) = recorded(tmp_path, episode)
    assert summary.total_reward == 1.75
    assert [(s.step_idx, s.ob_len, s.ac_len, s.reward, s.episode_done) for s in summary.steps] == [
        (0, 3, 2, 0.0, False),
        (1, 7, 1, 1.0, False),
        (2, 4, 1, 0.5, True),
    ]
    assert (summary.steps[0].metrics, summary.steps[1].logs) == ({"calls": 1}, {"expected": 391})
    assert transcript.tools == [TOOL]
    assert transcript.task_digest == summary.task_digest == task_digest([USER], [TOOL])
    assert [message.get("step_idx") for message in transcript.messages] == [None, 0, 0, 1, 2]
    assert transcript.prompt() == [USER]
    read = [(turn.token_ids, turn.logprobs, turn.messages, turn.seed) for turn in transcript.to_turns()]
    assert read == [(turn.token_ids, turn.logprobs, turn.messages, turn.seed) for turn in turns()]
    line = json.loads((tmp_path / "train_iteration_000000_transcripts.jsonl").read_text())
    assert line["turns"][1] == {
        "step_idx": 1,
        "reward": 1.0,
        "prompt_token_ids": [6, 7],
        "token_ids": [8],
        "logprobs": [-0.5],
    }
    assert line["turns"][2]["new_row"] == "reasoning dropped"


def test_lengths_nobody_knows_are_null(tmp_path: Path) -> None:
    reply = {"role": "assistant", "content": "4"}
    counted = Turn(messages=[reply], reward=1.0, usage=Usage(input_tokens=9, output_tokens=2))
    unknown = Turn(messages=[reply], reward=1.0)
    later = Turn(messages=[reply], reward=1.0, prompt_token_ids=[1], token_ids=[2, 3])
    with Run(tmp_path) as run, run.rollouts(0) as rollouts, rollouts.group(0) as group:
        group.add(Trajectory(prompt=[USER], turns=[counted]))
        group.add(Trajectory(prompt=[USER], turns=[unknown, later]))
    first, second = open_run(tmp_path).rollouts()
    assert [(step.ob_len, step.ac_len) for step in first.steps] == [(9, 2)]
    assert [(step.ob_len, step.ac_len) for step in second.steps] == [(None, None), (None, 2)]
    assert (first.ac_len, second.ac_len) == (2, None)
    metrics = rollouts.metrics()
    assert (metrics["ac_tokens_per_turn"], metrics["env/all/ac_tokens_per_turn:count"]) == (2.0, 2)
    assert (metrics["env/all/ob_tokens_per_turn"], metrics["env/all/ob_tokens_per_turn:count"]) == (9.0, 1)


def test_logprobs_that_are_not_finite_are_null_and_named(tmp_path: Path) -> None:
    reply = {"role": "assistant", "content": "4"}
    turn = Turn(messages=[reply], prompt_token_ids=[1], token_ids=[2, 3], logprobs=[-math.inf, -0.5])
    ((summary, transcript),) = recorded(tmp_path, Trajectory(prompt=[USER], turns=[turn]))
    assert summary.total_reward is None  # not graded
    assert transcript.turns[0]["logprobs"] == [None, -0.5]
    assert transcript.extra["nonfinite"] == ["turns.0.logprobs.0"]
    assert math.isnan(transcript.to_turns()[0].logprobs[0])


def test_few_shot_prompts_have_ids_of_their_own_and_their_answer_is_step_0(tmp_path: Path) -> None:
    shots = [USER, {"role": "assistant", "content": "391"}]
    prompts = [[*shots, {"role": "user", "content": text}] for text in ("3 + 3?", "9 + 9?")]
    given = [Trajectory.single_turn(prompt, "6", 1.0) for prompt in prompts]
    reply = {"role": "assistant", "content": "6"}
    given += [Trajectory(steps=[Step(reward=1.0)], messages=[*prompt, reply]) for prompt in prompts]
    rows = recorded(tmp_path, *given)
    ids = [summary.task_id for summary, _ in rows]
    assert ids[0] == ids[2] != ids[1] == ids[3]
    for _, transcript in rows:
        assert [message.get("step_idx") for message in transcript.messages] == [None, None, None, 0]
        assert len(transcript.prompt()) == 3


def test_what_the_environment_answers_belongs_to_the_turn_it_answers(tmp_path: Path) -> None:
    messages = [USER, {"role": "assistant", "content": "?"}, {"role": "tool", "content": "391"}]
    messages += [{"role": "assistant", "content": "391"}]
    ((_, transcript),) = recorded(tmp_path, Trajectory(steps=[Step(), Step()], messages=messages))
    assert [message.get("step_idx") for message in transcript.messages] == [None, 0, 0, 1]


def test_steps_must_fit_the_turns(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="1 steps for 3 turns"):
        recorded(tmp_path, Trajectory(prompt=[USER], turns=turns(), steps=[Step()]))


def test_an_error_of_the_loop_after_its_rollouts_invents_no_failure(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        with pytest.raises(ZeroDivisionError), run.rollouts(0) as rollouts, rollouts.group() as group:
            for _ in range(4):
                group.add(Trajectory.single_turn("q", "a", 1.0))
            1 / 0  # noqa: B018
        assert rollouts.metrics()["env/all/rollouts/failed"] == 0
    assert len(list(open_run(tmp_path).rollouts())) == 4


def test_a_trajectory_that_could_not_be_recorded_can_still_fail(tmp_path: Path) -> None:
    with Run(tmp_path) as run, run.rollouts(0) as rollouts, rollouts.group(0, size=3) as group:
        group.add(Trajectory.single_turn("q", "a", 1.0))
        with pytest.raises(ValueError):
            group.add(Trajectory.single_turn("q", "a", "high"))  # type: ignore[arg-type]
        group.fail("bad reward", 1)
        group.add(Trajectory(final_reward=None))
    rows = list(open_run(tmp_path).rollouts())
    assert [(row.traj_idx, str(row.status), row.total_reward) for row in rows] == [
        (0, "ok", 1.0),
        (1, "error", None),
        (2, "ok", None),
    ]
    assert rollouts.metrics()["env/all/rollouts/missing"] == 0
