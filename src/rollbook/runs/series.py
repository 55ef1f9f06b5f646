"""The values that a run logged, by step, from whichever log it left: what `status` and `plot` read.

A trainer writes `trainer_log.jsonl`, or keeps its points in `trainer_state.json`; ours and peers' runs have
`metrics.jsonl`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rollbook.errors import BadLineError
from rollbook.records.jsonl import Line, read_lines
from rollbook.records.record import decode_json, decode_line
from rollbook.runs.reader import open_run
from rollbook.runs.saved_models import saved_models

_TAIL_BYTES = 128 << 10
_NOT_MEASURED = ("step", "logged_at", "attempt")

Row = dict[str, Any]


class Curve(NamedTuple):
    name: str
    steps: list[int]
    values: list[float]  # NaN where the log says the value was not finite


def trainer_curves(directory: Path) -> dict[str, Curve] | None:
    """The curves of a trainer; None where none has logged here."""
    if (log := directory / "trainer_log.jsonl").exists():
        rows = (decode_line(log, line) for line in read_lines(log))
        return _curves((trainer_step(row), row) for row in rows)
    if (state := newest_trainer_state(directory)) is None:
        return None
    return _curves((row.pop("step", None), row) for row in read_trainer_state(state)[1])


def metric_curves(directory: Path) -> dict[str, Curve]:
    """The curves of a run whose log is metrics.jsonl."""
    rows = open_run(directory).metrics.by_step()
    return _curves((row.get("step"), {**row, **dict.fromkeys(_NOT_MEASURED)}) for row in rows)


def last_rows(path: Path) -> Iterator[Row]:
    """The complete JSON lines at the end of a log; half lines at both ends are none."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        data = file.read()
    lines = data.split(b"\n")[:-1]
    for line in lines[1:] if size > _TAIL_BYTES else lines:
        with contextlib.suppress(BadLineError):  # status shows what there is; readers say what is wrong
            yield decode_line(path, Line(line, 0, 0, 0))


def trainer_step(row: Row) -> int | None:
    """The step of a line of a trainer's log."""
    step = next((row[key] for key in ("current_steps", "step", "global_step") if key in row), None)
    return step if isinstance(step, int) else None


def newest_trainer_state(directory: Path) -> Path | None:
    """The trainer_state.json with the highest step: of the output directory, or of a checkpoint below it."""
    places = [*(model.path for model in saved_models(directory)), directory]
    found = [place / "trainer_state.json" for place in places if (place / "trainer_state.json").exists()]
    return found[-1] if found else None


def read_trainer_state(path: Path) -> tuple[Row, list[Row]]:
    """What the Hugging Face Trainer leaves, and its points in it; both empty where that cannot be read."""
    try:
        saved = decode_json(path.read_bytes())
        return saved, [row for row in saved.get("log_history") or [] if isinstance(row, dict)]
    except (OSError, ValueError, AttributeError, TypeError):
        return {}, []


def _curves(rows: Iterable[tuple[Any, Row]]) -> dict[str, Curve]:
    points: dict[str, dict[int, float]] = {}
    for step, row in rows:
        numbers = {name: value for name, value in row.items() if type(value) in (int, float)}
        for name, value in (numbers | dict.fromkeys(row.get("nonfinite") or (), math.nan)).items():
            if isinstance(step, int):  # a resumed log may repeat steps: the later line counts
                points.setdefault(name, {})[step] = float(value)
    return {name: Curve(name, sorted(at), [at[step] for step in sorted(at)]) for name, at in points.items()}
