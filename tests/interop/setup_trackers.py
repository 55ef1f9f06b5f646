"""Make .venvs/trackers: wandb, trackio and tensorboard beside this package. Does nothing when it is there."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
HOME = REPOSITORY / ".venvs" / "trackers"
REQUIREMENTS = HERE / "requirements-trackers.txt"


def main() -> None:
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    stamp = HOME / "requirements.sha256"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(HOME)], check=True)
    pip = [str(HOME / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-r", str(REQUIREMENTS)], check=True)
    subprocess.run([*pip, "-e", str(REPOSITORY)], check=True)
    stamp.write_text(wanted)


if __name__ == "__main__":
    main()
