"""Pairs stay within one task, keep the gap, use each rollout once, and count what they leave out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.cli.main import main
from rollbook.data.pairs import pairs
from rollout_rows import message, read, rollout, tool_use, write_rows

REWARDS = st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0]), st.floats(0, 1))


@settings(max_examples=25, deadline=None)
@given(
    rewards=st.dictionaries(
        st.sampled_from(list("abcdef")), st.lists(REWARDS, min_size=1, max_size=6), min_size=1
    ),
    gap=st.sampled_from([0.0, 0.2, 0.5]),
    per_task=st.integers(1, 3),
    order=st.randoms(use_true_random=False),
)
def test_pairs_never_cross_tasks(
    rewards: dict[str, list[float | None]],
    gap: float,
    per_task: int,
    order: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = tmp_path_factory.mktemp("pairs")
    rows = [
        rollout(task, repeat, reward) for task, some in rewards.items() for repeat, reward in enumerate(some)
    ]
    order.shuffle(rows)
    pairs([write_rows(directory / "r.jsonl", rows)], directory / "p.jsonl", min_gap=gap, per_task=per_task)
    made = read(directory / "p.jsonl")
    used: Counter[str] = Counter()
    for pair in made:
        task = pair["task_id"]
        sides = [pair[side][0]["content"] for side in ("chosen", "rejected")]
        assert all(side.startswith(f"{task} by try") for side in sides)
        assert pair["prompt"] == [{"role": "user", "content": f"Do {task}."}]
        assert pair["chosen_reward"] > pair["rejected_reward"]
        assert pair["chosen_reward"] - pair["rejected_reward"] >= gap - 1e-6
        used.update(sides)
    assert max(used.values(), default=1) == 1
    for task, some in rewards.items():
        known = sorted(reward for reward in some if reward is not None)
        wanted = min(
            per_task,
            sum(
                1
                for place in range(len(known) // 2)
                if known[-1 - place] > known[place] and known[-1 - place] - known[place] >= gap - 1e-9
            ),
        )
        assert sum(pair["task_id"] == task for pair in made) == wanted


def test_what_cannot_be_paired_is_counted(tmp_path: Path) -> None:
    rows = [
        rollout("same", 0, 1.0, text="x"), rollout("same", 1, 0.0, text="x"),
        rollout("other", 0, 1.0, prompt="A?"), rollout("other", 1, 0.0, prompt="B?"),
        rollout("silent", 0, 1.0), rollout("silent", 1, 0.0, output=[]),
        rollout("cut", 0, 1.0), rollout("cut", 1, 0.0, stop_reason="length"),
        rollout("lost", 0, 1.0), rollout("lost", 1, None),
        rollout("good", 0, 1.0), rollout("good", 1, 0.0),
    ]  # fmt: skip
    source = write_rows(tmp_path / "r.jsonl", rows)
    manifest = pairs([source], tmp_path / "p.jsonl")
    assert [pair["task_id"] for pair in read(tmp_path / "p.jsonl")] == ["good"]
    assert manifest.counts == {
        "tasks": 7, "tasks_with_two_rewards": 4, "pairs_found": 1,
        "repeated_replies": 1, "nothing_answered": 1, "without_reward": 1, "truncated": 1,
    }  # fmt: skip
    pairs([source], tmp_path / "q.jsonl", keep_truncated=True)
    assert {pair["task_id"] for pair in read(tmp_path / "q.jsonl")} == {"good", "cut"}


def test_each_prompt_of_a_task_has_pairs_of_its_own(tmp_path: Path) -> None:
    rows = [rollout("t", place, 1.0 - place / 10, prompt="AB"[place % 2]) for place in range(4)]
    source = write_rows(tmp_path / "r.jsonl", rows)
    pairs([source], tmp_path / "p.jsonl", per_task=5)
    made = read(tmp_path / "p.jsonl")
    assert [pair["prompt"][0]["content"] for pair in made] == ["A", "B"]
    assert [pair["chosen"][0]["content"] for pair in made] == ["t by try 0", "t by try 1"]
    assert [pair["rejected"][0]["content"] for pair in made] == ["t by try 2", "t by try 3"]
    assert len({pair["task_id"] for pair in made}) == 1  # two tasks that share an id
    for row in rows:  # one task, whose environment showed two prompts
        row["_rb_task_digest"] = "0" * 32
    assert pairs([write_rows(tmp_path / "s.jsonl", rows)], tmp_path / "one.jsonl").rows_out == 1


def test_other_tools_are_another_prompt(tmp_path: Path) -> None:
    rows = [rollout("t", 0, 1.0), rollout("t", 1, 0.0)]
    rows[0]["responses_create_params"]["tools"] = [{"type": "function", "name": "f"}]
    assert pairs([write_rows(tmp_path / "r.jsonl", rows)], tmp_path / "p.jsonl").rows_out == 0


def test_of_answers_that_say_the_same_the_best_is_paired(tmp_path: Path) -> None:
    texts = {"same": 1.0, "x": 0.9, "y": 0.1, "same ": 0.0}
    rows = [rollout("t", 0, reward, text=text.strip()) for text, reward in texts.items()]
    manifest = pairs([write_rows(tmp_path / "r.jsonl", rows)], tmp_path / "p.jsonl", per_task=9)
    made = read(tmp_path / "p.jsonl")
    assert [pair["chosen"][0]["content"] for pair in made] == ["same"]
    assert [pair["rejected"][0]["content"] for pair in made] == ["y"]
    assert manifest.counts["repeated_replies"] == 1
    assert manifest.details["gap_max"] == pytest.approx(0.9)  # no gap of 1 was written


def test_no_rollout_is_in_two_pairs_where_others_are_passed_over(tmp_path: Path) -> None:
    rows = [rollout("t", 0, reward, text=text) for text, reward in (("x", 1.0), ("y", 0.5), ("x", 0.0))]
    assert pairs([write_rows(tmp_path / "r.jsonl", rows)], tmp_path / "p.jsonl", per_task=9).rows_out == 1


def test_the_same_pair_is_written_once(tmp_path: Path) -> None:
    rows = [rollout("t", 0, 1.0, text="a"), rollout("t", 1, 0.0, text="b")]
    source = write_rows(tmp_path / "r.jsonl", [rows[0], rows[0], rows[1], rows[1]])
    manifest = pairs([source], tmp_path / "p.jsonl", per_task=9)
    assert len(read(tmp_path / "p.jsonl")) == 1
    assert manifest.counts["repeated_replies"] == 2


def test_a_pair_ends_with_the_replies(tmp_path: Path) -> None:
    over = {"type": "message", "role": "user", "content": "Game over."}
    rows = [rollout("t", 0, 1.0, output=[message("win"), over])]
    rows += [rollout("t", 1, 0.0, output=[message("lose"), over])]
    rows += [rollout("u", 0, 1.0, text=" "), rollout("u", 1, 0.5), rollout("u", 2, 0.0)]
    manifest = pairs([write_rows(tmp_path / "r.jsonl", rows)], tmp_path / "p.jsonl")
    made = read(tmp_path / "p.jsonl")
    assert [[said["content"] for said in pair["chosen"]] for pair in made] == [["win"], ["u by try 1"]]
    assert [[said["content"] for said in pair["rejected"]] for pair in made] == [["lose"], ["u by try 2"]]
    assert manifest.counts["nothing_answered"] == 1


def test_the_layout_of_llamafactory(tmp_path: Path) -> None:
    rows = [
        rollout("a", 0, 1.0),
        rollout("a", 1, 0.0),
        rollout("b", 0, 1.0, output=tool_use("b")),
        rollout("b", 1, 0.0),
    ]
    rows[0]["response"]["output"] = [message("yes")]
    manifest = pairs(
        [write_rows(tmp_path / "r.jsonl", rows)], tmp_path / "lf" / "dpo.jsonl", as_format="llamafactory"
    )
    (made,) = read(tmp_path / "lf" / "dpo.jsonl")
    assert made["conversations"] == [{"from": "human", "value": "Do a."}]
    assert made["chosen"] == {"from": "gpt", "value": "yes"}
    assert manifest.counts["llamafactory_reply_of_several_turns"] == 1
    info = (tmp_path / "lf" / "dataset_info.json").read_text()
    assert '"ranking": true' in info and '"dpo"' in info


def test_pairs_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_rows(tmp_path / "r.jsonl", [rollout("a", 0, 1.0), rollout("a", 1, 0.0)])
    with pytest.raises(SystemExit) as ended:
        main(["data", "pairs", str(source), "-o", str(tmp_path / "p.jsonl"), "--format", "dpo"])
    assert ended.value.code == 2
    assert "one of 'trl', 'llamafactory'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["data", "pairs", str(source), "-o", str(tmp_path / "p.jsonl")])
    assert "p.jsonl: 1 rows, from 2" in capsys.readouterr().out
