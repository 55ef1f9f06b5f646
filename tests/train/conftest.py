"""What tests of the token export share."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.core import core_engine, core_model
from rollbook.tiny import write_tiny_tokenizer
from rollbook.train.engine import Engine


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    characters = [chr(ord("a") + number) for number in range(26)] + [chr(ord("A") + n) for n in range(24)]
    return write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), "".join(characters))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return core_engine(core_model())
