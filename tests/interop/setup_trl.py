"""Creates `.venvs/trl`: this package beside the unmodified TRL, whose trainers the recorder has to record."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer_environment import REPOSITORY, PeerEnvironment

TRL = PeerEnvironment(
    name="trl",
    requirements=Path(__file__).with_name("requirements-trl.txt"),
    alone=("-e", str(REPOSITORY)),
    check="import trl, rollbook.recorder, rollbook.runs.jobs.ledger",
)

if __name__ == "__main__":
    TRL.set_up()
