"""Policies by kind: `policy: {kind: openai, base_url: ..., model: ...}`.

POLICIES is the one table. A sampler or a module of the user's adds its own kind to it; an object with an
`act` method is taken in place of settings everywhere.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from rollbook.errors import UsageError
from rollbook.policies.openai import OpenAIPolicy, OpenAISettings
from rollbook.policies.scripted import ScriptedPolicy
from rollbook.rollouts.types import Policy
from rollbook.rollouts.user_code import as_written, digest_of_modules, load_module, qualified_name
from rollbook.runs.settings import typed

_SECRET_HEADERS = frozenset({"authorization", "api-key", "x-api-key"})


class ScriptedSettings(msgspec.Struct, kw_only=True):
    script: str | list[Any]  # module:function, path.py:function, or the replies turn by turn
    kind: Literal["scripted"] = "scripted"
    delay: float = 0.0


class PolicyKind(NamedTuple):
    settings: type[msgspec.Struct]
    build: Callable[[Any], Policy]
    describe: Callable[[Any], dict[str, Any]]  # the settings that change the meaning of a result


def build_policy(policy: Mapping[str, Any] | Policy) -> Policy:
    if not isinstance(policy, Mapping):
        return policy
    kind, settings = _read(policy)
    return kind.build(settings)


def describe_policy(policy: Mapping[str, Any] | Policy | None) -> dict[str, Any]:
    """What is compared when a collection is resumed: no address, no time limit."""
    if policy is None:
        return {}
    if not isinstance(policy, Mapping):
        digest = digest_of_modules(type(policy).__module__)
        return {"kind": qualified_name(policy), "source_sha256": digest}
    kind, settings = _read(policy)
    return kind.describe(settings)


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


def _read(policy: Mapping[str, Any]) -> tuple[PolicyKind, Any]:
    refuse_secrets(policy, "policy")
    name = policy.get("kind", "openai")
    if name not in POLICIES:
        near = difflib.get_close_matches(str(name), POLICIES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known kinds: {', '.join(POLICIES)}"
        raise UsageError(f"policy.kind {name!r} is not known; {hint}")
    kind = POLICIES[name]
    return kind, typed(policy, kind.settings, "policy")


def _describe_openai(settings: OpenAISettings) -> dict[str, Any]:
    names = ("kind", "model", "api", "params", "return_tokens")
    return {name: getattr(settings, name) for name in names}


def _build_scripted(settings: ScriptedSettings) -> ScriptedPolicy:
    script = settings.script
    return ScriptedPolicy(script if isinstance(script, list) else _function(script), delay=settings.delay)


def _describe_scripted(settings: ScriptedSettings) -> dict[str, Any]:
    script = settings.script
    described: dict[str, Any] = {"kind": "scripted", "script": script}
    if isinstance(script, str):
        described |= {"script": as_written(script), "source_sha256": _script_digest(script)}
    return described


def _script_digest(script: str) -> str | None:
    """A digest of the file that the name was loaded from, and of the one its function was written in."""
    function = _function(script)
    while isinstance(function, partial):
        function = function.func
    loaded = load_module(script.rpartition(":")[0], f"policy.script {script!r}")
    written_in = inspect.getmodule(function) or loaded
    return digest_of_modules(written_in.__name__, loaded.__name__)


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


POLICIES: dict[str, PolicyKind] = {
    "openai": PolicyKind(OpenAISettings, OpenAIPolicy, _describe_openai),
    "scripted": PolicyKind(ScriptedSettings, _build_scripted, _describe_scripted),
}
