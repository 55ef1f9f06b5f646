"""How a collection stands, for `rollbook status`: by its own progress file, believed only while it lives."""

from __future__ import annotations

import shlex
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollbook.cli.common import duration, local_time, number
from rollbook.errors import UsageError

if TYPE_CHECKING:
    from rollbook.runs.jobs.ledger import Ledger, RunRecord
    from rollbook.runs.standing import Standing

# The words of a progress file in those of the history.
_STATUSES = {
    "running": "running",
    "complete": "completed",
    "stopped": "interrupted",
    "incomplete": "failed",
    "lost": "lost",
}


def progress_of_output(ref: str) -> Path | None:
    """The progress file of an output that is named instead of a run."""
    from rollbook.collect.files import CollectionFiles

    path = Path(ref)
    beside = CollectionFiles(path).progress if path.name else path
    if path.name.endswith("_progress.json"):
        progress = path
    elif path.suffix == ".jsonl" or (path.is_file() and beside.is_file()):
        progress = beside
    else:
        return None
    if not progress.is_file():
        raise UsageError(f"{progress}: no such file; a collection into {ref} writes it once it has begun")
    return progress


def report_of_output(progress: Path) -> dict[str, Any]:
    """The status of a collection by its files alone, whether or not a history knows it."""
    from rollbook.runs.standing import disbelieve, standing_of, why_collector_is_gone

    standing = standing_of(progress.parent, progress)
    collection = standing.collection
    if collection is None:
        raise UsageError(f"{progress}: not a progress file")
    gone = why_collector_is_gone(collection) if collection.get("status") == "running" else None
    if collection.get("status") != "running" or gone:
        disbelieve(standing)
    assert standing.collection is not None
    status = _STATUSES.get(str(standing.collection.get("status")), "unknown")
    again = "the command that collected it, once more, goes on" if status != "completed" else None
    return {
        "name": str(progress.with_name(str(collection.get("output")))),
        "status": status,
        "started_at": collection.get("started_at"),
        "elapsed_s": collection.get("elapsed_s"),
        "pid": collection.get("pid"),
        "host": collection.get("host"),
        "standing": standing,
        "reason": gone or collection.get("reason"),
        "next": None if status == "running" else again,
    }


def standing_of_run(record: RunRecord, ledger: Ledger, progress: Path) -> Standing:
    """Of a run that is a collection: from its progress file, or, once another session has written that, from
    what the history kept."""
    from rollbook.runs.standing import Standing, disbelieve, standing_of

    standing = standing_of(progress.parent, progress)
    if not _is_of(record, standing.collection or {}):
        kept = record.metrics or {}
        done = {"done": kept.get("ok"), "reward_mean": kept.get("reward_mean")}
        rest = {key: kept.get(key) for key in ("expected", "failed", "missing")}
        standing = Standing(collection={**done, **rest} if kept else None)
    if not record.is_running:
        disbelieve(standing)
    return standing


def _is_of(record: RunRecord, progress: dict[str, Any]) -> bool:
    """Whether this run wrote the file, and not an earlier or a later one with the same output."""
    began, started, ended = (
        _timestamp(text) for text in (progress.get("started_at"), record.started_at, record.completed_at)
    )
    if began is None or (started is not None and began < started):
        return False
    if record.log is None:  # no supervisor: the run is the collector
        return bool(progress.get("pid") == record.pid)
    return record.status == "lost" or ended is None or began <= ended


def collection_lines(collection: dict[str, Any]) -> list[str]:
    done, expected = collection.get("done"), collection.get("expected")
    is_running = collection.get("status") == "running"
    earlier = f" ({collection['done_before']} by earlier sessions)" if collection.get("done_before") else ""
    parts = [f"{done} of {expected}{earlier}"]
    if isinstance(done, int) and expected:
        parts.append(f"{100 * done / expected:.1f} %")
    if is_running:
        parts.append(f"{number(collection.get('rate_per_s'))}/s")
        if collection.get("eta_s") is not None:
            parts.append(f"{duration(collection['eta_s'])} left")
        parts.append(f"{collection.get('in_flight')} in flight")
        if collection.get("waiting"):
            parts.append(f"{collection['waiting']} waiting for a retry")
    elif collection.get("missing"):
        parts.append(f"{collection['missing']} missing")
    if collection.get("status") == "lost":
        parts.append(f"as last heard at {local_time(collection.get('updated_at'))}")
    return [f"rollouts:   {', '.join(parts)}", *_number_lines(collection)]


def price(cost: float) -> str:
    return f"{cost:.2f}" if cost >= 1 else f"{cost:.4f}"


def left_out(without_usage: int) -> str:
    """What tokens and cost do not tell."""
    rollouts = "1 rollout" if without_usage == 1 else f"{without_usage} rollouts"
    return f"leave {rollouts} out, whose answers came without usage"


def _number_lines(collection: dict[str, Any]) -> list[str]:
    """Rewards, tokens and cost of all lines, and the failures of the last session."""
    lines = []
    if collection.get("reward_mean") is not None:
        count = collection.get("reward_count")
        lines.append(
            f"reward:     {number(collection['reward_mean'])}" + (f", mean of {count}" if count else "")
        )
    if collection.get("output_tokens") is not None:
        cost = f", cost {price(collection['cost'])}" if collection.get("cost") is not None else ""
        without = collection.get("without_usage")
        lines.append(
            f"tokens:     {collection.get('input_tokens')} in, {collection['output_tokens']} out{cost}"
            + (f" (they {left_out(without)})" if without else "")
        )
    seen, said = collection.get("lost_input_tokens"), collection.get("lost_output_tokens")
    if seen or said:
        lines.append(
            f"lost:       {seen} in, {said} out, in attempts that failed"
            + ("; the cost counts them" if collection.get("cost") is not None else "")
        )
    kinds = ", ".join(f"{kind} {count}" for kind, count in (collection.get("failures") or {}).items())
    if kinds or collection.get("failed"):
        given_up = f"{collection.get('failed')} given up"
        lines.append(f"failures:   {given_up}" + (f"; attempts by kind: {kinds}" if kinds else ""))
    return lines


def same_command(record: RunRecord) -> str | None:
    """What to type to go on with a collection."""
    command = record.command or []
    if record.kind != "collect" or "collect" not in command:
        return None
    return shlex.join(["rollbook", *command[command.index("collect") :]])


def _timestamp(text: Any) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return None
