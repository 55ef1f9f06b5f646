"""One data file may be tokenise by several runs at once, and by one that was killed: no row is lost."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rollbook.policies.chat_format import ChatFormat
from rollbook.sft.settings import DatasetSettings, DataSettings
from rollbook.sft.token_store import TokenStore, tokenise
from rollbook.train.batch import RowKey
from tiny_model import make_tokenizer, sums

ROWS = 12


@pytest.fixture
def data(tmp_path: Path) -> DataSettings:
    make_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums(ROWS)))
    return DataSettings(train=[DatasetSettings(path=str(tmp_path / "train.jsonl"))], max_length=64)


class SlowTokenizer(ChatFormat):
    """Waits in the middle of the file until it is told to go on."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.seen, self.is_halfway, self.go_on = 0, threading.Event(), threading.Event()

    def mask(self, conversation: Any) -> Any:
        self.seen += 1
        if self.seen == ROWS // 2:
            self.is_halfway.set()
            assert self.go_on.wait(60)
        return super().mask(conversation)


def test_two_runs_at_once_share_one_complete_store(tmp_path: Path, data: DataSettings) -> None:
    slow = SlowTokenizer(AutoTokenizer.from_pretrained(tmp_path / "tokenizer"))
    other = ChatFormat(AutoTokenizer.from_pretrained(tmp_path / "tokenizer"))
    stores: dict[str, TokenStore] = {}

    def first() -> None:
        stores["first"] = tokenise(data.train[0], data, slow, tmp_path / "cache")

    maker = threading.Thread(target=first)
    maker.start()
    assert slow.is_halfway.wait(60)
    waited: list[str] = []

    def on_wait(text: str) -> None:
        waited.append(text)
        slow.go_on.set()

    stores["second"] = tokenise(data.train[0], data, other, tmp_path / "cache", on_wait)
    maker.join(60)
    assert len(waited) == 1
    for store in stores.values():
        assert len(store) == store.report.samples == ROWS
        assert sum(len(store[number].token_T) for number in range(ROWS)) == store.report.tokens
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_sample_names_its_row_wherever_the_file_lies(tmp_path: Path, data: DataSettings) -> None:
    """Also of a store that an older version left, which did not say it, and after the file was moved."""
    chat = ChatFormat(AutoTokenizer.from_pretrained(tmp_path / "tokenizer"))
    tokenise(data.train[0], data, chat, tmp_path / "cache")
    (directory,) = (tmp_path / "cache").iterdir()
    mark = json.loads((directory / "COMPLETE").read_bytes())
    del mark["files"]["rows.bin"]
    (directory / "COMPLETE").write_text(json.dumps(mark))
    (directory / "rows.bin").unlink()
    moved = DatasetSettings(path=str(tmp_path / "moved.jsonl"))
    (tmp_path / "train.jsonl").rename(moved.path)
    store = tokenise(moved, data, chat, tmp_path / "cache")
    assert [store[number].key for number in range(ROWS)] == [RowKey(moved.path, n + 1) for n in range(ROWS)]
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("old_mark", [True, False])
def test_a_store_that_lost_tokens_is_made_again(tmp_path: Path, data: DataSettings, old_mark: bool) -> None:
    chat = ChatFormat(AutoTokenizer.from_pretrained(tmp_path / "tokenizer"))
    tokenise(data.train[0], data, chat, tmp_path / "cache")
    (directory,) = (tmp_path / "cache").iterdir()
    (directory / "tokens.bin").write_bytes(b"")
    if old_mark:
        (directory / "COMPLETE").write_bytes(b"")
    store = tokenise(data.train[0], data, chat, tmp_path / "cache")
    assert sum(len(store[number].token_T) for number in range(ROWS)) == store.report.tokens > 0
