"""A job of the tests: it leaves word of what it was started with, or ends as it is told to."""

from __future__ import annotations

import json
import random  # one that lies in the working directory must not be taken
from pathlib import Path
from typing import Any

import msgspec

from rollbook.errors import RollbookError
from rollbook.runs.launch import Log, Started, run_child


class Settings(msgspec.Struct):
    text: str
    fail: bool = False


class Failed(RollbookError):
    exit_code = 7


def train(started: Started[Settings], log: Log) -> None:
    if started.settings.fail:
        raise Failed("it was told to")
    log(f"at work on {started.settings.text}")
    found: dict[str, Any] = msgspec.to_builtins(started.settings)
    found |= {"resume": started.resume, "overwrite": started.overwrite, "random": random.__file__}
    Path("found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    run_child("launched_job", Settings, train)
