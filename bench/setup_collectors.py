"""Creates `.venvs/collectors` with the collectors that `bench/collect.py` is compared with.

Standard library only, so any Python 3.11+ can run it: `python bench/setup_collectors.py`. A second call does
nothing until the pinned requirements change; an interrupted call starts over, because the stamp is written
last. Where pip finds packages is the machine's own configuration.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ENVIRONMENT = Path(__file__).resolve().parents[1] / ".venvs" / "collectors"
PYTHON = ENVIRONMENT / "bin" / "python"
REQUIREMENTS = Path(__file__).with_name("requirements-collectors.txt")
_STAMP = ENVIRONMENT / "requirements.sha256"
_CHECK = "import aiohttp, openai, uvloop, verifiers.v1.cli.eval.runner"


def fingerprint() -> str:
    """What the environment depends on: the pins and the series of Python that runs it."""
    version = ".".join(map(str, sys.version_info[:2]))
    return hashlib.sha256(REQUIREMENTS.read_bytes() + version.encode()).hexdigest()


def is_ready() -> bool:
    return PYTHON.exists() and _STAMP.exists() and _STAMP.read_text() == fingerprint()


def set_up() -> None:
    if is_ready():
        return
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    venv.create(ENVIRONMENT, with_pip=True)
    # --no-deps: the list is complete, and resolving it takes minutes.
    install = ["-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps", "-r"]
    subprocess.run([PYTHON, *install, REQUIREMENTS], check=True)
    subprocess.run([PYTHON, "-c", _CHECK], check=True)
    _STAMP.write_text(fingerprint())


if __name__ == "__main__":
    set_up()
