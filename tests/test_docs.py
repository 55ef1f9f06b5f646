"""Every Python and shell block of README.md and docs/ is executed, page by page, top to bottom.

`make` lines are not run from here (this is `make test`), only checked to name a real target.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page: Path, tmp_path: Path) -> None:
    for language, block in _BLOCK.findall(page.read_text()):
        if language == "json":
            for line in block.strip().splitlines():
                json.loads(line)
        elif language == "bash":
            run_shell(block, tmp_path)
        elif language == "python":
            run([sys.executable, "-c", block], tmp_path)


def run_shell(block: str, directory: Path) -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    for line in block.splitlines():
        words = line.split("#")[0].split()
        if words[:1] == ["make"]:
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), f"no target {words[1]}"
        elif words:
            run(["bash", "-ec", line], directory)


def run(command: list[str], directory: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, env={**os.environ, "PATH": path}
    )
    assert result.returncode == 0, f"{command[-1]}\n{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
