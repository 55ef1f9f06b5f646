"""What is already done, known within seconds for a million rows.

The output file is the only truth: a row counts as done when its complete line is there. On resume the journal
beside it is believed up to its last entry that fits the file and bears its row's key there, and the lines
behind it are read.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import orjson

from rollbook.collect.journal import ENTRY_FIELDS, Done
from rollbook.collect.output_scan import line_at, put_aside, scan
from rollbook.errors import BadLineError
from rollbook.records.row_keys import KEY, key_of

if TYPE_CHECKING:
    from rollbook.collect.journal import Entries, Flags
    from rollbook.collect.plan import Plan
    from rollbook.records.row_blocks import Ints

_ENTRY = np.dtype([(name, f"<{code}") for name, code in ENTRY_FIELDS.items()])
_NOTHING = np.empty(0, dtype=_ENTRY)
_NO_ROW = 0xFFFFFFFF  # a line that the plan of its time did not know; a later one may


def find_done(output: Path, journal: Path, plan: Plan, *, same_input: bool) -> Done:
    """Which items of the plan have their line in the output.

    With another input than the one the journal was written for, its row numbers mean nothing, and every
    line is looked up by its key. A key that stands on two lines is an error that names both.
    """
    flags: Flags = np.zeros((plan.rows, plan.repeats), dtype=np.bool_)
    known = _believable(journal, output, plan) if same_input else _NOTHING
    entries = np.concatenate([known, _scanned(output, int(known["end"][-1]) if len(known) else 0, plan)])
    planned = (entries["row"] < plan.rows) & (entries["repeat"] < plan.repeats)
    inside = entries[planned]
    places = inside["row"].astype(np.int64) * plan.repeats + inside["repeat"]
    _refuse_duplicates(output, places, inside)
    flags.reshape(-1)[places] = True
    return Done(flags, entries, int(np.count_nonzero(~planned)))


def _believable(journal: Path, output: Path, plan: Plan) -> Entries:
    """The entries that fit the output: whole, in order, the last one a line with the key of its row.

    One entry a line, so a line that was taken out or put in anywhere before it would show there.
    """
    try:
        data = journal.read_bytes()
    except FileNotFoundError:
        return _NOTHING
    entries = np.frombuffer(data[: len(data) - len(data) % _ENTRY.itemsize], dtype=_ENTRY)
    ends = entries["end"]
    if len(ends) and (ends[0] == 0 or np.any(ends[1:] <= ends[:-1])):
        return _NOTHING
    entries = entries[: int(np.searchsorted(ends, output.stat().st_size, side="right"))]
    strange = np.flatnonzero(entries["row"] == _NO_ROW)  # this plan may know them: read again from there
    entries = entries[: strange[0]] if len(strange) else entries
    # Rows past the plan's end are as good as any, but cannot be checked.
    checkable = np.flatnonzero(entries["row"] < plan.rows)
    if not len(checkable):
        return _NOTHING
    last = int(checkable[-1])
    start, end = int(entries["end"][last - 1]) if last else 0, int(entries["end"][last])
    with output.open("rb") as file:
        file.seek(start)
        line = file.read(end - start)
    key = key_of(plan.id_of(int(entries["row"][last])), int(entries["repeat"][last]))
    opening = orjson.dumps({KEY: key})[:-1]
    fits = line.startswith(opening) and line.find(b"\n") == len(line) - 1
    return entries[: last + 1] if fits else _NOTHING


def _scanned(output: Path, start: int, plan: Plan) -> Entries:
    """The lines from `start` on, by their keys."""
    found = scan(output, start)
    entries = np.empty(len(found.ends), dtype=_ENTRY)
    rows, repeats = plan.find(np.asarray(found.tasks)), np.asarray(found.repeats)
    is_known = (rows >= 0) & (repeats >= 0)
    entries["row"] = np.where(is_known, rows, _NO_ROW)
    entries["repeat"] = np.where(is_known, repeats, 0)
    entries["end"] = found.ends
    entries["reward"] = found.rewards
    entries["input_tokens"], entries["output_tokens"] = found.input_tokens, found.output_tokens
    return entries


def _refuse_duplicates(output: Path, places: Ints, entries: Entries) -> None:
    order = np.argsort(places, kind="stable")
    same = np.flatnonzero(places[order][1:] == places[order][:-1])
    if len(same):
        first, second = (int(entries["end"][order[same[0] + step]]) - 1 for step in (0, 1))
        number = line_at(output, second)
        raise BadLineError(
            output,
            number,
            f"the same key stands on line {line_at(output, first)} already; keep that one and type "
            f"{put_aside(output, number)} and then the same command again",
        )
