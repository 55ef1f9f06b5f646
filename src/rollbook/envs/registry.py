"""Environments by name: the built-in ones, `module:Class`, or `path.py:Class`; a class itself will do, too.

ENVIRONMENTS is the one table; a module of the user's may add its own names to it.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from rollbook.envs.base import Environment, SingleTurn
from rollbook.errors import UsageError
from rollbook.rollouts.user_code import as_written, blaming, digest_of_modules, load_module

ENVIRONMENTS: dict[str, str | type[Environment]] = {
    "arithmetic": "rollbook.envs.arithmetic:Arithmetic",
    "calculator": "rollbook.envs.calculator:Calculator",
    "dataset": "rollbook.envs.dataset:Dataset",
}
_PLAY_THEMSELVES = ("gym", "verifiers")


def environment_class(name: str | type[Environment]) -> type[Environment]:
    entry = ENVIRONMENTS.get(name, name) if isinstance(name, str) else name
    if not isinstance(entry, str):
        return _checked(entry, getattr(entry, "__name__", repr(entry)))
    if entry.partition(":")[0] in _PLAY_THEMSELVES:
        raise UsageError(
            f"env.name {name!r} plays its episodes itself and asks its endpoint itself, so it can only be "
            "collected with; name a built-in environment, module:Class or path.py:Class"
        )
    place, _, attribute = entry.rpartition(":")
    if not place or not attribute:
        near = difflib.get_close_matches(entry, ENVIRONMENTS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"built in: {', '.join(ENVIRONMENTS)}"
        raise UsageError(f"env.name {name!r} is not known; {hint} Your own: module:Class or path.py:Class")
    module = load_module(place, f"env.name {as_written(entry)!r}")
    found = getattr(module, attribute, None)
    if found is None:
        names = [key for key, value in vars(module).items() if _is_environment(value)]
        raise UsageError(
            f"env.name {name!r}: {place} has no {attribute}; it has: {', '.join(names) or 'none'}"
        )
    return _checked(found, attribute)


def describe_code(name: str | type[Environment]) -> dict[str, Any]:
    """What tells whether the code that grades has changed: a version of ours, a digest of the user's."""
    kind = environment_class(name)
    if kind.version is not None and kind.__module__.startswith("rollbook."):
        entry = ENVIRONMENTS.get(name) if isinstance(name, str) else kind
        if entry is kind or (isinstance(entry, str) and entry.startswith("rollbook.")):
            return {"version": kind.version}
    modules = [kind.__module__]
    if isinstance(name, str) and isinstance(entry := ENVIRONMENTS.get(name, name), str):
        # The file that was named, which may only import the class, and change it.
        modules.append(load_module(entry.rpartition(":")[0], f"env.name {name!r}").__name__)
    return {"source_sha256": digest_of_modules(*modules, *kind.sources)}


def check_settings(
    kind: type[Environment], settings: Mapping[str, Any], name: str, others: Sequence[str] = ()
) -> None:
    """Refuse wrong settings before the first row. `others` are keys that a job reads, to be suggested."""
    _refuse_unknown(kind, settings, name, others)
    try:
        with blaming(f"env {name!r} cannot be made:"):
            kind(**settings)
            if issubclass(kind, SingleTurn):
                _refuse_other_parameters(kind, name)
                inspect.signature(kind.grader).bind(None, "", **settings)
    except UsageError as error:
        if isinstance(error.__cause__, TypeError):
            raise UsageError(
                f"env {name!r} does not take these settings ({error.__cause__}); it takes: "
                f"{', '.join(settings_of(kind)) or 'none'}"
            ) from error.__cause__
        raise


def _refuse_unknown(
    kind: type[Environment], settings: Mapping[str, Any], name: str, others: Sequence[str]
) -> None:
    signature = inspect.signature(kind.grader if issubclass(kind, SingleTurn) else kind)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        return  # it says itself what it does not know
    known = settings_of(kind)
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, [*known, *others], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"{name} takes: {', '.join(known) or 'none'}"
            raise UsageError(f"unknown key 'env.{key}'; {hint}")


def settings_of(kind: type[Environment]) -> list[str]:
    """The names of the settings that an environment takes."""
    if issubclass(kind, SingleTurn):
        return list(inspect.signature(kind.grader).parameters)[2:]
    return list(inspect.signature(kind).parameters)


def _refuse_other_parameters(kind: type[SingleTurn], name: str) -> None:
    signature = inspect.signature(kind.grader)
    try:
        signature.bind_partial(None, "")
    except TypeError:
        raise UsageError(
            f"env {name!r}: a grading function takes (task, answer), and this one {signature}; "
            "the row is task.row"
        ) from None


def _checked(found: Any, name: str) -> type[Environment]:
    if not _is_environment(found) and _has_methods(found):
        return _as_environment(found)
    if not _is_environment(found):
        raise UsageError(
            f"env.name: {name} is not an Environment; subclass rollbook.envs.Environment or decorate a "
            "grading function with rollbook.envs.single_turn"
        )
    environment: type[Environment] = found
    return environment


def _has_methods(value: Any) -> bool:
    """Whether it is a class of episodes that has what `EnvironmentProtocol` asks for."""
    return isinstance(value, type) and all(callable(getattr(value, name, None)) for name in ("start", "step"))


@cache
def _as_environment(kind: type) -> type[Environment]:
    """The class with all else that an Environment has."""
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind, Environment), named)


def _is_environment(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Environment)
