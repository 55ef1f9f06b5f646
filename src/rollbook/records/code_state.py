"""code.diff: the code a run was started with, as the commit plus everything that differed from it.

It is the repository of the user's script, not of this package. Staged changes, unstaged changes and untracked
files follow each other as patches: `git checkout <sha> && git apply code.diff` brings the code back. What
cannot be in it (binary, too big, secret by its name) is listed with its size, never dropped silently.
Capturing only reads, ends after a time limit, and never raises: a run starts without git, too.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import cache
from pathlib import Path, PurePath

from rollbook.records.atomic import write_atomic
from rollbook.records.redact import redact_text

MAX_TOTAL = 2 * 1024 * 1024
MAX_UNTRACKED = 256 * 1024
TIMEOUT_S = 20.0
_MAX_LISTED = 200
_MAX_PIECE = 1024 * 1024

# A user's own settings must not change the output, start a program or write anything.
_SETTINGS = tuple(
    f"-c{setting}"
    for setting in (
        "core.quotePath=true",
        "core.fsmonitor=false",
        "core.safecrlf=false",
        "color.ui=false",
        "diff.algorithm=myers",
        "diff.autoRefreshIndex=false",
        "diff.context=3",
        "diff.interHunkContext=0",
        "diff.mnemonicPrefix=false",
        "diff.noprefix=false",
        "diff.orderFile=/dev/null",
        "diff.relative=false",
        "diff.suppressBlankEmpty=false",
    )
)
_DIFF = (
    *("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--full-index"),
    *("--src-prefix=a/", "--dst-prefix=b/"),
)
# Set by a hook or an alias that started us, these would point git at another repository.
_FOREIGN = re.compile(
    r"GIT_(?:DIR|WORK_TREE|INDEX_FILE|COMMON_DIR|OBJECT_DIRECTORY|ALTERNATE_OBJECT_DIRECTORIES|NAMESPACE|PREFIX"
    r"|EXTERNAL_DIFF|DIFF_OPTS|\w+_PATHSPECS|TRACE\w*)"
)
_SECRET_FILES = (
    *(".env", ".env.*", "*.env", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.gpg"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", ".netrc", "_netrc", ".pypirc", ".npmrc", ".pgpass"),
    *(".htpasswd", ".git-credentials", "credentials", "credentials.json", "credentials.y*ml", "kubeconfig"),
    *("secrets.json", "secrets.y*ml", "secrets.toml", "service[-_]account*.json", "client_secret*.json"),
    *("*token.txt", "*api_key.txt", "*apikey.txt", "*password.txt", "*passwords.txt"),
)
_TEMPLATE_FILES = ("*.example", "*.sample", "*.template", "*.dist")


@dataclass(frozen=True)
class CodeState:
    """The captured code; `sha` is None before the first commit, `root` where there is no repository."""

    root: Path | None
    sha: str | None
    branch: str | None
    dirty: bool | None  # tracked files differ from the commit; None: unknown
    data: bytes  # what code.diff holds; source files need not be UTF-8

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


def write_code_diff(path: Path, state: CodeState) -> None:
    write_atomic(path, state.data)


def capture_code(
    start: Path | None = None,
    *,
    max_total: int = MAX_TOTAL,
    max_untracked: int = MAX_UNTRACKED,
    timeout_s: float = TIMEOUT_S,
) -> CodeState:
    """Capture the repository that holds `start`: by default the running script's, else the current directory's."""
    git = _Git(time.monotonic() + timeout_s, timeout_s)
    problem = "no directory to start from"
    for directory in _starts(start):
        try:
            git.root = directory
            git.root = Path(os.fsdecode(git.read("rev-parse", "--show-toplevel").removesuffix(b"\n")))
            return _capture(git, _Report(git.root, max_total, max_untracked))
        except _GitProblem as caught:
            problem = str(caught)
            if not caught.elsewhere:
                break
        except OSError as error:
            problem = f"{directory}: {error.strerror or error}"
    return CodeState(None, None, None, None, f"### no repository\n# {problem}\n".encode("utf-8", "replace"))


def _starts(start: Path | None) -> Iterator[Path]:
    if start is not None:
        yield start if start.is_dir() else start.parent
        return
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script:
        directory = Path(script).resolve().parent
        # A console script belongs to an environment, which may lie in someone else's repository.
        if not directory.is_relative_to(Path(sys.prefix).resolve()) and "site-packages" not in directory.parts:
            yield directory
    yield Path.cwd()


def _capture(git: _Git, report: _Report) -> CodeState:
    sha = git.try_read("rev-parse", "--verify", "--quiet", "HEAD")
    branch = git.try_read("symbolic-ref", "--quiet", "--short", "HEAD")
    dirty: bool | None = False
    for title, arguments in (("staged", ("--cached",)), ("unstaged", ("--ours",))):
        try:
            found = _tracked(git, report, title, arguments)
            dirty = dirty if dirty is None else dirty or found
        except _GitProblem as problem:
            dirty = dirty or None
            report.add(f"### {title} changes: not captured\n# {problem}\n")
    for section in (_untracked, _submodules):
        try:
            dirty = section(git, report) or dirty
        except (_GitProblem, OSError) as problem:
            report.add(f"### {section.__name__[1:]}: not captured\n# {problem}\n")
    head = [
        f"### repo: {_one_line(git.root.name)} @ {sha or 'no commits yet'}",
        f"# branch: {_one_line(branch) if branch else 'none (detached HEAD)'}",
        f"# dirty: {'unknown' if dirty is None else 'yes' if dirty else 'no'}",
        f"# captured: {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
    ]
    if sha:
        head.append(f"# to bring this code back: git checkout {sha} && git apply code.diff")
    return CodeState(git.root, sha, branch, dirty, "\n".join([*head, "", ""]).encode() + report.finish())
