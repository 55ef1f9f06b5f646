"""Columns of Python values, handed to DuckDB as NumPy arrays.

Not by pyarrow: where pandas is installed, pyarrow imports it to see whether a list is one of its objects,
which takes longer than most commands work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import duckdb
import numpy as np


def column(values: Sequence[Any], kind: type) -> np.ndarray[Any, Any]:
    """The values with None as null; a float that is NaN becomes null too."""
    if kind is str:
        return np.array(values, dtype=object)
    nulls = [value is None for value in values]
    return np.ma.array([kind() if value is None else value for value in values], dtype=kind, mask=nulls)


def insert(
    connection: duckdb.DuckDBPyConnection, table: str, columns: Mapping[str, np.ndarray[Any, Any]]
) -> None:
    """Adds rows to a table whose columns have these names, in this order."""
    connection.register("batch", columns)
    connection.execute(f"insert into {table} select * from batch")
    connection.unregister("batch")
