"""Creates `.venvs/verifiers` and `.venvs/verifiers-classic`: this package beside the unmodified verifiers.

One environment for each of its two interfaces.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer_environment import REPOSITORY, PeerEnvironment


def _environment(name: str) -> PeerEnvironment:
    return PeerEnvironment(
        name=name,
        requirements=Path(__file__).with_name(f"requirements-{name}.txt"),
        alone=("-e", str(REPOSITORY)),
        check="import verifiers, rollbook.cli.collect, rollbook.envs.verifiers_bridge",
    )


PRESENT, CLASSIC = _environment("verifiers"), _environment("verifiers-classic")

if __name__ == "__main__":
    PRESENT.set_up()
    CLASSIC.set_up()
