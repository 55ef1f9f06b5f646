"""Which files an audit is of: a run directory, a collection's output, or a file of either."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rollbook.audit.auditor import Auditor
from rollbook.audit.result import Audit
from rollbook.collect.loop import seldom_collecting_garbage
from rollbook.errors import UsageError
from rollbook.records.datasets import beside_output, manifest_path
from rollbook.records.trainer_log import LOG
from rollbook.runs.reader import RunReader, open_run

_ALLOCATIONS = 100_000  # between two searches for reference cycles, of which decoded rows have none
_OF_A_COLLECTION = ("_manifest.json", "_progress.json")


class Thing(NamedTuple):
    path: Path  # a run directory, or the output of a collection
    is_collection: bool

    def bytes(self) -> int:
        """About how much an audit reads."""
        if self.is_collection:
            return self.path.stat().st_size if self.path.exists() else 0
        files = [
            entry
            for entry in self.path.rglob("*")
            if entry.suffix in (".jsonl", ".parquet", ".html", ".json")
        ]
        return sum(entry.stat().st_size for entry in files if entry.is_file())

    def audit(
        self, *, input: Path | None, verify: bool, advance: Callable[[int], None] = lambda _: None
    ) -> Audit:
        if input is not None and not self.is_collection:
            raise UsageError(f"{self.path} is a run; --input is for collections")
        with seldom_collecting_garbage(_ALLOCATIONS):
            return self._audit(input, verify, advance)

    def _audit(self, input: Path | None, verify: bool, advance: Callable[[int], None]) -> Audit:
        if self.is_collection:
            from rollbook.audit.collection import CollectionAudit

            return CollectionAudit(self.path, Auditor(self.path, advance), input=input).run()
        is_trainers = (self.path / LOG).exists()
        reader = RunReader(self.path) if is_trainers else open_run(self.path)
        return _audit_run(reader, Auditor(self.path, advance), verify=verify)


def _audit_run(reader: RunReader, auditor: Auditor, *, verify: bool) -> Audit:
    from rollbook.audit.rl_run import RlAudit
    from rollbook.audit.sft_run import SftAudit
    from rollbook.audit.tinker import TinkerAudit

    if reader.info is not None and reader.info.kind != "sft":
        return RlAudit(reader, reader.info, auditor, verify=verify).run()
    if reader.info is not None or (reader.files.root / LOG).exists():
        return SftAudit(reader, auditor, verify=verify).run()
    if not reader.files.metrics.exists():
        raise UsageError(
            f"{reader.files.root} has neither a run.json nor metrics.jsonl, so there is nothing to count"
        )
    return TinkerAudit(reader, auditor).run()


def find_thing(path: Path) -> Thing:
    if path.is_dir():
        return _in_directory(path)
    if (beside := beside_output(path)) is not None and manifest_path(beside.output).exists():
        return Thing(beside.output, is_collection=True)
    for ending in _OF_A_COLLECTION:
        if path.name.endswith(ending):
            return Thing(path.with_name(f"{path.name.removesuffix(ending)}.jsonl"), is_collection=True)
    if path.with_name(f"{path.stem}_manifest.json").exists():
        return Thing(path, is_collection=True)
    if not path.exists():
        raise UsageError(f"{path}: no such file or directory")
    raise UsageError(
        f"{path} is neither a run directory nor the output of a collection: {path.stem}_manifest.json is not "
        "beside it"
    )


def _in_directory(path: Path) -> Thing:
    """A run, a checkpoint of one, or a directory with one collection in it."""
    if not (path / "run.json").exists():
        outputs = list(path.glob("*_manifest.json"))
        if len(outputs) == 1 and not (path / "metrics.jsonl").exists():
            return find_thing(outputs[0])
        for above in (path.parent, path.parent.parent):
            if (above / "run.json").exists() and (path / "COMPLETE").exists():
                return Thing(above, is_collection=False)
    return Thing(path, is_collection=False)
