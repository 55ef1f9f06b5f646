"""Creates `.venvs/verifiers` and `.venvs/verifiers-classic`: this package beside the unmodified verifiers.

One environment for each of its two interfaces. A second call does nothing until a release or the requirements
change; an interrupted call starts over, because the stamp is written last.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).with_name("requirements-verifiers.txt")
RELEASES = {"verifiers": "0.4.0", "verifiers-classic": "0.1.14"}


def environment(name: str) -> Path:
    return ROOT / ".venvs" / name


def set_up(name: str, release: str) -> None:
    home = environment(name)
    version = ".".join(map(str, sys.version_info[:2]))
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes() + f"{release} {version}".encode()).hexdigest()
    stamp = home / "requirements.sha256"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
    install = [str(home / "bin" / "python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*install, f"verifiers=={release}", "-r", str(REQUIREMENTS), "-e", str(ROOT)], check=True)
    subprocess.run([str(home / "bin" / "python"), "-c", "import verifiers, rollbook"], check=True)
    stamp.write_text(wanted)


if __name__ == "__main__":
    for name, release in RELEASES.items():
        set_up(name, release)
