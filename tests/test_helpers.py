"""The tests' own helpers, where a mistake in one would make other tests pass or fail for no reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import preloaded

# A worker is to pytest-xdist's first process what the second of these is to the first.
STARTS_CHILDREN = """
import os, signal, subprocess, sys
from helpers.signals import let_children_hear_signals
let_children_hear_signals()
os.kill(os.getpid(), signal.{name})
kill = "import os, signal; os.kill(os.getpid(), signal.{name})"
print(subprocess.run([sys.executable, "-c", kill]).returncode)
if sys.argv[1] == "first":
    subprocess.run([sys.executable, __file__, "worker"], check=True)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_an_ignored_signal_is_not_handed_down(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STARTS_CHILDREN.format(name=name))
    done = subprocess.run(
        ["sh", "-c", f'trap "" {name.removeprefix("SIG")}; exec "$@"', "sh", sys.executable, script, "first"],
        env={"PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    number = -getattr(signal, name)
    assert done.stdout.split() == [str(number), str(number)], done.stderr


SHOWS = "import os, sys; print(*sys.argv, os.getcwd(), os.environ['X'], sys.path[0] == '')"
WAITS = """
import os, time
open("pid", "w").write(str(os.getpid()))
os.rename("pid", "pid.whole")
time.sleep(600)
"""


def test_a_preloaded_command_is_a_process_in_all_but_its_imports(tmp_path: Path) -> None:
    said = preloaded.run(
        *(
            "python",
            "-c",
            "import os, sys; print(*sys.argv, os.getcwd(), os.environ['X'], sys.path[0] == '')",
            "a b",
        ),
        cwd=tmp_path,
        env={**os.environ, "X": "1"},
    )
    assert said.stdout.split() == ["-c", "a", "b", str(tmp_path), "1", "True"]
    for code, ended, printed in (
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('why')", 1, "why\n"),
        ("raise KeyError(1)", 1, "KeyError: 1\n"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import atexit; kept = open('kept', 'w'); kept.write('x'); atexit.register(print, 'end')", 0, ""),
    ):
        done = preloaded.run("python", "-c", code, cwd=tmp_path)
        assert done.returncode == ended and done.stderr.endswith(printed), done.stderr
    assert done.stdout == "end\n" and (tmp_path / "kept").read_text() == "x"
    assert "no command 'stauts'" in preloaded.run("rollbook", "stauts").stderr


def test_two_preloaded_commands_draw_other_numbers() -> None:
    code = (
        "import random, numpy, torch, uuid\n"
        "print(random.random(), numpy.random.rand(), float(torch.rand(())), uuid.uuid4())\n"
        "print(torch.get_num_threads())"
    )
    first, second = (preloaded.run("python", "-c", code).stdout.split() for _ in range(2))
    assert set(first) & set(second) == {"1"}


def test_what_imports_read_must_be_as_it_was() -> None:
    with pytest.raises(AssertionError, match=r"imports read .*HF_HOME"):
        preloaded.run("rollbook", "--version", env={**os.environ, "HF_HOME": "/elsewhere"})


def test_a_preloaded_command_ends_with_whoever_asked_for_it(tmp_path: Path) -> None:
    with (
        (tmp_path / "out").open("w") as out,
        preloaded.Process(["python", "-c", WAITS], cwd=tmp_path, stdout=out, stderr=out) as process,
    ):
        while not (tmp_path / "pid.whole").exists():
            assert process.poll() is None
            time.sleep(0.01)
        assert (tmp_path / "pid.whole").read_text() == str(process.pid)
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_in_a_shell_it_has_its_pipes_and_its_exit_status(tmp_path: Path) -> None:
    line = "rollbook stauts 2>&1 | cat; echo ${PIPESTATUS[0]}; rollbook --version > file; echo $?"
    environment = preloaded.typed_environment(tmp_path)
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "did you mean `rollbook status`" in done.stdout
    assert done.stdout.split()[-2:] == ["2", "0"]
    assert (tmp_path / "file").read_text().startswith("rollbook ")
