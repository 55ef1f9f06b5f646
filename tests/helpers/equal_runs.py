"""Whether two runs are equal in all that may not differ (DESIGN: what may differ between two equal runs).

Run id, attempt, host, pid, times and rates may: at the top of a line, in run.json and where they are shown.
What follows from them (lengths of logs, digests of files) is checked against the files instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from rollbook.records.complete import COMPLETE, file_facts, problem, read_mark

_MAY_DIFFER = re.compile(r"run_id|attempt|host|pid|\w+_at|time/.*|\w+_per_second")
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.]*(Z|\+00:00| UTC)?")
# The empty lock of a writer that was killed stays until somebody writes that file again. What is in the
# checkout may change while the tests run.
_NOT_COMPARED = re.compile(r"superseded/.*|run\.json|stalls\.jsonl|code\.diff|.*\.lock")


def differences(found: Path, expected: Path, *, more_checkpoints: Collection[str] = ()) -> list[str]:
    """What is not equal, a line for each file; empty for equal runs.

    `more_checkpoints` are those that only the first one has, because it was told to stop there.
    """
    one, other = content(found), content(expected)
    for name in more_checkpoints:
        assert (found / "checkpoints" / name).is_dir()
        one = {file: value for file, value in one.items() if not file.startswith(f"checkpoints/{name}/")}
        lines = one["checkpoints.jsonl"]
        one["checkpoints.jsonl"] = [line for line in lines if line["name"] != name]
    lines = [f"{name} is not there" for name in sorted(other.keys() - one.keys())]
    lines += [f"{name} is too much" for name in sorted(one.keys() - other.keys())]
    for name in sorted(one.keys() & other.keys()):
        if one[name] != other[name]:
            lines.append(f"{name}: {_first_difference(one[name], other[name])}")
    return lines


def content(root: Path) -> dict[str, Any]:
    """Every file of a run that is compared, without what may differ."""
    run_id = json.loads((root / "run.json").read_bytes())["id"]
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
    return {
        name: _content(name, path, root, run_id)
        for name, path in sorted(files.items())
        if not _NOT_COMPARED.fullmatch(name)
    }


def _content(name: str, path: Path, root: Path, run_id: str) -> Any:
    if path.suffix == ".jsonl":
        return [_line(name, json.loads(line), root) for line in path.read_bytes().splitlines()]
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        return table.drop_columns(
            [name for name in table.column_names if _MAY_DIFFER.fullmatch(name)]
        ).to_pylist()
    if path.name == COMPLETE:
        assert (wrong := problem(path.parent, verify=True)) is None, wrong
        mark = read_mark(path.parent)
        return mark and mark.files
    if path.name == "config.json" and path.parent == root:
        return {key: value for key, value in json.loads(path.read_bytes()).items() if key != "log_path"}
    data = path.read_bytes()
    try:
        return _TIME.sub("TIME", data.decode().replace(run_id, "RUN"))
    except UnicodeDecodeError:
        return data


def _line(name: str, line: dict[str, Any], root: Path) -> dict[str, Any]:
    kept = {key: value for key, value in line.items() if not _MAY_DIFFER.fullmatch(key)}
    if name == "iterations.jsonl":
        for file, facts in kept["files"].items():
            is_so = file_facts(root / file)
            assert facts == {"bytes": is_so.bytes, "xxh3_128": is_so.xxh3_128}, f"{file} is not {facts}"
        kept["files"] = sorted(kept["files"])
    if name == "checkpoints.jsonl":
        for file, length in kept["log_lengths"].items():
            start = (root / file).read_bytes()[:length]
            assert len(start) == length, f"{file} has no {length} bytes"
            assert start[-1:] in (b"", b"\n"), f"byte {length} of {file} is not the end of a line"
        kept["log_lengths"] = {
            file: (root / file).read_bytes()[:length].count(b"\n")
            for file, length in sorted(kept["log_lengths"].items())
            if not _NOT_COMPARED.fullmatch(file)
        }
    return kept


def _first_difference(found: Any, expected: Any) -> str:
    if isinstance(found, list) and isinstance(expected, list):
        if len(found) != len(expected):
            return f"{len(found)} lines instead of {len(expected)}"
        number = next(n for n, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        return f"line {number + 1}: {_first_difference(found[number], expected[number])}"
    if isinstance(found, dict) and isinstance(expected, dict):
        keys = [key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key)]
        key = min(keys)
        return f"{key} (of {len(keys)}): {_first_difference(found.get(key), expected.get(key))}"
    one, other = repr(found), repr(expected)
    place = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    return f"{one[max(0, place - 60) : place + 60]} instead of {other[max(0, place - 60) : place + 60]}"
