"""code.diff: the code a run was started with, as a commit plus everything that differed from it.

It is the repository of the user's script, not of this package. Staged changes, unstaged changes and untracked
files are three patches, and its head holds the command that brings the code back from them. What cannot be in
it (binary, too big, secret by its name) is listed with its size, never dropped silently.
Capturing only reads, ends after a time limit and never raises: a run starts without git, too.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cache
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired

from rollbook.records.atomic import write_atomic
from rollbook.records.redact import redact_text

KIB, MIB = 1024, 1024 * 1024
_MAX_LISTED, _MAX_DATA_FILES = 200, 5_000
_NOWHERE = "not a git repository"
_SOURCE = re.compile(r".*\.(?:py|pyi|sh|ya?ml|toml|cfg|md|cu|c|h|cpp|rs|jinja)", re.DOTALL)
# One `git apply` of all parts would not do: it deletes before it writes, in whatever part that is.
_RESTORE = (
    "for part in staged unstaged untracked; do "
    'sed -n "/^### $part/,/^### /p" code.diff | git apply --allow-empty --whitespace=nowarn; done'
)
_SECRET = "its name says that it holds a secret"

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
_SECRET_FILES = """
    .env .env.* *.env *.pem *.key *.p12 *.pfx *.jks *.keystore *.kdbx *.gpg id_rsa id_dsa id_ecdsa id_ed25519
    .netrc _netrc .pypirc .npmrc .pgpass .htpasswd .git-credentials credentials credentials.json kubeconfig
    credentials.y*ml secrets.json secrets.y*ml secrets.toml service[-_]account*.json client_secret*.json
    *token.txt *api_key.txt *apikey.txt *password.txt *passwords.txt
"""
_SECRET_FILE = re.compile("|".join(translate(pattern) for pattern in _SECRET_FILES.split()))


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
            git.root = Path(os.fsdecode(b"".join(git.stream("rev-parse", "--show-toplevel"))[:-1]))
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
    dirty: bool | None = False
    for title, capture, which in (
        ("staged changes", _tracked, "--cached"),
        ("unstaged changes", _tracked, "--ours"),
        ("untracked files", _untracked, "--others"),
    ):
        report.parts.append(f"### {title}\n".encode())
        try:
            changed = capture(git, report, which)
        except (_GitProblem, OSError) as problem:
            changed = None
            report.parts.append(f"### {title}: not captured in full\n# {_one_line(str(problem))}\n".encode())
        if capture is _tracked and (changed or dirty is False):
            dirty = changed
    head = (
        f"### repo: {_one_line(git.root.name)} @ {sha or 'no commits yet'}\n"
        f"# branch: {_one_line(branch or 'none (detached HEAD)')}\n"
        f"# dirty: {'unknown' if dirty is None else 'yes' if dirty else 'no'}\n"
        f"# captured: {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n"
        f"# to bring this code back: {f'git checkout {sha} && ' if sha else ''}{_RESTORE}\n"
    )
    return CodeState(git.root, sha, branch, dirty, head.encode() + report.finish())


def _tracked(git: _Git, report: _Report, which: str) -> bool:
    changed = False
    for head, patch, size in _split_patches(git.stream(*_DIFF.split(), which), report.max_total):
        if patch == head + b"\n" and head.startswith(b"diff"):
            continue  # only the file's time changed
        changed, path = True, _path_of(head)
        if head.startswith(b"*"):
            report.leave_out(path, None, "merge conflict; only our side is compared")
        elif why := "its staged part is left out" if path in report.skipped else _refusal(path, patch):
            report.skipped.add(path)
            report.leave_out(path, _size_of(git.root / path), why)
        else:
            report.add_patch(path, patch, size)
    return changed


def _refusal(path: str, patch: bytes) -> str | None:
    header = patch.partition(b"\n@@ ")[0].partition(b"\n")[2]
    if _is_secret_file(path):
        return _SECRET
    if re.search(rb"^Binary files ", header, re.MULTILINE):
        return "binary"
    # Changes inside a submodule come without the line of hashes and modes that a file has.
    facts, names, _ = header.partition(b"--- ")
    if b" 160000" in facts or (names and b"index " not in facts):
        commits = re.findall(rb"^[-+]Subproject commit (\S+)$", patch, re.MULTILINE)
        return f"submodule, {b' -> '.join(commits).decode()}"
    return None


def _split_patches(chunks: Iterable[bytes], keep: int) -> Iterator[tuple[bytes, bytes, int]]:
    """(first line, patch, size) of each file; of a patch over `keep` bytes only the beginning is held."""
    head, patch, size, at_line_start = b"", bytearray(), 0, True
    for piece in _pieces(chunks, b"\n"):
        if at_line_start and piece.startswith((b"diff --git ", b"* Unmerged path ")):
            if head:
                yield head, bytes(patch), size
            head, patch, size = piece.rstrip(b"\n"), bytearray(), 0
        size += len(piece)
        if size <= keep:
            patch += piece
        at_line_start = piece.endswith(b"\n")
    if head:
        yield head, bytes(patch), size


def _pieces(chunks: Iterable[bytes], end: bytes) -> Iterator[bytes]:
    """The stream, which ends with an `end`, cut after each; what is too long to hold comes in pieces."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(end)
        yield from (line + end for line in lines)
        if len(rest) > MIB:
            yield rest
            rest = b""


def _untracked(git: _Git, report: _Report, which: str) -> bool:
    first = len(report.parts)
    # Code first, then small files first, so that a directory of data does not push the code out.
    for _, size, name in sorted(_untracked_candidates(git, report, which)):
        content = _content(git.root / name, report.max_file)
        if content is None or b"\0" in content[:8000]:
            report.leave_out(name, size, "cannot be read" if content is None else "binary")
        else:
            patch = _new_file_patch(git.root / name, os.fsencode(name), content)
            report.add_patch(name, patch, len(patch))
    report.parts[first:] = sorted(report.parts[first:])
    return False


def _untracked_candidates(git: _Git, report: _Report, which: str) -> list[tuple[bool, int, str]]:
    candidates: list[tuple[bool, int, str]] = []
    is_run = cache(_is_run)
    for entry in _pieces(git.stream("ls-files", which, "--exclude-standard", "-z"), b"\0"):
        name = os.fsdecode(entry[:-1])
        size = _size_of(git.root / name)
        if run := next((parent for parent in Path(name).parents[:-1] if is_run(git.root / parent)), None):
            report.leave_out(f"{run}/", size, "the output of a run")
        elif name.endswith("/"):
            report.leave_out(name, None, "a repository of its own")
        elif _is_secret_file(name):
            report.leave_out(name, size, _SECRET)
        elif (size or 0) > report.max_file:
            report.leave_out(name, size, f"over the limit of {_size(report.max_file)} for an untracked file")
        elif (is_data := not _SOURCE.fullmatch(name)) and len(candidates) >= _MAX_DATA_FILES:
            report.leave_out(f"{Path(name).parent}/", size, f"more than {_MAX_DATA_FILES} untracked files")
        else:
            candidates.append((is_data, size or 0, name))
    return candidates


def _size_of(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        return path.lstat().st_size if path.is_symlink() or path.is_file() else None
    return None


def _is_run(directory: Path) -> bool:
    holds = {name: (directory / name).exists() for name in ("config.json", "run.json", "metrics.jsonl")}
    return holds["config.json"] and (holds["run.json"] or holds["metrics.jsonl"])


def _is_secret_file(path: str) -> bool:
    name = path.rpartition("/")[2].lower()
    return bool(_SECRET_FILE.match(name)) and not name.endswith((".example", ".sample", ".template", ".dist"))


def _content(path: Path, limit: int) -> bytes | None:
    """What a file or a link itself holds; None if it is gone, grew or became a link meanwhile."""
    try:
        if path.is_symlink():
            return os.fsencode(os.readlink(path))  # noqa: PTH115, a Path would shorten it
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            content = file.read(limit + 1)
    except OSError:
        return None
    return content if len(content) <= limit else None


def _new_file_patch(path: Path, name: bytes, content: bytes) -> bytes:
    mode = b"120000" if path.is_symlink() else b"100755" if os.access(path, os.X_OK) else b"100644"
    new = _quoted(b"b/" + name)
    head = b"diff --git %s %s\nnew file mode %s\n" % (_quoted(b"a/" + name), new, mode)
    if not content:
        return head + b"index %s..e69de29bb2d1d6434b8b29ae775ad8c2e48c5391\n" % (b"0" * 40)
    lines = content.removesuffix(b"\n").split(b"\n")
    body = b"".join(b"+%s\n" % line for line in lines)
    body += b"" if content.endswith(b"\n") else b"\\ No newline at end of file\n"
    tab = b"\t" if b" " in new else b""  # ends a name with spaces
    return head + b"--- /dev/null\n+++ %s%s\n@@ -0,0 +1,%d @@\n" % (new, tab, len(lines)) + body


def _quoted(name: bytes) -> bytes:
    quoted, changes = re.subn(rb'[^ -~]|["\\]', lambda match: b"\\%03o" % match[0][0], name)
    return b'"%s"' % quoted if changes else name


def _path_of(head: bytes) -> str:
    """The path in `diff --git a/PATH b/PATH`; without renames both halves are the same."""
    if head.startswith(b"*"):
        return os.fsdecode(head.removeprefix(b"* Unmerged path "))
    name = head.removeprefix(b"diff --git ")
    name = name[: len(name) // 2]
    if name.startswith(b'"'):  # git's escapes are a part of Python's
        name = name[1:-1].decode("unicode_escape").encode("latin-1")
    return os.fsdecode(name[2:])


class _GitProblem(Exception):
    """Git is missing, refuses, fails or hangs; the message says which and what helps."""


@dataclass
class _Git:
    root: Path
    deadline: float

    def stream(self, *arguments: str) -> Iterator[bytes]:
        command = ["git", *(word for line in _SETTINGS.split() for word in ("-c", line)), *arguments]
        env = {name: value for name, value in os.environ.items() if not _FOREIGN.fullmatch(name)}
        env |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1"}
        env["LC_ALL"] = "C"
        with tempfile.TemporaryFile() as errors:
            process = Popen(
                command, cwd=self.root, env=env, stdin=DEVNULL, stdout=PIPE, stderr=errors, process_group=0
            )
            try:
                yield from self._chunks(process)
            except TimeoutExpired as error:
                raise _GitProblem(f"git {arguments[0]} did not finish in time") from error
            finally:
                with contextlib.suppress(OSError, TimeoutExpired):
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait(1)
            if process.returncode:
                errors.seek(0)
                raise _GitProblem(_explained(errors.read(4096).decode("utf-8", "replace"), self.root))

    def _chunks(self, process: Popen[bytes]) -> Iterator[bytes]:
        assert process.stdout is not None
        with process.stdout, selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while (left := self.deadline - time.monotonic()) > 0 and selector.select(left):
                if not (chunk := os.read(process.stdout.fileno(), 65536)):
                    process.wait(max(0.1, left))
                    return
                yield chunk
        raise TimeoutExpired(process.args, left)

    def answer(self, *arguments: str) -> str | None:
        """What a question is answered with; None where git has no answer."""
        try:
            return b"".join(self.stream(*arguments)).decode("utf-8", "replace").strip() or None
        except _GitProblem:
            if time.monotonic() >= self.deadline:
                raise
            return None


def _explained(complaint: str, directory: Path) -> str:
    if _NOWHERE in complaint:
        return f"{directory} is {_NOWHERE}; `git init` there lets the next run record its code"
    if "dubious ownership" in complaint:
        owned = re.search(r"repository at '(.*)'", complaint)
        allow = f"git config --global --add safe.directory '{owned[1] if owned else directory}'"
        return f"git does not read a repository that another user owns; to allow it: {allow}"
    return f"git failed in {directory}: {complaint.strip().partition(chr(10))[0] or 'it gave no reason'}"


@dataclass
class _Report:
    max_total: int
    max_file: int
    parts: list[bytes] = field(default_factory=list)
    skipped: set[str] = field(default_factory=set)
    _used: int = 0
    _left_out: dict[tuple[str, str], int] = field(default_factory=dict)
    _left_out_files: int = 0
    _redacted: dict[str, int] = field(default_factory=dict)

    def add_patch(self, path: str, patch: bytes, size: int) -> None:
        if self._used + size > self.max_total:
            self.skipped.add(path)
            self.leave_out(path, size, f"over the limit of {_size(self.max_total)} for all of code.diff")
            return
        self._used += size
        text = patch.decode("utf-8", "surrogateescape")
        clean = redact_text(text)
        if clean != text:
            pairs = zip(text.split("\n"), clean.split("\n"), strict=True)
            self._redacted[path] = self._redacted.get(path, 0) + sum(old != new for old, new in pairs)
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
