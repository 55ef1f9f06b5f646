"""Agents from a config: `env: {name: ..., settings}` and `policy: {kind: ..., settings}`.

An agent turns a task into an episode: an environment and a policy, or a system that brings both. AGENTS is
the one table of them. Each says what settings it takes and which of them change the meaning of a result:
where a server is, how to log in and how long to wait do not; everything else does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Protocol

from rollbook.envs.source import EnvironmentSource, environment_name
from rollbook.errors import UsageError
from rollbook.policies.registry import build_policy, describe_policy, refuse_secrets
from rollbook.rollouts.episode import call, play
from rollbook.rollouts.types import Agent, Episode, Policy, Task


class AgentKind(Protocol):
    """What a module in AGENTS defines, and an object that is put there has."""

    def build(
        self,
        env: Mapping[str, Any],
        policy: Any,
        *,
        max_turns: int,
        timeout_s: float | None,
    ) -> Agent: ...

    def tasks(self, env: Mapping[str, Any], count: int, seed: int) -> Iterator[dict[str, Any]]: ...

    def describe(self, env: Mapping[str, Any], policy: Any, *, max_turns: int) -> dict[str, Any]: ...


# By the env's name, or what is before its colon. Others are environments that are played here.
AGENTS: dict[str, str | AgentKind] = {
    "gym": "rollbook.envs.gym_bridge",
    "verifiers": "rollbook.envs.verifiers_bridge",
}


def build_agent(
    env: Mapping[str, Any],
    policy: Mapping[str, Any] | Policy | None = None,
    *,
    max_turns: int = 64,
    timeout_s: float | None = None,
    call_timeout_s: float | None = None,
) -> Agent:
    """The agent of a config. `timeout_s` limits an episode, `call_timeout_s` each call of an environment or
    the policy."""
    if max_turns < 1:
        raise UsageError(f"max_turns is {max_turns}; it must be at least 1")
    refuse_secrets(env, "env")
    if isinstance(policy, Mapping):
        refuse_secrets(policy, "policy")
    kind = _kind(env)
    if call_timeout_s is None:
        return kind.build(env, policy, max_turns=max_turns, timeout_s=timeout_s)
    if kind is not _PLAYED:
        raise UsageError(
            f"env {environment_name(env)!r} plays its episodes itself, so its calls cannot be limited by "
            "call_timeout_s; leave it out, rollout_timeout_s limits a whole rollout"
        )
    return _PLAYED.build(env, policy, max_turns=max_turns, timeout_s=timeout_s, call_timeout_s=call_timeout_s)


def make_tasks(env: Mapping[str, Any], count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Rows of the environment's own making, for a collection without an input file."""
    return _kind(env).tasks(env, count, seed)


def describe_agent(
    env: Mapping[str, Any], policy: Mapping[str, Any] | Policy | None = None, *, max_turns: int = 64
) -> dict[str, Any]:
    """Everything that changes the meaning of a result, to be compared when a collection is resumed."""
    return _kind(env).describe(env, policy, max_turns=max_turns)


class EnvironmentAgent:
    """A policy acting in an environment."""

    def __init__(
        self,
        source: EnvironmentSource,
        policy: Policy,
        *,
        max_turns: int = 64,
        timeout_s: float | None = None,
        call_timeout_s: float | None = None,
    ) -> None:
        self._source, self._policy, self._max_turns = source, policy, max_turns
        self._timeout_s, self._call_timeout_s = timeout_s, call_timeout_s

    async def run(self, task: Task) -> Episode:
        environment = await call(self._source.make, kind=self._source.kind)
        task = self._source.with_system(task)
        return await play(
            environment,
            self._policy,
            task,
            max_turns=self._max_turns,
            timeout_s=self._timeout_s,
            call_timeout_s=self._call_timeout_s,
        )

    async def close(self) -> None:
        try:
            await self._policy.close()
        finally:
            await self._source.close()


class _Played:
    """Environments that are played here, turn by turn."""

    def build(
        self,
        env: Mapping[str, Any],
        policy: Any,
        *,
        max_turns: int,
        timeout_s: float | None,
        call_timeout_s: float | None = None,
    ) -> Agent:
        source = EnvironmentSource(env)
        if policy is None:
            raise UsageError(
                f"env {source.name!r} needs a policy; "
                "write policy: {kind: openai, base_url: ..., model: ...}"
            )
        built = build_policy(policy)
        return EnvironmentAgent(
            source.open(), built, max_turns=max_turns, timeout_s=timeout_s, call_timeout_s=call_timeout_s
        )

    def tasks(self, env: Mapping[str, Any], count: int, seed: int) -> Iterator[dict[str, Any]]:
        return EnvironmentSource(env).tasks(count, seed)

    def describe(self, env: Mapping[str, Any], policy: Any, *, max_turns: int) -> dict[str, Any]:
        described = EnvironmentSource(env).describe()
        return {"env": described, "policy": describe_policy(policy), "max_turns": max_turns}


_PLAYED = _Played()


def _kind(env: Mapping[str, Any]) -> AgentKind:
    name = environment_name(env)
    kind = AGENTS.get(name.partition(":")[0], _PLAYED) if isinstance(name, str) else _PLAYED
    if isinstance(kind, str):
        module: Any = import_module(kind)
        return module  # type: ignore[no-any-return]
    return kind
