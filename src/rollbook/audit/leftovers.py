"""What is beside the complete iterations: one that is being written, what a kill left, what a resume
replaced, and files that nobody knows."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

import numpy as np

from rollbook.audit.auditor import Auditor
from rollbook.audit.compare import Step
from rollbook.audit.places import NUMBERS, Rollouts
from rollbook.audit.result import Kind
from rollbook.audit.tables import Identity, Summaries
from rollbook.records.layout import TRAIN, Artifact, IterationFile, RunFiles, base_name

_ASIDE = re.compile(r"(?P<name>.*\.(?:html|json|jsonl))(?:\.\d+)?")


def audit_unnamed_files(
    auditor: Auditor,
    files: RunFiles,
    run_id: str,
    complete: Collection[Step],
    *,
    following: range,
    is_running: bool,
    resume: str,
) -> None:
    """Files of iterations that iterations.jsonl does not name.

    Those of `following` are being written, or were when the process was killed.
    """
    known = {(base_name(split), iteration) for split, iteration in complete}
    unnamed: dict[tuple[str, int], list[IterationFile]] = defaultdict(list)
    for found in files.iteration_files():
        if (found.base, found.iteration) not in known:
            unnamed[found.base, found.iteration].append(found)
    for (base, iteration), group in sorted(unnamed.items(), key=lambda item: (item[0][1], item[0][0])):
        summaries = next((found for found in group if found.artifact is Artifact.SUMMARIES), None)
        table = Summaries((summaries or group[0]).path)
        if summaries is not None:
            table.read(auditor, Identity(run_id, summaries.split, iteration), is_open=True)
        whose = [identity.run_id for identity in table.foreign]
        if whose or iteration not in following:
            kind = Kind.FOREIGN if whose else Kind.DIFFERS
            of = f"it is of the run {whose[0]}" if whose else "the run is not there yet, or past it"
            what = f"no line of iterations.jsonl names iteration {iteration} of {base}, and {of}"
            auditor.find(kind, what, file=group[0].path, next=f"move it away: mv {group[0].path} ELSEWHERE")
            continue
        _add(auditor, "train" if base == TRAIN else "eval", "unfinished", table)
        if not is_running:
            what = f"iteration {iteration} of {base} was not finished: {len(table)} of its rollouts are here"
            auditor.find(Kind.MISSING, what, file=group[0].path, next=resume)


def count_superseded(auditor: Auditor, files: RunFiles) -> None:
    """The rollouts that were sampled and that a resume took back, to sample them again."""
    for attempt in sorted(files.superseded.glob("attempt_*")):
        for directory in (attempt, *sorted(attempt.glob("iteration_*"))):
            for path in sorted(directory.iterdir()):
                match = _ASIDE.fullmatch(path.name)
                if match and match["name"].endswith(Artifact.SUMMARIES) and path.is_file():
                    _count(auditor, path)


def _count(auditor: Auditor, path: Path) -> None:
    table = Summaries(path)
    table.read(auditor, None, is_open=True)  # a kill may have left half a line
    _add(auditor, "train" if path.name.startswith(TRAIN) else "eval", "superseded", table)


def _add(auditor: Auditor, split: str, place: str, table: Summaries) -> None:
    places = np.full(len(table), NUMBERS[place])
    auditor.places.add(split, Rollouts(table.groups, places, table.turns, table.tokens, table.rewards))
