"""Agents from a config: `env: {name: ..., settings}` and `policy: {kind: ..., settings}`.

What a name stands for, what settings it takes, and what of them changes the meaning of a result. Where a
server is, how to log in and how long to wait do not; everything else does, the grading code included.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any, Literal

import msgspec

from rollbook.envs.agent import Agent, EnvironmentAgent
from rollbook.envs.base import what_and_where
from rollbook.envs.registry import (
    as_written,
    digest_of_modules,
    environment_class,
    environment_factory,
    load_module,
    source_digest,
)
from rollbook.errors import RollbookError, UsageError
from rollbook.policies.base import Policy
from rollbook.policies.openai import OpenAIPolicy, OpenAISettings
from rollbook.policies.scripted import ScriptedPolicy
from rollbook.runs.settings import typed

GYM = "gym"
VERIFIERS = "verifiers:"
POLICY_KINDS = ("openai", "scripted")
# Settings that say where and how fast, not what.
_OPERATIONAL = frozenset({"base_url", "api_key_env", "headers", "connect_timeout_s", "total_timeout_s"})
_SECRET_HEADERS = frozenset({"authorization", "api-key", "x-api-key"})


class ScriptedSettings(msgspec.Struct, kw_only=True):
    script: str | list[Any]  # module:function, path.py:function, or the replies turn by turn
    kind: Literal["scripted"] = "scripted"
    delay: float = 0.0


class GymSettings(msgspec.Struct, kw_only=True):
    name: Literal["gym"]
    url: str
    connect_timeout_s: float = 30.0
    total_timeout_s: float | None = 3600.0


def build_agent(
    env: Mapping[str, Any],
    policy: Mapping[str, Any] | None = None,
    *,
    max_turns: int = 64,
    wrap_policy: Callable[[Policy], Policy] | None = None,
) -> Agent:
    """The agent of a config; `wrap_policy` puts a limiter, a recorder or the like around its policy."""
    if max_turns < 1:
        raise UsageError(f"max_turns is {max_turns}; it must be at least 1")
    name, settings = _named(env)
    refuse_secrets(env, "env")
    refuse_secrets(policy or {}, "policy")
    if wrap_policy is not None and (name == GYM or name.startswith(VERIFIERS)):
        raise UsageError(
            f"env {name!r} sends its requests itself, so requests_per_minute and tokens_per_minute cannot "
            "be kept; leave them out and limit num_samples_in_parallel"
        )
    if name == GYM:
        from rollbook.envs.gym_bridge import GymAgent

        if policy is not None:
            raise UsageError("env 'gym' is an agent server with a policy of its own; leave out policy")
        gym = typed(env, GymSettings, "env")
        return GymAgent(gym.url, connect_timeout_s=gym.connect_timeout_s, total_timeout_s=gym.total_timeout_s)
    if policy is None:
        raise UsageError(
            f"env {name!r} needs a policy; write policy: {{kind: openai, base_url: ..., model: ...}}"
        )
    if name.startswith(VERIFIERS):
        from rollbook.envs.verifiers_bridge import VerifiersAgent

        if _kind(policy) != "openai":
            raise UsageError(f"env {name!r} asks an endpoint itself; it needs a policy of kind openai")
        asked = typed(policy, OpenAISettings, "policy")
        return VerifiersAgent(name.removeprefix(VERIFIERS), settings, asked)
    factory = environment_factory(name, settings)
    built = build_policy(policy)
    return EnvironmentAgent(factory, wrap_policy(built) if wrap_policy else built, max_turns=max_turns)


def import_policy(policy: Mapping[str, Any]) -> None:
    """Import now what `build_policy` will need: a client for HTTP takes its time."""
    if policy.get("kind", "openai") == "openai":
        import_module("rollbook.policies.http")


def build_policy(policy: Mapping[str, Any]) -> Policy:
    refuse_secrets(policy, "policy")
    if _kind(policy) == "openai":
        return OpenAIPolicy(typed(policy, OpenAISettings, "policy"))
    settings = typed(policy, ScriptedSettings, "policy")
    if isinstance(settings.script, list):
        return ScriptedPolicy(settings.script, delay=settings.delay)
    return ScriptedPolicy(_function(settings.script), delay=settings.delay)


def make_tasks(env: Mapping[str, Any], count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Rows of the environment's own making, for a collection without an input file."""
    name, settings = _named(env)
    if name.startswith(VERIFIERS):
        from rollbook.envs.verifiers_bridge import verifiers_tasks

        return verifiers_tasks(name.removeprefix(VERIFIERS), settings, count)
    if name == GYM:
        raise UsageError("env 'gym' makes no tasks of its own; give input_jsonl_fpath=...")
    kind = environment_class(name)
    try:
        rows = islice(kind.tasks(count, seed, **settings), count)
    except NotImplementedError as error:
        raise UsageError(f"env {name!r}: {error}; give input_jsonl_fpath=...") from None
    except (RollbookError, KeyboardInterrupt):
        raise
    except BaseException as error:  # an exit or a panic of somebody's code, too
        raise UsageError(f"env {name!r}: its tasks() failed: {what_and_where(error)}") from error
    return _named_rows(name, rows)


def _named_rows(name: str, rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same rows; what making one of them raises is said of the environment."""
    try:
        yield from rows
    except (RollbookError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise UsageError(f"env {name!r}: its tasks() failed: {what_and_where(error)}") from error


def describe_agent(
    env: Mapping[str, Any], policy: Mapping[str, Any] | None = None, *, max_turns: int = 64
) -> dict[str, Any]:
    """Everything that changes the meaning of a result, to be compared when a collection is resumed."""
    name, settings = _named(env)
    if name == GYM:
        return {"env": {"name": GYM}}
    described: dict[str, Any] = {"name": as_written(name), **_without_operation(settings)}
    if name.startswith(VERIFIERS):
        from rollbook.envs.verifiers_bridge import versions_of

        described["versions"] = versions_of(name.removeprefix(VERIFIERS))
    else:
        described["source_sha256"] = source_digest(name)
    return {"env": described, "policy": _describe_policy(policy or {}), "max_turns": max_turns}


def refuse_secrets(values: Mapping[str, Any], where: str) -> None:
    """Keys come from environment variables; in a file they would end up in records and repositories."""
    for key, value in values.items():
        path = f"{where}.{key}"
        if key == "api_key":
            raise UsageError(
                f"{path}: a key does not belong in a file; name the variable that holds it: "
                f"{where}.api_key_env: MY_API_KEY"
            )
        if key == "headers" and isinstance(value, Mapping):
            for header in value:
                if str(header).casefold() in _SECRET_HEADERS:
                    raise UsageError(
                        f"{path}.{header}: a key does not belong in a file; use {where}.api_key_env"
                    )
        elif isinstance(value, Mapping):
            refuse_secrets(value, path)


def _describe_policy(policy: Mapping[str, Any]) -> dict[str, Any]:
    if not policy:
        return {}
    if _kind(policy) == "openai":
        settings = typed(policy, OpenAISettings, "policy")
        names = ("kind", "model", "api", "params", "return_tokens")
        return {name: getattr(settings, name) for name in names}
    scripted = typed(policy, ScriptedSettings, "policy")
    described: dict[str, Any] = {"kind": "scripted", "script": scripted.script}
    if isinstance(scripted.script, str):
        described["script"] = as_written(scripted.script)
        described["source_sha256"] = _script_digest(scripted.script)
    return described


def _script_digest(script: str) -> str | None:
    """Of the file that the name was loaded from, and of the one that its function was written in."""
    function = _function(script)
    while isinstance(function, partial):
        function = function.func
    loaded = load_module(script.rpartition(":")[0], f"policy.script {script!r}")
    written_in = inspect.getmodule(function) or loaded
    return digest_of_modules(written_in.__name__, loaded.__name__)


def _without_operation(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of the settings that are themselves an endpoint's (a judge), what it is asked and not where."""
    kept: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and "base_url" in value:
            kept[key] = {name: item for name, item in value.items() if name not in _OPERATIONAL}
        else:
            kept[key] = value
    return kept


def _named(env: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    name = env.get("name")
    if not isinstance(name, str) or not name:
        raise UsageError("env.name is missing; write env: {name: arithmetic}")
    return name, {key: value for key, value in env.items() if key != "name"}


def _kind(policy: Mapping[str, Any]) -> str:
    kind = policy.get("kind", "openai")
    if kind not in POLICY_KINDS:
        near = difflib.get_close_matches(str(kind), POLICY_KINDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known kinds: {', '.join(POLICY_KINDS)}"
        raise UsageError(f"policy.kind {kind!r} is not known; {hint}")
    return str(kind)


def _function(script: str) -> Callable[..., Any]:
    place, _, name = script.rpartition(":")
    if not place or not name:
        raise UsageError(
            f"policy.script {script!r} names no function; write module:function or path.py:function, "
            "or the replies as a list"
        )
    found = getattr(load_module(place, f"policy.script {as_written(script)!r}"), name, None)
    if not callable(found):
        raise UsageError(f"policy.script {script!r}: {place} has no function {name}")
    function: Callable[..., Any] = found
    return function
