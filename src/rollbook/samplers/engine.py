"""A queue of requests and a fixed number of slots: what is done leaves, and what waits enters.

The prompt of a first turn is computed at once, alone, and copied to every other request that has it (the
group of a task). All tokens after it go through the decoding step, sampled or not, so a later turn gets the
same bits whether its slot still holds the turns before or has to be given them again. Nothing that a request
gets depends on what else is there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rollbook.samplers.decode import Rows, Start
from rollbook.samplers.model import SampledModel
from rollbook.samplers.pool import SlotPool, Tokens
from rollbook.samplers.recorded import open_steps
from rollbook.samplers.slots import Slots
from rollbook.samplers.stops import Decode, StopStrings

# What is read of the keys and values ends at a multiple of this: with whole vectors to add up, a row's sums
# do not depend on how far the longest row is. The self-test finds out where they do (see `read_all`).
_BUCKET = 16
# On a GPU each such end is a step of its own to compile and record, so there are few of them.
_GPU_ENDS = 4
# There a step costs the same for one row and for all: shorter prompts go through the steps like what follows.
_GPU_PREFILL = 64
_GPU_STEPS_PER_LOOK = 8


class Wanted:
    """One sequence to sample.

    In a later turn of an episode, `first` tokens of the prompt are the prompt of the first turn, and
    `history` tokens are of the turns before this one.
    """

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
        first: int | None = None,
        history: int = 0,
    ) -> None:
        self.prompt = tuple(prompt)
        self.prefix = self.prompt[: (first or len(prompt)) - 1]  # its last token goes through the first step
        self.history: Tokens = self.prompt[: max(history - 1, 0)]  # the last sampled token was not fed
        self.seed, self.last = seed, len(prompt) - 1 + max_tokens
        self.temperature, self.top_k, self.top_p, self.stop = temperature, top_k, top_p, tuple(stop)
        self.abandoned = False  # set when nobody waits for it any more

    @property
    def is_filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1

    def start(self, position: int) -> Start:
        """How it begins in a slot that has the keys and values of the tokens before `position`."""
        known = self.prompt[position:]
        return Start(known, position, self.last, self.seed, self.temperature, self.top_k, self.top_p)


class Sampled(NamedTuple):
    token_ids: list[int]  # the stop token included
    logprobs: list[float]  # at the temperature, before top-k and top-p; at temperature 0 those of 1
    entropies: list[float]  # likewise
    finish_reason: str  # stop, length; not_finite: the model's logits are no numbers; abandoned


Done = tuple[Wanted, Sampled]
_ABANDONED = Sampled([], [], [], "abandoned")


class _Running:
    """What is known of a slot without asking the device."""

    def __init__(self, wanted: Wanted, decode: Decode, *, position: int, step: int) -> None:
        self.wanted = wanted
        self.position, self.entered = position, step
        self.seen = len(wanted.prompt) - 1  # up to here it has been searched for stop strings
        self.watch = StopStrings(wanted.stop, decode) if wanted.stop else None


class Engine:
    """`steps_per_look` steps run before the host asks what is done; that changes speed, not results. By
    default 1, on a GPU more."""

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        length: int,
        stop_ids: Sequence[int],
        decode: Decode,
        steps_per_look: int | None = None,
    ) -> None:
        on_gpu = model.device.type == "cuda"
        self._length = _up(length, _BUCKET)
        self._bucket = _up(-(-self._length // _GPU_ENDS), _BUCKET) if on_gpu else _BUCKET
        self._least_prefill = _GPU_PREFILL if on_gpu else 0
        self._slots = Slots(slots, self._length, model.device)
        self.model = SampledModel(model, self._slots)
        self._rows = Rows(slots, self._length, self.model.vocabulary, model.device)
        self._rows.stop_at(stop_ids)
        self._step = open_steps(self.model, self._slots, self._rows)
        self._stop_ids = frozenset(stop_ids)
        self._decode = decode
        self._steps_per_look = steps_per_look or (_GPU_STEPS_PER_LOOK if on_gpu else 1)
        self._waiting: deque[Wanted] = deque()
        self._running: dict[int, _Running] = {}
        self._pool = SlotPool(slots)
        self._spoiled: set[int] = set()  # slots whose cache has values that are no numbers
        self._steps = 0
        self._ahead = 0  # the furthest position of a running slot is this and the number of steps, at most
        self._filtered = False

    @property
    def size(self) -> tuple[int, int]:
        """The number of slots, and of tokens in each."""
        return self._slots.count, self._length

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def cache_bytes(self) -> int:
        return self._slots.cache_bytes

    def add(self, wanted: Wanted) -> None:
        if len(wanted.prefix) < self._least_prefill:
            wanted.prefix = ()
        self._waiting.append(wanted)

    def forget(self) -> None:
        """The weights have changed: no key or value is of use any more."""
        self._pool.lose_all()
        self.model.forget()

    def read_all(self) -> None:
        """Read the keys and values of whole slots: slower, and the same sums whoever is the longest."""
        self._bucket = self._length

    @torch.inference_mode()
    def step(self) -> list[Done]:
        """Fill free slots, decode, and return what is done."""
        dropped = self._admit()
        if not self._running:
            return dropped
        for _ in range(self._steps_per_look):
            end = min(_up(self._ahead + self._steps + 1, self._bucket), self._length)
            self._step(end, filtered=self._filtered)
            self._steps += 1
        return dropped + self._take_done()

    def _admit(self) -> list[Done]:
        """Let waiting requests in; returns those that nobody waits for any more."""
        dropped, entered = [], []
        to_fill: dict[Tokens, list[int]] = {}
        while self._pool.has_free and self._waiting:
            wanted = self._waiting.popleft()
            if wanted.abandoned:
                dropped.append((wanted, _ABANDONED))
                continue
            slot = self._pool.take_back(wanted.prefix, wanted.history) if wanted.history else None
            position = len(wanted.history)
            if slot is None:
                slot, position = self._pool.take(wanted.prefix), len(wanted.prefix)
                to_fill.setdefault(wanted.prefix, []).append(slot)
            self._running[slot] = _Running(wanted, self._decode, position=position, step=self._steps)
            entered.append(slot)
        for prefix, slots in to_fill.items():
            self._fill(prefix, slots)
        if entered:
            some = [self._running[slot] for slot in entered]
            self._rows.enter(entered, [running.wanted.start(running.position) for running in some])
            self._recount()
        return dropped

    def _fill(self, prefix: Tokens, slots: list[int]) -> None:
        """Put the keys and values of a prefix into these slots."""
        for slot in self._spoiled.intersection(slots):
            self._slots.clear(slot)
            self._spoiled.discard(slot)
        targets = [slot for slot in slots if not self._pool.has(slot, prefix)]
        source = self._pool.holder(prefix)
        if targets and prefix and source is None:
            source = targets[0]
            self.model.prefill(source, prefix)
        if source is not None:
            self._slots.copy(source, [slot for slot in targets if slot != source], len(prefix))
        for slot in targets:
            self._pool.fill(slot, prefix)

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
                running.seen = max(running.seen, position_S[slot])
        if not done:
            return []
        if early := [slot for slot in done if is_running_S[slot]]:
            self._rows.leave(early)
        lists = self._rows.sampled(list(done), max(done.values()) + 1)
        results = [
            self._leave(slot, last, rows, slot in at_string)
            for (slot, last), *rows in zip(done.items(), *lists, strict=True)
        ]
        self._recount()
        return results

    def _leave(self, slot: int, last: int, rows: Any, at_string: bool) -> Done:
        wanted = self._running.pop(slot).wanted
        tokens, logprobs, entropies = (row[len(wanted.prompt) : last + 1] for row in rows)
        reason = "stop" if at_string or (tokens and tokens[-1] in self._stop_ids) else "length"
        if not math.isfinite(sum(logprobs)):
            reason = "not_finite"
            self._spoiled.add(slot)
            self._pool.lose(slot)
        self._pool.give_back(slot, (*wanted.prompt, *tokens)[:last])  # the last has not been fed
        return wanted, Sampled(tokens, logprobs, entropies, reason)

    def _recount(self) -> None:
        """What depends on who is running."""
        running = self._running.values()
        self._ahead = max((one.position - one.entered for one in running), default=0)
        self._filtered = any(one.wanted.is_filtered for one in running)


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
