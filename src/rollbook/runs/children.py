"""Starts Python children that import nothing from the working directory.

`python -m` puts the working directory first on the path, so a `random.py` of the user's would be imported in
place of Python's own. Modules that the user names (environments, agents) are found there all the same: the
registry appends the directory, after everything else.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import rollbook
from rollbook.records.secret_values import for_children, keep_inherited

_PATH = "PYTHONPATH"
_PREPENDED = "ROLLBOOK_PREPENDED_PATH"
_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module as a child of this interpreter."""
    return [sys.executable, "-P", "-m", module, *arguments]


def python_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The same environment, in which rollbook is found though the child has another working directory.

    It also holds the secrets that this process knows of, which the child must not write either. A child that
    starts commands of the user's calls `forget_own_path` first.
    """
    own = str(Path(rollbook.__file__).parents[1])
    paths = [own, environment.get(_PATH)]
    path = os.pathsep.join(path for path in paths if path)
    return {**environment, **for_children(), _PATH: path, _PREPENDED: own}


def forget_own_path() -> None:
    """Undo `python_environment` here: a command of the user's may belong to another installation."""
    keep_inherited()
    own = os.environ.pop(_PREPENDED, None)
    if own is None:
        return
    first, _, rest = os.environ.get(_PATH, "").partition(os.pathsep)
    if first == own:
        del os.environ[_PATH]
        if rest:
            os.environ[_PATH] = rest


def die_with(parent: int) -> bool:
    """Ask to be killed when the parent process ends; False if it has ended already.

    Only Linux can be asked for this.
    """
    if sys.platform == "linux":
        with suppress(ImportError, OSError, AttributeError):
            import ctypes

            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent
