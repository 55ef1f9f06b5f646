"""A small project whose run has finished, for the tests of the handoff."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from rollbook.runs.handoff import HandoffOutput, HandoffResult, publish, read_handoff

CONFIG = """\
# one config
runtime_info:
  input: {model: m}   # in
  output:   # out
    checkpoint_path: null
  notes: 1_23_1
"""

PUBLISHED = """\
# one config
runtime_info:
  input: {model: m}   # in
  output:   # out
    checkpoint_path: artifacts/model/demo/checkpoint-24
    training_metrics:
      final_loss: 0.342
      train_runtime: 6075.1
      total_steps: 24
      last_loss: 0.2306
      mean_loss: 0.342
    artifacts:
      train_results: artifacts/model/demo/train_results.json
      train_loss_plot: artifacts/model/demo/training_loss.png
      training_log: artifacts/logs/demo.log
    training_curves: ab12cd34
  notes: 1_23_1
"""


def demo(project: Path, **changes: Any) -> HandoffOutput:
    model = project / "artifacts/model/demo"
    output = HandoffOutput(
        checkpoint_path=model / "checkpoint-24",
        final_loss=0.342,
        train_runtime=6075.1,
        total_steps=24,
        last_loss=0.2306,
        mean_loss=0.342,
        train_results=model / "train_results.json",
        train_loss_plot=model / "training_loss.png",
        training_log=project / "artifacts/logs/demo.log",
        training_curves="ab12cd34",
    )
    return msgspec.structs.replace(output, **changes)


def hand_over(project: Path, config: str = "config.yaml", **more: Any) -> HandoffResult:
    return publish(
        project / config, demo(project), fallback=project / "artifacts/model/demo/output.yaml", **more
    )


def written_checkpoint(config: Path) -> Any:
    return read_handoff(config)["checkpoint_path"]


def only(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def make_project(directory: Path) -> Path:
    (directory / "config.yaml").write_text(CONFIG)
    (directory / "artifacts/model/demo/checkpoint-24").mkdir(parents=True)
    return directory
