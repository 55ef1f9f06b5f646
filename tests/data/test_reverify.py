"""Stored responses graded again: the old reward stays, every change is told, nothing is made up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fake_servers import Told, chat_answer, serving
from rollbook.cli.main import main
from rollbook.data.job import DataManifest
from rollbook.data.reverify import reverify
from rollbook.errors import BadLineError, UsageError
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
    manifest = reverify([write_rows(tmp_path / "r.jsonl", rows)], tmp_path / "v.jsonl", EXACT)
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
    manifest = reverify([source], tmp_path / "v.jsonl", {"name": "calculator"})
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
    reverify([write_rows(tmp_path / "r.jsonl", rows)], tmp_path / "v.jsonl", env, force=True)
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
    reverify([write_rows(tmp_path / "r.jsonl", rows)], tmp_path / "v.jsonl", env, force=True)
    for repeat, row in enumerate(read(tmp_path / "v.jsonl")):
        assert row["metrics_before"] == {"correct": True, "logs": {"0": "fine"}, "strict": repeat}
        assert (row["correct"], row["hint"], row["reward_before"]) == (False, "h", 1.0)
        assert "strict" not in row and "logs" not in row
    reverify([tmp_path / "v.jsonl"], tmp_path / "w.jsonl", env, force=True)
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
    assert "not one of 2 rows could be graded" in said and "no such key" in said
    assert not (tmp_path / "v.jsonl").exists()


def test_a_row_that_the_judge_does_not_judge_keeps_its_reward_and_says_why(tmp_path: Path) -> None:
    def opinion(asked: dict[str, Any]) -> dict[str, Any]:
        return chat_answer("VERDICT: CORRECT" if "55" in asked["messages"][0]["content"] else "no idea")

    async def verify() -> DataManifest:
        async with serving(Told(opinion)) as url:
            env = {"name": "dataset", "grader": "judge", "judge": {"base_url": url, "model": "j"}}
            return await asyncio.to_thread(reverify, [source], tmp_path / "v.jsonl", env)

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
    manifest = reverify([write_rows(tmp_path / "r.jsonl", rows)], tmp_path / "v.jsonl", env)
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
        reverify([source], tmp_path / "v.jsonl", mine)
    reverify([source], tmp_path / "v.jsonl", mine, force=True)
    assert read(tmp_path / "v.jsonl")[0]["reward"] == 0.25
    with pytest.raises(UsageError, match="plays its episodes itself"):
        reverify([source], tmp_path / "w.jsonl", {"name": "verifiers:x"})
    bad = write_rows(tmp_path / "bad.jsonl", [{"response": {"output": [message("4")]}}])
    with pytest.raises(BadLineError, match=r"bad.jsonl:1: has no responses_create_params.input"):
        reverify([bad], tmp_path / "w.jsonl", EXACT)
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
