"""Creates `.venvs/collectors` and `.venvs/gym`: what `bench/collect.py` is compared with."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from peer_environment import PeerEnvironment

HERE = Path(__file__).resolve().parent
COLLECTORS = PeerEnvironment(
    name="collectors",
    requirements=HERE / "requirements-collectors.txt",
    is_complete=True,  # resolving it would take minutes
    check="import aiohttp, openai, uvloop, verifiers.v1.cli.eval.runner",
)
# NeMo Gym asks for Python 3.13.14. Its collector runs unchanged on older ones, so that all sides of the
# comparison have the same interpreter; the list names what the collector imports, a third of what is asked.
GYM = PeerEnvironment(
    name="gym",
    requirements=HERE / "requirements-gym.txt",
    is_complete=True,
    any_python=True,
    check="import nemo_gym.cli.main, nemo_gym.cli.eval, nemo_gym.rollout_collection",
)

if __name__ == "__main__":
    COLLECTORS.set_up()
    GYM.set_up()
