"""A field is typed, printed and looked up in one way, by us and by DuckDB."""

from __future__ import annotations

from typing import Any

import duckdb
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.errors import UsageError
from rollbook.records.field_paths import field_path, field_text, json_path, value_at


def test_fields_as_they_are_typed() -> None:
    assert field_path("response.usage.output_tokens") == ["response", "usage", "output_tokens"]
    assert field_path('row."a b".c[0][-1]') == ["a b", "c", 0, -1]
    assert field_path("mean/reward") == ["mean/reward"] and field_path("pass@1") == ["pass@1"]
    assert value_at({"a b": {"c": [[1, 2]]}}, ["a b", "c", 0, -1]) == 2
    assert value_at({"a": "text"}, ["a", 0]) is None
    for text in ("a + b", "", "row.", "f(a)", "a..b", "[0]", "a[x]", 'a."', "a b", "a.[0]"):
        with pytest.raises(UsageError, match="is not a field"):
            field_path(text)


def test_a_key_that_duckdb_takes_for_any_is_refused() -> None:
    with pytest.raises(UsageError, match=r"called \* cannot be asked for"):
        json_path(["a", "*"])


NAMES = st.text(min_size=1, max_size=6).filter(
    lambda name: "\0" not in name and name.isprintable() and name != "*"
)


@settings(max_examples=60, deadline=None)
@given(path=st.tuples(NAMES, st.lists(NAMES | st.integers(-3, 2), max_size=3)))
def test_every_field_can_be_typed_and_asked_of_duckdb(path: tuple[str, list[str | int]]) -> None:
    steps = [path[0], *path[1]]
    assert field_path(f"row.{field_text(steps)}") == steps
    value: Any = 7
    for step in reversed(steps):
        value = {step: value, "other": 0} if isinstance(step, str) else [value, value, value]
    row = orjson.dumps(value).decode()
    found = duckdb.execute("select json_extract(?::json, ?)::varchar", [row, json_path(steps)]).fetchone()
    assert found == (str(value_at(value, steps)),)
