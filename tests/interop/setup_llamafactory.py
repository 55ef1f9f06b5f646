"""Makes `.venvs/llamafactory` with the unmodified LLaMA-Factory (python tests/interop/setup_llamafactory.py).

A second call does nothing until the pins change. About 1.7 GB, and some minutes the first time.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from peer_environment import PeerEnvironment

# It imports torchaudio, whose compiled part wants CUDA and which does without that part where it is absent.
_WITHOUT_COMPILED_SOUND = (
    "import importlib.util, pathlib;"
    "home = pathlib.Path(importlib.util.find_spec('torchaudio').origin).parent;"
    "[part.unlink() for part in home.glob('lib/*.so')];"
)
ENVIRONMENT = PeerEnvironment(
    "llamafactory",
    Path(__file__).with_name("requirements-llamafactory.txt"),
    alone=("llamafactory==0.9.5", "torchaudio==2.11.0"),
    check=_WITHOUT_COMPILED_SOUND + "import llamafactory.train.tuner, llamafactory.data.loader",
)
COMMAND = ENVIRONMENT.home / "bin" / "llamafactory-cli"

if __name__ == "__main__":
    ENVIRONMENT.set_up()
