"""Copies of runs in which one thing is wrong, and what an audit says about it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rollbook
from rollbook.audit.result import Audit, Finding, Kind

Lines = list[bytes]


def copy_of(run: Path, to: Path) -> Path:
    shutil.copytree(run, to)
    return to


def edit_lines(path: Path, change: Callable[[Lines], Lines]) -> None:
    """`change` is given the lines with their newlines."""
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


def edit_row(path: Path, number: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Change one line, counted from 1, as an object; its length may change."""

    def changed(lines: Lines) -> Lines:
        row = json.loads(lines[number - 1])
        change(row)
        lines[number - 1] = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        return lines

    edit_lines(path, changed)


def drop_line(path: Path, number: int) -> None:
    edit_lines(path, lambda lines: lines[: number - 1] + lines[number:])


def double_line(path: Path, number: int) -> None:
    edit_lines(path, lambda lines: lines[:number] + lines[number - 1 :])


def cut_line(path: Path, number: int) -> None:
    """As a torn write leaves it, with its newline."""
    edit_lines(
        path,
        lambda lines: [
            *lines[: number - 1],
            lines[number - 1][: len(lines[number - 1]) // 2] + b"\n",
            *lines[number:],
        ],
    )


def found(audit: Audit, kind: Kind, file: str, *, line: int | None = None, key: str | None = None) -> Finding:
    """The one finding of this kind in this file, at this line or with this key."""
    alike = [
        finding
        for finding in audit.findings
        if finding.kind is kind
        and finding.file == file
        and (line is None or finding.line == line)
        and (key is None or finding.key == key)
    ]
    assert len(alike) == 1, "\n".join(map(str, audit.findings))
    assert alike[0].next
    return alike[0]


def balanced(thing: Path) -> Audit:
    audit = rollbook.audit(thing)
    assert audit.findings == [] and audit.verdict == "balanced" and audit.exit_code == 0
    assert all(check.agreed == check.compared for check in audit.checks), audit.checks
    return audit
