"""Which data was it? A fingerprint of every file a run is given, cheap enough to take at each start.

A file up to the cap is hashed whole (`sha256`); of a larger one, or once the budget of bytes is used up, the
beginning, middle and end are hashed together with the size, and `sampled` says so: a `sha256` in the record
is always one that `sha256sum` gives.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

_WHOLE_UP_TO = 64 << 20
_BUDGET = 512 << 20
_SAMPLE = 1 << 20
_MOST_FILES = 1000  # of a directory


class Fingerprinter:
    def __init__(self, *, whole_up_to: int = _WHOLE_UP_TO, budget: int = _BUDGET) -> None:
        self._whole_up_to, self._left = whole_up_to, budget

    def files(self, paths: list[Path]) -> list[dict[str, Any]]:
        return [self.fingerprint(path) for path in paths]

    def fingerprint(self, path: Path) -> dict[str, Any]:
        """One that cannot be read is an entry with `error`."""
        try:
            if path.is_dir():
                return {"path": str(path), **self._directory(path)}
            return {"path": str(path), **self._file(path)}
        except OSError as error:
            return {"path": str(path), "error": error.strerror or str(error)}

    def _file(self, path: Path) -> dict[str, Any]:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= min(self._whole_up_to, self._left):
                self._left -= size
                return {"bytes": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
            digest = hashlib.sha256(str(size).encode())
            for start in (0, max(0, (size - _SAMPLE) // 2), max(0, size - _SAMPLE)):
                file.seek(start)
                digest.update(file.read(_SAMPLE))
        return {
            "bytes": size,
            "sampled": digest.hexdigest(),
            "sampled_how": f"sha256 of the size in decimal and {_SAMPLE} bytes at beginning, middle, end",
        }

    def _directory(self, directory: Path) -> dict[str, Any]:
        """A digest of the names and sizes below it, up to a number of files."""
        digest = hashlib.sha256()
        count = total = 0
        for folder, below, names in os.walk(directory):
            below.sort()
            for name in sorted(names):
                file = Path(folder, name)
                size = file.stat().st_size if file.exists() else -1
                count, total = count + 1, total + max(size, 0)
                digest.update(f"{file.relative_to(directory)}\0{size}\n".encode("utf-8", "surrogateescape"))
                if count == _MOST_FILES:
                    return {"files": count, "bytes": total, "listing": digest.hexdigest(), "truncated": True}
        return {"files": count, "bytes": total, "listing": digest.hexdigest()}
