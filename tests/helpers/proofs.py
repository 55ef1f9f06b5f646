"""Whether a test is run by `make test`, as far as one can say without running it."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from helpers.places import REPOSITORY

# Every other mark is taken to leave a test out: those of pyproject.toml choose other targets of the Makefile.
_HARMLESS = frozenset({"parametrize", "usefixtures", "filterwarnings"})
_SKIPS = frozenset({"skip", "importorskip", "xfail", "exit"})


def why_not_run(path: Path, name: str) -> str | None:
    """What keeps the test `name` of a file from being run, or its failure from counting; None for nothing."""
    functions = _functions(path)
    if name not in functions:
        return "there is no such test"
    module = _module(path)
    test = getattr(module, name)
    marks = [*_listed(getattr(module, "pytestmark", [])), *getattr(test, "pytestmark", [])]
    for mark in marks:
        if why := _of_mark(mark):
            return why
    skips = [f"{function} calls pytest.{call}" for function, call in _calls(path, name)]
    return skips[0] if skips else None


def _of_mark(mark: Any) -> str | None:
    if mark.name == "skipif":
        is_met = any(mark.args[:1]) or mark.kwargs.get("condition", False)  # a text counts as met
        return f"it is marked skipif, and so it is: {mark.kwargs.get('reason')}" if is_met else None
    if mark.name == "parametrize":
        cases = mark.args[1] if len(mark.args) > 1 else mark.kwargs["argvalues"]
        of_cases = [[why for own in getattr(case, "marks", ()) if (why := _of_mark(own))] for case in cases]
        return "it has no case that is run" if all(of_cases) else None
    return None if mark.name in _HARMLESS else f"it is marked {mark.name}"


def _calls(path: Path, name: str) -> Iterator[tuple[str, str]]:
    """Calls of pytest that skip, in a test and in the fixtures that it asks for."""
    functions = _functions(REPOSITORY / "tests/conftest.py") | _functions(path)
    asked = [name, *(one for one, function in functions.items() if _is_for_all(function))]
    seen = set(asked)
    while asked:
        function = functions[asked.pop()]
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and (call := _of_pytest(node.func)) in _SKIPS:
                yield function.name, call
        more = [one.arg for one in function.args.args if one.arg in functions and one.arg not in seen]
        asked += more
        seen.update(more)


def _is_for_all(function: ast.FunctionDef) -> bool:
    """Whether every test has the fixture, asked for or not."""
    return any("autouse=True" in ast.unparse(decorator) for decorator in function.decorator_list)


def _of_pytest(called: ast.expr) -> str:
    """`skip` for `pytest.skip`."""
    is_pytest = isinstance(called, ast.Attribute) and ast.unparse(called.value) == "pytest"
    return called.attr if is_pytest and isinstance(called, ast.Attribute) else ""


def _listed(marks: Any) -> list[Any]:
    return [getattr(mark, "mark", mark) for mark in (marks if isinstance(marks, list) else [marks])]


@cache
def _functions(path: Path) -> dict[str, ast.FunctionDef]:
    """Those of a file, by name."""
    body = ast.parse(path.read_text()).body
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


@cache
def _module(path: Path) -> ModuleType:
    """The module of a test file: as pytest has loaded it, if it has."""
    inside = path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path
    name = ".".join(inside.with_suffix("").parts)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(f"looked_at.{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses and structs of the file look for it
    spec.loader.exec_module(module)
    return module
