"""`rollbook tokens RUN --at 398/7/3`: one row of training data as text, coloured by mismatch and masks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.text import Text

from rollbook.cli.output import console, printable
from rollbook.cli.token_tables import amount, count, print_top, share
from rollbook.tokens.chunks import Chunk, token_text
from rollbook.tokens.one_sequence import keys_of
from rollbook.tokens.top import TopTokens, mismatch_of, surprise_of, token_of

if TYPE_CHECKING:
    from rich.console import Console

    from rollbook.records.tokens import TokenSequence

_WEAKEST, _STRONGEST = 40, 200  # of the red behind a token
_LEAST_SCALE = 0.05  # a row in which all agree stays pale


class Shade(NamedTuple):
    """What is shown as red behind the tokens, and the value from which it is at its strongest."""

    name: str
    value_T: np.ndarray[Any, Any]
    strongest: float


def print_sequence(
    sequence: TokenSequence, steps: Sequence[int], most: int, token: int | None = None
) -> None:
    """The row as text, and the numbers of one token, or of those with the largest mismatch."""
    screen = console()
    screen.print(Text(printable(_head(sequence)), style="bold"))
    if len(steps) > 1:
        screen.print(
            f"trained in the optimiser steps {', '.join(map(str, steps))}; this is step "
            f"{sequence.optim_step}, --optim-step shows another"
        )
    shade = shade_of(sequence)
    screen.print(Text(_legend(sequence, shade, colours=screen.is_terminal), style="dim"))
    screen.print(coloured(sequence, shade, marks=not screen.is_terminal), soft_wrap=True)
    if token is not None:
        print_top(screen, [token_of(sequence, token)], "this token")
    else:
        _print_largest(screen, sequence, most)
    screen.print()


def _print_largest(screen: Console, sequence: TokenSequence, most: int) -> None:
    chunk = Chunk([sequence])
    for measure in (mismatch_of, surprise_of):
        top = TopTokens(most, measure)
        top.add(chunk)
        if top.tokens():
            print_top(screen, top.tokens())
            return


def shade_of(sequence: TokenSequence) -> Shade:
    """The mismatch KL, or where there is none -log of the probability; infinite where it was not finite."""
    for name, of, sign in (
        ("mismatch KL", "mismatch_kl", 1),
        ("-log pi", "trainer_logprobs", -1),
        ("-log mu", "inference_logprobs", -1),
    ):
        column = sequence.get(of)
        if column is not None:
            known_T = sequence.is_known(of) & sequence.sampled
            value_T = np.where(known_T & ~np.isfinite(column), np.inf, sign * column)
            finite = value_T[known_T & np.isfinite(value_T)]
            strongest = float(np.quantile(finite, 0.95)) if len(finite) else 0.0
            return Shade(name, np.where(known_T, value_T, np.nan), max(strongest, _LEAST_SCALE))
    return Shade("nothing", np.full(len(sequence), np.nan), 1.0)


def coloured(sequence: TokenSequence, shade: Shade, *, marks: bool) -> Text:
    """The text of the row. `marks` puts masked tokens between brackets, for where there are no colours."""
    masked = sequence.get("is_masked")
    text = Text()
    for offset, piece in enumerate(_pieces(sequence)):
        is_masked = masked is not None and bool(masked[offset])
        shown = printable(piece).replace("\n", "⏎\n")
        shown = f"⟦{shown}⟧" if marks and is_masked else shown
        text.append(shown, _style(sequence, shade, offset, is_masked))
    return text


def _pieces(sequence: TokenSequence) -> list[str]:
    """What to show for each token: a character that several share is shown at the first of them."""
    if sequence.text is None or sequence.text_offsets is None:
        return [f"{token_text(sequence, offset)} " for offset in range(len(sequence))]
    data = sequence.text.encode()
    places = [_character_after(data, place) for place in [*sequence.text_offsets.tolist(), len(data)]]
    return [data[start:end].decode() for start, end in pairwise(places)]


def _character_after(data: bytes, place: int) -> int:
    """The first byte of a character at a place or after it."""
    while place < len(data) and data[place] & 0xC0 == 0x80:
        place += 1
    return place


def _style(sequence: TokenSequence, shade: Shade, offset: int, is_masked: bool) -> str:
    if not sequence.sampled[offset]:
        return "dim"
    value = float(shade.value_T[offset])
    styles = ["underline bold"] if is_masked else []
    if value > 0:
        part = min(1.0, value / shade.strongest)
        red = round(_WEAKEST + (_STRONGEST - _WEAKEST) * part) if part > 0.1 else 0
        if red:
            styles.append(f"white on rgb({red},0,0)")
    return " ".join(styles)


def _head(sequence: TokenSequence) -> str:
    keys = ", ".join(f"{name} {value}" for name, value in keys_of(sequence).items() if value is not None)
    trained = int(sequence.sampled.sum())
    parts = [keys, f"{count(len(sequence))} tokens, {count(trained)} of them trained"]
    if (masked := sequence.get("is_masked")) is not None and trained:
        parts.append(f"{count(int(masked.sum()))} masked ({share(int(masked.sum()) / trained)})")
    for name, title in (("rewards", "reward"), ("advantages", "advantage")):
        column = sequence.get(name)
        if column is not None and trained:
            values = np.unique(column[sequence.sampled])
            if len(values) == 1:
                parts.append(f"{title} {amount(float(values[0]))}")
    return "; ".join(parts)


def _legend(sequence: TokenSequence, shade: Shade, *, colours: bool) -> str:
    has_masks = sequence.get("is_masked") is not None
    if not colours:
        return "between ⟦ and ⟧: left out by the loss" if has_masks else ""
    marked = "underlined: left out by the loss; " if has_masks else ""
    return f"red: {shade.name}, strongest from {amount(shade.strongest)}; {marked}dim: not sampled"
