"""Small collections for tests: rows, a config, the command itself, and a strict reader of what came out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
import yaml

from rollbook.collect.collect import collect
from rollbook.collect.settings import CollectSettings, load_settings
from rollbook.records.progress import Progress

ROLLBOOK = [sys.executable, "-c", "from rollbook.cli.main import main; main()"]
COLLECT = [*ROLLBOOK, "collect"]
PATIENCE = 120.0


def row(name: str | None, question: str = "What is 1 + 1?", **fields: Any) -> dict[str, Any]:
    """An arithmetic row; without a name it is known by its content."""
    asked = {"responses_create_params": {"input": [{"role": "user", "content": question}]}}
    return {**({} if name is None else {"id": name}), **asked, "expected_answer": "2", **fields}


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(item) + b"\n" for item in rows))
    return path


def small_input(directory: Path, count: int = 10) -> Path:
    return write_rows(directory / "in.jsonl", (row(f"t{number}") for number in range(count)))


def expected_keys(count: int, repeats: int = 1) -> set[str]:
    return {f"t{number}#{repeat}" for number in range(count) for repeat in range(repeats)}


def config(directory: Path, policy: dict[str, Any] | None = None, **settings: Any) -> Path:
    """`rollbook.yaml` with one agent, `a`, that answers arithmetic as scripted."""
    agent = {"env": {"name": "arithmetic"}, "policy": policy or {"kind": "scripted", "script": ["2"]}}
    path = directory / "rollbook.yaml"
    path.write_text(yaml.safe_dump({"agents": {"a": agent}, **settings}))
    return path


def script(directory: Path, body: str, name: str = "script.py") -> dict[str, Any]:
    """A policy that runs `def act(request)` with this body; a change of the body is not a new agent."""
    path = directory / name
    lines = "\n    ".join(body.splitlines())
    path.write_text(f"import asyncio, os, pathlib, random, time\n\nasync def act(request):\n    {lines}\n")
    return {"kind": "scripted", "script": f"{path}:act"}


def settings(directory: Path, *words: str) -> CollectSettings:
    """The settings of a collection of `directory`'s in.jsonl into its out.jsonl."""
    own = [
        "agent_name=a",
        f"input_jsonl_fpath={directory / 'in.jsonl'}",
        f"output_jsonl_fpath={directory / 'out.jsonl'}",
    ]
    return load_settings([*own, *words], config=directory / "rollbook.yaml")


def run(directory: Path, *words: str, said: list[str] | None = None) -> Progress:
    said = [] if said is None else said
    return collect(settings(directory, *words), log=said.append)


def words(directory: Path, *more: str) -> list[str]:
    return [
        f"--config={directory / 'rollbook.yaml'}",
        f"--artifacts={directory / 'artifacts'}",
        "+agent_name=a",
        f"+input_jsonl_fpath={directory / 'in.jsonl'}",
        f"+output_jsonl_fpath={directory / 'out.jsonl'}",
        *more,
    ]


def command(directory: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """The command itself, to its end."""
    return subprocess.run(
        [*COLLECT, *words(directory, *more)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def start(directory: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COLLECT, *words(directory, *more)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def results(path: Path) -> list[dict[str, Any]]:
    """Every line of an output, each of which must be whole and begin with its key."""
    content = path.read_bytes()
    assert content == b"" or content.endswith(b"\n"), "a torn line"
    lines = content.split(b"\n")[:-1]
    assert all(line.startswith(b'{"_rb_key":"') for line in lines)
    return [orjson.loads(line) for line in lines]


def keys(path: Path) -> list[str]:
    return [result["_rb_key"] for result in results(path)]


def assert_exactly_once(path: Path, expected: set[str]) -> None:
    found = keys(path)
    assert len(found) == len(set(found)), "a key stands on two lines"
    assert set(found) == expected
