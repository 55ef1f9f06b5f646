"""Creates `.venvs/tinker` with the unmodified tinker-cookbook, for the interop tests and the benchmarks.

Standard library only, so any Python 3.11+ can run it: `python tests/interop/setup_tinker.py`. A second call
does nothing until the pinned requirements change; an interrupted call starts over, because the stamp is
written last. Where pip finds packages is the machine's own configuration.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venvs" / "tinker"
PYTHON = ENVIRONMENT / "bin" / "python"
REQUIREMENTS = Path(__file__).with_name("requirements-tinker.txt")
_STAMP = ENVIRONMENT / "requirements.sha256"
_CHECK = (
    "import tinker_cookbook.checkpoint_utils, tinker_cookbook.stores;"
    "import tinker_cookbook.utils.logtree, tinker_cookbook.utils.ml_log"
)


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
    # --no-deps on a complete list of pins: the resolver would add torch and transformers.
    install = ["-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps", "-r"]
    subprocess.run([PYTHON, *install, REQUIREMENTS], check=True)
    subprocess.run([PYTHON, "-c", _CHECK], check=True)
    _STAMP.write_text(fingerprint())


if __name__ == "__main__":
    set_up()
