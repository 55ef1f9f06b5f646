"""What `--detach` prints can be typed as it stands."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from rollbook.cli.main import main


def call(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
        raise SystemExit(0)
    return ended.value.code or 0


def test_the_commands_that_detach_prints_work_for_any_name_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    waiting = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(600)"]
    call("run", "a name", "--artifacts", "other place", "--detach", "--", *waiting)
    printed = capsys.readouterr().out
    logs, status, stop = (shlex.split(line.partition("rollbook ")[2]) for line in printed.splitlines()[1:])
    logs.remove("-f")  # else it stays
    assert (call(*logs), call(*status), call(*stop)) == (0, 3, 0), capsys.readouterr()  # 3: it is running
