"""What the logtree tests share: a browser, started once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import Browser

sys.path.insert(0, str(Path(__file__).parent))  # helper modules of these tests


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    running = Browser()
    yield running
    running.close()
