"""A run's data as LLaMA-Factory reads it: `artifacts/data/lf_data/<run>_train.jsonl`, `<run>_eval.jsonl`.

Both are named in the `dataset_info.json` beside them. `<run>_report.json` says what became of the rows: what
has no place in that layout is left out and counted by its reason, and nothing else is. Neither has text of a
control token: LLaMA-Factory would make the token of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import orjson

from rollbook.data.llamafactory import DatasetEntry, Unsuitable, conversation_row, register
from rollbook.data.output import new_dataset
from rollbook.records.atomic import write_atomic
from rollbook.records.layout import sanitize
from rollbook.records.rows import encode_row
from rollbook.rollouts.types import Message
from rollbook.sft.conversations import Conversation, read_conversations
from rollbook.sft.settings import DatasetSettings, SftSettings


class LfReport(msgspec.Struct, kw_only=True):
    """What became of the rows of the training or the evaluation data."""

    rows: int = 0
    samples: int = 0  # written, those that a weight repeats as often as they are
    plain_text: int = 0  # a prompt and its completion, without roles: one turn each
    shortened: int = 0  # by what follows the last reply, which teaches nothing
    left_out_by_weight: int = 0
    dropped: dict[str, int] = {}

    def summary(self) -> str:
        losses = {
            "left out by weight": self.left_out_by_weight,
            "cut after the last reply": self.shortened,
            **{f"dropped, {why.replace('_', ' ')}": count for why, count in self.dropped.items()},
        }
        kept = f"{self.samples} samples from {self.rows} rows"
        return "; ".join([kept, *(f"{what}: {count}" for what, count in losses.items() if count)])


class LfDataset(NamedTuple):
    name: str  # in dataset_info.json
    path: Path
    report: LfReport


class LfData(NamedTuple):
    directory: Path
    train: LfDataset
    eval: LfDataset | None


def lf_directory(artifacts: Path) -> Path:
    return artifacts / "data" / "lf_data"


def lf_file(settings: SftSettings, artifacts: Path, part: str) -> Path:
    """`part` is train or eval."""
    return lf_directory(artifacts) / f"{sanitize(settings.run_name)}_{part}.jsonl"


def write_lf_data(settings: SftSettings, artifacts: Path) -> LfData:
    """Convert everything the settings name; what an earlier run of the name left is replaced."""
    controls = _control_tokens(settings.model.tokenizer or settings.model.path)
    train = _write(settings.data.train, lf_file(settings, artifacts, "train"), controls)
    evaluation = None
    if settings.data.eval:  # weights are about an epoch of training
        whole = [msgspec.structs.replace(dataset, weight=1.0) for dataset in settings.data.eval]
        evaluation = _write(whole, lf_file(settings, artifacts, "eval"), controls)
    reports = {part.name: part.report for part in (train, evaluation) if part is not None}
    where = lf_directory(artifacts) / f"{sanitize(settings.run_name)}_report.json"
    write_atomic(where, msgspec.json.format(msgspec.json.encode(reports)) + b"\n")
    return LfData(lf_directory(artifacts), train, evaluation)


def _control_tokens(tokenizer: str | None) -> re.Pattern[str]:
    """Text that the model's tokenizer takes for control tokens; what looks like one where none is at hand."""
    try:
        added = orjson.loads((Path(tokenizer or "") / "tokenizer.json").read_bytes())["added_tokens"]
        texts = {token["content"] for token in added if token.get("special")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return re.compile(r"<\|[^\s|<>]{1,64}\|>")
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")


def _write(datasets: Sequence[DatasetSettings], path: Path, controls: re.Pattern[str]) -> LfDataset:
    report = LfReport()
    with new_dataset(path, overwrite=True) as output:
        for dataset in datasets:
            for number, (_, conversation) in enumerate(read_conversations(dataset)):
                report.rows += 1
                copies = _copies(number, dataset.weight)
                if not copies:
                    report.left_out_by_weight += 1
                elif (row := _row(conversation, report, controls)) is not None:
                    for _ in range(copies):
                        output.write(encode_row(row))
        report.samples = output.rows
    return LfDataset(register(path, DatasetEntry()), path, report)


def _copies(number: int, weight: float) -> int:
    """How often a row is written: twice for a weight of 2, every other time for one of 0.5."""
    exact = Fraction(weight).limit_denominator(1_000_000)
    return int((number + 1) * exact) - int(number * exact)


def _row(conversation: Conversation, report: LfReport, controls: re.Pattern[str]) -> dict[str, Any] | None:
    messages: list[Message] = list(conversation.messages)
    if not conversation.is_chat:
        report.plain_text += 1
        messages = [
            {"role": "user", "content": conversation.prompt},
            {"role": "assistant", "content": conversation.completion},
        ]
    last = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
    report.shortened += last + 1 < len(messages)
    try:
        row = conversation_row({"messages": messages[: last + 1], "tools": conversation.tools})
        texts = [row["system"], row["tools"], *(turn["value"] for turn in row["conversations"])]
        if any(map(controls.search, texts)):
            raise Unsuitable("text_of_a_control_token")
        return row
    except Unsuitable as reason:
        report.dropped[str(reason)] = report.dropped.get(str(reason), 0) + 1
        return None
