"""Creates `.venvs/gym` with the collector of NeMo Gym, which `bench/collect.py` is compared with.

Standard library only, so any Python 3.11+ can run it: `python bench/setup_gym.py`. A second call does nothing
until the pinned requirements change; an interrupted call starts over, because the stamp is written last.
Where pip finds packages is the machine's own configuration.

The package asks for Python 3.13.14 or newer. Its collector runs unchanged on older ones, so pip is told not
to mind, and all sides of the comparison have the same interpreter.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from setup_collectors import ENVIRONMENT as COLLECTORS

ENVIRONMENT = COLLECTORS.with_name("gym")
PYTHON = ENVIRONMENT / "bin" / "python"
REQUIREMENTS = Path(__file__).with_name("requirements-gym.txt")
_STAMP = ENVIRONMENT / "requirements.sha256"
_CHECK = "import nemo_gym.cli.main, nemo_gym.cli.eval, nemo_gym.rollout_collection"


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
    # --no-deps: the list names all that the collector imports, a third of what the package asks for.
    install = ["-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([PYTHON, *install, "--ignore-requires-python", "-r", REQUIREMENTS], check=True)
    subprocess.run([PYTHON, "-c", _CHECK], check=True, cwd=ENVIRONMENT)
    _STAMP.write_text(fingerprint())


if __name__ == "__main__":
    set_up()
