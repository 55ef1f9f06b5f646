"""Makes a virtual environment of its own for another system, below `.venvs/`, from pinned requirements.

Standard library only, so any Python 3.11+ can run it. A second call does nothing until the pins change; an
interrupted call starts over, because the stamp is written last. Where pip finds packages is the machine's own
configuration.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class PeerEnvironment:
    """`alone` are packages that are installed without what they say they need, after the requirements."""

    name: str
    requirements: Path
    check: str  # a statement that runs there when all is well
    alone: tuple[str, ...] = ()
    is_complete: bool = False  # the requirements name all there is to install: nothing is resolved or added
    any_python: bool = False  # also where a package asks for another Python than the one that runs this

    @property
    def home(self) -> Path:
        return REPOSITORY / ".venvs" / self.name

    @property
    def python(self) -> Path:
        return self.home / "bin" / "python"

    @cached_property
    def fingerprint(self) -> str:
        """What the environment depends on: the pins and the series of Python that runs it."""
        version = "{}.{}".format(*sys.version_info)
        pins = self.requirements.read_text() + "\n".join((*self.alone, version))
        return hashlib.sha256(pins.encode()).hexdigest()

    @property
    def _stamp(self) -> Path:
        return self.home / "requirements.sha256"

    def is_ready(self) -> bool:
        return self.python.exists() and self._stamp.exists() and self._stamp.read_text() == self.fingerprint

    def set_up(self) -> None:
        if self.is_ready():
            return
        print(f"making {self.home.relative_to(REPOSITORY)}, some minutes", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", self.home], check=True)
        install = [str(self.python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        options = ["--no-deps"] if self.is_complete else []
        options += ["--ignore-requires-python"] if self.any_python else []
        subprocess.run([*install, *options, "-r", self.requirements], check=True)
        if self.alone:
            subprocess.run([*install, "--no-deps", *self.alone], check=True)
        subprocess.run([self.python, "-c", self.check], check=True, cwd=self.home)
        self._stamp.write_text(self.fingerprint)
