"""A running NeMo Gym agent server as an agent: the row goes to its `/run`, a graded response comes back.

The server brings environment and policy. It reports failures with status 200 and sentinel keys in the
answer; those become failures here, never rewards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

import msgspec

from rollbook.errors import UsageError
from rollbook.policies.conversion import to_chat
from rollbook.policies.http import MAX_RESPONSE_BYTES, Endpoint, check_limit, check_timeouts, checked_url
from rollbook.rollouts.episode import episode_played_elsewhere, time_limit
from rollbook.rollouts.types import Episode, FailureKind, RolloutFailure, Task
from rollbook.rollouts.usage import usage_from
from rollbook.runs.settings import typed

_FAILURE_CLASS = "_ng_failure_class"
_NO_FIELD = frozenset(
    {"responses_create_params", "response", "reward", "_ng_task_index", "_ng_rollout_index"}
)
# The classes agent servers use; what they call by another name is tried again like a server's error.
_KINDS = {
    "judge_failed": FailureKind.JUDGE,
    "timeout_exceeded": FailureKind.TIMEOUT,
    "skipped": FailureKind.ENVIRONMENT,
    "kill_shaped": FailureKind.WORKER_LOST,
}


class GymSettings(msgspec.Struct, kw_only=True):
    name: Literal["gym"]
    url: str
    connect_timeout_s: float = 30.0
    total_timeout_s: float | None = 3600.0
    max_response_bytes: int = MAX_RESPONSE_BYTES


def build(env: Mapping[str, Any], policy: Any, *, max_turns: int, timeout_s: float | None) -> GymAgent:
    if policy is not None:
        raise UsageError("env 'gym' is an agent server with a policy of its own; leave out policy")
    gym = typed(env, GymSettings, "env")
    return GymAgent(
        gym.url,
        connect_timeout_s=gym.connect_timeout_s,
        total_timeout_s=gym.total_timeout_s,
        max_response_bytes=gym.max_response_bytes,
        timeout_s=timeout_s,
    )


def tasks(env: Mapping[str, Any], count: int, seed: int) -> NoReturn:
    raise UsageError("env 'gym' makes no tasks of its own; give input_jsonl_fpath=...")


def describe(env: Mapping[str, Any], policy: Any, *, max_turns: int) -> dict[str, Any]:
    return {"env": {"name": "gym"}}


class GymAgent:
    def __init__(
        self,
        url: str,
        *,
        connect_timeout_s: float = 30.0,
        total_timeout_s: float | None = 3600.0,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        timeout_s: float | None = None,
    ) -> None:
        check_timeouts(connect_timeout_s, total_timeout_s, "env")
        check_limit(max_response_bytes, "env")
        self._timeout_s = timeout_s
        base = checked_url(url, "env.url").removesuffix("/run")
        self._endpoint = Endpoint(
            f"{base}/run",
            connect_timeout_s=connect_timeout_s,
            total_timeout_s=total_timeout_s,
            max_response_bytes=max_response_bytes,
        )

    async def run(self, task: Task) -> Episode:
        async with time_limit(self._timeout_s, lambda: "the episode of the agent server"):
            data = await self._endpoint.post({**task.row, "_ng_rollout_index": task.repeat})
        try:
            answer = msgspec.json.decode(data)  # which, unlike orjson, keeps whole numbers past 64 bits
            if _FAILURE_CLASS in answer:
                raise _failure(answer)
            return _episode(answer, task)
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            msgspec.MsgspecError,
            RecursionError,
        ) as error:
            raise self._endpoint.not_the_protocol(data, error) from None

    async def close(self) -> None:
        await self._endpoint.close()


def _failure(answer: dict[str, Any]) -> RolloutFailure:
    name = str(answer[_FAILURE_CLASS])
    kind = _KINDS.get(name, FailureKind.SERVER_ERROR)
    if answer.get("_ng_failure_terminal"):
        kind = FailureKind.ENVIRONMENT  # which is not tried again
    why = answer.get("_ng_failure_judge_error") or answer.get("error_message") or "no reason given"
    return RolloutFailure(kind, f"the agent server says {name}: {why}")


def _episode(answer: dict[str, Any], task: Task) -> Episode:
    response, reward = answer["response"], float(answer["reward"])
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}")
    messages = to_chat(response["output"])
    rest = {
        key: value for key, value in answer.items() if key not in _NO_FIELD and not _is_of(task, key, value)
    }
    return episode_played_elsewhere(
        task.messages,
        messages,
        reward,
        metrics={key: value for key, value in rest.items() if isinstance(value, int | float)},
        stop_reason=_stop_reason(response),
        counted=usage_from(response.get("usage")),
        model=response.get("model"),
        tools=response.get("tools") or [],
        response=response,
        fields={key: value for key, value in rest.items() if not isinstance(value, int | float)},
    )


def _is_of(task: Task, key: str, value: Any) -> bool:
    """Servers give the row's own fields back with their answer."""
    return key in task.row and bool(task.row[key] == value)


def _stop_reason(response: dict[str, Any]) -> str:
    reason = (response.get("incomplete_details") or {}).get("reason")
    return "length" if reason == "max_output_tokens" else str(reason or "stop")
