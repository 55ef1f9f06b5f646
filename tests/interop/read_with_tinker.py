"""Run by `.venvs/tinker/bin/python`: reads a run with tinker-cookbook's own stores and prints what they saw.

Nothing here knows Rollbook; every value in the printed JSON comes out of an unmodified `TrainingRunStore`,
`RunRegistry` or `CheckpointRecord`. Warnings of the stores (a skipped line is only a warning there) are
part of the answer.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import Any

from tinker_cookbook import __version__
from tinker_cookbook.checkpoint_utils import get_last_checkpoint
from tinker_cookbook.stores import LocalStorage, RunRegistry, TrainingRunStore


class _Collect(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _iteration(store: TrainingRunStore, iteration: int, labels: list[str]) -> dict[str, Any]:
    bases = ["train", *(f"eval_{label}" for label in labels)]
    rollouts = {base: store.read_rollouts(iteration, base) for base in bases}
    return {
        "rollouts": rollouts,
        "single": {
            base: [
                store.read_single_rollout(iteration, record["group_idx"], record["traj_idx"], base)
                for record in records
            ]
            for base, records in rollouts.items()
        },
        "logtrees": {base: store.read_logtree(iteration, base) for base in store.list_logtrees(iteration)},
    }


def read(log_path: Path) -> dict[str, Any]:
    registry = RunRegistry([LocalStorage(log_path.parent, mkdir=False)])
    store = registry.get_training_store(log_path.name)
    new_metrics = store.read_new_metrics()
    iterations = store.list_iterations()
    last = get_last_checkpoint(str(log_path), required_key="name")
    return {
        "version": __version__,
        "runs": [dataclasses.asdict(run) for run in registry.get_runs()],
        "config": store.read_config(),
        "new_metrics": new_metrics,
        "new_metrics_again": store.read_new_metrics(),
        "metrics": store.read_metrics(),
        "metric_keys": sorted(store.metric_keys()),
        "iterations": [dataclasses.asdict(info) for info in iterations],
        "by_iteration": {
            str(info.iteration): _iteration(store, info.iteration, info.eval_labels) for info in iterations
        },
        "checkpoints": store.read_checkpoints(),
        "checkpoint_records": [
            {**dataclasses.asdict(record), "round_trip": record.to_dict()}
            for record in store.read_checkpoint_records()
        ],
        "last_checkpoint": last.to_dict() if last else None,
    }


if __name__ == "__main__":
    collect = _Collect()
    logging.getLogger("tinker_cookbook").addHandler(collect)
    answer = read(Path(sys.argv[1]))
    json.dump({**answer, "warnings": collect.messages}, sys.stdout)
