"""code.diff brings back the code of a run, and leaves the repository as it was."""

from __future__ import annotations

import os
import random
import re
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollbook.records.code_state import CodeState, capture_code, write_code_diff

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)


def git(repo: Path, *arguments: str, check: bool = True) -> str:
    identity = ("-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always")
    command = ["git", *identity, *arguments]
    done = subprocess.run(command, cwd=repo, check=False, capture_output=True)
    assert not check or done.returncode == 0, done.stderr.decode()
    return done.stdout.decode("utf-8", "surrogateescape")


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    root = tmp_path / "my project"
    root.mkdir()
    git(root, "init", "--quiet", "--initial-branch=main")
    write(root / "train.py", "".join(f"line {n}\n" for n in range(40)))
    write(root / "sub dir" / '\u00e9 "q".py', "x = 1\n")
    write(root / "gone.py", "bye\n")
    write(root / "tool.sh", "echo\n")
    write(root / ".gitignore", "ignored/\n")
    git(root, "add", "-A")
    git(root, "commit", "--quiet", "-m", "first")
    return root


def tree(root: Path, *, but: tuple[str, ...] = (".git",)) -> dict[str, tuple[str, bytes]]:
    """Every file below root with its kind and content."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if name.split("/")[0] in but or (path.is_dir() and not path.is_symlink()):
            continue
        if path.is_symlink():
            found[name] = ("link", os.fsencode(os.readlink(path)))  # noqa: PTH115
        else:
            kind = "program" if path.stat().st_mode & stat.S_IXUSR else "file"
            found[name] = (kind, path.read_bytes())
    return found


def restore(state: CodeState, repo: Path, where: Path) -> Path:
    """A fresh clone in which the command at the head of the file has run."""
    git(repo.parent, "clone", "--quiet", "--no-checkout", str(repo), str(where))
    write_code_diff(where.parent / "code.diff", state)
    command = re.search(r"^# to bring this code back: (.*)$", state.text, re.MULTILINE)
    assert command is not None
    script = command[1].replace("code.diff", "../code.diff")
    done = subprocess.run(["sh", "-ec", script], cwd=where, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr
    return where


def change_everything(repo: Path) -> None:
    lines = (repo / "train.py").read_text().splitlines(keepends=True)
    write(repo / "train.py", "".join(["staged first\n", *lines[:20], "staged\n", *lines[20:]]))
    write(repo / "new staged.py", "a = 1\nno newline at the end")
    write(repo / "added then deleted.py", "x\n")
    write(repo / "mode 160000", "a name like a mode\n")
    write(repo / "like a submodule", "Subproject commit 1234\nBinary files a and b differ\n")
    (repo / "gone.py").unlink()
    git(repo, "add", "-A")
    write(repo / "train.py", (repo / "train.py").read_text().replace("line 3\n", "unstaged\n") + "tail")
    write(repo / "sub dir" / '\u00e9 "q".py', "x = 2\n")
    (repo / "added then deleted.py").unlink()
    (repo / "tool.sh").chmod(0o755)


def test_applied_to_the_commit_it_brings_back_every_file(repo: Path, tmp_path: Path) -> None:
    change_everything(repo)
    write(repo / "untracked.py", "u = 1\n")
    write(repo / "gone.py", "deleted in the index, back on the disk\n")
    write(repo / "submodule.md", "Subproject commit 1234\nBinary files differ\n")
    write(repo / "data" / 'na\u00efve "name"\t.md', "no end of line")
    write(repo / "empty.md", "")
    write(repo / "crlf.md", "a\r\nb\r\n")
    write(repo / "only newline.md", "\n")
    write(repo / "run.sh", "echo\n").chmod(0o755)
    write(repo / "latin1.md", "caf\u00e9\n".encode("latin-1"))
    write(repo / "ignored" / "x", "not code\n")
    write(repo / "looks like a patch.md", "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n")
    (repo / "link.py").symlink_to("./sub dir/../train.py")
    (repo / "out.md").symlink_to("/etc/passwd")
    state = capture_code(repo)
    assert (state.root, state.branch, state.dirty) == (repo.resolve(), "main", True)
    assert state.sha == git(repo, "rev-parse", "HEAD").strip()
    assert "### left out" not in state.text
    assert "root:" not in state.text
    expected = tree(repo, but=(".git", "ignored"))
    assert tree(restore(state, repo, tmp_path / "restored")) == expected


def test_the_new_files_alone_are_a_patch(repo: Path, tmp_path: Path) -> None:
    write(repo / "a b" / "new.py", "u = 1\nv = 2")
    empty = tmp_path / "empty"
    empty.mkdir()
    git(empty, "init", "--quiet")
    write(tmp_path / "patch", capture_code(repo).data)
    git(empty, "apply", str(tmp_path / "patch"))
    assert tree(empty) == {"a b/new.py": ("file", b"u = 1\nv = 2")}


_LINES = [
    b"a",
    b"b",
    b"",
    b"\xff\xfe",
    b"+x",
    b"@@ -1 +1 @@",
    b"### x",
    b"-- ",
    b"\r",
    b"Binary files differ",
]


def edit(path: Path, rng: random.Random) -> None:
    kind = rng.choice(["write", "write", "append", "delete", "mode", "link"])
    if kind == "mode" and path.is_file() and not path.is_symlink():
        path.chmod(path.stat().st_mode ^ 0o111)
        return
    old = path.read_bytes() if kind == "append" and path.is_file() and not path.is_symlink() else b""
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(rng.choice(["nowhere", "train.py", "."]))
    elif kind != "delete":
        path.write_bytes(old + b"\n".join(rng.choices(_LINES, k=rng.randrange(12))))


@pytest.mark.parametrize("seed", range(8))
def test_random_edits_are_brought_back(repo: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    names = [f"f{n}.md" for n in range(40)]

    def edit_some(share: float) -> list[str]:
        chosen = [name for name in names if rng.random() < share]
        for name in chosen:
            edit(repo / name, rng)
        return chosen

    edit_some(0.7)
    git(repo, "add", "-A")
    git(repo, "commit", "--quiet", "-m", "round")
    git(repo, "update-index", "--add", "--remove", *edit_some(0.6))
    edit_some(0.5)
    state = capture_code(repo)
    assert tree(restore(state, repo, tmp_path / "restored")) == tree(repo)


def test_a_clean_repository(repo: Path) -> None:
    state = capture_code(repo / "sub dir")
    assert (state.root, state.dirty) == (repo.resolve(), False)
    head = state.text.splitlines()
    assert head[0] == f"### repo: my project @ {state.sha}"
    assert head[1:3] == ["# branch: main", "# dirty: no"]
    assert re.fullmatch(r"# captured: \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", head[3])
    assert head[5:] == []
    assert str(repo) not in state.text


def test_a_touched_file_is_not_a_change(repo: Path) -> None:
    os.utime(repo / "train.py", (1, 1))
    state = capture_code(repo)
    assert state.dirty is False
    assert "diff --git" not in state.text


def test_a_change_in_the_second_of_the_last_git_add_is_captured(repo: Path) -> None:
    """Of the same size, it can be seen in the content alone: git looks there if the index is no newer."""
    git(repo, "config", "core.trustctime", "false")
    moment = (1_700_000_000, 1_700_000_000)
    os.utime(repo / "train.py", moment)
    git(repo, "update-index", "--refresh")
    os.utime(repo / ".git" / "index", moment)
    write(repo / "train.py", (repo / "train.py").read_text().replace("line 3\n", "like 3\n"))
    os.utime(repo / "train.py", moment)
    assert "+like 3" in capture_code(repo).text
    write(repo / "new.py", "x\n")  # for which git writes the index again
    assert "+like 3" in capture_code(repo).text


def test_untracked_files_alone_do_not_make_it_dirty(repo: Path) -> None:
    write(repo / "new.py", "x\n")
    assert capture_code(repo).dirty is False


def test_nothing_is_written(repo: Path) -> None:
    change_everything(repo)
    os.utime(repo / ".gitignore", (1, 1))
    before = {p: (p.lstat().st_mtime_ns, p.lstat().st_size) for p in repo.rglob("*")}
    index = (repo / ".git" / "index").read_bytes()
    capture_code(repo)
    assert {p: (p.lstat().st_mtime_ns, p.lstat().st_size) for p in repo.rglob("*")} == before
    assert (repo / ".git" / "index").read_bytes() == index


def test_a_user_s_settings_change_nothing(repo: Path, tmp_path: Path) -> None:
    change_everything(repo)
    plain = capture_code(repo).data
    marker = tmp_path / "ran"
    program = write(tmp_path / "program", f"#!/bin/sh\ntouch {marker}\n")
    program.chmod(0o755)
    write(repo / ".git" / "info" / "attributes", "*.py diff=mine\n")
    for setting in (
        *("color.ui=always", "color.diff=always", "core.quotePath=false", "diff.noprefix=true"),
        *("diff.mnemonicPrefix=true", "diff.renames=copies", "diff.context=9", "diff.interHunkContext=9"),
        *(
            "diff.algorithm=patience",
            "diff.relative=true",
            "diff.suppressBlankEmpty=true",
            "diff.colorMoved=zebra",
        ),
        *(f"diff.external={program}", f"diff.mine.command={program}", f"diff.mine.textconv={program}"),
        *(f"core.fsmonitor={program}", f"core.pager={program}", "diff.orderFile=.gitignore", "core.abbrev=4"),
        *("diff.submodule=log", "diff.ignoreSubmodules=all", "status.showUntrackedFiles=no"),
    ):
        git(repo, "config", *setting.split("=", 1))
    without_time = re.compile(rb"# captured: .*")
    assert without_time.sub(b"", capture_code(repo / "sub dir").data) == without_time.sub(b"", plain)
    assert not marker.exists()


def test_variables_of_a_git_hook_do_not_lead_elsewhere(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    monkeypatch.setenv("GIT_TRACE", str(tmp_path / "trace"))
    assert capture_code(repo).sha is not None
    assert not (tmp_path / "trace").exists()


def test_binary_files_are_named_with_their_size(repo: Path, tmp_path: Path) -> None:
    write(repo / "tracked.bin", b"\0" * 10)
    git(repo, "add", "-A")
    git(repo, "commit", "--quiet", "-m", "binary")
    write(repo / "tracked.bin", b"\0\1" * 1000)
    write(repo / "staged.bin", b"\0" * 700)
    git(repo, "add", "staged.bin")
    write(repo / "staged.bin", "text now\n")
    write(repo / "untracked.py", b"\x89PNG\0" + b"x" * 95)
    write(repo / "train.py", "changed\n")
    state = capture_code(repo)
    assert "#   tracked.bin (2.0 KiB): binary" in state.text
    assert "#   untracked.py (100 B): binary" in state.text
    assert "+text now" in state.text
    assert (restore(state, repo, tmp_path / "restored") / "train.py").read_text() == "changed\n"


def test_limits_are_never_silent(repo: Path, tmp_path: Path) -> None:
    write(repo / "big.md", "x" * 3000)
    for n in range(300):
        write(repo / "many" / f"{n:03}.md", "m" * 100)
    write(repo / "train.py", "y\n" * 4000)
    state = capture_code(repo, max_total=5000, max_file=2000)
    assert len(state.data) < 5000 + 200 * 200
    assert "#   big.md (2.9 KiB): over the limit of 2.0 KiB for a new file" in state.text
    assert re.search(r"#   train\.py \(\d+\.\d KiB\): over the limit of 4\.9 KiB for all", state.text)
    count = int(re.search(r"### left out: (\d+)", state.text)[1])
    assert count + state.text.count("diff --git") == 2 + 300
    assert "#   and others: the list ends here" in state.text
    restore(state, repo, tmp_path / "restored")


def test_what_git_does_not_know_and_is_not_called_like_source_is_only_listed(repo: Path) -> None:
    write(repo / "rows.jsonl", '{"password": "hunter2"}\n')
    write(repo / "notes", "hunter2\n")
    write(repo / "Makefile", "all:\n")
    text = capture_code(repo).text
    assert "hunter2" not in text and "+all:" in text
    for name in ("rows.jsonl", "notes"):
        assert re.search(rf"#   {name} \(\d+ B\): not called like source; git add it", text)


def test_a_change_far_over_the_limit_is_measured_and_not_held(repo: Path) -> None:
    write(repo / "train.py", "one line " * 1_000_000)
    write(repo / "tool.sh", "small\n")
    state = capture_code(repo)
    assert re.search(r"#   train\.py \(8\d+\.\d KiB\): over the limit of 2048\.0 KiB", state.text)
    assert "+small" in state.text


def test_secrets(repo: Path) -> None:
    secret = "sk-" + "Zx9Kq2Lm7Wp4Rt8Yv3Bn6Hd1"
    write(repo / "train.py", f'api_key = "{secret}"\n' + (repo / "train.py").read_text())
    write(repo / "notes.md", f"use {secret}\n")
    for name in (
        ".env",
        "conf/prod.pem",
        "id_rsa",
        "credentials.json",
        "tls.key",
        ".env.local",
        "hf_token.txt",
        "token",
        "token.json",
        "my_key.txt",
        ".authinfo",
    ):
        write(repo / name, "hunter2\n")
    write(repo / ".env.example", "API_KEY=\n")
    git(repo, "add", "id_rsa")
    state = capture_code(repo)
    assert secret not in state.text
    assert "hunter2" not in state.text
    assert '+api_key = "[redacted]"' in state.text
    for name in (
        ".env",
        "conf/prod.pem",
        "id_rsa",
        "credentials.json",
        "tls.key",
        ".env.local",
        "hf_token.txt",
        "token",
        "token.json",
        "my_key.txt",
        ".authinfo",
    ):
        assert re.search(rf"#   {re.escape(name)} \(\d+ B\): its name says", state.text), name
    assert "+API_KEY=" in state.text
    assert "### redacted" in state.text
    assert "#   train.py: lines 1" in state.text
    assert "#   notes.md: lines 1" in state.text


def test_files_that_are_not_utf8(repo: Path, tmp_path: Path) -> None:
    write(repo / "train.py", b"caf\xe9 = 1\n\xff\xfe\n" + (repo / "train.py").read_bytes())
    (Path(os.fsdecode(os.fsencode(repo) + b"/bad\xffname.py"))).write_bytes(b"x\n")
    state = capture_code(repo)
    state.text.encode()
    assert tree(restore(state, repo, tmp_path / "restored")) == tree(repo)


def test_names_cannot_forge_lines(repo: Path) -> None:
    write(repo / "a\n### repo: forged.py", b"\0")
    write(repo / "diff --git a\nb.py", "x\n")
    text = capture_code(repo).text
    assert len(re.findall(r"^### repo", text, re.MULTILINE)) == 1
    assert "#   a?### repo: forged.py (1 B): binary" in text


def test_the_output_of_runs_inside_the_repository_is_summed_up(repo: Path) -> None:
    for name in ("config.json", "metrics.jsonl", "deep/er.txt"):
        write(repo / "runs" / "one" / name, "1234567890")
    write(repo / "runs" / "plot.py", "p\n")
    write(repo / "artifacts" / "index.yaml", "runs: []\n")
    write(repo / "artifacts" / "archives" / "one" / "command.txt", "0987654321")
    text = capture_code(repo).text
    assert "#   runs/one/ (30 B): the output of runs" in text
    assert "#   artifacts/ (19 B): the output of runs" in text
    assert "1234567890" not in text and "0987654321" not in text
    assert "+p\n" in text


def test_submodules_and_nested_repositories_are_short(repo: Path, tmp_path: Path) -> None:
    library = tmp_path / "library"
    shutil.copytree(repo, library)
    git(repo, "submodule", "--quiet", "add", str(library), "libs/one")
    git(repo, "commit", "--quiet", "-m", "submodule")
    assert capture_code(repo).dirty is False
    write(repo / "libs" / "one" / "train.py", "inside\n")
    state = capture_code(repo)
    assert state.dirty is True
    sha = git(library, "rev-parse", "HEAD").strip()
    assert f"#   libs/one: submodule, {sha} -> {sha}-dirty" in state.text
    assert "inside" not in state.text
    shutil.copytree(library, repo / "nested")
    assert re.search(r"#   nested/: a repository of its own", capture_code(repo).text)


def test_before_the_first_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet", "--initial-branch=trunk")
    write(tmp_path / "staged.py", "s\n")
    git(tmp_path, "add", "-A")
    write(tmp_path / "untracked.py", "u\n")
    state = capture_code(tmp_path)
    assert (state.sha, state.branch, state.dirty) == (None, "trunk", True)
    assert state.text.splitlines()[0].endswith("@ no commits yet")
    assert "+s\n" in state.text
    assert "+u\n" in state.text


def test_a_detached_head_a_conflict_and_intent_to_add(repo: Path, tmp_path: Path) -> None:
    git(repo, "checkout", "--quiet", "-b", "side")
    write(repo / "train.py", "theirs\n")
    git(repo, "commit", "--quiet", "-am", "side")
    git(repo, "checkout", "--quiet", "--detach", "main")
    write(repo / "train.py", "ours\n")
    git(repo, "commit", "--quiet", "-am", "ours")
    git(repo, "merge", "side", check=False)
    write(repo / "planned.py", "p\n")
    git(repo, "add", "-N", "planned.py")
    state = capture_code(repo)
    assert (state.branch, state.dirty) == (None, True)
    assert "detached" in state.text
    restored = restore(state, repo, tmp_path / "restored")
    assert "<<<<<<<" in (restored / "train.py").read_text()
    assert (restored / "planned.py").read_text() == "p\n"


def test_a_worktree_and_a_file_as_start(repo: Path, tmp_path: Path) -> None:
    git(repo, "worktree", "add", "--quiet", str(tmp_path / "second"))
    state = capture_code(tmp_path / "second" / "train.py")
    assert (state.root, state.branch) == ((tmp_path / "second").resolve(), "second")


@pytest.mark.parametrize("start", ["", "missing", "missing/deeper/still"])
def test_no_repository_is_a_note(tmp_path: Path, start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    state = capture_code(tmp_path / start)
    assert (state.root, state.sha, state.branch, state.dirty) == (None, None, None, None)
    assert state.text.startswith("### no repository\n# ")
    assert len(state.text.splitlines()) == 2


def test_inside_the_git_directory_and_in_a_bare_repository(repo: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--quiet", "--bare", str(repo), "bare")
    for start in (repo / ".git", tmp_path / "bare"):
        assert capture_code(start).text.startswith("### no repository\n# git failed in ")


def fake_git(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    write(directory / "bin" / "git", f"#!/bin/sh\n{script}\n").chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory / 'bin'}:{os.environ['PATH']}")


def test_no_git(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert "git is not installed" in capture_code(repo).text


def test_a_git_that_fails(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_git(tmp_path, monkeypatch, "echo 'fatal: broken pack' >&2; exit 128")
    assert "broken pack" in capture_code(repo).text


def test_a_git_that_hangs_is_ended_with_its_children(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_git(tmp_path, monkeypatch, f"sleep 600 & echo $! > {tmp_path}/child; wait")
    state = capture_code(repo, timeout_s=1)
    assert "git rev-parse did not finish in time" in state.text
    child = int((tmp_path / "child").read_text())
    for _ in range(200):
        status = Path(f"/proc/{child}/stat")
        if not status.exists() or ") Z " in status.read_text():
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child of git is still running")


def test_a_diff_that_hangs_or_never_ends_leaves_the_commit(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(repo / "new.py", "n\n")
    real = shutil.which("git")
    for trouble in ("sleep 600", "yes"):
        fake_git(tmp_path, monkeypatch, f'for a; do [ "$a" = diff ] && {trouble}; done; exec {real} "$@"')
        state = capture_code(repo, timeout_s=2)
        assert state.sha == git(repo, "rev-parse", "HEAD").strip()
        assert state.dirty is None
        assert "# dirty: unknown" in state.text
        assert "### not captured in full\n# git diff did not finish in time" in state.text
        assert len(state.data) < 10_000
        shutil.rmtree(tmp_path / "bin")


def test_a_repository_of_another_user(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    state = capture_code(repo)
    assert state.sha is None
    assert f"git config --global --add safe.directory '{repo}'" in capture_code(repo / "sub dir").text


def test_by_default_the_script_s_repository_else_the_current_directory(repo: Path, tmp_path: Path) -> None:
    source = Path(sys.modules[CodeState.__module__].__file__ or "").parents[2]
    code = "from rollbook.records.code_state import capture_code; print(capture_code().root)"
    script = write(repo / "main.py", code)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    git(elsewhere, "init", "--quiet")
    environment = {**os.environ, "PYTHONPATH": str(source), "GIT_CEILING_DIRECTORIES": str(tmp_path)}

    def run(*arguments: str | Path) -> str:
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(
            command, cwd=elsewhere, env=environment, check=True, capture_output=True, text=True
        ).stdout.strip()

    assert run(script) == str(repo.resolve())
    assert run("-c", code) == str(elsewhere.resolve())
    assert run(write(tmp_path / "loose.py", code)) == str(elsewhere.resolve())
    assert run(write(repo / ".venv" / "lib" / "site-packages" / "tool.py", code)) == str(elsewhere.resolve())


def test_the_file_is_what_was_captured(repo: Path, tmp_path: Path) -> None:
    state = capture_code(repo)
    write_code_diff(tmp_path / "run" / "code.diff", state)
    assert (tmp_path / "run" / "code.diff").read_bytes() == state.data
    assert state.text == state.data.decode()
