"""Rollouts as conversations: everything said is kept, everything left out is counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rollbook.cli.main import main
from rollbook.data.pairs import pairs
from rollbook.data.sft import sft
from rollbook.errors import BadFileError
from rollout_rows import message, read, rollout, tool_use, write_rows


def test_reasoning_tool_calls_and_results_are_kept(tmp_path: Path) -> None:
    tools = [{"type": "function", "name": "calculator", "parameters": {"type": "object"}}]
    row = rollout("a", 0, 1.0, output=tool_use("a"))
    row["responses_create_params"] |= {"tools": tools, "instructions": "Be brief."}
    sft([write_rows(tmp_path / "r.jsonl", [row])], tmp_path / "s.jsonl")
    (made,) = read(tmp_path / "s.jsonl")
    assert made["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Do a."},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "think a",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "calculator", "arguments": {"expression": "2+2"}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    assert made["tools"] == [
        {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}
    ]
    assert made["task_id"] == "a" and made["reward"] == 1.0 and made["rollout"] == "a#0"


def test_thresholds_best_of_and_the_count_of_the_rest(tmp_path: Path) -> None:
    rows = [rollout("a", repeat, reward) for repeat, reward in enumerate([0.2, 0.9, 1.0, 0.9, None])]
    rows += [rollout("a", 5, 1.0, stop_reason="length"), rollout("b", 0, 0.8, output=[])]
    rows += [rollout("c", 0, 1.0, responses_create_params={})]
    source = write_rows(tmp_path / "r.jsonl", rows)
    manifest = sft([source], tmp_path / "s.jsonl", min_reward=0.5, best_of=2)
    assert [row["rollout"] for row in read(tmp_path / "s.jsonl")] == ["a#1", "a#2"]
    assert manifest.counts == {
        "without_reward": 1, "below_min_reward": 1, "truncated": 1, "not_among_the_best": 1,
        "nothing_answered": 1, "without_prompt": 1,
    }  # fmt: skip
    assert manifest.rows_in == manifest.rows_out + sum(manifest.counts.values())
    sft([source], tmp_path / "all.jsonl", keep_truncated=True)
    assert len(read(tmp_path / "all.jsonl")) == 5


def test_empty_answers_are_counted_and_take_nobodys_place(tmp_path: Path) -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    empty = [
        [],
        [message("")],
        [message(" \n")],
        [thought],
        [call, {**call, "type": "function_call_output"}, thought],
    ]
    rows = [rollout("a", repeat, 1.0, output=output) for repeat, output in enumerate(empty)]
    rows += [rollout("a", 7, 0.5), rollout("b", 0, 1.0, output=[thought, call])]
    source = write_rows(tmp_path / "r.jsonl", rows)
    for name, best_of in (("all", None), ("best", 1)):
        manifest = sft([source], tmp_path / f"{name}.jsonl", best_of=best_of)
        assert [row["rollout"] for row in read(tmp_path / f"{name}.jsonl")] == ["a#7", "b#0"]
        assert manifest.counts == {"nothing_answered": len(empty)}


def test_the_best_are_chosen_among_what_the_layout_can_hold(tmp_path: Path) -> None:
    middle = [message("x"), {"type": "message", "role": "system", "content": "s"}, message("y")]
    rows = [rollout("a", 0, 1.0, output=middle), rollout("a", 1, 0.5)]
    source = write_rows(tmp_path / "r.jsonl", rows)
    manifest = sft([source], tmp_path / "s.jsonl", best_of=1, as_format="llamafactory")
    assert [row["rollout"] for row in read(tmp_path / "s.jsonl")] == ["a#1"]
    assert manifest.counts == {"llamafactory_system_prompt_in_the_middle": 1}


def test_several_messages_of_one_response_are_one_reply(tmp_path: Path) -> None:
    rows = [rollout("a", 0, 1.0, output=[message("one"), message("two")])]
    sft([write_rows(tmp_path / "r.jsonl", rows)], tmp_path / "s.jsonl", as_format="llamafactory")
    (made,) = read(tmp_path / "s.jsonl")
    assert made["conversations"][1:] == [{"from": "gpt", "value": "one\n\ntwo"}]


@pytest.mark.parametrize("said", [True, 1.0])
def test_a_row_that_says_it_was_cut_off_is_left_out(tmp_path: Path, said: bool | float) -> None:
    rows = [rollout("a", 0, 1.0, truncated=said), rollout("a", 1, 1.0, truncated=False)]
    manifest = sft([write_rows(tmp_path / "r.jsonl", rows)], tmp_path / "s.jsonl")
    assert (manifest.rows_out, manifest.counts) == (1, {"truncated": 1})


def test_arguments_that_are_no_object_stay_as_they_were_written(tmp_path: Path) -> None:
    output = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "not json"}, message("ok")]
    sft([write_rows(tmp_path / "r.jsonl", [rollout("a", 0, 1.0, output=output)])], tmp_path / "s.jsonl")
    (made,) = read(tmp_path / "s.jsonl")
    calls = [call for said in made["messages"] for call in said.get("tool_calls", [])]
    assert calls[0]["function"]["arguments"] == "not json"


def test_the_layout_of_llamafactory_drops_only_what_it_must_and_says_so(tmp_path: Path) -> None:
    beside = [*tool_use("b")[:2], *tool_use("b")[2:]]
    twice = [message("one"), {"type": "message", "role": "user", "content": "more"}, message("two")]
    rows = [
        rollout("plain", 0, 1.0),
        rollout("tools", 0, 1.0, output=beside),
        rollout("turns", 0, 1.0, output=twice),
        rollout("two", 0, 1.0, responses_create_params={"input": [{"role": "user", "content": "a"}] * 2}),
        rollout(
            "mid",
            0,
            1.0,
            output=[message("x"), {"type": "message", "role": "system", "content": "s"}, message("y")],
        ),
    ]
    manifest = sft(
        [write_rows(tmp_path / "r.jsonl", rows)], tmp_path / "lf" / "train.jsonl", as_format="llamafactory"
    )
    made = {row["task_id"]: row["conversations"] for row in read(tmp_path / "lf" / "train.jsonl")}
    assert list(made) == ["plain", "tools", "turns"]
    assert [turn["from"] for turn in made["tools"]] == ["human", "function_call", "observation", "gpt"]
    assert (
        "<think>\nthink tools" not in str(made) and "<think>\nthink b\n</think>" in made["tools"][1]["value"]
    )
    assert manifest.counts == {
        "llamafactory_turns_do_not_alternate": 1,
        "llamafactory_system_prompt_in_the_middle": 1,
    }
    info = json.loads((tmp_path / "lf" / "dataset_info.json").read_text())
    assert info["train"]["file_name"] == "train.jsonl"
    assert info["train"]["tags"]["observation_tag"] == "observation"
    sft([tmp_path / "r.jsonl"], tmp_path / "lf" / "more.jsonl", as_format="llamafactory")
    assert set(json.loads((tmp_path / "lf" / "dataset_info.json").read_text())) == {"train", "more"}


@pytest.mark.parametrize("bad", ["{", "[]"])
@pytest.mark.parametrize("make", [sft, pairs])
def test_a_bad_list_of_datasets_is_refused_before_anything_is_written(
    tmp_path: Path, bad: str, make: Callable[..., object]
) -> None:
    source = write_rows(tmp_path / "r.jsonl", [rollout("a", 0, 1.0), rollout("a", 1, 0.0)])
    info = tmp_path / "dataset_info.json"
    info.write_text(bad)
    with pytest.raises(BadFileError, match="fix or delete it"):
        make([source], tmp_path / "out.jsonl", as_format="llamafactory")
    info.unlink()
    make([source], tmp_path / "out.jsonl", as_format="llamafactory")
    assert set(json.loads(info.read_text())) == {"out"}


@pytest.mark.parametrize("make", [sft, pairs])
def test_a_dataset_without_rows_is_not_listed(tmp_path: Path, make: Callable[..., object]) -> None:
    full = write_rows(tmp_path / "r.jsonl", [rollout("a", 0, 1.0), rollout("a", 1, 0.0)])
    none = write_rows(tmp_path / "none.jsonl", [rollout("a", 0, None)])
    info = tmp_path / "lf" / "dataset_info.json"
    make([none], tmp_path / "lf" / "one.jsonl", as_format="llamafactory")
    assert not info.exists()
    for name in ("one", "two"):
        make([full], tmp_path / "lf" / f"{name}.jsonl", as_format="llamafactory", overwrite=True)
    make([none], tmp_path / "lf" / "one.jsonl", as_format="llamafactory", overwrite=True)
    assert set(json.loads(info.read_text())) == {"two"}


def test_sft_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_rows(tmp_path / "r.jsonl", [rollout("a", 0, 1.0), rollout("a", 1, 0.0)])
    with pytest.raises(SystemExit) as ended:
        main(["data", "sft", str(source), "-o", str(tmp_path / "s.jsonl"), "--min-reward", "0.5"])
    assert ended.value.code == 0
    assert "below min reward 1" in capsys.readouterr().out
