"""What the logtree tests share: a browser, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from browser import Browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    running = Browser()
    yield running
    running.close()
