"""One command over datasets: inputs read, an output made, and a manifest that says what happened.

    with DataJob("filter", inputs, output, arguments={"where": text}) as job:
        for row in job.rows():
            if keep(row.value()):
                job.write(row.data)
            else:
                job.count("dropped")
    job.manifest

An input is what it was when the job began: what is appended later does not count, and a file that is replaced
meanwhile is an error. Its digest is that of the bytes that were read. The manifest is beside the output as
`<stem>_manifest.json`. Outputs and manifests appear together, or nothing does.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from rollbook.data.output import RowOutput, refuse_existing
from rollbook.data.progress import NO_PROGRESS, Progress
from rollbook.errors import RollbookError, UsageError
from rollbook.records.complete import complete_files, file_facts
from rollbook.records.datasets import DataManifest, InputRecord, manifest_path, refuse_foreign_manifest
from rollbook.records.graders import distinct, graders_of
from rollbook.records.rows import COMPRESSED, Row, RowCount, read_rows
from rollbook.runs.resolve import Inputs, find_inputs

_CHUNK = 1 << 18


class DataJob:
    """Use as a context manager; without an output it only reads (`stats`) and writes no manifest."""

    def __init__(
        self,
        command: str,
        inputs: Sequence[str | Path] | Inputs,
        output: Path | None = None,
        *,
        extra_outputs: Sequence[Path | None] = (),
        arguments: Mapping[str, Any] | None = None,
        seed: int | None = None,
        overwrite: bool = False,
        progress: Progress = NO_PROGRESS,
    ) -> None:
        found = inputs if isinstance(inputs, Inputs) else find_inputs(inputs)
        self.paths = found.paths
        self.counts: Counter[str] = Counter()
        self.graders = {path: graders_of(path) for path in self.paths}
        self.manifest = DataManifest(
            command=command,
            directory=str(Path.cwd()),
            left_out={str(path): why for path, why in found.skipped},
            arguments=dict(arguments or {}),
            seed=seed,
            output=str(output) if output else None,
            graders=distinct(one for graders in self.graders.values() for one in graders),
        )
        self.progress = progress
        self._states = {path: _state(path) for path in self.paths}
        self.ends = {path: state.st_size for path, state in self._states.items()}
        self._read = {path: RowCount() for path in self.paths}
        self._digests: dict[Path, str] = {}
        self._scanned: dict[Path, int] = {}
        self._targets = [path for path in (output, *extra_outputs) if path is not None]
        self._overwrite = overwrite
        if len({manifest_path(path).resolve() for path in self._targets}) < len(self._targets):
            raise UsageError(f"outputs need names of their own: {', '.join(map(str, self._targets))}")
        for path in self._targets:
            _refuse_to_overwrite_an_input(path, self.paths)
            refuse_existing(path, overwrite=overwrite)
            refuse_foreign_manifest(path)

    def __enter__(self) -> DataJob:
        with contextlib.ExitStack() as undo:
            if self._targets:
                made = complete_files(*self._targets, overwrite=self._overwrite)
                self._asides = undo.enter_context(made)
                self.scratch = self._asides[0] / "scratch"
                self.scratch.mkdir()
            else:
                self._asides = []
                self.scratch = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="rollbook-")))
            self.outputs = [
                undo.enter_context(RowOutput(path, aside))
                for path, aside in zip(self._targets, self._asides, strict=True)
            ]
            self._held = undo.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        if raised[0] is not None:
            self._held.__exit__(*raised)
            return
        with self._held:
            self._complete()

    def rows(self) -> Iterator[Row]:
        """The rows of all inputs, one after another."""
        self.progress.begin("reading", sum(self.ends.values()))
        self._check_inputs()
        for path in self.paths:
            yield from self.rows_of(path)

    def rows_of(self, path: Path) -> Iterator[Row]:
        count, digest = RowCount(), None if path.suffix == ".parquet" else xxhash.xxh3_128()
        on_read = self.progress.advance
        yield from read_rows(path, end=self.ends[path], on_read=on_read, digest=digest, count=count)
        self.note_read(path, count, digest.hexdigest() if digest else None)

    def copy(self, path: Path, rows: int) -> None:
        """All lines of a plain file, with the newline that the last one may lack."""
        digest, chunk = xxhash.xxh3_128(), b"\n"
        for chunk in _chunks(path, self.ends[path]):
            digest.update(chunk)
            self.outputs[0].write_lines(chunk)
            self.progress.advance(len(chunk))
        if not chunk.endswith(b"\n"):
            self.outputs[0].write_lines(b"\n")
            self.count("newlines_added")
        self.outputs[0].rows += rows
        self.note_read(path, RowCount(rows), digest.hexdigest())

    def write(self, data: bytes) -> None:
        self.outputs[0].write(data)

    def count(self, name: str, by: int = 1) -> None:
        self.counts[name] += by

    def note_scan(self, path: Path, rows: int) -> None:
        """How many rows DuckDB found, which our reader must find too."""
        self._read[path].rows = rows
        self._scanned[path] = rows

    def note_read(self, path: Path, count: RowCount, digest: str | None) -> None:
        """What a whole pass over an input has read."""
        self._read[path] = count
        if self._scanned.get(path, count.rows) != count.rows:
            raise _changed(path)
        if digest is not None and self._digests.setdefault(path, digest) != digest:
            raise _changed(path)

    def watch(self, what: str) -> Callable[[float], None]:
        """Progress of a pass of which only the share is known."""
        total, done = sum(self.ends.values()), 0
        self.progress.begin(what, total)

        def advance(share: float) -> None:
            nonlocal done
            now = max(done, int(min(share, 1) * total))
            self.progress.advance(now - done)
            done = now

        return advance

    @property
    def rows_in(self) -> int:
        return sum(count.rows for count in self._read.values())

    def _complete(self) -> None:
        manifest = self.manifest
        manifest.rows_in = self.rows_in
        manifest.rows_out = self.outputs[0].rows if self.outputs else 0
        if blank := sum(count.blank for count in self._read.values()):
            self.counts["blank_lines"] = blank
        manifest.counts = dict(self.counts)
        if not self.outputs:
            return
        manifest.inputs = [
            InputRecord(
                path=str(path),
                bytes=self.ends[path],
                xxh3_128=self._digests.get(path) or file_facts(path, end=self.ends[path]).xxh3_128,
                rows=count.rows,
            )
            for path, count in self._read.items()
        ]
        self._check_inputs()
        for output, aside in reversed(list(zip(self.outputs, self._asides, strict=True))):
            facts = output.finish()
            manifest.output, manifest.rows_out = str(output.path), output.rows
            manifest.output_bytes, manifest.output_xxh3_128 = facts.bytes, facts.xxh3_128
            (aside / manifest_path(output.path).name).write_bytes(manifest.encoded())

    def _check_inputs(self) -> None:
        """Files may grow; a compressed one or Parquet may not, nor may another file take the name."""
        for path, before in self._states.items():
            try:
                now = _state(path)
            except UsageError:
                raise _changed(path) from None
            is_same = now.st_ino == before.st_ino and now.st_size >= before.st_size
            if path.suffix in (".parquet", *COMPRESSED):
                is_same &= (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
            if not is_same:
                raise _changed(path)


def _state(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error


def _changed(path: Path) -> RollbookError:
    return RollbookError(f"{path} was changed while it was read; nothing is written, try again")


def _chunks(path: Path, end: int) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while end and (chunk := file.read(min(_CHUNK, end))):
            yield chunk
            end -= len(chunk)


def _refuse_to_overwrite_an_input(output: Path, inputs: Sequence[Path]) -> None:
    for path in inputs:
        if output.resolve() == path.resolve():
            raise UsageError(f"{output} is an input as well; choose another output")
