"""What a person sees: lines that stay, and on a terminal a last line that does not."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
from io import StringIO
from pathlib import Path

import pytest

from rollbook.rl.console import Console, line_of
from rollbook.rl.live_line import LiveLine
from rollbook.rl.player import Played


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError("no descriptor")


def screen(written: str) -> list[str]:
    """The lines as a terminal shows them in the end."""
    lines = []
    for line in written.split("\n"):
        shown = ""
        for piece in line.split("\r"):
            shown = piece + shown[len(piece) :]
        lines.append(shown.rstrip())
    return lines


def test_a_live_line_leaves_nothing_behind_and_never_wraps() -> None:
    terminal = Terminal()
    live = LiveLine(terminal)
    live.show("a long text " * 20)
    assert screen(terminal.getvalue()) == [("a long text " * 20)[:79].rstrip()]
    live.show("short")
    assert screen(terminal.getvalue()) == ["short"]
    live.clear()
    terminal.write("stays\n")
    live.clear()
    assert screen(terminal.getvalue()) == ["stays", ""]


def test_a_live_line_knows_how_wide_the_terminal_is() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        os.set_blocking(ours, False)

        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 11, 0, 0))
        LiveLine(stream).show("0123456789abcdef")
        assert os.read(ours, 100) == b"\r0123456789"
    os.close(ours)


def test_a_log_gets_whole_lines_only(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        LiveLine(stream).show("something")
    assert (tmp_path / "log").read_text() == ""


def test_the_time_that_is_left_follows_from_the_last_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    console = Console(lambda text: print(text), total=8, samples_every=0)
    console.progress("iteration 0", 3, 16)
    assert screen(terminal.getvalue()) == ["iteration 0: 3 of 16 rollouts"]
    for i, seconds in enumerate((100.0, 20.0, 30.0)):
        console.iteration(i, {"time/total": seconds}, Played([], 0, 0, 0, {}))
    console.now("iteration 3: training on 12 sequences")
    *stay, live = screen(terminal.getvalue())
    assert live == "iteration 3: training on 12 sequences; about 0:02:30 left"
    assert stay[0].startswith("iteration") and [line[:3] for line in stay[1:]] == ["0/8", "1/8", "2/8"]


def test_text_of_a_model_is_shown_in_one_line_without_control_characters() -> None:
    call = {"function": {"name": "calculate", "arguments": {"expression": "1"}}}
    shown = line_of({"role": "assistant", "content": "a\x1b[2Jb\nc", "tool_calls": [call]})
    assert (
        shown == r"assistant: 'a\x1b[2Jb\nc' [calls {'name': 'calculate', 'arguments': {'expression': '1'}}]"
    )
    assert re.search(r"\.\.\. \(1,?000 characters\)", line_of({"role": "user", "content": "x" * 1000}))
