"""The files of an iteration are in the order of the batch, and its report is made from them."""

from __future__ import annotations

import json
import random
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollbook import Run, Step, Trajectory, logtree, open_run
from rollbook.records.turns import Turn

NAMES = [
    f"train_iteration_000000{end}"
    for end in (".html", "_logtree.json", "_rollout_summaries.jsonl", "_transcripts.jsonl")
]


def trajectory(group_idx: int, traj_idx: int) -> Trajectory:
    reply = {"role": "assistant", "content": f"{group_idx}.{traj_idx} <b>é</b> \u2028" * (1 + group_idx)}
    turn = Turn(
        messages=[reply],
        reward=group_idx / 10 + traj_idx / 100,
        metrics={"correct": traj_idx},
        logs={"verdict": f"expected {group_idx}"},
        prompt_token_ids=[1, 2],
        token_ids=[3] * (traj_idx + 1),
        logprobs=[-0.5] * (traj_idx + 1),
    )
    prompt = [{"role": "user", "content": f"Problem {group_idx}"}]
    return Trajectory(prompt=prompt, turns=[turn], final_reward=0.5, metrics={"judge": 0.25})


def record(path: Path, order: list[tuple[int, int]]) -> dict[str, str]:
    """Files by name, after rollouts that finished in this order; without what may differ between runs."""
    with Run(path, num_groups_to_log=2) as run, run.rollouts(0) as rollouts:
        logtree.text("before")
        opened = {}
        for group_idx, traj_idx in order:
            if group_idx not in opened:
                opened[group_idx] = rollouts.group(group_idx, task_id=f"t{group_idx}", size=2)
                opened[group_idx].group = opened[group_idx].__enter__()
            opened[group_idx].group.add(trajectory(group_idx, traj_idx), traj_idx)
        for context in opened.values():
            with logtree.under(context.group.node):
                logtree.text(f"noted in {context.group.group_idx}")
            context.__exit__(None, None, None)
    texts = {}
    for name in NAMES:
        text = (path / name).read_text().replace(run.id, "RUN")
        texts[name] = re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.]*(Z| UTC)?", "TIME", text)
    return texts


def nodes(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
        for child in node["children"]:
            yield from nodes(child)


def test_files_do_not_show_the_order_in_which_rollouts_finished(tmp_path: Path) -> None:
    order = [(group, trajectory) for group in range(12) for trajectory in range(2)]
    expected = record(tmp_path / "in_order", order)
    random.Random(3).shuffle(order)
    assert record(tmp_path / "shuffled", order) == expected
    rows = list(open_run(tmp_path / "shuffled").rollouts())
    assert [(row.group_idx, row.traj_idx) for row in rows] == [(g, t) for g in range(12) for t in range(2)]
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_page_opens_where_there_is_something_to_read_and_says_how_much_that_is(tmp_path: Path) -> None:
    with Run(tmp_path, num_groups_to_log=1) as run, run.rollouts(0) as rollouts:
        for group_idx in range(3):
            with rollouts.group(group_idx, tags=["sums"]) as group:
                group.add(trajectory(group_idx, 0))
    page = (tmp_path / NAMES[0]).read_text()
    assert re.findall(r'<details class="s g" id="(g\d)"[^>]* open>', page) == ["g1"]  # of the middle reward
    assert "3 groups, 1 of them in full · 1 trajectory shown" in page
    assert page.count("<small>tags sums</small>") == 3


def test_the_report_shows_what_was_noted_graded_and_earned(tmp_path: Path) -> None:
    record(tmp_path, [(2, 0), (0, 1), (0, 0), (2, 1), (1, 0)])
    tree = json.loads((tmp_path / NAMES[1]).read_text())["root"]
    sections = [node for node in tree["children"] if isinstance(node, dict) and node["tag"] == "section"]
    assert [node["attrs"] for node in sections] == [
        {"data-group-idx": str(at), "data-task-id": f"t{at}"} for at in range(3)
    ]
    assert [node["children"][0]["children"][0] for node in sections] == [
        "Group 0 · mean reward 0.505 ± 0.005 · t0",
        "Group 1 · mean reward 0.6 · t1",
        "Group 2 · mean reward 0.705 ± 0.005 · t2",
    ]
    shown = [json.dumps(node) for node in sections]
    assert ["noted in" in text for text in shown] == [True, False, True]
    assert ['"conversation"' in text for text in shown] == [True, False, True]
    assert all(text.count('"Trajectory Details"') == 1 for text in shown)
    grading = [
        node["data"]
        for node in nodes(sections[0])
        if node.get("data", {}).get("caption") == "Reward and grading"
    ]
    assert [dict(zip(grading[1]["columns"], row, strict=True)) for row in grading[1]["rows"]] == [
        {"turn": 0, "reward": 0.01, "correct": 1, "verdict": "expected 0", "judge": None},
        {"turn": "episode", "reward": 0.5, "correct": None, "verdict": None, "judge": 0.25},
        {"turn": "total", "reward": 0.51, "correct": None, "verdict": None, "judge": None},
    ]
    page = (tmp_path / NAMES[0]).read_text()
    assert "expected 0" in page and "<b>é</b>" not in page and "3 groups" in page


def test_what_an_environment_calls_like_a_column_of_ours_is_kept(tmp_path: Path) -> None:
    with Run(tmp_path) as run, run.rollouts(0) as rollouts, rollouts.group() as group:
        step = Step(reward=1.0, metrics={"reward": 5.0, "turn": 7}, logs={"turn": "mine"})
        group.add(Trajectory(steps=[step], messages=[{"role": "user", "content": "q"}]))
    tables = [
        node["data"]
        for node in nodes(json.loads((tmp_path / NAMES[1]).read_text())["root"])
        if "data" in node
    ]
    (grading,) = [table for table in tables if table.get("caption") == "Reward and grading"]
    assert dict(zip(grading["columns"], grading["rows"][0], strict=True)) == {
        "turn": 0,
        "reward": 1.0,
        "reward_": 5.0,
        "turn_": 7,
        "turn__": "mine",
    }


def test_groups_without_rollouts_are_shown(tmp_path: Path) -> None:
    with Run(tmp_path) as run, run.rollouts(0) as rollouts:
        for index in range(3):
            with rollouts.group(index, size=1) as group:
                if index == 1:
                    group.add(trajectory(1, 0))
    page = (tmp_path / NAMES[0]).read_text()
    assert "Group 0 · no reward" in page and "Group 2 · no reward" in page


def test_memory_does_not_grow_with_the_iteration(tmp_path: Path) -> None:
    text = "x" * 200_000
    with Run(tmp_path, num_groups_to_log=2, code=tmp_path) as run:
        tracemalloc.start()
        try:
            with run.rollouts(0) as rollouts:
                for index in range(150, 0, -1):  # out of order
                    with rollouts.group(index) as group:
                        logtree.text(text)
                        group.add(Trajectory.single_turn("q", text, index / 150))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert (tmp_path / NAMES[3]).stat().st_size > 30_000_000
    assert peak < 12_000_000
