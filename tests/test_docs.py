"""Every Python and shell block of README.md and docs/ is executed, page by page, top to bottom.

`make` lines are not run from here (this is `make test`), only checked to name a real target.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import preloaded
from helpers.places import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """README.md is run as it is installed; for the others all imports have been done, which saves minutes."""
    installed = page.name == "README.md"
    environment = (
        preloaded.installed_environment()
        if installed
        else preloaded.typed_environment(tmp_path_factory.mktemp("bin"))
    )
    for language, block in _BLOCK.findall(page.read_text()):
        if language == "json":
            for line in block.strip().splitlines():
                json.loads(line)
        elif language == "bash":
            run(["bash", "-euo", "pipefail", "-c", typed(block)], tmp_path, environment)
        elif language == "python" and installed:
            run([sys.executable, "-c", block], tmp_path, environment)
        elif language == "python":
            check(preloaded.run("python", "-c", block, cwd=tmp_path, env=environment))


def typed(block: str) -> str:
    """What is typed of a shell block; what `make` would do is long, so only its targets are looked up."""
    makefile = (REPOSITORY / "Makefile").read_text()
    lines = block.splitlines()
    for line in lines:
        if line.startswith("make "):
            target = line.split()[1]
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"no target {target}"
    return "\n".join(line for line in lines if not line.startswith("make "))


def run(command: list[str], directory: Path, environment: dict[str, str]) -> None:
    check(subprocess.run(command, cwd=directory, capture_output=True, text=True, env=environment))


def check(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, f"{done.args[-1]}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
