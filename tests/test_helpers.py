"""The tests' own helpers, where a mistake in one would make other tests pass or fail for no reason."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

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
