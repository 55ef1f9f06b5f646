"""Starts collections and kills them at the appointed time; a fork spares each of them the imports.

Reads one JSON request a line from stdin, answers with one line. A request names the words of the command,
the working directory, and what to kill when:

    {"words": [...], "log": "...", "output": "...", "kill": "KILL"|"TERM"|"TERM TERM"|"worker"|null,
     "after_s": 0.1, "after_bytes": 3000}

It strikes once both the time has passed and the output has grown so much. The answer holds the exit code and
the pids of the worker processes there were.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import orjson

from rollbook.cli.main import main
from rollbook.collect import collect as collector

collector._REPORT_EVERY_S = 0.01  # every kill meets a fresh count of what is acknowledged
HANGS_AFTER_S = 90.0


def child(request: dict[str, Any]) -> NoReturn:
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        main(["collect", *request["words"]])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def workers_of(pid: int) -> list[int]:
    """The children of all threads: the loop of a collection, which starts them, runs in one of its own."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += [int(word) for word in children.read_text().split()]
    return found


def size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except FileNotFoundError:
        return 0


def strike(pid: int, kind: str) -> int:
    """How many kills that was."""
    if kind == "worker":
        workers = workers_of(pid)
        if not workers:
            return 0
        os.kill(random.choice(workers), signal.SIGKILL)
        return 1
    for name in kind.split():
        os.kill(pid, signal.Signals[f"SIG{name}"])
    return 1


def watch(pid: int, request: dict[str, Any]) -> dict[str, Any]:
    started, before = time.monotonic(), size(request["output"])
    workers: set[int] = set()
    kills = 0
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return {"code": code, "workers": sorted(workers), "kills": kills}
        workers.update(workers_of(pid))
        since = time.monotonic() - started
        due = since >= request["after_s"] and size(request["output"]) - before >= request["after_bytes"]
        if request["kill"] and due and (kills == 0 or request["kill"] == "worker"):
            kills += strike(pid, request["kill"])
            before = size(request["output"])
        if since > HANGS_AFTER_S:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return {"code": "hangs", "workers": sorted(workers), "kills": kills}
        time.sleep(0.001)


def serve() -> None:
    for line in sys.stdin:
        request = orjson.loads(line)
        pid = os.fork()
        if pid == 0:
            child(request)
        print(orjson.dumps(watch(pid, request)).decode(), flush=True)


if __name__ == "__main__":
    serve()
