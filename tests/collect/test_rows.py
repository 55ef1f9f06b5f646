"""A row goes in and comes out in the ecosystem's shape, with our key first and nothing of it lost."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import orjson
import pytest

from collecting import config, results, row, run, small_input, write_rows
from rollbook.collect.items import Item, Line
from rollbook.collect.rollout import Rollouts
from rollbook.collect.rows import make_task
from rollbook.data.sft import sft
from rollbook.envs.agents import EnvironmentAgent
from rollbook.envs.base import Environment
from rollbook.envs.source import open_environment
from rollbook.policies.scripted import ScriptedPolicy
from rollbook.records.turns import Turn, Usage
from rollbook.rollouts.types import (
    Completion,
    Episode,
    FailureKind,
    Feedback,
    Message,
    Opening,
    Request,
    RolloutFailure,
    Task,
)

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}


class TwoTurns(Environment):
    """A reward, metrics and logs on both turns."""

    def __init__(self) -> None:
        self._turn = 0

    def step(self, message: Message) -> Feedback:
        self._turn += 1
        more = [{"role": "user", "content": "and then?"}] if self._turn == 1 else []
        return Feedback(
            reward=0.25,
            done=not more,
            messages=more,
            metrics={"turn": self._turn, "reward": -9.0, "_rb_key": 1},
            logs={"heard": message["content"]},
        )


def answer(request: Request) -> Completion:
    return Completion(
        message={"role": "assistant", "content": "so \u2028 be \ud83c it"},
        usage=Usage(input_tokens=5, output_tokens=3, cached_tokens=2, reasoning_tokens=1),
        model="m",
        id="c7",
        prompt_token_ids=[1, 2],
        token_ids=[3],
        logprobs=[-0.5],
    )


def collected(given: dict[str, Any], repeat: int = 0, **overrides: Any) -> tuple[Line, dict[str, Any]]:
    item = Item(4, repeat, str(given.get("id", "none")), orjson.dumps(given))
    agent = EnvironmentAgent(open_environment(TwoTurns), ScriptedPolicy(answer))
    line = asyncio.run(Rollouts(agent, overrides).run(item))
    return line, orjson.loads(line.data)


def test_a_line_begins_with_its_key_and_ends_with_what_was_passed_through() -> None:
    given = row('a "b"', agent_ref={"name": "x"}, verifier_metadata={"deep": [1, {"x": None}]}, answer=3)
    made, line = collected(given, repeat=2)
    assert list(line)[:4] == ["_rb_key", "_ng_task_index", "_ng_rollout_index", "reward"]
    assert (line["_rb_key"], line["_ng_task_index"], line["_ng_rollout_index"]) == ('a "b"#2', 4, 2)
    assert made.data.startswith(b'{"_rb_key":"a \\"b\\"#2",')
    for key in (
        "id",
        "agent_ref",
        "verifier_metadata",
        "answer",
        "expected_answer",
        "responses_create_params",
    ):
        assert line[key] == given[key]


def test_an_index_the_row_brings_is_kept_and_old_results_are_replaced() -> None:
    given = row(
        "a", _ng_task_index=77, _ng_rollout_index=5, _rb_key="old#5", reward=-1, response={"id": "old"}
    )
    _, line = collected(given)
    assert (line["_rb_key"], line["_ng_task_index"], line["_ng_rollout_index"]) == ("a#0", 77, 0)
    assert line["reward"] == 0.5
    assert line["response"]["id"] == "c7"


def test_the_response_of_several_turns() -> None:
    made, line = collected(row("a"))
    response = line["response"]
    assert [item["role"] for item in response["output"]] == ["assistant", "user", "assistant"]
    assert response["output"][0]["generation_token_ids"] == [3]
    assert response["output"][2]["prompt_token_ids"] == [1, 2]
    assert response["output"][2]["generation_log_probs"] == [-0.5]
    assert "generation_token_ids" not in response["output"][1]
    assert response["usage"]["total_tokens"] == 16
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": 4, "cache_write_tokens": 0}
    assert made.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens, made.reward) == (10, 6, 0.5)
    assert line["num_turns"] == 2
    assert line["turn"] == 2  # the last turn's
    assert [line["logs"][turn]["heard"][:2] for turn in ("0", "1")] == ["so", "so"]


def test_an_answer_with_half_a_character_is_still_one_line() -> None:
    made, line = collected(row("a"))
    assert made.data.startswith(b'{"_rb_key":"a#0",')
    assert b"\n" not in made.data
    assert len(made.data.decode().splitlines()) == 1  # also for those who split at U+2028
    assert "so \u2028 be " in line["response"]["output"][0]["content"][0]["text"]


def test_overrides_reach_the_policy_and_the_row() -> None:
    given = row("a")
    given["responses_create_params"] |= {"temperature": 0.1, "tools": [TOOL], "instructions": "Be brief."}
    item = Item(0, 1, "a", orjson.dumps(given))
    task = make_task(item, {"temperature": 0.7}, add_seed=True)
    assert task.params["temperature"] == 0.7
    assert task.tools == [TOOL]
    assert task.messages[0] == {"role": "system", "content": "Be brief."}
    assert task.row["responses_create_params"]["temperature"] == 0.7
    assert orjson.loads(task.params["metadata"]["extra_body"]) == {"seed": 1}
    given["responses_create_params"]["metadata"] = {"extra_body": {"top_k": 5}}
    task = make_task(Item(0, 1, "a", orjson.dumps(given)), {}, add_seed=True)
    assert orjson.loads(task.params["metadata"]["extra_body"]) == {"top_k": 5, "seed": 1}


class Ruled(Environment):
    """Opens with rules before the row's messages, and a hint after them."""

    def start(self, task: Task) -> Opening:
        rules, hint = {"role": "system", "content": "RULES"}, {"role": "user", "content": "HINT"}
        task.messages.insert(0, rules)
        return Opening(messages=[*task.messages, hint], tools=[*task.tools, {**TOOL, "name": "ask"}])

    def step(self, message: Message) -> Feedback:
        return Feedback(reward=1.0)


class Hinting(Environment):
    def start(self, task: Task) -> Opening:
        return Opening(messages=[*task.messages, {"role": "user", "content": "HINT"}])

    def step(self, message: Message) -> Feedback:
        return Feedback(reward=1.0)


class Uninstructed(Environment):
    def start(self, task: Task) -> Opening:
        return Opening(messages=[message for message in task.messages if message["role"] != "system"])

    def step(self, message: Message) -> Feedback:
        return Feedback(reward=1.0)


def opened(kind: type[Environment], **params: Any) -> bytes:
    given = row("a", "What?")
    given["responses_create_params"] |= params
    rollouts = Rollouts(EnvironmentAgent(open_environment(kind), ScriptedPolicy(["yes"])))
    return asyncio.run(rollouts.run(Item(0, 0, "a", orjson.dumps(given)))).data


def test_a_prompt_that_the_environment_changed_is_learned_from_as_it_was_shown(tmp_path: Path) -> None:
    shown = {
        "plain": (opened(Ruled), ["RULES", "What?", "HINT"]),
        "instructed": (opened(Ruled, instructions="BRIEF"), ["RULES", "BRIEF", "What?", "HINT"]),
        "hinted": (opened(Hinting, instructions="BRIEF"), ["BRIEF", "What?", "HINT"]),
        "uninstructed": (opened(Uninstructed, instructions="BRIEF"), ["What?"]),
    }
    for name, (line, said) in shown.items():
        (tmp_path / f"{name}.jsonl").write_bytes(line + b"\n")
        sft([tmp_path / f"{name}.jsonl"], tmp_path / f"{name}_sft.jsonl")
        made = orjson.loads((tmp_path / f"{name}_sft.jsonl").read_bytes())
        assert [message["content"] for message in made["messages"]] == [*said, "yes"]
    assert orjson.loads(shown["hinted"][0])["responses_create_params"]["instructions"] == "BRIEF"


def test_tools_that_the_environment_added_to_the_rows_stand_beside_them() -> None:
    asked = orjson.loads(opened(Ruled, tools=[TOOL]))["responses_create_params"]
    assert [tool["name"] for tool in asked["tools"]] == ["add", "ask"]
    assert "tools" not in orjson.loads(opened(Ruled))["responses_create_params"]


class Prompting(Environment):
    """Puts words into the assistant's mouth before its second turn."""

    turns = 0

    def step(self, message: Message) -> Feedback:
        self.turns += 1
        words = [{"role": "assistant", "content": "Let me see."}, {"role": "user", "content": "Go on."}]
        return Feedback(reward=1.0, done=self.turns == 2, messages=words if self.turns == 1 else [])


class Sampling:
    async def act(self, request: Request) -> Completion:
        message = {"role": "assistant", "content": f"turn {request.turn}"}
        return Completion(message, token_ids=[request.turn], logprobs=[-1.0])

    async def close(self) -> None: ...


def test_tokens_stand_on_what_was_sampled_and_not_on_what_an_environment_said() -> None:
    rollouts = Rollouts(EnvironmentAgent(open_environment(Prompting), Sampling()))
    made = asyncio.run(rollouts.run(Item(0, 0, "a", orjson.dumps(row("a", "What?")))))
    output = orjson.loads(made.data)["response"]["output"]
    replies = [item for item in output if item.get("role") == "assistant"]
    assert [(item["content"][0]["text"], item.get("generation_token_ids")) for item in replies] == [
        ("turn 0", [0]),
        ("Let me see.", None),
        ("turn 1", [1]),
    ]


class Clobbering(Environment):
    def step(self, message: Message) -> Feedback:
        metrics = {"id": 7, "correct": 1.0, "_ng_task_index": 3, "turn": 1}
        return Feedback(reward=1.0, metrics=metrics, logs={"why": "so"})


def clobbered(given: dict[str, Any]) -> dict[str, Any]:
    rollouts = Rollouts(EnvironmentAgent(open_environment(Clobbering), ScriptedPolicy(["B"])))
    made = asyncio.run(rollouts.run(Item(0, 0, "a", orjson.dumps(given))))
    line: dict[str, Any] = orjson.loads(made.data)
    return line


def test_what_a_row_brings_is_not_written_over_by_what_became_of_it() -> None:
    given = row("a", correct="B", num_turns="many", logs=[1], stop_reason="none")
    line = clobbered(given)
    assert {key: line[key] for key in given} == given
    assert (line["metric_id"], line["metric_correct"], line["turn"]) == (7, 1.0, 1)
    assert (line["metric_num_turns"], line["metric_stop_reason"]) == (1, "stop")
    assert line["metric_logs"] == {"0": {"why": "so"}}
    assert line["_ng_task_index"] == 0
    assert clobbered(line) == {**line, "response": ANY}  # also when it is collected again
    collected_before = {**row("a"), "_rb_key": "a#0", "correct": 0.0}
    assert (clobbered(collected_before)["id"], clobbered(collected_before)["correct"]) == ("a", 1.0)


def test_numbers_past_64_bits_are_graded_and_written_exactly(tmp_path: Path) -> None:
    number = 123456789012345678901234567890
    given = row("a", expected_answer=0, beside=[{"deep": -number}, "\u2028"], text=str(number))
    line = json.dumps(given).replace('"expected_answer": 0', f'"expected_answer": {number}')
    (tmp_path / "in.jsonl").write_text(line + "\n")
    agent = {
        "env": {"name": "dataset", "grader": "number"},
        "policy": {"kind": "scripted", "script": [f"It is {number}."]},
    }
    config(tmp_path, agents={"a": agent})
    run(tmp_path)
    written = json.loads((tmp_path / "out.jsonl").read_bytes())
    assert (written["reward"], written["expected_answer"]) == (1.0, number)
    assert (written["beside"], written["text"]) == (given["beside"], str(number))


def test_a_bug_in_an_environment_is_the_failure_of_its_row() -> None:
    class Broken(Environment):
        def step(self, message: Message) -> Feedback:
            raise KeyError("answer")

    agent = EnvironmentAgent(open_environment(Broken), ScriptedPolicy(["x"]))
    item = Item(0, 0, "a", orjson.dumps(row("a")))
    with pytest.raises(RolloutFailure, match="KeyError") as raised:
        asyncio.run(Rollouts(agent).run(item))
    assert raised.value.kind is FailureKind.ENVIRONMENT


@pytest.mark.parametrize("reward", [float("nan"), None])
def test_a_reward_that_is_no_number_is_a_failure_whoever_played(reward: Any) -> None:
    class Elsewhere:
        async def run(self, task: Task) -> Episode:
            return Episode(prompt=task.messages, turns=[Turn(messages=[], reward=reward)])

        async def close(self) -> None:
            return None

    item = Item(0, 0, "a", orjson.dumps(row("a")))
    with pytest.raises(RolloutFailure, match="reward") as raised:
        asyncio.run(Rollouts(Elsewhere()).run(item))
    assert raised.value.kind is FailureKind.ENVIRONMENT


ENVIRONMENT = """
from rollbook.envs import single_turn

@single_turn
def graded(task, answer):
    return {"reward": float(answer == "yes"), "length": len(answer), "said": answer}
"""

PEERS = ["example_multi_step", "example_multi_turn_gymnasium", "format_verification"]


@pytest.mark.parametrize("name", PEERS)
def test_rows_of_the_peers_run_as_they_are(name: str, peer_fixtures: Path, tmp_path: Path) -> None:
    source = peer_fixtures / "nemo_gym" / f"{name}_example.jsonl"
    given = [orjson.loads(line) for line in source.read_bytes().splitlines() if line.strip()]
    (tmp_path / "in.jsonl").write_bytes(source.read_bytes())
    (tmp_path / "graded.py").write_text(ENVIRONMENT)
    agent = {
        "env": {"name": f"{tmp_path / 'graded.py'}:graded"},
        "policy": {"kind": "scripted", "script": ["yes"]},
    }
    config(tmp_path, agents={"a": agent})
    progress = run(tmp_path, "num_repeats=2", "+responses_create_params.temperature=0.5")
    assert (progress.done, progress.reward_mean) == (2 * len(given), 1.0)
    for line in results(tmp_path / "out.jsonl"):
        source_row = given[line["_ng_task_index"]]
        for key in source_row.keys() - {"responses_create_params"}:
            assert line[key] == source_row[key]
        asked = {**source_row["responses_create_params"], "temperature": 0.5}
        assert line["responses_create_params"] == asked
        assert line["response"]["output"][-1]["content"][0]["text"] == "yes"
        assert (line["length"], line["logs"]) == (3, {"0": {"said": "yes"}})


def test_an_output_may_be_the_next_input(tmp_path: Path) -> None:
    small_input(tmp_path, 3)
    config(tmp_path)
    run(tmp_path)
    first = results(tmp_path / "out.jsonl")
    write_rows(tmp_path / "in.jsonl", first)
    run(tmp_path, f"output_jsonl_fpath={tmp_path / 'again.jsonl'}")
    again = results(tmp_path / "again.jsonl")
    assert {line["_rb_key"] for line in again} == {"t0#0", "t1#0", "t2#0"}
    assert [set(line) for line in again] == [set(line) for line in first]


def test_every_turn_is_recorded_with_what_it_earned() -> None:
    _, line = collected(row("a"))
    tokens = {"ob_len": 5, "ac_len": 3}
    metrics = {"reward": -9.0, "_rb_key": 1}
    assert line["_rb_steps"] == [
        {"step_idx": 0, **tokens, "reward": 0.25, "episode_done": False, "metrics": {"turn": 1, **metrics}},
        {"step_idx": 1, **tokens, "reward": 0.25, "episode_done": True, "metrics": {"turn": 2, **metrics}},
    ]
    assert (line["reward"], line["metric_reward"], line["metric__rb_key"]) == (0.5, -9.0, 1)
    assert "_rb_steps" not in clobbered(row("a"))  # a single turn is the row itself
    assert "_rb_steps" not in clobbered(line)  # nor are those of an earlier collection its own
