"""One command over datasets: inputs read, an output made, and a manifest that says what happened.

    with DataJob("filter", inputs, output, arguments={"where": text}) as job:
        for row in job.rows():
            if keep(row.value()):
                job.write(row.data)
            else:
                job.count("dropped")
    job.manifest

The manifest stands beside the output as `<stem>_manifest.json`: the inputs with their digests, the arguments,
the seed, rows in and out, and every other count by name. Digests are taken meanwhile, on cores that are free;
they are there to notice that a file has changed, so they are XXH3's, which costs a ninth of a SHA-256.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson
import xxhash

from rollbook.data.output import RowOutput, refuse_existing
from rollbook.errors import BadFileError, UsageError
from rollbook.forked import SharedWork, cores
from rollbook.records.atomic import write_atomic
from rollbook.records.datasets import manifest_owner, manifest_path
from rollbook.records.plain import utc_now
from rollbook.records.rows import Progress, Row, RowCount, read_rows
from rollbook.records.run_info import versions
from rollbook.runs.resolve import Inputs, find_inputs

SCHEMA_VERSION = 3
_HASHED_AT_ONCE = 1 << 18
_MANY_BYTES = 16 << 20  # are worth a process
_MOST_COPIES = 3


class InputRecord(msgspec.Struct, kw_only=True):
    path: str
    bytes: int
    xxh3_128: str  # as `xxh128sum` prints it
    rows: int | None = None  # None where a command did not have to read it all


class DataManifest(msgspec.Struct, kw_only=True):
    schema_version: int = SCHEMA_VERSION
    command: str
    created_at: str = msgspec.field(default_factory=utc_now)
    directory: str = ""  # where it was typed: paths are relative to it
    inputs: list[InputRecord] = []
    left_out: dict[str, str] = {}  # files that a directory or pattern matched and that were skipped, and why
    arguments: dict[str, Any] = {}
    seed: int | None = None
    output: str | None = None
    rows_in: int = 0
    rows_out: int = 0
    counts: dict[str, int] = {}  # everything else that was counted, by name
    coverage: dict[str, int] = {}  # expected, ok, failed, missing, where that is known
    details: dict[str, Any] = {}  # what the command reports besides
    versions: dict[str, str] = msgspec.field(default_factory=versions)


class DataJob:
    """Use as a context manager; without an output it only reads (`stats`) and writes no manifest."""

    def __init__(
        self,
        command: str,
        inputs: Sequence[str | Path] | Inputs,
        output: Path | None = None,
        *,
        also: Sequence[Path] = (),  # further outputs; all of them appear or none, each with its manifest
        arguments: Mapping[str, Any] | None = None,
        seed: int | None = None,
        overwrite: bool = False,
        takes_digests: bool = True,  # else the command takes them as it reads: `set_digest`
        advance: Progress = lambda _: None,
    ) -> None:
        found = inputs if isinstance(inputs, Inputs) else find_inputs(inputs)
        self.paths = found.paths
        self.counts: Counter[str] = Counter()
        self.manifest = DataManifest(
            command=command,
            left_out={str(path): why for path, why in found.skipped},
            directory=str(Path.cwd()),
            arguments=dict(arguments or {}),
            seed=seed,
            output=str(output) if output else None,
        )
        self._advance = advance
        self._seen = {path: RowCount() for path in self.paths}
        self.ends = {path: path.stat().st_size for path in self.paths}
        self._output = output
        self._also = list(also)
        self._overwrite = overwrite
        self._takes_digests = takes_digests
        self._known_digests: dict[Path, str] = {}
        outputs = [path for path in (output, *also) if path is not None]
        if len({manifest_path(path).resolve() for path in outputs}) < len(outputs):
            raise UsageError(f"outputs need names of their own: {', '.join(map(str, outputs))}")
        for path in outputs:
            _refuse_to_overwrite_an_input(path, self.paths)
            refuse_existing(path, overwrite=overwrite)
            _refuse_foreign_manifest(path)

    def __enter__(self) -> DataJob:
        self.output: RowOutput | None = None
        self.also: list[RowOutput] = []
        try:
            if self._output is not None:
                self.output = RowOutput(self._output, overwrite=self._overwrite)
            for path in self._also:
                self.also.append(RowOutput(path, overwrite=self._overwrite))
        except BaseException as error:
            self._end_outputs(type(error))
            raise
        wanted = self.paths if self.output is not None and self._takes_digests else []
        # By copies of this process: a thread would wait for its turn again and again while rows are parsed.
        many = sum(path.stat().st_size for path in wanted) >= _MANY_BYTES
        copies = min(cores() - 1, _MOST_COPIES, len(wanted)) if many else 0
        self._hashed = wanted
        self._hashing = SharedWork(lambda number: _digest(wanted[number]), len(wanted), copies=copies)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self._make_ready()
                for output in self._outputs() if self._overwrite else ():
                    manifest_path(output.path).unlink(missing_ok=True)  # it must not outlive what it tells of
            self._end_outputs(kind)
        finally:
            self._hashing.close()
        if kind is None:
            for output in self._outputs():
                own = msgspec.structs.replace(self.manifest, output=str(output.path), rows_out=output.rows)
                plain = orjson.dumps(msgspec.to_builtins(own), option=orjson.OPT_INDENT_2)
                write_atomic(manifest_path(output.path), plain + b"\n")

    def _outputs(self) -> list[RowOutput]:
        return [output for output in (self.output, *self.also) if output is not None]

    def _make_ready(self) -> None:
        try:
            self._complete()
            for output in self._outputs():
                output.prepare()
        except BaseException as error:
            self._end_outputs(type(error))
            raise

    def _end_outputs(self, kind: type[BaseException] | None) -> None:
        for output in self._outputs():
            output.__exit__(kind)

    def rows(self, path: Path | None = None) -> Iterator[Row]:
        """The rows of one input, or of all of them one after another."""
        for chosen in self.paths if path is None else [path]:
            seen = RowCount()
            yield from read_rows(chosen, end=self.ends[chosen], progress=self._advance, count=seen)
            self._seen[chosen] = seen  # only a pass that saw the end knows how many there are

    def write(self, data: bytes) -> None:
        assert self.output is not None, "this job was made without an output"
        self.output.write(data)

    def count(self, name: str, by: int = 1) -> None:
        self.counts[name] += by

    def set_rows(self, path: Path, rows: int, blank: int = 0) -> None:
        """For commands that count by other means than `rows`."""
        self._seen[path].rows, self._seen[path].blank = rows, blank

    def set_digest(self, path: Path, digest: str) -> None:
        self._known_digests[path] = digest

    def rows_of(self, path: Path) -> int:
        return self._seen[path].rows

    @property
    def rows_in(self) -> int:
        return sum(seen.rows for seen in self._seen.values())

    def _complete(self) -> None:
        manifest = self.manifest
        self._known_digests |= zip(self._hashed, self._hashing.result(), strict=True)
        manifest.inputs = [
            InputRecord(
                path=str(path),
                bytes=path.stat().st_size,
                xxh3_128=self._known_digests.get(path, ""),
                rows=seen.rows,
            )
            for path, seen in self._seen.items()
        ]
        manifest.rows_in = self.rows_in
        manifest.rows_out = self.output.rows if self.output is not None else 0
        if blank := sum(seen.blank for seen in self._seen.values()):
            self.counts["blank_lines"] = blank
        manifest.counts = dict(self.counts)


def _refuse_to_overwrite_an_input(output: Path, inputs: Sequence[Path]) -> None:
    for path in inputs:
        if output.resolve() == path.resolve():
            raise UsageError(f"{output} is an input as well; choose another output")


def _refuse_foreign_manifest(output: Path) -> None:
    """`rollouts.parquet` beside `rollouts.jsonl` must not take the name of its manifest."""
    path = manifest_path(output)
    if not path.exists():
        return
    try:
        owner = manifest_owner(path)
    except BadFileError:
        owner = None
    if owner is None or (owner.name != output.name and owner.exists()):
        raise UsageError(
            f"{path} belongs to {owner or 'another file'}, and {output.name} would share it; "
            "choose a name that differs before the ending"
        )


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_HASHED_AT_ONCE))
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(buffer):
            digest.update(buffer[:read])
    return digest.hexdigest()
