"""A queue of requests and a fixed number of slots: what is done leaves, and what waits enters.

A prompt is computed once and copied to every other request that has it (the group of a task), as long as a
slot still holds it. Requests that share a prompt need not come together, and nothing that a request gets
depends on whether they did.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rollbook.samplers.decode import Rows, Start, decode_step
from rollbook.samplers.model import SampledModel
from rollbook.samplers.slots import Slots
from rollbook.samplers.stops import Decode, StopStrings

# What is read of the keys and values ends at a multiple of this: with whole vectors to add up, a row's sums
# do not depend on how far the longest row is.
_BUCKET = 16


class Wanted:
    """One sequence to sample."""

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        seed: int,
        max_tokens: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
    ) -> None:
        self.prefix = tuple(prompt[:-1])  # computed before the first step, which feeds the last token
        last = len(self.prefix) + max_tokens
        self.start = Start(prompt[-1], len(self.prefix), last, seed, temperature, top_k, top_p)
        self.stop = tuple(stop)
        self.abandoned = False  # set when nobody waits for it any more


class Sampled(NamedTuple):
    token_ids: list[int]  # the stop token included
    logprobs: list[float]  # at the temperature, before top-k and top-p; at temperature 0 those of 1
    entropies: list[float]  # likewise
    finish_reason: str  # stop, length; not_finite: the model's logits are no numbers; abandoned


Done = tuple[Wanted, Sampled]
_ABANDONED = Sampled([], [], [], "abandoned")


class _Running:
    """What is known of a slot without asking the device."""

    def __init__(self, wanted: Wanted, decode: Decode) -> None:
        self.wanted = wanted
        self.longest = self.seen = wanted.start.position  # it can have come so far; so far it was looked at
        self.watch = StopStrings(wanted.stop, decode) if wanted.stop else None


class Engine:
    """`steps_per_look` steps run before the host asks what is done; that changes speed, not results."""

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        length: int,
        stop_ids: Sequence[int],
        decode: Decode,
        steps_per_look: int = 1,
    ) -> None:
        length = _up(length)
        self._slots = Slots(slots, length, model.device)
        self.model = SampledModel(model, self._slots)
        self._rows = Rows(slots, length, self.model.vocabulary, model.device)
        self._rows.stop_at(stop_ids)
        self._stop_ids = frozenset(stop_ids)
        self._decode, self._steps_per_look = decode, steps_per_look
        self._waiting: deque[Wanted] = deque()
        self._running: dict[int, _Running] = {}
        self._free = list(range(slots))[::-1]
        self._held: dict[int, tuple[int, ...]] = {}  # slot: the prefix that its cache begins with
        self._holders: dict[tuple[int, ...], set[int]] = {}
        self._spoiled: set[int] = set()  # slots whose cache has values that are no numbers

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, wanted: Wanted) -> None:
        self._waiting.append(wanted)

    def forget(self) -> None:
        """The weights have changed: no key or value is of use any more."""
        self._held.clear()
        self._holders.clear()
        self.model.forget()

    @torch.inference_mode()
    def step(self) -> list[Done]:
        """Fill free slots, decode, and return what is done."""
        dropped = self._admit()
        if not self._running:
            return dropped
        starts = [running.wanted.start for running in self._running.values()]
        filtered = any(start.top_k or start.top_p < 1 for start in starts)
        for _ in range(self._steps_per_look):
            end = _up(max(running.longest for running in self._running.values()) + 1)
            decode_step(self.model.logits, self._slots, self._rows, end, filtered=filtered)
            for running in self._running.values():
                running.longest = min(running.longest + 1, running.wanted.start.last)
        return dropped + self._take_done()

    def _admit(self) -> list[Done]:
        """Let waiting requests in; returns those that nobody waits for any more."""
        dropped = []
        entered: dict[tuple[int, ...], list[int]] = {}
        while self._free and self._waiting:
            wanted = self._waiting.popleft()
            if wanted.abandoned:
                dropped.append((wanted, _ABANDONED))
                continue
            slot = self._free.pop()
            if slot in self._spoiled:
                self._spoiled.remove(slot)
                self._slots.clear(slot)
                self._overwrite(slot)
            elif self._held.get(slot) != wanted.prefix:
                self._overwrite(slot)
            self._running[slot] = _Running(wanted, self._decode)
            entered.setdefault(wanted.prefix, []).append(slot)
        for prefix, slots in entered.items():
            self._fill(prefix, slots)
        if entered:
            slots = [slot for group in entered.values() for slot in group]
            self._rows.enter(slots, [self._running[slot].wanted.start for slot in slots])
        return dropped

    def _overwrite(self, slot: int) -> None:
        prefix = self._held.pop(slot, None)
        if prefix is not None:
            self._holders[prefix].discard(slot)
            if not self._holders[prefix]:
                del self._holders[prefix]

    def _fill(self, prefix: tuple[int, ...], slots: list[int]) -> None:
        """Put the keys and values of a prefix into these slots."""
        targets = [slot for slot in slots if slot not in self._held]
        if not targets or not prefix:
            return
        holders = self._holders.setdefault(prefix, set())
        source = next(iter(holders), None)
        if source is None:
            source = targets[0]
            self.model.prefill(source, prefix)
            targets = targets[1:]
        self._slots.copy(source, targets, len(prefix))
        for slot in (source, *targets):
            holders.add(slot)
            self._held[slot] = prefix

    def _take_done(self) -> list[Done]:
        is_running_S, position_S = self._rows.progress()
        done: dict[int, int] = {}  # slot: where the last token is that counts
        at_string = set()
        for slot, running in self._running.items():
            if not is_running_S[slot] or running.wanted.abandoned:
                done[slot] = position_S[slot]
            if running.watch is not None:
                new = self._rows.tokens(slot, running.seen + 1, position_S[slot] + 1)
                if (count := running.watch.add(new)) is not None:
                    done[slot] = running.seen + count
                    at_string.add(slot)
                running.seen = position_S[slot]
        if not done:
            return []
        if early := [slot for slot in done if is_running_S[slot]]:
            self._rows.leave(early)
        lists = self._rows.sampled(list(done), max(done.values()) + 1)
        return [
            self._leave(slot, last, rows, slot in at_string)
            for (slot, last), *rows in zip(done.items(), *lists, strict=True)
        ]

    def _leave(self, slot: int, last: int, rows: Any, at_string: bool) -> Done:
        wanted = self._running.pop(slot).wanted
        self._free.append(slot)
        tokens, logprobs, entropies = (row[wanted.start.position + 1 : last + 1] for row in rows)
        reason = "stop" if at_string or tokens[-1] in self._stop_ids else "length"
        if not math.isfinite(sum(logprobs)):
            reason = "not_finite"
            self._spoiled.add(slot)
        return wanted, Sampled(tokens, logprobs, entropies, reason)


def _up(length: int) -> int:
    return -(-length // _BUCKET) * _BUCKET
