"""Text and byte offsets of tokens, for the kinds of vocabulary that models have."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollbook.tiny import write_tiny_tokenizer
from rollbook.train.token_text import TokenText

TEXT = "Grüße, 日本 🎲 and naïve text."


def byte_level() -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"]
    )
    backend.train_from_iterator(["and text and text naïve"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def metaspace() -> Any:
    words = ["▁and", "▁", "a", "n", "d", "▁text", "t", "e", "x"]
    vocabulary = {token: number for number, token in enumerate(["<unk>", "</s>", *words])}
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


class RowText(NamedTuple):
    text: str
    offset_T: np.ndarray[Any, Any]


def row_text(tokenizer: Any, ids: list[int]) -> RowText:
    """The text of one row."""
    made = TokenText(tokenizer).of(np.array(ids, np.int32), np.array([0, len(ids)]))
    return RowText(made.texts[0], made.offset_F)


def pieces(made: RowText, count: int) -> list[bytes]:
    data, ends = made.text.encode(), [*made.offset_T.tolist(), len(made.text.encode())]
    return [data[ends[place] : ends[place + 1]] for place in range(count)]


@pytest.mark.parametrize("make", [byte_level, metaspace], ids=lambda make: make.__name__)
def test_pieces_join_to_the_text(make: Any) -> None:
    tokenizer = make()
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    ids += [tokenizer.eos_token_id]
    made = row_text(tokenizer, ids)
    assert made.text.strip() == TEXT + tokenizer.eos_token
    assert b"".join(pieces(made, len(ids))).decode() == made.text


_BYTE_LEVEL = byte_level()


@given(ids=st.lists(st.integers(0, len(_BYTE_LEVEL) - 1), max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_row_of_bytes_has_a_text_and_places_in_it(ids: list[int]) -> None:
    """Rows of a policy are cut off anywhere, and may hold bytes that make no character."""
    tokenizer = _BYTE_LEVEL
    made = row_text(tokenizer, ids)
    size = len(made.text.encode())
    places = [*made.offset_T.tolist(), size] if ids else [0]
    assert places[0] == 0 and places == sorted(places) and places[-1] == size
    if ids:
        assert b"".join(pieces(made, len(ids))).decode() == made.text
    assert made.text == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@given(rows=st.lists(st.lists(st.integers(0, len(_BYTE_LEVEL) - 1), max_size=8), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_rows_together_have_the_texts_that_each_has_alone(rows: list[list[int]]) -> None:
    """A character that begins at the end of a row does not go on in the next one."""
    text = TokenText(_BYTE_LEVEL)
    for _ in range(2):  # with pieces to look up, and without
        bound_R = np.cumsum([0, *map(len, rows)])
        made = text.of(np.array([token for row in rows for token in row], np.int32), bound_R)
        alone = [row_text(_BYTE_LEVEL, row) for row in rows]
        assert made.texts == [one.text for one in alone]
        assert made.offset_F.tolist() == [place for one in alone for place in one.offset_T.tolist()]


def test_a_character_that_is_cut_off_moves_the_places_behind_it() -> None:
    tokenizer = byte_level()
    dice = tokenizer.encode("🎲", add_special_tokens=False)
    letter = tokenizer.encode("x", add_special_tokens=False)
    assert len(dice) == 4  # one token a byte
    made = row_text(tokenizer, [*letter, *dice[:2], *letter, *dice, *letter])
    assert made.text == "x\N{REPLACEMENT CHARACTER}x🎲x"
    assert made.offset_T.tolist() == [0, 1, 1, 4, 5, 6, 7, 8, 9]


def test_a_tokenizer_of_characters(tmp_path: Path) -> None:
    tokenizer = write_tiny_tokenizer(tmp_path, "abcü ", pieces=["<call>"])
    ids = tokenizer.encode("<|user|>ab ü<call><|im_end|>", add_special_tokens=False)
    made = row_text(tokenizer, ids)
    assert made.text == "<|user|>ab ü<call><|im_end|>"
    assert [piece.decode() for piece in pieces(made, len(ids))] == [
        "<|user|>", "a", "b", " ", "ü", "<call>", "<|im_end|>"
    ]  # fmt: skip


def test_ids_without_a_token_are_shown_as_such(tmp_path: Path) -> None:
    tokenizer = write_tiny_tokenizer(tmp_path, "ab")
    made = row_text(tokenizer, [10_000])
    assert made.text == "\N{REPLACEMENT CHARACTER}"
