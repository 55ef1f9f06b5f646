"""code.diff: the code a run was started with, as a commit plus everything that differed from it.

It is the repository of the user's script, not of this package. Changes of tracked files and new source files
are one patch; its head holds the command that brings the code back. What cannot be in it (binary, too big,
secret by its name, no source file, the output of runs) is listed with its size, never dropped silently.
Capturing works on a copy of git's index, ends after a time limit and never raises: a run starts without git,
too.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import BinaryIO

from rollbook.records.atomic import write_atomic
from rollbook.records.datasets import beside_output
from rollbook.records.layout import INDEX_YAML
from rollbook.records.redact import redact_text

KIB, MIB = 1024, 1024 * 1024
_MAX_LISTED = 200
_NOWHERE = "not a git repository"
_EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"  # stands for the commit before the first one
_RESTORE = "git apply --allow-empty --whitespace=nowarn code.diff"
# What nobody has given to git may be anything; only what is called like source goes into the patch.
_SOURCES = """
    *.py *.pyi *.pyx *.sh *.bash *.yaml *.yml *.toml *.cfg *.ini *.md *.rst *.txt *.cu *.cuh *.c *.h *.cc
    *.cpp *.hpp *.rs *.go *.js *.ts *.jinja *.jinja2 *.j2 *.sql *.css Makefile Dockerfile .gitignore
    *.example *.sample *.template *.dist
"""
_SECRETS = """
    .env .env.* *.env *.pem *.key *.p12 *.pfx *.jks *.keystore *.kdbx *.gpg id_rsa id_dsa id_ecdsa id_ed25519
    .netrc _netrc .authinfo .pypirc .npmrc .pgpass .htpasswd .git-credentials credentials credentials.json
    kubeconfig credentials.y*ml secrets.json secrets.y*ml secrets.toml service[-_]account*.json
    client_secret*.json token token.* *_token *token.txt *_key.txt *api_key* *apikey.txt *password.txt
    *passwords.txt
"""
_OF_COLLECTION = re.compile(
    r"((_failures|_tasks)?\.jsonl|(_failures|_tasks)\.ndjson)$|_(manifest|progress)\.json$"
)
_SOURCE_FILE, _SECRET_FILE = (
    re.compile("|".join(translate(pattern) for pattern in patterns.split()))
    for patterns in (_SOURCES, _SECRETS)
)
# A user's own settings must not change the output, start a program or write anything.
_SETTINGS = """
    core.quotePath=true core.fsmonitor=false core.safecrlf=false color.ui=false diff.algorithm=myers
    diff.autoRefreshIndex=false diff.context=3 diff.interHunkContext=0 diff.mnemonicPrefix=false
    diff.noprefix=false diff.orderFile=/dev/null diff.relative=false diff.suppressBlankEmpty=false
"""
_DIFF = """
    diff --no-color --no-ext-diff --no-textconv --no-renames --full-index --src-prefix=a/ --dst-prefix=b/
    --submodule=short --ignore-submodules=none
"""
# Set by a hook or an alias that started us, these would point git at another repository.
_FOREIGN = re.compile(
    r"GIT_(?:DIR|WORK_TREE|INDEX_FILE|COMMON_DIR|OBJECT_DIRECTORY|ALTERNATE_OBJECT_DIRECTORIES|NAMESPACE|PREFIX"
    r"|EXTERNAL_DIFF|DIFF_OPTS|\w+_PATHSPECS|TRACE\w*)"
)


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
    start: Path | None = None, *, max_total: int = 2 * MIB, max_file: int = 256 * KIB, timeout_s: float = 20
) -> CodeState:
    """Capture the repository that holds `start`; by default the running script's, else that of the cwd."""
    git = _Git(Path(), time.monotonic() + timeout_s)
    problem = ""
    for find in (_script_directory, Path.cwd) if start is None else (lambda: start,):
        try:
            if (directory := find()) is None:
                continue
            git.root = directory if directory.is_dir() else directory.parent
            git.root = Path(git.text("rev-parse", "--show-toplevel"))
            return _capture(git, _Report(max_total, max_file))
        except Exception as error:  # whatever is wrong with the code's history, the run must start
            problem = str(error)
            if isinstance(error, FileNotFoundError) and error.filename == "git":
                problem = "git is not installed; with it, the next run records its code"
            if _NOWHERE not in problem:
                break
    return CodeState(None, None, None, None, f"### no repository\n# {_one_line(problem)}\n".encode())


def _script_directory() -> Path | None:
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    directory = Path(script).resolve().parent if script else Path(sys.prefix).resolve()
    # A console script belongs to an environment, which may lie in someone else's repository.
    installed = directory.is_relative_to(Path(sys.prefix).resolve()) or "site-packages" in directory.parts
    return None if installed else directory


def _capture(git: _Git, report: _Report) -> CodeState:
    sha = git.answer("rev-parse", "--verify", "--quiet", "HEAD")
    branch = git.answer("symbolic-ref", "--quiet", "--short", "HEAD")
    dirty: bool | None = None
    try:
        with git.copied_index():
            new = _new_sources(git, report)
            git.text("add", "-N", "--pathspec-from-file=-", "--pathspec-file-nul", given=b"\0".join(new))
            dirty = _add_patches(git, report, sha or _EMPTY_TREE, {os.fsdecode(name) for name in new})
    except (_GitProblem, OSError) as problem:
        report.parts.append(f"### not captured in full\n# {_one_line(str(problem))}\n".encode())
    head = (
        f"### repo: {_one_line(git.root.name)} @ {sha or 'no commits yet'}\n"
        f"# branch: {_one_line(branch or 'none (detached HEAD)')}\n"
        f"# dirty: {'unknown' if dirty is None else 'yes' if dirty else 'no'}\n"
        f"# captured: {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n"
        f"# to bring this code back: {f'git checkout {sha} && ' if sha else ''}{_RESTORE}\n"
    )
    return CodeState(git.root, sha, branch, dirty, head.encode() + report.finish())


def _new_sources(git: _Git, report: _Report) -> list[bytes]:
    """The files that git does not know and that look like code; the others are listed."""
    found = []
    with git.output("ls-files", "--others", "--exclude-standard", "-z") as listed:
        for entry in listed.read().split(b"\0")[:-1]:
            name = os.fsdecode(entry)
            size = _size_of(git.root / name)
            if (output := _output_of(git.root, name)) is not None:
                report.leave_out(output, size, "the output of runs")
            elif name.endswith("/"):
                report.leave_out(name, None, "a repository of its own")
            elif why := _refusal(name):
                report.leave_out(name, size, why)
            elif not _SOURCE_FILE.match(Path(name).name):
                report.leave_out(name, size, "not called like source; git add it to have it recorded")
            elif (size or 0) > report.max_file:
                report.leave_out(name, size, f"over the limit of {_size(report.max_file)} for a new file")
            else:
                found.append(entry)
    return found


def _refusal(name: str) -> str | None:
    base = name.rpartition("/")[2].lower()
    is_secret = _SECRET_FILE.match(base) and not base.endswith(
        (".example", ".sample", ".template", ".dist", ".py")
    )
    return "its name says that it holds a secret" if is_secret else None


def _output_of(root: Path, name: str) -> str | None:
    """What a path belongs to that runs wrote: a directory, or the files of a collection."""
    for parent in Path(name).parents[:-1]:
        if _is_output(root / parent):
            return f"{parent}/"
    beside = beside_output(Path(name))
    stem = _OF_COLLECTION.sub("", name if beside is None else str(beside.output))
    return f"{stem}*" if stem != name and (root / f"{stem}_manifest.json").exists() else None


def _is_output(directory: Path) -> bool:
    """Whether a directory holds a run, or the history of all of them."""
    holds = {name: (directory / name).exists() for name in ("config.json", "run.json", "metrics.jsonl")}
    is_run = holds["config.json"] and (holds["run.json"] or holds["metrics.jsonl"])
    return is_run or (directory / INDEX_YAML).exists()


def _add_patches(git: _Git, report: _Report, commit: str, new: set[str]) -> bool:
    """Report every change since the commit; whether a file that git knew has changed."""
    changed = False
    with git.output(*_DIFF.split(), commit) as diff:
        for are_new in (False, True):  # where there is too much, changes of known files come first
            diff.seek(0)
            for head, patch, size in _split_patches(diff, report.max_total):
                path = _path_of(head)
                only_touched = patch == head + b"\n"
                if (path in new) is are_new and not only_touched:
                    changed |= not are_new
                    _add_patch(git, report, path, patch, size)
    return changed


def _add_patch(git: _Git, report: _Report, path: str, patch: bytes, size: int) -> None:
    if (output := _output_of(git.root, path)) is not None:
        report.leave_out(output, _size_of(git.root / path), "the output of runs")
    elif why := _refusal(path) or _not_text(patch):
        report.leave_out(path, _size_of(git.root / path), why)
    else:
        report.add_patch(path, patch, size)


def _not_text(patch: bytes) -> str | None:
    header = patch.partition(b"\n@@ ")[0].partition(b"\n")[2]
    if re.search(rb"^Binary files ", header, re.MULTILINE):
        return "binary"
    # Changes inside a submodule come without the line of hashes and modes that a file has.
    facts, names, _ = header.partition(b"--- ")
    if b" 160000" in facts or (names and b"index " not in facts):
        commits = re.findall(rb"^[-+]Subproject commit (\S+)$", patch, re.MULTILINE)
        return f"submodule, {b' -> '.join(commits).decode()}"
    return None


def _split_patches(diff: BinaryIO, keep: int) -> Iterator[tuple[bytes, bytes, int]]:
    """(first line, patch, size) of each file; of a patch over `keep` bytes only the beginning is held."""
    head, patch, size, at_line_start = b"", bytearray(), 0, True
    while piece := diff.readline(MIB):
        if at_line_start and piece.startswith(b"diff --git "):
            if head:
                yield head, bytes(patch), size
            head, patch, size = piece.rstrip(b"\n"), bytearray(), 0
        size += len(piece)
        if size <= keep:
            patch += piece
        at_line_start = piece.endswith(b"\n")
    if head:
        yield head, bytes(patch), size


def _path_of(head: bytes) -> str:
    """The path in `diff --git a/PATH b/PATH`; without renames both halves are the same."""
    name = head.removeprefix(b"diff --git ")
    name = name[: len(name) // 2]
    if name.startswith(b'"'):  # git's escapes are a part of Python's
        name = name[1:-1].decode("unicode_escape").encode("latin-1")
    return os.fsdecode(name[2:])


def _size_of(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        return path.lstat().st_size if path.is_symlink() or path.is_file() else None
    return None


class _GitProblem(Exception):
    """Git is missing, refuses, fails or hangs; the message says which and what helps."""


@dataclass
class _Git:
    root: Path
    deadline: float
    _environment: dict[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def copied_index(self) -> Iterator[None]:
        """Let git note new files in a copy of its index, and put nothing among the objects."""
        places = (self.root / self.text("rev-parse", "--git-path", name) for name in ("index", "objects"))
        index, objects = places
        with tempfile.TemporaryDirectory() as directory:
            copy = Path(directory)
            (copy / "objects").mkdir()
            if index.exists():
                shutil.copyfile(index, copy / "index")
            self._environment = {
                "GIT_INDEX_FILE": str(copy / "index"),
                "GIT_OBJECT_DIRECTORY": str(copy / "objects"),
                "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(objects),
            }
            try:
                yield
            finally:
                self._environment = {}

    @contextlib.contextmanager
    def output(self, *arguments: str, given: bytes = b"") -> Iterator[BinaryIO]:
        """What git prints, from a file on the disk."""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            if code := self._run(arguments, given, output, errors):
                errors.seek(0)
                complaint = errors.read(4096).decode("utf-8", "replace")
                raise _GitProblem(_explained(complaint, self.root, code))
            output.seek(0)
            yield output

    def _run(self, arguments: tuple[str, ...], given: bytes, output: BinaryIO, errors: BinaryIO) -> int:
        command = ["git", *(word for line in _SETTINGS.split() for word in ("-c", line)), *arguments]
        env = {name: value for name, value in os.environ.items() if not _FOREIGN.fullmatch(name)}
        env |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1"}
        env |= {"LC_ALL": "C"} | self._environment
        process = Popen(
            command, cwd=self.root, env=env, stdin=PIPE if given else DEVNULL, stdout=output, stderr=errors,
            process_group=0,
        )  # fmt: skip
        try:
            process.communicate(given or None, timeout=max(0.1, self.deadline - time.monotonic()))
        except TimeoutExpired as error:
            raise _GitProblem(f"git {arguments[0]} did not finish in time") from error
        finally:
            with contextlib.suppress(OSError, TimeoutExpired):
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait(1)
        return process.returncode

    def text(self, *arguments: str, given: bytes = b"") -> str:
        with self.output(*arguments, given=given) as output:
            return os.fsdecode(output.read().removesuffix(b"\n"))

    def answer(self, *arguments: str) -> str | None:
        """What a question is answered with; None where git has no answer."""
        try:
            return self.text(*arguments).strip() or None
        except _GitProblem:
            if time.monotonic() >= self.deadline:
                raise
            return None


def _explained(complaint: str, directory: Path, code: int) -> str:
    if _NOWHERE in complaint:
        return f"{directory} is {_NOWHERE}; `git init` there lets the next run record its code"
    if "dubious ownership" in complaint:
        owned = re.search(r"repository at '(.*)'", complaint)
        allow = f"git config --global --add safe.directory '{owned[1] if owned else directory}'"
        return f"git does not read a repository that another user owns; to allow it: {allow}"
    why = complaint.strip().partition("\n")[0] or f"it ended with {code} and gave no reason"
    return f"git failed in {directory}: {why}"


@dataclass
class _Report:
    max_total: int
    max_file: int
    parts: list[bytes] = field(default_factory=list)
    _used: int = 0
    _left_out: dict[tuple[str, str], int] = field(default_factory=dict)
    _left_out_files: int = 0
    _redacted: dict[str, int] = field(default_factory=dict)

    def add_patch(self, path: str, patch: bytes, size: int) -> None:
        if self._used + size > self.max_total:
            self.leave_out(path, size, f"over the limit of {_size(self.max_total)} for all of code.diff")
            return
        self._used += size
        text = patch.decode("utf-8", "surrogateescape")
        clean = redact_text(text)
        if clean != text:
            pairs = zip(text.split("\n"), clean.split("\n"), strict=True)
            self._redacted[path] = sum(old != new for old, new in pairs)
        self.parts.append(clean.encode("utf-8", "surrogateescape"))

    def leave_out(self, path: str, size: int | None, why: str) -> None:
        self._left_out_files += 1
        if (path, why) in self._left_out or len(self._left_out) < _MAX_LISTED:
            self._left_out[path, why] = self._left_out.get((path, why), 0) + (size or 0)

    def finish(self) -> bytes:
        lines = [f"### left out: {self._left_out_files}"] if self._left_out else []
        for (path, why), size in self._left_out.items():
            lines.append(f"#   {_one_line(path)}{f' ({_size(size)})' if size else ''}: {why}")
        if len(self._left_out) == _MAX_LISTED:
            lines.append("#   and others: the list ends here")
        if self._redacted:
            lines.append("### redacted: to apply, put these lines back, or use git apply --exclude=PATH")
            lines += [f"#   {_one_line(path)}: lines {count}" for path, count in self._redacted.items()]
        return b"".join(self.parts) + "".join(f"{line}\n" for line in lines).encode()


def _size(count: int) -> str:
    return f"{count} B" if count < 1024 else f"{count / 1024:.1f} KiB"


def _one_line(text: str) -> str:
    """Words of others on one line of ours, whatever they hold."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", "?", redact_text(text))
