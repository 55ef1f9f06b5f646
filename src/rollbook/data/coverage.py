"""What should be there: from the manifests beside collected files, or from the list of tasks.

A collection's manifest says how many rows it planned. A list of tasks says more: which ones, and in which
order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollbook.errors import UsageError
from rollbook.query.connection import Kept
from rollbook.records.datasets import ENDINGS, read_manifest, stem_of
from rollbook.records.identity import content_id, own_id, shown_id, task_digest
from rollbook.records.rows import read_rows

_BATCH = 80_000  # facts
PLANS = "plans"  # in the details of a merged file's manifest: name -> tasks, rollouts


class Plan(NamedTuple):
    tasks: int
    rollouts: int


class Planned(NamedTuple):
    """What the collections of some files were to bring, by their own manifests."""

    plans: dict[Path, dict[str, Plan]]  # of each file, by the input that was collected; empty where unknown
    failed: int

    @property
    def without(self) -> list[Path]:
        """Files of which nothing says what they were to bring."""
        return [path for path, plans in self.plans.items() if not plans]

    @property
    def repeats_of(self) -> dict[Path, int]:
        """How often each task of a file was to be done; 0 where that is not known."""
        return {path: _repeats(plans.values()) for path, plans in self.plans.items()}

    @property
    def repeats(self) -> int:
        """The most that were planned; 1 where none were."""
        return max([1, *self.repeats_of.values()])

    @property
    def distinct(self) -> dict[str, Plan]:
        """Every plan once: several files may be of one, as attempts at the same tasks."""
        found: dict[str, Plan] = {}
        for plans in self.plans.values():
            for name, plan in plans.items():
                found[name] = max(plan, found.get(name, plan))
        return found

    @property
    def tasks(self) -> int | None:
        """Different ones; None unless every file says how many."""
        return None if self.without else sum(plan.tasks for plan in self.distinct.values())

    def coverage(self, rows: int) -> dict[str, int]:
        """Where rows are counted as they come: what two files bring of one task are two rollouts."""
        expected = sum(plan.rollouts for plans in self.plans.values() for plan in plans.values())
        return self._coverage(rows, expected)

    def coverage_of_keys(self, ok: int, overlap: int = 0) -> dict[str, int]:
        """Where every key counts once; `overlap` is how many keys two plans have in common."""
        return self._coverage(ok, sum(plan.rollouts for plan in self.distinct.values()) - overlap)

    def _coverage(self, ok: int, expected: int) -> dict[str, int]:
        if self.without:
            return {}
        missing = max(0, expected - ok)
        return {"expected": expected, "ok": ok, "failed": min(self.failed, missing), "missing": missing}


def planned_by(paths: Sequence[Path]) -> Planned:
    manifests = {path: read_manifest(path) for path in paths}
    failed = sum((manifest.get("coverage") or {}).get("failed", 0) for manifest in manifests.values())
    return Planned({path: _plans_of(path, manifest) for path, manifest in manifests.items()}, failed)


def _repeats(plans: Iterable[Plan]) -> int:
    each = {plan.rollouts // plan.tasks for plan in plans if plan.tasks}
    return each.pop() if len(each) == 1 else 0


def _plans_of(path: Path, manifest: Mapping[str, Any]) -> dict[str, Plan]:
    rows, repeats = manifest.get("rows"), manifest.get("repeats")
    if isinstance(rows, int) and isinstance(repeats, int):
        return {str(manifest.get("input_sha256") or path): Plan(rows, rows * repeats)}
    merged = (manifest.get("details") or {}).get(PLANS)
    if isinstance(merged, dict):
        return {name: Plan(*plan) for name, plan in merged.items()}
    return {}


def add_tasks(table: Kept, path: Path) -> int:
    """How many tasks a file lists; under what names they are known goes to the table `tasks`; see IS_TASK."""
    if not path.is_file() or stem_of(path.name) is None:
        raise UsageError(f"--tasks {path}: no such file of tasks ({', '.join(ENDINGS)})")
    facts: list[str] = []
    place = -1
    for place, row in enumerate(read_rows(path)):
        task = row.value()
        own = own_id(task)
        before = content_id(task) if own is None else ""
        facts += (own or "", shown_id(task) or "", before, task_digest(task) or "")
        if len(facts) >= _BATCH:
            _add_facts(table, place, facts)
            facts = []
    _add_facts(table, place, facts)
    table.run(_TASKS)
    return place + 1


def _add_facts(table: Kept, last: int, facts: list[str]) -> None:
    own, shown, before, digest = (np.array(facts[start::4], dtype=object) for start in range(4))
    places = np.arange(last + 1 - len(own), last + 1)
    table.add("listed", place=places, own=own, shown=shown, before=before, digest=digest)


# Whether a row of `kept` is of a row of `tasks`: ids alone may be those of another dataset.
IS_TASK = """task_id = name
    and (_digest = tasks.digest or tasks.digest = '' or (_digest = '' and tasks.is_first))"""
# A task is known by its id, with its mark too; without one by what it shows, in the order of the file, and in
# collections of before 0.2 by its content. Others leave out the id: every task is listed by what it shows.
_TASKS = """
    create table tasks as select *, place = min(place) over (partition by name) as is_first from (
        select name, digest, min(place) as place from (
            select place, digest, _numbered_id(own,
                row_number() over (partition by own, digest order by place)) as name
                from listed where own <> ''
            union all select place, digest, _numbered_id(_marked_id(own, digest),
                row_number() over (partition by own, digest order by place)) from listed where own <> ''
            union all select place, digest, _numbered_id(shown,
                row_number() over (partition by shown order by place)) from listed where shown <> ''
            union all select place, '', _numbered_id(before,
                row_number() over (partition by before order by place)) from listed where before <> ''
        ) group by name, digest
    )
"""
