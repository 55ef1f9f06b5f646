"""Environments by name: the built-in ones, `module:Class`, or `path.py:Class`."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rollbook.envs.base import Environment, SharingFactory, SingleTurn, what_and_where
from rollbook.errors import RollbookError, UsageError

BUILT_IN = {
    "arithmetic": "rollbook.envs.arithmetic:Arithmetic",
    "calculator": "rollbook.envs.calculator:Calculator",
    "dataset": "rollbook.envs.dataset:Dataset",
}
# In the name of a file: before it stands where its config is, after it what the config says.
_BESIDE = "/./"


def named_beside(name: str, directory: Path) -> str:
    """`path.py:Class` as a config in that directory names it, good in any working directory."""
    return f"{directory}{_BESIDE}{name}"


def as_written(name: str) -> str:
    """As the config has it, so that what is compared does not hang on where a collection was started."""
    directory, _, written = name.partition(_BESIDE)
    return written if written and directory.startswith("/") else name


def environment_class(name: str) -> type[Environment]:
    if name == "gym" or name.startswith("verifiers:"):
        raise UsageError(f"env.name {name!r} brings its own loop; rollbook.envs.agents builds it whole")
    place, _, attribute = BUILT_IN.get(name, name).rpartition(":")
    if not place or not attribute:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"built in: {', '.join(BUILT_IN)}"
        raise UsageError(f"env.name {name!r} is not known; {hint} Your own: module:Class or path.py:Class")
    module = load_module(place, f"env.name {as_written(name)!r}")
    found = getattr(module, attribute, None)
    if found is None:
        names = [key for key, value in vars(module).items() if _is_environment(value)]
        raise UsageError(
            f"env.name {name!r}: {place} has no {attribute}; it has: {', '.join(names) or 'none'}"
        )
    if not _is_environment(found):
        raise UsageError(
            f"env.name {name!r}: {attribute} is not an Environment; subclass rollbook.envs.Environment "
            "or decorate a grading function with rollbook.envs.single_turn"
        )
    environment: type[Environment] = found
    return environment


def environment_factory(name: str, settings: Mapping[str, Any]) -> SharingFactory:
    """Makes one environment an episode; wrong settings are refused here, not at the first row."""
    kind = environment_class(name)
    try:
        kind(**settings)
        if issubclass(kind, SingleTurn):
            _refuse_other_parameters(name, kind)
            inspect.signature(kind.grader).bind(None, "", **settings)
    except TypeError as error:
        raise UsageError(
            f"env {name!r} does not take these settings ({error}); it takes: {_settings_of(kind)}"
        ) from error
    except (RollbookError, KeyboardInterrupt):
        raise
    except BaseException as error:  # an exit or a panic of somebody's code, too
        raise UsageError(f"env {name!r} cannot be made: {what_and_where(error)}") from error
    try:
        return SharingFactory(kind, settings)
    except (RollbookError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise UsageError(f"env {name!r}: its shared() failed: {what_and_where(error)}") from error


def _refuse_other_parameters(name: str, kind: type[SingleTurn]) -> None:
    signature = inspect.signature(kind.grader)
    try:
        signature.bind_partial(None, "")
    except TypeError:
        raise UsageError(
            f"env {as_written(name)!r}: a grading function takes (task, answer), and this one {signature}; "
            "the row is task.row"
        ) from None


def source_digest(name: str) -> str | None:
    """A digest of the code an environment was loaded from: grading that changed is not the same grading."""
    kind = environment_class(name)
    # What the file only imports, it may still have changed.
    loaded = load_module(BUILT_IN.get(name, name).rpartition(":")[0], f"env.name {name!r}")
    return digest_of_modules(kind.__module__, loaded.__name__, *kind.sources)


def digest_of_modules(*names: str) -> str | None:
    digest = hashlib.sha256()
    try:
        for name in dict.fromkeys(names):
            digest.update(inspect.getsource(importlib.import_module(name)).encode())
    except (OSError, TypeError):
        return None
    return digest.hexdigest()


def _settings_of(kind: type[Environment]) -> str:
    if issubclass(kind, SingleTurn):
        names = list(inspect.signature(kind.grader).parameters)[2:]
    else:
        names = list(inspect.signature(kind).parameters)
    return ", ".join(names) or "none"


def _is_environment(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Environment)


def load_module(place: str, where: str) -> ModuleType:
    """A module by its dotted name or by the path of its file; `where` is what asks, for messages."""
    try:
        if place.endswith(".py"):
            return _from_file(place, where)
        look_here_too()
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{where}: no module {error.name!r}; install it, or name a file: path.py:name"
        ) from error
    except SyntaxError as error:
        raise UsageError(f"{where}: {error.filename}:{error.lineno}: {error.msg}") from error
    except (RollbookError, KeyboardInterrupt):
        raise
    except BaseException as error:  # an exit or a panic of somebody's code, too
        raise UsageError(f"{where}: importing {place} failed: {what_and_where(error)}") from error


def look_here_too() -> None:
    """Find modules in the working directory, as `python` does; last, so that it hides nothing installed."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)


def _from_file(place: str, where: str) -> ModuleType:
    path, written = Path(place), as_written(place)
    if not path.exists():
        places = [str(Path.cwd() / written)] + ([str(path)] if written != place else [])
        raise UsageError(f"{where}: no file {written}; looked for {' and '.join(places)}")
    # Under a name of its own: two files called env.py must not take each other's place.
    name = f"rollbook_env_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{where}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
