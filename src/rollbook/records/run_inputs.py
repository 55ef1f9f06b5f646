"""What a run was made from: each file, model and environment, with the digest of what was read.

They stand in run.json under `inputs`, and `rollbook lineage` compares the digests with what is there now. A
directory (a model) is known by the digest of its files: `directory_facts` in `records/complete.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from rollbook.records.complete import directory_facts, file_facts


class RunInput(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    what: str  # data, eval data, tasks, eval tasks, model, hub model or environment
    path: str  # of an environment and of a model of the hub: its name
    bytes: int | None = None
    xxh3_128: str | None = None  # as `xxh128sum` prints it for a file
    code: str | None = None  # of an environment: its version, or the digest of its text
    attempt: int = 1  # the first one that read it


def file_input(what: str, path: Path) -> RunInput:
    facts = file_facts(path)
    return RunInput(what=what, path=str(path.absolute()), bytes=facts.bytes, xxh3_128=facts.xxh3_128)


def directory_input(what: str, path: Path) -> RunInput:
    facts = directory_facts(path)
    return RunInput(what=what, path=str(path.absolute()), bytes=facts.bytes, xxh3_128=facts.xxh3_128)


def with_new(known: Sequence[RunInput], found: Iterable[RunInput], attempt: int) -> list[RunInput]:
    """The known ones, and those that this attempt is the first to read."""
    seen = {_content(one) for one in known}
    new = [msgspec.structs.replace(one, attempt=attempt) for one in found if _content(one) not in seen]
    return [*known, *dict.fromkeys(new)]


def _content(one: RunInput) -> RunInput:
    return msgspec.structs.replace(one, attempt=1)
