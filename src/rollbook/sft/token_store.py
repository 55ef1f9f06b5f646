"""The tokenised data on the disk, read by memory mapping: a million conversations cost what a thousand cost.

Made once for a tokenizer, a template and a set of files, and found again by the digest of all that, so a
resumed run starts at once and runs that start together share one. It is a cache: delete it at any time.
Everything that was cut or left out is in its report, which the run prints and keeps.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson

from rollbook.errors import UsageError
from rollbook.policies.chat_format import ChatFormat
from rollbook.policies.chat_template import TemplateError
from rollbook.records.columns import USUAL
from rollbook.records.complete import is_complete, make_once, read_mark
from rollbook.records.run_inputs import RunInput, file_input
from rollbook.sft.conversations import files_of, read_conversations
from rollbook.sft.settings import DatasetSettings, DataSettings
from rollbook.train.batch import Example, RowKey
from rollbook.version import __version__

_PROGRESS_S = 10.0
ROWS = "rows.bin"  # of each sample: which of the dataset's files, and which row of it


class TokenReport(msgspec.Struct, kw_only=True):
    """What became of the rows."""

    rows: int = 0
    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    truncated: int = 0
    truncated_tokens: int = 0  # cut off and lost
    dropped_too_long: int = 0
    dropped_untrained: int = 0  # nothing of the assistant left in them
    parts_not_rendered: int = 0  # of messages, which the chat template leaves out as data.may_drop allows

    def summary(self) -> str:
        """What became of the rows, in words; every row that was left out is counted."""
        kept = f"{self.samples} of {self.rows} rows, {self.tokens:,} tokens, {self.trained_tokens:,} trained"
        losses = {
            "dropped, too long": self.dropped_too_long,
            "truncated": self.truncated,
            "tokens cut off": self.truncated_tokens,
            "dropped, nothing to learn": self.dropped_untrained,
            "parts of messages that the template leaves out": self.parts_not_rendered,
        }
        return "; ".join([kept, *(f"{name}: {count}" for name, count in losses.items() if count)])


class TokenStore:
    """Samples by number, each with the row of `files` that it was made from."""

    def __init__(self, directory: Path, files: Sequence[Path], sources: Sequence[RunInput]) -> None:
        self._files = [str(path) for path in files]
        self.key = directory.name  # says from what the samples were made, and how
        self.sources = list(sources)  # the files, as they are now
        self.report = msgspec.json.decode((directory / "report.json").read_bytes(), type=TokenReport)
        self._ends = np.fromfile(directory / "ends.bin", dtype=np.int64)
        self._rows = np.fromfile(directory / ROWS, dtype=np.int64).reshape(-1, 2)
        empty = not self.report.tokens  # a file of no bytes cannot be mapped
        self._tokens: Any = (
            np.empty(0, np.int32) if empty else np.memmap(directory / "tokens.bin", np.int32, "r")
        )
        self._trained: Any = (
            np.empty(0, np.bool_) if empty else np.memmap(directory / "trained.bin", np.bool_, "r")
        )

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.diff(self._ends, prepend=0)

    def __getitem__(self, number: int) -> Example:
        start = int(self._ends[number - 1]) if number else 0
        inside = slice(start, int(self._ends[number]))
        file, row = self._rows[number].tolist()
        key = RowKey(self._files[file], row)
        return Example(np.asarray(self._tokens[inside]), np.asarray(self._trained[inside]), key=key)


class Corpus:
    """Several stores as one: numbers go on where those of the dataset before end."""

    def __init__(self, stores: Sequence[TokenStore]) -> None:
        self.stores = list(stores)
        self._ends = np.cumsum([len(store) for store in stores])
        self.lengths = np.concatenate([store.lengths for store in stores])

    @property
    def sizes(self) -> list[int]:
        return [len(store) for store in self.stores]

    @property
    def sources(self) -> list[RunInput]:
        """The files that the samples are from."""
        return [source for store in self.stores for source in store.sources]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, number: int) -> Example:
        place = int(np.searchsorted(self._ends, number, side="right"))
        return self.stores[place][number - (int(self._ends[place - 1]) if place else 0)]


def open_corpus(
    datasets: Sequence[DatasetSettings],
    data: DataSettings,
    chat: ChatFormat,
    cache: Path,
    log: Callable[[str], None] = lambda _: None,
) -> Corpus:
    """The samples of all datasets; raises a UsageError if none is left. All processes may call it at once."""
    stores = [tokenise(dataset, data, chat, cache, log) for dataset in datasets]
    reports = [
        f"{dataset.path}: {store.report.summary()}" for dataset, store in zip(datasets, stores, strict=True)
    ]
    for report in reports:
        log(report)
    if not any(len(store) for store in stores):
        raise UsageError(f"there is no sample to train on. {'; '.join(reports)}")
    return Corpus(stores)


def tokenise(
    dataset: DatasetSettings,
    data: DataSettings,
    chat: ChatFormat,
    cache: Path,
    log: Callable[[str], None] = lambda _: None,
) -> TokenStore:
    """The store of a dataset, made unless it is there. Of several that want it one makes it, others wait."""
    files = files_of(dataset)
    sources = [file_input("data", path) for path in files]

    def make(directory: Path) -> None:
        _write_store(directory, dataset, data, chat, log)

    directory = cache / _key(sources, dataset, chat, data)
    return TokenStore(make_once(directory, make, is_usable=_has_all, on_wait=log), files, sources)


def _has_all(directory: Path) -> bool:
    """A mark that names no files, or not all that are read, is of an older version."""
    mark = read_mark(directory)
    return mark is not None and mark.files is not None and ROWS in mark.files and is_complete(directory)


def _write_store(
    directory: Path,
    dataset: DatasetSettings,
    data: DataSettings,
    chat: ChatFormat,
    log: Callable[[str], None],
) -> None:
    report, dropped_before, last_report = TokenReport(), chat.dropped, time.monotonic()
    places = {path: place for place, path in enumerate(files_of(dataset))}
    with (
        (directory / "tokens.bin").open("wb") as tokens,
        (directory / "trained.bin").open("wb") as trained,
        (directory / "ends.bin").open("wb") as ends,
        (directory / ROWS).open("wb") as rows,
    ):
        for row, conversation in read_conversations(dataset, log):
            report.rows += 1
            if time.monotonic() - last_report > _PROGRESS_S:
                last_report = time.monotonic()
                log(f"{dataset.path}: {report.rows:,} rows tokenised")
            try:
                whole = Example(*chat.mask(conversation))
            except TemplateError as error:
                raise TemplateError(f"{row.path}:{row.number}: {error}") from error
            sample = _fitted(whole, data, report)
            if sample is None:
                continue
            report.samples += 1
            report.tokens += len(sample)
            report.trained_tokens += int(sample.trained_T[1:].sum())
            tokens.write(sample.token_T.tobytes())
            trained.write(sample.trained_T.tobytes())
            ends.write(np.int64(report.tokens).tobytes())
            rows.write(np.array([places[row.path], row.number], np.int64).tobytes())
    report.parts_not_rendered = chat.dropped - dropped_before
    (directory / "report.json").write_bytes(msgspec.json.encode(report))


def _fitted(sample: Example, data: DataSettings, report: TokenReport) -> Example | None:
    if len(sample) > data.max_length:
        if data.too_long != "truncate":
            report.dropped_too_long += 1
            return None
        report.truncated += 1
        report.truncated_tokens += len(sample) - data.max_length
        sample = Example(sample.token_T[: data.max_length], sample.trained_T[: data.max_length])
    if not sample.trained_T[1:].any():
        report.dropped_untrained += 1
        return None
    return sample


def _key(sources: Sequence[RunInput], dataset: DatasetSettings, chat: ChatFormat, data: DataSettings) -> str:
    content = hashlib.sha256("".join(str(source.xxh3_128) for source in sources).encode())
    how = [__version__, data.max_length, data.too_long, data.train_on, data.may_drop, chat.chat_template]
    content.update(orjson.dumps(how))
    content.update(chat.tokenizer.backend_tokenizer.to_str().encode())
    content.update(dataset.format.encode())
    if dataset.names != USUAL:
        content.update(msgspec.json.encode(dataset.names))
    return content.hexdigest()[:24]
