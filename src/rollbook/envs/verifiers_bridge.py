"""Environments of the package `verifiers` as agents: `verifiers:NAME`.

Such an environment brings its own loop and speaks to the endpoint itself, so it needs an `openai` policy
for where and what to ask, and no environment of ours. It is a taskset (`verifiers.v1`, since 0.4).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import os
from collections.abc import Iterator, Mapping
from typing import Any

from rollbook.errors import UsageError
from rollbook.policies.conversion import chat_params
from rollbook.policies.http import bearer, check_timeouts, checked_url, kind_of_status
from rollbook.policies.openai import OpenAISettings
from rollbook.policies.registry import describe_policy
from rollbook.records.turns import Usage
from rollbook.rollouts.episode import episode_played_elsewhere, time_limit
from rollbook.rollouts.types import Episode, FailureKind, Message, RolloutFailure, Task
from rollbook.rollouts.user_code import search_working_directory
from rollbook.runs.settings import typed

PREFIX = "verifiers:"
ROW_KEY = "verifiers_task"  # where a row of ours holds the package's own


def build(env: Mapping[str, Any], policy: Any, *, max_turns: int, timeout_s: float | None) -> VerifiersAgent:
    if policy is None:
        raise UsageError(f"env {env['name']!r} needs a policy of kind openai, whose endpoint it asks")
    if not isinstance(policy, Mapping) or policy.get("kind", "openai") != "openai":
        raise UsageError(f"env {env['name']!r} asks an endpoint itself; it needs a policy of kind openai")
    openai = typed(policy, OpenAISettings, "policy")
    return VerifiersAgent(_name(env), _settings(env), openai, timeout_s=timeout_s)


def tasks(env: Mapping[str, Any], count: int, seed: int) -> Iterator[dict[str, Any]]:
    """The first rows of its dataset, in its own order; each holds the package's row for `run`."""
    name = _name(env)
    for place, (prompt, row) in zip(range(count), _load(name, _settings(env)).rows(), strict=False):
        yield {
            "id": f"{name}-{place:06d}",
            "responses_create_params": {"input": prompt},
            ROW_KEY: row,
        }


def describe(env: Mapping[str, Any], policy: Any, *, max_turns: int) -> dict[str, Any]:
    described = {"name": env["name"], **_settings(env), "versions": versions_of(_name(env))}
    return {"env": described, "policy": describe_policy(policy), "max_turns": max_turns}


def _name(env: Mapping[str, Any]) -> str:
    return str(env["name"]).removeprefix(PREFIX)


def _settings(env: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in env.items() if key != "name"}


class VerifiersAgent:
    """`name` is the environment's; `settings` are its arguments, or the fields of its config."""

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any],
        policy: OpenAISettings,
        *,
        timeout_s: float | None = None,
    ) -> None:
        checked_url(policy.base_url, "policy.base_url")
        bearer(policy.api_key_env, "policy.api_key_env")
        check_timeouts(policy.connect_timeout_s, policy.total_timeout_s, "policy")
        self._environment = _load(name, settings)
        self._environment.check()
        self._policy, self._timeout_s = policy, timeout_s

    async def run(self, task: Task) -> Episode:
        row = task.row.get(ROW_KEY)
        if not isinstance(row, dict):
            raise RolloutFailure(
                FailureKind.ENVIRONMENT,
                f"the row has no {ROW_KEY!r}; without input_jsonl_fpath the dataset's own rows are used",
            )
        own = {key: value for key, value in task.params.items() if value is not None}
        sampling = chat_params({**self._policy.params, **own})
        async with time_limit(self._timeout_s, lambda: "the episode of verifiers"):
            return await self._environment.play(row, self._policy, sampling)

    async def close(self) -> None:
        await self._environment.close()


def versions_of(name: str) -> dict[str, str]:
    """The versions of the package and of the environment, as far as they are installed as packages."""
    found = {}
    for package in ("verifiers", _package_of(name)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _load(name: str, settings: Mapping[str, Any]) -> _Taskset:
    # The bars of datasets are drawn with carriage returns, also into a log; who wants them sets it to 0.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    try:
        importlib.import_module("verifiers.v1")
    except ModuleNotFoundError:
        raise UsageError(
            f"env.name '{PREFIX}{name}' needs the package verifiers; type: pip install 'verifiers>=0.4'"
        ) from None
    search_working_directory()
    try:
        return _Taskset(name, settings)
    except ModuleNotFoundError as error:
        raise UsageError(f"env.name '{PREFIX}{name}': {error}") from None
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise UsageError(f"env.name '{PREFIX}{name}' cannot be loaded: {error}") from error


def _package_of(name: str) -> str:
    """`owner/name@version` on the hub is the package `name`."""
    return name.rsplit("/", 1)[-1].split("@", 1)[0]


class _Taskset:
    """A taskset, an agent's harness, an episode of traces."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self._api = importlib.import_module("verifiers.v1")
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        taskset = {"id": name, **settings.get("taskset", {})}
        config = loaders.resolve_env_config({**settings, "taskset": taskset})
        self._env = loaders.load_environment(config)
        self._serving: asyncio.Task[None] | None = None
        self._ready, self._over = asyncio.Event(), asyncio.Event()

    def check(self) -> None:
        """Its default runtime is in a cloud, and without a login there it would end the process."""
        runtimes = [getattr(seat, "runtime", None) for _, seat in self._env.config]
        if not any(getattr(runtime, "type", None) == "prime" for runtime in runtimes):
            return
        try:
            importlib.import_module("verifiers.v1.utils.prime").ensure_prime_auth()
        except SystemExit as error:
            raise UsageError(
                f"verifiers: {error}; to run here instead, set env.agent: {{runtime: {{type: subprocess}}}}"
            ) from None

    def rows(self) -> Iterator[tuple[list[Message], dict[str, Any]]]:
        for task in self._env.taskset:
            data = task.data
            system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
            prompt = data.model_dump(mode="json", include={"prompt"})["prompt"]
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
            yield [*system, *map(_plain_message, messages)], data.model_dump(mode="json", exclude_none=True)

    async def play(self, row: dict[str, Any], policy: OpenAISettings, sampling: dict[str, Any]) -> Episode:
        await self._serve()
        kind = type(self._env.taskset).task_type()
        task = kind(kind.data_type().model_validate(row), self._env.taskset.config.task)
        client = self._api.EvalClientConfig(
            base_url=policy.base_url, api_key_var=policy.api_key_env or "NO_KEY", headers=policy.headers
        )
        context = self._api.ModelContext(
            client=client, model=policy.model, sampling=self._api.SamplingConfig(**sampling)
        )
        episode = await self._env.run_episode(task, context)
        if not episode.ok:
            raise _trace_failure(episode)
        return _from_traces(episode)

    async def close(self) -> None:
        self._over.set()
        if self._serving is not None:
            await asyncio.wait({self._serving})

    async def _serve(self) -> None:
        """Its servers are up from the first episode to the last, opened and closed by one task."""
        if self._ready.is_set():
            return
        if self._serving is None:
            self._serving = asyncio.create_task(self._hold())
        waiting = asyncio.create_task(self._ready.wait())
        await asyncio.wait({waiting, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not self._ready.is_set():
            await self._serving  # raises what kept the servers from starting

    async def _hold(self) -> None:
        async with self._env.serving():
            self._ready.set()
            await self._over.wait()


def _from_traces(episode: Any) -> Episode:
    """The trace that trains the policy; of several (an ensemble, a judge), the first."""
    trace = next((trace for trace in episode.traces if trace.agent.trainable), episode.traces[0])
    messages = [_plain_message(message.model_dump(exclude_none=True)) for message in trace.messages]
    first = next((at for at, node in enumerate(trace.branches[-1].nodes) if node.sampled), len(messages))
    prompt, reply = messages[:first], messages[first:]
    return episode_played_elsewhere(
        prompt,
        reply,
        trace.reward,
        metrics={
            **{name: reward.score for name, reward in trace.rewards.items() if reward is not None},
            **{name: value for name, value in trace.metrics.items() if value is not None},
        },
        stop_reason="length" if trace.is_truncated else trace.stop_condition or "stop",
        counted=_usage(trace.usage),
        model=trace.calls[-1].model if trace.calls else None,
        tools=[_tool(tool) for tool in trace.tools],
    )


def _usage(used: Any) -> Usage | None:
    if used is None or not (used.input_tokens or used.completion_tokens):
        return None
    return Usage(
        input_tokens=used.input_tokens,
        output_tokens=used.completion_tokens,
        reasoning_tokens=used.reasoning_tokens or 0,
        cached_tokens=used.cached_input_tokens or 0,
    )


def _trace_failure(episode: Any) -> RolloutFailure:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if episode.is_timeout or any(trace.is_timeout for trace in episode.traces):
        return RolloutFailure(FailureKind.TIMEOUT, "verifiers: a time limit of the environment passed")
    if not errors:
        return RolloutFailure(FailureKind.ENVIRONMENT, "verifiers: the episode failed without saying why")
    error = errors[-1]
    kind = kind_of_status(error.status_code) if error.status_code else FailureKind.ENVIRONMENT
    return RolloutFailure(kind, f"verifiers: {error.type}: {error.message}", status=error.status_code)


def _plain_message(message: Any) -> Message:
    """A chat message as everywhere else: tool calls nested, nothing that is None."""
    given = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
    plain = {key: value for key, value in given.items() if value is not None}
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [_nested(call) for call in calls]
    return plain


def _nested(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call in chat's form."""
    if "function" in call:
        return call
    function = {"name": call.get("name"), "arguments": call.get("arguments")}
    return {"id": call.get("id"), "type": "function", "function": function}


def _tool(tool: Any) -> dict[str, Any]:
    given = tool if isinstance(tool, dict) else tool.model_dump(exclude_none=True)
    return {"type": "function", **given}
