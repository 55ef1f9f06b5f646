"""Which rows are examples to learn from, and why the others are not: a byte a row, noted as they are read."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from rollbook.data.rollouts import Unusable


class Verdicts:
    """`judge` raises Unusable for a row that is no example."""

    def __init__(self, judge: Callable[[dict[str, Any]], object]) -> None:
        self._judge = judge
        self._reasons = [""]
        self._given = array("B")

    def note(self, task: str, row: dict[str, Any]) -> None:
        self._given.append(self._number(row))

    def reason(self, row: int) -> str:
        """Why the row of this number is no example; nothing where it is one."""
        return self._reasons[self._given[row]]

    def _number(self, value: dict[str, Any]) -> int:
        try:
            self._judge(value)
        except Unusable as unusable:
            reason = str(unusable)
            if reason not in self._reasons:
                self._reasons.append(reason)
            return self._reasons.index(reason)
        return 0
