"""A full disk is a clear error that names the file, costs nothing acknowledged, and ends when space is freed.

The real thing is a tmpfs of 256 KiB, mounted in a namespace of its own, for which most kernels ask for no
rights and the others for root. Where neither is allowed, a limit on the size of files still gives the same
short writes and refusals.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from faults.harness import HERE, NAMESPACES, mountable, run


def fill_the_disk(directory: Path, kind: str, namespace: list[str]) -> None:
    done = run([*namespace, sys.executable, str(HERE / "full_disk_process.py"), str(directory), kind])
    assert (done.returncode, done.stdout) == (0, "kept\n"), done.stderr


@pytest.mark.parametrize("rights", NAMESPACES)
def test_a_full_tmpfs(rights: str, tmp_path: Path) -> None:
    fill_the_disk(tmp_path, "tmpfs", mountable(rights, tmp_path))


def test_a_file_size_limit(tmp_path: Path) -> None:
    fill_the_disk(tmp_path, "limit", [])
