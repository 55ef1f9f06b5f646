"""metrics.jsonl of a run, as rows, as one row per step, as an Arrow table or a pandas frame.

Rows stream, other systems' under the documented names (`records.metrics.normalize`), each with an
`attempt` that tells a resumed run's processes apart: by the offsets in run.json where we wrote the file, by a
step that goes down elsewhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollbook.errors import UsageError
from rollbook.records.jsonl import Line, read_lines
from rollbook.records.metrics import Row, merge_by_step, metric_names, normalize, number_attempts
from rollbook.records.record import decode_line
from rollbook.records.run_info import RunInfo

if TYPE_CHECKING:
    import pandas
    import pyarrow


class Metrics:
    def __init__(self, path: Path, info: RunInfo | None) -> None:
        self.path = path
        self._info = info

    def __iter__(self) -> Iterator[Row]:
        """Every line as a row, in file order."""
        for attempt, row in self._numbered():
            row.setdefault("attempt", attempt)
            yield row

    def by_step(self) -> list[Row]:
        """One row a step: the lines of a step merged, the latest attempt winning."""
        return merge_by_step((row["attempt"], row) for row in self)

    def names(self) -> list[str]:
        """Every metric that occurs, in the order of first appearance."""
        seen: dict[str, None] = {}
        for row in self:
            seen.update(dict.fromkeys(metric_names(row)))
        return [name for name in seen if name != "attempt"]

    def to_arrow(self, *, by_step: bool = False) -> pyarrow.Table:
        import pyarrow

        columns = _columns(self.by_step() if by_step else self)
        return pyarrow.table({name: _arrow_column(values) for name, values in columns.items()})

    def to_pandas(self, *, by_step: bool = False) -> pandas.DataFrame:
        try:
            import pandas
        except ImportError:
            raise UsageError("pandas is not installed; type: pip install pandas (or use to_arrow)") from None
        columns = _columns(self.by_step() if by_step else self)
        frame = pandas.DataFrame({name: _plain_column(values) for name, values in columns.items()})
        if "logged_at" in frame:
            frame["logged_at"] = pandas.to_datetime(frame["logged_at"], utc=True)
        return frame

    def _numbered(self) -> Iterator[tuple[int, Row]]:
        if not self.path.exists():
            return
        lines = read_lines(self.path)
        if self._info is None:
            yield from number_attempts(normalize(decode_line(self.path, line)) for line in lines)
            return
        attempt_of = AttemptsByOffset(self._info, self.path.name)
        for line in lines:
            yield attempt_of(line), decode_line(self.path, line)


class AttemptsByOffset:
    """Which attempt wrote a line: the last one that began at or before the line's offset.

    A resume cuts the log before it appends, so whatever an earlier attempt wrote beyond that place is gone.
    """

    def __init__(self, info: RunInfo, file_name: str) -> None:
        self._starts: list[int] = []
        self._numbers: list[int] = []
        for attempt in info.attempts:
            start = attempt.log_lengths.get(file_name, 0)
            while self._starts and self._starts[-1] >= start:
                self._starts.pop()
                self._numbers.pop()
            self._starts.append(start)
            self._numbers.append(attempt.attempt)

    def __call__(self, line: Line) -> int:
        place = bisect_right(self._starts, line.start)
        return self._numbers[place - 1] if place else 1


def _columns(rows: Iterable[Row]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    count = 0
    for row in rows:
        for name, value in row.items():
            column = columns.get(name)
            if column is None:
                column = columns[name] = []
            column.extend([None] * (count - len(column)))
            column.append(value)
        count += 1
    for column in columns.values():
        column.extend([None] * (count - len(column)))
    return columns


def _plain_column(values: list[Any]) -> list[Any]:
    """A column of numbers with gaps as floats with NaN, which is what a plot wants; others as they are."""
    if all(value is None or _is_number(value) for value in values) and any(value is None for value in values):
        return [float("nan") if value is None else float(value) for value in values]
    return values


def _arrow_column(values: list[Any]) -> pyarrow.Array:
    import pyarrow

    if all(value is None or _is_number(value) for value in values):
        whole = all(value is None or (isinstance(value, int) and abs(value) < 2**63) for value in values)
        if whole:
            return pyarrow.array(values, pyarrow.int64())
        return pyarrow.array([None if value is None else float(value) for value in values])
    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):  # numbers and text under one name
        return pyarrow.array([None if value is None else str(value) for value in values])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
