"""One decoding step of every slot: forward pass, draw, bookkeeping. Nothing in it waits for the host.

`Rows` is all that a step reads and changes, tensors that stay where they are, so a step can be recorded as a
CUDA graph and run again (`recorded.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollbook.samplers.noise import exponential, seed_words, token_words
from rollbook.samplers.slots import Slots

Forward = Callable[[Tensor, Tensor], Tensor]  # token and position, S x 1 each, to the logits S x V

Draw = Callable[[Tensor, "Rows", bool], None]


class Start(NamedTuple):
    """What a slot gets when a request enters it; the cache has the tokens before `position`."""

    known: Sequence[int]  # the tokens of the prompt from there on
    position: int
    last: int  # the position of the last token that may be sampled
    seed: int
    temperature: float  # 0: the most likely token
    top_k: int = 0  # 0: all
    top_p: float = 1.0


class Rows:
    """The state of each slot on the device, and what was sampled, by position."""

    def __init__(self, count: int, length: int, vocabulary: int, device: torch.device) -> None:
        # token, position, first and last that is sampled, running, and two words of the seed
        self._whole_S7 = torch.zeros((count, 7), dtype=torch.long, device=device)
        self._real_S4 = torch.ones((count, 4), device=device)  # divisor, is sampled, top k, top p
        self.token_SL = torch.zeros((count, length + 1), dtype=torch.long, device=device)
        self.logprob_SL = torch.zeros((count, length + 1), device=device)
        self.entropy_SL = torch.zeros((count, length + 1), device=device)
        self.words_V = token_words(vocabulary, device)
        self.stops_V = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self.device = device

    def stop_at(self, token_ids: Sequence[int]) -> None:
        self.stops_V.zero_()
        self.stops_V[torch.tensor(list(token_ids), dtype=torch.long, device=self.device)] = True

    def enter(self, slots: Sequence[int], starts: Sequence[Start]) -> None:
        whole, real = [], []
        for slot, (known, position, last, seed, *_), start in zip(slots, starts, starts, strict=True):
            first = position + len(known)
            whole.append([known[0], position, first, last, 1, *seed_words(seed)])
            if len(known) > 1:
                self.token_SL[slot, position:first] = torch.tensor(known, device=self.device)
            greedy = start.temperature == 0
            divisor = 1.0 if greedy else start.temperature
            real.append([divisor, float(not greedy), float(start.top_k), start.top_p])
        at = torch.tensor(slots, device=self.device)
        self._whole_S7[at] = torch.tensor(whole, device=self.device)
        self._real_S4[at] = torch.tensor(real, device=self.device)

    def leave(self, slots: Sequence[int]) -> None:
        """Stop these before they are done."""
        self._whole_S7[torch.tensor(slots, device=self.device), 4] = 0

    def progress(self) -> tuple[list[int], list[int]]:
        """Which slots are running, and the position that each has reached."""
        position_S, _, _, running_S = self._whole_S7[:, 1:5].T.tolist()
        return running_S, position_S

    def tokens(self, slot: int, start: int, end: int) -> list[int]:
        tokens: list[int] = self.token_SL[slot, start:end].tolist()
        return tokens

    def sampled(self, slots: Sequence[int], end: int) -> list[list[list[Any]]]:
        """Tokens, logprobs and entropies of these slots by position."""
        slot = torch.tensor(slots, device=self.device)
        return [all_SL[slot, :end].tolist() for all_SL in (self.token_SL, self.logprob_SL, self.entropy_SL)]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Take back the steps of this block. What they wrote at the next position is written again."""
        before = self._whole_S7.clone()
        try:
            yield
        finally:
            self._whole_S7.copy_(before)

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """token, position, first, last, running; changed in place."""
        return self._whole_S7[:, :5].unbind(1)

    @property
    def words_S2(self) -> Tensor:
        return self._whole_S7[:, 5:].to(torch.int32)

    @property
    def options(self) -> tuple[Tensor, ...]:
        """divisor, is sampled, top k, top p."""
        return self._real_S4.unbind(1)


def decode_step(
    forward: Forward, slots: Slots, rows: Rows, end: int, *, filtered: bool = False, draw: Draw | None = None
) -> None:
    """Take the next token of every running row: the prompt's, or a draw. `end` is above all their positions.

    `filtered` says that a row asks for top-k or top-p; the result of the others does not depend on it.
    """
    token_S, position_S, *_ = rows.columns
    slots.decode(position_S, end)
    logits_SV = forward(token_S[:, None], position_S[:, None])
    (draw or draw_tokens)(logits_SV, rows, filtered)


def draw_tokens(logits_SV: Tensor, rows: Rows, filtered: bool) -> None:
    """From logits to the next token of every row, and its bookkeeping."""
    token_S, position_S, first_S, last_S, running_S = rows.columns
    divisor_S, sampled_S, top_k_S, top_p_S = rows.options
    logprob_SV = (logits_SV.float() / divisor_S[:, None]).log_softmax(-1)
    p_SV = logprob_SV.exp()
    entropy_S = -(p_SV * logprob_SV.clamp(min=-1e4)).sum(-1)  # where p is 0, 0 times minus infinity is none
    if filtered:
        p_SV = p_SV * likely(p_SV, top_k_S, top_p_S)
    noise_SV = exponential(rows.words_S2, position_S, rows.words_V)
    race_SV = p_SV / noise_SV.masked_fill_(sampled_S[:, None] == 0, 1.0)
    place_S1 = position_S[:, None] + 1
    # Tokens that the prompt has are kept, whatever is drawn in their place.
    is_known_S = place_S1[:, 0] < first_S
    new_S = torch.where(is_known_S, rows.token_SL.gather(1, place_S1)[:, 0], race_SV.argmax(-1))
    rows.token_SL.scatter_(1, place_S1, new_S[:, None])
    rows.logprob_SL.scatter_(1, place_S1, logprob_SV.gather(1, new_S[:, None]))
    rows.entropy_SL.scatter_(1, place_S1, entropy_S[:, None])
    # A row that has stopped keeps its token and position, and so computes the same step again.
    token_S.copy_(torch.where(running_S > 0, new_S, token_S))
    position_S += running_S
    running_S *= (is_known_S | ~rows.stops_V[new_S]) & (position_S < last_S)


def likely(p_SV: Tensor, top_k_S: Tensor, top_p_S: Tensor) -> Tensor:
    """Which tokens are among the k most likely, and among the likeliest that sum up to p. Never none."""
    sorted_SV, order_SV = p_SV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(p_SV.shape[1], device=p_SV.device)
    before_SV = sorted_SV.cumsum(-1) - sorted_SV  # what the likelier ones have
    kept_SV = (top_k_S[:, None] == 0) | (rank_V < top_k_S[:, None])
    kept_SV &= (top_p_S[:, None] >= 1) | (before_SV < top_p_S[:, None])
    kept_SV[:, 0] = True
    return torch.zeros_like(kept_SV).scatter_(1, order_SV, kept_SV)
