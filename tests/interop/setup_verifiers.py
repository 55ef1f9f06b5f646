"""Creates `.venvs/verifiers`: this package beside the unmodified verifiers."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer_environment import REPOSITORY, PeerEnvironment

VERIFIERS = PeerEnvironment(
    name="verifiers",
    requirements=Path(__file__).with_name("requirements-verifiers.txt"),
    alone=("-e", str(REPOSITORY)),
    check="import verifiers, rollbook.cli.collect, rollbook.envs.verifiers_bridge",
)

if __name__ == "__main__":
    VERIFIERS.set_up()
