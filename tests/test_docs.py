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

from helpers.places import REPOSITORY

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
    """As it would be typed; what `make` would do is long, so only its targets are looked up."""
    makefile = (REPOSITORY / "Makefile").read_text()
    lines = block.splitlines()
    for line in lines:
        if line.startswith("make "):
            target = line.split()[1]
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"no target {target}"
    typed = [line for line in lines if not line.startswith("make ")]
    run(["bash", "-euo", "pipefail", "-c", "\n".join(typed)], directory)


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
