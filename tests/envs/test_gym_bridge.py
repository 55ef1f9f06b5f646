"""A NeMo Gym agent server as an agent, against a server that answers with rows such servers wrote."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from collecting import command, results
from env_helpers import question, task_of
from fake_servers import Handler, Told, serving, serving_bytes
from rollbook.envs.agents import build_agent
from rollbook.rollouts.types import Episode, FailureKind, RolloutFailure, Task

NAMES = [
    "example_multi_step_example",
    "example_multi_turn_gymnasium_example",
    "format_verification_example",
]
RESPONSE: dict[str, Any] = {
    "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]}]
}


async def _run(url: str, tasks: list[Task], **settings: Any) -> list[Episode]:
    agent = build_agent({"name": "gym", "url": url, **settings})
    try:
        return list(await asyncio.gather(*map(agent.run, tasks)))
    finally:
        await agent.close()


def episodes(handler: Handler, *tasks: Task) -> list[Episode]:
    async def play() -> list[Episode]:
        async with serving(handler) as url:
            return await _run(url, list(tasks))

    return asyncio.run(play())


def failure(answer: Any, status: int = 200, headers: dict[str, str] | None = None) -> RolloutFailure:
    with pytest.raises(RolloutFailure) as caught:
        episodes(Told(answer, status=status, headers=headers), question())
    return caught.value


@pytest.mark.parametrize("name", NAMES)
def test_real_rows_come_back_whole(peer_fixtures: Path, name: str) -> None:
    lines = (peer_fixtures / "nemo_gym" / f"{name}_rollouts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    by_place = {str(place): row for place, row in enumerate(rows)}
    sent: list[dict[str, Any]] = []

    async def agent_server(request: web.Request) -> web.StreamResponse:
        assert request.path == "/v1/run"
        asked = await request.json()
        sent.append(asked)
        return web.json_response(by_place[asked["place"]])

    tasks = [
        task_of(
            {"responses_create_params": row["responses_create_params"], "place": place, "kept": [1]}, repeat=2
        )
        for place, row in by_place.items()
    ]
    played = episodes(agent_server, *tasks)
    for episode, row in zip(played, rows, strict=True):
        assert episode.reward == row["reward"]
        assert episode.response == row["response"]
        assert episode.model == row["response"]["model"]
        counts = row["response"]["usage"]
        assert (episode.usage and episode.usage.output_tokens) == (counts and counts["output_tokens"])
        known = ("responses_create_params", "response", "reward", "_ng_task_index", "_ng_rollout_index")
        rest = {key: value for key, value in row.items() if key not in known}
        assert {**episode.metrics, **episode.fields} == rest
        assert sum(message["role"] == "assistant" for message in episode.messages) == len(episode.turns)
        assert episode.turns[-1].reward == row["reward"]
    assert all(asked["kept"] == [1] and asked["_ng_rollout_index"] == 2 for asked in sent)
    assert {json.dumps(asked["responses_create_params"]) for asked in sent} == {
        json.dumps(row["responses_create_params"]) for row in rows
    }


@pytest.mark.parametrize(
    ("sentinels", "kind"),
    [
        ({"_ng_failure_class": "judge_failed", "_ng_failure_judge_error": "why"}, FailureKind.JUDGE),
        ({"_ng_failure_class": "transient", "error_message": "why"}, FailureKind.SERVER_ERROR),
        ({"_ng_failure_class": "something new", "error_message": "why"}, FailureKind.SERVER_ERROR),
        ({"_ng_failure_class": "timeout_exceeded", "error_message": "why"}, FailureKind.TIMEOUT),
        (
            {"_ng_failure_class": "timeout_exceeded", "_ng_failure_terminal": True, "error_message": "why"},
            FailureKind.ENVIRONMENT,
        ),
        (
            {"_ng_failure_class": "kill_shaped", "_ng_no_persist": True, "error_message": "why"},
            FailureKind.WORKER_LOST,
        ),
    ],
)
def test_a_failure_said_with_status_200_is_a_failure(sentinels: dict[str, Any], kind: FailureKind) -> None:
    failed = failure({"responses_create_params": {}, "response": RESPONSE, "reward": 0.0, **sentinels})
    assert failed.kind is kind
    assert sentinels["_ng_failure_class"] in str(failed)
    assert "why" in str(failed)


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>",
        b"[]",
        b"null",
        {"response": RESPONSE},
        {"response": RESPONSE, "reward": None},
        {"response": RESPONSE, "reward": "high"},
        {"response": {}, "reward": 1.0},
        {"reward": 1.0},
        b'{"response": {"output": []}, "reward": NaN}',
        b'{"response": {"output": [5]}, "reward": 1}',
    ],
)
def test_an_answer_without_response_and_reward_is_a_bad_answer(answer: Any) -> None:
    assert failure(answer).kind is FailureKind.BAD_ANSWER


def test_http_errors_are_those_of_any_endpoint() -> None:
    failed = failure({}, status=429, headers={"Retry-After": "4"})
    assert (failed.kind, failed.retry_after) == (FailureKind.RATE_LIMIT, 4.0)
    assert failure({"detail": "bad row"}, status=422).kind is FailureKind.INVALID_REQUEST
    assert failure(b"Internal Server Error", status=500).kind is FailureKind.SERVER_ERROR


def test_a_server_that_hangs_up_or_never_answers() -> None:
    async def play(answer: bytes | None) -> None:
        async with serving_bytes(answer) as url:
            await _run(url, [question()], total_timeout_s=0.3)

    for answer, kind in ((b"", FailureKind.TRANSPORT), (None, FailureKind.TIMEOUT)):
        with pytest.raises(RolloutFailure) as caught:
            asyncio.run(play(answer))
        assert caught.value.kind is kind


def test_a_truncated_response_says_so() -> None:
    cut = {**RESPONSE, "incomplete_details": {"reason": "max_output_tokens"}}
    (episode,) = episodes(Told({"response": cut, "reward": 0.5}), question())
    assert (episode.stop_reason, episode.reward) == ("length", 0.5)


@pytest.mark.parametrize("name", NAMES)
def test_real_inputs_are_collected_as_they_are(peer_fixtures: Path, tmp_path: Path, name: str) -> None:
    """The command itself, against a server that answers with the bytes such a server once answered."""
    inputs = peer_fixtures / "nemo_gym" / f"{name}.jsonl"
    recorded = (peer_fixtures / "nemo_gym" / f"{name}_rollouts.jsonl").read_bytes().splitlines()
    place = {json.loads(line).get("_ng_task_index", at): line for at, line in enumerate(recorded)}
    answers = [place[at] for at in range(len(recorded))]
    rows = [json.loads(line) for line in inputs.read_bytes().splitlines()]
    prompts = [row["responses_create_params"]["input"] for row in rows]
    sent: list[dict[str, Any]] = []

    def replay(asked: dict[str, Any]) -> bytes:
        sent.append(asked)
        return answers[prompts.index(asked["responses_create_params"]["input"])]

    async def play() -> subprocess.CompletedProcess[str]:
        async with serving(Told(replay)) as url:
            agent = {"env": {"name": "gym", "url": url}}
            (tmp_path / "rollbook.yaml").write_text(json.dumps({"agents": {"a": agent}}))
            (tmp_path / "in.jsonl").write_bytes(inputs.read_bytes())
            return await asyncio.to_thread(command, tmp_path, "+num_repeats=2")

    ended = asyncio.run(play())
    assert ended.returncode == 0, ended.stderr
    collected = results(tmp_path / "out.jsonl")
    assert len({row["_rb_key"] for row in collected}) == len(collected) == 2 * len(rows)
    for row in collected:
        given, answer = rows[row["_ng_task_index"]], json.loads(answers[row["_ng_task_index"]])
        assert (row["response"], row["reward"]) == (answer["response"], answer["reward"])
        said = {key: value for key, value in answer.items() if not key.startswith("_ng_")}
        assert {key: row[key] for key in {**given, **said}} == {**given, **said, **_params(given)}
    for asked in sent:
        own = {key: value for key, value in asked.items() if not key.startswith("_ng_")}
        assert own in rows


def _params(row: dict[str, Any]) -> dict[str, Any]:
    return {"responses_create_params": row["responses_create_params"]}
