"""What should be there: from the manifests that stand beside collected files, or from the list of tasks.

A collection's manifest says how many rows it planned. A list of tasks says more: which ones, and in which
order. It is kept as hashes of their names, some 32 bytes a task, and a flag for each repeat.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollbook.data.shuffle import Words
from rollbook.errors import UsageError
from rollbook.query.connection import Kept
from rollbook.records.datasets import ENDINGS, read_manifest, stem_of
from rollbook.records.row_keys import TASK_INDEX, content_id, repeat_of, task_of
from rollbook.records.rows import read_rows

_BATCH = 60_000  # names
PLANS = "plans"  # in the details of a merged file's manifest: name -> tasks, rollouts


class Plan(NamedTuple):
    tasks: int
    rollouts: int


class Planned(NamedTuple):
    """What the collections of some files were to bring, by their own manifests."""

    plans: list[dict[str, Plan]]  # of each file, by the input that was collected; empty where nothing says it
    failed: int
    without: list[Path]  # files of which nothing says what they were to bring
    repeats_of: dict[Path, int]  # how often each task of a file was to be done; 0 where that is not known

    @property
    def repeats(self) -> int:
        """The most that were planned; 1 where none were."""
        return max([1, *self.repeats_of.values()])

    @property
    def once(self) -> dict[str, Plan]:
        """Every plan once: several files may be of one, as attempts at the same tasks."""
        found: dict[str, Plan] = {}
        for plans in self.plans:
            for name, plan in plans.items():
                found[name] = max(plan, found.get(name, plan))
        return found

    @property
    def tasks(self) -> int | None:
        """Different ones; None unless every file says how many."""
        return None if self.without else sum(plan.tasks for plan in self.once.values())

    def coverage(self, rows: int) -> dict[str, int]:
        """Of rows that are counted as they come: what two files bring of one task are two rollouts."""
        return self._coverage(rows, sum(plan.rollouts for plans in self.plans for plan in plans.values()))

    def coverage_of_keys(self, ok: int, planned_twice: int = 0) -> dict[str, int]:
        """Of rows of which every key counts once.

        `planned_twice`: rows of several plans that turned out to be of one task and repeat.
        """
        return self._coverage(ok, sum(plan.rollouts for plan in self.once.values()) - planned_twice)

    def _coverage(self, ok: int, expected: int) -> dict[str, int]:
        if self.without:
            return {}
        missing = max(0, expected - ok)
        return {"expected": expected, "ok": ok, "failed": min(self.failed, missing), "missing": missing}


def planned_by(paths: Sequence[Path]) -> Planned:
    plans: list[dict[str, Plan]] = []
    failed, repeats = 0, {}
    for path in paths:
        manifest = read_manifest(path)
        plans.append(_plans_of(path, manifest))
        failed += (manifest.get("coverage") or {}).get("failed", 0)
        each = {plan.rollouts // plan.tasks for plan in plans[-1].values() if plan.tasks}
        repeats[path] = each.pop() if len(each) == 1 else 0
    without = [path for path, known in zip(paths, plans, strict=True) if not known]
    return Planned(plans, failed, without, repeats)


def _plans_of(path: Path, manifest: Mapping[str, Any]) -> dict[str, Plan]:
    rows, repeats = manifest.get("rows"), manifest.get("repeats")
    if isinstance(rows, int) and isinstance(repeats, int):
        return {str(manifest.get("input_sha256") or path): Plan(rows, rows * repeats)}
    merged = (manifest.get("details") or {}).get(PLANS)
    if isinstance(merged, dict):
        return {name: Plan(*plan) for name, plan in merged.items()}
    return {}


def add_tasks(table: Kept, path: Path) -> int:
    """How many tasks a file lists; their names go to the table `tasks`, each with the task's `place`.

    A task without a name is known by its content, as `collect` names it (a second one that says the same as
    `row-...~2`), and by its number to other collectors.
    """
    if not path.is_file() or stem_of(path.name) is None:
        raise UsageError(f"--tasks {path}: no such file of tasks ({', '.join(ENDINGS)})")
    names: list[str] = []
    place = -1
    for place, row in enumerate(read_rows(path)):
        task = row.value()
        given = task.get("task_id") if task.get("task_id") is not None else task.get("id")
        index = task.get(TASK_INDEX)
        names += (
            "" if given is None else str(given),
            content_id(task) if given is None else "",
            f"index-{index if isinstance(index, int) else place}",
        )
        if len(names) >= _BATCH:
            _add_names(table, place, names)
            names = []
    _add_names(table, place, names)
    table.run(_TASKS)
    return place + 1


def _add_names(table: Kept, last: int, names: list[str]) -> None:
    given, content, index = (np.array(names[start::3], dtype=object) for start in range(3))
    places = np.arange(last + 1 - len(given), last + 1)
    table.add("listed", place=places, given=given, content=content, alias=index)


_TASKS = """
    create table tasks as select name, min(place) as place from (
        select place, alias as name from listed
        union all select place, given from listed where given <> ''
        union all select place, content || case when k > 1 then '~' || k else '' end
        from (select *, row_number() over (partition by content order by place) as k from listed)
        where content <> ''
    ) group by name
"""


class TaskList:
    """The tasks of a file in their order, and which of their repeats have turned up."""

    def __init__(self, path: Path, repeats: int) -> None:
        if not path.is_file() or not path.name.endswith(ENDINGS):
            raise UsageError(f"--tasks {path}: no such file of tasks ({', '.join(ENDINGS)})")
        self.repeats = repeats
        hashes = array("Q")  # of each task its name, and its number as rows of other collectors give it
        for number, row in enumerate(read_rows(path)):
            task = row.value()
            index = task.get(TASK_INDEX)
            given = _given_name(task)
            hashes.append(_hash(content_id(task) if given is None else given))
            hashes.append(_hash(f"index-{index if isinstance(index, int) else number}"))
        found = np.asarray(hashes)
        _tell_apart(path, found[::2])
        order = np.argsort(found, kind="stable")
        self._hashes, self._rows = found[order], order // 2
        self._seen = np.zeros(len(found) // 2 * repeats, dtype=bool)

    def place_of(self, row: Mapping[str, Any]) -> tuple[int, int] | None:
        """Which task and repeat a row is; None where the list does not have it."""
        wanted = _hash(task_of(row))
        at = int(np.searchsorted(self._hashes, np.uint64(wanted)))
        repeat = repeat_of(row) or 0
        if at == len(self._hashes) or int(self._hashes[at]) != wanted or repeat >= self.repeats:
            return None
        return int(self._rows[at]), repeat

    def mark(self, place: tuple[int, int]) -> None:
        self._seen[place[0] * self.repeats + place[1]] = True

    def coverage(self) -> dict[str, int]:
        ok = int(np.count_nonzero(self._seen))
        return {"expected": len(self._seen), "ok": ok, "missing": len(self._seen) - ok}


def _given_name(task: Mapping[str, Any]) -> str | None:
    """As `collect` names a task, where it need not look at its content."""
    given = task.get("task_id") if task.get("task_id") is not None else task.get("id")
    return None if given is None else str(given)


def _tell_apart(path: Path, hashes: Words) -> None:
    """Tasks known by their content may say the same; `collect` calls the second one `row-...~2`."""
    unique, counts = np.unique(hashes, return_counts=True)
    repeated = set(unique[counts > 1].tolist())
    seen: Counter[str] = Counter()
    for number, row in enumerate(read_rows(path) if repeated else ()):
        if int(hashes[number]) in repeated and _given_name(task := row.value()) is None:
            content = content_id(task)
            seen[content] += 1
            if seen[content] > 1:
                hashes[number] = _hash(f"{content}~{seen[content]}")


def _hash(name: str) -> int:
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
