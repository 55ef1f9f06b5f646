"""What a rollout log keeps of each trajectory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollbook import Run, Trajectory, open_run


@dataclass
class State:
    parent: Any = None
    children: list[Any] = field(default_factory=list)


def test_cyclic_logs_do_not_hang(tmp_path: Path) -> None:
    root = State()
    root.children = [State(root) for _ in range(3)]
    with Run(tmp_path) as run, run.rollouts(0) as rollouts, rollouts.group(0) as group:
        group.add(Trajectory.single_turn("q", "a", 1.0, logs={"state": root}))
    (rollout,) = open_run(tmp_path).rollouts()
    assert rollout.steps[0].logs["state"]["children"][0]["parent"] == "[circular: State]"
    assert "<refers to itself>" in (tmp_path / "train_iteration_000000_logtree.json").read_text()
