"""A collection is a run like any other: in the history, seen from another terminal, detached and stopped."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from collecting import (
    ROLLBOOK,
    assert_exactly_once,
    config,
    expected_keys,
    row,
    script,
    small_input,
    write_rows,
)
from helpers import preloaded
from rollbook.collect.settings import CollectSettings
from rollbook.records.locks import FileLock
from rollbook.rollouts.retry import RetrySettings

WAIT = 60.0
SLOW = """
if not pathlib.Path(__file__).with_name("hurry").exists():
    await asyncio.sleep(0.1)
return "2"
""".strip()
MANY = 3000  # more than are done before somebody puts an end to it
WORDS = ("+agent_name=a", "+input_jsonl_fpath=in.jsonl", "+output_jsonl_fpath=out.jsonl")


class Terminal:
    """Types commands in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._started: list[subprocess.Popen[str]] = []
        self._environment = {name: value for name, value in os.environ.items() if "ROLLBOOK" not in name}

    def __call__(self, *words: str, code: int = 0) -> str:
        done = self._run(*words, code=code)
        return done.stdout + done.stderr

    def json(self, *words: str, code: int = 0) -> Any:
        return json.loads(self._run(*words, "--json", code=code).stdout)

    def _run(self, *words: str, code: int) -> subprocess.CompletedProcess[str]:
        done = preloaded.run("rollbook", *words, cwd=self.directory, env=self._environment)
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def start(self, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*ROLLBOOK, *words],
            cwd=self.directory,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.__exit__(None, None, None)

    def runs(self) -> list[dict[str, Any]]:
        """The history as it stands in the file, without anyone judging it: newest last."""
        path = self.directory / "artifacts" / "index.yaml"
        lines = path.read_bytes().splitlines()[1:] if path.exists() else []
        runs: dict[str, dict[str, Any]] = {}
        for event in map(orjson.loads, (line[2:] for line in lines)):
            runs.setdefault(event["id"], {}).update(event)
        return list(runs.values())


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    small_input(tmp_path, 4)
    config(tmp_path)
    opened = Terminal(tmp_path)
    yield opened
    opened.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def progress_of(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = orjson.loads(path.read_bytes()) if path.exists() else {}
    return content


def test_a_finished_collection_in_the_history(terminal: Terminal, tmp_path: Path) -> None:
    terminal("collect", *WORDS, "num_repeats=2")
    shown = terminal.json("status", "out")
    assert (shown["status"], shown["kind"], shown["exit_code"]) == ("completed", "collect", 0)
    assert shown["metrics"] == {
        "reward_mean": 1.0,
        "reward_std_error": 0.0,
        "ok": 8,
        "failed": 0,
        "missing": 0,
        "expected": 8,
    }
    assert shown["progress"]["source"] == "out_progress.json"
    (run,) = terminal.runs()
    assert (run["output_dir"], run["progress_file"]) == (".", "out_progress.json")
    assert run["command"] == ["rollbook", "collect", *WORDS, "num_repeats=2"]
    archive = tmp_path / run["archive"]
    snapshot = orjson.loads((archive / "snapshot.json").read_bytes())
    assert (snapshot["missing"], len(snapshot["files"])) == ({}, 6)
    assert orjson.loads((archive / "config.json").read_bytes())["num_repeats"] == 2
    manifest = orjson.loads((tmp_path / "out_manifest.json").read_bytes())
    (data,) = orjson.loads((archive / "data.json").read_bytes())
    assert data["sha256"] == manifest["input_sha256"]
    assert "orjson" in orjson.loads((archive / "versions.json").read_bytes())["packages"]
    heading, line = terminal("history").splitlines()[:2]
    assert heading.split()[-4:] == [
        "rollouts",
        "reward",
        "std",
        "error",
    ]  # and no loss, steps or checkpoint, which none has
    assert line.split()[-3:] == ["8/8", "1", "0"]


def test_how_collections_end(terminal: Terminal, tmp_path: Path) -> None:
    """Asked to stop, too many failures, some failures, an error: each by its name and reason."""
    write_rows(tmp_path / "in.jsonl", (row(f"t{n}", "fail" if n < 3 else "fine") for n in range(40)))
    body = (
        "await asyncio.sleep(0.05)\nif 'fail' in request.messages[0]['content']:\n    raise ValueError('no')"
    )
    config(tmp_path, script(tmp_path, f"{body}\nreturn '2'"))
    words = (*WORDS, "+num_samples_in_parallel=1", "retry.bad_answer=1")
    terminal("collect", *words, "--name=rate", "max_failure_rate=0.5", "min_samples=2", code=3)
    terminal("collect", *words, "--name=time", "--stop-after=0.5s", code=3)
    terminal("collect", *words, "--name=some", code=3)
    rate, stopped, some = terminal.runs()
    assert (rate["name"], rate["status"], rate["exit_code"]) == ("rate", "failed", 3)
    assert "2 of 2 rollouts failed, more than max_failure_rate=0.5" in rate["reason"]
    assert (stopped["status"], stopped["reason"]) == ("interrupted", "stop_after=0.5s is over")
    assert (some["status"], some["reason"]) == ("failed", "3 of 40 rollouts are missing")
    assert some["metrics"] == {
        "reward_mean": 1.0,
        "reward_std_error": 0.0,
        "ok": 37,
        "failed": 3,
        "missing": 3,
        "expected": 40,
    }
    shown = terminal("status", code=4)
    assert (
        "rollouts:   37 of 40 " in shown and "failures:   3 given up; attempts by kind: bad_answer 3" in shown
    )
    assert "to resume: rollbook collect +agent_name=a" in shown
    # An earlier session of the same output is shown by what the history kept of it.
    assert terminal.json("status", "rate", code=4)["progress"]["collection"]["failed"] == 2


def test_what_is_refused_is_no_run(terminal: Terminal, tmp_path: Path) -> None:
    terminal("collect", *WORDS, "limit=2")
    terminal("collect", *WORDS, "responses_create_params.temperature=1", code=2)
    said = terminal("collect", *WORDS, "--stop-after", "90", code=2)
    assert "stop_after: '90' is not a duration; write 90s or 90m" in said
    assert "cannot name a run" in terminal("collect", *WORDS, "--name=latest", code=2)
    assert len(terminal.runs()) == 1


def test_a_killed_collector_is_lost_and_its_file_not_believed(terminal: Terminal, tmp_path: Path) -> None:
    small_input(tmp_path, MANY)
    config(tmp_path, script(tmp_path, SLOW))
    process = terminal.start("collect", *WORDS, "+num_samples_in_parallel=2")
    own = tmp_path / "out_progress.json"
    until(lambda: progress_of(own).get("done", 0) > 0)
    other = {**progress_of(own), "done": 1, "expected": 1, "status": "complete", "output": "other.jsonl"}
    (tmp_path / "other_progress.json").write_bytes(orjson.dumps(other))
    (tmp_path / "metrics.jsonl").write_text('{"step": 7, "loss": 1.0}\n')
    shown = terminal("status", code=3)
    assert f" of {MANY}, " in shown and "2 in flight" in shown and "/s" in shown and "left" in shown
    assert "rollbook status --watch" in shown
    assert terminal.json("status", "out.jsonl", code=3)["status"] == "running"
    process.kill()
    process.wait(WAIT)
    assert progress_of(own)["status"] == "running"
    for ref in ("out.jsonl", "out"):
        shown = terminal.json("status", ref, code=4)
        assert (shown["status"], shown["progress"]["collection"]["status"]) == ("lost", "lost")
        assert shown["progress"]["collection"]["done"] == progress_of(own)["done"]
        assert shown["progress"]["eta_s"] is None
    assert terminal("status", "out.jsonl", code=4).count("is gone") == 1
    (tmp_path / "hurry").touch()
    terminal("collect", *WORDS)
    assert [run["status"] for run in terminal.runs()] == ["lost", "completed"]
    assert f"{MANY} of {MANY} (" in terminal("status") and "completed" in terminal("status", "out.jsonl")
    assert terminal.json("status", terminal.runs()[0]["id"], code=4)["progress"]["collection"] is None


def test_detached_seen_stopped_and_resumed(terminal: Terminal, tmp_path: Path) -> None:
    small_input(tmp_path, MANY)
    config(tmp_path, script(tmp_path, SLOW))
    words = (*WORDS, "+num_samples_in_parallel=2")
    said = terminal("collect", *words, "--detach", "--name", "big")
    assert "is running" in said and "rollbook logs -f big" in said and "rollbook stop big" in said
    until(lambda: progress_of(tmp_path / "out_progress.json").get("done", 0) > 0)
    shown = terminal.json("status", "big", code=3)
    assert shown["progress"]["collection"]["expected"] == MANY
    watching = terminal.start("status", "--watch", "out.jsonl")
    assert watching.stdout is not None and "out.jsonl: running" in watching.stdout.readline()
    said = terminal("stop", "big")
    assert "is interrupted" in said and "waiting for up to 10m for what is in flight" in said
    output, _ = watching.communicate(timeout=WAIT)
    assert watching.returncode == 0
    assert "out.jsonl: interrupted" in output
    (run,) = terminal.runs()  # its collector did not record itself a second time
    assert (run["kind"], run["exit_code"], run["reason"]) == ("collect", 3, "SIGTERM received")
    assert 0 < run["metrics"]["ok"] < MANY
    assert "waiting for 2 in flight" in terminal("logs", "big")
    (tmp_path / "hurry").touch()
    terminal("collect", *words)
    assert_exactly_once(tmp_path / "out.jsonl", expected_keys(MANY))


def test_under_a_supervisor_it_is_one_run(terminal: Terminal) -> None:
    terminal("run", "outer", "--", *ROLLBOOK, "collect", *WORDS)
    (run,) = terminal.runs()
    assert (run["name"], run["status"], run["metrics"]["ok"]) == ("outer", "completed", 4)
    assert "rollouts:   4 of 4" in terminal("status", "outer")


def test_a_history_that_cannot_be_written_costs_a_line(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "artifacts").write_text("not a directory")
    said = terminal("collect", *WORDS)
    assert said.count("artifacts: Not a directory, so this run is not in the history") == 1
    assert_exactly_once(tmp_path / "out.jsonl", expected_keys(4))
    assert "cannot write here" in terminal("collect", *WORDS, "--detach", code=1)


def test_a_dry_run_checks_and_touches_nothing(terminal: Terminal, tmp_path: Path) -> None:
    def everything() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    before = everything()
    fresh = terminal.json("collect", *WORDS, "--dry-run", "num_repeats=3")
    assert fresh == {"output": "out.jsonl", "planned": 12, "done": 0, "missing": 12}
    assert "7 rollouts planned" in terminal(
        "collect", "agent_name=a", "output_jsonl_fpath=own.jsonl", "limit=7", "--dry-run"
    )
    assert everything() == before
    terminal("collect", *WORDS, "limit=3")
    with (tmp_path / "out.jsonl").open("r+b") as file:
        file.truncate((tmp_path / "out.jsonl").stat().st_size - 9)
    before = everything()
    said = terminal("collect", *WORDS, "--dry-run")
    assert "out.jsonl: 4 rollouts planned, 2 done, 2 missing; nothing was sent" in said
    assert "temperature" in terminal(
        "collect", *WORDS, "--dry-run", "responses_create_params.temperature=1", code=2
    )
    assert everything() == before
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write("{}\n")
    assert "in.jsonl:5: " in terminal("collect", *WORDS, "--dry-run", code=2)


def test_an_output_that_was_never_collected(terminal: Terminal) -> None:
    assert "in_progress.json: no such file" in terminal("status", "in.jsonl", code=2)


def test_what_a_detached_collection_would_be_refused_for_is_said_at_once(
    terminal: Terminal, tmp_path: Path
) -> None:
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write("{}\n")
    assert "in.jsonl:5: " in terminal("collect", *WORDS, "--detach", code=2)
    assert "no run yet" in terminal("status")


def test_an_output_that_is_being_written_is_refused_before_detaching(
    terminal: Terminal, tmp_path: Path
) -> None:
    lock = FileLock(tmp_path / "out.jsonl")
    try:
        assert "out.jsonl is being written by " in terminal("collect", *WORDS, "--detach", code=1)
    finally:
        lock.release()
    assert "no run yet" in terminal("status")


def test_without_agents_the_file_that_is_missing_is_named(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "rollbook.yaml").unlink()
    assert f"in {tmp_path / 'rollbook.yaml'}" in terminal("collect", *WORDS, code=2)


def test_the_help_names_every_setting(terminal: Terminal) -> None:
    said = terminal("collect", "--help")
    for kind in (CollectSettings, RetrySettings):
        missing = [field.name for field in msgspec.structs.fields(kind) if field.name not in said]
        assert missing == []


def test_the_cost_of_little_is_not_nothing(terminal: Terminal) -> None:
    said = terminal("collect", *WORDS, "prices.input=10", "prices.output=100")
    assert re.search(r"cost 0\.00[0-9]*[1-9]", said)


def test_the_headers_of_a_policy_are_not_in_the_history(terminal: Terminal, tmp_path: Path) -> None:
    policy = ("base_url=http://127.0.0.1:1/v1", "model=m", "headers.X-Token=hunter2")
    agent = ("+agent_name=h", "agents.h.env.name=arithmetic", *(f"agents.h.policy.{word}" for word in policy))
    terminal("collect", *WORDS, *agent, "retry.connect=1", code=3)
    kept = [path for path in (tmp_path / "artifacts").rglob("*") if path.is_file()]
    assert {"command.json", "config.json", "index.yaml"} <= {path.name for path in kept}
    assert [path.name for path in kept if b"hunter2" in path.read_bytes()] == []
