"""Typed settings of a job: a YAML file, then `key=value` words, checked against a msgspec Struct.

Unknown keys are refused with the nearest known name; a value of the wrong type is refused with its key and
what it must be. Words are read as YAML, so `limit=null`, `tags=[a,b]` and `lr=1e-5` mean what they look
like; dots descend (`policy.model=m`), and a leading `+` or `++`, which other tools want, changes nothing.
"""

from __future__ import annotations

import difflib
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from rollbook.errors import BadFileError, UsageError
from rollbook.records.redact import remember_secrets

S = TypeVar("S", bound=msgspec.Struct)

_WITH_KEYS = (Mapping, msgspec.Struct)
_FLOAT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+")

_BOUND = re.compile(r"Expected `(?:int|float)` (>=|>|<=|<) ([^ ]*?)(?:\.0)?")  # as msgspec says it
_MISSING = re.compile(r"Object missing required field `([^`]*)`")
_EXPECTED = re.compile(r"Expected `([^`]*)`, got `([^`]*)`")
# What people call the types of JSON, in YAML.
_TYPES = {
    "object": "a mapping", "array": "a list", "str": "text", "int": "a whole number", "float": "a number",
    "bool": "true or false", "null": "nothing",
}  # fmt: skip
_BOUNDS = {">=": "at least", ">": "more than", "<=": "at most", "<": "less than"}


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that must hold a mapping. Its secrets are redacted from now on in whatever is written."""
    try:
        value = yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UsageError(
            f"{path} is a directory; name a file of settings in it, such as config.yaml"
        ) from None
    except OSError as error:
        raise BadFileError(path, f"cannot be read: {error.strerror or error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise BadFileError(
            path, f"{where}not valid YAML ({getattr(error, 'problem', None) or error})"
        ) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadFileError(path, f"must hold a mapping of settings, not {type(value).__name__}")
    remember_secrets(value)
    return {str(key): _with_floats(item) for key, item in value.items()}


def parse_words(words: Sequence[str], *, texts: Sequence[str] = ()) -> dict[str, Any]:
    """`["a.b=1", "+c=x"]` as `{"a": {"b": 1}, "c": "x"}`; `texts` are keys whose value is text or null."""
    merged: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.lstrip("+").partition("=")
        if not equals or not key:
            raise UsageError(f"{word!r} is not a setting; write key=value")
        try:
            value = _with_floats(yaml.safe_load(text)) if text else None
        except yaml.YAMLError:
            value = text
        if key in texts and not isinstance(value, str | None):
            value = text
        _set(merged, key.split("."), value, word)
    remember_secrets(merged)
    return merged


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, mapping by mapping."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(below, value)
        else:
            merged[key] = value
    return merged


def typed(values: Mapping[str, Any], kind: type[S], where: str = "") -> S:
    """The values as a Struct, or an error that names the key and what to type."""
    refuse_unknown(values, kind, where)
    _refuse_infinite(values, where)
    try:
        return msgspec.convert(dict(values), kind)
    except msgspec.ValidationError as error:
        raise UsageError(_readable(str(error), where) + _hint(str(error), kind)) from None


def refuse_unknown(values: Mapping[str, Any], kind: type[msgspec.Struct], where: str = "") -> None:
    known = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in values.items():
        path = f"{where}.{key}" if where else str(key)
        if key not in known:
            near = _nearest(str(key), value, known)
            hint = f"did you mean {near!r}?" if near else f"known keys: {', '.join(sorted(known))}"
            raise UsageError(f"unknown key {path!r}; {hint}")
        structs = _structs_in(known[key])
        if len(structs) > 1:
            _refuse_unknown_kind(value, structs, path)
        elif structs and isinstance(value, Mapping):
            refuse_unknown(value, structs[0], path)
        elif isinstance(value, list) and (structs := _structs_in(_item_of(known[key]))):
            for number, item in enumerate(value):
                if isinstance(item, Mapping):
                    refuse_unknown(item, structs[0], f"{path}[{number}]")


def _nearest(key: str, value: Any, known: Mapping[str, Any]) -> str | None:
    """The key that was meant. A word is no value of one that holds others: `agent=w` is agent_name."""
    fitting = [name for name in known if isinstance(value, Mapping) or not _holds_keys(known[name])]
    begun = [name for name in fitting if name.startswith(f"{key}_")]
    near = difflib.get_close_matches(key, fitting, n=1) or difflib.get_close_matches(key, known, n=1)
    return begun[0] if len(begun) == 1 else near[0] if near else None


def _holds_keys(kind: Any) -> bool:
    parts = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else [kind]
    origins = [typing.get_origin(part) or part for part in parts if part is not types.NoneType]
    return all(isinstance(origin, type) and issubclass(origin, _WITH_KEYS) for origin in origins)


def _refuse_unknown_kind(value: Any, structs: Sequence[type[msgspec.Struct]], path: str) -> None:
    """The same for a value that is of one of several kinds, such as a loss, and says of which."""
    key = structs[0].__struct_config__.tag_field or "type"
    kinds = {str(kind.__struct_config__.tag): kind for kind in structs}
    name = value.get(key) if isinstance(value, Mapping) else value
    if str(name) not in kinds:
        found = f"{path}.{key} is missing" if name is None else f"unknown {path} {name!r}"
        near = difflib.get_close_matches(str(name), kinds, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of: {', '.join(kinds)}"
        raise UsageError(f"{found}; {hint}")
    if not isinstance(value, Mapping):
        raise UsageError(f"{path} must be a mapping; write {path}: {{{key}: {name}}}")
    rest = {own: item for own, item in value.items() if own != key}
    refuse_unknown(rest, kinds[str(name)], path)


def _refuse_infinite(value: Any, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{where} must be a finite number, not {value}")
    items = (
        value.items() if isinstance(value, Mapping) else enumerate(value if isinstance(value, list) else ())
    )
    for key, item in items:
        _refuse_infinite(item, f"{where}.{key}".lstrip("."))


def _structs_in(annotation: Any) -> list[type[msgspec.Struct]]:
    """The Structs in `X`, `X | None` or `X | Y`."""
    candidates = [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        candidates = list(typing.get_args(annotation))
    return [item for item in candidates if isinstance(item, type) and issubclass(item, msgspec.Struct)]


def _hint(error: str, kind: type[msgspec.Struct]) -> str:
    """What may stand at the place that an error names: one of some words, or a mapping of these keys."""
    found = _type_at(error.partition(" - at `$")[2].rstrip("`"), kind)
    candidates = [found, *typing.get_args(found)]
    literals = [typing.get_args(item) for item in candidates if typing.get_origin(item) is typing.Literal]
    if literals:
        return f"; choose one of: {', '.join(map(str, literals[0]))}"
    structs = _structs_in(found)
    if "got `object`" not in error and len(structs) == 1 and _EXPECTED.match(error):
        return (
            f"; its keys are {', '.join(field.encode_name for field in msgspec.structs.fields(structs[0]))}"
        )
    return ""


def _type_at(place: str, kind: type[msgspec.Struct]) -> Any:
    """The annotation of a key below a Struct, such as `.evals[0].every`."""
    found: Any = kind
    for name in re.findall(r"\.([^.\[]+)|\[", place):
        structs = _structs_in(found)
        if not name:
            found = _item_of(found)
        elif len(structs) == 1:
            found = {field.encode_name: field.type for field in msgspec.structs.fields(structs[0])}.get(name)
        else:
            found = None
    return found


def _item_of(annotation: Any) -> Any:
    """`X` of `list[X]`."""
    return next(iter(typing.get_args(annotation)), None) if typing.get_origin(annotation) is list else None


def _set(target: dict[str, Any], path: list[str], value: Any, word: str) -> None:
    for key in path[:-1]:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise UsageError(f"{word!r} sets a key below {key!r}, which another word set to a plain value")
    target[path[-1]] = value


def _with_floats(value: Any) -> Any:
    """YAML 1.1 reads `1e-5` as text; everybody who writes a learning rate means the number."""
    if isinstance(value, str):
        return float(value) if _FLOAT.fullmatch(value) else value
    if isinstance(value, dict):
        return {key: _with_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    return value


def _readable(error: str, where: str) -> str:
    message, _, place = error.partition(" - at `$")
    if bound := _BOUND.fullmatch(message):
        message = f"must be {_BOUNDS[bound[1]]} {bound[2]}"
    elif missing := _MISSING.fullmatch(message):
        message = f"{missing[1]} is missing"
    elif mismatch := _EXPECTED.fullmatch(message):
        wanted, got = (
            " or ".join(_TYPES.get(name, name) for name in found.split(" | ")) for found in mismatch.groups()
        )
        got = "one with a fraction" if got == "a number" and "whole number" in wanted else got
        message = f"must be {wanted}, not {got}"
    key = place.rstrip("`").lstrip(".")
    full = ".".join(part for part in (where, key) if part)
    return f"{full}: {message[:1].lower()}{message[1:]}" if full else message
