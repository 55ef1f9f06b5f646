"""Which slots are free, and which tokens every slot has keys and values of.

A slot is given back with what it holds. The next turn of the same episode finds it there, unless another
request has taken the slot meanwhile: the one that was given back longest ago goes first.
"""

from __future__ import annotations

from collections import defaultdict

Tokens = tuple[int, ...]


class SlotPool:
    """A slot's tokens begin with the `prefix` that was computed at once; those after it came one by one.

    Where the two meet is part of what a slot holds: the same tokens computed otherwise have other last bits.
    """

    def __init__(self, count: int) -> None:
        self._free: dict[int, None] = dict.fromkeys(
            range(count)
        )  # in the order in which they were given back
        self._held: dict[int, tuple[Tokens, Tokens]] = {}  # slot: prefix, and all tokens where it is free
        self._with_prefix: defaultdict[Tokens, set[int]] = defaultdict(set)
        self._kept: defaultdict[tuple[Tokens, Tokens], set[int]] = defaultdict(set)  # free slots

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def take_back(self, prefix: Tokens, tokens: Tokens) -> int | None:
        """A free slot that holds exactly these tokens."""
        slot = next(iter(self._kept.get((prefix, tokens), ())), None)
        if slot is not None:
            del self._free[slot]
            self._unkeep(slot)
        return slot

    def take(self, prefix: Tokens) -> int:
        """The free slot that was given back longest ago; it loses what it holds, but for this prefix."""
        slot = next(iter(self._free))
        del self._free[slot]
        if self.has(slot, prefix):
            self._unkeep(slot)
        else:
            self.lose(slot)
        return slot

    def has(self, slot: int, prefix: Tokens) -> bool:
        return slot in self._held and self._held[slot][0] == prefix

    def lose(self, slot: int) -> None:
        """What the slot holds is of no use any more."""
        if slot in self._held:
            self._unkeep(slot)
            prefix, _ = self._held.pop(slot)
            self._with_prefix[prefix].discard(slot)
            if not self._with_prefix[prefix]:
                del self._with_prefix[prefix]

    def fill(self, slot: int, prefix: Tokens) -> None:
        """The slot has been given this prefix."""
        self._held[slot] = (prefix, ())
        self._with_prefix[prefix].add(slot)

    def holder(self, prefix: Tokens) -> int | None:
        """A slot, free or not, whose tokens begin with this prefix."""
        return next(iter(self._with_prefix.get(prefix, ())), None)

    def give_back(self, slot: int, tokens: Tokens) -> None:
        self._free[slot] = None
        if slot in self._held:
            held = (self._held[slot][0], tokens)
            self._held[slot] = held
            self._kept[held].add(slot)

    def lose_all(self) -> None:
        for slot in list(self._held):
            self.lose(slot)

    def _unkeep(self, slot: int) -> None:
        held = self._held[slot]
        if slot in self._kept.get(held, ()):
            self._kept[held].discard(slot)
            if not self._kept[held]:
                del self._kept[held]
