"""A full disk ends a collection with a clear error, loses nothing acknowledged, and a resume completes it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from faults.harness import HERE
from faults.test_full_disk import NAMESPACES, run


def collect(directory: Path, kind: str, namespace: list[str]) -> None:
    done = run([*namespace, sys.executable, str(HERE / "full_disk_collection.py"), str(directory), kind])
    assert (done.returncode, done.stdout) == (0, "kept\n"), done.stderr


@pytest.mark.parametrize("rights", NAMESPACES)
def test_a_full_tmpfs(rights: str, tmp_path: Path) -> None:
    tried = run([*NAMESPACES[rights], "mount", "-t", "tmpfs", "none", str(tmp_path)])
    if tried.returncode:
        pytest.skip(f"no tmpfs can be mounted here with the rights {rights!r}: {tried.stderr.strip()}")
    collect(tmp_path, "tmpfs", NAMESPACES[rights])


def test_a_file_size_limit(tmp_path: Path) -> None:
    collect(tmp_path, "limit", [])
