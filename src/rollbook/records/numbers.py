"""What counts as a number, in every command: true is 1 and false is 0; text, NaN and infinity are none.

A grader may say `true`; a text such as "0.5" is nobody's number until somebody makes it one.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

_LARGEST = 1.7976931348623157e308


def as_number(value: Any) -> float | None:
    return float(value) if is_number(value) and -_LARGEST <= value <= _LARGEST else None


def is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float)


def std_error(std: float | None, count: int) -> float | None:
    """The standard error of a mean: the deviation of a sample (n - 1) by the root of n; None below 2 values.

    It takes the values as independent of each other, which several rollouts of one task are not quite.
    """
    return None if std is None or count < 2 else std / math.sqrt(count)


def mean_text(mean: float | None, error: float | None, form: str = ".4g") -> str:
    """A mean with its standard error, as people read it: `0.45 ± 0.032`."""
    if mean is None:
        return "-"
    return format(mean, form) if error is None else f"{mean:{form}} ± {error:.2g}"


def sql_number(text: str) -> str:
    """The same rule in SQL, of a value as JSON text: its number, null where it is missing, NaN for others."""
    number = f"try_cast({text} as double)"
    return (
        f"case when {text} is null or {text} = 'null' then null"
        f" when {text} = 'true' then 1 when {text} = 'false' then 0"
        # Not `in`: DuckDB makes a join of long lists, and a join does not keep the order of rows.
        f" when contains('-0123456789', left({text}, 1))"
        f" and isfinite({number}) then {number} else 'nan'::double end"
    )
