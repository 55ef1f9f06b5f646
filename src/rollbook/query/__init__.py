"""SQL over the files of runs and collections, read in place.

The package is the function itself, too: `rollbook.query("select ...", "runs/a", "rollouts.jsonl")`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import duckdb


class _Query(ModuleType):
    def __call__(self, sql: str, *things: str | Path) -> duckdb.DuckDBPyRelation:
        """A query over the views of these runs, collections and files; see docs/query.md.

        The result is DuckDB's relation: it prints as a table and has `.fetchall()`, `.arrow()`, `.df()`.
        """
        from rollbook.query.session import Session

        return Session(things).relation(sql)


sys.modules[__name__].__class__ = _Query
