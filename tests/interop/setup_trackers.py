"""Creates `.venvs/trackers`: this package beside wandb, trackio and tensorboard."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer_environment import REPOSITORY, PeerEnvironment

TRACKERS = PeerEnvironment(
    name="trackers",
    requirements=Path(__file__).with_name("requirements-trackers.txt"),
    alone=("-e", str(REPOSITORY)),
    check="import wandb, trackio, tensorboard, rollbook; rollbook.Run",
)

if __name__ == "__main__":
    TRACKERS.set_up()
