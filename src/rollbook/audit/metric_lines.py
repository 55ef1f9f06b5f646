"""metrics.jsonl against what was counted: its lines by step, each read again when its iteration is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from rollbook.audit.auditor import Auditor
from rollbook.audit.recount import Values
from rollbook.audit.result import Kind
from rollbook.audit.scan import size_of
from rollbook.errors import BadLineError
from rollbook.records.jsonl import Line, check_line, read_lines
from rollbook.records.metrics import Row, metric_names, normalize, step_of
from rollbook.records.record import decode_line

# A count is exact and a mean nearly so; the sums of a trainer are made of float32 logprobs.
_CLOSE, _CLOSE_FLOAT32 = 1e-9, 1e-5
_FLOAT32 = ("entropy_sampled",)
_REPEATED = ("step", "progress/batch", "progress/done_frac")  # every line of a step has these


class MetricLines:
    def __init__(self, auditor: Auditor, path: Path, *, is_open: bool, is_ours: bool) -> None:
        """`is_ours`: a step has one value for each metric."""
        self._auditor, self.path, self._is_ours = auditor, path, is_ours
        self._places: dict[int, list[tuple[int, int, int]]] = {}  # number, start and end of each line
        end = size_of(path)
        auditor.read(end)
        last = 0
        for line in read_lines(path, end=end, accept_tail=True) if end else ():
            last = line.end
            if line.end - line.start == len(line.data):  # no newline
                if not is_open:
                    self._refuse(line.number, "the line is cut off: the file does not end with a newline")
                continue
            try:
                step = step_of(decode_line(path, line))
            except BadLineError as error:
                self._refuse(line.number, _why(path, line) or error.why)
                continue
            if step is not None:
                self._places.setdefault(step, []).append((line.number, line.start, line.end))
        self.end = last

    @property
    def steps(self) -> set[int]:
        return set(self._places)

    def at(self, step: int) -> list[tuple[int, Row]]:
        """(number, content) of the lines of a step, under the documented names."""
        found = []
        for number, start, end in self._places.get(step, ()):
            for line in read_lines(self.path, start=start, end=end, number=number):
                found.append((number, normalize(decode_line(self.path, line))))
        return found

    def compare(self, step: int, counted: Values) -> list[tuple[int, Row]]:
        """Returns the lines of the step, with their numbers."""
        lines = self.at(step)
        for number, row in lines:
            self._compare(number, row, step, counted)
        self._find_doubles(step, lines)
        return lines

    def _compare(self, number: int, row: Mapping[str, object], step: int, counted: Values) -> None:
        numeric = [name for name in metric_names(dict(row)) if isinstance(row[name], int | float)]
        agreed = compared = 0
        for key in numeric:
            if key not in counted or _is_of_an_older_rule(key, row):
                continue
            compared += 1
            there, value = row[key], counted[key]
            closeness = _CLOSE_FLOAT32 if key.endswith(_FLOAT32) else _CLOSE
            assert isinstance(there, int | float)
            if math.isclose(there, value, rel_tol=closeness, abs_tol=1e-12):
                agreed += 1
                continue
            self._auditor.find(
                Kind.DIFFERS,
                f"{key} of step {step} is {there:.10g} here, and counted again {value:.10g}",
                file=self.path,
                line=number,
                key=key,
                next="restore the line from a copy; or believe the count, which is made from the rollouts",
            )
        own = len([name for name in numeric if name not in _REPEATED])
        self._auditor.check("metrics counted again", agreed, compared, unknown=own - compared)

    def find_all_doubles(self) -> None:
        for step in sorted(self.steps):
            self._find_doubles(step, self.at(step))

    def _find_doubles(self, step: int, lines: list[tuple[int, Row]]) -> None:
        seen: dict[str, tuple[int, object]] = {}
        for number, row in lines:
            names = [name for name in metric_names(row) if name not in _REPEATED]
            again = [name for name in names if name in seen and (self._is_ours or seen[name][1] == row[name])]
            if names and len(again) == len(names):
                self._auditor.find(
                    Kind.DOUBLED,
                    f"step {step} is on line {seen[again[0]][0]} already",
                    file=self.path,
                    line=number,
                    key=again[0],
                )
            seen |= {name: (number, row[name]) for name in names}

    def _refuse(self, number: int, why: str) -> None:
        self._auditor.find(Kind.UNREADABLE, why, file=self.path, line=number)


def _is_of_an_older_rule(key: str, row: Mapping[str, object]) -> bool:
    """Before there was a standard error beside it, the deviation was that of a population (n)."""
    return key.endswith("/reward/std") and f"{key}_error" not in row


def _why(path: Path, line: Line) -> str | None:
    try:
        check_line(path, line)
    except BadLineError as error:
        return error.why
    return None
