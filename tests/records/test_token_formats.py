"""docs/formats.md has every setting, key and column of the token export."""

from __future__ import annotations

import pytest

from helpers.places import REPOSITORY
from rollbook.records.token_columns import TOKEN_COLUMNS
from rollbook.records.token_files import ExportedStep, RankPart
from rollbook.records.token_settings import TokenExportSettings
from rollbook.records.tokens import Keys, TurnSpan

PAGE = (REPOSITORY / "docs" / "formats.md").read_text()
SECTION = PAGE.split("## The token export\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("kind", [TokenExportSettings, Keys, TurnSpan, ExportedStep, RankPart])
def test_every_key_is_documented(kind: type) -> None:
    missing = [
        name
        for name in kind.__struct_fields__
        if f"`{name}`" not in SECTION and f'"{name}":' not in SECTION and name != "extra"
    ]
    assert missing == []


def test_every_column_is_documented_with_its_name() -> None:
    rows = [line for line in SECTION.splitlines() if line.startswith("|")]
    for column in TOKEN_COLUMNS:
        assert any(
            f"`{column.array}`" in row and (f"`{column.name}`" in row or "the same" in row) for row in rows
        ), column.array
