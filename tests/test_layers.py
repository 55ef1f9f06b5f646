"""Imports point downwards, lazy ones too, and what only reads a run imports no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollbook

SOURCE = Path(rollbook.__file__).parent
# From top to bottom; packages on one line may import each other.
LAYERS = [
    {"cli", "demo", "__main__"},
    {"audit", "collect", "rl", "sft"},
    {"data"},
    {"query", "tokens"},
    {"samplers"},
    {"envs", "policies"},
    {"rollouts", "train"},
    {"recorder", "runs", "tiny"},
    {"records"},
    {"errors", "version"},
]
LEVEL = {name: len(LAYERS) - number for number, layer in enumerate(LAYERS) for name in layer}


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, package of ours) of every import of a file, wherever it stands in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            is_root = node.module == "rollbook"
            names = [f"rollbook.{alias.name}" for alias in node.names] if is_root else [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            root, _, rest = name.partition(".")
            if root == "rollbook" and rest:
                yield node.lineno, rest.partition(".")[0]


def test_every_import_points_downwards_or_to_its_own_layer() -> None:
    wrong = []
    for path in sorted(SOURCE.rglob("*.py")):
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if package == "__init__":  # the public names
            continue
        for line, imported in imports_of(path):
            assert imported in LEVEL, f"{path}:{line} imports {imported}, which has no layer yet"
            if LEVEL[imported] > LEVEL[package]:
                wrong.append(f"{path.relative_to(SOURCE)}:{line} imports {imported}")
    assert wrong == []


READS = """
import sys
import rollbook
{statement}
loaded = {{name.partition(".")[0] for name in sys.modules}}
heavy = sorted(loaded & {{"torch", "transformers", "ray", "peft"}})
assert not heavy, heavy
"""


@pytest.mark.parametrize(
    "statement",
    [
        "rollbook.open_run",
        "import rollbook.query.session",
        "import rollbook.cli.main, rollbook.cli.status, rollbook.cli.history, rollbook.cli.query",
        "import rollbook.runs.run, rollbook.recorder",
        "import rollbook.collect.settings, rollbook.data.merge",
        "import rollbook.records.tokens, rollbook.records.token_places",
        "import rollbook.audit.rl_run, rollbook.audit.sft_run, rollbook.audit.collection, rollbook.cli.audit",
    ],
)
def test_reading_a_run_imports_no_torch(statement: str) -> None:
    code = READS.format(statement=statement)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
