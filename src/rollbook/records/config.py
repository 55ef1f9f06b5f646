"""config.json: the whole configuration of a run, whatever kind of object it was.

Every object says its type (`__type__` first), functions stand by their qualified name, secrets are redacted,
and NaN and Inf, which JSON does not have, are null plus an entry in the top-level `nonfinite` map. Nothing in
a config can stop a run: no property is evaluated, and what cannot be read becomes a note in its place. Only
two keys that would be written as the same string are an error.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import json
import math
import re
import sys
import types
import uuid
from collections.abc import Iterable, Iterator, Mapping, MappingView
from pathlib import Path, PurePath
from typing import Any

from rollbook.errors import BadFileError, RollbookError, UsageError
from rollbook.records.atomic import write_atomic
from rollbook.records.plain import cleaned_text
from rollbook.records.redact import REDACTED, redact_tree

TYPE_KEY = "__type__"
_NONFINITE = "nonfinite"
_MAX_DEPTH, _MAX_VALUES, _MAX_UNDECLARED = 64, 200_000, 4
_MAX_ARRAY, _MAX_BYTES, _MAX_REPR = 100, 256, 500

_KeyPath = tuple[str | int, ...]
_PLAIN_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, types.MappingProxyType)
_SEQUENCES = (list, tuple, collections.deque, MappingView)
_AS_TEXT = (PurePath, decimal.Decimal, uuid.UUID)
_KEYS = (str, bytes, int, float, tuple, type, types.FunctionType, types.NoneType, datetime.date, *_AS_TEXT)
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
# What dataclasses, pydantic, msgspec, attrs and chz leave on a class that declares its fields.
_MARKERS = "__dataclass_fields__ __pydantic_fields__ __struct_fields__ __attrs_attrs__ __chz_fields__"
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+| id='\d+'")
_PLAIN_KEY = re.compile(r"[^.\[\]\"\s]+")


def dump_config(config: object) -> dict[str, Any]:
    """The config as it is written to config.json."""
    dumper = _Dumper()
    dumped = {} if config is None else dumper.dump(config, ())
    if not isinstance(dumped, dict):
        dumped = {TYPE_KEY: type_name(config), "value": dumped}
    clean: dict[str, Any] = redact_tree(dumped, remember=True)
    if dumper.nonfinite:
        clean[_NONFINITE if _NONFINITE not in clean else f"__{_NONFINITE}__"] = dumper.nonfinite
    return clean


def write_config(path: Path, config: object) -> None:
    text = json.dumps(dump_config(config), indent=2, ensure_ascii=False, allow_nan=False)
    write_atomic(path, f"{text}\n".encode())


def read_config(path: Path) -> dict[str, Any]:
    """Read ours or a peer's; NaN and Infinity, which peers write as such, are accepted."""
    repair = "correct it there, restore a copy, or move the file away: a run can be read without it"
    try:
        config = json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        why = f"cannot be read ({error.strerror or error}); give the directory of a run"
        raise BadFileError(path, why) from error
    except json.JSONDecodeError as error:
        raise BadFileError(
            path, f"line {error.lineno}, column {error.colno}: {error.msg}; {repair}"
        ) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, or thousands of digits or brackets
        raise BadFileError(path, f"cannot be parsed ({error}); {repair}") from error
    if not isinstance(config, dict):
        raise BadFileError(path, f"holds a {type(config).__name__} where an object {{...}} is due; {repair}")
    return config


def key_path(parts: Iterable[str | int]) -> str:
    """`a.b[0]`; a key with a dot, bracket, quote or space in it is written `a["b.c"]`."""
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _PLAIN_KEY.fullmatch(part):
            text += f".{part}" if text else part
        else:
            text += f"[{json.dumps(part, ensure_ascii=False)}]"
    return text


def type_name(value: object) -> str:
    """`module.QualName` of a value's type."""
    return _qualified(type(value).__module__, type(value).__qualname__)


def _qualified(module: object, qualname: object) -> str:
    if module == "__main__":
        # Run as `python -m pkg.train`, the module still knows its importable name.
        module = getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", None) or module
    return f"{module or 'builtins'}.{qualname}"


class _Dumper:
    def __init__(self) -> None:
        self.nonfinite: dict[str, str] = {}
        self._above: dict[int, bool] = {}  # the values around this one, and which declare no fields
        self._left = _MAX_VALUES

    def dump(self, value: Any, path: _KeyPath) -> Any:
        """The value as JSON data; a value that fails to show itself becomes a note."""
        self._left -= 1
        if value is None or value is True or value is False:
            return value
        if id(value) in self._above:
            return "[circular]"
        if len(self._above) >= _MAX_DEPTH:
            return f"[too deep: {_safe(type_name, value)}]"
        self._above[id(value)] = False
        try:
            return self._dump(value, type(value), path)
        except RollbookError:
            raise
        except Exception as error:
            return {TYPE_KEY: _safe(type_name, value), "unreadable": type(error).__name__}
        finally:
            del self._above[id(value)]

    def _dump(self, value: Any, cls: type, path: _KeyPath) -> Any:
        if issubclass(cls, enum.Enum):
            if issubclass(cls, str | int) and not issubclass(cls, enum.Flag):
                return self.dump(value.value, path)
            return self._typed(value, (("name", value.name), ("value", value.value)), path)
        if issubclass(cls, str | int | float):
            return self._scalar(value, cls, path)
        if issubclass(cls, _AS_TEXT):
            return cleaned_text(str(value))
        if issubclass(cls, datetime.date | datetime.time):
            return value.isoformat()
        if issubclass(cls, functools.partial | functools.partialmethod):
            parts = {"func": value.func, "args": value.args, "kwargs": value.keywords}
            return self._typed(value, parts.items(), path)
        if (name := _name_of(value, cls)) is not None:
            return name
        if all(hasattr(cls, name) for name in ("shape", "dtype", "tolist")):  # numpy, torch and their like
            return self._array(value, path)
        if (plain := _omegaconf(value, cls)) is not None:
            return self.dump(plain, path)
        if issubclass(cls, Mapping):
            items = self._string_keys(value, path)
            return self._entries(items, path) if cls in _PLAIN_MAPPINGS else self._typed(value, items, path)
        if issubclass(cls, tuple) and hasattr(cls, "_fields"):
            return self._typed(value, zip(cls._fields, value, strict=False), path)
        if issubclass(cls, set | frozenset):
            return self._sequence(sorted(value, key=_set_order), path)
        if issubclass(cls, _SEQUENCES):
            return self._sequence(value, path)
        self._above[id(value)] = not _declares(cls)
        return self._typed(value, _contents(value, cls, sum(self._above.values()) <= _MAX_UNDECLARED), path)

    def _scalar(self, value: Any, cls: type, path: _KeyPath) -> Any:
        if issubclass(cls, str):
            return cleaned_text(str.__str__(value))
        if issubclass(cls, int):
            whole = int(value)
            return whole if whole.bit_length() < 10_000 else hex(whole)  # Python parses back no longer ones
        number = float(value)
        if math.isfinite(number):
            return number
        self.nonfinite[key_path(path)] = "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"
        return None

    def _array(self, value: Any, path: _KeyPath) -> Any:
        """A list; of a big array, or of one that holds no values, only shape and dtype."""
        shape = [int(length) for length in value.shape]
        summary = {TYPE_KEY: type_name(value), "shape": shape, "dtype": str(value.dtype)}
        if math.prod(shape) > _MAX_ARRAY:
            return summary
        try:
            content = value.tolist()
        except Exception:
            return summary
        # Extended precision has no Python type and returns itself.
        return self.dump(float(content) if type(content) is type(value) else content, path)

    def _typed(self, value: object, items: Iterable[tuple[str, Any]], path: _KeyPath) -> dict[str, Any]:
        return {TYPE_KEY: type_name(value), **self._entries(items, path)}

    def _entries(self, items: Iterable[tuple[str, Any]], path: _KeyPath) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for key, value in items:
            if self._left <= 0:
                entries["[left out]"] = f"this config holds more than {_MAX_VALUES} values"
                break
            entries[key] = self.dump(value, (*path, key))
        return entries

    def _sequence(self, values: Iterable[Any], path: _KeyPath) -> list[Any]:
        items: list[Any] = []
        for index, value in enumerate(values):
            if self._left <= 0:
                items.append(f"[left out: this config holds more than {_MAX_VALUES} values]")
                break
            items.append(self.dump(value, (*path, index)))
        return items

    def _string_keys(self, mapping: Mapping[Any, Any], path: _KeyPath) -> Iterator[tuple[str, Any]]:
        seen: dict[str, Any] = {}
        for key, value in mapping.items():
            text = _key(key)
            if text in seen and not (isinstance(key, _KEYS) and isinstance(seen[text], _KEYS)):
                text = f"{text} ({len(seen)})"
            elif text in seen:
                both = " and ".join(f"{_safe(repr, k)} ({type(k).__name__})" for k in (seen[text], key))
                fault = f"{both} are both written as {text!r}; rename one of them"
                raise UsageError(f"config key {key_path((*path, text))}: {fault}")
            seen[text] = key
            yield text, value


def _key(key: Any) -> str:
    if isinstance(key, enum.Enum):
        key = key.value if isinstance(key, str | int) else key.name
    if isinstance(key, bytes):
        return key.decode("utf-8", "replace")
    parts = key if isinstance(key, tuple) else (key,)
    if not all(isinstance(part, _KEYS) or hasattr(type(part), "dtype") for part in parts):
        return _safe(repr, key)
    plain = _Dumper().dump(key, ())
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _safe(show: Any, value: object) -> str:
    """`repr` and its like, of objects that may refuse."""
    try:
        text = _ADDRESS.sub("", str(show(value)))
    except Exception as error:
        return f"<no {getattr(show, '__name__', 'text')}: {type(error).__name__}>"
    return cleaned_text(text if len(text) <= _MAX_REPR else text[:_MAX_REPR] + "...")


def _set_order(value: object) -> tuple[str, Any, str]:
    number = value if isinstance(value, int | float) and not math.isnan(value) else 0
    return ("" if isinstance(value, int | float) else type_name(value), number, _safe(repr, value))


def _name_of(value: Any, cls: type) -> str | None:
    """The name of what is best known by it: functions, classes, modules, dtypes, devices, type hints."""
    if issubclass(cls, types.ModuleType):
        return str(value.__name__)
    if issubclass(cls, type):
        return _qualified(value.__module__, value.__qualname__)
    if issubclass(cls, types.MethodType):
        return _name_of(value.__func__, type(value.__func__))
    if cls in {types.GenericAlias, types.UnionType} or cls.__module__ in {"typing", "typing_extensions"}:
        return _safe(repr, value)
    in_arrays = cls.__module__.partition(".")[0] in {"numpy", "torch", "jax", "jaxlib"}
    if in_arrays and {base.__name__ for base in cls.__mro__} & {"dtype", "device", "layout", "memory_format"}:
        return str(value)
    if callable(value):
        # Classes keep their own names elsewhere: only what is function-like has these in its dictionaries.
        for name in ("__qualname__", "__name__"):
            built_in = any(isinstance(base.__dict__.get(name), _SLOTS) for base in cls.__mro__)
            if built_in or name in _stored(value):
                return _qualified(getattr(value, "__module__", None), getattr(value, name))
    return None


def _omegaconf(value: Any, cls: type) -> Any:
    """The resolved content of an OmegaConf node; where a value is missing, the unresolved one."""
    if cls.__module__.partition(".")[0] != "omegaconf" or cls.__name__ not in {"DictConfig", "ListConfig"}:
        return None
    to_container = sys.modules["omegaconf"].OmegaConf.to_container
    try:
        return to_container(value, resolve=True)
    except Exception:
        return to_container(value, resolve=False)


def _declares(cls: type) -> bool:
    return cls in _NAMESPACES or any(hasattr(cls, marker) for marker in _MARKERS.split())


def _contents(value: Any, cls: type, expand: bool) -> Iterator[tuple[str, Any]]:
    """What an object holds, by name, as it was declared; of an undeclared one all that is public."""
    if issubclass(cls, datetime.timedelta):
        yield "seconds", value.total_seconds()
    elif issubclass(cls, bytes | bytearray | memoryview):
        data = bytes(value)
        text = data.decode("utf-8", "replace")
        rest = f"... ({len(data)} bytes)" if len(data) > _MAX_BYTES else ""
        readable = text.isprintable() and "\ufffd" not in text
        yield ("text", text) if readable else ("hex", data[:_MAX_BYTES].hex() + rest)
    elif hasattr(cls, "get_secret_value"):
        yield "value", REDACTED
    else:
        # A logger or a client in a config would otherwise bring half the process with it.
        expand = expand and cls.__module__.partition(".")[0] not in sys.stdlib_module_names
        attributes = _attributes(value, cls) if expand or _declares(cls) else {}
        shows_itself = not attributes and cls.__repr__ is not object.__repr__
        yield from [("repr", _safe(repr, value))] if shows_itself else attributes.items()


def _stored(value: object) -> dict[str, Any]:
    """All that `__dict__` and slots hold, collected by `object` itself: no code of the class runs."""
    state: Any = object.__getstate__(value)
    held, slots = state if isinstance(state, tuple) else (state, None)
    return {**(slots or {}), **(held or {})}


def _attributes(value: Any, cls: type) -> dict[str, Any]:
    stored = _stored(value)
    declared: Any = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else None
    for marker in _MARKERS.split()[2:]:
        declared = getattr(cls, marker, declared)
    if declared is not None:
        names = [field if isinstance(field, str) else field.name for field in declared]
        return {name: _declared_value(stored, cls, name) for name in names}
    if hasattr(cls, "__pydantic_fields__"):
        stored |= stored.get("__pydantic_extra__") or {}
    if cls in _NAMESPACES:
        return stored
    return {name: content for name, content in stored.items() if not name.startswith("_")}


def _declared_value(stored: dict[str, Any], cls: type, name: str) -> Any:
    default = next((base.__dict__[name] for base in cls.__mro__ if name in base.__dict__), property())
    computed = hasattr(type(default), "__get__")
    # chz keeps what it was given under X_.
    return stored.get(name, stored.get(f"X_{name}", "[not stored]" if computed else default))


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


@dataclasses.dataclass(frozen=True)
class ConfigChange:
    """One difference between two configs; `old` or `new` is ABSENT where the key is."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} -> {self.new!r}"


def diff_configs(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[ConfigChange]:
    """The changes from `a` to `b`, both as `dump_config` or `read_config` give them, in order."""
    changes: list[ConfigChange] = []
    numbers_a, numbers_b = _nonfinite_numbers(a), _nonfinite_numbers(b)
    hidden = {_NONFINITE} if numbers_a or numbers_b else set()
    waiting: list[tuple[_KeyPath, Any, Any]] = [((), a, b)]
    while waiting:
        path, old, new = waiting.pop()
        pairs: list[tuple[_KeyPath, Any, Any]]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            keys = [key for key in {**old, **new} if path or key not in hidden]
            pairs = [((*path, key), old.get(key, ABSENT), new.get(key, ABSENT)) for key in keys]
        elif isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
            pairs = [((*path, index), old[index], new[index]) for index in range(len(old))]
        else:
            pairs, key = [], key_path(path)
            old = numbers_a.get(key) if old is None else old
            new = numbers_b.get(key) if new is None else new
            if not _same(old, new):
                changes.append(ConfigChange(key, old, new))
        waiting.extend(reversed(pairs))
    return changes


def _nonfinite_numbers(config: Mapping[str, Any]) -> dict[str, float]:
    numbers = config.get(_NONFINITE)
    if not isinstance(numbers, dict) or not set(map(str, numbers.values())) <= {"nan", "inf", "-inf"}:
        return {}  # a user's own key of that name
    return {key: float(text) for key, text in numbers.items()}


def _same(old: Any, new: Any) -> bool:
    both_nan = old != old and new != new
    return both_nan or bool(old == new and isinstance(old, bool) == isinstance(new, bool))
