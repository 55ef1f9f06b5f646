"""The view `tokens`: every token of exports and transcripts as a row, made by the one reader of token files.

DuckDB scans it as an Arrow dataset. It says which columns and rows it wants, so that other columns are not
decoded and files of other iterations not opened; the rows come in batches, a few sequences at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs

from rollbook.errors import RollbookError
from rollbook.query.schema import COLUMNS
from rollbook.records.token_columns import TOKEN_COLUMNS
from rollbook.records.token_places import TokenPiece, TokenSource, whole_pieces
from rollbook.records.tokens import TEXT, TokenSequence

_TOKENS = 32_768  # of a batch, or one sequence if it is longer
_ARROW = {
    "VARCHAR": pa.string(),
    "BIGINT": pa.int64(),
    "INTEGER": pa.int32(),
    "FLOAT": pa.float32(),
    "BOOLEAN": pa.bool_(),
}
_SCHEMA = pa.schema([(column.name, _ARROW[column.type]) for column in COLUMNS["tokens"]])
_ARRAYS = {column.name: column.array for column in TOKEN_COLUMNS}
_OF_RECORD = {"sequence_idx": "export_sequence_idx"}  # all others have the name they have in a record
_OF_TURN = ("step_idx", "policy_version", "temperature")


class Owned(NamedTuple):
    """A part of a file and the run it belongs to."""

    run: str
    piece: TokenPiece


class TokenTable(ds.Dataset):  # type: ignore[misc]
    """What DuckDB asks of a dataset: its schema, and a scanner of some columns and rows."""

    def __init__(self, sources: Mapping[str, TokenSource]) -> None:
        self._sources = sources
        self.error: RollbookError | None = None  # which Arrow and DuckDB would hand on as a text

    @property
    def schema(self) -> pa.Schema:
        return _SCHEMA

    def scanner(self, columns: list[str] | None = None, filter: Any = None, **_: Any) -> _Scanner:
        return _Scanner(self, _SCHEMA.names if columns is None else columns, filter)

    def pieces(self, condition: Any) -> list[Owned]:
        """The parts of files that can hold rows of a condition, files that follow each other as one."""
        found = [Owned(run, piece) for run, source in self._sources.items() for piece in source.pieces()]
        kept = [found[number] for number in _possible(found, condition)]
        return [
            Owned(run, piece)
            for run in dict.fromkeys(owned.run for owned in kept)
            for piece in whole_pieces(owned.piece for owned in kept if owned.run == run)
        ]


class _Scanner:
    def __init__(self, table: TokenTable, columns: list[str], condition: Any) -> None:
        self._table, self._columns, self._condition = table, columns, condition

    def to_reader(self) -> pa.RecordBatchReader:
        schema = pa.schema([_SCHEMA.field(name) for name in self._columns])
        return pa.RecordBatchReader.from_batches(schema, self._batches(schema))

    def _batches(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        # A condition may be about columns that nobody selected. Which ones its text says; a word too many
        # only costs time.
        words = set() if self._condition is None else set(re.findall(r"\w+", str(self._condition)))
        names = [name for name in _SCHEMA.names if name in words or name in self._columns]
        try:
            for batch in _token_batches(self._table.pieces(self._condition), names):
                if self._condition is None:
                    yield batch.select(schema.names)
                else:
                    rows = pa.Table.from_batches([batch]).filter(self._condition)
                    yield from rows.select(schema.names).to_batches()
        except RollbookError as error:
            self._table.error = error
            raise


def _possible(pieces: list[Owned], condition: Any) -> list[int]:
    """The pieces that a condition on run, split and iteration leaves, as Arrow decides it of files."""
    if condition is None:
        return list(range(len(pieces)))
    facts = [_facts(owned) for owned in pieces]
    fragments = ds.FileSystemDataset.from_paths(
        [str(number) for number in range(len(pieces))],  # never opened
        schema=_SCHEMA,
        format=ds.IpcFileFormat(),
        filesystem=pyarrow.fs.LocalFileSystem(),
        partitions=facts,
    )
    return [int(fragment.path) for fragment in fragments.get_fragments(filter=condition)]


def _facts(owned: Owned) -> Any:
    """What is true of every token of a piece."""
    known: Any = pc.field("run") == owned.run
    if owned.piece.iteration is not None:
        known &= pc.field("iteration") == owned.piece.iteration
    if owned.piece.split is not None:
        known &= pc.field("split") == owned.piece.split
    return known


def _token_batches(pieces: list[Owned], names: list[str]) -> Iterator[pa.RecordBatch]:
    wanted = {_ARRAYS[name] for name in names if name in _ARRAYS} | ({TEXT} if TEXT in names else set())
    for run, piece in pieces:
        waiting: list[TokenSequence] = []
        tokens = 0
        for sequence in piece.read(wanted):
            waiting.append(sequence)
            tokens += len(sequence)
            if tokens >= _TOKENS:
                yield _batch(waiting, names, run, str(piece.path))
                waiting, tokens = [], 0
        if waiting:
            yield _batch(waiting, names, run, str(piece.path))


def _batch(sequences: list[TokenSequence], names: list[str], run: str, file: str) -> pa.RecordBatch:
    length_S = np.array([len(sequence) for sequence in sequences])
    same = {"run": run, "file": file}

    def column(name: str) -> pa.Array:
        if name in same:
            return pa.repeat(pa.scalar(same[name], pa.string()), int(length_S.sum()))
        if name in _ARRAYS:
            return pa.concat_arrays([_array(sequence, name) for sequence in sequences])
        if name in _OF_TURN:
            return pa.concat_arrays([_of_turn(sequence, name) for sequence in sequences])
        if name == "token_idx":
            return pa.array(np.concatenate([np.arange(length) for length in length_S]), pa.int64())
        if name == TEXT:
            return pa.concat_arrays([_text(sequence) for sequence in sequences])
        values = [getattr(sequence, _OF_RECORD.get(name, name)) for sequence in sequences]
        sequence_T = np.repeat(np.arange(len(sequences)), length_S)
        return pa.array(values, _SCHEMA.field(name).type).take(pa.array(sequence_T))

    return pa.record_batch({name: column(name) for name in names})


def _array(sequence: TokenSequence, name: str) -> pa.Array:
    values_T, kind = sequence.get(_ARRAYS[name]), _SCHEMA.field(name).type
    if values_T is None:
        return pa.nulls(len(sequence), kind)
    return pa.array(values_T, kind, mask=~sequence.is_known(_ARRAYS[name]))


def _of_turn(sequence: TokenSequence, name: str) -> pa.Array:
    """A fact of the turn that sampled a token; the version is also known of the whole row."""
    kind = _SCHEMA.field(name).type
    whole = sequence.policy_version if name == "policy_version" and not sequence.turns else None
    of_turns: list[Any] = [getattr(turn, name) for turn in sequence.turns]
    return pa.array([*of_turns, whole], kind).take(pa.array(sequence.turn_of % (len(of_turns) + 1)))


def _text(sequence: TokenSequence) -> pa.Array:
    pieces = sequence.pieces
    return pa.nulls(len(sequence), pa.string()) if pieces is None else pa.array(pieces, pa.string())
