"""The project's own files that a file of the user's imports, found without running any of them.

A project file is Python source that is neither installed nor a part of Python or of rollbook. Which file an
import means is decided as Python does it: the first place on the path that has the name. Imports in functions
count too: they are as much a part of the code as those at the top.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_BINARY = (".so", ".pyd")


def project_files(path: Path, source: bytes) -> dict[str, bytes]:
    """The text of each file that `path`, whose text is `source`, imports, and that those import, by its name.

    A name is as in an import; that of a relative one begins with dots.
    """
    found: dict[Path, tuple[str, bytes]] = {}
    pending = [(path.absolute(), source)]
    while pending:
        importer, text = pending.pop()
        for name, file in _imported(importer, path.absolute().parent, text):
            if file not in found and file != path.absolute():
                try:
                    found[file] = (name, file.read_bytes())
                except OSError:
                    continue
                pending.append((file, found[file][1]))
    return dict(sorted(found.values()))


def _places(directory: Path) -> list[Path]:
    """Where the imports of a file in this directory are looked for: the path, and last the directory."""
    places = [Path(entry or ".").absolute() for entry in sys.path]
    return list(dict.fromkeys([*places, directory]))


def _imported(importer: Path, directory: Path, source: bytes) -> Iterator[tuple[str, Path]]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return  # importing it says so
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files_of(alias.name, _places(directory))
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level
            above = importer.parents[min(node.level, len(importer.parents)) - 1] if node.level else None
            places = [above] if above else _places(directory)
            names = [node.module] if node.module else []
            names += [f"{node.module}.{alias.name}" if node.module else alias.name for alias in node.names]
            for name in names:
                yield from ((dots + found, file) for found, file in _files_of(name, places))


def _files_of(name: str, places: list[Path]) -> Iterator[tuple[str, Path]]:
    """The files that are run by `import a.b`: of a, then of b."""
    top, *rest = name.split(".")
    if top in sys.stdlib_module_names or top in sys.builtin_module_names or top == "rollbook":
        return
    place = next((place for place in places if _has(place, top)), None)
    place = place or next((place for place in places if any((place / top).glob("*.py"))), None)
    if place is None or _is_installed(place):
        return
    parts: list[str] = []
    for part in (top, *rest):
        parts.append(part)
        below = place.joinpath(*parts)
        file = next(
            (one for one in (below / "__init__.py", below.with_name(f"{part}.py")) if one.is_file()), None
        )
        if file is not None:
            yield ".".join(parts), file


def _has(place: Path, name: str) -> bool:
    if (place / f"{name}.py").is_file() or (place / name / "__init__.py").is_file():
        return True
    return _is_installed(place) and any(
        entry.suffix in _BINARY or entry.is_dir()
        for entry in place.glob(f"{name}*")
        if entry.name.split(".")[0] == name
    )


@cache
def _is_installed(place: Path) -> bool:
    roots = {
        Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
    resolved = place.resolve()
    is_packages = {"site-packages", "dist-packages"} & set(resolved.parts)
    return bool(is_packages) or any(resolved.is_relative_to(root) for root in roots)
