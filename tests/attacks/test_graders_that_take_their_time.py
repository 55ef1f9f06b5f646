"""A grader that blocks: other rollouts go on, time limits hold, and code that sets alarms works."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from collecting import command, config, script, small_input

OWN = """
import pathlib, signal, threading, time
from rollbook.envs import Environment, Feedback, single_turn

here = pathlib.Path(__file__).parent

def wait_for(is_there):
    for _ in range(2000):
        if is_there():
            return
        time.sleep(0.01)
    raise RuntimeError("nothing else went on")

@single_turn
def waits_for_another(task, answer):
    if task.id == "t0":
        wait_for((here / "asked t1").exists)
    return 1.0

def failed():
    path = here / "out_failures.ndjson"
    return path.exists() and path.stat().st_size

@single_turn
def outlasts_its_time(task, answer):
    if task.id == "t0":
        wait_for(failed)
    return 1.0

@single_turn
def sets_an_alarm(task, answer):
    def ring(number, frame):
        raise TimeoutError("the formula took too long")
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        while True:
            pass
    except TimeoutError:
        return 0.5
    finally:
        signal.signal(signal.SIGALRM, before)

class OneAtATime(Environment):
    inside = []
    def __init__(self):
        self._say("init")
    def start(self, task):
        self._say("start")
        return super().start(task)
    def step(self, message):
        self._say("step")
        return Feedback(reward=1.0)
    def _say(self, what):
        self.inside.append(what)
        assert self.inside == [what], self.inside
        time.sleep(0.001)
        self.inside.remove(what)
        assert threading.current_thread() is threading.main_thread()
"""
ASK = """
if 't1' in request.messages[0]['content']:
    await asyncio.sleep(0.1)
    (pathlib.Path(__file__).parent / 'asked t1').touch()
return '2'
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    small_input(tmp_path, 6)
    rows = [orjson.loads(line) for line in (tmp_path / "in.jsonl").read_bytes().splitlines()]
    for row in rows:
        row["responses_create_params"]["input"][0]["content"] = row["id"]
    (tmp_path / "in.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    config(tmp_path, script(tmp_path, ASK))
    return tmp_path


def collect(directory: Path, grader: str, *words: str) -> tuple[int, list[float], str]:
    done = command(directory, f"agents.a.env.name={directory / 'own.py'}:{grader}", *words)
    lines = (directory / "out.jsonl").read_bytes().splitlines()
    return done.returncode, [orjson.loads(line)["reward"] for line in lines], done.stdout + done.stderr


@pytest.mark.parametrize("workers", [1, 2])
def test_other_rollouts_go_on_meanwhile(workers: int, project: Path) -> None:
    words = ["num_samples_in_parallel=12", f"workers={workers}"]
    code, rewards, said = collect(project, "waits_for_another", *words)
    assert (code, rewards) == (0, [1.0] * 6), said


def test_a_time_limit_ends_it(project: Path) -> None:
    words = ["rollout_timeout_s=0.5", "retry.timeout=1", "num_samples_in_parallel=1"]
    code, rewards, said = collect(project, "outlasts_its_time", *words)
    assert (code, rewards) == (3, [1.0] * 5), said
    (failure,) = (project / "out_failures.ndjson").read_bytes().splitlines()
    assert b'"timeout"' in failure


@pytest.mark.parametrize("workers", [1, 2])
def test_an_alarm_rings_as_in_math_verify(workers: int, project: Path) -> None:
    code, rewards, said = collect(project, "sets_an_alarm", f"workers={workers}")
    assert (code, rewards) == (0, [0.5] * 6), said


def test_functions_of_the_user_run_one_at_a_time_in_the_main_thread(project: Path) -> None:
    code, rewards, said = collect(project, "OneAtATime", "num_repeats=20", "num_samples_in_parallel=50")
    assert (code, len(rewards)) == (0, 120), said
