"""A policy and an environment of the caller's, as objects, in place of names in a config.

They stand beside the settings, which have their names: settings go into files and to other processes, and
objects cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rollbook.collect.settings import CollectSettings
from rollbook.errors import UsageError
from rollbook.rollouts.types import EnvironmentProtocol, Policy
from rollbook.rollouts.user_code import blaming, qualified_name


class AgentParts(NamedTuple):
    """What an agent is built of."""

    env: Mapping[str, Any]  # its name may be a class
    policy: Mapping[str, Any] | Policy | None
    max_turns: int


class OwnPieces(NamedTuple):
    """None: it is the one that the settings name."""

    policy: Policy | None = None
    environment: type[EnvironmentProtocol] | None = None

    def agent(self, settings: CollectSettings) -> AgentParts:
        named = settings.agent
        env = named.env if self.environment is None else {**named.env, "name": self.environment}
        return AgentParts(env, named.policy if self.policy is None else self.policy, named.max_turns)

    def check(self, settings: CollectSettings) -> None:
        """Refuse to send objects to other processes."""
        objects = [qualified_name(own) for own in self if own is not None]
        where = f"engine={settings.engine}" if settings.engine == "ray" else f"workers={settings.workers}"
        if objects and (settings.workers > 1 or settings.engine == "ray"):
            raise UsageError(
                f"{where}: other processes cannot be given what was passed as an object: "
                f"{', '.join(objects)}. Leave out workers and engine, or name it in the config: "
                "env: {name: path.py:Class}, policy: {kind: scripted, script: path.py:function}"
            )


def take_own(
    values: Mapping[str, Any],
    policy: Policy | type[Policy] | None = None,
    environment: type[EnvironmentProtocol] | None = None,
) -> tuple[dict[str, Any], OwnPieces]:
    """The values with names in the place of objects, and the objects of the agent that is to run.

    `policy` and `environment` are that agent's, in place of the config's. An environment is enough of an
    agent to be called by its name.
    """
    environment = None if environment is None else _environment(environment, "environment=")
    name = values.get("agent_name")
    if name is None and environment is not None:
        name = environment.__name__
    given = values.get("agents") or {}
    if not isinstance(given, Mapping) or name is None:
        return dict(values), OwnPieces()  # refused with the other settings
    agents = {str(key): agent for key, agent in given.items()}
    chosen, where = agents.get(name, {} if environment is not None else None), f"agents.{name}"
    agents = {key: _plain(agent) for key, agent in agents.items()}
    if not isinstance(chosen, Mapping):
        return {**values, "agents": agents}, OwnPieces()
    own = _own(chosen, where)
    if policy is not None:
        own = own._replace(policy=_policy(policy, "policy="))
    if environment is not None:
        own = own._replace(environment=environment)
    agents[name] = _named(_plain(chosen), own)
    return {**values, "agent_name": name, "agents": agents}, own


def _own(agent: Mapping[str, Any], where: str) -> OwnPieces:
    """The objects in the settings of an agent."""
    env, policy = agent.get("env"), agent.get("policy")
    kind = env.get("name") if isinstance(env, Mapping) else env
    return OwnPieces(
        None if _is_setting(policy) else _policy(policy, f"{where}.policy"),
        None if _is_setting(kind) else _environment(kind, f"{where}.env"),
    )


def _plain(agent: Any) -> Any:
    """The settings of an agent with names in the place of objects."""
    if not isinstance(agent, Mapping):
        return agent
    plain = dict(agent)
    env, policy = agent.get("env"), agent.get("policy")
    if isinstance(env, Mapping) and not _is_setting(env.get("name")):
        plain["env"] = {**env, "name": qualified_name(env["name"])}
    elif not _is_setting(env):
        plain["env"] = {"name": qualified_name(env)}
    if not _is_setting(policy):
        plain["policy"] = {"kind": qualified_name(policy)}
    return plain


def _named(agent: Mapping[str, Any], own: OwnPieces) -> dict[str, Any]:
    named = dict(agent)
    if own.environment is not None:
        env = agent.get("env")
        named["env"] = {
            **(env if isinstance(env, Mapping) else {}),
            "name": qualified_name(own.environment),
        }
    if own.policy is not None:
        named["policy"] = {"kind": qualified_name(own.policy)}
    return named


def _is_setting(value: Any) -> bool:
    """Whether a YAML file could say it."""
    return value is None or isinstance(value, str | int | float | list | Mapping)


def _policy(policy: Any, where: str) -> Policy:
    if isinstance(policy, type):
        with blaming(f"{where}: {qualified_name(policy)} cannot be made without arguments; pass an object:"):
            policy = policy()
    for method in ("act", "close"):
        if not callable(getattr(policy, method, None)):
            raise UsageError(
                f"{where}: {qualified_name(policy)} has no method {method}; a policy has async act(request), "
                "which returns a Completion, and async close()"
            )
    made: Policy = policy
    return made


def _environment(environment: Any, where: str) -> type[EnvironmentProtocol]:
    if not isinstance(environment, type):
        raise UsageError(
            f"{where}: {environment!r:.100} is not a class. One object is one episode, so pass its class; a "
            "function that grades an answer becomes one by the decorator rollbook.envs.single_turn"
        )
    return environment
