"""alerts.jsonl: what a person should look at, in the order it happened."""

from __future__ import annotations

from enum import StrEnum

from rollbook.records.record import Record


class Level(StrEnum):
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Alert(Record, kw_only=True):
    raised_at: str
    level: Level
    title: str
    text: str = ""
    step: int | None = None
