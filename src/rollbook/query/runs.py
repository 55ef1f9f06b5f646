"""The rows of the views `runs` and `history`: what run.json, the manifests and index.yaml say of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from rollbook.errors import BadFileError
from rollbook.records.datasets import is_collection
from rollbook.records.layout import RunFiles
from rollbook.records.progress import progress_path
from rollbook.records.run_info import RunInfo
from rollbook.runs.resolve import Owner


def row_of(owner: Owner) -> dict[str, Any]:
    """The columns that are known, by name."""
    root = owner.root.absolute()
    if root.is_dir():
        row = {"config": _text(_read_json(root / "config.json")), **_of_run(root, owner.info)}
    else:
        row = _of_rows(root, owner.manifest)
    return {**row, "run": owner.name, "file": str(root)}


def history_rows(artifacts: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """The runs of these histories, oldest first; nothing is written to them."""
    from rollbook.runs.jobs.ledger import Ledger

    for directory in artifacts:
        ledger = Ledger(directory)
        for record in ledger.records(reconcile=False):
            row = record.to_plain()
            texts = {
                key: _text(row.get(key))
                for key in ("metrics", "checkpoint", "git", "error", "command", "notes")
            }
            yield {**row, **texts, "run": record.id, "row": _text(row), "file": str(ledger.path)}


def _of_run(root: Path, info: RunInfo | None) -> dict[str, Any]:
    if info is None:
        is_trainers = (root / "trainer_log.jsonl").exists()
        has_iterations = next(RunFiles(root).iteration_files(), None) is not None
        return {"kind": "sft" if is_trainers else "rl" if has_iterations else None}
    last = info.attempts[-1] if info.attempts else None
    return {
        "kind": info.kind,
        "started_at": info.started_at,
        "ended_at": last.ended_at if last else None,
        "outcome": last.outcome if last else None,
        "attempts": len(info.attempts),
        "total_iterations": info.total_iterations,
        "host": info.host,
    }


def _of_rows(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    coverage, sessions = manifest.get("coverage") or {}, manifest.get("sessions")
    if not coverage:  # a collection under way
        progress = _read_json(progress_path(path)) or {}
        counts = {**progress, "ok": progress.get("done")}
    return {
        "kind": "collect" if is_collection(manifest) else "data",
        "started_at": manifest.get("created_at"),
        "ended_at": manifest.get("updated_at") if coverage else None,
        "attempts": len(sessions) if isinstance(sessions, list) else sessions,
        "config": _text(manifest.get("meaning") or manifest),
        **{key: (coverage or counts).get(key) for key in ("expected", "ok", "failed", "missing")},
    }


def _text(value: Any) -> str | None:
    return None if value is None else orjson.dumps(value).decode()


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except orjson.JSONDecodeError as error:
        raise BadFileError(path, f"not valid JSON ({error})") from error
    return value if isinstance(value, dict) else None
