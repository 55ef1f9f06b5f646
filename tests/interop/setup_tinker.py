"""Creates `.venvs/tinker` with the unmodified tinker-cookbook, for the interop tests and the benchmarks."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer_environment import PeerEnvironment

TINKER = PeerEnvironment(
    name="tinker",
    requirements=Path(__file__).with_name("requirements-tinker.txt"),
    is_complete=True,  # a resolver would add torch and transformers
    check="import tinker_cookbook.checkpoint_utils, tinker_cookbook.stores;"
    "import tinker_cookbook.utils.logtree, tinker_cookbook.utils.ml_log",
)

if __name__ == "__main__":
    TINKER.set_up()
