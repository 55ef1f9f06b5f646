"""Stored responses graded again: the old reward stays, every change is told, nothing is made up."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import orjson
import pytest
import xxhash

from collecting import ROLLBOOK, run, small_input
from fake_servers import Told, chat_answer, serving
from rollbook.cli.main import main
from rollbook.collect.regrade import regrade
from rollbook.data.job import DataManifest
from rollbook.data.merge import merge
from rollbook.envs.source import EnvironmentSource
from rollbook.errors import BadLineError, UsageError
from rollbook.records.plain import encode_exactly
from rollbook.rollouts.retry import RetrySettings
from rollout_rows import message, read, rollout, tool_use, write_rows

EXACT = {"name": "dataset", "grader": "exact"}


def test_a_mended_grader_changes_what_it_should(tmp_path: Path) -> None:
    rows = [
        rollout("right", 0, 0.0, text="4"),  # graded wrongly then
        rollout("wrong", 0, 1.0, text="5"),
        rollout("same", 0, 1.0, text="4"),
        rollout("none", 0, None, text="4"),
        rollout("silent", 0, 0.5, output=[]),
    ]
    manifest = regrade([write_rows(tmp_path / "r.jsonl", rows)], tmp_path / "v.jsonl", EXACT)
    made = {row["_rb_key"]: row for row in read(tmp_path / "v.jsonl")}
    assert [(row["reward_before"], row["reward"]) for key, row in made.items() if key != "silent#0"] == [
        (0.0, 1.0), (1.0, 0.0), (1.0, 1.0), (None, 1.0),
    ]  # fmt: skip
    assert made["silent#0"]["reward"] == 0.5 and "no reply" in made["silent#0"]["reverify_error"]
    report = manifest.details
    assert (report["raised"], report["lowered"], report["unchanged"]) == (1, 1, 1)
    assert (report["now_pass"], report["now_fail"], report["had_no_reward"], report["failed"]) == (1, 1, 1, 1)
    assert report["mean_before"] == pytest.approx(2 / 3) and report["mean_after"] == pytest.approx(2 / 3)
    assert (tmp_path / "v.jsonl").read_bytes().startswith(b'{"_rb_key":')


def test_several_turns_are_played_again(tmp_path: Path) -> None:
    good = rollout("a", 0, 0.0, output=tool_use("a"), prompt="What is 2+2?")
    tampered = rollout("b", 0, 0.0, output=tool_use("b"))
    tampered["response"]["output"][2]["output"] = "5"
    good["_rb_steps"] = [{"step_idx": turn, "ob_len": 9, "reward": 0.0, "metrics": {}} for turn in (0, 1)]
    source = write_rows(tmp_path / "r.jsonl", [good, tampered])
    manifest = regrade([source], tmp_path / "v.jsonl", {"name": "calculator"})
    assert [row["reward"] for row in read(tmp_path / "v.jsonl")] == [1.0, 1.0]
    assert manifest.counts["environment_answered_otherwise"] == 1
    steps = read(tmp_path / "v.jsonl")[0]["_rb_steps"]
    assert [(step["ob_len"], step["reward"], step["episode_done"]) for step in steps] == [
        (9, 0.0, False),
        (9, 1.0, True),
    ]


def _grader(tmp_path: Path, answer: str) -> dict[str, str]:
    (tmp_path / "own.py").write_text(
        f"from rollbook.envs import single_turn\n\n\n@single_turn\ndef mine(task, answer):\n    {answer}\n"
    )
    return {"name": f"{tmp_path}/own.py:mine"}


def test_several_messages_of_one_response_are_graded_together(tmp_path: Path) -> None:
    env = _grader(tmp_path, "return float(answer.split() == ['let', 'me', 'see', '4'])")
    rows = [rollout("a", 0, 1.0, output=[message("let me see"), message("4")])]
    regrade([write_rows(tmp_path / "r.jsonl", rows)], tmp_path / "v.jsonl", env, force=True)
    assert [row["reward"] for row in read(tmp_path / "v.jsonl")] == [1.0]


NAMES, LOGS = ["correct", "strict"], {"0": "fine"}


def test_metrics_of_the_old_grading_are_kept_apart(tmp_path: Path) -> None:
    env = _grader(tmp_path, "return {'reward': 0.5, 'correct': False}")
    rows = [
        rollout(
            "a", repeat, 1.0, correct=True, strict=repeat, logs={"0": "fine"}, hint="h", _rb_metrics=NAMES
        )
        for repeat in range(2)
    ]
    regrade([write_rows(tmp_path / "r.jsonl", rows)], tmp_path / "v.jsonl", env, force=True)
    for repeat, row in enumerate(read(tmp_path / "v.jsonl")):
        assert row["metrics_before"] == {"correct": True, "logs": {"0": "fine"}, "strict": repeat}
        assert (row["correct"], row["hint"], row["reward_before"]) == (False, "h", 1.0)
        assert "strict" not in row and "logs" not in row
    regrade([tmp_path / "v.jsonl"], tmp_path / "w.jsonl", env, force=True)
    assert [row["metrics_before"] for row in read(tmp_path / "w.jsonl")] == [{"correct": False}] * 2


def test_a_grader_that_grades_nothing_is_an_error_that_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = _grader(tmp_path, "raise ValueError('no such key')")
    source = write_rows(tmp_path / "r.jsonl", [rollout("a", 0, 1.0), rollout("b", 0, 1.0)])
    words = ["data", "reverify", str(source), "--env", f"name={env['name']}", "--force"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "-o", str(tmp_path / "v.jsonl")])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "none of 2 rows could be graded" in said and "no such key" in said
    assert not (tmp_path / "v.jsonl").exists()


def test_a_row_that_the_judge_does_not_judge_keeps_its_reward_and_says_why(tmp_path: Path) -> None:
    def opinion(asked: dict[str, Any]) -> dict[str, Any]:
        return chat_answer("VERDICT: CORRECT" if "55" in asked["messages"][0]["content"] else "no idea")

    async def verify() -> DataManifest:
        async with serving(Told(opinion)) as url:
            env = {"name": "dataset", "grader": "judge", "judge": {"base_url": url, "model": "j"}}
            return await asyncio.to_thread(
                regrade, [source], tmp_path / "v.jsonl", env, retry=RetrySettings(judge=2, first_wait_s=0.01)
            )

    source = write_rows(
        tmp_path / "r.jsonl", [rollout("a", 0, 0.5, text="4"), rollout("b", 0, 0.5, text="55")]
    )
    manifest = asyncio.run(verify())
    kept, graded = read(tmp_path / "v.jsonl")
    assert kept["reward"] == 0.5 and "'no idea'" in kept["reverify_error"] and "reward_before" not in kept
    assert (graded["reward"], graded["reward_before"]) == (1.0, 0.5)
    assert manifest.counts["failed_judge"] == 1


def test_a_formula_past_its_time_leaves_its_row_the_reward_it_had(tmp_path: Path) -> None:
    pytest.importorskip("math_verify", reason="needs rollbook[math]")
    rows = [rollout("a", 0, 0.5, text="\\boxed{9^{9^{9^{9^{9}}}}}"), rollout("b", 0, 0.5, text="8/2")]
    env = {"name": "dataset", "grader": "math", "timeout_s": 3.0}
    manifest = regrade([write_rows(tmp_path / "r.jsonl", rows)], tmp_path / "v.jsonl", env)
    kept, graded = read(tmp_path / "v.jsonl")
    assert kept["reward"] == 0.5 and "env.timeout_s" in kept["reverify_error"]
    assert (graded["reward"], graded["reward_before"]) == (1.0, 0.5)
    assert manifest.counts["failed_environment"] == 1


def test_who_may_not_grade_is_told_why(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "r.jsonl", [rollout("a", 0, 1.0)])
    (tmp_path / "own.py").write_text(
        "from rollbook.envs import Environment, Feedback\n\n\nclass Mine(Environment):\n"
        "    def step(self, message):\n        return Feedback(reward=0.25)\n"
    )
    mine = {"name": f"{tmp_path}/own.py:Mine"}
    with pytest.raises(UsageError, match=r"stateless.*--force"):
        regrade([source], tmp_path / "v.jsonl", mine)
    regrade([source], tmp_path / "v.jsonl", mine, force=True)
    assert read(tmp_path / "v.jsonl")[0]["reward"] == 0.25
    with pytest.raises(UsageError, match="plays its episodes itself"):
        regrade([source], tmp_path / "w.jsonl", {"name": "verifiers:x"})
    bad = write_rows(tmp_path / "bad.jsonl", [{"response": {"output": [message("4")]}}])
    with pytest.raises(BadLineError, match=r"bad.jsonl:1: has no responses_create_params.input"):
        regrade([bad], tmp_path / "w.jsonl", EXACT)
    assert not (tmp_path / "w.jsonl").exists()


def test_reverify_by_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "r.jsonl", [rollout("a", 0, 0.0, text="4")])
    words = ["data", "reverify", "r.jsonl", "-o", "v.jsonl"]
    for more, message_part in (([], "name the grader"), (["--agent", "x"], "is not in rollbook.yaml")):
        with pytest.raises(SystemExit) as ended:
            main([*words, *more])
        assert ended.value.code == 2
        assert message_part in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main([*words, "--env", "name=dataset", "--env", "grader=exact"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "mean reward 0 -> 1 over 1 rows" in printed and "of them now pass 1" in printed


COUNTING = """
import os
from pathlib import Path
from rollbook.envs import single_turn
from rollbook.rollouts.types import FailureKind, RolloutFailure
HERE = Path(__file__).parent


@single_turn
def mine(task, answer):
    with open(HERE / "graded", "a") as file:
        print(task.id, file=file)
    {then}
    return 0.75
"""


def _counting(tmp_path: Path, then: str = "pass") -> dict[str, str]:
    (tmp_path / "own.py").write_text(COUNTING.replace("{then}", then))
    return {"name": f"{tmp_path}/own.py:mine"}


def _run(source: Path, output: Path, env: dict[str, str]) -> int:
    words = ["data", "reverify", source, "-o", output, "--env", f"name={env['name']}", "--force"]
    return subprocess.run([*ROLLBOOK, *words], check=False, capture_output=True).returncode


def _graded(tmp_path: Path) -> list[str]:
    return (tmp_path / "graded").read_text().split()


def test_a_killed_command_resumes_and_ends_as_if_it_had_not_been_killed(tmp_path: Path) -> None:
    """Killed at its 150th of 200 rows; the same command grades those whose grade is not on the disk."""
    names = [f"t{number}" for number in range(200)]
    source = write_rows(tmp_path / "r.jsonl", [rollout(name, 0, 1.0) for name in names])
    env = _counting(tmp_path)
    then = "if task.id == 't150' and not (HERE / 'killed').exists(): (HERE / 'killed').touch(); os._exit(9)"
    killing = _counting(tmp_path, then)
    assert _run(source, tmp_path / "v.jsonl", killing) == 9
    assert not (tmp_path / "v.jsonl").exists()
    before = len((tmp_path / ".v.jsonl.grades.jsonl").read_bytes().splitlines()) - 1
    assert 50 <= before < 200
    (tmp_path / "graded").unlink()
    assert _run(source, tmp_path / "v.jsonl", killing) == 0
    assert len(_graded(tmp_path)) == 200 - before
    assert not (tmp_path / ".v.jsonl.grades.jsonl").exists()
    regrade([source], tmp_path / "w.jsonl", env, force=True)
    assert (tmp_path / "v.jsonl").read_bytes() == (tmp_path / "w.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("change", "graded"), [("nothing", ["b"]), ("the grader", ["a", "b"]), ("the row", ["a", "b"])]
)
def test_grades_of_another_grader_or_another_row_do_not_count(
    change: str, graded: list[str], tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "r.jsonl", [rollout("a", 0, 1.0), rollout("b", 0, 1.0)])
    env = _counting(tmp_path)
    described = EnvironmentSource(env).describe() | ({"version": 2} if change == "the grader" else {})
    line = b"other" if change == "the row" else source.read_bytes().splitlines()[0]
    grade = {"number": 0, "xxh3": xxhash.xxh3_64_hexdigest(line), "reward": 0.25, "turns": [{"reward": 0.25}]}
    (tmp_path / ".v.jsonl.grades.jsonl").write_bytes(
        encode_exactly({"grader": described}) + b"\n" + orjson.dumps(grade) + b"\n"
    )
    regrade([source], tmp_path / "v.jsonl", env, force=True)
    assert sorted(_graded(tmp_path)) == graded
    rewards = [row["reward"] for row in read(tmp_path / "v.jsonl")]
    assert rewards == [0.25 if change == "nothing" else 0.75, 0.75]


def test_what_may_get_better_is_tried_again(tmp_path: Path) -> None:
    then = (
        "if len((HERE / 'graded').read_text().split()) < 3: raise RolloutFailure(FailureKind.JUDGE, 'busy')"
    )
    source = write_rows(tmp_path / "r.jsonl", [rollout("a", 0, 1.0)])
    retry = RetrySettings(first_wait_s=0.01)
    manifest = regrade([source], tmp_path / "v.jsonl", _counting(tmp_path, then), force=True, retry=retry)
    assert (manifest.details["failed"], len(_graded(tmp_path))) == (0, 3)
    assert read(tmp_path / "v.jsonl")[0]["reward"] == 0.75


def test_rows_that_keep_their_reward_make_the_command_incomplete(tmp_path: Path) -> None:
    source = write_rows(
        tmp_path / "r.jsonl", [rollout("a", 0, 1.0, text="4"), rollout("b", 0, 1.0, output=[])]
    )
    words = ["data", "reverify", str(source), "--env", "name=dataset", "--env", "grader=exact"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "-o", str(tmp_path / "v.jsonl")])
    assert ended.value.code == 3
    assert [row["reward"] for row in read(tmp_path / "v.jsonl")] == [1.0, 1.0]


def test_it_runs_inside_an_event_loop(tmp_path: Path) -> None:
    async def cell() -> None:
        regrade([source], tmp_path / "v.jsonl", EXACT)

    source = write_rows(tmp_path / "r.jsonl", [rollout("a", 0, 0.0, text="4")])
    asyncio.run(cell())
    assert read(tmp_path / "v.jsonl")[0]["reward"] == 1.0


def test_whole_numbers_of_any_size_stay(tmp_path: Path) -> None:
    big = 123456789012345678901234567890
    line = orjson.dumps(rollout("a", 0, 0.0, text="4", big=0)).replace(b'"big":0', b'"big":%d' % big)
    (tmp_path / "r.jsonl").write_bytes(line + b"\n")
    regrade([tmp_path / "r.jsonl"], tmp_path / "v.jsonl", EXACT)
    assert read(tmp_path / "v.jsonl")[0]["big"] == big


def test_failures_that_hold_a_reply_become_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grader that fails costs no reply: fixed, it grades what the failures file kept."""
    monkeypatch.chdir(tmp_path)
    small_input(tmp_path, 3)
    (tmp_path / "own.py").write_text(
        "from rollbook.envs import single_turn\n\n\n@single_turn\ndef mine(task, answer):\n"
        "    if task.row['id'] == 't1': raise ValueError('a bug')\n    return 1.0\n"
    )
    agent = {"env": {"name": f"{tmp_path}/own.py:mine"}, "policy": {"kind": "scripted", "script": ["2"]}}
    (tmp_path / "rollbook.yaml").write_bytes(orjson.dumps({"agents": {"a": agent}}))
    assert run(tmp_path, "max_failure_rate=1").status == "failed"
    (failed,) = read(tmp_path / "out_failures.ndjson")
    assert failed["row"]["id"] == "t1"
    env = _grader(tmp_path, "return 0.5")
    regrade([tmp_path / "out_failures.ndjson"], tmp_path / "v.jsonl", env, force=True)
    (row,) = read(tmp_path / "v.jsonl")
    assert (row["_rb_key"], row["reward"], row["reward_before"]) == (failed["_rb_key"], 0.5, None)
    assert "kind" not in row and row["responses_create_params"] == failed["row"]["responses_create_params"]
    merged = merge([tmp_path / "out.jsonl", tmp_path / "v.jsonl"], tmp_path / "all.jsonl")
    assert merged.rows_out == 3
