"""The sampled side of the tokens, from the transcripts: what there is of a run without a token export.

The sampler's logprobs, temperatures and versions, and no column of the trainer. There is no text of single
tokens: that takes the tokenizer, and a reader has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from rollbook.errors import BadLineError
from rollbook.records.jsonl import read_lines
from rollbook.records.tokens import TokenSequence, TurnSpan
from rollbook.records.turns import TokenRow, token_rows


class _Turn(msgspec.Struct, kw_only=True):
    step_idx: int
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: list[float | None] | None = None  # null: it was not finite
    temperature: float | None = None
    policy_version: int | None = None
    new_row: str | None = None


class _Transcript(msgspec.Struct, kw_only=True):
    """What a line says about tokens; the rest of it is not decoded."""

    split: str
    iteration: int
    group_idx: int
    traj_idx: int
    run_id: str | None = None
    task_id: str | None = None
    turns: list[_Turn] | None = None


_DECODER = msgspec.json.Decoder(_Transcript)


def sampled_sequences(path: Path) -> Iterator[TokenSequence]:
    """The token rows of a transcripts file; trajectories whose policy knew no tokens have none."""
    for line in read_lines(path):
        try:
            record = _DECODER.decode(line.data)
        except msgspec.DecodeError as error:
            raise BadLineError(path, line.number, f"not a transcript: {error}") from None
        turns = record.turns or []
        if not turns or any(turn.token_ids is None or turn.prompt_token_ids is None for turn in turns):
            continue
        for part, row in enumerate(token_rows(turns)):
            yield _sequence(record, turns, part, row)


def _sequence(record: _Transcript, turns: list[_Turn], part: int, row: TokenRow) -> TokenSequence:
    size = len(row.token_ids)
    logprob_T = np.full(size, np.nan, np.float32)
    spans = []
    for index, start, end in row.turns:
        turn = turns[index]
        if turn.logprobs is not None and len(turn.logprobs) == end - start:
            logprob_T[start:end] = np.array(turn.logprobs, np.float32)
        spans.append(
            TurnSpan(
                step_idx=turn.step_idx,
                start=start,
                end=end,
                policy_version=turn.policy_version,
                temperature=turn.temperature,
            )
        )
    return TokenSequence(
        run_id=record.run_id,
        split=record.split,
        iteration=record.iteration,
        group_idx=record.group_idx,
        traj_idx=record.traj_idx,
        part=part,
        task_id=record.task_id,
        policy_version=spans[0].policy_version if spans else None,
        turns=spans,
        columns={
            "token_ids": np.array(row.token_ids, np.int32),
            "position_ids": np.arange(size, dtype=np.int32),
            "inference_logprobs": logprob_T,
        },
    )
