"""The side everyone starts with: `json.dumps` and a file opened once with `"a"`, flushed after each line.

Durability: a flushed line is in the page cache. It survives a kill of the process, not a crash of the
machine, and a full disk or a kill in the middle of a write leaves half a line.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

from workload import Episode, Watch, metric_rows, scaled, side_main, summary_episodes, total_size


def metrics(directory: Path, scale: float) -> dict[str, float]:
    rows, count = metric_rows(64, 100), scaled(5000, scale)
    path = directory / "metrics.jsonl"
    with Watch() as watch, path.open("a", encoding="utf-8") as file:
        calls = []
        for step in range(count):
            start = time.perf_counter()
            file.write(json.dumps({"step": step, **rows[step % 64]}) + "\n")
            file.flush()
            calls.append(time.perf_counter() - start)
    with Watch() as reading, path.open(encoding="utf-8") as file:
        read = [json.loads(line) for line in file]
    assert len(read) == count
    return {
        "call_us": statistics.median(calls) * 1e6,
        "rows_per_s": count / watch.seconds,
        "row_bytes": total_size(path) / count,
        "read_rows_per_s": count / reading.seconds,
    }


def summary(episode: Episode) -> dict[str, Any]:
    last = len(episode.turns) - 1
    return {
        "schema_version": 1,
        "split": "train",
        "iteration": 0,
        "group_idx": episode.group,
        "traj_idx": episode.index,
        "tags": ["math"],
        "sampling_client_step": 0,
        "total_reward": sum(turn.reward for turn in episode.turns),
        "final_reward": 0.0,
        "trajectory_metrics": {},
        "steps": [
            {
                "step_idx": number,
                "ob_len": turn.ob_len,
                "ac_len": turn.ac_len,
                "reward": turn.reward,
                "episode_done": number == last,
                "metrics": turn.metrics,
                "logs": turn.logs,
            }
            for number, turn in enumerate(episode.turns)
        ],
        "final_ob_len": 0,
    }


def summaries(directory: Path, scale: float) -> dict[str, float]:
    groups = summary_episodes(scaled(64, scale), 16, 10)
    path = directory / "rollout_summaries.jsonl"
    with Watch() as watch, path.open("a", encoding="utf-8") as file:
        for group in groups:
            for episode in group:
                file.write(json.dumps(summary(episode)) + "\n")
                file.flush()
    with Watch() as reading, path.open(encoding="utf-8") as file:
        read = [json.loads(line) for line in file]
    assert len(read) == len(groups) * 16
    return {"seconds": watch.seconds, "bytes": total_size(path), "read_seconds": reading.seconds}


if __name__ == "__main__":
    side_main({"metrics": metrics, "summaries": summaries}, version="json")
