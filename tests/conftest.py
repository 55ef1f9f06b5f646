"""Shared fixtures: a sample run written once, and the peers' real outputs where they are at hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helpers.places import SHARED
from helpers.sample_run import SampleConfig, write_sample_run
from helpers.signals import let_children_hear_signals

# Models of the tests are so small that threads only get into each other's way; subprocesses inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

let_children_hear_signals()


@pytest.fixture(scope="session")
def sample_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 21 iterations in the flat layout; read-only by agreement."""
    path = tmp_path_factory.mktemp("sample") / "run"
    write_sample_run(path, config=SampleConfig(iterations=21))
    return path


@pytest.fixture
def peer_fixtures() -> Path:
    path = SHARED / "fixtures"
    if not path.is_dir():
        pytest.skip("the peers' outputs are not beside this checkout")
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of a few long tests first: begun last, they would keep one process busy and the others idle."""
    long = ("test_demo.py", "test_docs.py", "sft", "train", "faults", "models")
    items.sort(key=lambda item: item.path.relative_to(Path(__file__).parent).parts[0] not in long)
