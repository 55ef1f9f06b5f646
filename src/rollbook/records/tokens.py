"""Token exports, read: ours as JSON lines, Parquet or the open Arrow stream, and prime-rl's.

    for sequence in read_sequences("run/token_exports/rank_0.jsonl"):
        kl = sequence.get("mismatch_kl")

A sequence is one training row with its columns as numpy arrays: floats are float32 with NaN where there is no
value, masks are bool. A column that does not apply is None, one that was left out is not there. What follows
from other columns is computed where it is not stored. A line or a batch is read at a time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from rollbook.errors import BadFileError, BadLineError
from rollbook.records.jsonl import Line, read_lines
from rollbook.records.layout import TRAIN
from rollbook.records.record import decode_line
from rollbook.records.token_columns import ALL_COLUMNS, DERIVED, KINDS, derived, with_sources
from rollbook.records.token_files import PARQUET, SCHEMA_VERSION, STREAM, on_disk
from rollbook.records.token_settings import ALWAYS
from rollbook.records.versions import made_by_newer

Array = np.ndarray[Any, np.dtype[Any]]

TEXT = "text"  # asked for like a column
_SAME = (
    "run_id", "attempt", "optim_step", "rank", "micro_step", "micro_sequence_idx", "export_sequence_idx",
    "group_idx", "traj_idx", "part", "data_file", "data_row", "task_id", "env_name", "policy_version", "text",
)  # fmt: skip
# Where prime-rl has a placeholder for the sampler's logprob, these say nothing.
_OF_INFERENCE = (
    "inference_logprobs", "log_importance_ratio", "importance_ratio", "mismatch_kl", "prob_delta",
)  # fmt: skip
# The first token of a sequence was predicted by nothing, or by the last one of the sequence packed before.
_OF_TRAINER = ("trainer_logprobs", "entropy")
_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

_JSON_TYPES: dict[str, Any] = {"int32": list[int], "bool": list[bool | None], "float32": list[float | None]}


class TurnSpan(msgspec.Struct, kw_only=True):
    """The tokens of a row that one turn sampled."""

    step_idx: int
    start: int
    end: int
    policy_version: int | None = None
    temperature: float | None = None


class Keys(msgspec.Struct, kw_only=True):
    """What a record says beside its columns; prime-rl's have `step` and no `iteration`."""

    schema_version: int = 1
    run_id: str | None = None
    attempt: int | None = None
    split: str | None = None
    iteration: int | None = None
    step: int | None = None
    optim_step: int | None = None
    rank: int | None = None
    micro_step: int | None = None
    micro_sequence_idx: int | None = None
    export_sequence_idx: int | None = None
    group_idx: int | None = None
    traj_idx: int | None = None
    part: int | None = None
    data_file: str | None = None
    data_row: int | None = None
    task_id: str | None = None
    env_name: str | None = None
    policy_version: int | None = None
    turns: list[TurnSpan] | None = None
    text: str | None = None


@dataclass(kw_only=True)
class TokenSequence:
    """One training row of a trajectory. `step` is the iteration, under the name metrics.jsonl has for it."""

    split: str
    iteration: int
    run_id: str | None = None
    attempt: int | None = None
    optim_step: int | None = None
    rank: int | None = None
    micro_step: int | None = None
    micro_sequence_idx: int | None = None
    export_sequence_idx: int | None = None
    group_idx: int | None = None
    traj_idx: int | None = None
    part: int | None = None
    data_file: str | None = None
    data_row: int | None = None
    task_id: str | None = None
    env_name: str | None = None
    policy_version: int | None = None
    turns: list[TurnSpan] = field(default_factory=list)
    text: str | None = None
    text_offsets: Array | None = None  # the byte of `text` in UTF-8 at which each token begins
    columns: dict[str, Array | None]

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def step(self) -> int:
        return self.iteration

    @property
    def token_ids(self) -> Array:
        token_ids = self.columns["token_ids"]
        assert token_ids is not None
        return token_ids

    def get(self, name: str) -> Array | None:
        """A column; None where it does not apply, or was left out."""
        return self.columns.get(name)

    @cached_property
    def turn_of(self) -> Array:
        """For each token the index in `turns` of the turn that sampled it, -1 for those nobody sampled."""
        turn_of = np.full(len(self), -1, np.int32)
        for index, turn in enumerate(self.turns):
            turn_of[turn.start : turn.end] = index
        return turn_of

    @cached_property
    def sampled(self) -> Array:
        """Which tokens the loss saw; where no trainer said so, those that the policy sampled."""
        loss_mask = self.get("loss_mask")
        return self.turn_of >= 0 if loss_mask is None else loss_mask

    def is_known(self, name: str) -> Array:
        """Which tokens have a value in a column. A NaN of a token that was sampled is the value it had; where
        another trainer wrote null, nobody knows."""
        column = self.get(name)
        if column is None:
            return np.zeros(len(self), np.bool_)
        if column.dtype.kind != "f":
            return np.ones(len(self), np.bool_)
        has_value = ~np.isnan(column)
        return has_value if self.run_id is None else has_value | self.sampled

    @cached_property
    def _bytes(self) -> bytes | None:
        return None if self.text is None else self.text.encode()

    def piece(self, index: int) -> bytes | None:
        """The bytes of one token; None where the record has no text. They may be a part of a character."""
        if self._bytes is None or self.text_offsets is None:
            return None
        after = index + 1
        end = self.text_offsets[after] if after < len(self.text_offsets) else len(self._bytes)
        return self._bytes[self.text_offsets[index] : end]

    @cached_property
    def pieces(self) -> list[str] | None:
        """The tokens as text; None where the record has none."""
        if self._bytes is None or self.text_offsets is None:
            return None
        places = [*self.text_offsets.tolist(), len(self._bytes)]
        return [piece_text(self._bytes[start:end]) for start, end in pairwise(places)]


def piece_text(piece: bytes) -> str:
    """A token as text; one that is only a part of a character, with its bytes as `\\xE6`."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "".join(chr(byte) if 32 <= byte < 127 else f"\\x{byte:02X}" for byte in piece)


def read_sequences(
    path: Path | str,
    *,
    start: int = 0,
    end: int | None = None,
    iteration: int | None = None,
    columns: Collection[str] | None = None,
) -> Iterator[TokenSequence]:
    """The sequences of one file, in its order.

    `start` and `end` are offsets as a manifest has them. They say where lines begin and end; of a stream only
    the `end` counts, and of Parquet, which is whole, neither. Without an `end` a record that is being written
    is left alone. `iteration` leaves out the records of all others, `columns` all columns but these, `TEXT`
    and the ones that no record can be read without.
    """
    path = on_disk(Path(path))  # a part may have been closed since it was listed
    if not path.exists():
        raise BadFileError(path, "is not there; restore it, or move the rest of the export away")
    if path.suffix in (PARQUET, STREAM):
        from rollbook.records.token_tables import read_table

        found = read_table(path, end, iteration, wanted_columns(columns))
    else:
        found = _read_jsonl(path, start, end, wanted_columns(columns))
    try:
        for sequence in found:
            if iteration is None or sequence.iteration == iteration:
                yield sequence
    except BadLineError as error:
        before = sum(1 for _ in read_lines(path, end=start)) if start else 0
        raise BadLineError(path, before + error.line, error.why) from None


def wanted_columns(columns: Collection[str] | None) -> frozenset[str]:
    """What has to be read for some columns."""
    if columns is None:
        return frozenset((*ALL_COLUMNS, TEXT))
    return with_sources({*ALWAYS, *columns})


def _read_jsonl(path: Path, start: int, end: int | None, wanted: frozenset[str]) -> Iterator[TokenSequence]:
    for line in read_lines(path, start=start, end=end):
        yield decode_sequence(path, line, wanted)


def decode_sequence(path: Path, line: Line, wanted: frozenset[str]) -> TokenSequence:
    """The sequence on a line of JSON, ours or prime-rl's; `wanted` is of `wanted_columns`."""
    record = _decoded(path, line, _line_type(wanted))
    check_version(record.schema_version, path, line.number)
    is_foreign = record.iteration is None
    arrays = {name: getattr(record, name) for name in ALL_COLUMNS if name in wanted}
    try:
        columns = {
            name: None if _says_nothing(values, is_foreign) else array_of(name, values)
            for name, values in arrays.items()
            if not isinstance(values, UnsetType)
        }
        given = getattr(record, "text_offsets", None)
        offsets = None if given is None else np.array(given, np.int32)
        _restore(columns, record.nonfinite)
    except (OverflowError, IndexError, KeyError, TypeError) as error:
        raise BadLineError(path, line.number, f"not a token record: {error}") from None
    return made(record, columns, offsets, path, line.number, wanted)


@cache
def _line_type(wanted: frozenset[str]) -> Any:
    """A line, ours or prime-rl's, with the columns that are wanted; what is not wanted is not decoded."""
    fields: list[tuple[str, Any, Any]] = [
        (name, _JSON_TYPES[KINDS[name]] | None | UnsetType, UNSET)
        for name in ALL_COLUMNS
        if name in wanted and name != "token_ids"
    ]
    if TEXT in wanted:
        fields.append(("text_offsets", list[int] | None, None))
    return msgspec.defstruct(
        "TokenLine",
        [("token_ids", list[int]), *fields, ("nonfinite", dict[str, list[tuple[int, str]]], {})],
        bases=(Keys,),
        kw_only=True,
    )


@cache
def _decoder(line_type: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(line_type)


def _decoded(path: Path, line: Line, line_type: Any) -> Any:
    try:
        return _decoder(line_type).decode(line.data)
    except msgspec.ValidationError as error:
        raise BadLineError(path, line.number, f"not a token record: {error}") from None
    except msgspec.DecodeError:
        plain = decode_line(path, line)  # says what is wrong, or takes a bare NaN of another writer
        plain.pop("nonfinite", None)
    try:
        return msgspec.convert(plain, line_type)
    except msgspec.ValidationError as error:
        raise BadLineError(path, line.number, f"not a token record: {error}") from None


def array_of(name: str, values: Sequence[Any] | Array) -> Array:
    """A column as numpy: null is NaN, or false."""
    return np.array(values, np.dtype(KINDS[name]))


def _says_nothing(values: Sequence[Any] | None, is_foreign: bool) -> bool:
    """Where a column does not apply it is null, and prime-rl writes a null for each token."""
    if values is None:
        return True
    return is_foreign and len(values) > 0 and values.count(None) == len(values)


def _restore(columns: Mapping[str, Array | None], nonfinite: Mapping[str, list[tuple[int, str]]]) -> None:
    for name, values in nonfinite.items():
        column = columns.get(name)
        for offset, word in values if column is not None else ():
            column[offset] = _NONFINITE[word]  # type: ignore[index]


def check_version(version: int, path: Path, number: int) -> None:
    if why := made_by_newer(version, SCHEMA_VERSION):
        raise BadLineError(path, number, why)


def made(
    keys: Keys,
    columns: dict[str, Array | None],
    offsets: Array | None,
    path: Path,
    number: int,
    wanted: frozenset[str],
) -> TokenSequence:
    """The sequence of a record of any kind of file, once it is known to fit together."""
    is_foreign = keys.iteration is None
    iteration = keys.step if is_foreign else keys.iteration
    if iteration is None:
        raise BadLineError(path, number, "not a token record: it has neither iteration nor step")
    _check_lengths(columns, offsets, keys.turns or [], path, number)
    if is_foreign:
        _forget_placeholders(columns)
    _derive(columns, wanted)
    same = {name: getattr(keys, name) for name in _SAME}
    return TokenSequence(
        **same,
        split=keys.split or TRAIN,
        iteration=iteration,
        turns=keys.turns or [],
        text_offsets=offsets,
        columns=columns,
    )


def _check_lengths(
    columns: Mapping[str, Array | None],
    offsets: Array | None,
    turns: Sequence[TurnSpan],
    path: Path,
    number: int,
) -> None:
    token_ids = columns.get("token_ids")
    if token_ids is None:
        raise BadLineError(path, number, "not a token record: it has no token_ids")
    size = len(token_ids)
    for name, column in {**columns, "text_offsets": offsets}.items():
        if column is not None and len(column) != size:
            raise BadLineError(path, number, f"{name} has {len(column)} values for {size} tokens")
    for turn in turns:
        if not 0 <= turn.start <= turn.end <= size:
            raise BadLineError(
                path, number, f"turn {turn.step_idx} is {turn.start} to {turn.end} of {size} tokens"
            )


def _forget_placeholders(columns: dict[str, Array | None]) -> None:
    loss_mask = columns.get("loss_mask")
    for name in _OF_INFERENCE:
        column = columns.get(name)
        if column is not None and loss_mask is not None:
            columns[name] = np.where(loss_mask, column, np.float32(math.nan))
    for name in _OF_TRAINER if loss_mask is None or not loss_mask[:1].any() else ():
        column = columns.get(name)
        if column is not None:
            column[:1] = math.nan


def _derive(columns: dict[str, Array | None], wanted: frozenset[str]) -> None:
    """What a writer left out because it follows from the rest."""
    token_ids = columns["token_ids"]
    assert token_ids is not None
    if "position_ids" in wanted:
        columns.setdefault("position_ids", np.arange(len(token_ids), dtype=np.int32))
    missing = [name for name in DERIVED if name in wanted and name not in columns]
    if missing and "inference_logprobs" in columns and "trainer_logprobs" in columns:
        found = derived(columns["inference_logprobs"], columns["trainer_logprobs"])
        columns |= {name: found[name] for name in missing}
