"""Rows of anything become a table with named columns and typed cells.

`data` of a table node: `columns` and `rows`, one list per row. A number stays a number; NaN and the
infinities are null in JSON, and `nonfinite` says which cells they were: [row, column, "NaN"].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

from rollbook.records.logtree.values import drained, to_plain, to_text

_NONFINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def table_data(rows: object, caption: object, columns: Iterable[object] | None) -> dict[str, Any]:
    listed = _listed(rows)
    names = _names(listed) if columns is None else [to_text(name) for name in _listed(columns)]
    nonfinite: list[list[Any]] = []
    cells = [_cells(row, names, index, nonfinite) for index, row in enumerate(listed)]
    width = max([len(row) for row in cells], default=0)
    names += [str(index) for index in range(len(names), width)]
    for row in cells:
        if len(row) < len(names):
            row += [None] * (len(names) - len(row))
    data: dict[str, Any] = {
        "type": "table",
        "caption": None if caption is None else to_text(caption),
        "columns": names,
        "rows": cells,
    }
    if nonfinite:
        data["nonfinite"] = nonfinite
    return data


def _listed(rows: object) -> list[Any]:
    """The rows of a list, an iterator, a dict, a data frame or an array, each a list, a tuple or plain."""
    try:
        items = _items(rows)
    except Exception:  # something that only looks like a table: it is shown as it shows itself
        items = [to_text(rows)]
    return [item if type(item) in (list, tuple) else to_plain(item) for item in items]


def _items(rows: object) -> list[Any]:
    if isinstance(rows, (list, tuple)):
        return list(rows)
    if isinstance(rows, Mapping):
        return list(rows.items())
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        return list(rows.to_dict("records"))
    plain = rows.tolist() if hasattr(rows, "tolist") else to_plain(drained(rows))
    if plain is None:
        return []
    return plain if isinstance(plain, list) else [plain]


def _names(rows: list[Any]) -> list[str]:
    seen: dict[str, None] = {}
    for row in rows:
        if isinstance(row, dict):
            seen.update(dict.fromkeys(row))
    return list(seen)


def _cells(row: Any, names: list[str], index: int, nonfinite: list[list[Any]]) -> list[Any]:
    if isinstance(row, dict):
        cells = [row.get(name) for name in names]
    elif isinstance(row, (list, tuple)):
        cells = [to_plain(cell) for cell in row]
    else:
        cells = [row]
    for column, cell in enumerate(cells):
        if type(cell) is float and not isfinite(cell):
            nonfinite.append([index, column, _NONFINITE[str(cell)]])
            cells[column] = None
    return cells
