"""What the recorder wrote in the working directory, for its tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollbook.records.alerts import Alert
from rollbook.records.record import read_records
from rollbook.runs.jobs.ledger import Ledger, RunRecord


def log_lines() -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in Path("out/trainer_log.jsonl").open()]


def alerts() -> list[Alert]:
    return list(read_records(Path("out/alerts.jsonl"), Alert))


def only_record() -> RunRecord:
    [record] = Ledger("artifacts").records()
    return record


def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
