"""Modules of the user: `module:name` or `path.py:name`, and digests of the text that was loaded."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import SourceLoader
from pathlib import Path
from types import ModuleType

from rollbook.errors import RollbookError, UsageError
from rollbook.rollouts.failures import error_with_place
from rollbook.rollouts.project_files import project_files

# In the name of a file: before it comes where its config is, after it what the config says.
_BESIDE = "/./"


def named_beside(name: str, directory: Path) -> str:
    """`path.py:Class` as a config in that directory names it, good in any working directory."""
    return f"{directory}{_BESIDE}{name}"


def as_written(name: str) -> str:
    """The name as the config has it, so that records do not depend on where a command was started."""
    directory, _, written = name.partition(_BESIDE)
    return written if written and directory.startswith("/") else name


def qualified_name(own: object) -> str:
    """`module:Class` of a class or an object of somebody's, as records name it."""
    kind = own if isinstance(own, type) else type(own)
    return f"{kind.__module__}:{kind.__qualname__}"


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Make whatever somebody's code raises, an exit or a panic too, a UsageError that begins with `what`."""
    try:
        yield
    except (RollbookError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise UsageError(f"{what} {error_with_place(error)}") from error


def load_module(place: str, where: str) -> ModuleType:
    """A module by its dotted name or by the path of its file; `where` is what asks, for messages."""
    try:
        with blaming(f"{where}: importing {place} failed:"):
            try:
                if place.endswith(".py"):
                    return _from_file(place, where)
                search_working_directory()
                return importlib.import_module(place)
            except ModuleNotFoundError as error:
                why = f"{where}: no module {error.name!r}; install it, or name a file: path.py:name"
                raise UsageError(why) from error
    except UsageError as error:
        if isinstance(syntax := error.__cause__, SyntaxError):
            raise UsageError(f"{where}: {syntax.filename}:{syntax.lineno}: {syntax.msg}") from syntax
        raise


def search_working_directory() -> None:
    """Find modules in the working directory, as `python` does; last, so that it hides nothing installed."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)


def digest_of_modules(*names: str) -> str | None:
    """A digest of the source of modules and of the project's own files that they import.

    Grading that changed, also in a helper, is not the same grading.
    """
    digest, helpers = hashlib.sha256(), dict[str, bytes]()
    try:
        for name in dict.fromkeys(names):
            module = importlib.import_module(name)
            digest.update(_source_of(module))
            helpers |= _helpers_of(module)
    except (OSError, TypeError):
        return None
    for name, text in sorted(helpers.items()):
        digest.update(f"\0{name}\0".encode() + text)
    return digest.hexdigest()


def _helpers_of(module: ModuleType) -> dict[str, bytes]:
    loader = module.__spec__.loader if module.__spec__ else None
    if isinstance(loader, _TextLoader):
        return loader.helpers
    file = getattr(module, "__file__", None)
    if file is None or module.__name__.partition(".")[0] == "rollbook":
        return {}
    return project_files(Path(file), Path(file).read_bytes())


class _TextLoader(SourceLoader):
    """Runs the text that the digest is taken of, whatever the file or its bytecode says a moment later."""

    def __init__(self, path: Path, source: bytes, helpers: dict[str, bytes]) -> None:
        self._path, self.source, self.helpers = path, source, helpers

    def get_filename(self, fullname: str) -> str:
        return str(self._path)

    def get_data(self, path: str | bytes) -> bytes:
        return self.source


def _source_of(module: ModuleType) -> bytes:
    loader = module.__spec__.loader if module.__spec__ else None
    if not isinstance(loader, _TextLoader):
        return inspect.getsource(module).encode()
    text = importlib.util.decode_source(loader.source)
    return (text if text.endswith("\n") else f"{text}\n").encode()  # as inspect has it


def _from_file(place: str, where: str) -> ModuleType:
    path, written = Path(place), as_written(place)
    if not path.exists():
        places = [str(Path.cwd() / written)] + ([str(path)] if written != place else [])
        raise UsageError(f"{where}: no file {written}; looked for {' and '.join(places)}")
    source = path.read_bytes()
    helpers = project_files(path, source)
    # Under a name of its own: two files called env.py must not take each other's place, nor an edited
    # file, or one with an edited helper, that of its earlier text.
    texts = b"".join(f"\0{name}\0".encode() + text for name, text in helpers.items())
    identity = hashlib.sha256(str(path.resolve()).encode() + b"\0" + source + texts).hexdigest()
    name = f"rollbook_env_{path.stem}_{identity[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    _make_importable(path.absolute().parent, helpers, where)
    loader = _TextLoader(path, source, helpers)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


_helper_texts: dict[str, bytes] = {}  # of those that were imported, when they were


def _make_importable(directory: Path, helpers: dict[str, bytes], where: str) -> None:
    """Let a file import what lies beside it; last on the path, so that it hides nothing installed.

    A helper that was edited since it was imported is imported again. Two of one name in two directories
    cannot be told apart by Python.
    """
    if str(directory) not in sys.path:
        sys.path.append(str(directory))
    importlib.invalidate_caches()
    for name in helpers:
        loaded = getattr(sys.modules.get(name), "__file__", None)
        below = directory.joinpath(*name.split("."))
        mine = next(
            (file for file in (below.with_suffix(".py"), below / "__init__.py") if file.is_file()), None
        )
        if loaded and mine and Path(loaded).resolve() != mine.resolve():
            raise UsageError(
                f"{where}: it imports {mine}, and another file of that name is in use: {loaded}; rename one"
            )
    if any(_helper_texts.get(name, text) != text for name, text in helpers.items()):
        tops = {name.partition(".")[0] for name in helpers}
        for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
            del sys.modules[name]
    _helper_texts.update(helpers)
