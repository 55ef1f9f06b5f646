"""The front door: fast help, clear errors, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import preloaded

ROLLBOOK = str(Path(sys.executable).parent / "rollbook")


def call(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([ROLLBOOK, *arguments], capture_output=True, text=True, cwd=cwd)


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
from rollbook.cli.main import main
main(["--help"])
heavy = {"typer", "rich", "msgspec", "numpy", "yaml", "asyncio", "duckdb", "pyarrow", "torch"}
heavy &= set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_the_commands(arguments: list[str]) -> None:
    result = call(*arguments)
    assert result.returncode == 0
    assert "demo" in result.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["query", "--schema"]])
def test_a_reader_who_has_seen_enough_ends_a_command_quietly(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as nobody:
        result = subprocess.run([ROLLBOOK, *arguments], stdout=nobody, stderr=subprocess.PIPE, text=True)
    assert result.returncode not in (0, 2)
    assert result.stderr == ""


def test_version() -> None:
    assert call("--version").stdout.startswith("rollbook 0.")


def test_unknown_command_suggests_the_nearest() -> None:
    result = call("dmo")
    assert result.returncode == 2
    assert "did you mean `rollbook demo`?" in result.stderr
    assert result.stdout == ""


def test_wrong_option_is_a_usage_error() -> None:
    assert call("demo", "--sede", "3").returncode == 2


def test_every_command_has_json_and_help() -> None:
    from rollbook.cli.main import COMMANDS

    for command in COMMANDS:
        result = preloaded.run("rollbook", command, "--help")
        assert result.returncode == 0, command
        assert "--json" in result.stdout, command


def test_demo_refuses_a_directory_with_something_in_it(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    refused = call("demo", ".", cwd=tmp_path)
    assert refused.returncode == 2
    assert "is not empty" in refused.stderr and "Traceback" not in refused.stderr


def test_hostile_text_is_made_printable() -> None:
    from rollbook.cli.output import printable

    assert printable("a\x1b[31mb\u202ec\td\n") == "a<U+001B>[31mb<U+202E>c\td\n"
